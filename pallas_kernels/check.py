"""What the compile checks of every kernel have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.launch import Traffic


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of one kernel to compile.

    Attributes:
        op, dtype, head_dim, length: what it is.
        run: function of arrays with the implementation fixed; args: their shapes and dtypes.
        cost: HBM traffic and VMEM bytes of its launch.
        bound: least ratio of traffic to its minimum that any such schedule reaches with the chip's VMEM; ``None``: 1.
        label: what tells it from other cases of the same op, dtype, head dim and length.
    """

    op: str
    dtype: str
    head_dim: int
    length: int
    run: Callable[..., Any]
    args: tuple[jax.ShapeDtypeStruct, ...]
    cost: Callable[[], tuple[Traffic, int]] | None = None
    bound: Callable[[], float] | None = None
    label: str = ""
