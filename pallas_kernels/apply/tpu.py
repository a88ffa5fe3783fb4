"""TPU kernel of ``apply``.

The grid walks over tiles of target rows, and for each over all target layers and heads. A ring of slots in VMEM keeps
source blocks, gathered onto the tile's target rows, for as long as the following steps read them; when the window of
source layers slides by one, one block is fetched. Blocks are copied by hand: the rows that a tile reads, in whole
chunks, into a staging buffer while the steps before it compute; from there 128 target rows at a time are gathered by a
one-hot product with a band of rows, or only masked where the alignment is the identity. Coefficients are fetched once a
tile and step, so tiles are as large as VMEM allows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.apply import reference
from pallas_kernels.apply.kernel import COMPUTE, Shape, kernel, up
from pallas_kernels.apply.reference import Linear, Rotation, Settings
from pallas_kernels.apply.tables import LANES, plan, windows
from pallas_kernels.launch import Launch, Operand
from pallas_kernels.tiles import tuned

Array = jax.Array
VMEM = {"TPU v5 lite": 128 << 20, "TPU v5": 64 << 20, "TPU v5p": 64 << 20, "TPU v6 lite": 128 << 20}
SMEM_TABLE = 1 << 15  # entries of one prefetched table, at most


class Copies(Operand):
    """A source that stays in HBM: the kernel copies, for each load of a tile, the tile's chunks of rows."""

    def spec(self) -> pl.BlockSpec:
        return pl.BlockSpec(memory_space=pl.ANY)

    @property
    def vmem_bytes(self) -> int:
        """None of its own: it is staged in scratch."""
        return 0

    def fetched(self, places: Sequence[Any], scalars: Sequence[np.ndarray]) -> tuple[int, dict[tuple[int, ...], int]]:
        """Bytes of all chunks copied, and the distinct chunks."""
        _, first, block, _, start, chunks = scalars[:6]
        rows = self.block[1] or 1
        size = rows * self.shape[2] * jnp.dtype(self.dtype).itemsize
        loads = block[: first[-1]]
        at = {int(s) // rows + i for s, n in zip(start, chunks, strict=True) for i in range(int(n))}
        distinct: dict[tuple[int, ...], int] = {(int(u), i, 0): size for u in np.unique(loads) for i in at}
        return int(len(loads) * chunks.sum()) * size, distinct


def launch(shape: Shape, schedule: str, budget: int, rows: int | None = None) -> tuple[Launch, int]:
    """The launch and its target rows a tile.

    Scalars: the four tables of :class:`pallas_kernels.apply.tables.Plan`, ``start``, ``chunks`` and ``band`` of
    :class:`pallas_kernels.apply.tables.Windows`, and the rotation's ``groups``.

    Args:
        shape: of the call.
        schedule: ``"heads"``: all layers of a head after each other; ``"layers"``: all heads of a layer, with room
            in the ring for what the layer's heads read.
        budget: bytes of VMEM.
        rows: of a tile; ``None``: as many as fit, evenly spread. Coefficients and outputs are then held twice, so that
            they move while others are used, unless holding them once saves a tenth of the tiles.

    Raises:
        NotImplementedError: not even the smallest tile fits.
    """
    if rows is not None:
        return _launch(shape, schedule, rows, 2), rows
    twice, once = (_most_rows(shape, schedule, budget, buffers) for buffers in (2, 1))
    if not once:
        raise NotImplementedError(
            f"blocks of {shape.features} features, {ring(shape, schedule)} kept at a time, and coefficients of "
            f"{shape.counts} blocks do not fit into {budget >> 20} MiB of VMEM."
        )
    tiles = [-(-shape.tokens // rows) if rows else 0 for rows in (twice, once)]
    buffers = 1 if not twice or tiles[1] <= 0.9 * tiles[0] else 2
    rows = (once, twice)[buffers - 1]
    return _launch(shape, schedule, rows, buffers), rows


def _most_rows(shape: Shape, schedule: str, budget: int, buffers: int) -> int:
    """Largest tile that fits, evened out over the tiles; 0: none does."""
    step = COMPUTE if shape.tokens > COMPUTE else LANES
    most = up(shape.tokens, step)
    low, high = 0, most // step
    while low < high:
        middle = (low + high + 1) // 2
        fits = _launch(shape, schedule, middle * step, buffers).vmem_bytes <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    return up(-(-most // -(-most // (low * step))), step) if low else 0


def ring(shape: Shape, schedule: str) -> int:
    """Slots of the ring."""
    if schedule == "heads":
        return shape.reading
    return max(shape.reading, min(shape.blocks, shape.heads * (shape.reading + 1)))


def bound(shape: Shape, budget: int, minimum: int, coefficients: int) -> float:
    """Least traffic ratio with so much VMEM: what a step reads, the block fetched meanwhile, and all else held once.

    Args:
        shape: of the call; budget: bytes of VMEM.
        minimum: bytes of all distinct blocks; coefficients: bytes of all coefficients among them.
    """
    size = {name: jnp.dtype(getattr(shape, name)).itemsize for name in ("compute", "out")}
    step = sum(k * shape.features * d for k, d in zip(shape.counts, shape.channels, strict=True)) * size["compute"]
    row = (shape.reading + 1) * shape.features * size["compute"] + sum(shape.channels) * size["out"]
    tiles = -(-shape.tokens // max(1, (budget - step) // row))
    return 1.0 + (tiles - 1) * coefficients / minimum


def _launch(shape: Shape, schedule: str, rows: int, buffers: int) -> Launch:
    tiles, padded = -(-shape.tokens // rows), up(shape.slots, LANES)
    heads_first = schedule == "heads"
    grid = (tiles, shape.heads, shape.layers) if heads_first else (tiles, shape.layers, shape.heads)
    place = (lambda a, b: (b, a)) if heads_first else (lambda a, b: (a, b))
    table = (shape.layers, shape.heads)
    sources = tuple(
        Copies(
            f"source {n}", (shape.blocks, padded, w), shape.source, (None, shape.chunk(rows), w), lambda t, a, b, *s: ()
        )
        for n, w in enumerate(shape.widths)
    )
    maps: list[Operand] = []
    outputs = []
    at_head = lambda t, a, b, *s: (*place(a, b), 0, 0)  # noqa: E731
    at_rows = lambda t, a, b, *s: (*place(a, b), t, 0)  # noqa: E731
    for n, (k, d) in enumerate(zip(shape.counts, shape.channels, strict=True)):
        wide = k * shape.features
        maps.append(
            Operand(f"map {n}", (*table, wide, d), shape.compute, (None, None, wide, d), at_head, buffers=buffers)
        )
        maps.append(Operand(f"bias {n}", (*table, 1, d), "float32", (None, None, 1, d), at_head))
        outputs.append(
            Operand(f"out {n}", (*table, shape.tokens, d), shape.out, (None, None, rows, d), at_rows, buffers=buffers)
        )
    lanes = (max(shape.reads, 1), tiles * rows)
    kinds = (("local", "int32"), ("weight", "float32")) if shape.reads else (("weight", "float32"),)
    aligned = tuple(Operand(m, lanes, d, (lanes[0], rows), lambda t, a, b, *s: (0, t)) for m, d in kinds)
    turns: tuple[Operand, ...] = ()
    if shape.turned:
        d = shape.channels[0]
        at_table = lambda t, a, b, *s: (s[-1][place(a, b)[0]], t, 0)  # noqa: E731
        turns = tuple(
            Operand(m, (shape.tables, shape.tokens, d), "float32", (None, rows, d), at_table, buffers=1)
            for m in ("cos", "sin")
        )
    slots = (ring(shape, schedule), rows, shape.features)
    stages = tuple(((1, shape.window(rows), w), shape.source) for w in shape.widths)
    return Launch(
        grid, (*sources, *maps, *aligned, *turns), tuple(outputs), ((slots, shape.compute), *stages), 8, 1, semaphores=1
    )


def full_tables(rotation: Rotation, width: int, interleaved: bool) -> tuple[Array, Array]:
    """Cosines and signed sines ``[G,T,D]`` of all channels; 1 and 0 where nothing turns."""
    cos, sin = (t.astype(jnp.float32) for t in (rotation.cos, rotation.sin))
    if interleaved:
        both = jnp.repeat(cos, 2, axis=2), jnp.stack([-sin, sin], axis=-1).reshape(*sin.shape[:2], -1)
    else:
        both = jnp.concatenate([cos, cos], axis=2), jnp.concatenate([-sin, sin], axis=2)
    rest = ((0, 0), (0, 0), (0, width - 2 * cos.shape[2]))
    return jnp.pad(both[0], rest, constant_values=1.0), jnp.pad(both[1], rest)


def project(
    sources: tuple[Array, ...],
    maps: tuple[Linear, ...],
    index: Array | None,
    weight: Array,
    rotation: Rotation | None,
    *,
    settings: Settings,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """:func:`pallas_kernels.apply.reference.project` by the kernel.

    An alignment whose rows do not lie in the windows goes to the reference: decided when the program runs, or here
    where the alignment is concrete. (Gathering by XLA before the kernel would reserve memory for a second cache in
    every program, whether it is ever used or not.)
    """
    shape = shape_of(sources, maps, index, weight, rotation, settings)
    kind = jax.devices()[0].device_kind
    schedule = settings.schedule or "layers"
    found = settings.rows or tuned("apply", kind, dtype=shape.compute, features=shape.features, reading=shape.reading)
    size = found if isinstance(found, int) else found.get("rows")
    budget = settings.vmem or vmem_budget(kind)
    gathers = [maps[0].gather] if shape.shared else [m.gather for m in maps]
    common: dict[str, Any] = {"maps": maps, "rotation": rotation, "settings": settings, "interpret": interpret}
    made = launch(shape, schedule, budget, size)
    tables, fits, local = scalars(shape, schedule, made[1], gathers, index, weight)
    if index is None:
        return _run(shape, sources, weight, tables, None, made=made, **common)

    def direct(sources: tuple[Array, ...], index: Array, weight: Array) -> tuple[Array, ...]:
        return _run(shape, sources, weight, tables, local, made=made, **common)

    def streamed(sources: tuple[Array, ...], index: Array, weight: Array) -> tuple[Array, ...]:
        return reference.project(sources, maps, index, weight, rotation, settings, unroll=False)

    if not isinstance(fits, jax.core.Tracer):
        return (direct if bool(fits) else streamed)(sources, index, weight)
    found_rows: tuple[Array, ...] = jax.lax.cond(fits, direct, streamed, sources, index, weight)
    return found_rows


def shape_of(
    sources: Sequence[Array],
    maps: Sequence[Linear],
    index: Array | None,
    weight: Array,
    rotation: Rotation | None,
    settings: Settings,
) -> Shape:
    """Facts of a call.

    Raises:
        NotImplementedError: dtypes, or more steps, than the kernel takes.
    """
    layers, heads = maps[0].bias.shape[:2]
    kinds = {m.coefficients.dtype.name for m in maps}
    source = {s.dtype.name for s in sources}
    if len(kinds | source | {settings.dtype} | {"bfloat16", "float32"}) > 2 or len(kinds) > 1 or len(source) > 1:
        raise NotImplementedError(
            f"sources {sorted(source)}, coefficients {sorted(kinds)} and outputs {settings.dtype}: the TPU kernel "
            "takes float32 and bfloat16, one dtype for all sources and one for all coefficients."
        )
    found = Shape(
        layers,
        heads,
        sources[0].shape[0],
        sources[0].shape[1],
        len(weight),
        0 if index is None else weight.shape[1],
        tuple(s.shape[2] for s in sources),
        tuple(m.gather.shape[2] for m in maps),
        tuple(m.bias.shape[2] for m in maps),
        settings.shared,
        rotation is not None,
        1 if rotation is None else len(rotation.cos),
        source.pop(),
        kinds.pop(),
        settings.dtype,
    )
    if layers * heads * found.reading > SMEM_TABLE:
        raise NotImplementedError(
            f"{layers} layers x {heads} heads x {found.reading} blocks are more than {SMEM_TABLE} entries of a table "
            "in scalar memory."
        )
    return found


def vmem_budget(kind: str) -> int:
    """Bytes of VMEM that blocks and scratch may take on a kind of device; an unknown one counts as a small one."""
    return VMEM.get(kind, 64 << 20) * 11 // 16


def steps_of(gathers: Sequence[Array], schedule: str) -> Array:
    """``[steps,n]`` blocks in the order of the steps; gathers ``[L,H,k]``, of each map or the shared one."""
    joined = jnp.concatenate(gathers, axis=2)
    joined = joined.swapaxes(0, 1) if schedule == "heads" else joined
    return joined.reshape(-1, joined.shape[2])


def scalars(
    shape: Shape, schedule: str, rows: int, gathers: Sequence[Array], index: Array | None, weight: Array
) -> tuple[list[Array], Array, Array | None]:
    """The prefetched tables but ``groups``, whether they fit, and rows of the bands ``[R,tiles * rows]``.

    Args:
        shape, schedule, rows: of the launch.
        gathers: int32 ``[L,H,k]`` of each map, or the one they share.
        index, weight: ``[T,R]``.
    """
    tables = list(plan(steps_of(gathers, schedule), ring(shape, schedule)))
    tiles, chunk = -(-shape.tokens // rows), shape.chunk(rows)
    if index is None:
        start = jnp.arange(tiles, dtype=jnp.int32) * rows
        chunks = (jnp.minimum(rows, up(shape.slots, LANES) - start) + chunk - 1) // chunk
        return [*tables, start, chunks.astype(jnp.int32), jnp.zeros(1, jnp.int32)], jnp.asarray(True), None
    size = tiles * rows
    seen = windows(
        _lanes(index, size),
        _lanes(weight, size),
        rows,
        up(shape.slots, LANES),
        chunk,
        shape.window(rows),
        shape.band,
    )
    return [*tables, seen.start, seen.chunks, seen.band], seen.fits, seen.local


def _run(
    shape: Shape,
    sources: Sequence[Array],
    weight: Array,
    tables: Sequence[Array],
    local: Array | None,
    *,
    maps: Sequence[Linear],
    rotation: Rotation | None,
    settings: Settings,
    made: tuple[Launch, int],
    interpret: bool,
) -> tuple[Array, ...]:
    """Call the kernel."""
    described, rows = made
    half = 0 if rotation is None else rotation.cos.shape[2]
    room = up(shape.slots, LANES) - shape.slots
    arrays = [jnp.pad(s, ((0, 0), (0, room), (0, 0))) if room else s for s in sources]
    for one in maps:
        arrays += [one.coefficients, one.bias.astype(jnp.float32)[:, :, None, :]]
    arrays += [] if local is None else [local]
    arrays.append(_lanes(weight.astype(jnp.float32), -(-shape.tokens // rows) * rows))
    groups = jnp.zeros(shape.layers, jnp.int32)
    if rotation is not None:
        arrays += full_tables(rotation, shape.channels[0], settings.interleaved)
        groups = reference.groups_of(rotation, shape.layers).astype(jnp.int32)
    flops = 2 * shape.layers * shape.heads * shape.tokens * shape.features
    flops *= sum(k * d for k, d in zip(shape.counts, shape.channels, strict=True))
    body = functools.partial(kernel, shape, settings.interleaved, half, rows)
    call = described.call(body, name="apply", interpret=interpret, flops=flops)
    return tuple(call(*tables, groups, *arrays))


def _lanes(x: Array, size: int) -> Array:
    """``[T,R]`` to ``[R,size]``, zeros behind."""
    return jnp.pad(x.T, ((0, 0), (0, size - len(x))))
