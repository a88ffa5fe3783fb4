"""Body of the TPU kernel of ``apply``: load, gather, multiply, turn; and the facts that it is compiled for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.apply.reference import HIGHEST
from pallas_kernels.apply.tables import ALIGN, LANES

Array = jax.Array
CHUNK = 256  # source rows of one copy
COMPUTE = 256  # target rows of one product


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a launch depends on.

    Attributes:
        layers, heads: of the target; blocks, slots: U and S of the source; tokens: T.
        reads: R, or 0 for the identity.
        widths: features of each source; counts: k of each map; channels: D of each map.
        shared: whether all maps read the same blocks; turned: whether keys are rotated.
        tables: G of the rotation.
        source, compute, out: dtypes of the sources, of the products and of the outputs.
    """

    layers: int
    heads: int
    blocks: int
    slots: int
    tokens: int
    reads: int
    widths: tuple[int, ...]
    counts: tuple[int, ...]
    channels: tuple[int, ...]
    shared: bool = False
    turned: bool = False
    tables: int = 1
    source: str = "bfloat16"
    compute: str = "bfloat16"
    out: str = "bfloat16"

    @property
    def features(self) -> int:
        """F of a block."""
        return sum(self.widths)

    @property
    def reading(self) -> int:
        """n: blocks that a step reads, at most."""
        return self.counts[0] if self.shared else sum(self.counts)

    def chunk(self, rows: int) -> int:
        """Source rows of one copy, for tiles of so many target rows."""
        whole = up(self.slots, LANES) % CHUNK == 0 and (bool(self.reads) or rows % CHUNK == 0)
        return CHUNK if whole else LANES

    @property
    def band(self) -> int:
        """Source rows that 128 target rows may read."""
        if not self.reads:
            return LANES
        return up(int(LANES * max(1.0, self.slots / self.tokens) * 1.5) + 16, LANES)

    def window(self, rows: int) -> int:
        """Source rows staged for a tile of so many target rows."""
        if not self.reads:
            return rows
        chunk = self.chunk(rows)
        spread = int(rows * max(1.0, self.slots / self.tokens) * 1.25) + 2 * chunk
        return up(max(min(up(self.slots, LANES), spread), self.band), chunk)


