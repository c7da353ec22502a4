# SPDX-License-Identifier: Apache-2.0
"""Finds the pipeline that serves a checkpoint.

A new family adds one line to `PIPELINES`. Out-of-tree families call `register_pipeline` from a
`vllm.general_plugins` entry point.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from transformers import PretrainedConfig
from vllm.plugins import load_general_plugins
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_omni.config.checkpoint import DIFFUSERS, load_hf_config
from vllm_omni.config.pipeline import Pipeline
from vllm_omni.config.problems import did_you_mean
from vllm_omni.config.schema import DeployConfig
from vllm_omni.errors import OmniConfigError
from vllm_omni.pipelines.diffusers import diffusers_pipeline

T = TypeVar("T")

THINKER_ONLY_SUFFIX = "_thinker_only"


class Registry(Generic[T]):
    """Objects by name. An object may be given by its dotted path and is then imported when used."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, T | str] = {}

    def register(self, name: str, entry: T | str, *, override: bool = False) -> None:
        """Add an object, or its dotted path `module.attribute`."""
        if name in self._entries and not override and self._entries[name] != entry:
            raise OmniConfigError(f"{self._kind} {name!r} is already registered")
        self._entries[name] = entry

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._entries))

    def __getitem__(self, name: str) -> T:
        entry = self._entries.get(name)
        if entry is None:
            raise OmniConfigError(
                f"unknown {self._kind} {name!r}{did_you_mean(name, self._entries)} "
                f"(known: {', '.join(self.names())})"
            )
        return resolve_obj_by_qualname(entry) if isinstance(entry, str) else entry


@dataclass(frozen=True, slots=True)
class _Builtin:
    """A family of this package.

    Attributes:
        module: File in `vllm_omni.pipelines`, and name of the pipeline.
        architectures: As the pipeline's own; here so that it need not be imported to be found.
        model_type: Of checkpoints whose config has no `architectures`.
        thinker_only: The file has a `THINKER_ONLY` pipeline, too.
    """

    module: str
    architectures: tuple[str, ...]
    model_type: str
    thinker_only: bool = False


BUILTINS = (
    _Builtin("higgs_audio_v2", ("HiggsAudioV2ForConditionalGeneration",), "higgs_audio_v2"),
    _Builtin(
        "higgs_multimodal_qwen3",
        ("HiggsMultimodalQwen3ForConditionalGeneration",),
        "higgs_multimodal_qwen3",
    ),
    _Builtin("moss_tts", ("MossTTSDelayModel",), "moss_tts_delay"),
    _Builtin(
        "qwen3_omni_moe",
        ("Qwen3OmniMoeForConditionalGeneration",),
        "qwen3_omni_moe",
        thinker_only=True,
    ),
    _Builtin("csm", ("CsmForConditionalGeneration",), "csm"),
    _Builtin("vibevoice", ("VibeVoiceForConditionalGeneration",), "vibevoice"),
    _Builtin("voxcpm2", ("VoxCPM2ForConditionalGeneration",), "voxcpm2"),
    _Builtin("dia", ("DiaForConditionalGeneration",), "dia"),
    _Builtin("qwen3_tts", ("Qwen3TTSForConditionalGeneration",), "qwen3_tts"),
    _Builtin("voxtral_tts", ("VoxtralTTSForConditionalGeneration",), "voxtral_tts"),
    _Builtin(
        "qwen2_5_omni",
        ("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel"),
        "qwen2_5_omni",
        thinker_only=True,
    ),
)

PIPELINES: Registry[Pipeline] = Registry("pipeline")
_by_architecture: dict[str, str] = {}
_by_model_type: dict[str, str] = {}


