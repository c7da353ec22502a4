# SPDX-License-Identifier: Apache-2.0
"""What this process has done with CUDA's driver."""

import ctypes

_NOT_INITIALIZED = 3
"""`CUDA_ERROR_NOT_INITIALIZED` (CUDA driver API)."""


def driver_in_use(library: str = "libcuda.so.1") -> bool:
    """Whether this process has initialized the driver, which forks of it then cannot use.

    `torch.cuda.is_available()` is enough for that, after which torch itself still says that it has
    not been initialized.
    """
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return False  # there is none
    count = ctypes.c_int()
    return driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED
