# SPDX-License-Identifier: Apache-2.0
"""How a program's failure is told: what the client may know of it."""

from collections.abc import Mapping
from http import HTTPStatus

import torch

from vllm_omni.errors import OmniClientError, OmniGenerateError, client_error_metadata
from vllm_omni.outputs import ErrorInfo

NO_MEMORY = ("DefaultCPUAllocator: ", "CUBLAS_STATUS_ALLOC_FAILED")
"""What a bare RuntimeError says when the CPU's allocator (c10/core/impl/alloc_cpu.cpp) or cuBLAS
has no memory; all other allocators of torch raise its OutOfMemoryError."""


class NotFiniteError(OmniGenerateError):
    """A result has NaN or infinite values."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that there was not enough memory, on whatever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and any(sign in str(error) for sign in NO_MEMORY)


def error_info(error: Exception, name: str) -> ErrorInfo:
    """What the client may know: all about its own errors, only the kind of unexpected ones.

    Args:
        error: What a program raised.
        name: Of the program.
    """
    if is_out_of_memory(error):
        return ErrorInfo(
            message=f"{name} failed: there is not enough memory for this request now",
            status_code=int(HTTPStatus.SERVICE_UNAVAILABLE),
        )
    if isinstance(error, OmniGenerateError):
        return ErrorInfo(message=f"{name} failed: {error}")
    status_code, error_type = client_error_metadata(error)
    if status_code is None:
        return ErrorInfo(message=f"{name} failed: {type(error).__name__}")
    param = error.param if isinstance(error, OmniClientError) else None
    return ErrorInfo(
        message=str(error), status_code=status_code, error_type=error_type, param=param
    )


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """See that a result is made of numbers; waits for the device that it is on.

    Raises:
        NotFiniteError: It is not.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            # NaN and infinity show in the extremes, without a mask as large as the tensor.
            low, high = tensor.aminmax()
            if not (low.isfinite() and high.isfinite()):
                raise NotFiniteError(f"{name} has values that are not finite numbers")
