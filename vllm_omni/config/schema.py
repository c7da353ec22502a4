# SPDX-License-Identifier: Apache-2.0
"""The one schema of a deployment: YAML keys, command-line flags and docs come from here.

A key of a stage is one of three: a field below, any field of vLLM's `AsyncEngineArgs` (see
`engine_args.py`), or a key that is accepted without effect (see `idle.py`). Anything else is an
error that names the nearest known key.
"""

from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, ClassVar, get_args, get_origin

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from vllm_omni.config.capture_sizes import ConnectorExtra
from vllm_omni.config.devices import normalize_devices
from vllm_omni.config.idle import DEPLOY_IDLE, EXTRAS_IDLE, PARALLEL_IDLE, STAGE_IDLE, IdleKey
from vllm_omni.config.problems import (
    did_you_mean,
    from_validation_error,
)
from vllm_omni.config.section import AR, BOTH, DIFFUSION, Engine, Section, key
from vllm_omni.config.values import (
    ATTENTION_BACKENDS,
    STEP_CACHES,
    AttentionBackend,
    CompileGranularity,
    EnvValue,
    Float,
    Int,
    MaxModelLen,
    StepCacheName,
)

PLATFORMS = ("cpu", "cuda", "musa", "npu", "rocm", "xpu")


class ConnectorConfig(Section):
    """How tensors travel between two stages."""

    name: str = Field(description="Connector class (`SharedMemoryConnector`, ...).")
    extra: ConnectorExtra = Field(
        {}, description="Settings of the connector, and of the edge (`codec_chunk_frames`, ...)."
    )


class ParallelConfig(Section):
    """The sizes of a stage's parallelism in one mapping, as existing deploy files write them."""

    idle_keys: ClassVar[Mapping[str, IdleKey]] = PARALLEL_IDLE

    tensor_parallel_size: Int | None = key("As the stage key.", ge=1)
    pipeline_parallel_size: Int | None = key("As the stage key.", engines=AR, ge=1)
    data_parallel_size: Int | None = key("As the stage key.", engines=AR, ge=1)
    enable_expert_parallel: bool | None = key("vLLM's.", engines=AR)
    cfg_parallel_size: Int | None = key("As the stage key.", engines=DIFFUSION, ge=1)
    ulysses_degree: Int | None = key("As the stage key.", engines=DIFFUSION, ge=1)


