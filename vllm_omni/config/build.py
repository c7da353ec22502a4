# SPDX-License-Identifier: Apache-2.0
"""From a model, a deploy file, flags and overrides to a `DeploymentPlan`.

Precedence, low to high: pipeline, platform, deploy file (top level, `stages`, `platforms`,
`stage_overrides`), flags, `--stage-overrides`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from vllm.logger import init_logger
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_omni.config import idle
from vllm_omni.config.checkpoint import load_hf_config
from vllm_omni.config.checks import check_config, check_files
from vllm_omni.config.devices import Host
from vllm_omni.config.flags import Flags, parse_flags
from vllm_omni.config.ledger import Ledger
from vllm_omni.config.limits import ServingLimits
from vllm_omni.config.load import (
    LoadedDeploy,
    UnknownDeployError,
    load_deploy,
    packaged_deploys,
    parse_json,
    parse_overrides,
)
from vllm_omni.config.pipeline import Pipeline
from vllm_omni.config.plan import DeploymentPlan, Reliability
from vllm_omni.config.resolve import StageInputs, resolve_stage
from vllm_omni.config.schema import DeployConfig, StageOverride
from vllm_omni.config.wiring import resolve_connectors
from vllm_omni.errors import OmniConfigError

logger = init_logger(__name__)

Resolver = Callable[..., Pipeline]

RESOLVER = "vllm_omni.pipelines.registry.resolve_pipeline"
"""The default resolver, by name: pipelines are a layer above this one."""


def build_plan(
    model: str,
    *,
    deploy_config: str | Path | Mapping[str, Any] | DeployConfig | None = None,
    cli: Mapping[str, Any] | None = None,
    stage_overrides: str | Mapping[str, Any] | None = None,
    default_sampling_params: str | Mapping[str, Any] | None = None,
    async_chunk: bool | None = None,
    stage_init_timeout: float = 300.0,
    init_timeout: float = 600.0,
    log_stats: bool = False,
    reliability: Reliability | None = None,
    served_model_name: str | Sequence[str] | None = None,
    limits: ServingLimits | None = None,
    flag_style: str = "--{flag}",
    host: Host | None = None,
    resolve: Resolver | None = None,
) -> DeploymentPlan:
    """Resolve a deployment.

    Args:
        model: Folder or hub name of the checkpoint.
        deploy_config: A file, the name of a packaged one, a mapping or an object. Default: the
            packaged file of the model's pipeline.
        cli: Flags that were typed, or keyword arguments of `Omni`: any stage key. They go to every
            stage that can take them; those about prompts and media go to the entry stage alone.
            `stage_1_max_num_seqs` is a stage override.
        stage_overrides: By stage id or name, as a mapping or JSON.
        default_sampling_params: By stage id or name, as a mapping or JSON.
        async_chunk: Overrides the deploy file.
        stage_init_timeout: Seconds that one stage may take to start.
        init_timeout: Seconds that all of them may take.
        log_stats: Log statistics.
        reliability: What is done about replicas that die. Default: `Reliability()`.
        served_model_name: Names that clients may use. Default: `model`.
        limits: Bounds of the front door. Default: generous ones.
        flag_style: How errors write an entry of `cli`: `--{flag}`, or `{name}` in Python.
        host: The machine to plan for. Default: this one.
        resolve: Finds the pipeline; tests give their own.

    Raises:
        OmniConfigError: Something is wrong; the message names the place and the fix.
    """
    host = host or Host.current()
    flags = parse_flags(cli or {}, flag_style)
    resolve = resolve or resolve_obj_by_qualname(RESOLVER)
    try:
        loaded = load_deploy(deploy_config, host.platform)
    except UnknownDeployError as error:
        raise _of_family(error, model, flags, resolve) from None
    pipeline, hf_config, revision = _recognize(model, loaded.config, flags, resolve)
    if deploy_config is None and pipeline.name in packaged_deploys():
        loaded = load_deploy(pipeline.name, host.platform)
    _check_owner(loaded, pipeline)
    _warn_idle(loaded, flags)
    check_config(model, pipeline, hf_config, revision)
    inputs = _stage_inputs(
        model, pipeline, hf_config, host, loaded, flags, stage_overrides, default_sampling_params
    )
    stages = resolve_connectors(pipeline, loaded, tuple(resolve_stage(entry) for entry in inputs))
    check_files(model, pipeline, stages)
    Ledger.of(stages).check_shares()
    return DeploymentPlan(
        model=model,
        served_model_names=_names(served_model_name, model),
        pipeline=pipeline,
        hf_config=hf_config,
        platform=host.platform,
        async_chunk=_resolve_async_chunk(pipeline, loaded, async_chunk),
        custom_voice_dir=loaded.config.custom_voice_dir,
        cuda_mps=_resolve_cuda_mps(loaded, host),
        stages=stages,
        stage_init_timeout=stage_init_timeout,
        init_timeout=init_timeout,
        log_stats=log_stats,
        reliability=reliability or Reliability(),
        limits=limits or ServingLimits(),
        deploy_source=loaded.source,
    )


def _recognize(
    model: str, config: DeployConfig, flags: Flags, resolve: Resolver
) -> tuple[Pipeline, PretrainedConfig, str | None]:
    """The model's pipeline, its configuration, and of which revision it is."""
    revision = _early(flags, config, "revision")
    hf_config = load_hf_config(
        model,
        trust_remote_code=_early(flags, config, "trust_remote_code") or False,
        revision=revision,
    )
    class_name = _early(flags, config, "model_class_name")
    pipeline = resolve(model, config, hf_config=hf_config, model_class_name=class_name)
    return pipeline, hf_config, revision


