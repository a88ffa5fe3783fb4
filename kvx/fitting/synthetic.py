"""Toy pairs with a known answer: for examples, tests and a first look at a new method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.alignment import Alignment
from kvx.cache.build import from_arrays
from kvx.cache.cache import KVCache
from kvx.cache.geometry import CacheGeometry, LayerGeometry, RopeSpec
from kvx.fitting.pairs import PairBatch, Pairs
from kvx.fitting.plan import Plan, widths
from kvx.fitting.reading import Probes
from kvx.mappers.base import Entry
from kvx.mappers.linear import aligned_rows
from kvx.mappers.support import head_entry, nearest_layers

QUERIES = 2  # query heads that read one kv head of a toy target
PROBES = 8  # queries of each toy context
SOURCE = CacheGeometry((LayerGeometry(2, 4, 4, rope=RopeSpec.create(dim=4)),) * 3)
TARGET = CacheGeometry((LayerGeometry(1, 6, 6, rope=RopeSpec.create(dim=6)),) * 2)


def toy_pairs(
    source: CacheGeometry = SOURCE,
    target: CacheGeometry = TARGET,
    *,
    batches: int = 8,
    batch_size: int = 4,
    length: int = 16,
    reads: int = 1,
    support: Sequence[Entry] | None = None,
    noise: float = 0.0,
    prefix: int = 1,
    dtype: Any = jnp.float32,
    embedding_dim: int = 0,
    seed: int = 0,
) -> Pairs:
    """Random source caches, and target caches that are an affine function of their nearest source layers.

    Every target layer reads keys and values of all heads of the ``reads`` nearest source layers; so a map with at least
    as many layers fits it exactly, up to ``noise``. Sequences are an eighth shorter than ``length`` and padded.

    Args:
        source, target: geometries.
        batches, batch_size, length: of the stream.
        reads: source layers that each target layer depends on.
        support: the support table by which the target depends on the source instead, such as :func:`planted_heads`.
        noise: standard deviation added to the target, whose signal has about 1.
        prefix: tokens of the prefix.
        dtype: of the caches.
        embedding_dim: channels of the target's random embeddings of its tokens; the keys of its first layer then also
            hold that of the token before. 0: none.
        seed: of everything random.

    Returns:
        Pairs like those of :func:`kvx.pairs`.

    Example:
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> batch = next(iter(toy_pairs()))
        >>> batch.source.keys(0).shape, batch.target.keys(0).shape, int(batch.weight.sum())
        ((4, 2, 16, 4), (4, 1, 16, 6), 56)
    """
    rng = np.random.default_rng(seed)
    truth = _truth(source, target, reads, rng) if support is None else _planted(source, target, support, rng)
    first = _random_cache(target, 1, prefix, prefix, rng, dtype) if prefix else None
    widest = target.layers[0].kv_heads * target.layers[0].key_dim
    lexicon = rng.normal(size=(embedding_dim, widest)) / np.sqrt(embedding_dim) if embedding_dim else None

    def stream(report: Callable[[float], Any]) -> Iterator[PairBatch]:
        draw = np.random.default_rng(seed + 1)
        for n in range(batches):
            made = _batch(source, target, truth, draw, batch_size, length, noise, dtype, n * batch_size, prefix)
            yield made if lexicon is None else _embedded(made, lexicon, draw)
            report(100.0 * (n + 1) / batches)

    facts: dict[str, Any] = {
        "toy": seed,
        "batches": batches,
        "batch_size": batch_size,
        "length": length,
        "noise": noise,
    }
    if embedding_dim:
        facts["embedding_dim"] = embedding_dim
    if support is not None:
        facts["support"] = [[entry.name, list(entry.parts)] for entry in support]
    provenance = {"source": None, "target": None}

    def weighed(mode: str) -> Callable[[Callable[[float], Any]], Iterator[PairBatch]]:
        return lambda report: (_weigh(batch, target) for batch in stream(report))

    return Pairs(
        stream,
        source,
        target,
        prefix=first,
        provenance=provenance,
        facts=facts,
        sensitive=weighed,
        embedding_dim=embedding_dim,
    )


def _truth(
    source: CacheGeometry, target: CacheGeometry, reads: int, rng: np.random.Generator
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Coefficients ``[P,Q]`` and bias ``[Q]`` of each target layer."""
    sizes = [sum(widths(layer)) for layer in source.layers]
    starts = np.cumsum([0, *sizes])
    truth = []
    for layer, near in zip(target.layers, nearest_layers(source.num_layers, target.num_layers, reads), strict=True):
        outputs = sum(widths(layer))
        w = np.zeros((starts[-1], outputs))
        for i in near:
            w[starts[i] : starts[i + 1]] = rng.normal(size=(sizes[i], outputs)) / np.sqrt(sizes[i] * len(near))
        truth.append((w, 3 * rng.normal(size=outputs)))
    return truth


