"""Second moments on a TPU: a head's Gram stays in VMEM while its gathered blocks stream past, once.

Grid ``(head, tile, step)``. A tile is a set of pairs of units (a unit: neighbouring blocks of a head, 256 or more
features together, on or below the diagonal: the Gram is symmetric). Its steps first take row blocks, then write the
Gram from VMEM, a pair at a time, mirrored. All pairs are one tile wherever they fit into VMEM; otherwise the first tile
takes the widest rows of the Gram, and the next ones fetch only the blocks that they still need.

A block that several heads read is fetched for each of them. That costs no time: at six passes a product, a head's
multiplications take longer than its fetches from about kF = 300 on (v6e; 130 on v5e, 90 on v5p).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import LANES, Launch, Operand, tile_bytes
from pallas_kernels.moments.reference import HIGHEST, Sums
from pallas_kernels.tiles import tuned

MIB = 1 << 20
VMEM = {"TPU v5 lite": 128, "TPU v5e": 128, "TPU v5": 64, "TPU v5p": 64, "TPU v6 lite": 128, "TPU v6e": 128}  # MiB
OTHER = 16  # MiB, of a device kind that is not in the table
SHARE = 0.7  # of VMEM, for blocks and scratch
UNIT = 256  # features


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and schedule of a launch.

    Attributes:
        heads, k, rows, features, outputs: of the arrays.
        block: rows a step; unit: blocks a unit; units: of a head.
        first: int32 ``[tiles+1]``, first pair of each tile; limit: int32 ``[tiles]``, units it needs.
        left, right: int32 ``[pairs]``, units of each pair.
        row, column, pair: int32 ``[tiles*flush]``, which block of the Gram each writing step writes, from which pair
            of its tile.
    """

    heads: int
    k: int
    rows: int
    features: int
    outputs: int
    block: int
    unit: int
    units: int
    first: np.ndarray
    limit: np.ndarray
    left: np.ndarray
    right: np.ndarray
    row: np.ndarray
    column: np.ndarray
    pair: np.ndarray

    @property
    def steps(self) -> int:
        """Row blocks."""
        return -(-self.rows // self.block)

    @property
    def tiles(self) -> int:
        """Tiles of a head's Gram."""
        return len(self.limit)

    @property
    def flush(self) -> int:
        """Writing steps a tile."""
        return len(self.row) // self.tiles

    @property
    def width(self) -> int:
        """Features of a unit."""
        return self.unit * self.features

    @property
    def held(self) -> int:
        """Pairs of the largest tile."""
        return int(np.diff(self.first).max())

    def scalars(self, gather: Any) -> tuple[Any, ...]:
        """What the launch prefetches."""
        return (gather.reshape(-1), self.first, self.limit, self.left, self.right, self.row, self.column, self.pair)


def moments(
    blocks: jax.Array,
    y: jax.Array,
    gather: jax.Array,
    weight: jax.Array,
    x_mean: jax.Array,
    y_mean: jax.Array,
    *,
    interpret: Any = False,
    device_kind: str | None = None,
    **sizes: int,
) -> Sums:
    """See :func:`pallas_kernels.moments.moments`; inputs are centred, weighted and multiplied in float32.

    Args:
        blocks, y, gather, weight, x_mean, y_mean: see there.
        interpret: run by the Pallas interpreter.
        device_kind: of the TPU, for the sizes; ``None``: the first local device's.
        sizes: see :func:`plan`.

    Raises:
        NotImplementedError: the smallest tile does not fit into VMEM, or the features cannot be tiled (see
            :func:`plan`).
    """
    (heads, k), features, outputs = gather.shape, blocks.shape[2], y.shape[2]
    own = plan(blocks, y, k, device_kind=device_kind, interpret=bool(interpret), **sizes)
    described = launch(own, blocks, y)
    mean = jnp.take(x_mean, gather, axis=0, mode="clip").reshape(heads, 1, k * features)
    call = described.call(
        functools.partial(_kernel, own),
        name="moments",
        interpret=interpret,
        flops=heads * own.rows * k * features * (k * features + 2 * outputs),
    )
    scalars = [jnp.asarray(a) for a in own.scalars(gather)]
    xx, xy, x, y_sum, yy = call(*scalars, *[blocks] * k, mean, y, y_mean[:, None], weight[:, None])
    w = jnp.where(weight > 0, weight, 0.0)
    return Sums(w.sum(axis=1), (w * w).sum(axis=1), x[:, 0], y_sum[:, 0], yy[:, 0], xx, xy)


def plan(blocks: Any, y: Any, k: int, *, device_kind: str | None = None, interpret: bool = False, **sizes: int) -> Plan:
    """Sizes of a launch: given ones, else measured ones, else the heuristic's.

    Args:
        blocks: ``[U,N,F]``, y: ``[H,N,Q]``: arrays or their shapes and dtypes.
        k: blocks a head reads.
        device_kind: sets the VMEM budget; ``None``: of the first local device.
        interpret: allows sizes that a TPU's registers do not.
        sizes: any of ``block`` (rows a step), ``unit`` (blocks a unit), ``held`` (pairs in VMEM).

    Raises:
        NotImplementedError: features that are no multiple of 8; a row of the Gram's pairs that does not fit into VMEM.
    """
    kind = jax.devices()[0].device_kind if device_kind is None else device_kind
    (_, rows, features), (heads, _, outputs) = blocks.shape, y.shape
    if features % 8 and not interpret:
        raise NotImplementedError(f"moments on a TPU needs features in multiples of 8; these blocks have {features}.")
    name = jnp.dtype(blocks.dtype).name
    chosen = {**tuned("moments", kind, dtype=name, features=features, k=k), **sizes}
    unit = chosen.get("unit") or _unit(k, features)
    units = -(-k // unit)
    budget = int(VMEM.get(kind, OTHER) * MIB * SHARE)
    block, held = 0, 0
    for block in (chosen["block"],) if "block" in chosen else (512, 256, 128):
        held = chosen.get("held") or _room(budget, block, k, unit, blocks, y)
        if held >= units * (units + 1) // 2 or block == 128:
            break
    if held < units:
        raise NotImplementedError(
            f"a row of the Gram of {k} blocks of {features} features takes {units} products of {unit * features}^2, "
            f"and {kind} has room for {max(held, 0)}; give a head fewer blocks, or split its features."
        )
    return Plan(heads, k, rows, features, outputs, block, unit, units, *_schedule(units, held))


def _unit(k: int, features: int) -> int:
    """Blocks a unit: whole lanes and at least ``UNIT`` features; all of them where they are fewer."""
    lanes = LANES // math.gcd(LANES, features)
    return min(k, lanes * -(-UNIT // (lanes * features)))


def _room(budget: int, block: int, k: int, unit: int, blocks: Any, y: Any) -> int:
    """Pairs that VMEM holds beside everything else."""
    (_, rows, features), (heads, _, outputs) = blocks.shape, y.shape
    units = -(-k // unit)
    none = Plan(heads, k, rows, features, outputs, block, unit, units, *_schedule(units, units * units))
    described = launch(none, blocks, y)
    pair = tile_bytes((unit * features, unit * features), jnp.float32)
    return (budget - described.vmem_bytes) // pair + none.held


def _schedule(units: int, held: int) -> tuple[np.ndarray, ...]:
    """Tiles of whole rows of the lower triangle, the widest first, and their writing steps."""
    first, limit, pairs = [0], list[int](), list[tuple[int, int]]()
    for a in reversed(range(units)):
        if not limit or len(pairs) + a + 1 - first[-1] > held:
            if limit:
                first.append(len(pairs))
            limit.append(a + 1)
        pairs += [(a, b) for b in range(a + 1)]
    first.append(len(pairs))
    writes = []
    for t in range(len(limit)):
        own = [(a, b, p) for p, (a, b) in enumerate(pairs[first[t] : first[t + 1]])]
        writes.append(own + [(b, a, p) for a, b, p in own if a != b])
    most = max([units, *map(len, writes)])
    table = np.array([own + own[-1:] * (most - len(own)) for own in writes], np.int32).reshape(-1, 3)
    left, right = np.array(pairs, np.int32).T
    return (np.array(first, np.int32), np.array(limit, np.int32), left, right, *table.T)


def launch(own: Plan, blocks: Any, y: Any) -> Launch:
    """The kernel's launch for arrays of these shapes and dtypes."""
    wide, flush, last = own.k * own.features, own.flush, own.steps - 1
    gram, outputs = (own.heads, wide, wide), own.outputs

    def source(a: int) -> Any:
        def index(h: Any, t: Any, i: Any, gather: Any, first: Any, limit: Any, *_: Any) -> tuple[Any, ...]:
            needed = (limit[t] * own.unit > a) & (i < last)
            return gather[h * own.k + a], _choose(needed, i, last), 0

        return index

    def rows(h: Any, t: Any, i: Any, *_: Any) -> tuple[Any, ...]:
        return h, _choose((t == 0) & (i < last), i, last), 0

    def pair(h: Any, t: Any, i: Any, *tables: Any) -> tuple[Any, ...]:
        at = t * flush + _choose(i > last, i - last - 1, 0)
        return h, tables[5][at], tables[6][at]

    def unit(h: Any, t: Any, i: Any, *_: Any) -> tuple[Any, ...]:
        at = _choose(i > last, i - last - 1, 0)
        return h, _choose((t == 0) & (at < own.units - 1), at, own.units - 1), 0

    def head(h: Any, t: Any, i: Any, *_: Any) -> tuple[Any, ...]:
        return h, 0, 0

    def lanes(h: Any, t: Any, i: Any, *_: Any) -> tuple[Any, ...]:
        return h, 0, _choose(i < last, i, last)

    f32, dtype = jnp.float32, blocks.dtype
    xs = [Operand("blocks", blocks.shape, dtype, (None, own.block, own.features), source(a)) for a in range(own.k)]
    vector = lambda name, width: Operand(name, (own.heads, 1, width), f32, (None, 1, width), head)  # noqa: E731
    return Launch(
        grid=(own.heads, own.tiles, own.steps + flush),
        inputs=(
            *xs,
            vector("x_mean", wide),
            Operand("y_rows", y.shape, y.dtype, (None, own.block, outputs), rows),
            vector("y_mean", outputs),
            Operand("weight", (own.heads, 1, own.rows), f32, (None, 1, own.block), lanes),
        ),
        outputs=(
            Operand("xx", gram, f32, (None, own.width, own.width), pair),
            Operand("xy", (own.heads, wide, outputs), f32, (None, own.width, outputs), unit),
            vector("x", wide),
            vector("y", outputs),
            vector("yy", outputs),
        ),
        scratch=(
            ((own.held, own.width, own.width), f32),
            ((own.units, own.width, outputs), f32),
            ((own.units, own.block, own.width), f32),
            ((own.units, own.width, own.block), f32),
        ),
        scalars=8,
        parallel=1,
    )


def _choose(condition: Any, a: Any, b: Any) -> Any:
    """``where`` for the walk over the grid in numpy and for the traced index map."""
    if isinstance(condition, jax.Array):
        return lax.select(condition, jnp.int32(a), jnp.int32(b))
    return np.where(condition, a, b)


def _kernel(own: Plan, *refs: Any) -> None:
    scalars, refs = refs[:8], refs[8:]
    _, first, limit, left, right, row, column, pair = scalars
    xs, (mean, y, y_mean, weight, xx, xy, x_sum, y_sum, yy_sum, gram, cross, z, zt) = refs[: own.k], refs[own.k :]
    t, i = pl.program_id(1), pl.program_id(2)
    start, features = first[t], own.features

    @pl.when(i == 0)
    def start_gram() -> None:
        gram[...] = jnp.zeros_like(gram)

    @pl.when((i == 0) & (t == 0))
    def start_head() -> None:
        for ref in (cross, z, zt, x_sum, y_sum, yy_sum):
            ref[...] = jnp.zeros_like(ref)

    @pl.when(i < own.steps)
    def take() -> None:
        w = _weights(own, weight, i)
        keep, root = w > 0, jnp.sqrt(w)
        for a in range(own.k):
            at, span = a // own.unit, pl.ds(a % own.unit * features, features)

            @pl.when(a < limit[t] * own.unit)
            def gather(a: int = a, at: int = at, span: Any = span) -> None:
                here = pl.ds(a * features, features)
                centred = jnp.where(keep, xs[a][...].astype(jnp.float32) - mean[:, here], 0.0)
                scaled = centred * root
                z[at, :, span] = scaled
                zt[at, span, :] = scaled.T

                @pl.when(t == 0)
                def sum_x() -> None:
                    x_sum[:, here] += (centred * w).sum(axis=0, keepdims=True)

        @pl.when(t == 0)
        def take_y() -> None:
            centred = jnp.where(keep, y[...].astype(jnp.float32) - y_mean[...], 0.0)
            y_sum[...] += (centred * w).sum(axis=0, keepdims=True)
            yy_sum[...] += (centred * centred * w).sum(axis=0, keepdims=True)
            u = centred * root

            @pl.loop(0, own.units)
            def multiply_y(at: jax.Array) -> None:
                cross[at] += jnp.dot(zt[at], u, precision=HIGHEST, preferred_element_type=jnp.float32)

        @pl.loop(0, first[t + 1] - start)
        def multiply(p: jax.Array) -> None:
            a, b = zt[left[start + p]], z[right[start + p]]
            gram[p] += jnp.dot(a, b, precision=HIGHEST, preferred_element_type=jnp.float32)

    @pl.when(i >= own.steps)
    def write() -> None:
        at = t * own.flush + i - own.steps
        found = gram[pair[at]]

        @pl.when(row[at] >= column[at])
        def as_it_is() -> None:
            xx[...] = found

        @pl.when(row[at] < column[at])
        def mirrored() -> None:
            xx[...] = found.T

        @pl.when(t == 0)
        def write_xy() -> None:
            xy[...] = cross[jnp.minimum(i - own.steps, own.units - 1)]


def _weights(own: Plan, weight: Any, i: jax.Array) -> jax.Array:
    """The step's weights as a column, zero past the last row."""
    w = weight[...]
    at = lax.broadcasted_iota(jnp.int32, w.shape, 1) + i * own.block
    w = jnp.where((at < own.rows) & (w > 0), w, 0.0)
    return jnp.broadcast_to(w, (8, own.block)).T[:, :1]