class StageKeys(Section):
    """Keys of a stage that have an effect; vLLM's come on top."""

    idle_keys: ClassVar[Mapping[str, IdleKey]] = STAGE_IDLE
    takes_engine_args: ClassVar[bool] = True
    misplaced: ClassVar[Mapping[str, str]] = {
        "connectors": "connectors are defined at the top level",
        "platforms": "platforms are a top-level key",
        "runtime": "write its keys (devices, ...) into the stage itself",
    }

    devices: Annotated[str, BeforeValidator(normalize_devices)] | None = key(
        'Devices of all replicas together: `"0"`, `"0,1"` or `cpu`. Indices count the devices '
        "that this process may see. Replicas take equal shares in order; repeat an index to let "
        "replicas share a device."
    )
    num_replicas: Int | None = key("Copies of the stage. Default 1.", ge=1)
    max_num_queued_reqs: Int | None = key(
        "Most requests that the stage has, waiting or running, in all its replicas; a further one "
        "is answered with 429. Default: no bound but the server's, which the flag of that name "
        "sets.",
        ge=1,
    )
    env: dict[str, EnvValue] | None = key("Environment variables for the stage's processes.")
    input_connectors: dict[str, str] | None = key(
        "Connector of each incoming edge: `{from_stage_0: <connector>}`. Default: shared memory."
    )
    output_connectors: dict[str, str] | None = key(
        "The same from the sending side: `{to_stage_1: <connector>}`."
    )
    default_sampling_params: dict[str, Any] | None = key(
        "Sampling defaults, below those of a request."
    )
    subtalker_sampling_params: dict[str, Any] | None = key(
        "How codes of a frame after the first are drawn: `temperature`, `top_k`, `top_p`, `seed`, "
        "`guidance_scale` (of models that have it).",
        engines=AR,
    )
    max_num_seqs: Int | None = key("Most requests in one batch.", engines=BOTH, flag=BOTH, ge=1)
    enforce_eager: bool | None = key(
        "Neither CUDA graphs nor compilation.", engines=BOTH, flag=BOTH
    )
    dtype: str | None = key(
        "Type of weights and activations. On a CPU, the default is the checkpoint's own.",
        engines=BOTH,
        flag=BOTH,
    )
    load_format: str | None = key(
        "How weights are loaded; `dummy` makes random ones.", engines=BOTH, flag=BOTH
    )
    trust_remote_code: bool | None = key(
        "Run code that comes with the checkpoint.", engines=BOTH, flag=BOTH
    )
    revision: str | None = key("Revision of the checkpoint.", engines=BOTH, flag=BOTH)
    gpu_memory_utilization: Float | None = key(
        "Share of a device's memory for one replica. The shares of all stages on a device must "
        "not exceed 1.",
        flag=AR,
        gt=0,
        le=1,
    )
    kv_cache_memory_bytes: Int | None = key(
        "Size of the KV cache, instead of what `gpu_memory_utilization` leaves.",
        engines=AR,
        flag=AR,
        ge=1,
    )
    tensor_parallel_size: Int | None = key(
        "Devices that share one replica's weights; of a diffusion stage, the denoisers'.",
        engines=BOTH,
        flag=BOTH,
        ge=1,
    )
    cfg_parallel_size: Int | None = key(
        "Groups of devices that take different rows of a batch each, so that both halves of "
        "guidance run at the same time.",
        engines=DIFFUSION,
        flag=DIFFUSION,
        ge=1,
    )
    ulysses_degree: Int | None = key(
        "Devices that share a denoiser's sequences (Ulysses), of whatever length.",
        engines=DIFFUSION,
        flag=DIFFUSION,
        aliases=("--usp",),
        ge=1,
    )
    pipeline_parallel_size: Int | None = key(
        "Devices that take layers in turn; of stages without rows.", engines=AR, flag=AR, ge=1
    )
    data_parallel_size: Int | None = key(
        "vLLM's own data parallelism; of stages without rows.", engines=AR, flag=AR, ge=1
    )
    parallel_config: ParallelConfig | None = key(
        "Sizes of the stage's parallelism in one mapping: `tensor_parallel_size`, "
        "`cfg_parallel_size`, `ulysses_degree`, ..."
    )
    max_num_batched_tokens: Int | None = key(
        "Most tokens in one engine step.", engines=AR, flag=AR, ge=1
    )
    max_model_len: MaxModelLen | None = key(
        "Longest sequence; `auto` takes what fits.", engines=AR, flag=AR, ge=-1
    )
    model_class_name: str | None = key(
        "Diffusers pipeline class; default: the one that the checkpoint names.",
        engines=DIFFUSION,
        flag=DIFFUSION,
    )
    flow_shift: Float | None = key(
        "Shift of the flow-matching schedule, instead of the checkpoint's.",
        engines=DIFFUSION,
        flag=DIFFUSION,
        gt=0,
    )
    boundary_ratio: Float | None = key(
        "Share of the schedule after which the low-noise expert takes over (Wan 2.2).",
        engines=DIFFUSION,
        flag=DIFFUSION,
        ge=0,
        le=1,
    )
    vae_use_slicing: bool | None = key(
        "The VAE decodes a batch one by one: less memory.", engines=DIFFUSION, flag=DIFFUSION
    )
    vae_use_tiling: bool | None = key(
        "The VAE decodes in tiles: less memory.", engines=DIFFUSION, flag=DIFFUSION
    )
    prompt_embedding_cache_mb: Float | None = key(
        "Memory for what text encoders made of prompts, in MiB; 0 for no cache. Default 256.",
        engines=DIFFUSION,
        flag=DIFFUSION,
        ge=0,
    )
    lora_modules: dict[str, str] | None = key(
        "Adapters that requests may name, each with its folder, file or hub name. The flag is "
        "vLLM's: `--lora-modules name=path`. An adapter is loaded when a request first names it.",
        engines=DIFFUSION,
        flag=BOTH,
    )
    lora_path: str | None = key(
        "Adapter of requests that name none: folder, file or hub name. Loaded at the start.",
        engines=DIFFUSION,
        flag=DIFFUSION,
    )
    lora_scale: Float | None = key(
        "Strength of the adapter at `lora_path`. Default 1.",
        engines=DIFFUSION,
        flag=DIFFUSION,
        ge=-100,
        le=100,
    )
    max_loras: Int | None = key(
        "Most adapters on the device at a time; of a diffusion stage, the one that was used least "
        "recently goes first, and comes back when it is needed. Default there: 8.",
        engines=BOTH,
        flag=BOTH,
        ge=1,
    )
    cache_backend: StepCacheName | None = key(
        "Step cache, which leaves out blocks of the transformer where they would change little: "
        f"{', '.join(STEP_CACHES)}. `cache_dit` needs the extra `cache-dit`, the others are "
        "diffusers' own. Calls of the transformer then run one at a time. Default: `none`.",
        engines=DIFFUSION,
        flag=DIFFUSION,
    )
    cache_config: dict[str, Any] | None = key(
        "Settings of the step cache. Of `cache_dit`: `Fn_compute_blocks`, `Bn_compute_blocks`, "
        "`max_warmup_steps`, `max_cached_steps`, `max_continuous_cached_steps`, "
        "`residual_diff_threshold`, `enable_taylorseer`, `taylorseer_order`, "
        "`scm_steps_mask_policy` (`slow`, `medium`, `fast`, `ultra`), `scm_steps_policy` "
        "(`dynamic`, `static`). Of the others, as diffusers calls them: `threshold` "
        "(`first_block`), `mag_ratios` (a list, or `flux`) and `num_inference_steps` "
        "(`mag_cache`), `cache_interval` (`taylorseer`), ...",
        engines=DIFFUSION,
        flag=DIFFUSION,
    )
    diffusion_attention_backend: AttentionBackend | None = key(
        f"Attention kernels of the denoiser: {', '.join(ATTENTION_BACKENDS)}. Default: `auto`, "
        "which is FlashAttention 3 or cuDNN on Hopper and later and torch's own choice elsewhere. "
        "One that is not there, or makes something else than torch's, is not used.",
        engines=DIFFUSION,
        flag=DIFFUSION,
    )
    diffusion_compile_granularity: CompileGranularity | None = key(
        "What of the denoiser is compiled unless `enforce_eager` is set: its repeated blocks "
        "(`regional`) or the whole of it (`full`). Nothing is where adapters or a step cache are "
        "configured. Default: `regional`.",
        engines=DIFFUSION,
        flag=DIFFUSION,
    )
    diffusion_compile_dynamic: bool | None = key(
        "Compile for sizes that vary; else anew for sizes that were not seen before. Default: "
        "true.",
        engines=DIFFUSION,
        flag=DIFFUSION,
    )


