"""One description of a TPU kernel's launch: its block specs come from it, and so does the count of its HBM traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
SUBLANES = 8


@dataclasses.dataclass(frozen=True)
class Operand:
    """One array that a kernel reads or writes block by block.

    Attributes:
        name: operands that read the same array share it, and then count its blocks once in :attr:`Launch.minimum`.
        shape, dtype: of the whole array.
        block: block shape; ``None`` in an axis: one element of it, squeezed away.
        index: block indices from the grid indices and then the prefetched scalars.
        buffers: blocks held in VMEM, 2 where the next one is fetched meanwhile.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    block: tuple[int | None, ...]
    index: Callable[..., tuple[Any, ...]]
    buffers: int = 2

    def spec(self) -> pl.BlockSpec:
        """For ``pallas_call``."""
        mode = None if self.buffers == 2 else pl.Buffered(self.buffers)
        return pl.BlockSpec(self.block, self.index, pipeline_mode=mode)

    def struct(self) -> jax.ShapeDtypeStruct:
        """The whole array's shape and dtype."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def vmem_bytes(self) -> int:
        """Bytes in VMEM, tiles filled up: the last axis to 128 lanes, the one before to whole sublanes."""
        sizes = [1 if size is None else size for size in self.block]
        return self.buffers * tile_bytes(sizes, self.dtype)

    def fetched(self, places: Sequence[Any], scalars: Sequence[np.ndarray]) -> tuple[int, dict[tuple[int, ...], int]]:
        """Bytes moved over the grid in order (a block again whenever its index changes), and its distinct blocks."""
        steps = len(places[0]) if places else 1
        raw = self.index(*places, *scalars)
        indices = np.stack([np.broadcast_to(np.asarray(i), (steps,)) for i in raw], axis=1)
        changed = np.ones(steps, bool)
        changed[1:] = (indices[1:] != indices[:-1]).any(axis=1)
        visits = indices[changed]
        sizes = np.ones(len(visits), np.int64)
        for axis, (size, whole) in enumerate(zip(self.block, self.shape, strict=True)):
            if size is not None:
                sizes *= np.clip(whole - visits[:, axis] * size, 0, size)
        sizes *= jnp.dtype(self.dtype).itemsize
        distinct, first = np.unique(visits, axis=0, return_index=True)
        blocks = {tuple(map(int, block)): int(sizes[at]) for block, at in zip(distinct, first, strict=True)}
        return int(sizes.sum()), blocks


@dataclasses.dataclass(frozen=True)
class Traffic:
    """HBM traffic of one launch.

    Attributes:
        bytes: moved, by operand name.
        minimum: bytes of every distinct block that is read or written, each once.
    """

    bytes: dict[str, int]
    minimum: int

    @property
    def total(self) -> int:
        """All bytes moved."""
        return sum(self.bytes.values())

    @property
    def ratio(self) -> float:
        """Moved over what must be moved."""
        return self.total / self.minimum


@dataclasses.dataclass(frozen=True)
class Launch:
    """Grid, operands and scratch of a kernel.

    Attributes:
        grid: steps of each axis, the last one fastest.
        inputs, outputs: in the kernel's order.
        scratch: shapes and dtypes in VMEM.
        scalars: how many arrays are prefetched.
        parallel: axes (from the first) whose steps do not depend on each other.
        semaphores: of copies that the kernel makes by hand, one array of them behind the scratch.
    """

    grid: tuple[int, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    scratch: tuple[tuple[tuple[int, ...], Any], ...] = ()
    scalars: int = 0
    parallel: int = 0
    semaphores: int = 0

    @property
    def vmem_bytes(self) -> int:
        """Bytes of all blocks and scratch in VMEM."""
        scratch = sum(tile_bytes(shape, dtype) for shape, dtype in self.scratch)
        return scratch + sum(o.vmem_bytes for o in (*self.inputs, *self.outputs))

    def traffic(self, *scalars: np.ndarray) -> Traffic:
        """Walk the grid and count; ``scalars`` are the values of the prefetched arrays.

        Example:
            >>> import jax.numpy as jnp
            >>> from pallas_kernels.launch import Launch, Operand
            >>> rows = Operand("x", (64, 128), jnp.float32, (16, 128), lambda i, j: (j, 0))
            >>> out = Operand("y", (2, 128), jnp.float32, (1, 128), lambda i, j: (i, 0))
            >>> found = Launch((2, 4), (rows,), (out,)).traffic()
            >>> found.bytes, found.minimum
            ({'x': 65536, 'y': 1024}, 33792)
        """
        places = [axis.ravel() for axis in np.indices(self.grid)]
        moved: dict[str, int] = {}
        blocks: dict[tuple[str, tuple[int | None, ...]], dict[tuple[int, ...], int]] = {}
        for operand in (*self.inputs, *self.outputs):
            count, distinct = operand.fetched(places, [np.asarray(s) for s in scalars])
            moved[operand.name] = moved.get(operand.name, 0) + count
            blocks.setdefault((operand.name, operand.block), {}).update(distinct)
        return Traffic(moved, sum(sum(found.values()) for found in blocks.values()))

    def call(
        self, kernel: Callable[..., None], *, name: str, interpret: Any = False, flops: int = 0
    ) -> Callable[..., Any]:
        """The ``pallas_call``, a function of the scalars and then the inputs."""
        semantics: Any = ("parallel",) * self.parallel + ("arbitrary",) * (len(self.grid) - self.parallel)
        moved = sum(int(np.prod(o.shape)) * jnp.dtype(o.dtype).itemsize for o in (*self.inputs, *self.outputs))
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=self.scalars,
                grid=self.grid,
                in_specs=[o.spec() for o in self.inputs],
                out_specs=[o.spec() for o in self.outputs],
                scratch_shapes=[
                    *(pltpu.VMEM(shape, dtype) for shape, dtype in self.scratch),
                    *([pltpu.SemaphoreType.DMA((self.semaphores,))] if self.semaphores else []),
                ],
            ),
            out_shape=[o.struct() for o in self.outputs],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=semantics, vmem_limit_bytes=vmem_limit(self.vmem_bytes)
            ),
            cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0),
            interpret=interpret,
            name=name,
        )


def vmem_limit(used: int) -> int:
    """What to ask the compiler for: the blocks and room for what it spills."""
    return int(used * 1.25) + (8 << 20)


def tile_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of an array in VMEM: the last axis filled up to 128 lanes, the one before to whole packed sublanes."""
    sizes = list(shape) if len(shape) > 1 else [1, *shape]
    item = jnp.dtype(dtype).itemsize
    rows = SUBLANES * max(1, 4 // item)
    sizes[-1] = -(-sizes[-1] // LANES) * LANES
    sizes[-2] = -(-sizes[-2] // rows) * rows
    return int(np.prod(sizes, dtype=np.int64)) * item
