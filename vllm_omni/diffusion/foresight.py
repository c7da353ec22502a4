# SPDX-License-Identifier: Apache-2.0
"""Running the second call of a guided step together with the first, before it is made.

Many pipelines with classifier-free guidance call their denoiser twice per step: the second time
with the negative prompt, all else being equal. The next step's first call differs from this one's
in other arguments: latents and time. Where three calls of a method are like that, the next second
call can be told from the next first one. It is put together of copies and runs in the same forward,
and its result is kept.

The program gets that result only if it makes the call with arguments that have, bit by bit, the
values that were computed with. So a wrong guess costs its share of one forward, never a wrong
result; after it, the program's calls of that method are not foreseen any more.

To compare, the host waits for the device: torch does not count what was written to tensors of
inference mode, so the same tensor need not have the same values. Nothing is foreseen where the
device is full without it, which is where running ahead of the device would pay.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch

from vllm_omni.diffusion.argument_trees import (
    Leaves,
    OpaqueArgumentError,
    Path,
    differing,
    leaves_of,
    put_together,
    seem_differing,
    size_of,
)
from vllm_omni.diffusion.calls import Call
from vllm_omni.diffusion.collate import Collator

TRIES = 8
"""Calls of a method that are looked at for a habit."""
MAX_BYTES = 64 << 20
"""Of a call's tensors: larger calls fill a device by themselves, and are too much to keep."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A result that was there before the call."""

    result: Any


class Foresight:
    """What one program is going to call next, as far as its habits tell."""

    def __init__(self) -> None:
        self._habits: dict[Collator, _Habit] = {}
        self._last: Collator | None = None
        self._guess: _Guess | None = None

    def met(self, call: Call) -> Kept | None:
        """Take note of a call that the program makes; its result, if that is there already."""
        last, self._last = self._last, call.collator
        guess, self._guess = self._guess, None
        if last is not None and last is not call.collator:
            self._habits[last].broken_off()
        habit = self._habits.setdefault(call.collator, _Habit())
        if guess is not None and guess.kept is not None and guess.call.collator is call.collator:
            if not _same(guess.call, call):
                habit.give_up()
                return None
            habit.advance()
            return guess.kept
        if habit.stage is _Stage.LEARNING:
            habit.learn(call, right_after=last is call.collator)
        else:
            habit.advance()
        return None

    def foresee(self, call: Call) -> Call | None:
        """What the program will call after a call that it is parked on, if that can be told.

        If it runs, its result goes to `keep`; if it does not run, nothing has happened.
        """
        habit = self._habits[call.collator]
        if habit.stage is not _Stage.SECOND_NEXT:
            return None
        try:
            args, kwargs = habit.second(call)
        except (OpaqueArgumentError, KeyError, torch.OutOfMemoryError):
            habit.give_up()  # it is called in another way than before, or there is no room
            return None
        foreseen = Call(call.program, call.collator, args, kwargs, call.job, call.variant)
        foreseen.autocast = call.autocast
        self._guess = _Guess(foreseen)
        return foreseen

    def keep(self, call: Call, result: Any) -> None:
        """Take the result of the call that was foreseen last."""
        assert self._guess is not None and self._guess.call is call
        self._guess.kept = Kept(result)

    def give_up(self, collator: Collator) -> None:
        """Foresee no calls of this method any more: one could not run."""
        self._guess = None
        self._habits[collator].give_up()


@dataclass(slots=True, eq=False)
class _Guess:
    call: Call
    kept: Kept | None = None


class _Stage(Enum):
    LEARNING = auto()
    FIRST_NEXT = auto()
    SECOND_NEXT = auto()
    OFF = auto()


@dataclass(slots=True, eq=False)
class _Seen:
    """A call, and what its arguments were made of then."""

    call: Call
    leaves: Leaves


