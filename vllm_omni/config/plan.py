# SPDX-License-Identifier: Apache-2.0
"""The resolved deployment: what runs where, with which settings.

`build_plan` (in `build.py`) makes it; engines and orchestrator only read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import PretrainedConfig

from vllm_omni.config.limits import ServingLimits
from vllm_omni.config.pipeline import Pipeline, Stage


@dataclass(frozen=True, slots=True)
class ConnectorSpec:
    """A connector to make.

    Attributes:
        name: Its class, as users write it (`SharedMemoryConnector`).
        extra: Its settings, mixed with those of the edge (chunk sizes, ...).
        graph_lengths: Frames that its reader's decoder has CUDA graphs for; None for the default.
    """

    name: str = "SharedMemoryConnector"
    extra: Mapping[str, Any] = field(default_factory=dict)
    graph_lengths: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """Settings of a diffusers pipeline, named as their stage keys.

    Attributes:
        model_class_name: Diffusers pipeline class, instead of the checkpoint's own.
        flow_shift: Of the schedulers, instead of the checkpoint's.
        boundary_ratio: Where the low-noise expert takes over, instead of the checkpoint's.
        vae_use_slicing: Decode a batch one by one.
        vae_use_tiling: Decode in tiles.
        prompt_embedding_cache_mb: Most MiB for what text encoders made; 0 for none.
        lora_modules: Adapters that requests may name: folder, file or hub name of each.
        lora_path: Adapter of requests that name none.
        lora_scale: Its strength.
        max_loras: Most adapters on the device at a time.
        cache_backend: Step cache of the denoisers, or `none`.
        cache_config: Its settings.
        diffusion_attention_backend: Of the denoisers, or `auto`.
        diffusion_compile_granularity: What of the denoisers is compiled: `regional` or `full`.
        diffusion_compile_dynamic: Compile for sizes that vary.
        tensor_parallel_size: Devices that share the denoisers' weights.
        cfg_parallel_size: Groups of devices that take different rows of a batch.
        ulysses_degree: Devices that share a sequence.
    """

    model_class_name: str | None = None
    flow_shift: float | None = None
    boundary_ratio: float | None = None
    vae_use_slicing: bool = False
    vae_use_tiling: bool = False
    prompt_embedding_cache_mb: float = 256.0
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    lora_path: str | None = None
    lora_scale: float = 1.0
    max_loras: int = 8
    cache_backend: str = "none"
    cache_config: Mapping[str, Any] = field(default_factory=dict)
    diffusion_attention_backend: str = "auto"
    diffusion_compile_granularity: str = "regional"
    diffusion_compile_dynamic: bool = True
    tensor_parallel_size: int = 1
    cfg_parallel_size: int = 1
    ulysses_degree: int = 1

    def of_pipeline(self) -> dict[str, Any]:
        """These settings alone, by name."""
        return {name: getattr(self, name) for name in PIPELINE_SETTINGS}


PIPELINE_SETTINGS = tuple(each.name for each in fields(PipelineSettings))


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionStageConfig(PipelineSettings):
    """Settings of a stage on the call-batching engine.

    Attributes:
        model: Folder or hub name of the checkpoint.
        device: Kind of device, as torch names it (`cpu`, `cuda`, ...).
        dtype: Torch dtype's name, or `auto` for the family's own choice.
        max_batch: Most requests in one batched call.
        enforce_eager: Neither CUDA graphs nor compilation.
        load_format: `auto`, or `dummy` for random weights.
        gpu_memory_utilization: Share of the device, if one was given.
    """

    model: str
    device: str
    dtype: str = "auto"
    max_batch: int = 32
    enforce_eager: bool = False
    load_format: str = "auto"
    trust_remote_code: bool = False
    revision: str | None = None
    gpu_memory_utilization: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage of a deployment.

    Attributes:
        stage: What the pipeline says about it.
        stage_id: Its index in the pipeline.
        num_replicas: Copies to run.
        devices: For each replica, its devices: `("0", "1")` or `("cpu",)`. Indices count the
            devices that the planning process may see.
        engine_args: For `ar`: arguments of `AsyncEngineArgs`, complete but for what the engine
            itself adds (architecture, worker, scheduler, `additional_config`). Empty else.
        diffusion: For `diffusion`: its settings. None else.
        default_sampling: Sampling defaults below those of a request; the pipeline's
            `sampling_constraints` are not in here.
        env: Environment variables for its processes.
        input_connectors: By name of the upstream stage.
        output_connectors: By name of the downstream stage.
        sources: For each setting, where its value came from. For logs and errors.
        max_num_queued_reqs: Most requests in the stage, all replicas together; None for no bound
            but the server's.
    """

    stage: Stage
    stage_id: int
    num_replicas: int
    devices: tuple[tuple[str, ...], ...]
    engine_args: Mapping[str, Any]
    diffusion: DiffusionStageConfig | None
    default_sampling: Mapping[str, Any]
    env: Mapping[str, str]
    input_connectors: Mapping[str, ConnectorSpec]
    output_connectors: Mapping[str, ConnectorSpec]
    sources: Mapping[str, str]
    max_num_queued_reqs: int | None = None

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.stage.name

    def accelerators(self, replica_id: int) -> tuple[str, ...]:
        """Devices of a replica that have memory of their own: none on a CPU."""
        return tuple(device for device in self.devices[replica_id] if device != "cpu")


