# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says about itself."""

from pathlib import Path
from typing import Any

import httpx
import httpx2
from huggingface_hub import is_offline_mode
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled, StrictDataclassError
from transformers import PretrainedConfig

from vllm_omni.config.diffusers import MODEL_INDEX, model_index
from vllm_omni.config.hf import own_config, register_configs
from vllm_omni.errors import OmniConfigError

DIFFUSERS = "diffusers"
"""`model_type` of a checkpoint of a diffusers pipeline."""


def load_hf_config(
    model: str, *, trust_remote_code: bool = False, revision: str | None = None
) -> PretrainedConfig:
    """The checkpoint's whole Hugging Face config.

    Args:
        model: A folder or a name on the hub.
        trust_remote_code: Run configuration code that comes with the checkpoint.
        revision: Branch, tag or commit on the hub.

    Raises:
        OmniConfigError: There is none, or it is of a kind that is not supported.
    """
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.repo_utils import file_or_path_exists

    _check_folder(model)
    register_configs()
    try:
        if not file_or_path_exists(model, "config.json", revision) and file_or_path_exists(
            model, MODEL_INDEX, revision
        ):
            return _index_config(model_index(model, revision))
        return own_config(get_config(model, trust_remote_code, revision=revision))
    except OmniConfigError:
        raise
    except (httpx2.TransportError, OfflineModeIsEnabled) as error:
        raise OmniConfigError(
            f"model {model!r}: it is no folder here, and the hub cannot be reached to look for it "
            f"there: {error}"
        ) from error
    # Config classes fail with whatever a value of a wrong kind leads to.
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        StrictDataclassError,
        httpx.HTTPError,
        HTTPError,  # of the HTTP library that the hub's uses
    ) as error:
        raise OmniConfigError(
            f"model {model!r}: its config cannot be loaded: {_reason(model, error)}"
        ) from error


def _check_folder(model: str) -> None:
    """See that a path is a checkpoint's folder, before it is taken for a name on the hub.

    Raises:
        OmniConfigError: It is not; says what is missing.
    """
    folder = Path(model)
    if folder.is_dir():
        if not any((folder / name).exists() for name in _CONFIGS):
            raise OmniConfigError(
                f"model {model!r}: there is no config.json or {MODEL_INDEX} in this folder"
            )
    elif not folder.exists() and "://" not in model and _is_path(model):
        raise OmniConfigError(f"model {model!r}: there is no such folder")


def _is_path(model: str) -> bool:
    """Whether this is no name that the hub could have (`name` or `owner/name`)."""
    return model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") > 1


_CONFIGS = ("config.json", MODEL_INDEX, "params.json")
"""What a checkpoint says itself by; the last one is Mistral's."""


def _reason(model: str, error: Exception) -> str:
    """An error in one line; one about a name that may be the hub's says whether that was asked."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if is_offline_mode() and not Path(model).exists():
        return f"it is no folder here, and HF_HUB_OFFLINE keeps the hub from being asked: {reason}"
    return reason


def checkpoint_dtype(hf_config: PretrainedConfig, config_name: str | None) -> str | None:
    """The type that the weights of a stage were saved in, if the config says it.

    Args:
        hf_config: The whole config.
        config_name: Name of the stage's own config within it.
    """
    whole = hf_config.to_dict()
    own = whole.get(config_name) if config_name else None
    dtype = (own or {}).get("dtype") or whole.get("dtype")
    return str(dtype).removeprefix("torch.") if dtype else None


def _index_config(index: dict[str, Any]) -> PretrainedConfig:
    """A diffusers checkpoint has no config of its own but the class of its pipeline."""
    config = PretrainedConfig(architectures=[index["_class_name"]])
    config.model_type = DIFFUSERS
    return config
