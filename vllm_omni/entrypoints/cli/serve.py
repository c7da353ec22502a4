# SPDX-License-Identifier: Apache-2.0
"""`vllm serve MODEL --omni`."""

import argparse
import contextlib
import ipaddress
import socket
import sys
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import uvloop
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.api_server.entry import setup_server
from vllm.logger import init_logger
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.system_utils import decorate_logs

from vllm_omni.config.cli import add_omni_args, explicit_args, plan_from_args
from vllm_omni.config.flag_types import count, positive_int
from vllm_omni.config.plan import DeploymentPlan
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.cli.types import EXIT_START, fail
from vllm_omni.entrypoints.http_server import ServerDiedError, serve_http
from vllm_omni.entrypoints.openai.app import build_omni_app
from vllm_omni.entrypoints.openai.generation.service import DEFAULT_MAX_IMAGE_PIXELS
from vllm_omni.entrypoints.openai.media import use_omni_media_connector
from vllm_omni.entrypoints.openai.media_budget import DEFAULT_MAX_MEDIA
from vllm_omni.entrypoints.openai.middleware import DEFAULT_MAX_BODY_BYTES
from vllm_omni.entrypoints.openai.realtime.limits import add_realtime_args
from vllm_omni.entrypoints.openai.speech.limits import add_speech_args
from vllm_omni.entrypoints.openai.videos.storage import add_video_storage_args
from vllm_omni.entrypoints.signals import StopRequestedError, StopSignals
from vllm_omni.errors import OmniConfigError, OmniError
from vllm_omni.logs import log_as_vllm
from vllm_omni.media.decoders import close_decoders