def _of_family(
    error: UnknownDeployError, model: str, flags: Flags, resolve: Resolver
) -> UnknownDeployError:
    """The error with names of the model's own files, if it is known what they are."""
    try:
        pipeline, *_ = _recognize(model, DeployConfig(), flags, resolve)
    except OmniConfigError:
        return error
    return UnknownDeployError(error.name, _own(pipeline))


def _own(pipeline: Pipeline) -> list[str]:
    """Packaged files of a pipeline or its family: named after it, those of profiles with more."""
    name = pipeline.name
    return [each for each in packaged_deploys() if each.startswith(name) or name.startswith(each)]


def _check_owner(loaded: LoadedDeploy, pipeline: Pipeline) -> None:
    """Refuse a packaged file of another pipeline: its numbers are about other stages."""
    chosen = [name for name, path in packaged_deploys().items() if str(path) == loaded.source]
    own = _own(pipeline)
    if chosen and own and chosen[0] not in own:
        raise OmniConfigError(
            f"deploy config {chosen[0]!r} is of another pipeline than the model's, "
            f"{pipeline.name!r}; there are {', '.join(own)}"
        )


def _stage_inputs(
    model: str,
    pipeline: Pipeline,
    hf_config: PretrainedConfig,
    host: Host,
    loaded: LoadedDeploy,
    flags: Flags,
    stage_overrides: str | Mapping[str, Any] | None,
    default_sampling_params: str | Mapping[str, Any] | None,
) -> list[StageInputs]:
    where = f"{loaded.source}: stage_overrides"
    file_overrides = parse_overrides(loaded.config.stage_overrides, pipeline, where)
    overrides = parse_overrides(stage_overrides, pipeline, "--stage-overrides")
    dotted = parse_overrides(flags.dotted, pipeline, "stage_<id>_<key>")
    sampling = parse_sampling(default_sampling_params, pipeline)
    _warn_idle_overrides(pipeline, {where: file_overrides, "--stage-overrides": overrides})
    entries = _entries(pipeline, loaded)
    return [
        StageInputs(
            model=model,
            pipeline=pipeline,
            stage=stage,
            stage_id=stage_id,
            hf_config=hf_config,
            host=host,
            deploy=loaded,
            position=entries.get(stage_id),
            file_override=file_overrides.get(stage_id),
            flags=flags,
            sampling=sampling.get(stage_id, {}),
            overrides=tuple(o[stage_id] for o in (dotted, overrides) if stage_id in o),
        )
        for stage_id, stage in enumerate(pipeline.stages)
    ]


