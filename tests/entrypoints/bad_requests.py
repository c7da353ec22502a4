# SPDX-License-Identifier: Apache-2.0
"""Requests that are wrong, with what the server has to say to each."""

import base64
import json
from typing import Any, NamedTuple

from tests.entrypoints.conftest import MAX_BODY_BYTES, MODEL
from vllm_omni.testing import media

Body = dict[str, Any]


class Bad(NamedTuple):
    """A wrong request.

    Attributes:
        body: The fields that differ from a good request, or the whole raw body.
        param: The field that the error must name, or None.
        status: The HTTP status.
        says: What the message must contain.
    """

    body: Body | str | bytes
    param: str | None
    status: int = 400
    says: str = ""


def whole(body: Body | str | bytes) -> bytes:
    """What is sent."""
    if isinstance(body, dict):
        good = {"model": MODEL, "messages": said("hi"), "max_tokens": 2}
        body = json.dumps(good | body)
    return body.encode() if isinstance(body, str) else body


def said(*parts: Any) -> list[Body]:
    """One user message: a text, or content parts."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return [{"role": "user", "content": parts[0]}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]


def part(kind: str, url: str) -> Body:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def data_url(data: bytes, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def image(data: bytes) -> list[Body]:
    return said(part("image", data_url(data, "image/png")))


def video(data: bytes) -> list[Body]:
    return said(part("video", data_url(data, "video/mp4")))


def audio(data: bytes | str) -> list[Body]:
    text = data if isinstance(data, str) else base64.b64encode(data).decode()
    return said({"type": "input_audio", "input_audio": {"data": text, "format": "wav"}})


def number(field: str, literal: str) -> str:
    """A body with a number that JSON does not have."""
    good = whole({}).decode()
    return f'{good[:-1]}, "{field}": {literal}}}'


def frames(sampling: Body) -> Body:
    """A talker's parameters with those of its frames."""
    return {"temperature": 0.5, "extra_args": {"subtalker_sampling_params": sampling}}