logger = init_logger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""How long a thread that decodes media may keep the event loop waiting (Python's default: 5 ms)."""
MAX_UNSENT_BYTES = 128 * 1024
MAX_C_INT = 2**31 - 1

StartEngine = Callable[[DeploymentPlan, Callable[[], None]], AsyncOmni]
"""Starts the stages of a plan, and calls its second argument from time to time meanwhile."""


class OmniServeSubcommand(ServeSubcommand):
    """vLLM's `serve` for multi-stage pipelines: its flags and ours."""

    _parser: FlexibleArgumentParser

    def run(self, args: argparse.Namespace, argv: Sequence[str]) -> None:
        """Serve until a signal comes; returns after a clean shutdown.

        Args:
            args: What the parser made of `argv`.
            argv: Everything after `serve`.
        """
        signals = StopSignals()
        if args.model_tag is not None:
            args.model = args.model_tag
        plan = plan_from_args(args, explicit_args(self._parser, argv, args))
        run_server(args, plan, AsyncOmni.from_plan, signals)

    def validate(self, args: argparse.Namespace) -> None:
        """Check vLLM's frontend flags and refuse those that do not apply."""
        try:
            super().validate(args)
        except (ValueError, TypeError) as error:
            raise OmniConfigError(str(error)) from error
        if args.grpc:
            raise OmniConfigError("--grpc: there is no gRPC server for multi-stage pipelines")
        if args.headless:
            raise OmniConfigError("--headless: stages on other hosts are not supported yet")
        if (args.api_server_count or 1) != 1:
            raise OmniConfigError("--api-server-count: the server is one process, so it must be 1")
        args.api_server_count = None
        if args.root_path and (args.root_path[0] != "/" or args.root_path[-1] == "/"):
            raise OmniConfigError(
                f"--root-path = {args.root_path!r}: it begins with a slash and ends without one, "
                "as /omni does; other forms are found at no address"
            )

    def subparser_init(self, subparsers: Any) -> FlexibleArgumentParser:
        """vLLM's parser with our flags added."""
        parser = super().subparser_init(subparsers)
        parser.usage = "vllm serve [model_tag] --omni [options]"
        parser.description = "Serve a multi-stage, multi-modal pipeline over HTTP."
        parser.epilog = "Sections: vllm serve --omni --help=all, =listgroup, =GROUP, or =FLAG."
        add_omni_args(parser)
        add_frontend_args(parser)
        self._parser = parser
        return parser


def add_frontend_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the HTTP server."""
    group = parser.add_argument_group("OmniFrontend", "Limits of the HTTP server.")
    group.add_argument(
        "--max-body-bytes",
        type=positive_int,
        default=DEFAULT_MAX_BODY_BYTES,
        help="Largest request body; a larger one is answered with "
        f"{int(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)}.",
    )
    group.add_argument(
        "--max-media-per-request",
        type=count,
        default=DEFAULT_MAX_MEDIA,
        metavar="COUNT",
        help="Most images, sounds and videos of one request together.",
    )
    group.add_argument(
        "--allowed-media-networks",
        type=ipaddress.ip_network,
        nargs="+",
        default=[],
        metavar="CIDR",
        help="Networks that media URLs may lead to although they are not public: 10.1.0.0/16. "
        "Hosts of --allowed-media-domains may have private addresses anyway.",
    )
    group.add_argument(
        "--max-generated-image-size",
        type=positive_int,
        default=DEFAULT_MAX_IMAGE_PIXELS,
        metavar="PIXELS",
        help="Most pixels of a picture, or of a frame, that a request may ask for or bring.",
    )
    add_video_storage_args(group)
    group.add_argument(
        "--open-metrics",
        action="store_true",
        help="/metrics needs no API key, as /health never does.",
    )
    group.add_argument(
        "--disable-playground",
        action="store_true",
        help="There is no web page at /playground.",
    )
    add_realtime_args(group)
    add_speech_args(group)


def run_server(
    args: argparse.Namespace, plan: DeploymentPlan, start_engine: StartEngine, signals: StopSignals
) -> None:
    """Bind the port, start the stages, serve, and end everything.

    The port is bound first, so that a taken one is told before minutes of loading. The stages are
    started outside of the event loop, because the process that forks them is forked from this one.

    Args:
        args: Parsed flags.
        plan: What to start.
        start_engine: Starts the stages of a plan; blocks until they are ready.
        signals: Their handlers are installed.
    """
    engine: AsyncOmni | None = None
    try:
        decorate_logs("APIServer", skip_if_decorated=True)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        use_omni_media_connector(args.allowed_media_networks)
        with contextlib.closing(_bind(args)) as sock:
            engine = _started(plan, start_engine, signals)
            signals.check()
            uvloop.run(_serve(engine, args, plan, sock, signals))
    except StopRequestedError:
        logger.info("Stopped while starting.")
    except ServerDiedError as error:
        fail(str(error), EXIT_START)
    finally:
        # The loop took the handlers with it.
        signals.install()
        close_decoders()
        if engine is not None:
            engine.shutdown(0)


def _bind(args: argparse.Namespace) -> socket.socket:
    try:
        _, sock = setup_server(args, reuse_port=False)
    except KeyError as error:
        raise OmniConfigError(str(error.args[0])) from error
    except OSError as error:
        fail(f"cannot listen on {args.uds or f'port {args.port}'}: {error}", EXIT_START)
    _bound_connections(sock, args.slow_client_timeout)
    return sock


def _bound_connections(sock: socket.socket, patience_s: float) -> None:
    """Bound what the kernel holds for a client that takes nothing, and for how long.

    Connections inherit both from the listening socket. Without them the kernel takes 2.8 MB for
    each such client, and for as long as the client likes.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    # Later than the server itself gives up, which says so in the log and the metrics.
    timeout_ms = min(round(2000 * patience_s), MAX_C_INT)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def _started(plan: DeploymentPlan, start_engine: StartEngine, signals: StopSignals) -> AsyncOmni:
    try:
        engine = start_engine(plan, signals.check)
        log_as_vllm()  # an engine may have configured vLLM's log anew
        return engine
    except OmniConfigError:
        raise
    except (OmniError, RuntimeError, ValueError, OSError) as error:
        logger.debug("Start-up failed", exc_info=True)
        fail(f"start-up failed: {error}", EXIT_START)


async def _serve(
    engine: AsyncOmni,
    args: argparse.Namespace,
    plan: DeploymentPlan,
    sock: socket.socket,
    signals: StopSignals,
) -> None:
    args.custom_voice_dir = args.custom_voice_dir or plan.custom_voice_dir
    app = await build_omni_app(engine, args, plan.entry.default_sampling)
    await serve_http(app, engine, args, sock, signals)
