# SPDX-License-Identifier: Apache-2.0
"""Edges shared by the thinker -> talker -> codec decoder families.

They see ids, counts and handles, never tensors. A family says how a talker prompt is laid out and
which codes end a stream; what is here keeps count of what has arrived and been passed on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vllm_omni.config.pipeline import EdgeContext
from vllm_omni.errors import OmniGenerateError
from vllm_omni.framing import ChunkPolicy, Windower
from vllm_omni.handles import RowSpan
from vllm_omni.inputs import ProgramInput, RowInput, RowPrompt, Window
from vllm_omni.outputs import StageOutput, TokenOutput

NO_ROW = -1


@dataclass(frozen=True, slots=True)
class TalkerPlan:
    """How one request's talker input is laid out.

    Attributes:
        token_ids: The talker's own prompt ids.
        rows: For each of them the thinker position whose row it takes, or `NO_ROW`.
        kinds: For each of them its kind, as the talker's model class knows it.
        resume: Thinker position of the first row after the prompt; one per decode step from there.
        resume_kind: Kind of these positions.
        end_kind: Kind of the one position that follows the last of them.
    """

    token_ids: list[int]
    rows: list[int]
    kinds: bytes
    resume: int
    resume_kind: int
    end_kind: int

    @property
    def needed(self) -> int:
        """The prompt is complete once rows [0, needed) are there."""
        return max(self.resume, *(row + 1 for row in self.rows))


@dataclass(frozen=True, slots=True)
class Batch:
    """Spans taken from a `RowLedger` and where the rows of positions [start, ...) are in them."""

    spans: list[RowSpan]
    start: int
    offsets: list[int]

    def index(self, position: int) -> int:
        """Place of a position's row in the concatenated spans; `NO_ROW` stays."""
        return NO_ROW if position == NO_ROW else self.offsets[position - self.start]


class RowLedger:
    """Spans that have arrived and not been passed on.

    Rows that come again (a preempted request is recomputed) are skipped; every span is passed on
    whole and once, because reading a handle may free it.
    """

    def __init__(self) -> None:
        self.stop = 0
        """Rows [0, stop) have arrived."""
        self._taken = 0
        self._spans: list[tuple[RowSpan, int]] = []

    def add(self, spans: Sequence[RowSpan]) -> None:
        """Take in spans, in the order of their emission."""
        for span in spans:
            start, stop = span.start, span.start + span.count
            if start > self.stop:
                raise OmniGenerateError(
                    f"rows [{self.stop}, {start}) of the upstream stage never arrived"
                )
            if stop > self.stop:
                self._spans.append((span, self.stop - start))
                self.stop = stop

    def pass_through(self, span: RowSpan) -> bool:
        """Hand a span on without keeping it, if it is the next one and none waits before it."""
        if self._spans or span.start != self.stop or self._taken != self.stop:
            return False
        self.stop = self._taken = span.stop
        return True

    def ready(self, limit: int, partial: bool = False) -> int:
        """Position after the last row that `take` with the same arguments would hand out."""
        if partial or self.stop <= limit:
            return min(self.stop, limit) if self._spans or partial else self._taken
        return max((s.stop for s, _ in self._spans if s.stop <= limit), default=self._taken)

    def take(self, limit: int, partial: bool = False) -> Batch:
        """Hand out the spans whose rows all lie before `limit`; with `partial`, all that begin
        before it."""
        batch = Batch([], self._taken, [])
        base = 0
        while self._spans:
            span, skip = self._spans[0]
            if (span.start + skip if partial else span.stop - 1) >= limit:
                break
            del self._spans[0]
            batch.spans.append(span)
            batch.offsets.extend(range(base + skip, base + span.count))
            base += span.count
            self._taken = span.stop
        return batch


class TalkerEdge:
    """Thinker outputs -> the talker's rows, for one request.

    The first input is the prompt, followed in the same message by the rows that are there already;
    each later one appends rows; the last one ends with the end mark. A thinker that stops before
    there is anything to say yields nothing at all.

    Args:
        ctx: The request's context.
        plan: Lays out the talker's prompt, given the thinker's prompt ids.
    """

    def __init__(self, ctx: EdgeContext, plan: Callable[[Sequence[int]], TalkerPlan]) -> None:
        self._streaming = ctx.streaming
        self._make_plan = plan
        self._plan: TalkerPlan | None = None
        self._ledger = RowLedger()
        self._prompt_len = 0
        self._tokens = 0
        self._shown = 0
        self._next = 0
        self._started = False

    def feed(self, output: StageOutput) -> RowPrompt | RowInput | None:
        """See `EdgeState`."""
        assert isinstance(output, TokenOutput)
        if self._plan is None:
            if output.prompt_token_ids is None:
                raise OmniGenerateError("the thinker's first output lacks its prompt's ids")
            self._prompt_len = len(output.prompt_token_ids)
            self._plan = self._make_plan(output.prompt_token_ids)
            self._next = self._plan.resume
        self._tokens += len(output.new_token_ids)
        self._shown = self._tokens if output.shown_tokens is None else output.shown_tokens
        if (row := self._decode_step(self._plan, output)) is not None:
            return row
        self._ledger.add(output.spans)
        if output.finished:
            if self._ledger.stop < self._prompt_len + self._tokens - 1:
                raise OmniGenerateError(
                    f"the thinker fed {self._prompt_len + self._tokens - 1} tokens and emitted "
                    f"{self._ledger.stop} rows"
                )
            return self._advance(self._plan, final=True)
        return self._advance(self._plan, final=False) if self._streaming else None

    @property
    def _said(self) -> int:
        """Position after the last one that may be spoken.

        The last sampled token is not fed, so it is not spoken. A runner that works ahead may emit
        its row all the same. What a stop string takes from the text is not spoken either.
        """
        return self._prompt_len + min(max(self._tokens - 1, 0), self._shown)

    def _decode_step(self, plan: TalkerPlan, output: TokenOutput) -> RowInput | None:
        """What nearly every output is, and what `_advance` would make of it: rows of fed tokens
        that go on as they come. None if this is anything else."""
        if not self._started or output.finished or not self._streaming or len(output.spans) != 1:
            return None
        (span,) = output.spans
        if (
            span.start != self._next
            or span.stop > self._said
            or not self._ledger.pass_through(span)
        ):
            return None
        self._next = span.stop
        count = span.count
        return RowInput(
            spans=[span],
            index=list(range(count)),
            kinds=bytes([plan.resume_kind]) * count,
            final=False,
        )

    def _advance(self, plan: TalkerPlan, final: bool) -> RowPrompt | RowInput | None:
        ready = self._ledger.ready(self._said, partial=final)
        if not self._started and ready < plan.needed:
            return None
        if self._started and ready <= self._next and not final:
            return None
        batch = self._ledger.take(self._said, partial=final)
        following = range(self._next, max(ready, self._next))
        self._next = following.stop
        index = [batch.index(position) for position in following]
        kinds = bytes([plan.resume_kind]) * len(index)
        if final:
            index.append(NO_ROW)
            kinds += bytes([plan.end_kind])
        if self._started:
            return RowInput(spans=batch.spans, index=index, kinds=kinds, final=final)
        self._started = True
        rows = RowInput(
            spans=batch.spans,
            index=[batch.index(position) for position in plan.rows] + index,
            kinds=plan.kinds + kinds,
            final=final,
        )
        return RowPrompt(token_ids=plan.token_ids, rows=rows)


