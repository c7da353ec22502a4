# SPDX-License-Identifier: Apache-2.0
"""The torch state that belongs to a program and must not leak at a greenlet switch.

Grad mode, inference mode, autocast and function modes (the default device is one) are thread-local
in torch, the default dtype and the random generators are global; all programs of an engine share
one thread. `ProgramState.resume` puts a program's own state in place and `ProgramState.park` takes
it away again, so that a program may park inside `torch.no_grad()`, `torch.autocast` or
`with torch.device(...)`, and so that what it draws from the global generators depends on its own
seed only.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

Autocast = tuple[tuple[str, torch.dtype], ...]
"""(device type, dtype) of every device type that autocast is enabled for."""


@contextmanager
def under(autocast: Autocast) -> Iterator[None]:
    """Enable autocast as a program has it."""
    with ExitStack() as stack:
        for device_type, dtype in autocast:
            stack.enter_context(torch.autocast(device_type, dtype))
        yield


class ProgramState:
    """The torch state of one program.

    A program starts in inference mode, without autocast, with its generators seeded.

    Args:
        seed: What the global generators start from, as with `torch.manual_seed`.
        device: The accelerator whose global generator and stream the program may use beside the
            CPU's; a CPU device for none.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._accelerator = torch.get_device_module(device) if device.type != "cpu" else None
        self._device = device
        self._device_types = ("cpu",) if self._accelerator is None else ("cpu", device.type)
        self._inference = True
        self._grad = False
        self._autocast: Autocast = ()
        self._modes = _get_current_function_mode_stack()
        self._default_dtype = torch.get_default_dtype()
        self._random = torch.Generator().manual_seed(seed).get_state()
        if self._accelerator is not None:
            self._device_random = torch.Generator(device).manual_seed(seed).get_state()
            self._stream = self._accelerator.current_stream(device)

    @property
    def autocast(self) -> Autocast:
        """The program's autocast settings at its last park."""
        return self._autocast

    def resume(self) -> None:
        """Put the program's state in place of the engine's. The engine switches to it next."""
        self._engine_modes = _swap_modes(self._modes)
        self._engine_dtype = torch.get_default_dtype()
        self._engine_autocast_dtypes = [torch.get_autocast_dtype(t) for t in self._device_types]
        self._engine_random = torch.get_rng_state()
        # Leaving the guard restores all of autograd's and the dispatcher's thread-local state to
        # what it was here, whatever guards the program has entered and not yet left by then.
        self._guard = torch.inference_mode(self._inference)
        self._guard.__enter__()
        if torch.is_grad_enabled() != self._grad:
            torch.set_grad_enabled(self._grad)
        for device_type, dtype in self._autocast:
            torch.set_autocast_enabled(device_type, True)
            torch.set_autocast_dtype(device_type, dtype)
        self._set_default_dtype(self._default_dtype)
        torch.set_rng_state(self._random)
        if self._accelerator is not None:
            self._engine_device_random = self._accelerator.get_rng_state(self._device)
            self._accelerator.set_rng_state(self._device_random, self._device)
            self._engine_stream = self._accelerator.current_stream(self._device)
            self._accelerator.set_stream(self._stream)

    def park(self) -> None:
        """Keep the program's state and restore the engine's. The engine just got control back."""
        if self._accelerator is not None:
            self._stream = self._accelerator.current_stream(self._device)
            self._accelerator.set_stream(self._engine_stream)
            self._device_random = self._accelerator.get_rng_state(self._device)
            self._accelerator.set_rng_state(self._engine_device_random, self._device)
        self._random = torch.get_rng_state()
        torch.set_rng_state(self._engine_random)
        self._default_dtype = torch.get_default_dtype()
        self._set_default_dtype(self._engine_dtype)
        self._modes = _swap_modes(self._engine_modes)
        self._autocast = tuple(
            (device_type, torch.get_autocast_dtype(device_type))
            for device_type in self._device_types
            if torch.is_autocast_enabled(device_type)
        )
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._guard.__exit__(None, None, None)
        for device_type, dtype in zip(
            self._device_types, self._engine_autocast_dtypes, strict=True
        ):
            torch.set_autocast_dtype(device_type, dtype)

    @staticmethod
    def _set_default_dtype(dtype: torch.dtype) -> None:
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)


def _swap_modes(modes: list[TorchFunctionMode]) -> list[TorchFunctionMode]:
    """Put other function modes in force, without entering or leaving any; returns the old ones.

    Torch has no public way to do it. `with torch.device(...)` is such a mode and, made in C++,
    cannot be left and entered again from here.
    """
    before = _get_current_function_mode_stack()
    for _ in before:
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
    return before