def register_pipeline(
    pipeline: Pipeline | str,
    *,
    name: str | None = None,
    architectures: Iterable[str] = (),
    model_types: Iterable[str] = (),
    override: bool = False,
) -> None:
    """Make a pipeline known.

    Args:
        pipeline: It, or its dotted path `module.attribute`, imported when first used.
        name: Its name; needed with a dotted path.
        architectures: Checkpoint architectures that it serves; default: the pipeline's own.
        model_types: `model_type`s of checkpoints without architectures.
        override: Replace a pipeline of the same name or for the same checkpoints.
    """
    if isinstance(pipeline, Pipeline):
        name = name or pipeline.name
        architectures = tuple(architectures) or pipeline.architectures
    if name is None:
        raise OmniConfigError(f"register_pipeline({pipeline!r}): a dotted path needs a name")
    for table, keys in ((_by_architecture, architectures), (_by_model_type, model_types)):
        for key in keys:
            if table.get(key, name) != name and not override:
                raise OmniConfigError(
                    f"pipeline {name!r}: {key!r} is already served by {table[key]!r}"
                )
    PIPELINES.register(name, pipeline, override=override)
    _by_architecture.update(dict.fromkeys(architectures, name))
    _by_model_type.update(dict.fromkeys(model_types, name))


def resolve_pipeline(
    model: str,
    deploy: DeployConfig | None = None,
    *,
    hf_config: PretrainedConfig | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    model_class_name: str | None = None,
) -> Pipeline:
    """The pipeline for a checkpoint.

    The deploy config's `pipeline` decides, else the checkpoint's architecture, else its model type.
    A checkpoint without sound (`enable_audio_output: false`) gets the family's thinker alone.

    Args:
        model: Folder or hub name.
        deploy: The deploy config, if there is one.
        hf_config: The checkpoint's config, if it has been loaded already.
        trust_remote_code: For loading it.
        revision: For loading it.
        model_class_name: Diffusers class, for a checkpoint of a diffusers pipeline.
    """
    if hf_config is None:
        hf_config = load_hf_config(model, trust_remote_code=trust_remote_code, revision=revision)
    if hf_config.model_type == DIFFUSERS:
        return diffusers_pipeline(_pipeline_class(hf_config, model_class_name))
    silent = hf_config.to_dict().get("enable_audio_output") is False
    explicit = deploy.pipeline if deploy is not None else None
    if explicit is not None:
        if explicit not in PIPELINES:
            load_general_plugins()
        if silent and explicit + THINKER_ONLY_SUFFIX in PIPELINES:
            raise OmniConfigError(
                f"pipeline = {explicit!r}: the checkpoint {model!r} cannot speak "
                f"(enable_audio_output: false); use {explicit + THINKER_ONLY_SUFFIX!r}"
            )
        return PIPELINES[explicit]
    name = _find(hf_config)
    if name is None:
        load_general_plugins()
        name = _find(hf_config)
    if name is None:
        raise OmniConfigError(
            f"model {model!r}: no pipeline serves architectures {hf_config.architectures} "
            f"(model_type {hf_config.model_type!r}); known pipelines: "
            f"{', '.join(PIPELINES.names())}; name one by the deploy key 'pipeline'"
        )
    if silent and name + THINKER_ONLY_SUFFIX in PIPELINES:
        name += THINKER_ONLY_SUFFIX
    return PIPELINES[name]


def _pipeline_class(hf_config: PretrainedConfig, class_name: str | None) -> str:
    """The diffusers class that a deployment names, or else the checkpoint."""
    (own,) = hf_config.architectures or ("",)
    return class_name or own


def _find(hf_config: PretrainedConfig) -> str | None:
    for architecture in hf_config.architectures or ():
        if architecture in _by_architecture:
            return _by_architecture[architecture]
    return _by_model_type.get(hf_config.model_type)


def _register_builtins() -> None:
    for family in BUILTINS:
        path = f"vllm_omni.pipelines.{family.module}"
        register_pipeline(
            f"{path}.PIPELINE",
            name=family.module,
            architectures=family.architectures,
            model_types=(family.model_type,),
        )
        if family.thinker_only:
            register_pipeline(f"{path}.THINKER_ONLY", name=family.module + THINKER_ONLY_SUFFIX)


_register_builtins()
