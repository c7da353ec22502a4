# SPDX-License-Identifier: Apache-2.0
"""Serving HTTP until a signal comes, and then ending in order.

vLLM's own `serve_http` shuts the engine down before the listening socket is closed, and takes no
second signal. Here the port is closed first, requests that run are waited for as long as
`--shutdown-timeout` says, the rest fail with a clear error that their clients still get to read,
and a second signal ends everything at once.
"""

import argparse
import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from vllm import envs
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher
from vllm.logger import init_logger

from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.access_log import http_log_config
from vllm_omni.entrypoints.signals import StopSignals

logger = init_logger(__name__)

WATCH_S = 1.0
ANSWER_S = 3.0
"""What clients get to read the last of their answers, once every request has ended."""


class ServerDiedError(RuntimeError):
    """The orchestrator is broken, so the server ended itself."""


class HttpServer(uvicorn.Server):
    """Uvicorn, with signals left to `StopSignals`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See `uvicorn.Server`."""
        yield


async def serve_http(
    app: FastAPI,
    engine: AsyncOmni,
    args: argparse.Namespace,
    sock: socket.socket,
    signals: StopSignals,
) -> None:
    """Serve until a signal comes; returns when everything has ended.

    Raises:
        ServerDiedError: The orchestrator died.
    """
    config = _config(app, args)
    server = HttpServer(config)
    app.state.server = server
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals.call(lambda: loop.call_soon_threadsafe(stop.set))
    refresher = _ssl_refresher(config, args)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    watching = asyncio.create_task(_watch(engine, stop))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        if not serving.done():
            await engine.drain(args.shutdown_timeout)
            engine.fail_all("the server is shutting down")
        await serving
    finally:
        for task in (watching, stopping):
            task.cancel()
        if refresher is not None:
            refresher.stop()
    if engine.errored:
        raise ServerDiedError("the orchestrator died; its log says why")


async def _watch(engine: AsyncOmni, stop: asyncio.Event) -> None:
    engine.listen()
    while not engine.errored:
        await asyncio.sleep(WATCH_S)
    logger.error("The orchestrator died: ending the server")
    stop.set()


def _config(app: FastAPI, args: argparse.Namespace) -> uvicorn.Config:
    options: dict[str, Any] = {"log_config": http_log_config(args)}
    if args.h11_max_incomplete_event_size is not None:
        options["h11_max_incomplete_event_size"] = args.h11_max_incomplete_event_size
    config = uvicorn.Config(
        app,
        host=args.host,
        port=args.port,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        server_header=False,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        # From when the port is closed: the requests that are waited for, then their last words.
        timeout_graceful_shutdown=args.shutdown_timeout + int(ANSWER_S),
        # Up to here a client is told what is wrong; past it the connection just closes (1009).
        ws_max_size=2 * args.realtime_max_frame_bytes,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=ssl.VerifyMode(args.ssl_cert_reqs),
        ssl_ciphers=args.ssl_ciphers or "TLSv1",
        **options,
    )
    config.load()
    return config


def _ssl_refresher(config: uvicorn.Config, args: argparse.Namespace) -> SSLCertRefresher | None:
    if not args.enable_ssl_refresh or config.ssl is None:
        return None
    return SSLCertRefresher(
        ssl_context=config.ssl,
        key_path=args.ssl_keyfile,
        cert_path=args.ssl_certfile,
        ca_path=args.ssl_ca_certs,
    )
