# SPDX-License-Identifier: Apache-2.0
"""Components as programs see them: the same object, but calling it parks the program.

A proxy is an instance of a subclass of the component's own class that shares the component's
attributes. So `isinstance`, `config`, `dtype`, properties and helper methods work as on the
component itself, and a method that the component inherits or defines and that calls the model (a
sampling loop, for example) runs in the program and parks at each of those calls.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)

Park = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
"""(method, args, kwargs) -> the method's result, by way of the engine."""


def make_proxy(
    component: ModuleT, methods: Iterable[str], park: Park, inline: Iterable[str] = ()
) -> ModuleT:
    """A view of `component` whose `methods` go through `park` (`forward` is a plain call).

    The component is not changed, and later changes of it are seen by the proxy; but its `dtype`,
    which diffusers searches all modules for, is asked for once.

    Args:
        inline: Methods that run on the component itself, and so without parking inside.
    """
    cls = type(component)
    members: dict[str, Any] = {}
    for method in methods:
        members[method] = _parked(method, park)
        if method == "forward":
            # `nn.Module.__call__` would run the component's hooks here and again in the engine.
            members["__call__"] = members[method]
    for method in inline:
        members[method] = _on(component, method)
    if isinstance(inspect.getattr_static(cls, "dtype", None), property):
        members["dtype"] = _asked_once(component, "dtype")
    view = object.__new__(disguised(cls, members))
    view.__dict__ = component.__dict__
    return view


def disguised(cls: type, members: Mapping[str, Any]) -> type:
    """A subclass that gives itself out as the class, with some members of its own."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), {**names, **members})


def _on(component: nn.Module, method: str) -> Callable[..., Any]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(component, method)(*args, **kwargs)

    call.__name__ = method
    return call


def _asked_once(component: nn.Module, name: str) -> property:
    @cache
    def value() -> Any:
        return getattr(component, name)

    return property(lambda self: value())


def _parked(method: str, park: Park) -> Callable[..., Any]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return park(method, args, kwargs)

    call.__name__ = method
    return call
