# SPDX-License-Identifier: Apache-2.0
"""What one model may be to different requests: with an adapter, with a request's step cache."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from torch import nn

from vllm_omni.diffusion.program import Program, current_program
from vllm_omni.diffusion.programs.diffusers.adapters import Active, Adapters
from vllm_omni.diffusion.programs.diffusers.step_cache import (
    StepCache,
    context_name,
)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Variant:
    """What a component is to be for a forward.

    Attributes:
        adapter: What it runs with.
        cache: Whose step cache it uses and changes; only forwards of that one may do so.
    """

    adapter: Active | None = None
    cache: str | None = None


AS_IT_IS = Variant()


def varied(
    program: Program, name: str, model: ModuleT, adapter: Active | None, cache: StepCache
) -> ModuleT:
    """A component's proxy as one request has it.

    Args:
        program: The request's.
        name: Of the component.
        model: Its proxy.
        adapter: What it is to run with.
        cache: Of the replica.
    """
    if name not in cache:
        program.vary(name, Variant(adapter))
        return model
    program.vary(name, Variant(adapter, context_name(program.request_id, "")))
    return cache.view(name, model, partial(_enter, name))


def _enter(name: str, context: str) -> None:
    """The running program's pipeline entered this context of a component."""
    program = current_program()
    assert program is not None
    variant = program.variant(name)
    assert isinstance(variant, Variant)
    program.vary(name, replace(variant, cache=context_name(program.request_id, context)))


def within(
    component: str, adapters: Adapters, cache: StepCache
) -> Callable[[Hashable], AbstractContextManager[nn.Module | None]]:
    """See `Component.within`."""
    return partial(_within, component, adapters, cache)


@contextmanager
def _within(
    component: str, adapters: Adapters, cache: StepCache, variant: Hashable
) -> Iterator[nn.Module | None]:
    wanted = AS_IT_IS if variant is None else variant
    assert isinstance(wanted, Variant)
    adapters.activate(component, wanted.adapter)
    with cache.entered(component, wanted.cache) as other:
        yield other
