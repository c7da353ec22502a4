# SPDX-License-Identifier: Apache-2.0
"""The HTTP application: vLLM's, with this project's routes before its own.

vLLM's application is built whole and nothing of it is removed. Our routers come first in the list
of routes, so where a path is the same ours answers; OpenAPI shows ours as well. Everything that
our routes need is in `app.state` under names starting with `omni_`.
"""

from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.datastructures import State
from starlette.middleware import Middleware
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import resolve_default_chat_template_kwargs
from vllm.entrypoints.launchers.utils.server_utils import lifespan
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.instrumentator import health
from vllm.entrypoints.serve.instrumentator.metrics import attach_router as attach_metrics
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.logger import init_logger
from vllm.renderers.chat_utils import load_chat_template
from vllm.tasks import SupportedTask

from vllm_omni.entrypoints.admission import Admission
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.access import (
    HEALTH,
    METRICS,
    ApiKeyMiddleware,
    WebSocketOriginMiddleware,
)
from vllm_omni.entrypoints.openai.admission import AdmissionMiddleware
from vllm_omni.entrypoints.openai.error_handlers import install_error_handlers
from vllm_omni.entrypoints.openai.generation.films import sync_timeout_s
from vllm_omni.entrypoints.openai.generation.service import MADE, ROUTES, Generation
from vllm_omni.entrypoints.openai.headers import SecurityHeadersMiddleware
from vllm_omni.entrypoints.openai.large_bodies import LargeBodyMiddleware
from vllm_omni.entrypoints.openai.media_budget import MediaBudgetMiddleware
from vllm_omni.entrypoints.openai.middleware import BodyLimitMiddleware, RequestIdMiddleware
from vllm_omni.entrypoints.openai.realtime.limits import RealtimeLimits
from vllm_omni.entrypoints.openai.realtime.sessions import realtime_sessions
from vllm_omni.entrypoints.openai.routes import (
    audio_generate,
    chat,
    diffusion_chat,
    elsewhere,
    images,
    realtime,
    responses,
    server,
    speech,
    videos,
    voices,
)
from vllm_omni.entrypoints.openai.serving_chat import OmniServingChat
from vllm_omni.entrypoints.openai.serving_speech_to_text import (
    OmniServingTranscription,
    OmniServingTranslation,
)
from vllm_omni.entrypoints.openai.speech.service import Speech
from vllm_omni.entrypoints.openai.speech.session import speech_sessions
from vllm_omni.entrypoints.openai.videos.jobs import VideoJobs
from vllm_omni.entrypoints.openai.videos.storage import video_store
from vllm_omni.entrypoints.playground.assets import PATH as PLAYGROUND
from vllm_omni.entrypoints.playground.assets import open_paths as playground_paths
from vllm_omni.entrypoints.playground.assets import read_assets
from vllm_omni.entrypoints.playground.offer import (
    Offer,
    chat_offer,
    generation_offer,
    speech_offer,
)
from vllm_omni.entrypoints.playground.routes import playground_router
from vllm_omni.speech.family import SpeechOffer

logger = init_logger(__name__)


async def build_omni_app(
    engine_client: AsyncOmni, args: Namespace, entry_sampling: Mapping[str, Any]
) -> FastAPI:
    """The application that serves a pipeline.

    Args:
        engine_client: The pipeline.
        args: Flags of `vllm serve --omni`.
        entry_sampling: Sampling defaults of the entry stage.
    """
    if (offer := engine_client.speech) is not None:
        return build_speech_app(engine_client, offer, args)
    if engine_client.pipeline.entry.takes_generation:
        return build_generation_app(engine_client, args)
    tasks = await engine_client.get_supported_tasks()
    logger.info("Supported tasks: %s", tasks)
    app = build_app(args, tasks, engine_client.model_config)
    app.middleware_stack = None  # built in build_app already; Starlette builds it anew when started
    include_first(app, omni_routers(tasks))
    install_error_handlers(app)
    add_middleware(app, args, engine_client.admission)
    await init_app_state(engine_client, app.state, args, tasks)
    if "generate" in tasks:
        makes = " and ".join(engine_client.pipeline.output_modalities)
        include_elsewhere(app, makes, "/v1/chat/completions")
        names = [each.name for each in app.state.openai_serving_models.base_model_paths]
        include_playground(app, args, partial(chat_offer, engine_client, names))
        init_chat_state(engine_client, app.state, args, entry_sampling)
        app.state.omni_realtime = realtime_sessions(
            app.state.omni_serving_chat, RealtimeLimits.of(args)
        )
    if "transcription" in tasks:
        init_speech_to_text_state(engine_client, app.state, args)
    return app