def ten_hours() -> bytes:
    """A FLAC file whose header claims ten hours."""
    flac = bytearray(media.encode_audio(media.sound(0.3), format="flac"))
    # The last 36 of the 64 bits at offset 18 count the samples.
    assert flac[:4] == b"fLaC"
    flac[21] |= 0x0F & (10 * 3600 * 16_000 >> 32)
    flac[22:26] = (10 * 3600 * 16_000 & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(flac)


PNG = media.encode_image(media.image(32, 32))
WAV = media.encode_audio(media.sound(0.3))
MP4 = media.encode_video(media.video(4, 64, 64))
HI = [{"role": "user", "content": "hi"}]
SPEAK: Body = {"modalities": ["text", "audio"]}

MALFORMED: dict[str, Bad] = {
    "no body": Bad("", None, says="JSON object"),
    "invalid JSON": Bad('{"model": ', None, says="not valid JSON"),
    "binary": Bad(b"\xff\xfe\x00\x01\x80", None),
    "a list": Bad("[]", None, says="JSON object"),
    "null": Bad("null", None, says="JSON object"),
    "nested too deep": Bad("[" * 100_000, None),
    "number too long": Bad(number("seed", "9" * 6000), None),
    "too large": Bad({"user": "x" * MAX_BODY_BYTES}, None, 413, "--max-body-bytes"),
}

MESSAGES: dict[str, Bad] = {
    "no messages": Bad(f'{{"model": "{MODEL}"}}', "messages"),
    "empty messages": Bad({"messages": []}, "messages"),
    "messages not a list": Bad({"messages": "hi"}, "messages"),
    "no role": Bad({"messages": [{"content": "hi"}]}, "messages.0.role"),
    "null content": Bad({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    "numeric content": Bad({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    "part not an object": Bad({"messages": said("a", "b")}, "messages.0.content.0"),
    "part of unknown type": Bad(
        {"messages": said({"type": "smell", "smell": "x"})}, "messages.0.content.0.type"
    ),
    "part without a type": Bad({"messages": said({"x": 1})}, "messages"),
    "text not a string": Bad(
        {"messages": said({"type": "text", "text": 1})}, "messages.0.content.0.text"
    ),
    "half a surrogate pair": Bad(
        '{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        "messages.0.content",
    ),
    "half a surrogate pair in the model": Bad(
        '{"model": "\\ud800", "messages": [{"role": "user", "content": "hi"}]}', "model"
    ),
    "too long": Bad({"messages": said("word " * 2000)}, "messages", says="maximum context length"),
    "template of a wrong kind": Bad(
        {"chat_template_kwargs": {"messages": 3}}, "chat_template_kwargs", says="cannot use"
    ),
    "unknown sound": Bad(
        {"messages": [*HI, {"role": "assistant", "audio": {"id": "audio_x"}}, *HI]},
        "messages.1.audio.id",
        says="unknown or has expired",
    ),
    "sound without an id": Bad(
        {"messages": [*HI, {"role": "assistant", "audio": {}}, *HI]}, "messages.1.audio.id"
    ),
}

MEDIA: dict[str, Bad] = {
    "truncated image": Bad({"messages": image(PNG[:60])}, "messages", says="image"),
    "image of garbage": Bad({"messages": image(b"garbage" * 9)}, "messages", says="image"),
    "image of 0 bytes": Bad({"messages": image(b"")}, "messages", says="empty"),
    "image not base64": Bad(
        {"messages": said(part("image", "data:image/png;base64,@@@@"))}, "messages"
    ),
    "data URL without data": Bad(
        {"messages": said(part("image", "data:image/png;base64"))}, "messages"
    ),
    "data URL without base64": Bad(
        {"messages": said(part("image", "data:image/png,abc"))}, "messages", says="base64"
    ),
    "no image URL": Bad(
        {"messages": said(part("image", ""))}, "messages.0.content.0.image_url.url"
    ),
    "image URL not an object": Bad(
        {"messages": said({"type": "image_url", "image_url": "data:,"})},
        "messages.0.content.0.image_url",
    ),
    "too many images": Bad(
        {"messages": said(*[part("image", data_url(PNG, "image/png"))] * 3)},
        "messages",
        says="At most 2",
    ),
    "local file": Bad(
        {"messages": said(part("image", "file:///etc/passwd"))}, "messages", says="local files"
    ),
    "unknown scheme": Bad({"messages": said(part("image", "ftp://host/x.png"))}, "messages"),
    "no scheme": Bad({"messages": said(part("image", "x.png"))}, "messages"),
    "private address": Bad(
        {"messages": said(part("image", "http://127.0.0.1:80/x.png"))}, "messages", 422
    ),
    "metadata service": Bad(
        {"messages": said(part("image", "http://169.254.169.254/latest/"))}, "messages", 422
    ),
    "unknown host": Bad(
        {"messages": said(part("audio", "http://host.invalid/x.wav"))}, "messages", 422
    ),
    "picture too long for the model": Bad(
        {"messages": image(media.encode_image(media.image(1, 900)))},
        "messages",
        says="cannot take the media",
    ),
    "sound too short for the model": Bad(
        {"messages": audio(media.encode_audio(media.sound(0.001)))},
        "messages",
        says="cannot take the media",
    ),
    "video too short for the model": Bad(
        {"messages": video(media.encode_video(media.video(1, 64, 64)))}, "messages", says="too few"
    ),
    "sound too long for the model": Bad(
        {"messages": audio(media.encode_audio(media.sound(60.0)))},
        "messages",
        says="maximum context length",
    ),
    "image embeddings": Bad(
        {"messages": said({"type": "image_embeds", "image_embeds": "AAAA"})},
        "image_embeds",
        says="--enable-mm-embeds",
    ),
    "list of frames that are none": Bad(
        {"messages": said(part("video", "data:video/jpeg;base64,AAAA,AAAA"))},
        "messages",
        says="cannot read",
    ),
    "picture said to be a list of frames": Bad(
        {"messages": said(part("image", "data:video/jpeg;base64,AAAA"))},
        "messages",
        says="cannot read",
    ),
    "truncated audio": Bad({"messages": audio(WAV[:30])}, "messages", says="audio"),
    "audio of garbage": Bad({"messages": audio(b"zzzz" * 20)}, "messages", says="audio"),
    "audio of 0 bytes": Bad({"messages": audio(b"")}, "messages.0.content.0.input_audio.data"),
    "audio without samples": Bad({"messages": audio(WAV[:44])}, "messages", says="samples"),
    "audio not base64": Bad({"messages": audio("@@@@")}, "messages", says="audio"),
    "audio without data": Bad(
        {"messages": said({"type": "input_audio", "input_audio": {}})},
        "messages.0.content.0.input_audio.data",
    ),
    "audio not an object": Bad(
        {"messages": said({"type": "input_audio", "input_audio": "x"})},
        "messages.0.content.0.input_audio",
    ),
    "ten hours of audio": Bad({"messages": audio(ten_hours())}, "messages", says="seconds"),
    "truncated video": Bad({"messages": video(MP4[:200])}, "messages", says="video"),
    "video of garbage": Bad({"messages": video(b"garbage" * 9)}, "messages", says="video"),
    "video of 0 bytes": Bad({"messages": video(b"")}, "messages", says="empty"),
}

SAMPLING: dict[str, Bad] = {
    **{
        f"{field} {literal}": Bad(number(field, literal), field)
        for field in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty")
        for literal in ("NaN", "Infinity", "-Infinity", "1e999")
    },
    "bias NaN": Bad(number("logit_bias", '{"3": NaN}'), "logit_bias.3"),
    "negative temperature": Bad({"temperature": -1}, "temperature"),
    "top_p over 1": Bad({"top_p": 2}, "top_p"),
    "top_k under -1": Bad({"top_k": -5}, "top_k"),
    "max_tokens 0": Bad({"max_tokens": 0}, "max_tokens"),
    "max_tokens negative": Bad({"max_tokens": -1}, "max_tokens"),
    "max_tokens huge": Bad({"max_tokens": 10**9}, "max_tokens"),
    "max_tokens a string": Bad({"max_tokens": "many"}, "max_tokens"),
    "n 0": Bad({"n": 0}, "n"),
    "n huge": Bad({"n": 10**6}, "n"),
    "seed too big": Bad({"seed": 2**70}, "seed"),
    "stop empty": Bad({"stop": ""}, "stop"),
    "stop not a string": Bad({"stop": [1]}, "stop.0"),
    "bias of no token": Bad({"logit_bias": {"x": 1}}, "logit_bias"),
    "bias out of vocabulary": Bad({"logit_bias": {"99999999": 1}}, "logit_bias"),
    "top_logprobs too many": Bad({"logprobs": True, "top_logprobs": 1000}, "logprobs"),
    "min_tokens over max_tokens": Bad({"min_tokens": 100}, "min_tokens"),
}

OMNI: dict[str, Bad] = {
    "unknown model": Bad({"model": "nobody"}, "model", 404, "does not exist"),
    "unknown modality": Bad({"modalities": ["smell"]}, "modalities", says="smell"),
    "modality of other models": Bad({"modalities": ["image"]}, "modalities"),
    "no modality": Bad({"modalities": []}, "modalities"),
    "modalities not a list": Bad({"modalities": "text"}, "modalities"),
    "unknown voice": Bad(
        SPEAK | {"audio": {"voice": "Nobody", "format": "wav"}}, "audio.voice", says="than"
    ),
    "unknown voice beside": Bad(SPEAK | {"voice": "Nobody"}, "voice"),
    "unknown speaker": Bad(SPEAK | {"speaker": "Nobody"}, "speaker"),
    "voice not a string": Bad(SPEAK | {"audio": {"voice": 3}}, "audio.voice"),
    "unknown format": Bad(
        SPEAK | {"audio": {"voice": "Ethan", "format": "midi"}}, "audio.format", says="wav"
    ),
    "n with sound": Bad(SPEAK | {"n": 2}, "n"),
    "beams with sound": Bad(SPEAK | {"use_beam_search": True}, "use_beam_search"),
    "too few stages": Bad({"sampling_params_list": [{}]}, "sampling_params_list", says="talker"),
    "too many stages": Bad({"sampling_params_list": [{}] * 9}, "sampling_params_list"),
    "stages not a list": Bad({"sampling_params_list": {}}, "sampling_params_list"),
    "unknown parameter of a stage": Bad(
        {"sampling_params_list": [{}, {"tempo": 1}, {}]}, "sampling_params_list.1.tempo"
    ),
    "wrong type in a stage": Bad(
        {"sampling_params_list": [{"temperature": "x"}, {}, {}]},
        "sampling_params_list.0.temperature",
    ),
    "illegal value in a stage": Bad(
        SPEAK | {"sampling_params_list": [{}, {"top_p": 7}, {}]}, "sampling_params_list.1.top_p"
    ),
    "wrong type beside a good one": Bad(
        {"sampling_params_list": [{}, {"n": 1, "temperature": "x"}, {}]},
        "sampling_params_list.1.temperature",
        says="expected `float`",
    ),
    "illegal value beside a good one": Bad(
        SPEAK | {"sampling_params_list": [{}, {"n": 1, "presence_penalty": 3}, {}]},
        "sampling_params_list.1.presence_penalty",
    ),
    "contradiction in a stage": Bad(
        {"sampling_params_list": [{}, {"max_tokens": 2, "min_tokens": 3}, {}]},
        "sampling_params_list.1.min_tokens",
    ),
    "number too large in a stage": Bad(
        {"sampling_params_list": [{"top_k": 2**70}, {}, {}]}, "sampling_params_list.0.top_k"
    ),
    "wrong type in a frame": Bad(
        SPEAK | {"sampling_params_list": [{}, frames({"top_p": "x"}), {}]},
        "sampling_params_list.1.extra_args.subtalker_sampling_params.top_p",
    ),
    "unknown parameter in a frame": Bad(
        SPEAK | {"sampling_params_list": [{}, frames({"top_q": 1}), {}]},
        "sampling_params_list.1.extra_args.subtalker_sampling_params.top_q",
        says="did you mean 'top_p'?",
    ),
    "parameters for a stage without any": Bad(
        {"sampling_params_list": [{}, {}, {"temperature": 1}]}, "sampling_params_list.2"
    ),
    "processor options": Bad({"mm_processor_kwargs": {"fps": 1000}}, "mm_processor_kwargs"),
    "media options": Bad({"media_io_kwargs": {"video": {"num_frames": -1}}}, "media_io_kwargs"),
}

GRAMMARS: dict[str, Bad] = {
    name: Bad({"structured_outputs": grammar}, "structured_outputs")
    for name, grammar in {
        "no choice": {"choice": []},
        "regex that is none": {"regex": "("},
        "regex that nothing matches": {"regex": r"[^\s\S]"},
        "regex that nothing ends": {"regex": r"a[^\s\S]"},
        "schema that nothing fits": {"json": {"enum": []}},
        "schema of an unknown type": {"json": {"type": "nothing"}},
        "schema that contradicts itself": {"json": {"type": "integer", "minimum": 5, "maximum": 1}},
        "schema that is false": {"json": "false"},
        "schema of itself": {"json": {"$ref": "#"}},
        "schema with a bad pattern": {"json": {"type": "string", "pattern": "("}},
        "grammar without words": {"grammar": "root ::= root"},
        "grammar without an end": {"grammar": "root ::= "},
        "grammar without a root": {"grammar": 'a ::= "x"'},
        "grammar of an unknown rule": {"grammar": "root ::= foo"},
    }.items()
} | {
    "response format that nothing fits": Bad(
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"enum": []}},
            }
        },
        "response_format",
    ),
    "response format of itself": Bad(
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"$ref": "#"}},
            }
        },
        "response_format",
    ),
}

