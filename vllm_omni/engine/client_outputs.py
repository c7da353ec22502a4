# SPDX-License-Identifier: Apache-2.0
"""Turning a final stage's output into what the caller gets."""

from collections.abc import Mapping

import numpy as np
from vllm.outputs import RequestOutput

from vllm_omni.config.pipeline import Pipeline, Stage
from vllm_omni.connectors.base import OmniConnector
from vllm_omni.engine.messages import Emit, Message
from vllm_omni.engine.request_state import RequestState
from vllm_omni.outputs import (
    STEP,
    STEPS,
    AudioOutput,
    ImageOutput,
    OmniRequestOutput,
    ProgramOutput,
    Progress,
    StageOutput,
    TokenOutput,
    VideoOutput,
)


def client_output(
    stage_id: int,
    modality: str,
    state: RequestState,
    output: StageOutput,
    connector: OmniConnector,
) -> OmniRequestOutput | None:
    """The caller's view of a stage output; None if it adds nothing for the caller."""
    if isinstance(output, TokenOutput):
        assert output.output is not None
        text = state.assemble_text(output.output)
        return None if text is None else _text_output(stage_id, text)
    return _program_output(stage_id, modality, output, connector)


def made_modality(stage: Stage, output: StageOutput) -> str | None:
    """What a stage's output is for the caller; None if nothing."""
    if isinstance(output, ProgramOutput) and output.modality in stage.also_makes:
        return output.modality
    return stage.final_output


def mark_last(state: RequestState, messages: list[Message], pipeline: Pipeline) -> None:
    """Mark a finished request's last output among a step's messages.

    A modality that stayed silent gets an empty output, and so does the request if a stage that
    gives the caller nothing ended last.
    """
    spoken = {name for name in state.times if state.needed[name].final_output is not None}
    wanted = [
        s for s in state.needed.values() if state.modalities & {s.final_output, *s.also_makes}
    ]
    for stage in wanted:
        if stage.name not in spoken:
            messages.append(_empty_output(state, stage, pipeline))
    own = [i for i, m in enumerate(messages) if _is_output_of(m, state)]
    if not own:
        own = [len(messages)]
        messages.append(_empty_output(state, wanted[0], pipeline))
    emit = messages[own[-1]]
    assert isinstance(emit, Emit)
    emit.output.stage_metrics = state.metrics()
    messages[own[-1]] = Emit(emit.request_id, emit.output, last=True)


def _is_output_of(message: Message, state: RequestState) -> bool:
    return isinstance(message, Emit) and message.request_id == state.request_id


def _empty_output(state: RequestState, stage: Stage, pipeline: Pipeline) -> Emit:
    """The end of a modality that a request asked for and that came out empty."""
    assert stage.final_output is not None
    output = OmniRequestOutput(
        state.request_id,
        final_output_type=stage.final_output,
        stage_id=pipeline.stage_id(stage.name),
        finished=True,
    )
    return Emit(state.request_id, output)


def _text_output(stage_id: int, output: RequestOutput) -> OmniRequestOutput:
    return OmniRequestOutput.from_request_output(output, "text", stage_id)


def _program_output(
    stage_id: int, modality: str, output: ProgramOutput, connector: OmniConnector
) -> OmniRequestOutput | None:
    made = OmniRequestOutput(
        output.request_id,
        final_output_type=modality,
        stage_id=stage_id,
        finished=output.finished,
    )
    if STEP in output.meta:
        made.progress = Progress(int(output.meta[STEP]), int(output.meta[STEPS]))
    if output.payload is not None:
        tensors = connector.get("", "client", output.payload.key, output.payload)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        _fill(made, modality, arrays, output.meta)
    elif not output.finished and made.progress is None:
        return None
    return made


def _fill(
    made: OmniRequestOutput,
    modality: str,
    arrays: dict[str, np.ndarray],
    meta: Mapping[str, int | float | str],
) -> None:
    """Put what a program made where callers look for it."""
    if "seed" in meta:
        made.seed = int(meta["seed"])
    rate = int(meta["sample_rate"]) if "sample_rate" in meta else None
    # With the output type `pt` there are floats, which are no pictures.
    shown = modality in arrays and arrays[modality].dtype == np.uint8
    if modality == "image" and shown:
        made.image = ImageOutput(arrays.pop("image"))
    elif modality == "video" and shown:
        fps = float(meta["fps"]) if "fps" in meta else None
        sound = arrays.pop("audio", None)
        made.video = VideoOutput(arrays.pop("video"), fps, sound, rate)
    elif modality == "audio" and "audio" in arrays:
        made.audio = AudioOutput(samples=arrays.pop("audio"), sample_rate=rate or 0)
    made.latents = arrays
