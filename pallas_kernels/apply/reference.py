"""The specification of ``apply`` in plain XLA, which is also its fallback: one target head a step, nothing transposed.

A step gathers the rows of each of the k source blocks that a target head reads and adds up k products, so the largest
temporary is one gathered block. Its gradient is written out, because autodiff of the scan would make a whole gradient
of the sources in every step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST
Array = jax.Array


class Linear(NamedTuple):
    """Coefficients of one component (keys or values) of all target layers and heads.

    Attributes:
        gather: int32 ``[L,H,k]``: the source blocks that each target head reads.
        coefficients: ``[L,H,P,D]``, P = k F for blocks of F features.
        bias: ``[L,H,D]``.
    """

    gather: Array
    coefficients: Array
    bias: Array


class Rotation(NamedTuple):
    """Cosines and sines of the target's rotary embedding.

    Attributes:
        cos, sin: float32 ``[G,T,rot/2]``, an attention factor multiplied in.
        groups: int32 ``[L]``: which of the G tables each target layer turns by; ``None``: table l, or the only one.
    """

    cos: Array
    sin: Array
    groups: Array | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is static.

    Attributes:
        dtype: of the outputs.
        interleaved: rotated pairs are neighbours instead of halves.
        shared: all maps read the same blocks.
        schedule: order of the TPU kernel's steps, see :func:`pallas_kernels.apply.tpu.launch`.
        rows, vmem: its target rows a tile and bytes of VMEM; ``None``: by kind of device.
        implementation: as for :func:`pallas_kernels.dispatch.dispatch`.
    """

    dtype: str = "float32"
    interleaved: bool = False
    shared: bool = False
    schedule: str | None = None
    rows: int | None = None
    vmem: int | None = None
    implementation: str | None = None


def project(
    sources: Sequence[Array],
    maps: Sequence[Linear],
    index: Array | None,
    weight: Array,
    rotation: Rotation | None,
    settings: Settings,
    unroll: bool = True,
) -> tuple[Array, ...]:
    """Outputs ``[L,H,T,D]`` of every map, the first one rotated.

    Args:
        sources: arrays ``[U,S,F_i]`` whose features stand side by side in a block.
        maps: of the same L and H.
        index: int32 ``[T,R]``; ``None``: row t feeds token t.
        weight: float32 ``[T,R]``; zero: not read.
        rotation: of the first map's outputs.
        settings: see there.
        unroll: the loop over blocks, faster on CPU; else it compiles faster on TPU.
    """
    layers, heads = maps[0].bias.shape[:2]
    fed = (weight != 0).any(axis=1)[:, None]

    def step(_: None, one: tuple[Any, ...]) -> tuple[None, tuple[Array, ...]]:
        outs = [_product(sources, part, index, weight, fed, unroll) for part in one[:-1]]
        if rotation is not None:
            at = one[-1]
            outs[0] = rotate(outs[0], rotation.cos[at], rotation.sin[at], settings.interleaved)
        return None, tuple(y.astype(settings.dtype) for y in outs)

    steps = (*(flat_heads(m) for m in maps), _tables(rotation, layers, heads))
    made = jax.lax.scan(step, None, steps)[1]
    return tuple(y.reshape(layers, heads, *y.shape[1:]) for y in made)


def backward(
    sources: Sequence[Array],
    maps: Sequence[Linear],
    index: Array | None,
    weight: Array,
    rotation: Rotation | None,
    settings: Settings,
    slopes: Sequence[Array],
) -> tuple[Any, ...]:
    """Gradients of (sources, maps' coefficients and biases, weight, rotation's cos and sin) from those of the outputs.

    The sums over heads run in float32 and in place; outputs are made again only where their rotation is differentiated.
    """
    layers, heads = maps[0].bias.shape[:2]
    fed = (weight != 0).any(axis=1)[:, None]
    zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree)  # noqa: E731
    turns = None if rotation is None else (rotation.cos, rotation.sin)

    def step(carry: Any, one: tuple[Any, ...]) -> tuple[Any, Any]:
        d_sources, d_weight, d_turns = carry
        parts, at, dys = one
        grads = []
        for n, (part, dy) in enumerate(zip(parts, dys, strict=True)):
            dy = dy.astype(jnp.float32)
            if n == 0 and turns is not None:
                y = _product(sources, part, index, weight, fed)
                turn = lambda y, cos, sin: rotate(y, cos, sin, settings.interleaved)  # noqa: E731
                dy, *change = jax.vjp(turn, y, *(t[at] for t in turns))[1](dy)
                d_turns = tuple(d.at[at].add(c) for d, c in zip(d_turns, change, strict=True))
            dy = jnp.where(fed, dy, 0)
            d_sources, d_weight, d_coefficients = _pull(sources, part, index, weight, dy, d_sources, d_weight)
            grads.append((d_coefficients.astype(part.coefficients.dtype), dy.sum(axis=0).astype(part.bias.dtype)))
        return (d_sources, d_weight, d_turns), tuple(grads)

    flat = tuple(s.reshape(layers * heads, *s.shape[2:]) for s in slopes)
    steps = (tuple(flat_heads(m) for m in maps), _tables(rotation, layers, heads), flat)
    start = (zeros(tuple(sources)), zeros(weight), zeros(turns))
    (d_sources, d_weight, d_turns), grads = jax.lax.scan(step, start, steps)
    d_sources = tuple(d.astype(s.dtype) for d, s in zip(d_sources, sources, strict=True))
    shaped = jax.tree.map(lambda g: g.reshape(layers, heads, *g.shape[1:]), grads)
    return d_sources, shaped, d_weight.astype(weight.dtype), d_turns