GENERATION_PATIENCE = 10.0
"""How many times longer than others a stage that generates pictures or videos may be silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """What is done about replicas that die.

    Attributes:
        max_respawns: How often in a row a dead replica is started again; 0 for never.
        retry_requests: A request that was lost with a replica before the client got anything of it
            is tried once more on another.
        stage_hang_timeout: Seconds without a sign of life after which a replica with work counts
            as dead.
    """

    max_respawns: int = 10
    retry_requests: bool = True
    stage_hang_timeout: float = 60.0

    def hang_timeout(self, stage: Stage) -> float:
        """Seconds of silence that are too many of a stage: one forward of a diffusion model (a
        video's decoding) may take minutes, and its process gives no sign of life meanwhile."""
        patience = GENERATION_PATIENCE if stage.takes_generation else 1.0
        return patience * self.stage_hang_timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """A pipeline, ready to be started.

    Attributes:
        model: Folder or hub name of the checkpoint.
        served_model_names: Names that clients may use; the first one is used in replies.
        pipeline: The model family.
        hf_config: The checkpoint's whole config.
        platform: Key of the `platforms:` overlay that was applied.
        async_chunk: Stages start before the one above has ended.
        stages: One for each stage of the pipeline, in order.
        stage_init_timeout: Seconds that one stage may take to start.
        init_timeout: Seconds that all of them may take.
        log_stats: Log statistics.
        reliability: What is done about replicas that die.
        limits: Bounds of the front door.
        deploy_source: The deploy file in use, for logs.
        custom_voice_dir: Folder of uploaded voices, if the deploy file names one.
        cuda_mps: Stages share GPUs through CUDA's MPS.
    """

    model: str
    served_model_names: tuple[str, ...]
    pipeline: Pipeline
    hf_config: PretrainedConfig
    platform: str
    async_chunk: bool
    stages: tuple[StagePlan, ...]
    stage_init_timeout: float = 300.0
    init_timeout: float = 600.0
    log_stats: bool = False
    reliability: Reliability = Reliability()
    limits: ServingLimits = field(default_factory=ServingLimits)
    deploy_source: str = "deploy config"
    custom_voice_dir: str | None = None
    cuda_mps: bool = False

    @property
    def traces_endpoint(self) -> str | None:
        """Where spans are sent (vLLM's `--otlp-traces-endpoint`), if to anywhere."""
        return self.entry.engine_args.get("otlp_traces_endpoint")

    @property
    def log_requests(self) -> bool:
        """Log when a request enters and leaves a stage (vLLM's `--enable-log-requests`)."""
        return bool(self.entry.engine_args.get("enable_log_requests", False))

    @property
    def entry(self) -> StagePlan:
        """The stage that takes the client's prompt."""
        return self.stage(self.pipeline.entry.name)

    def stage(self, name: str) -> StagePlan:
        """The stage of that name."""
        return self.stages[self.pipeline.stage_id(name)]

    def connector(self, source: str, target: str) -> ConnectorSpec:
        """The connector of an edge."""
        return self.stage(target).input_connectors[source]

    def edge_extra(self, source: str, target: str) -> Mapping[str, Any]:
        """What `EdgeContext.extra` of an edge holds."""
        return self.connector(source, target).extra
