"""Linear maps given by a support table: gather source blocks, multiply, one coefficient block an entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.alignment import Alignment, resample
from kvx.cache.cache import KVCache
from kvx.cache.geometry import CacheGeometry, LayerGeometry
from kvx.mappers.base import EntryReport, Fitted, context_cache, groups_of
from kvx.typing import host, pytree, static

HIGHEST = jax.lax.Precision.HIGHEST


@pytree
class BlockMap:
    """Coefficients of one component (keys or values) of one group of target layers.

    ``y = mean + (x - center) W``, where x joins the source blocks that the entry reads. E entries share the K heads of
    a layer: one for maps that read the same blocks for all heads, K for head-matched ones.

    Attributes:
        gather: int32 ``[L,E,k]``: the source blocks each entry reads.
        coefficients: ``[L,E,P,K/E,D]``, P = k times the width of a block.
        center: ``[L,E,P]`` mean of the features; mean: ``[L,K,D]`` mean of the outputs.
        covariance: ``[L,K,D,D]`` of the fitted outputs on the rows of the fit, for controls.
    """

    gather: Array
    coefficients: Array
    center: Array
    mean: Array
    covariance: Array


@pytree
class LinearParams:
    """Parameters of a linear map: one :class:`BlockMap` for each group of target layers and component.

    Attributes:
        keys, values: in the order of :func:`kvx.mappers.base.groups_of`.
        target: geometry of the caches it makes.
        inputs: ``"both"`` (blocks hold keys and values) or ``"same"`` (keys feed keys, values feed values).
        by_head: whether a block is one head of a source layer; else it is all heads of one.
        dtype: of the caches it makes.
        report: host only: how each entry was fitted.
    """

    keys: tuple[BlockMap, ...]
    values: tuple[BlockMap, ...]
    target: CacheGeometry = static()
    inputs: str = static(default="both")
    by_head: bool = static(default=False)
    dtype: str = static(default="float32")
    report: tuple[EntryReport, ...] | None = host(default=None)


@jax.jit
def apply_linear(params: LinearParams, cache: KVCache, alignment: Alignment) -> KVCache:
    """Map an un-rotated source cache onto the target's tokens.

    Args:
        params: the map.
        cache: source cache ``[L,B,K,S,D]``, all tokens kept.
        alignment: ``[B,T,R]``.

    Returns:
        The target's cache of the context: T slots, positions of the alignment, zeros where nothing is fed.
    """
    if params.inputs == "both":
        blocks = source_blocks(cache, alignment, (0, 1), params.by_head)
        sides = (blocks, blocks)
    else:
        sides = tuple(source_blocks(cache, alignment, (i,), params.by_head) for i in (0, 1))  # type: ignore[assignment]
    dtype = jnp.dtype(params.dtype)
    keys = [_project(block, sides[0]).astype(dtype) for block in params.keys]
    values = [_project(block, sides[1]).astype(dtype) for block in params.values]
    return context_cache(keys, values, alignment, params.target)


def source_blocks(cache: KVCache, alignment: Alignment, components: Sequence[int], by_head: bool) -> Array:
    """Source features on the target's tokens: ``[U,B,T,F]``, one block a source layer, or a head of one.

    A block holds the asked components side by side, each heads first (``[K,D]`` flattened). Layers narrower than the
    widest are padded with zeros. Rows that nothing feeds are zero.
    """
    groups = [
        _group_blocks([_carried(alignment, (group.k, group.v)[i]) for i in components], by_head)
        for group in cache.groups
    ]
    width = max(blocks.shape[-1] for blocks in groups)
    groups = [jnp.pad(blocks, ((0, 0), (0, 0), (0, 0), (0, width - blocks.shape[-1]))) for blocks in groups]
    layers = [layer for group in cache.groups for layer in group.layers]
    if layers == sorted(layers):
        return jnp.concatenate(groups) if len(groups) > 1 else groups[0]
    counts = [blocks.shape[0] // len(g.layers) for blocks, g in zip(groups, cache.groups, strict=True)]
    owners = np.concatenate([np.repeat(g.layers, n) for g, n in zip(cache.groups, counts, strict=True)])
    return jnp.concatenate(groups)[np.argsort(owners, kind="stable")]


def _group_blocks(sides: Sequence[Array], by_head: bool) -> Array:
    """One group's components ``[B,L,K,T,D]`` side by side as float32 ``[L or L*K,B,T,F]``, all layers at once."""
    parts = []
    for side in sides:
        batch, layers, heads, tokens, width = side.shape
        order, rows = ((1, 2, 0, 3, 4), layers * heads) if by_head else ((1, 0, 3, 2, 4), layers)
        parts.append(side.transpose(order).reshape(rows, batch, tokens, -1))
    return jnp.concatenate(parts, axis=-1)


@jax.jit
def aligned_rows(cache: KVCache, alignment: Alignment) -> Array:
    """All source features of every target token, layer by layer, keys before values: float32 ``[B,T,P]``."""
    layers = _aligned(cache, alignment, (0, 1))
    return jnp.concatenate([_flat(side) for sides in layers for side in sides], axis=-1)


@jax.jit
def cache_rows(cache: KVCache) -> Array:
    """All entries of a cache, slot by slot, layer by layer, keys before values: float32 ``[B,T,Q]``."""
    sides = [side for layer in range(cache.num_layers) for side in (cache.keys(layer), cache.values(layer))]
    return jnp.concatenate([_flat(side.astype(jnp.float32)) for side in sides], axis=-1)


