# SPDX-License-Identifier: Apache-2.0
"""Flags that `--omni` adds to `vllm serve`, and the plan that a command line describes."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.logger import init_logger

from vllm_omni.config.build import build_plan
from vllm_omni.config.engine_args import OWNED, engine_arg_types
from vllm_omni.config.flag_types import count, positive_int, positive_seconds
from vllm_omni.config.idle import FLAG_IDLE, STAGE_IDLE, IdleKey, warn_idle
from vllm_omni.config.limits import ServingLimits
from vllm_omni.config.plan import DeploymentPlan, Reliability
from vllm_omni.config.schema import StageKeys, describe, diffusion_keys, flag_aliases_of, key_type
from vllm_omni.errors import OmniConfigError

logger = init_logger(__name__)

RELIABILITY = Reliability()
STAGE_INIT_TIMEOUT_S = 300.0
INIT_TIMEOUT_S = 600.0

_NOT_STAGE_KEYS = frozenset(
    {
        "async_chunk",
        "default_sampling_params",
        "max_generated_image_size",
        "max_num_queued_reqs",
        "model",
        "served_model_name",
        "tts_max_instructions_length",
    }
)
"""Flags that are about the whole deployment although a stage has a key of the same name."""


def add_omni_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to a parser that has vLLM's serve flags."""
    group = parser.add_argument_group("Omni", "Pipelines of several stages.")
    group.add_argument("--omni", action="store_true", help="Serve with vLLM-Omni.")
    group.add_argument(
        "--deploy-config",
        "--stage-configs-path",
        metavar="FILE",
        help="Deploy YAML, or the name of a packaged one. Default: that of the model's pipeline.",
    )
    group.add_argument(
        "--stage-overrides",
        metavar="JSON",
        help='Stage keys by stage id or name, above all else: \'{"talker": {"max_num_seqs": 4}}\' '
        "or '{\"stage_1_max_num_seqs\": 4}'.",
    )
    group.add_argument(
        "--default-sampling-params",
        metavar="JSON",
        help='Sampling defaults by stage id or name: \'{"0": {"temperature": 0.7}}\'.',
    )
    group.add_argument(
        "--async-chunk",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Stages start before the one above has ended. Default: the deploy file's.",
    )
    _add_operation_flags(group)
    _add_limit_flags(group)
    for name, entry in FLAG_IDLE.items():
        _add_idle_flag(group, name, entry)
    _add_stage_flags(parser.add_argument_group("OmniDiffusion", "Settings of diffusion stages."))
    diffusion = parser.add_argument_group("Omni, not in effect yet", "Accepted, with a warning.")
    for name, entry in STAGE_IDLE.items():
        if entry.flag:
            _add_idle_flag(diffusion, name, entry)
    return parser


def _add_operation_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--stage-init-timeout",
        type=positive_seconds,
        default=STAGE_INIT_TIMEOUT_S,
        metavar="SECONDS",
        help="Time that one stage may take to start.",
    )
    group.add_argument(
        "--init-timeout",
        type=positive_seconds,
        default=INIT_TIMEOUT_S,
        metavar="SECONDS",
        help="Time that all stages together may take to start, after downloads.",
    )
    group.add_argument(
        "--max-respawns",
        type=count,
        default=RELIABILITY.max_respawns,
        metavar="N",
        help="How often in a row a replica that died is started again, with delays that double "
        "from half a second to a minute; 0 for never.",
    )
    group.add_argument(
        "--retry-requests",
        action=argparse.BooleanOptionalAction,
        default=RELIABILITY.retry_requests,
        help="Try a request once more on another replica if its replica died before the client "
        "got anything of it.",
    )
    group.add_argument(
        "--stage-hang-timeout",
        type=positive_seconds,
        default=RELIABILITY.stage_hang_timeout,
        metavar="SECONDS",
        help="A replica that has work and gives no sign of life for so long counts as dead; one of "
        "a diffusion pipeline, whose single forward may take minutes, after ten times as long.",
    )
    group.add_argument(
        "--log-stats",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Log statistics of every stage.",
    )
    group.add_argument(
        "--worker-backend",
        choices=("multi_process", "ray"),
        default="multi_process",
        help="How stages run; `ray` has no effect yet.",
    )


def _add_limit_flags(group: argparse._ArgumentGroup) -> None:
    """Flags of the front door. `--max-num-queued-reqs`, the most requests at a time, is vLLM's."""
    defaults = ServingLimits()
    group.add_argument(
        "--request-timeout",
        type=positive_seconds,
        default=defaults.request_timeout,
        metavar="SECONDS",
        help="Time that a request may take from its arrival to its end, waiting included; past it "
        "the request is aborted in every stage, and its client gets a 504 or an error event.",
    )
    group.add_argument(
        "--slow-client-timeout",
        type=positive_seconds,
        default=defaults.slow_client_timeout,
        metavar="SECONDS",
        help="Time in which a client has to send some of its body or take some of its answer; "
        "past it the request is aborted.",
    )
    group.add_argument(
        "--max-stream-buffer-bytes",
        type=positive_int,
        default=defaults.max_stream_buffer_bytes,
        metavar="BYTES",
        help="Most output of one request that waits for its client to read it; past it the "
        "request is aborted.",
    )