def flat_heads(part: Linear) -> Linear:
    """``[L,H,...]`` to ``[LH,...]``."""
    return Linear(*(a.reshape(-1, *a.shape[2:]) for a in part))


def rotate(y: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Turn the first 2 F channels of ``y [T,D]`` by ``cos, sin [T,F]``."""
    half = cos.shape[-1]
    turned, rest = y[:, : 2 * half], y[:, 2 * half :]
    a, b = (turned[:, 0::2], turned[:, 1::2]) if interleaved else (turned[:, :half], turned[:, half:])
    a, b = a * cos - b * sin, b * cos + a * sin
    out = jnp.stack([a, b], axis=-1).reshape(turned.shape) if interleaved else jnp.concatenate([a, b], axis=-1)
    return jnp.concatenate([out, rest], axis=-1) if rest.shape[-1] else out


def groups_of(rotation: Rotation, layers: int) -> Array:
    """int32 ``[L]``: the table of each layer."""
    if rotation.groups is not None:
        return rotation.groups
    one = rotation.cos.shape[0] == 1
    return jnp.zeros(layers, jnp.int32) if one else jnp.arange(layers, dtype=jnp.int32)


def _tables(rotation: Rotation | None, layers: int, heads: int) -> Array | None:
    return None if rotation is None else jnp.repeat(groups_of(rotation, layers), heads)


def _product(
    sources: Sequence[Array], part: Linear, index: Array | None, weight: Array, fed: Array, unroll: bool = False
) -> Array:
    """float32 ``[T,D]`` of one target head, zero in rows that nothing feeds."""

    def add(total: Array, one: tuple[Array, Array]) -> tuple[Array, None]:
        block, coefficients = one
        for source, w in _split(sources, coefficients):
            rows = gathered(source, block, index, weight).astype(w.dtype)
            total = total + jnp.dot(rows, w, precision=HIGHEST, preferred_element_type=jnp.float32)
        return total, None

    start = jnp.where(fed, part.bias.astype(jnp.float32)[None, :], 0)
    return jax.lax.scan(add, start, (part.gather, _by_block(part)), unroll=unroll)[0]


def _pull(
    sources: Sequence[Array],
    part: Linear,
    index: Array | None,
    weight: Array,
    dy: Array,
    d_sources: tuple[Array, ...],
    d_weight: Array,
) -> tuple[tuple[Array, ...], Array, Array]:
    """Add one target head's gradients to those of the sources and weights, and give that of its coefficients."""

    def add(carry: Any, one: tuple[Array, Array]) -> tuple[Any, Array]:
        moved, d_weight = carry
        block, coefficients = one
        pieces, found = [], []
        for (source, w), d_source in zip(_split(sources, coefficients), moved, strict=True):
            rows = gathered(source, block, index, weight).astype(jnp.float32)
            back = jnp.dot(dy, w.astype(jnp.float32).T, precision=HIGHEST, preferred_element_type=jnp.float32)
            pieces.append(jnp.dot(rows.T, dy, precision=HIGHEST, preferred_element_type=jnp.float32))
            d_source, d_weight = _pull_rows(source, block, index, weight, back, d_source, d_weight)
            found.append(d_source)
        return (tuple(found), d_weight), jnp.concatenate(pieces)

    (d_sources, d_weight), pieces = jax.lax.scan(add, (d_sources, d_weight), (part.gather, _by_block(part)))
    return d_sources, d_weight, pieces.reshape(part.coefficients.shape)


def _pull_rows(
    source: Array, block: Array, index: Array | None, weight: Array, back: Array, d_source: Array, d_weight: Array
) -> tuple[Array, Array]:
    """Add a gradient of gathered rows ``[T,F]`` to those of their source and of the weights."""
    for r in range(weight.shape[1]):
        w = weight[:, r].astype(jnp.float32)[:, None]
        place = jnp.arange(len(weight)) if index is None else index[:, r]
        place = jnp.where(w[:, 0] != 0, place, source.shape[1])  # rows that are not read are dropped
        d_source = d_source.at[block, place].add(w * back, mode="drop")
        read = jnp.where(w != 0, _rows(source, block, index, r).astype(jnp.float32), 0)
        d_weight = d_weight.at[:, r].add((read * back).sum(axis=1))
    return d_source, d_weight


def _by_block(part: Linear) -> Array:
    """Coefficients ``[k,F,D]`` of one target head."""
    return part.coefficients.reshape(part.gather.shape[-1], -1, part.coefficients.shape[-1])


def _split(sources: Sequence[Array], coefficients: Array) -> list[tuple[Array, Array]]:
    """Each source and its rows of one block's coefficients."""
    found, row = [], 0
    for source in sources:
        found.append((source, coefficients[row : row + source.shape[-1]]))
        row += source.shape[-1]
    return found


def gathered(source: Array, block: Array, index: Array | None, weight: Array) -> Array:
    """Rows of a block on the target's tokens, ``sum_r weight[t,r] x[index[t,r]]``, in float32: ``[T,F]``."""
    parts = []
    for r in range(weight.shape[1]):
        w = weight[:, r].astype(jnp.float32)[:, None]
        parts.append(w * jnp.where(w != 0, _rows(source, block, index, r).astype(jnp.float32), 0))
    return functools.reduce(jnp.add, parts)


def _rows(source: Array, block: Array, index: Array | None, r: int) -> Array:
    rows = jax.lax.dynamic_index_in_dim(source, block, 0, keepdims=False)
    return rows if index is None else jnp.take(rows, index[:, r], axis=0, mode="clip")