def planted_heads(
    source: CacheGeometry, target: CacheGeometry, *, reads: int = 1, heads: int = 1, inputs: str = "both", seed: int = 0
) -> tuple[Entry, ...]:
    """A random support table: every target head reads other source heads in each of its nearest source layers.

    Args:
        source, target: geometries.
        reads: source layers that each target head reads.
        heads: heads that it reads in each of them, at most all.
        inputs: as in :func:`kvx.mappers.head_matched`.
        seed: of the draw; keys and values draw separately.

    Returns:
        One entry a target layer, component and head.

    Example:
        >>> from kvx.fitting.synthetic import SOURCE, TARGET, planted_heads
        >>> [entry.blocks for entry in planted_heads(SOURCE, TARGET, reads=2)]
        [((0, 1), (1, 1)), ((0, 1), (1, 0)), ((1, 0), (2, 0)), ((1, 0), (2, 0))]
    """
    rng = np.random.default_rng(seed)
    table = []
    for layer, near in enumerate(nearest_layers(source.num_layers, target.num_layers, reads)):
        for component in (0, 1):
            for head in range(target.layers[layer].kv_heads):
                blocks = []
                for i in near:
                    count = source.layers[i].kv_heads
                    drawn = rng.choice(count, size=min(heads, count), replace=False)
                    blocks += [(i, int(one)) for one in sorted(drawn)]
                table.append(head_entry(source, target, layer, component, (head, head + 1), blocks, inputs))
    return tuple(table)