def _add_stage_flags(group: argparse._ArgumentGroup) -> None:
    """A flag for every key of a diffusion stage that vLLM has none for."""
    for name in diffusion_keys():
        options = ["--" + name.replace("_", "-"), *flag_aliases_of(name)]
        text = describe(name)
        kind = key_type(name)
        if kind is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(*options, dest=name, action=action, default=None, help=text)
        else:
            parse = _json_value if kind is dict else kind
            group.add_argument(*options, dest=name, type=parse, default=None, help=text)


def _add_idle_flag(group: argparse._ArgumentGroup, name: str, entry: IdleKey) -> None:
    mark = "Deprecated, without effect." if entry.dead else "No effect yet."
    options = ["--" + name.replace("_", "-"), *entry.aliases]
    help_text = f"{mark} {entry.help}".replace("%", "%%")
    if entry.kind == "bool":
        negatable = not name.startswith(("no_", "disable_"))
        action = argparse.BooleanOptionalAction if negatable else "store_true"
        group.add_argument(*options, dest=name, action=action, default=None, help=help_text)
        return
    parse = {"int": int, "float": float, "str": str, "json": _json_value}[entry.kind]
    group.add_argument(*options, dest=name, type=parse, default=None, help=help_text)


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(
            f"not valid JSON at column {error.colno}: {error.msg}"
        ) from error


class _Unset(list):
    """Default of an argument that was not typed. A list, so that `append` actions can copy it."""


def explicit_args(
    parser: argparse.ArgumentParser, argv: Sequence[str], args: argparse.Namespace
) -> dict[str, Any]:
    """The arguments that were typed, even where they equal the default.

    Args:
        parser: The parser of the `serve` command.
        argv: What it parsed: everything after `serve`.
        args: What it made of it.
    """
    names = list(vars(args))
    defaults = {name: parser.get_default(name) for name in names}
    unset = _Unset()
    try:
        parser.set_defaults(**dict.fromkeys(names, unset))
        typed = vars(parser.parse_args(list(argv)))
    finally:
        parser.set_defaults(**defaults)
    return {
        name: list(value) if isinstance(value, _Unset) else value
        for name, value in typed.items()
        if value is not unset
    }


def is_stage_flag(name: str) -> bool:
    """Whether a flag of the command line is about stages (and not about the HTTP server)."""
    if name in _NOT_STAGE_KEYS:
        return False
    return (
        name in engine_arg_types()
        or name in StageKeys.model_fields
        or name in STAGE_IDLE
        or name in FLAG_IDLE
    )


def plan_from_args(args: argparse.Namespace, explicit: Mapping[str, Any]) -> DeploymentPlan:
    """The deployment that a command line describes.

    Args:
        args: All arguments; those of `add_omni_args` and vLLM's serve flags.
        explicit: From `explicit_args`.

    Raises:
        OmniConfigError: Something is wrong; the message names the flag or key and the fix.
    """
    for name in sorted(OWNED.keys() & explicit.keys()):
        raise OmniConfigError(f"--{name.replace('_', '-')}: may not be set: {OWNED[name]}")
    if args.worker_backend == "ray":
        warn_idle(logger.warning, "--worker-backend ray", IdleKey("Run on Ray."))
    return build_plan(
        _model(args),
        deploy_config=args.deploy_config,
        cli=_stage_flags(explicit),
        stage_overrides=args.stage_overrides,
        default_sampling_params=args.default_sampling_params,
        async_chunk=args.async_chunk,
        stage_init_timeout=args.stage_init_timeout,
        init_timeout=args.init_timeout,
        log_stats=args.log_stats,
        reliability=Reliability(
            max_respawns=args.max_respawns,
            retry_requests=args.retry_requests,
            stage_hang_timeout=args.stage_hang_timeout,
        ),
        served_model_name=args.served_model_name,
        limits=_limits(args),
    )


def _stage_flags(explicit: Mapping[str, Any]) -> dict[str, Any]:
    flags = {name: value for name, value in explicit.items() if is_stage_flag(name)}
    if (modules := flags.get("lora_modules")) is not None:
        flags["lora_modules"] = {module.name: module.path for module in modules}
    return flags


def _limits(args: argparse.Namespace) -> ServingLimits:
    most = args.max_num_queued_reqs
    if most is not None and most < 0:
        raise OmniConfigError(f"--max-num-queued-reqs {most}: should not be negative")
    return ServingLimits(
        max_num_queued_reqs=ServingLimits().max_num_queued_reqs if most is None else most,
        request_timeout=args.request_timeout,
        slow_client_timeout=args.slow_client_timeout,
        max_stream_buffer_bytes=args.max_stream_buffer_bytes,
    )


def _model(args: argparse.Namespace) -> str:
    tag = vars(args).get("model_tag")
    return tag if tag is not None else args.model