def build_generation_app(engine_client: AsyncOmni, args: Namespace) -> FastAPI:
    """The application of a pipeline without a language model at its entry.

    vLLM's has no routes for it, so this one has only ours and what is said about any server.
    """
    app = _own_app(engine_client, args, GENERATION_ROUTERS, _generation_lifespan)
    app.state.omni_generation = Generation.of(engine_client, app.state.omni_models, args)
    modality = app.state.omni_generation.modality
    include_elsewhere(app, MADE[modality], ROUTES[modality])
    if modality == "video":
        app.state.omni_video_jobs = VideoJobs(video_store(args))
        app.state.omni_video_sync_timeout = sync_timeout_s()
    names = [each.name for each in app.state.omni_models]
    include_playground(app, args, partial(generation_offer, app.state.omni_generation, names))
    return app


def build_speech_app(engine_client: AsyncOmni, offer: SpeechOffer, args: Namespace) -> FastAPI:
    """The application of a text-to-speech pipeline.

    Its language model makes frames of a codec, so vLLM's routes, which are about text, make no
    sense.
    """
    app = _own_app(engine_client, args, SPEECH_ROUTERS, lifespan)
    app.state.omni_speech = Speech.of(engine_client, offer, app.state.omni_models, args)
    include_elsewhere(app, "speech", "/v1/audio/speech")
    names = [each.name for each in app.state.omni_models]
    include_playground(app, args, partial(speech_offer, app.state.omni_speech, names))
    limits = RealtimeLimits.of(args)
    app.state.omni_speech_sessions = speech_sessions(app.state.omni_speech, limits)
    return app


def _own_app(
    engine_client: AsyncOmni, args: Namespace, routers: Sequence[APIRouter], life: Any
) -> FastAPI:
    """An application without vLLM's routes but for those about any server."""
    documented = {} if not args.disable_fastapi_docs else _UNDOCUMENTED
    app = FastAPI(title="vLLM-Omni", lifespan=life, **documented)
    app.root_path = args.root_path
    for router in (*routers, server.router, health.router):
        app.include_router(router)
    attach_metrics(app)
    init_entrypoints_middleware(args, app, ())
    init_exception_handler(app)
    install_error_handlers(app)
    add_middleware(app, args, engine_client.admission)
    app.state.engine_client = engine_client
    app.state.args = args
    app.state.log_stats = not args.disable_log_stats
    app.state.omni_models = [
        BaseModelPath(name=name, model_path=args.model)
        for name in args.served_model_name or [args.model]
    ]
    return app


@asynccontextmanager
async def _generation_lifespan(app: FastAPI) -> AsyncIterator[None]:
    """vLLM's, and the end of what runs in the background."""
    async with lifespan(app):  # which deletes the application's state
        yield
        if app.state.omni_generation.modality == "video":
            await app.state.omni_video_jobs.close()


GENERATION_ROUTERS = (
    images.router,
    videos.router,
    audio_generate.router,
    diffusion_chat.router,
)

SPEECH_ROUTERS = (speech.router, voices.router)

_UNDOCUMENTED: Mapping[str, Any] = {"openapi_url": None, "docs_url": None, "redoc_url": None}


def add_middleware(app: FastAPI, args: Namespace, admission: Admission) -> None:
    """Add ours around vLLM's and the user's; the last one added meets a request first.

    The door and what follows it come behind all of these: who is not let in does not wait.
    """
    keys = api_keys(args)
    door = Middleware(AdmissionMiddleware, admission=admission, keyed=bool(keys))
    app.user_middleware += [door, Middleware(LargeBodyMiddleware)]
    app.add_middleware(MediaBudgetMiddleware, max_media=args.max_media_per_request)
    app.add_middleware(BodyLimitMiddleware, max_bytes=args.max_body_bytes)
    app.add_middleware(WebSocketOriginMiddleware, allowed_origins=args.allowed_origins)
    if keys:
        open_paths = [HEALTH, *((METRICS, f"{METRICS}/") if args.open_metrics else ())]
        open_paths += () if args.disable_playground else playground_paths()
        app.add_middleware(ApiKeyMiddleware, keys=keys, open_paths=open_paths)
    app.add_middleware(SecurityHeadersMiddleware)
    app.add_middleware(RequestIdMiddleware)


