"""Small integer tables that steer the TPU kernel: which block goes into which slot when, and which rows a tile reads.

Plain array functions, the same for traced arrays inside a program and for concrete ones when traffic is counted.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
LANES = 128  # target rows gathered at once
ALIGN = 16  # rows to which a window inside a tile's rows is aligned


class Plan(NamedTuple):
    """Loads of one tile of target rows, all int32, flat.

    Attributes:
        slot: ``[steps * n]``: where in the ring each of the n blocks of a step stands.
        first: ``[steps + 1]``: the number of loads before each step.
        block: ``[steps * n]``: the block of each load, in order; into: the slot it goes to. Behind ``first[-1]``: 0.
    """

    slot: Array
    first: Array
    block: Array
    into: Array


class Windows(NamedTuple):
    """Source rows that each tile of target rows reads, all int32.

    Attributes:
        start: ``[tiles]``, a whole number of chunks; chunks: ``[tiles]``, how many from there.
        band: ``[tiles * rows / 128]``: for each 128 target rows, where their band of rows starts behind ``start``.
        local: ``[R,tiles * rows]``: rows of the band that are read, -1: none.
        fits: bool: whether all of it fits into the window and the bands.
    """

    start: Array
    chunks: Array
    band: Array
    local: Array
    fits: Array


def plan(gathers: Array, slots: int) -> Plan:
    """Keep blocks in a ring of slots: what a step reads and is there stays, what is longest unused makes room.

    Args:
        gathers: int32 ``[steps,n]`` blocks in the order of the steps.
        slots: at least the distinct blocks of any step (n is always enough).
    """
    steps, n = gathers.shape
    earlier = jnp.tril(jnp.ones((n, n), bool), -1)

    def step(carry: tuple[Array, Array], one: tuple[Array, Array]) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
        held, used = carry
        now, want = one
        there = held[None, :] == want[:, None]
        again = ((want[:, None] == want[None, :]) & earlier).any(axis=1)
        new = ~there.any(axis=1) & ~again
        free = jnp.argsort(jnp.where(there.any(axis=0), steps, used))
        rank = jnp.cumsum(new) - 1
        goes = jnp.where(new, free[jnp.where(new, rank, 0)], slots)
        held = held.at[goes].set(want, mode="drop")
        match = held[None, :] == want[:, None]
        used = jnp.where(match.any(axis=0), now, used)
        place = jnp.where(new, rank, n)
        loads = (jnp.zeros(n, jnp.int32).at[place].set(x.astype(jnp.int32), mode="drop") for x in (want, goes))
        return (held, used), (jnp.argmax(match, axis=1), new.sum(), *loads)

    start = (jnp.full(slots, -1, jnp.int32), jnp.full(slots, -1, jnp.int32))
    each = (jnp.arange(steps, dtype=jnp.int32), gathers.astype(jnp.int32))
    slot, count, block, into = jax.lax.scan(step, start, each)[1]
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count).astype(jnp.int32)])
    lane = jnp.arange(n, dtype=jnp.int32)[None, :]
    place = jnp.where(lane < count[:, None], first[:-1, None] + lane, steps * n).ravel()
    flat = [jnp.zeros(steps * n, jnp.int32).at[place].set(x.ravel(), mode="drop") for x in (block, into)]
    return Plan(slot.astype(jnp.int32).ravel(), first, *flat)


def windows(index: Array, weight: Array, rows: int, slots: int, chunk: int, window: int, band: int) -> Windows:
    """Windows of an alignment.

    Args:
        index: int32 ``[R,T]`` and weight ``[R,T]``, T a multiple of rows, weight zero where nothing is read.
        rows: target rows of a tile, a multiple of 128.
        slots: rows of the source, a multiple of chunk.
        chunk: source rows fetched at once; window: at most so many for a tile; band: rows that 128 target rows read.
    """
    read = weight != 0
    low = jnp.where(read, index, slots).min(axis=0).reshape(-1, rows // LANES, LANES).min(axis=2)
    high = jnp.where(read, index, -1).max(axis=0).reshape(low.shape[0], -1, LANES).max(axis=2)
    any_read = high >= 0
    start = jnp.where(any_read.any(axis=1), low.min(axis=1) // chunk * chunk, 0)
    chunks = jnp.maximum((high.max(axis=1) - start) // chunk + 1, 1)
    behind = jnp.clip((low - start[:, None]) // ALIGN * ALIGN, 0, window - band)
    behind = jnp.where(any_read, behind, 0)
    base = start[:, None] + behind
    inside = (high - base < band) & (low >= base) | ~any_read
    fits = (chunks * chunk <= window).all() & inside.all()
    behind_base = index.reshape(-1, *base.shape, LANES) - base[None, :, :, None]
    local = jnp.where(read, behind_base.reshape(index.shape), -1)
    chunks = jnp.minimum(chunks, window // chunk)  # where it does not fit nothing is run, but nothing may overflow
    start, chunks, behind, local = (x.astype(jnp.int32) for x in (start, chunks, behind.ravel(), local))
    return Windows(start, chunks, behind, local, fits)