ENGINE: dict[str, Bad] = {
    **{
        f"{name} {type(value).__name__}": Bad({"vllm_xargs": {name: value}}, f"vllm_xargs.{name}")
        for name in ("kv_transfer_params", "ec_transfer_params")
        for value in ("x", 3, ["x"])
    },
    "argument of a wrong kind": Bad({"vllm_xargs": {"a": {"b": 1}}}, "vllm_xargs.a"),
    **{
        f"cut to {tokens} before its picture": Bad(
            {"messages": image(PNG), "truncate_prompt_tokens": tokens}, "truncate_prompt_tokens"
        )
        for tokens in (-1, 0, 1, 8, 400)
    },
}

BATCH: dict[str, Bad] = {
    name: Bad({"messages": [HI], name: value}, name, says="/v1/chat/completions")
    for name, value in {
        "modalities": ["text", "audio"],
        "audio": {"voice": "ethan", "format": "wav"},
        "voice": "ethan",
        "speaker": "ethan",
        "language": "en",
        "instructions": "softly",
        "additional_information": {"x": 1},
        "sampling_params_list": [{}, {}, {}],
        "return_stage_metrics": True,
        "stream": True,
    }.items()
} | {
    "cut before a picture": Bad(
        {"messages": [image(PNG)], "truncate_prompt_tokens": 8}, "truncate_prompt_tokens"
    )
}
"""For `/v1/chat/completions/batch`, whose messages are lists of conversations."""

ALL: dict[str, Bad] = MALFORMED | MESSAGES | MEDIA | SAMPLING | OMNI | GRAMMARS | ENGINE