def omni_routers(tasks: tuple[SupportedTask, ...]) -> list[APIRouter]:
    """Our routers for what the pipeline can do."""
    return [chat.router, realtime.router, responses.router] if "generate" in tasks else []


def include_first(app: FastAPI, routers: list[APIRouter]) -> None:
    """Include routers so that they win over routes that the application already has.

    A route behind one of ours leaves the OpenAPI document, where a path and method appear once.
    """
    theirs = list(app.router.routes)
    app.router.routes.clear()
    for router in routers:
        app.include_router(router)
    ours = {
        (route.path, method)
        for route in app.router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    for route in theirs:
        if isinstance(route, APIRoute) and any((route.path, m) in ours for m in route.methods):
            route.include_in_schema = False
    app.router.routes.extend(theirs)


def include_elsewhere(app: FastAPI, makes: str, route: str) -> None:
    """Have the routes of other kinds of server say what this one makes, and where."""
    taken = {each.path for each in app.router.routes if isinstance(each, APIRoute)}
    app.include_router(elsewhere.elsewhere(makes, route, taken))


def include_playground(app: FastAPI, args: Namespace, offer: Callable[[], Offer]) -> None:
    """Serve the web page, unless the flags say not to."""
    if args.disable_playground:
        return
    app.include_router(playground_router(read_assets(bool(api_keys(args))), offer))
    logger.info("There is a web page to try the model at %s", PLAYGROUND)


def api_keys(args: Namespace) -> list[str]:
    """Those that open the server; none for a server that asks for none."""
    return [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]


def init_chat_state(
    engine_client: AsyncOmni, state: State, args: Namespace, entry_sampling: Mapping[str, Any]
) -> None:
    """Make the chat handler from what `init_app_state` made."""
    state.omni_serving_chat = OmniServingChat(
        engine_client,
        state.openai_serving_models,
        args.response_role,
        entry_sampling=entry_sampling,
        online_renderer=state.online_renderer,
        request_logger=_request_logger(args),
        chat_template=load_chat_template(args.chat_template),
        chat_template_content_format=args.chat_template_content_format,
        default_chat_template_kwargs=resolve_default_chat_template_kwargs(args),
        trust_request_chat_template=args.trust_request_chat_template,
        return_tokens_as_token_ids=args.return_tokens_as_token_ids,
        enable_auto_tools=args.enable_auto_tool_choice,
        exclude_tools_when_tool_choice_none=args.exclude_tools_when_tool_choice_none,
        tool_parser=args.tool_call_parser,
        tool_strict_level=args.tool_strict_level,
        reasoning_parser=args.structured_outputs_config.reasoning_parser,
        enable_prompt_tokens_details=args.enable_prompt_tokens_details,
        enable_force_include_usage=args.enable_force_include_usage,
        enable_log_outputs=args.enable_log_outputs,
        enable_log_deltas=args.enable_log_deltas,
        enable_per_request_metrics=args.enable_per_request_metrics,
    )


def init_speech_to_text_state(engine_client: AsyncOmni, state: State, args: Namespace) -> None:
    """Put our handlers where vLLM's routes look for theirs."""
    options = {
        "request_logger": _request_logger(args),
        "enable_force_include_usage": args.enable_force_include_usage,
    }
    models = state.openai_serving_models
    for theirs in (state.openai_serving_transcription, state.openai_serving_translation):
        theirs.shutdown()
    state.openai_serving_transcription = OmniServingTranscription(engine_client, models, **options)
    state.openai_serving_translation = OmniServingTranslation(engine_client, models, **options)


def _request_logger(args: Namespace) -> RequestLogger | None:
    return RequestLogger(max_log_len=args.max_log_len) if args.enable_log_requests else None
