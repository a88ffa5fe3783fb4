"""Host memory that a CPU device takes over instead of copying it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

ALIGNMENT = 64


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Uninitialised array that starts on a 64-byte boundary.

    ``jax.device_put`` makes a CPU array out of such memory without a copy (XLA's alignment), so that a weight is held
    once while it is loaded. Whoever hands the array over must not write to it any more.

    Args:
        shape: its shape.
        dtype: its dtype, ml_dtypes included.

    Returns:
        The array.

    Example:
        >>> from kvx.models.host_buffer import aligned_empty
        >>> aligned_empty((3, 5), "float32").ctypes.data % 64
        0
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
