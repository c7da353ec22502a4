# SPDX-License-Identifier: Apache-2.0
"""What the routes of a diffusion pipeline share: its engine, its names, and the bounds it keeps."""

import argparse
import string
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from fastapi import Request
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.logger import init_logger

from vllm_omni.config.diffusers import arguments_of, model_index, pipeline_class
from vllm_omni.config.diffusers_tasks import choose, classes_of
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.addresses import AddressPolicy
from vllm_omni.entrypoints.openai.engine_outputs import told
from vllm_omni.entrypoints.openai.generation.fields import in_fields_of
from vllm_omni.entrypoints.openai.media_fetch import FetchSettings
from vllm_omni.entrypoints.openai.middleware import REQUEST_ID_HEADER
from vllm_omni.entrypoints.openai.protocol.diffusion import DiffusionRequest, at_fault
from vllm_omni.entrypoints.openai.protocol.unknown import unknown_parameter
from vllm_omni.entrypoints.openai.references import References
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import OmniDiffusionSamplingParams
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.pipelines.diffusers import runs_diffusers

logger = init_logger(__name__)

DEFAULT_MAX_IMAGE_PIXELS = 7680 * 4320
"""`--max-generated-image-size`."""
MAX_VIDEO_PIXELS = 1 << 32
"""Pixels of all frames of a video: 12 GiB decoded."""

