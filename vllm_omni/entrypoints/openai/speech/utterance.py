# SPDX-License-Identifier: Apache-2.0
"""One text being spoken: the engine's pieces of sound as pieces of a file."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np

from vllm_omni.entrypoints.openai.protocol.speech import SpeechUsage
from vllm_omni.entrypoints.openai.speech.asking import Asked
from vllm_omni.entrypoints.openai.speech.service import Speech
from vllm_omni.media.sound_writer import SoundWriter, whole_file
from vllm_omni.outputs import OmniRequestOutput, StageMetrics


@dataclass(slots=True)
class Utterance:
    """One text being spoken, once.

    Attributes:
        speech: Who speaks.
        asked: What.
        request_id: The engine's name for it.
        sample_rate: Of the file, Hz; known with its first piece.
        usage: What it took; known at its end.
        stages: Timing of each stage; known at its end.
    """

    speech: Speech
    asked: Asked
    request_id: str
    sample_rate: int = 0
    usage: SpeechUsage = field(default_factory=SpeechUsage)
    stages: tuple[StageMetrics, ...] = ()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The file as it is made; each piece has something in it.

        A model that makes no sound makes a file of no length.
        """
        writer: SoundWriter | None = None
        async with aclosing(self._sounds()) as sounds:
            async for samples, rate in sounds:
                if writer is None:
                    writer = self._writer(rate)
                if data := await asyncio.to_thread(writer.feed, samples):
                    yield data
        writer = writer or self._writer(self.speech.offer.sample_rate)
        if data := await asyncio.to_thread(writer.finish):
            yield data

    async def file(self) -> bytes:
        """The whole file, its length in its header."""
        rate, pieces = self.speech.offer.sample_rate, []
        async with aclosing(self._sounds()) as sounds:
            async for samples, each in sounds:
                rate = each
                pieces.append(samples)
        options = self.asked.options
        data, self.sample_rate = await asyncio.to_thread(
            whole_file, pieces, options.format, rate, options.sample_rate, options.tempo
        )
        return data

    async def _sounds(self) -> AsyncGenerator[tuple[np.ndarray, int], None]:
        """The engine's pieces and their rates."""
        async with aclosing(self.speech.outputs(self.asked, self.request_id)) as outputs:
            async for output in outputs:
                self._count(output)
                if output.audio is not None and output.audio.samples.size:
                    yield output.audio.samples.reshape(-1), output.audio.sample_rate

    def _count(self, output: OmniRequestOutput) -> None:
        self.stages = output.stage_metrics or self.stages
        entry = self.speech.engine.pipeline.entry.name
        for stage in output.stage_metrics:
            if stage.stage == entry:
                self.usage.input_tokens = stage.prompt_tokens
                self.usage.output_tokens = stage.tokens
        self.usage.total_tokens = self.usage.input_tokens + self.usage.output_tokens

    def _writer(self, rate: int) -> SoundWriter:
        options = self.asked.options
        writer = SoundWriter(options.format, rate, options.sample_rate, options.tempo)
        self.sample_rate = writer.sample_rate
        return writer
