# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni: serving for models that take and make any mix of text, image, audio and video."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.generation import OmniDiffusionSamplingParams
    from vllm_omni.outputs import OmniRequestOutput
    from vllm_omni.speech.request import Reference, SpeechRequest

__version__ = version("vllm-omni")

_PUBLIC = {
    "AsyncOmni": "vllm_omni.entrypoints.async_omni",
    "Omni": "vllm_omni.entrypoints.omni",
    "OmniDiffusionSamplingParams": "vllm_omni.generation",
    "OmniRequestOutput": "vllm_omni.outputs",
    "Reference": "vllm_omni.speech.request",
    "SpeechRequest": "vllm_omni.speech.request",
}

__all__ = [
    "AsyncOmni",
    "Omni",
    "OmniDiffusionSamplingParams",
    "OmniRequestOutput",
    "Reference",
    "SpeechRequest",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import what is public when it is asked for: vLLM takes seconds to import."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