class CodecEdge:
    """Talker outputs -> decode windows for the codec decoder, for one request.

    Args:
        ctx: The request's context.
        end_ids: Codes that end the stream; they have no sound.
        drops_unfed: The last frame of a stream that `max_tokens` ended is dropped.
        policy: How the stream is cut if the deployment does not say.
        options: What the program is told about the request.
        lag: Rows after its own that a frame needs: of a delay pattern, its longest delay. The
            program makes frames of the rows.
        silent_id: Rows before the first one with another code hold no sound; None for no such
            rows. The program leaves them out as well.
    """

    def __init__(
        self,
        ctx: EdgeContext,
        *,
        end_ids: frozenset[int],
        drops_unfed: bool,
        policy: ChunkPolicy,
        options: dict[str, str],
        lag: int = 0,
        silent_id: int | None = None,
    ) -> None:
        self._streaming = ctx.streaming
        self._end_ids = end_ids
        self._drops_unfed = drops_unfed
        self._options = options
        self._lag = lag
        self._silent_id = silent_id
        self._beside = list(ctx.beside)
        self._ledger = RowLedger()
        self._windower = Windower(_policy(ctx, policy))
        self._tokens = 0
        self._started = False

    def feed(self, output: StageOutput) -> ProgramInput | None:
        """See `EdgeState`."""
        assert isinstance(output, TokenOutput)
        self._tokens += len(output.new_token_ids)
        self._skip_silence(output.new_token_ids)
        self._ledger.add(output.spans)
        if output.finished:
            return self._finish(output)
        if not self._streaming:
            return None
        frames = max(0, min(self._ledger.stop, self._tokens) - self._lag)
        windows = self._windower.push(frames - self._windower.received)
        return self._message(frames, windows, final=False) if windows else None

    def _skip_silence(self, token_ids: Sequence[int]) -> None:
        """Frames begin after the silent rows."""
        for token_id in token_ids:
            if self._silent_id is None:
                break
            if token_id == self._silent_id:
                self._lag += 1
            else:
                self._silent_id = None

    def _finish(self, output: TokenOutput) -> ProgramInput | None:
        ended = output.new_token_ids and output.new_token_ids[-1] in self._end_ids
        rows = self._tokens
        if ended or (self._drops_unfed and output.finish_reason == "length"):
            rows -= 1
        if self._ledger.stop < rows:
            raise OmniGenerateError(
                f"the talker sampled {rows} frames and emitted {self._ledger.stop}"
            )
        frames = max(0, rows - self._lag)
        if frames == 0 and not self._started:
            return None
        windows = self._windower.push(frames - self._windower.received, final=True)
        return self._message(frames, windows, final=True)

    def _message(self, frames: int, windows: list[Window], final: bool) -> ProgramInput:
        batch = self._ledger.take(frames + self._lag, partial=final)
        if len(batch.offsets) != sum(span.count for span in batch.spans):
            raise OmniGenerateError("the talker emitted part of a span of frames twice")
        options = {} if self._started else dict(self._options)
        beside = [] if self._started else self._beside
        self._started = True
        return ProgramInput(
            options=options,
            spans=[*beside, *batch.spans],
            windows=windows,
            final=final,
        )


def _policy(ctx: EdgeContext, default: ChunkPolicy) -> ChunkPolicy:
    """How a stream is cut: the deployment says it, and of the first window the request may."""
    if not ctx.streaming:
        return ChunkPolicy.one_shot()
    policy = ChunkPolicy.from_extra(ctx.extra, default)
    if ctx.initial_frames is None:
        return policy
    return replace(policy, initial=min(ctx.initial_frames, policy.steady))


def find_voice(requested: str | None, voices: Sequence[str], default: str) -> str:
    """The checkpoint's spelling of a voice, compared without case.

    Without a request it is the family's default, or the first one if the checkpoint lacks that.
    """
    by_name = {name.lower(): name for name in voices}
    if requested is not None:
        return by_name[requested.lower()]
    return by_name.get(default.lower(), voices[0])
