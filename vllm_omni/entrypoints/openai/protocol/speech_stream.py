# SPDX-License-Identifier: Apache-2.0
"""What a client of `WS /v1/audio/speech/stream` may say."""

from typing import Literal

from pydantic import Field

from vllm_omni.entrypoints.openai.protocol.speech import SpeechOptions, Text
from vllm_omni.entrypoints.openai.protocol.unknown import KnownFields
from vllm_omni.speech.splitting import Granularity


class SessionConfig(SpeechOptions):
    """`session.config`: how everything that follows is to be spoken."""

    type: Literal["session.config"] = "session.config"
    text_input_mode: Literal["buffered", "commitment"] = Field(
        default="buffered",
        description="Text is collected and split, or each `input.text` is spoken as it is.",
    )
    split_granularity: Granularity = Field(
        default="sentence", description="Where collected text is split."
    )
    stream_audio: bool = Field(
        default=False, description="Send sound as it is made; else one frame for each piece."
    )


class InputText(KnownFields):
    """`input.text`: more text."""

    type: Literal["input.text"]
    text: Text


class InputDone(KnownFields):
    """`input.done`: nothing more belongs to this text."""

    type: Literal["input.done"]


class SessionClose(KnownFields):
    """`session.close`: as `input.done`, and then the session ends."""

    type: Literal["session.close"]


SpeechEvent = SessionConfig | InputText | InputDone | SessionClose

SPEECH_EVENTS: dict[str, type[SpeechEvent]] = {
    "session.config": SessionConfig,
    "input.text": InputText,
    "input.done": InputDone,
    "session.close": SessionClose,
}
