"""Shapes of ``apply`` that a compile check compiles, and what each moves."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.apply import Linear, apply
from pallas_kernels.apply.tpu import Shape, bound, launch, scalars, vmem_budget
from pallas_kernels.check import Case
from pallas_kernels.launch import Traffic

KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}
SOURCE_LAYERS, LAYERS, HEADS, READ = 24, 20, 1, 8
LENGTHS = (4096, 131_072)
Struct = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Setting:
    """One shape: head-matched keys and values of 20 layers, 8 of 24 source layers each, and one of 8 heads.

    That is a chip's share when heads are spread over chips, and what its HBM holds at the longest length.

    Attributes:
        dtype, head_dim, length: of everything; source and target have as many tokens.
        inputs: as for :func:`pallas_kernels.apply.apply`.
        aligned: gathered by an alignment with one source token a target token; else the identity.
    """

    dtype: str
    head_dim: int
    length: int
    inputs: str = "both"
    aligned: bool = True

    @property
    def shape(self) -> Shape:
        """Of a launch: one for both components, or one of two equal ones."""
        parts = 2 if self.inputs == "both" else 1
        return Shape(
            LAYERS,
            HEADS,
            SOURCE_LAYERS * HEADS,
            self.length,
            self.length,
            int(self.aligned),
            (self.head_dim,) * parts,
            (READ,) * parts,
            (self.head_dim,) * parts,
            shared=parts == 2,
            source=self.dtype,
            compute=self.dtype,
            out=self.dtype,
        )

    def cost(self, budget: int) -> tuple[Traffic, int]:
        """Traffic and VMEM bytes of a launch."""
        found, rows = launch(self.shape, "heads", budget)
        index, weight = alignment(self.length) if self.aligned else (None, jnp.ones((self.length, 1)))
        tables, fits, _ = scalars(self.shape, "heads", rows, [jnp.asarray(nearest())], index, weight)
        if not bool(fits):
            raise ValueError("the alignment does not lie in the windows.")
        groups = np.zeros(LAYERS, np.int32)
        return found.traffic(*(np.asarray(t) for t in tables), groups), found.vmem_bytes

    def bound(self, budget: int) -> float:
        """Least ratio that this much VMEM allows, see :func:`pallas_kernels.apply.tpu.bound`."""
        shape, traffic = self.shape, self.cost(budget)[0]
        size = jnp.dtype(self.dtype).itemsize
        wide = sum(k * d for k, d in zip(shape.counts, shape.channels, strict=True)) * shape.features
        return bound(shape, budget, traffic.minimum, LAYERS * HEADS * wide * size)


def nearest() -> np.ndarray:
    """int32 ``[L,H,k]``: the same head of the k source layers nearest in depth."""
    centre = np.round(np.linspace(0, SOURCE_LAYERS - 1, LAYERS)).astype(int)
    low = np.clip(centre - READ // 2, 0, SOURCE_LAYERS - READ)
    layers = low[:, None] + np.arange(READ)
    return (layers[:, None, :] * HEADS + np.arange(HEADS)[None, :, None]).astype(np.int32)


def alignment(length: int) -> tuple[jax.Array, jax.Array]:
    """A monotone alignment as two tokenizers give it: tokens repeated and skipped at random, ends met."""
    steps = np.random.default_rng(0).choice([0, 1, 1, 2], size=length)
    walk = np.cumsum(steps)
    index = np.minimum(walk * (length - 1) // walk[-1], length - 1)
    return jnp.asarray(index[:, None], jnp.int32), jnp.ones((length, 1), jnp.float32)


def settings() -> list[Setting]:
    """What is compiled for every chip."""
    short, long = LENGTHS
    wide = [Setting(t, d, long) for t in ("bfloat16", "float32") for d in (64, 128, 256)]
    others = [Setting("bfloat16", 128, long, "same"), Setting("bfloat16", 128, long, aligned=False)]
    return [*wide, *others, Setting("bfloat16", 128, short)]


def cases(chip: str) -> list[Case]:
    """TPU cases.

    Args:
        chip: ``"v5e"``, ``"v5p"`` or ``"v6e"``.
    """
    budget = vmem_budget(KINDS[chip])
    return [
        dataclasses.replace(
            _case(one, "tpu", functools.partial(one.cost, budget), (None, budget)),
            bound=functools.partial(one.bound, budget),
            label=f"k={READ} {one.inputs}{'' if one.aligned else ', no gather'}",
        )
        for one in settings()
    ]


def gpu_cases() -> list[Case]:
    """Cases that must lower for CUDA."""
    kinds = [Setting("bfloat16", d, n) for d in (64, 128, 256) for n in LENGTHS]
    return [_case(one, "gpu", None) for one in (*kinds, Setting("bfloat16", 128, 4096, "same"))]


def _case(
    one: Setting,
    implementation: str,
    cost: Callable[[], tuple[Traffic, int]] | None,
    tile: tuple[int | None, int | None] = (None, None),
) -> Case:
    def run(keys: Any, values: Any, weight: Any, gather: Any, w: Any, b: Any, index: Any = None) -> Any:
        maps = Linear(gather, w, b), Linear(gather, w, b)
        return apply(
            keys,
            values,
            index,
            weight,
            *maps,
            inputs=one.inputs,
            schedule="heads",
            tile=tile,
            implementation=implementation,
        )

    dtype, wide = jnp.dtype(one.dtype), one.head_dim * (2 if one.inputs == "both" else 1)
    source = Struct((SOURCE_LAYERS * HEADS, one.length, one.head_dim), dtype)
    args = [
        source,
        source,
        Struct((one.length, 1), jnp.float32),
        Struct((LAYERS, HEADS, READ), jnp.int32),
        Struct((LAYERS, HEADS, READ * wide, one.head_dim), dtype),
        Struct((LAYERS, HEADS, one.head_dim), jnp.float32),
    ]
    if one.aligned:
        args.append(Struct((one.length, 1), jnp.int32))
    return Case("apply", one.dtype, one.head_dim, one.length, run, tuple(args), cost)
