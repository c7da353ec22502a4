# SPDX-License-Identifier: Apache-2.0
"""What row-driven model classes tell vLLM of themselves."""

from typing import Any


class RowFed:
    """A vLLM model class whose inputs are rows; a mix-in."""

    @classmethod
    def get_model_state_cls(cls) -> type[Any]:
        """vLLM's Model Runner V2 asks for it; that runner, and so the class, needs Triton."""
        from vllm_omni.platforms.cuda.model_state import RowModelState

        return RowModelState