def _aligned(cache: KVCache, alignment: Alignment, components: Sequence[int]) -> list[list[Array]]:
    """For each source layer, the asked components on the target's tokens, ``[B,K,T,D]`` in fp32."""
    groups = [[_carried(alignment, (group.k, group.v)[i]) for i in components] for group in cache.groups]
    places = [cache.locate(layer) for layer in range(cache.num_layers)]
    return [[side[:, at] for side in groups[g]] for g, at in places]


def _carried(alignment: Alignment, x: Array) -> Array:
    """One component of a group ``[L,B,K,S,D]`` on the target's tokens, float32 ``[B,L,K,T,D]``."""
    return resample(alignment, x.swapaxes(0, 1).astype(jnp.float32))


def _flat(side: Array) -> Array:
    """``[B,K,T,D]`` to ``[B,T,K*D]``."""
    return side.swapaxes(1, 2).reshape(side.shape[0], side.shape[2], -1)


def _project(block: BlockMap, blocks: Array) -> Array:
    """``[L,B,K,T,D]``: one product a target layer, scanned."""

    def layer(_: None, one: BlockMap) -> tuple[None, Array]:
        x = jnp.moveaxis(blocks[one.gather], 1, 3)  # [E,B,T,k,F]
        entries, batch, tokens = x.shape[:3]
        x = x.reshape(entries, batch, tokens, -1) - one.center.astype(jnp.float32)[:, None, None]
        x = x.astype(one.coefficients.dtype)
        y = jnp.einsum("ebtp,epkd->bektd", x, one.coefficients, precision=HIGHEST, preferred_element_type=jnp.float32)
        heads, width = one.mean.shape
        return None, y.reshape(batch, heads, tokens, width) + one.mean.astype(jnp.float32)[None, :, None]

    return jax.lax.scan(layer, None, block)[1]


def part_of(layer: LayerGeometry, index: int, component: int, head: int | None = None) -> tuple[int, int, int]:
    """``(layer, first, stop)``: where keys or values (of one head) stand among the features of a source layer."""
    width = (layer.key_dim, layer.value_dim)[component]
    start = component * layer.kv_heads * layer.key_dim
    first, count = (0, layer.kv_heads) if head is None else (head, 1)
    return index, start + first * width, start + (first + count) * width


def assemble(
    fitted: Sequence[Fitted],
    gathers: Sequence[Sequence[Sequence[int]]],
    sources: CacheGeometry,
    target: CacheGeometry,
    *,
    inputs: str = "both",
    by_head: bool = False,
    dtype: Any = "float32",
) -> LinearParams:
    """Stack solved entries into parameters.

    Args:
        fitted: for each target layer, keys then values, each as E entries in the order of the heads.
        gathers: for each target layer, for each entry, the k blocks it reads (:func:`source_blocks` numbers them).
        sources: geometry of the source.
        target: geometry of the target.
        inputs, by_head, dtype: as in :class:`LinearParams`.

    Returns:
        Parameters in float32.
    """
    entries = [len(gather) for gather in gathers]
    starts = np.cumsum([0, *(2 * count for count in entries)])
    sides: list[tuple[BlockMap, ...]] = []
    for component in (0, 1):
        components = (0, 1) if inputs == "both" else (component,)
        widths = [_block_widths(layer, components, by_head) for layer in sources.layers]
        flat = [w for layer in widths for w in layer]
        maps = []
        for layers in groups_of(target):
            rows = []
            for layer in layers:
                first = starts[layer] + component * entries[layer]
                solved = fitted[first : first + entries[layer]]
                rows.append(_layer_block(solved, gathers[layer], flat, target.layers[layer], component))
            maps.append(BlockMap(*(jnp.asarray(np.stack(column)) for column in zip(*rows, strict=True))))
        sides.append(tuple(maps))
    report = tuple(one.report for one in fitted)
    return LinearParams(sides[0], sides[1], target, inputs, by_head, jnp.dtype(dtype).name, report)


def _block_widths(layer: LayerGeometry, components: Sequence[int], by_head: bool) -> list[int]:
    one = sum((layer.key_dim, layer.value_dim)[c] for c in components)
    return [one] * layer.kv_heads if by_head else [one * layer.kv_heads]


def _layer_block(
    solved: Sequence[Fitted],
    gather: Sequence[Sequence[int]],
    widths: Sequence[int],
    layer: LayerGeometry,
    component: int,
) -> tuple[np.ndarray, ...]:
    """Arrays of one target layer and component; features of narrow blocks are padded with zero coefficients."""
    full = max(widths)
    channels = (layer.key_dim, layer.value_dim)[component]
    coefficients, centers = [], []
    for one, blocks in zip(solved, gather, strict=True):
        rows = np.concatenate([at * full + np.arange(widths[block]) for at, block in enumerate(blocks)])
        padded = np.zeros((len(blocks) * full, one.coefficients.shape[1]), np.float32)
        center = np.zeros(len(blocks) * full, np.float32)
        padded[rows], center[rows] = one.coefficients, one.center
        coefficients.append(padded.reshape(len(padded), -1, channels))
        centers.append(center)
    mean = np.concatenate([one.mean for one in solved]).reshape(layer.kv_heads, channels)
    covariance = np.concatenate([one.covariance for one in solved])
    return (
        np.asarray(gather, np.int32),
        np.stack(coefficients),
        np.stack(centers),
        mean.astype(np.float32),
        covariance.astype(np.float32),
    )