class EngineExtras(StageKeys):
    """Further keys of a stage, as existing deploy files write them."""

    idle_keys: ClassVar[Mapping[str, IdleKey]] = {**STAGE_IDLE, **EXTRAS_IDLE}


class StageOverride(StageKeys):
    """What `--stage-overrides` may change about a stage."""

    engine_extras: EngineExtras | None = key("More keys of the same kind, kept for old files.")
    engine_args: EngineExtras | None = key("As `engine_extras`.")

    @model_validator(mode="after")
    def _no_contradiction(self) -> "StageOverride":
        seen: dict[str, tuple[str, Any]] = {}
        for place, values in self._places():
            for name, value in values.items():
                if name in seen and seen[name][1] != value:
                    raise ValueError(
                        f"{name!r} is given twice: {seen[name][1]!r} in {seen[name][0]} "
                        f"and {value!r} in {place}"
                    )
                seen[name] = (place, value)
        return self

    def _places(self) -> list[tuple[str, dict[str, Any]]]:
        nested = {
            "engine_extras": self.engine_extras,
            "engine_args": self.engine_args,
            "parallel_config": self.parallel_config,
        }
        places = [("the stage", {k: v for k, v in self.given().items() if k not in nested})]
        for name, section in nested.items():
            if section is not None:
                places.append((name, section.given()))
        for name, values in list(places):
            if isinstance(sizes := values.pop("parallel_config", None), ParallelConfig):
                places.append((f"{name}.parallel_config", sizes.given()))
        return places

    def settings(self) -> dict[str, Any]:
        """Given keys with effect, `engine_extras` and `engine_args` folded in."""
        merged: dict[str, Any] = {}
        for _, values in self._places():
            merged |= values
        merged.pop("stage_id", None)
        return {k: v for k, v in merged.items() if k not in EngineExtras.idle_keys | PARALLEL_IDLE}

    def idle(self) -> dict[str, IdleKey]:
        """Given keys without effect."""
        table = {**EngineExtras.idle_keys, **PARALLEL_IDLE}
        return {k: table[k] for _, values in self._places() for k in values if k in table}