ROUTES: Mapping[str, str] = {
    "image": "/v1/images/generations",
    "video": "/v1/videos",
    "audio": "/v1/audio/generate",
}
MADE: Mapping[str, str] = {"image": "pictures", "video": "videos", "audio": "sounds"}
"""What a pipeline makes, by its modality, in words."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A diffusion pipeline behind HTTP.

    Attributes:
        engine: Runs it.
        models: Its names.
        references: Reads what requests bring.
        max_pixels: Most pixels of a picture, or of a frame.
        logged: Fields without effect that the log has told of.
    """

    engine: AsyncOmni
    models: Sequence[BaseModelPath]
    references: References
    max_pixels: int
    logged: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls, engine: AsyncOmni, models: Sequence[BaseModelPath], args: argparse.Namespace
    ) -> "Generation":
        """From the flags of `vllm serve --omni`."""
        most = args.max_generated_image_size
        return cls(engine, models, References(fetch_settings(args), most), most)

    @property
    def modality(self) -> str:
        """What the pipeline makes."""
        return str(self.engine.pipeline.output_modalities[0])

    def check_makes(self, modality: str) -> None:
        """See that this is the route for what the pipeline makes.

        Raises:
            OmniClientError: It is not; says which one is.
        """
        if self.modality != modality:
            raise OmniClientError(
                f"model: {self.models[0].name} makes {self.modality}; use "
                f"{ROUTES.get(self.modality, 'another route')}",
                param="model",
            )

    def served_name(self, name: str | None) -> str:
        """The model's name as the client gave it, or its first one.

        Raises:
            OmniClientError: It is another model's.
        """
        return served_name(self.models, name)

    def model_header(self, name: str | None) -> dict[str, str]:
        """The header that names the model of an answer that is a file. See `served_name`."""
        return model_header(self.served_name(name))

    def check_fields(self, body: DiffusionRequest, ignored: Iterable[str] = ()) -> None:
        """Refuse what is neither a field nor an argument of the pipeline, and log what is ignored.

        May import pipelines of diffusers: not for the event loop.

        Args:
            body: The request.
            ignored: Fields that were given and have no effect.

        Raises:
            OmniClientError: Names the field, and the one that was likely meant.
        """
        if unknown := body.unknown():
            arguments: frozenset[str] = frozenset()
            if runs_diffusers(self.engine.pipeline):
                arguments = arguments_of(pipeline_class(self.engine.pipeline.name))
            fields = {*type(body).model_fields, *arguments}
            for name in unknown:
                if name not in arguments:
                    raise unknown_parameter(name, fields)
        settings = self.engine.diffusion_settings
        assert settings is not None  # every pipeline that comes here has them
        for name in ("vae_use_slicing", "vae_use_tiling"):
            asked = getattr(body, name)
            if asked is not None and asked != getattr(settings, name):
                flag = name.replace("_", "-")
                raise at_fault(name, f"is the same for all requests to this server: --{flag}")
        given = [n for n in body.WITHOUT_EFFECT if n in body.model_fields_set]
        for name in {*given, *ignored} - self.logged:
            self.logged.add(name)
            logger.info("%s: has no effect with this model (logged once)", name)

    def check_model(self, body: DiffusionRequest, media: Iterable[str]) -> None:
        """Refuse what the checkpoint's pipelines cannot take, as far as its files tell.

        Reads files and imports pipelines of diffusers: not for the event loop.

        Args:
            body: The request.
            media: What comes along, by the engine's names.

        Raises:
            OmniClientError: Names what is at fault as the engine does.
        """
        if not runs_diffusers(self.engine.pipeline):
            return
        settings = self.engine.diffusion_settings
        assert settings is not None  # every diffusers pipeline has them
        model, revision = settings.model, settings.revision
        chosen = choose(classes_of(model, revision, self.engine.pipeline.name), media)
        experts = model_index(model, revision).get("transformer_2") or (None,)
        if body.guidance_scale_2 is not None and experts[0] is None:
            raise at_fault("guidance_scale_2", f"{chosen.__name__} of this model has one expert")

    def takes(self, media: Iterable[str]) -> bool:
        """Whether requests may bring just these media, as `check_model` takes them; like that not
        for the event loop."""
        if not runs_diffusers(self.engine.pipeline):
            return True
        settings = self.engine.diffusion_settings
        assert settings is not None  # every diffusers pipeline has them
        classes = classes_of(settings.model, settings.revision, self.engine.pipeline.name)
        try:
            choose(classes, media)
        except OmniClientError:
            return False
        return True

    def check_size(self, size: tuple[int, int] | None, param: str, frames: int = 1) -> None:
        """Refuse what is larger than this server makes.

        Raises:
            OmniClientError: Names `param`.
        """
        if size is None:
            return
        pixels = size[0] * size[1]
        if pixels > self.max_pixels:
            raise at_fault(
                param,
                f"{size[0]}x{size[1]} are {pixels} pixels, more than the {self.max_pixels} that "
                "are allowed (--max-generated-image-size)",
            )
        if pixels * frames > MAX_VIDEO_PIXELS:
            raise at_fault(
                param, f"{frames} frames of {size[0]}x{size[1]} are more than this server makes"
            )

    def outputs(
        self,
        body: DiffusionRequest,
        prompt: Mapping[str, Any],
        params: OmniDiffusionSamplingParams,
        request_id: str,
        *,
        timeout: float | None = None,
        names: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Run a request.

        Args:
            body: As it came, for errors to be in its words.
            prompt: As `AsyncOmni.generate` takes it.
            params: As `AsyncOmni.generate` takes it.
            request_id: For the log.
            timeout: Seconds that it may take.
            names: See `in_fields_of`.

        Raises:
            StageUnavailableError: The process that worked on it has ended.
        """
        outputs = self.engine.generate(prompt, params, request_id, timeout=timeout)
        return told(outputs, partial(in_fields_of, body=body, names=names))


def fetch_settings(args: argparse.Namespace) -> FetchSettings:
    """What URLs of media may lead to, by the flags of `vllm serve --omni`."""
    domains = tuple(args.allowed_media_domains or ())
    policy = AddressPolicy(tuple(args.allowed_media_networks), named_hosts=bool(domains))
    return FetchSettings(policy, domains)


def model_header(name: str) -> dict[str, str]:
    """The header of a model's name, percent-encoded beyond ASCII."""
    return {"X-Model": quote(name, safe=string.punctuation.replace("%", "") + " ")}


def served_name(models: Sequence[BaseModelPath], name: str | None) -> str:
    """A model's name as the client gave it, or the first one.

    Raises:
        OmniClientError: It is another model's.
    """
    names = [model.name for model in models]
    if name is None or name == "":
        return names[0]
    if name not in names:
        raise OmniClientError(
            f"The model {name!r} does not exist; this server has {', '.join(names)}.",
            HTTPStatus.NOT_FOUND,
            "NotFoundError",
            param="model",
            code="model_not_found",
        )
    return name


def generation_of(request: Request) -> Generation:
    """That of the application which a request came to."""
    generation: Generation = request.app.state.omni_generation
    return generation


def request_id_of(request: Request, prefix: str) -> str:
    """The engine's name for a request: the one that its client knows, under a prefix."""
    return f"{prefix}-{request.headers[REQUEST_ID_HEADER]}"
