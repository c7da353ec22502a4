# SPDX-License-Identifier: Apache-2.0
"""What vLLM loads through the `vllm.general_plugins` entry point, in every process."""


def register() -> None:
    """Register what vLLM does not know: nothing yet."""
