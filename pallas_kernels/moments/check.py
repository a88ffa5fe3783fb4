"""Shapes of the moments kernel that the compile checks build."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.check import Case
from pallas_kernels.launch import Traffic
from pallas_kernels.moments import gpu, tpu

KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}
HEADS, BLOCKS = 8, 8  # kv heads of a layer, source layers that each reads


def arguments(length: int, features: int, dtype: Any, *, k: int = BLOCKS) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Arguments for a layer whose heads read their own source head of k layers."""
    u, like = HEADS * k, jax.ShapeDtypeStruct
    return (
        like((u, length, features), dtype),
        like((HEADS, length, features), dtype),
        like((HEADS, k), jnp.int32),
        like((HEADS, length), jnp.float32),
        like((u, features), jnp.float32),
        like((HEADS, features), jnp.float32),
    )


def cost(kind: str, args: tuple[Any, ...], **sizes: Any) -> tuple[Traffic, int]:
    """HBM traffic and VMEM bytes of a launch whose heads read different blocks."""
    heads, k = args[2].shape
    own = tpu.plan(args[0], args[1], k, device_kind=kind, **sizes)
    described = tpu.launch(own, args[0], args[1])
    gather = np.arange(heads * k, dtype=np.int32).reshape(heads, k)
    return described.traffic(*own.scalars(gather)), described.vmem_bytes


def bound(units: int, held: int) -> int:
    """Units that any schedule must read a row, ``units`` of a head, when VMEM holds that many pairs of units.

    The pairs fall into sets of at most ``held``, each summed in one sweep over the rows; a set of p pairs reads at
    least v units with ``v (v + 1) / 2 >= p``, which is concave in p: few full sets are best.
    """

    def touched(pairs: int) -> int:
        return next(v for v in range(units + 1) if v * (v + 1) // 2 >= pairs)

    full, rest = divmod(units * (units + 1) // 2, held)
    return max(units, full * touched(held) + touched(rest))


def cases(chip: str) -> list[Case]:
    """Cases for ``"v5e"``, ``"v5p"`` or ``"v6e"``."""
    kind, found = KINDS[chip], []
    for dtype in (jnp.bfloat16, jnp.float32):
        for features in (64, 128, 256):
            for length in (1000, 131072):
                args = arguments(length, features, dtype)
                run = functools.partial(tpu.moments, device_kind=kind)
                price = functools.partial(cost, kind, args)
                found.append(Case("moments", jnp.dtype(dtype).name, features, length, run, args, price))
    return found


def gpu_cases() -> list[Case]:
    """Cases to lower for CUDA."""
    return [
        Case("moments", "bfloat16", features, 1000, gpu.moments, arguments(1000, features, jnp.bfloat16, k=2))
        for features in (64, 128)
    ]
