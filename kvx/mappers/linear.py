"""Linear maps given by a support table: gather source blocks, multiply, one coefficient block an entry."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.alignment import Alignment, resample
from kvx.cache.cache import KVCache
from kvx.cache.geometry import CacheGeometry, LayerGeometry
from kvx.mappers.base import Entry, EntryReport, Fitted, context_cache, groups_of
from kvx.mappers.history import NONE, History, with_history
from kvx.typing import host, pytree, static
from pallas_kernels.apply import Linear, folded_bias, project

HIGHEST = jax.lax.Precision.HIGHEST


@pytree
class BlockMap:
    """Coefficients of one component (keys or values) of target layers of one group that read equally many blocks.

    ``y = mean + (x - center) W``, where x joins the source blocks that the entry reads. E entries share the K heads of
    a layer: one for maps that read the same blocks for all heads, K for head-matched ones.

    Attributes:
        gather: int32 ``[L,E,k]``: the source blocks each entry reads.
        coefficients: ``[L,E,P,K/E,D]``, P = k times the width of a block.
        center: ``[L,E,P]`` mean of the features; mean: ``[L,K,D]`` mean of the outputs.
        covariance: ``[L,K,D,D]`` of the fitted outputs on the rows of the fit, for controls.
        layers: the L target layers, ascending.
    """

    gather: Array
    coefficients: Array
    center: Array
    mean: Array
    covariance: Array
    layers: tuple[int, ...] = static()


@pytree
class LinearParams:
    """Parameters of a linear map: a :class:`BlockMap` for each component of each set of like target layers.

    Attributes:
        keys, values: in the order of :func:`kvx.mappers.base.groups_of`, then of the number of blocks that are read.
        target: geometry of the caches it makes.
        inputs: ``"both"`` (blocks hold keys and values) or ``"same"`` (keys feed keys, values feed values).
        by_head: whether a block is one head of a source layer; else it is all heads of one.
        dtype: of the caches it makes.
        history: earlier tokens that are read, as further source layers (whose blocks stand after the cache's own).
        report: host only: how each entry was fitted.
    """

    keys: tuple[BlockMap, ...]
    values: tuple[BlockMap, ...]
    target: CacheGeometry = static()
    inputs: str = static(default="both")
    by_head: bool = static(default=False)
    dtype: str = static(default="float32")
    history: History = static(default=NONE)
    report: tuple[EntryReport, ...] | None = host(default=None)

    @property
    def stored(self) -> int:
        """Bytes that a translation reads: everything but the covariances."""
        maps = (*self.keys, *self.values)
        arrays = [a for m in maps for a in (m.gather, m.coefficients, m.center, m.mean)]
        return sum(a.size * a.dtype.itemsize for a in arrays)

    @property
    def parameters(self) -> int:
        """Fitted numbers that a translation reads."""
        return sum(m.coefficients.size + m.center.size + m.mean.size for m in (*self.keys, *self.values))

    def flops(self, tokens: int) -> int:
        """Operations of translating so many tokens: a product and a sum a coefficient."""
        return 2 * tokens * sum(m.coefficients.size for m in (*self.keys, *self.values))


@functools.partial(jax.jit, static_argnames=("alike",))
def apply_linear(params: LinearParams, cache: KVCache, alignment: Alignment, alike: bool = False) -> KVCache:
    """Map an un-rotated source cache onto the target's tokens.

    Maps of all heads are one product a layer; maps by head go through :mod:`pallas_kernels.apply`, which gathers the
    rows of each block where it multiplies them.

    Args:
        params: the map.
        cache: source cache ``[L,B,K,S,D]``, all tokens kept.
        alignment: ``[B,T,R]``.
        alike: known when compiling: keys and values of a head read the same blocks, one head of each source layer in a
            window that moves with depth.

    Returns:
        The target's cache of the context: T slots, positions of the alignment, zeros where nothing is fed.
    """
    cache = with_history(cache, params.history)
    if params.by_head:
        keys, values = (
            grouped(made, maps, params.target)
            for made, maps in zip(_by_head(params, cache, alignment, alike), (params.keys, params.values), strict=True)
        )
        return context_cache(keys, values, alignment, params.target)
    if params.inputs == "both":
        blocks = source_blocks(cache, alignment, (0, 1), params.by_head)
        sides = (blocks, blocks)
    else:
        sides = tuple(source_blocks(cache, alignment, (i,), params.by_head) for i in (0, 1))  # type: ignore[assignment]
    dtype = jnp.dtype(params.dtype)
    keys, values = (
        grouped([_project(block, side).astype(dtype) for block in maps], maps, params.target)
        for maps, side in zip((params.keys, params.values), sides, strict=True)
    )
    return context_cache(keys, values, alignment, params.target)


def grouped(made: Sequence[Array], maps: Sequence[Any], target: CacheGeometry) -> list[Array]:
    """Outputs ``[L,B,K,T,D]`` of each group of target layers, joined from the maps that make some of its ``layers``."""
    groups = []
    for layers in groups_of(target):
        ours = [n for n, block in enumerate(maps) if block.layers[0] in layers]
        order = np.argsort([layer for n in ours for layer in maps[n].layers])
        groups.append(made[ours[0]] if len(ours) == 1 else jnp.concatenate([made[n] for n in ours])[order])
    return groups


def _by_head(
    params: LinearParams, cache: KVCache, alignment: Alignment, alike: bool
) -> tuple[list[Array], list[Array]]:
    """Outputs ``[L,B,K,T,D]`` of each map of keys and of values; together where they map the same layers."""
    maps = params.keys, params.values
    if params.inputs == "both" and [m.layers for m in maps[0]] == [m.layers for m in maps[1]]:
        sources = _raw_blocks(cache, (0, 1))
        made = [_heads(sources, pair, alignment, params.dtype, alike) for pair in zip(*maps, strict=True)]
        return [k for k, _ in made], [v for _, v in made]
    found = []
    for component, side in enumerate(maps):
        sources = _raw_blocks(cache, (0, 1) if params.inputs == "both" else (component,))
        found.append([_heads(sources, (one,), alignment, params.dtype, alike)[0] for one in side])
    return found[0], found[1]


def _heads(
    sources: Sequence[Array], blocks: Sequence[BlockMap], alignment: Alignment, dtype: str, alike: bool
) -> list[Array]:
    """Outputs ``[L,B,K,T,D]`` of maps of the same layers from ``[B,U,S,F]``."""
    maps: list[Linear] = []
    for block in blocks:
        coefficients = block.coefficients[:, :, :, 0]
        gather = maps[0].gather if alike and maps else block.gather
        maps.append(Linear(gather, coefficients, folded_bias(coefficients, block.center, block.mean)))

    def one(sources: Sequence[Array], index: Array, weight: Array) -> tuple[Array, ...]:
        return project(sources, maps, index, weight, dtype=dtype, schedule="heads" if alike else None)

    if alignment.index.shape[0] == 1:
        made = one([s[0] for s in sources], alignment.index[0], alignment.weight[0])
        return [y[:, None] for y in made]
    return [y.swapaxes(0, 1) for y in jax.vmap(one)(sources, alignment.index, alignment.weight)]


def _raw_blocks(cache: KVCache, components: Sequence[int]) -> list[Array]:
    """Source blocks ``[B,U,S,F]``, one a head of a source layer, numbered as in :func:`source_blocks`: one array a
    component, or, where groups differ, one array of all, padded.
    """
    groups = [[_head_blocks((group.k, group.v)[i]) for i in components] for group in cache.groups]
    if len(groups) == 1:
        return groups[0]
    joined = [jnp.concatenate(sides, axis=-1) for sides in groups]
    slots, width = (max(blocks.shape[axis] for blocks in joined) for axis in (2, 3))
    joined = [jnp.pad(b, ((0, 0), (0, 0), (0, slots - b.shape[2]), (0, width - b.shape[3]))) for b in joined]
    counts = [blocks.shape[1] // len(g.layers) for blocks, g in zip(joined, cache.groups, strict=True)]
    owners = np.concatenate([np.repeat(g.layers, n) for g, n in zip(cache.groups, counts, strict=True)])
    return [jnp.concatenate(joined, axis=1)[:, np.argsort(owners, kind="stable")]]


def _head_blocks(x: Array) -> Array:
    """One component of a group ``[L,B,K,S,D]`` as ``[B,LK,S,D]``."""
    x = x.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


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
    entries: Sequence[Entry],
    fitted: Sequence[Fitted],
    source: CacheGeometry,
    target: CacheGeometry,
    *,
    inputs: str = "both",
    by_head: bool = False,
    dtype: Any = "float32",
    history: History = NONE,
) -> LinearParams:
    """Stack solved entries into parameters.

    Args:
        entries: the support table: for each target layer keys then values, each in the order of the heads.
        fitted: the solution of each.
        source: geometry of the source, with the layers of the history; target: of the target.
        inputs, by_head, dtype, history: as in :class:`LinearParams`.

    Returns:
        Parameters in float32.
    """
    solved: dict[tuple[int, int], list[tuple[list[int], Fitted]]] = {}
    for entry, one in zip(entries, fitted, strict=True):
        solved.setdefault((entry.target, entry.component), []).append((_reads(entry, source, by_head), one))
    sides: list[tuple[BlockMap, ...]] = []
    for component in (0, 1):
        widths = block_widths(source, inputs, component, by_head)
        maps = []
        for layers in groups_of(target):
            counts = {layer: max(len(blocks) for blocks, _ in solved[layer, component]) for layer in layers}
            for count in sorted(set(counts.values())):
                alike = tuple(layer for layer in layers if counts[layer] == count)
                rows = [_layer_block(solved[i, component], count, widths, target.layers[i], component) for i in alike]
                gather, w, center, mean, cov = (jnp.asarray(np.stack(column)) for column in zip(*rows, strict=True))
                maps.append(BlockMap(gather, w, center, mean, cov, alike))
        sides.append(tuple(maps))
    report = tuple(one.report for one in fitted)
    return LinearParams(sides[0], sides[1], target, inputs, by_head, jnp.dtype(dtype).name, history, report)


def block_widths(source: CacheGeometry, inputs: str, component: int, by_head: bool) -> list[int]:
    """Features of each source block (numbered as :func:`source_blocks` does) that feed keys (0) or values (1)."""
    components = (0, 1) if inputs == "both" else (component,)
    found = []
    for layer in source.layers:
        one = sum((layer.key_dim, layer.value_dim)[c] for c in components)
        found += [one] * layer.kv_heads if by_head else [one * layer.kv_heads]
    return found


def _reads(entry: Entry, source: CacheGeometry, by_head: bool) -> list[int]:
    """Numbers of the blocks that an entry reads, in the order of its features."""
    if not by_head:
        return list(dict.fromkeys(part[0] for part in entry.parts))
    first = np.cumsum([0, *(layer.kv_heads for layer in source.layers)])
    return [int(first[layer]) + head for layer, head in entry.blocks]


def _layer_block(
    solved: Sequence[tuple[list[int], Fitted]],
    count: int,
    widths: Sequence[int],
    layer: LayerGeometry,
    component: int,
) -> tuple[np.ndarray, ...]:
    """Arrays of one target layer and component; narrow blocks and missing ones are padded with zero coefficients."""
    full = max(widths)
    channels = (layer.key_dim, layer.value_dim)[component]
    coefficients, centers, gather = [], [], []
    for blocks, one in solved:
        rows = np.concatenate([at * full + np.arange(widths[block]) for at, block in enumerate(blocks)])
        padded = np.zeros((count * full, one.coefficients.shape[1]), np.float32)
        center = np.zeros(count * full, np.float32)
        padded[rows], center[rows] = one.coefficients, one.center
        coefficients.append(padded.reshape(len(padded), -1, channels))
        centers.append(center)
        gather.append(blocks + [blocks[0]] * (count - len(blocks)))
    mean = np.concatenate([one.mean for _, one in solved]).reshape(layer.kv_heads, channels)
    covariance = np.concatenate([one.covariance for _, one in solved])
    return (
        np.asarray(gather, np.int32),
        np.stack(coefficients),
        np.stack(centers),
        mean.astype(np.float32),
        covariance.astype(np.float32),
    )