class StageDeployConfig(StageOverride):
    """An entry of `stages`."""

    stage_id: Int = Field(ge=0, description="Which stage of the pipeline, counted from 0.")


class PipelineWide(Section):
    """Keys that every stage shares unless it sets its own."""

    trust_remote_code: bool | None = key("As the stage key, for all stages.")
    dtype: str | None = key("As the stage key, for all stages.")
    distributed_executor_backend: str | None = key("vLLM's, for all stages.", engines=AR)
    quantization: str | None = key("vLLM's, for all stages.", engines=AR)
    enable_prefix_caching: bool | None = key("vLLM's, for all stages.", engines=AR)
    enable_chunked_prefill: bool | None = key("vLLM's, for all stages.", engines=AR)
    data_parallel_size: Int | None = key("As the stage key, for all stages.", engines=AR, ge=1)
    pipeline_parallel_size: Int | None = key("As the stage key, for all stages.", engines=AR, ge=1)
    weight_transfer_config: dict[str, Any] | None = key("vLLM's, for all stages.", engines=AR)

    def pipeline_wide(self, engine: Engine) -> dict[str, Any]:
        """Given values that a stage of that engine takes."""
        return {
            name: self.__dict__[name]
            for name in PipelineWide.model_fields
            if self.__dict__[name] is not None and engine in engines_of(PipelineWide, name)
        }


class PlatformOverlay(PipelineWide):
    """What differs on one platform."""

    stages: tuple[StageDeployConfig, ...] = Field(
        default=(), description="Stage entries, matched by `stage_id`."
    )
    connectors: dict[str, ConnectorConfig] | None = key("Connectors, matched by name.")
    async_chunk: bool | None = key("As at the top level.")


