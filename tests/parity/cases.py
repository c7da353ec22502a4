# SPDX-License-Identifier: Apache-2.0
"""Requests of mixed lengths and modalities, and how each is put to transformers and to us."""

from dataclasses import dataclass
from typing import Any

from tests.reference.hf_omni import Media
from vllm_omni.testing import media

RATE = 16_000
NO_MEDIA = Media()


@dataclass(frozen=True)
class Case:
    """One chat: OpenAI-style messages whose media parts stand for `media` in order."""

    name: str
    messages: list[dict[str, Any]]
    media: Media = NO_MEDIA
    max_tokens: int = 16
    talker_max_tokens: int = 48

    def multi_modal_data(self) -> dict[str, Any]:
        """As vLLM takes it."""
        data: dict[str, Any] = {}
        if self.media.images:
            data["image"] = list(self.media.images)
        if self.media.audios:
            data["audio"] = [(sound, RATE) for sound in self.media.audios]
        if self.media.videos:
            data["video"] = list(self.media.videos)
        return data


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


IMAGE = {"type": "image"}
AUDIO = {"type": "audio"}
VIDEO = {"type": "video"}


def cases() -> list[Case]:
    """Text, image, audio, video and mixes; short and long; one turn and several."""
    picture, other = media.image(64, 48, seed=1), media.image(80, 64, seed=2)
    sound, long_sound = media.sound(1.0, RATE, seed=3), media.sound(2.3, RATE, seed=4)
    film = media.video(4, 64, 48, seed=5)
    return [
        Case("text", [user(text("hello world, how are you?"))]),
        Case("text_short", [user(text("hi"))], max_tokens=24),
        Case(
            "text_long",
            [user(text("tell me a tale of a tiny model that could hear and see. " * 6))],
            max_tokens=8,
        ),
        Case("image", [user(IMAGE, text("what is it?"))], Media(images=[picture])),
        Case(
            "two_images",
            [user(IMAGE, text("and"), IMAGE, text("differ how?"))],
            Media(images=[picture, other]),
            max_tokens=12,
        ),
        Case("audio", [user(AUDIO, text("repeat it"))], Media(audios=[sound])),
        Case("audio_long", [user(text("listen"), AUDIO)], Media(audios=[long_sound])),
        Case("video", [user(VIDEO, text("what happens?"))], Media(videos=[film])),
        Case(
            "mix",
            [user(IMAGE, text("see and hear"), AUDIO)],
            Media(images=[other], audios=[sound]),
            max_tokens=10,
        ),
        Case(
            "turns",
            [
                {"role": "system", "content": "be brief"},
                user(text("first"), IMAGE),
                {"role": "assistant", "content": "a picture"},
                user(AUDIO, text("and this?")),
            ],
            Media(images=[picture], audios=[sound]),
        ),
        Case(
            "video_audio",
            [user(VIDEO, text("with"), AUDIO)],
            Media(videos=[film], audios=[sound]),
            max_tokens=6,
        ),
    ]
