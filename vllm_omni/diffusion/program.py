# SPDX-License-Identifier: Apache-2.0
"""What a running program sees of the engine."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

from vllm_omni.diffusion.calls import Call
from vllm_omni.diffusion.collate import Collator
from vllm_omni.diffusion.jobs import Job
from vllm_omni.diffusion.switch import ProgramState
from vllm_omni.inputs import Window

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Message:
    """One message to a program, tensors in hand (see `vllm_omni.inputs.ProgramInput`).

    Attributes:
        options: What the request asks for; first message only.
        tensors: New rows by name, [rows, ...]; those of several spans joined in order.
        start: Position of the first row in the producing request; 0 if there are no tensors.
        windows: Work that became possible.
        final: No message follows.
        priority: Of the request, lower first; first message only.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    start: int = 0
    windows: tuple[Window, ...] = ()
    final: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ServedComponent:
    """A component of the replica.

    Attributes:
        proxy: The component as programs see it.
        collators: What runs its methods, by name.
    """

    proxy: nn.Module
    collators: Mapping[str, Collator]


class Receive:
    """What a program switches to the engine when it waits for a message."""


RECEIVE = Receive()


class ProgramGreenlet(greenlet):
    """The greenlet a program runs in; `getcurrent()` leads from any depth back to the program."""

    program: "Program"


class Program:
    """One request's program: the argument of `ProgramSpec.run`.

    Attributes:
        request_id: The pipeline's request id.
        options: What the request asks for.
        seed: Seed of its random numbers.
        device: Where the components are.
        generator: A CPU generator of its own, seeded with `seed`. The global generators are its
            own too while it runs, and start as `torch.manual_seed(seed)` leaves them.
        assets: What the loader shares with all programs of the replica.
    """

    def __init__(
        self,
        request_id: str,
        first: Message,
        seed: int,
        device: torch.device,
        components: Mapping[str, ServedComponent],
        assets: Mapping[str, Any],
        job: Job,
        emit: Callable[
            ["Program", str, Mapping[str, torch.Tensor] | None, Mapping[str, Any]], None
        ],
    ) -> None:
        self.request_id = request_id
        self.options = first.options
        self.seed = seed
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)
        self.assets = assets
        self.inbox: deque[Message] = deque([first])
        self.aborted = False
        self.state = ProgramState(seed, device)
        self.job = job
        self._variants: dict[str, Hashable] = {}
        self._components = components
        self._emit = emit

    def component(self, name: str, cls: type[T] | None = None) -> T:
        """A component of the replica; calling it parks the program until the result is there.

        Args:
            name: As the loader named it.
            cls: Its class, for type checkers only.
        """
        return cast(T, self._components[name].proxy)

    def has(self, component: str) -> bool:
        """Whether the replica has a component of that name."""
        return component in self._components

    def vary(self, component: str, variant: Hashable) -> None:
        """From now on call a component as a variant of itself (see `Component.within`)."""
        self._variants[component] = variant

    def variant(self, component: str) -> Hashable:
        """What a component is to be for it; None as it is."""
        return self._variants.get(component)

    def expect(self, component: str, calls: int, method: str = "forward") -> None:
        """Say how many calls of a component will follow, for the order in which requests run.

        May be said again whenever more is known; what is not said is guessed from other requests.

        Args:
            component: As the loader named it.
            calls: From now on, until the program ends or waits for a message.
            method: Which of its methods.
        """
        self.job.expect(self._components[component].collators[method], calls)

    def made(self, component: str, method: str = "forward") -> int:
        """How often it has called a component since it started or last waited for a message."""
        return self.job.made.get(self._components[component].collators[method], 0)

    def receive(self) -> Message:
        """The next message; the first call returns the message that started the program.

        Parks the program until the message is there. Not to be called after the final one.
        """
        while not self.inbox:
            self.switch_to_engine(RECEIVE)
        return self.inbox.popleft()

    def emit(
        self, modality: str, tensors: Mapping[str, torch.Tensor] | None, meta: Mapping[str, Any]
    ) -> None:
        """Send a piece of the result to the client.

        Args:
            modality: `audio`, `image`, ...
            tensors: Must not be changed afterwards; None for facts alone.
            meta: Facts about the piece (int, float or str).
        """
        self._emit(self, modality, tensors, meta)

    def switch_to_engine(self, request: Call | Receive) -> Any:
        """Give control to the engine until it has what is requested."""
        if self.aborted:
            raise GreenletExit  # a `finally` or `except` of an aborted program called a component
        return getcurrent().parent.switch(request)


def current_program() -> Program | None:
    """The program that is running, or None outside of one."""
    current = getcurrent()
    return current.program if isinstance(current, ProgramGreenlet) else None


def call_component(
    component: str, collator: Collator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a component's method: through the engine inside of a program, at once outside of one."""
    program = current_program()
    if program is None:
        return collator.function(*args, **kwargs)
    variant = program.variant(component)
    return program.switch_to_engine(Call(program, collator, args, kwargs, program.job, variant))