class DeployConfig(PipelineWide):
    """A deploy file."""

    idle_keys: ClassVar[Mapping[str, IdleKey]] = DEPLOY_IDLE
    misplaced: ClassVar[Mapping[str, str]] = {
        name: "it is a stage key; put it into an entry of 'stages'"
        for name in (*StageKeys.model_fields, *STAGE_IDLE, "engine_extras", "engine_args")
        if name not in (*PipelineWide.model_fields, *DEPLOY_IDLE, "async_chunk")
    } | {"stage_args": "that is the format of old releases; its successor is 'stages'"}

    pipeline: str | None = key("Name of the pipeline; default: found from the checkpoint.")
    base_config: str | None = key(
        "Deploy file to build on, relative to this one, or the name of a packaged one."
    )
    async_chunk: bool | None = key(
        "Stages start before the one above has ended. Default: the pipeline's."
    )
    cuda_mps: bool | None = key(
        "Run the stages that share a GPU at the same time, through CUDA's MPS, whose daemon is "
        "started and ended with them."
    )
    custom_voice_dir: str | None = key(
        "Folder of the voices of `/v1/audio/voices`; the flag `--custom-voice-dir` wins."
    )
    connectors: dict[str, ConnectorConfig] | None = key("Connectors by a name of your choice.")
    stages: tuple[StageDeployConfig, ...] = Field(
        default=(), description="One entry for each stage that differs from the defaults."
    )
    platforms: dict[str, PlatformOverlay] | None = key(
        f"What differs on a platform ({', '.join(PLATFORMS)}); wins over the rest of the file."
    )
    stage_overrides: dict[str, Any] | None = key(
        "As the flag `--stage-overrides`; wins over `stages` and `platforms`."
    )

    @model_validator(mode="after")
    def _check(self) -> "DeployConfig":
        for name in self.platforms or {}:
            if name not in PLATFORMS:
                raise ValueError(
                    f"platforms.{name}: unknown platform{did_you_mean(name, PLATFORMS)} "
                    f"(known: {', '.join(PLATFORMS)})"
                )
        _unique_stage_ids(self.stages, "stages")
        for name, overlay in (self.platforms or {}).items():
            _unique_stage_ids(overlay.stages, f"platforms.{name}.stages")
        return self

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str) -> "DeployConfig":
        """A validated config; any mistake is one `OmniConfigError` that names `where`."""
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise from_validation_error(where, error) from None

    def as_mapping(self) -> dict[str, Any]:
        """The mapping that it was made of."""
        return self.model_dump(exclude_unset=True)


def _unique_stage_ids(stages: tuple[StageDeployConfig, ...], where: str) -> None:
    ids = [stage.stage_id for stage in stages]
    for position, stage_id in enumerate(ids):
        if stage_id in ids[:position]:
            raise ValueError(
                f"{where}[{position}].stage_id = {stage_id}: already used by "
                f"{where}[{ids.index(stage_id)}]"
            )


def engines_of(section: type[Section], name: str) -> tuple[Engine, ...]:
    """Engines on which a key has an effect; a key that is only vLLM's has one on `ar`."""
    return _meta(section, name, "engines")


def flag_engines_of(name: str) -> tuple[Engine, ...]:
    """Engines of the stages that a command-line flag of that name goes to."""
    return _meta(StageOverride, name, "flag")


def flag_aliases_of(name: str) -> list[str]:
    """Other names of a command-line flag."""
    return list(_meta(StageOverride, name, "aliases"))


def diffusion_keys() -> tuple[str, ...]:
    """Keys of diffusion stages alone that have a command-line flag."""
    return tuple(n for n in StageKeys.model_fields if flag_engines_of(n) == DIFFUSION)


def describe(name: str) -> str:
    """A stage key's description."""
    return StageKeys.model_fields[name].description or ""


def key_type(name: str) -> type:
    """A stage key's plain type: bool, int, float, str or dict."""
    (kind,) = (t for t in get_args(StageKeys.model_fields[name].annotation) if t is not NoneType)
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return get_origin(kind) or kind


def _meta(section: type[Section], name: str, entry: str) -> tuple[Engine, ...]:
    field = section.model_fields.get(name)
    if field is None:
        return AR
    extra = field.json_schema_extra
    return tuple(extra[entry]) if isinstance(extra, dict) else BOTH  # type: ignore[arg-type]