def _entries(pipeline: Pipeline, loaded: LoadedDeploy) -> dict[int, int]:
    """Position in `stages` by stage id."""
    count = len(pipeline.stages)
    for position, entry in enumerate(loaded.config.stages):
        if entry.stage_id >= count:
            raise OmniConfigError(
                f"{loaded.source}: stages[{position}].stage_id = {entry.stage_id}: pipeline "
                f"{pipeline.name!r} has {count} stage(s), counted from 0"
            )
    return {entry.stage_id: i for i, entry in enumerate(loaded.config.stages)}


def parse_sampling(
    sampling: str | Mapping[str, Any] | None, pipeline: Pipeline
) -> dict[int, dict[str, Any]]:
    """`--default-sampling-params` by stage id; flat parameters if there is only one stage."""
    where = "--default-sampling-params"
    if isinstance(sampling, str):
        sampling = parse_json(sampling, where)
    if not sampling:
        return {}
    if len(pipeline.stages) == 1 and not any(isinstance(v, Mapping) for v in sampling.values()):
        sampling = {"0": sampling}
    wrapped = {
        stage: {"default_sampling_params": params} if isinstance(params, Mapping) else params
        for stage, params in sampling.items()
    }
    parsed = parse_overrides(wrapped, pipeline, where)
    return {i: dict(entry.default_sampling_params or {}) for i, entry in parsed.items()}


def _early(flags: Flags, deploy: DeployConfig, key: str) -> Any:
    """A setting that is needed before the pipeline, hence the stages, are known."""
    if key in flags.values:
        return flags.values[key]
    entry = next((s for s in deploy.stages if s.stage_id == 0), None)
    own = entry.settings().get(key) if entry else None
    return own if own is not None else deploy.given().get(key)


def _resolve_cuda_mps(loaded: LoadedDeploy, host: Host) -> bool:
    if loaded.config.cuda_mps and host.platform != "cuda":
        raise OmniConfigError(
            f"{loaded.source}: cuda_mps = True: the stages run on {host.platform}"
        )
    return bool(loaded.config.cuda_mps)


def _resolve_async_chunk(
    pipeline: Pipeline, loaded: LoadedDeploy, async_chunk: bool | None
) -> bool:
    where = "--async-chunk"
    if async_chunk is None:
        async_chunk, where = loaded.config.async_chunk, f"{loaded.source}: async_chunk = True"
    if async_chunk and not pipeline.edges:
        raise OmniConfigError(
            f"{where}: pipeline {pipeline.name!r} has one stage, so nothing streams between stages"
        )
    if async_chunk is None:
        return pipeline.async_chunk and bool(pipeline.edges)
    return async_chunk


def _warn_idle(loaded: LoadedDeploy, flags: Flags) -> None:
    config, warn = loaded.config, logger.warning
    for key, entry in idle.idle_set(config.given(), idle.DEPLOY_IDLE).items():
        idle.warn_idle(warn, f"{loaded.source}: {key}", entry)
    for position, stage in enumerate(config.stages):
        for key, entry in stage.idle().items():
            idle.warn_idle(warn, f"{loaded.source}: stages[{position}].{key}", entry)
    for key, entry in flags.idle.items():
        idle.warn_idle(warn, flags.write(key), entry)


def _warn_idle_overrides(
    pipeline: Pipeline, overrides: Mapping[str, Mapping[int, StageOverride]]
) -> None:
    for where, by_stage in overrides.items():
        for stage_id, override in by_stage.items():
            for key, entry in override.idle().items():
                place = f"{where}: {pipeline.stages[stage_id].name}.{key}"
                idle.warn_idle(logger.warning, place, entry)


def _names(served_model_name: str | Sequence[str] | None, model: str) -> tuple[str, ...]:
    if not served_model_name:
        return (model,)
    if isinstance(served_model_name, str):
        return (served_model_name,)
    return tuple(served_model_name)