def _planted(
    source: CacheGeometry, target: CacheGeometry, support: Sequence[Entry], rng: np.random.Generator
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Coefficients ``[P,Q]`` and bias ``[Q]`` of each target layer, zero outside a support table."""
    starts = Plan.of(source, target).x_starts
    truth = []
    for layer in target.layers:
        outputs = sum(widths(layer))
        truth.append((np.zeros((starts[-1], outputs)), 3 * rng.normal(size=outputs)))
    for entry in support:
        rows = np.concatenate([starts[i] + np.arange(first, stop) for i, first, stop in entry.parts])
        offset = entry.component * widths(target.layers[entry.target])[0]
        columns = offset + np.arange(entry.columns.start, entry.columns.stop)
        draw = rng.normal(size=(len(rows), len(columns))) / np.sqrt(len(rows))
        truth[entry.target][0][np.ix_(rows, columns)] = draw
    return truth


def _random_cache(
    geometry: CacheGeometry, batch: int, length: int, slots: int, rng: np.random.Generator, dtype: Any
) -> KVCache:
    pos = np.where(np.arange(slots) < length, np.arange(slots), -1).astype(np.int32)
    sides = [
        [
            jnp.asarray(rng.normal(size=(batch, g.kv_heads, slots, d)) + 1.0, dtype)
            for g, d in zip(geometry.layers, dims, strict=True)
        ]
        for dims in ([g.key_dim for g in geometry.layers], [g.value_dim for g in geometry.layers])
    ]
    return from_arrays(sides[0], sides[1], jnp.asarray(pos), geometry)


def _batch(
    source: CacheGeometry,
    target: CacheGeometry,
    truth: list[tuple[np.ndarray, np.ndarray]],
    rng: np.random.Generator,
    batch: int,
    slots: int,
    noise: float,
    dtype: Any,
    first: int,
    prefix: int,
) -> PairBatch:
    """One batch: the alignment reads the source in its own order, one slot a token."""
    length = slots - slots // 8
    cache = _random_cache(source, batch, length, slots, rng, dtype)
    pos = np.where(np.arange(slots) < length, np.arange(slots), -1).astype(np.int32)
    real = np.broadcast_to(pos >= 0, (batch, slots))
    index = np.where(real, np.arange(slots), 0)[..., None].astype(np.int32)
    alignment = Alignment(
        jnp.asarray(index), jnp.asarray(real[..., None].astype(np.float32)), jnp.asarray(np.tile(pos, (batch, 1)))
    )
    x = np.asarray(aligned_rows(cache, alignment), np.float64)
    keys: list[Array] = []
    values: list[Array] = []
    for layer, (w, bias) in zip(target.layers, truth, strict=True):
        y = x @ w + bias
        y = y + noise * rng.normal(size=y.shape)
        split = layer.kv_heads * layer.key_dim
        for rows, width, side in ((y[..., :split], layer.key_dim, keys), (y[..., split:], layer.value_dim, values)):
            side.append(jnp.asarray(rows.reshape(batch, slots, layer.kv_heads, width).swapaxes(1, 2), dtype))
    written = from_arrays(keys, values, jnp.asarray(np.where(pos >= 0, pos + prefix, -1)), target)
    return PairBatch(cache, written, alignment, jnp.asarray(real, jnp.float32), tuple(range(first, first + batch)))


def _embedded(batch: PairBatch, lexicon: np.ndarray, rng: np.random.Generator) -> PairBatch:
    """The batch with random embeddings; keys of the first target layer also hold those of the token before."""
    real = np.asarray(batch.weight) > 0
    drawn = np.where(real[..., None], rng.normal(size=(*real.shape, len(lexicon))), 0.0)
    before = np.pad(drawn, ((0, 0), (1, 0), (0, 0)))[:, :-1] @ lexicon
    group = batch.target.groups[0]
    heads, width = group.k.shape[2], group.k.shape[4]
    added = np.where(real[..., None], before, 0.0).reshape(*real.shape, heads, width).swapaxes(1, 2)
    keys = group.k.at[0].add(jnp.asarray(added, group.k.dtype))
    target = dataclasses.replace(batch.target, groups=(dataclasses.replace(group, k=keys), *batch.target.groups[1:]))
    alignment = dataclasses.replace(batch.alignment, embeddings=jnp.asarray(drawn, jnp.float32))
    return dataclasses.replace(batch, target=target, alignment=alignment)


def _weigh(batch: PairBatch, target: CacheGeometry) -> PairBatch:
    """The batch with random sensitivities (a few tokens count for most, as in real attention) and random queries."""
    rng = np.random.default_rng((batch.sequences or (0,))[0])
    shape = (target.num_layers, len(batch.weight), target.layers[0].kv_heads, batch.weight.shape[1], 2)
    drawn = rng.lognormal(sigma=1.5, size=shape) * np.asarray(batch.weight)[None, :, None, :, None]
    mean = drawn.sum(axis=3, keepdims=True) / np.asarray(batch.weight).sum(axis=1)[None, :, None, None, None]
    heads, width = shape[2] * QUERIES, target.layers[0].key_dim
    queries = jnp.asarray(2 * rng.normal(size=(shape[0], shape[1], heads, PROBES, width)), jnp.float32)
    last = batch.target.next_position()[:, None] - 1
    probes = Probes(queries, jnp.maximum(last - jnp.arange(PROBES)[None], 0), width**-0.5)
    return dataclasses.replace(batch, sensitivity=jnp.asarray(drawn / mean, jnp.float32), probes=probes)
