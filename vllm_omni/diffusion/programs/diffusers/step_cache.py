# SPDX-License-Identifier: Apache-2.0
"""Step caches: blocks of a transformer that are left out where they would change little.

A pipeline enters a `cache_context` around its calls ("cond", "uncond"), and a cache keeps what it
remembers by that name. Here a pipeline's `with` block spans the forwards of other requests, so it
only notes the name; the context itself is entered around the one forward, under a name that is the
request's own. Whether blocks are left out is decided for a whole forward, so each runs alone.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from torch import nn

from vllm_omni.diffusion.proxy import make_proxy

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class StepCache:
    """The step cache of a replica's denoisers; this one is none.

    Args:
        models: Those that have one, by name.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = models
        self._views: dict[str, Any] = {}

    def __contains__(self, component: str) -> bool:
        return component in self._models

    @property
    def remembered(self) -> frozenset[str]:
        """Names of all contexts that something is kept of."""
        return frozenset()

    def view(self, name: str, model: ModuleT, note: Callable[[str], None]) -> ModuleT:
        """A component's proxy whose contexts are only noted; made once."""
        if name not in self._views:
            self._views[name] = noting_contexts(model, note)
        return self._views[name]

    def begin(self, owner: str, steps: int | None) -> None:
        """A request begins.

        Args:
            steps: How many it will take, if that is known.
        """

    def entered(
        self, component: str, context: str | None
    ) -> AbstractContextManager[nn.Module | None]:
        """A component's context, for one forward; with what runs in its place, if something."""
        return nullcontext()

    def forget(self, owner: str) -> None:
        """Free what is kept of a request."""


def context_name(owner: str, name: str) -> str:
    """A request's context, for what its pipeline calls `name`."""
    return f"{owner}/{name}"


def noting_contexts(model: ModuleT, note: Callable[[str], None]) -> ModuleT:
    """A view of a denoiser's proxy whose `cache_context` only notes the context's name.

    Nor does the end of a pipeline's call, or of a preview, empty the model's cache: it is that of
    all requests.
    """

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        note(name)
        try:
            yield
        finally:
            note("")

    def instead(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if method == _RESET:
            return None
        # Further arguments say where the loop is; none of these caches asks.
        return noted(args[0] if args else kwargs["name"])

    return make_proxy(model, ("cache_context", _RESET), instead)


_RESET = "_reset_stateful_cache"
"""What pipelines call at their end."""