def kernel(shape: Shape, interleaved: bool, half: int, rows: int, *refs: Any) -> None:
    slot, first, block, into, start, chunks, band, _ = refs[:8]
    names = list(refs[8:])
    take = lambda n: [names.pop(0) for _ in range(n)]  # noqa: E731
    count = len(shape.counts)
    sources, maps = take(len(shape.widths)), take(2 * count)
    local = take(1)[0] if shape.reads else None
    weight = take(1)[0]
    turns, outs = take(2 if shape.turned else 0), take(count)
    kept, stages, semaphore = take(1)[0], take(len(shape.widths)), take(1)[0]
    tile = pl.program_id(0)
    step = pl.program_id(1) * pl.num_programs(2) + pl.program_id(2)
    loads = first[shape.layers * shape.heads]
    chunk = shape.chunk(rows)

    def copy(load: Any, act: Any) -> None:
        """Start, or wait for, the copies of one load."""

        def one(i: Any, _: Any) -> Any:
            there = pl.ds(pl.multiple_of(start[tile] + i * chunk, LANES), chunk)
            here = pl.ds(pl.multiple_of(i * chunk, LANES), chunk)
            for source, stage in zip(sources, stages, strict=True):
                act(pltpu.make_async_copy(source.at[block[load], there, :], stage.at[0, here, :], semaphore.at[0]))
            return 0

        jax.lax.fori_loop(0, chunks[tile], one, 0)

    @pl.when((step == 0) & (loads > 0))
    def first_copy() -> None:
        copy(0, lambda c: c.start())

    def load(at: Any, _: Any) -> Any:
        copy(at, lambda c: c.wait())

        def some(j: Any, _: Any) -> Any:
            here = pl.ds(pl.multiple_of(j * LANES, LANES), LANES)
            low = pl.multiple_of(band[tile * (rows // LANES) + j], 16) if shape.reads else j * LANES
            raw = [stage[0, pl.ds(pl.multiple_of(low, ALIGN), shape.band), :] for stage in stages]
            x = raw[0] if len(raw) == 1 else jnp.concatenate(raw, axis=1)
            kept[into[at], here, :] = _gather(x, local, weight, here, shape)
            return 0

        jax.lax.fori_loop(0, rows // LANES, some, 0)

        @pl.when(at + 1 < loads)
        def next_copy() -> None:
            copy(at + 1, lambda c: c.start())

        return 0

    jax.lax.fori_loop(first[step], first[step + 1], load, 0)
    size = min(COMPUTE, rows) if rows % COMPUTE == 0 else LANES

    def product(j: Any, _: Any) -> Any:
        here = pl.ds(pl.multiple_of(j * size, size), size)
        fed = _column((weight[:, here] != 0).astype(jnp.float32).max(axis=0, keepdims=True)) > 0
        base = 0
        for n, (k, out) in enumerate(zip(shape.counts, outs, strict=True)):
            total = jnp.zeros((size, shape.channels[n]), jnp.float32)
            for p in range(k):
                x = kept[slot[step * shape.reading + base + p], here, :]
                w = maps[2 * n][p * shape.features : (p + 1) * shape.features, :]
                total = total + _dot(x, w, (1, 0))
            total = jnp.where(fed, total + maps[2 * n + 1][...], 0)
            if n == 0 and shape.turned:
                total = _rotate(total, turns[0][here, :], turns[1][here, :], half, interleaved)
            out[here, :] = total.astype(out.dtype)
            base = base if shape.shared else base + k
        return 0

    jax.lax.fori_loop(0, rows // size, product, 0)


def _dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Product over an axis of each, accumulated in fp32; fp32 operands at full precision."""
    precision = HIGHEST if a.dtype == jnp.float32 else None
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _gather(x: Array, local: Any, weight: Any, here: Any, shape: Shape) -> Array:
    """128 target rows of a band ``x [band,F]``; rows that are not read are cleared before the product."""
    if local is None:
        w = _column(weight[:, here])
        return (w * jnp.where(w != 0, x.astype(jnp.float32), 0)).astype(shape.compute)
    rows = jax.lax.broadcasted_iota(jnp.int32, (shape.band, LANES), 0)
    mixed = jnp.zeros((shape.band, LANES), jnp.float32)
    for r in range(shape.reads):
        mixed = mixed + jnp.where(local[pl.ds(r, 1), here] == rows, weight[pl.ds(r, 1), here], 0.0)
    read = jnp.abs(mixed).max(axis=1, keepdims=True) > 0
    narrow = x.dtype == jnp.bfloat16 and shape.compute == "bfloat16"
    x = jnp.where(read, x.astype(jnp.float32), 0)
    if narrow:
        x, mixed = x.astype(jnp.bfloat16), mixed.astype(jnp.bfloat16)
    return _dot(mixed, x, (0, 0)).astype(shape.compute)


def _column(row: Array) -> Array:
    """``[1,n]`` to ``[n,1]``, n a multiple of 128, by a diagonal."""
    places = [jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1)]
    diagonal = places[0] == places[1]
    parts = [row[:, i : i + LANES] for i in range(0, row.shape[1], LANES)]
    columns = [jnp.where(diagonal, jnp.broadcast_to(p, (LANES, LANES)), 0).sum(axis=1, keepdims=True) for p in parts]
    return columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=0)


def _rotate(y: Array, cos: Array, sin: Array, half: int, interleaved: bool) -> Array:
    """``y cos + partner(y) sin``: tables cover all channels, the sign of the sine included."""
    if interleaved:
        lane = jax.lax.broadcasted_iota(jnp.int32, y.shape, 1)
        back, ahead = (jnp.concatenate([y[:, i:], y[:, :i]], axis=1) for i in (y.shape[1] - 1, 1))
        partner = jnp.where(lane % 2 == 0, ahead, back)
    else:
        partner = jnp.concatenate([y[:, half : 2 * half], y[:, :half], y[:, 2 * half :]], axis=1)
    return y * cos + partner * sin


def up(size: int, step: int) -> int:
    """Round up to whole steps."""
    return -(-size // step) * step
