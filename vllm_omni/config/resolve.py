# SPDX-License-Identifier: Apache-2.0
"""One stage's settings from all layers, and the checks that need them all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from transformers import PretrainedConfig
from vllm.logger import init_logger

from vllm_omni.config.checkpoint import checkpoint_dtype
from vllm_omni.config.devices import Host, assign_devices
from vllm_omni.config.engine_args import engine_arg_types
from vllm_omni.config.flags import Flags
from vllm_omni.config.load import LoadedDeploy
from vllm_omni.config.merge import Layer, Setting, deep_merge, fold
from vllm_omni.config.pipeline import Pipeline, Stage
from vllm_omni.config.plan import PIPELINE_SETTINGS, DiffusionStageConfig, StagePlan
from vllm_omni.config.ranks import check_ranks
from vllm_omni.config.sampling import SUBTALKER, SamplingError, check_subtalker, sampling_params
from vllm_omni.config.schema import StageKeys, StageOverride, engines_of
from vllm_omni.errors import OmniConfigError

logger = init_logger(__name__)

PLATFORM_DEFAULTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "cpu": {
        "ar": {"devices": "cpu", "enforce_eager": True, "async_scheduling": False},
        "diffusion": {"devices": "cpu", "enforce_eager": True},
    },
}
"""By platform and engine, below the deploy file. On a CPU there are no graphs to capture, and
vLLM's model runner for it does not schedule ahead."""

FALLBACK: Mapping[str, Any] = {"devices": "0", "num_replicas": 1}

WORLD_SIZES: Mapping[str, tuple[str, ...]] = {
    "ar": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    "diffusion": ("tensor_parallel_size", "cfg_parallel_size", "ulysses_degree"),
}
"""By engine, the keys whose product is the number of a replica's devices."""

