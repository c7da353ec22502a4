# SPDX-License-Identifier: Apache-2.0
"""What comes out of a stage, and what a caller gets."""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np
from PIL import Image
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_omni.handles import RowSpan, TensorHandle


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error that belongs to one request, as it travels between processes (row A-45).

    Attributes:
        param: The request field at fault, of a client error.
    """

    message: str
    status_code: int | None = None
    error_type: str | None = None
    param: str | None = None


NO_ROOM = ErrorInfo(
    message="shared memory is full: the stages of this request cannot exchange their tensors",
    status_code=int(HTTPStatus.SERVICE_UNAVAILABLE),
)
"""Of a request whose tensors a connector had no room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """What an autoregressive stage produced for one request in one engine step.

    Attributes:
        request_id: The pipeline's request id.
        new_token_ids: Tokens sampled in this step (of the first completion, where n > 1).
        prompt_token_ids: The stage's whole prompt, multimodal placeholders expanded; None but in
            the first output of the request.
        shown_tokens: How many of all tokens so far the text shows for good; None if no stop string
            can cut it.
        spans: Rows emitted since the last output. They cover fed positions: the prompt and every
            sampled token that has been fed back, so they trail the tokens by one.
        finished: This is the request's last output.
        finish_reason: vLLM's (`stop`, `length`, ...), with the last output.
        error: The stage cannot go on with this request, which has not ended there.
        output: vLLM's own output object of this step, for final-output stages.
    """

    request_id: str
    new_token_ids: list[int]
    prompt_token_ids: list[int] | None = None
    shown_tokens: int | None = None
    spans: tuple[RowSpan, ...] = ()
    finished: bool = False
    finish_reason: str | None = None
    error: ErrorInfo | None = None
    output: RequestOutput | None = None


STEP = "step"
STEPS = "steps"
"""In `ProgramOutput.meta`: how far a request is."""


class ProgramOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a program of the diffusion engine emitted for one request.

    Attributes:
        payload: The tensors (`audio`: float32 [samples], ...), or None in a bare end mark.
        modality: `audio`, `image`, `video`, ...
        meta: Facts about the payload (`sample_rate` in Hz, ...).
        finished: The program has ended; nothing follows.
        error: It ended by this error.
        get_s: Seconds that reading its input has taken since the output before.
    """

    request_id: str
    modality: str
    payload: TensorHandle | None = None
    meta: dict[str, int | float | str] = {}
    finished: bool = False
    error: ErrorInfo | None = None
    get_s: float = 0.0


StageOutput = TokenOutput | ProgramOutput


@dataclass(frozen=True, slots=True)
class StageMetrics:
    """Timing of one stage for one request, in seconds since the request arrived."""

    stage: str
    replica: int
    submitted_s: float
    first_output_s: float | None = None
    finished_s: float | None = None
    outputs: int = 0
    tokens: int = 0
    prompt_tokens: int = 0


@dataclass(slots=True)
class AudioOutput:
    """A piece of sound.

    Attributes:
        samples: float32 [n], mono, in [-1, 1]; [outputs, channels, n] of a diffusion pipeline.
        sample_rate: Hz.
    """

    samples: np.ndarray
    sample_rate: int


@dataclass(slots=True)
class ImageOutput:
    """Pictures.

    Attributes:
        pixels: uint8 [n, height, width, channels].
    """

    pixels: np.ndarray

    def pictures(self) -> list[Image.Image]:
        """Each as Pillow has it."""
        return [Image.fromarray(p[..., 0] if p.shape[-1] == 1 else p) for p in self.pixels]


@dataclass(slots=True)
class VideoOutput:
    """Videos of one request, all of one size.

    Attributes:
        frames: uint8 [n, frames, height, width, 3].
        fps: Frames per second that the request asked for; None for the model's own.
        audio: float32 [n, channels, samples], or None for silent ones.
        sample_rate: Hz, of the sound.
    """

    frames: np.ndarray
    fps: float | None = None
    audio: np.ndarray | None = None
    sample_rate: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a diffusion request is: denoising steps done, of how many."""

    step: int
    steps: int


