# SPDX-License-Identifier: Apache-2.0
"""Turning a final stage's output into what the caller gets."""

from vllm.outputs import RequestOutput

from vllm_omni.connectors.base import OmniConnector
from vllm_omni.engine.request_state import RequestState
from vllm_omni.outputs import (
    AudioOutput,
    OmniRequestOutput,
    ProgramOutput,
    StageOutput,
    TokenOutput,
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


def empty_output(state: RequestState, stage_id: int, modality: str) -> OmniRequestOutput:
    """The end of a modality that a request asked for and that came out empty."""
    return OmniRequestOutput(
        state.request_id, final_output_type=modality, stage_id=stage_id, finished=True
    )


def _text_output(stage_id: int, output: RequestOutput) -> OmniRequestOutput:
    return OmniRequestOutput.from_request_output(output, "text", stage_id)


def _program_output(
    stage_id: int, modality: str, output: ProgramOutput, connector: OmniConnector
) -> OmniRequestOutput | None:
    audio = None
    if output.payload is not None:
        tensors = connector.get("", "client", output.payload.key, output.payload)
        audio = AudioOutput(
            samples=tensors["audio"].numpy(), sample_rate=int(output.meta["sample_rate"])
        )
    elif not output.finished:
        return None
    return OmniRequestOutput(
        output.request_id,
        final_output_type=modality,
        stage_id=stage_id,
        finished=output.finished,
        audio=audio,
    )