_NOT_GIVEN: Any = object()
_SAMPLING = frozenset({"default_sampling_params", "subtalker_sampling_params"})
PLAN_KEYS = _SAMPLING | {
    "devices",
    "num_replicas",
    "max_num_queued_reqs",
    "env",
    "input_connectors",
    "output_connectors",
}
"""Stage keys that the plan holds itself; the others are an engine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInputs:
    """Everything that decides about one stage.

    Attributes:
        position: Index of the stage's entry in the deploy file's `stages`, if it has one.
        file_override: The deploy file's `stage_overrides` for it.
        sampling: From `--default-sampling-params`.
        overrides: From `--stage-overrides` and `stage_<id>_<key>`.
    """

    model: str
    pipeline: Pipeline
    stage: Stage
    stage_id: int
    hf_config: PretrainedConfig
    host: Host
    deploy: LoadedDeploy
    position: int | None
    file_override: StageOverride | None
    flags: Flags
    sampling: Mapping[str, Any]
    overrides: tuple[StageOverride, ...]

    @property
    def where(self) -> str:
        """Names the stage in errors."""
        return f"stage {self.stage_id} ({self.stage.name})"


def resolve_stage(inputs: StageInputs) -> StagePlan:
    """The plan of one stage; its connectors are only those given by name (see `wiring.py`)."""
    layers = _layers(inputs)
    settings = fold(layers)
    stage = inputs.stage
    num_replicas = _value(settings, "num_replicas")
    if stage.engine == "ar":
        _check_sampling(inputs, layers, _sampling(settings))
        check_ranks(inputs.where, stage, inputs.hf_config, settings)
    _warn_without_effect(inputs, settings)
    ar_args: dict[str, Any] = {}
    diffusion = None
    if stage.engine == "ar":
        ar_args = _engine_args(inputs, settings)
    else:
        diffusion = _diffusion(inputs, settings)
    return StagePlan(
        stage=stage,
        stage_id=inputs.stage_id,
        num_replicas=num_replicas,
        devices=_devices(inputs, settings, num_replicas),
        engine_args=ar_args,
        diffusion=diffusion,
        default_sampling=_sampling(settings),
        env=_value(settings, "env", {}),
        input_connectors=_value(settings, "input_connectors", {}),
        output_connectors=_value(settings, "output_connectors", {}),
        sources={key: setting.source for key, setting in settings.items()},
        max_num_queued_reqs=_value(settings, "max_num_queued_reqs"),
    )


def _layers(inputs: StageInputs) -> list[Layer]:
    engine = inputs.stage.engine
    platform = inputs.host.platform
    deploy, file = inputs.deploy.config, inputs.deploy.source
    sampling = {"default_sampling_params": dict(inputs.stage.default_sampling)}
    layers = [
        Layer("default", FALLBACK),
        Layer(f"pipeline {inputs.pipeline.name}", sampling),
        Layer(f"default on {platform}", PLATFORM_DEFAULTS.get(platform, {}).get(engine, {})),
        Layer("checkpoint's dtype", _checkpoint_dtype(inputs)),
        Layer(f"{file}: {{key}}", deploy.pipeline_wide(engine)),
    ]
    if inputs.position is not None:
        entry = deploy.stages[inputs.position]
        layers.append(Layer(f"{file}: stages[{inputs.position}].{{key}}", entry.settings()))
    if inputs.file_override is not None:
        source = f"{file}: stage_overrides.{inputs.stage.name}.{{key}}"
        layers.append(Layer(source, inputs.file_override.settings()))
    flags = inputs.flags.for_stage(inputs.pipeline, inputs.stage)
    layers.append(Layer(inputs.flags.style, flags))
    layers.append(
        Layer("--default-sampling-params", {"default_sampling_params": dict(inputs.sampling)})
    )
    source = f"--stage-overrides {inputs.stage.name}.{{key}}"
    layers += [Layer(source, override.settings()) for override in inputs.overrides]
    return layers


def _checkpoint_dtype(inputs: StageInputs) -> dict[str, Any]:
    """On a CPU, keep the checkpoint's type: vLLM's `auto` would round float32 to bfloat16."""
    if inputs.host.platform != "cpu":
        return {}
    return {"dtype": checkpoint_dtype(inputs.hf_config, inputs.stage.config_name)}


def _value(settings: Mapping[str, Setting], key: str, default: Any = None) -> Any:
    return settings[key].value if key in settings else default


def _sampling(settings: Mapping[str, Setting]) -> dict[str, Any]:
    sampling: dict[str, Any] = _value(settings, "default_sampling_params", {})
    frames = _value(settings, "subtalker_sampling_params")
    if frames is None:
        return sampling
    return deep_merge(sampling, {"extra_args": {"subtalker_sampling_params": frames}})


def _engine_args(inputs: StageInputs, settings: Mapping[str, Setting]) -> dict[str, Any]:
    args: dict[str, Any] = {"model": inputs.model}
    for key, setting in settings.items():
        if key not in PLAN_KEYS and key in engine_arg_types():
            args[key] = setting.value
    return args


def _diffusion(inputs: StageInputs, settings: Mapping[str, Setting]) -> DiffusionStageConfig:
    names = {
        "dtype": "dtype",
        "max_num_seqs": "max_batch",
        "enforce_eager": "enforce_eager",
        "load_format": "load_format",
        "trust_remote_code": "trust_remote_code",
        "revision": "revision",
        "gpu_memory_utilization": "gpu_memory_utilization",
        **{name: name for name in PIPELINE_SETTINGS},
    }
    if not inputs.stage.takes_generation:
        names = {key: name for key, name in names.items() if key not in PIPELINE_SETTINGS}
    given = {names[key]: setting.value for key, setting in settings.items() if key in names}
    model = _value(settings, "model", inputs.model)
    on_cpu = _value(settings, "devices") == "cpu"
    platform = inputs.host.platform
    device = "cpu" if on_cpu else {"rocm": "cuda"}.get(platform, platform)
    return DiffusionStageConfig(model=model, device=device, **given)


def _warn_without_effect(inputs: StageInputs, settings: Mapping[str, Setting]) -> None:
    engine = inputs.stage.engine
    without_effect = {key for key in settings if engine not in engines_of(StageKeys, key)}
    decodes = engine == "diffusion" and not inputs.stage.takes_generation
    sampling = {*_SAMPLING, *PIPELINE_SETTINGS} if decodes else frozenset()
    names = [
        key for key in settings if key in sampling or key in without_effect - PLAN_KEYS - {"model"}
    ]
    if names:
        logger.warning_once(
            "%s: these keys have no effect on a stage of its kind: %s",
            inputs.where,
            ", ".join(names),
        )


def _devices(
    inputs: StageInputs, settings: Mapping[str, Setting], num_replicas: int
) -> tuple[tuple[str, ...], ...]:
    stage = inputs.stage
    parallel = stage.engine == "ar" or stage.takes_generation
    sizes = WORLD_SIZES[stage.engine] if parallel else ()
    given = {key: settings[key] for key in sizes if key in settings}
    world_size = prod(setting.value for setting in given.values())
    devices: str = _value(settings, "devices")
    available = len(devices.split(","))
    if devices != "cpu" and world_size > 1 and available < num_replicas * world_size:
        reasons = ", ".join(f"{k} = {s.value} (from {s.source})" for k, s in given.items())
        raise OmniConfigError(
            f"{inputs.where}: {reasons} needs {num_replicas * world_size} device(s), but the stage "
            f'has "{devices}" (from {settings["devices"].source}); give it more devices, or set '
            "the size for one stage only, with --stage-overrides "
            f'\'{{"{inputs.pipeline.entry.name}": {{"{next(iter(given))}": ...}}}}\''
        )
    where = f"{inputs.where}, {settings['devices'].source}"
    groups = assign_devices(devices, num_replicas, world_size, inputs.host, where)
    used = sum(len(group) for group in groups)
    if devices != "cpu" and used < available:
        logger.warning_once(
            '%s uses %d of its %d devices "%s"; raise one of %s',
            inputs.where,
            used,
            available,
            devices,
            ", ".join((*sizes, "num_replicas")),
        )
    return groups


def _check_sampling(
    inputs: StageInputs, layers: Sequence[Layer], sampling: Mapping[str, Any]
) -> None:
    """Sampling defaults must be good parameters, together and with the family's constraints."""
    constraints = inputs.stage.sampling_constraints
    forced = {} if constraints is None else constraints(inputs.hf_config)
    try:
        params = sampling_params({**sampling, **forced}, {})
        if params.n != 1 and inputs.stage != inputs.pipeline.entry:
            raise SamplingError("n", "only the first stage can give more than one completion")
        frames = (params.extra_args or {}).get(SUBTALKER)
        if frames is not None:
            check_subtalker(frames)
    except SamplingError as error:
        raise _sampling_error(inputs, layers, error) from error


def _sampling_error(
    inputs: StageInputs, layers: Sequence[Layer], error: SamplingError
) -> OmniConfigError:
    """The error with the key as the user wrote it, its value and where that came from."""
    path = ("default_sampling_params", *(error.key.split(".") if error.key else ()))
    # A key of its own is another spelling of the last of these, and wins.
    spellings = [path[path.index(SUBTALKER) :]] if SUBTALKER in path else []
    for spelling in (*spellings, path):
        for layer in reversed(layers):
            value = _at(layer.values, spelling)
            if value is not _NOT_GIVEN:
                place = f"{'.'.join(spelling)} = {value!r} (from {layer.written(spelling[0])})"
                return OmniConfigError(f"{inputs.where}: {place}: {error.message}")
    return OmniConfigError(f"{inputs.where}: default_sampling_params: {error}")


def _at(values: Any, path: Sequence[str]) -> Any:
    """What nested mappings hold under a path, or `_NOT_GIVEN`."""
    for key in path:
        if not isinstance(values, Mapping) or key not in values:
            return _NOT_GIVEN
        values = values[key]
    return values