class OmniRequestOutput(RequestOutput):
    """One output of a request. It is vLLM's `RequestOutput`, so text consumers work unchanged.

    Attributes:
        stage_id: Index of the stage that made it.
        final_output_type: Its modality: `text`, `audio`, `image`, ...
        audio: The sound, if `final_output_type` is `audio`.
        image: The pictures, if it is `image`; a preview if `progress` is set.
        video: The videos, if it is `video`.
        latents: Undecoded results, floats, or the trajectory, by name, where they were asked for.
        seed: What a diffusion request's random numbers started from.
        progress: Of a diffusion request that has not ended.
        stage_metrics: Per-stage timing; with the request's last output only.
        error_status_code: Set if the request failed through the client's fault (row A-45).
        error_type: See `error_status_code`.
    """

    def __init__(
        self,
        request_id: str,
        *,
        final_output_type: str,
        stage_id: int = 0,
        finished: bool = False,
        prompt: str | None = None,
        prompt_token_ids: list[int] | None = None,
        outputs: list[CompletionOutput] | None = None,
        audio: AudioOutput | None = None,
        image: ImageOutput | None = None,
        video: VideoOutput | None = None,
        latents: Mapping[str, np.ndarray] | None = None,
        seed: int | None = None,
        progress: Progress | None = None,
        stage_metrics: tuple[StageMetrics, ...] = (),
        error_status_code: int | None = None,
        error_type: str | None = None,
        **request_output_fields: Any,
    ) -> None:
        super().__init__(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=request_output_fields.pop("prompt_logprobs", None),
            outputs=outputs or [],
            finished=finished,
            **request_output_fields,
        )
        self.stage_id = stage_id
        self.final_output_type = final_output_type
        self.audio = audio
        self.image = image
        self.video = video
        self.latents = latents or {}
        self.seed = seed
        self.progress = progress
        self.stage_metrics = stage_metrics
        self.error_status_code = error_status_code
        self.error_type = error_type

    @classmethod
    def from_request_output(
        cls, output: RequestOutput, final_output_type: str, stage_id: int
    ) -> "OmniRequestOutput":
        """The same output with our fields beside vLLM's; shares what it holds."""
        made = cls.__new__(cls)
        vars(made).update(vars(output))
        made.stage_id = stage_id
        made.final_output_type = final_output_type
        made.audio = made.image = made.video = None
        made.latents = {}
        made.seed = None
        made.progress = None
        made.stage_metrics = ()
        made.error_status_code = None
        made.error_type = None
        return made

    @classmethod
    def join(cls, parts: "list[OmniRequestOutput]") -> "OmniRequestOutput":
        """One output out of a modality's successive ones: sound is joined, text is the last."""
        last = parts[-1]
        pieces = [part.audio for part in parts if part.audio is not None]
        if pieces:
            samples = np.concatenate([piece.samples for piece in pieces])
            last.audio = AudioOutput(samples, pieces[0].sample_rate)
        return last

    @property
    def images(self) -> list[Image.Image]:
        """The pictures, if there are any."""
        return [] if self.image is None else self.image.pictures()

    @property
    def multimodal_output(self) -> dict[str, Any]:
        """The non-text result, as vLLM-Omni's users read it: `{"audio": ndarray, "sr": Hz}`,
        `{"image": [pictures]}` or `{"video": frames, "fps": n}`."""
        if self.audio is not None:
            return {"audio": self.audio.samples, "sr": self.audio.sample_rate}
        if self.image is not None:
            return {"image": self.images}
        if self.video is not None:
            video = self.video
            sound = (
                {"audio": video.audio, "sr": video.sample_rate} if video.audio is not None else {}
            )
            return {"video": video.frames, "fps": video.fps, **sound}
        return {}


@dataclass(frozen=True, slots=True)
class StageInfo:
    """What a caller may know about a running stage."""

    name: str
    stage_id: int
    engine: str
    replicas: int
    live_replicas: int
    final_output: str | None = None