@dataclass(slots=True, eq=False)
class _Habit:
    """How a program calls one method.

    Attributes:
        stage: Whether it is known, and which call is next.
        tries: Calls that were looked at.
        seen: The last one or two of them, of which the second came right after the first.
        model: A second call with nothing in it.
        own: The arguments that are a second call's own; the others are the first's.
        copies: Of the first's: (tensor, copy) of the last time.
    """

    stage: _Stage = _Stage.LEARNING
    tries: int = 0
    seen: list[_Seen] = field(default_factory=list)
    model: Call | None = None
    own: Leaves = field(default_factory=dict)
    copies: dict[Path, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def advance(self) -> None:
        """The next call was made."""
        if self.stage is _Stage.FIRST_NEXT:
            self.stage = _Stage.SECOND_NEXT
        elif self.stage is _Stage.SECOND_NEXT:
            self.stage = _Stage.FIRST_NEXT

    def broken_off(self) -> None:
        """A call of another method came next."""
        if self.stage is _Stage.SECOND_NEXT:
            self.give_up()
        elif len(self.seen) == 1:
            self.seen.clear()

    def give_up(self) -> None:
        """Foresee nothing any more, and keep nothing."""
        self.stage = _Stage.OFF
        self.seen.clear()
        self.copies.clear()
        self.model, self.own = None, {}

    def learn(self, call: Call, right_after: bool) -> None:
        """Look at a call; `right_after` the last one of this method or not."""
        self.tries += 1
        if self.tries > TRIES or call.collator.max_batch == 1:
            self.give_up()
            return
        try:
            self._learn(_Seen(call, leaves_of(call)), right_after)
        except (OpaqueArgumentError, torch.OutOfMemoryError):
            self.give_up()

    def _learn(self, now: _Seen, right_after: bool) -> None:
        if size_of(now.leaves) > MAX_BYTES:
            self.give_up()
            return
        if len(self.seen) == 2:
            first, second = self.seen
            own = _told_apart(first.leaves, second.leaves, now.leaves)
            if own:
                self._remember(second, own)
                return
        self.seen = [*self.seen[-1:], now] if right_after else [now]

    def _remember(self, second: _Seen, own: frozenset[Path]) -> None:
        args, kwargs = put_together(second.call, dict.fromkeys(second.leaves))
        self.model = Call(second.call.program, second.call.collator, args, kwargs)
        self.own = {p: _copied(leaf) for p, leaf in second.leaves.items() if p in own}
        self.seen.clear()
        self.stage = _Stage.SECOND_NEXT

    def second(self, first: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments, as copies, of the call that follows a first call.

        Raises:
            OpaqueArgumentError: The first call has an argument that it had not before.
            KeyError: It has not one that it had before.
        """
        assert self.model is not None
        leaves = {}
        for path, leaf in leaves_of(first).items():
            leaves[path] = self._copy(path, leaf) if isinstance(leaf, torch.Tensor) else leaf
        return put_together(self.model, {**leaves, **self.own})

    def _copy(self, path: Path, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, the same as last time for the same tensor: of some, digests are kept."""
        if path in self.own:
            return tensor  # not used
        known = self.copies.get(path)
        if known is None or known[0] is not tensor:
            known = self.copies[path] = (tensor, tensor.clone())
        return known[1]


def _told_apart(first: Leaves, second: Leaves, third: Leaves) -> frozenset[Path]:
    """Where a second call differs from a first one; empty if the third is not a first one again.

    In most pipelines it is not, which is to be found out without waiting for the device.
    """
    for compare in (seem_differing, differing):
        own = compare(first, second)
        if not own.isdisjoint(compare(first, third)):
            return frozenset()
    return own


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _same(guess: Call, call: Call) -> bool:
    """Whether a call is the one that was guessed."""
    if (guess.variant, guess.autocast) != (call.variant, call.autocast):
        return False
    try:
        return not differing(leaves_of(guess), leaves_of(call))
    except (OpaqueArgumentError, torch.OutOfMemoryError):
        return False
