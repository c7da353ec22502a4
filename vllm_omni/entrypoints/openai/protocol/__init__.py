# SPDX-License-Identifier: Apache-2.0
"""Bodies of the HTTP API: OpenAI's shape with vLLM-Omni's fields beside it."""
