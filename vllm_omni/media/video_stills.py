# SPDX-License-Identifier: Apache-2.0
"""Still pictures of a finished video: OpenAI's `variant=thumbnail` and `variant=spritesheet`."""

import math
from pathlib import Path

import av
import numpy as np
from PIL import Image

from vllm_omni.media.image_encode import encode_image

THUMBNAIL_SIDE = 512
SPRITE_SIDE = 160
MAX_SPRITES = 25
STILL_CONTENT_TYPE = "image/webp"
_QUALITY = 80


def thumbnail(video: Path) -> bytes:
    """The first frame of an MP4 as WebP, no side above `THUMBNAIL_SIDE` pixels."""
    return _webp(_stills(video, 1, THUMBNAIL_SIDE)[0])


def spritesheet(video: Path) -> bytes:
    """Up to `MAX_SPRITES` frames of an MP4, evenly spread, in rows from left to right, as WebP."""
    stills = _stills(video, MAX_SPRITES, SPRITE_SIDE)
    width, height = stills[0].size
    columns = math.ceil(math.sqrt(len(stills)))
    sheet = Image.new("RGB", (columns * width, math.ceil(len(stills) / columns) * height))
    for i, still in enumerate(stills):
        sheet.paste(still, (i % columns * width, i // columns * height))
    return _webp(sheet)


def _stills(video: Path, most: int, side: int) -> list[Image.Image]:
    """Frames, made small one by one: memory for one large frame, whatever the video's length."""
    with av.open(str(video)) as container:
        stream = container.streams.video[0]
        count = min(most, stream.frames)
        wanted = set(np.linspace(0, stream.frames - 1, count).round().astype(int).tolist())
        last = max(wanted)
        stills = []
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                still = frame.to_image()
                still.thumbnail((side, side))
                stills.append(still)
            if number == last:
                break
        return stills


def _webp(image: Image.Image) -> bytes:
    return encode_image(image, "webp", compression=_QUALITY)
