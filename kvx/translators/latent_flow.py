"""Latent Cache Flow: both caches through one narrow latent a layer, added to the target's own by gated heads."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvx.alignment import Alignment
from kvx.cache.cache import KVCache
from kvx.errors import KvxError
from kvx.mappers.base import CacheMap, groups_of
from kvx.mappers.linear import block_widths, source_blocks
from kvx.translators.additions import Added, Control, calibrated, check_start, fused_cache, last_with_last, own_sides
from kvx.translators.base import Aux, Sample
from kvx.translators.latent_flow_params import Flow, FlowParams, addition, first_flow
from kvx.typing import typed


@dataclasses.dataclass(frozen=True)
class LatentFlow:
    """Settings of :func:`latent_flow`, which makes it and documents them."""

    width: int
    layers: tuple[int, ...] | int | None
    span: int | None
    gate: float
    needs: ClassVar[tuple[str, ...]] = ("receiver",)

    def init(self, key: Array, start: CacheMap, sample: Sample = ()) -> FlowParams:
        """Parameters that add nothing yet, for the shapes of ``start``, whose own coefficients are not used.

        Args:
            key: of the random layers; start: a map of the pair.
            sample: source caches, alignments and receivers whose means and deviations the latent's first layer is
                scaled by; none: it reads raw features.

        Raises:
            KvxError: a start that does not say its shapes, or layers that the target does not have.
        """
        source, target = check_start("latent_flow", start)
        pairing = last_with_last(source.num_layers, target.num_layers)
        chosen = _chosen(self.layers, target.num_layers)
        features = max(block_widths(source, "both", 0, False))
        flows = []
        for n, group in enumerate(groups_of(target)):
            layers = tuple(layer for layer in group if layer in chosen)
            if layers:
                shapes = (features, *target.layers[layers[0]].shapes)
                gather, k = tuple(pairing[i] for i in layers), jax.random.fold_in(key, n)
                made = first_flow(k, gather, layers, shapes, self.width, self.gate, self.span is not None)
                flows.append(_standardised(made, sample) if sample else made)
        return FlowParams(tuple(flows), target)

    def apply(
        self,
        params: FlowParams,
        cache: KVCache,
        alignment: Alignment,
        *,
        receiver: KVCache | None = None,
        rng: Any = None,
    ) -> tuple[KVCache, Aux]:
        """The receiver's cache with what is added to it; no token reads a source slot after those that feed it.

        Raises:
            KvxError: no receiver.
        """
        if receiver is None:
            raise KvxError(
                "latent_flow adds to the target's own cache of the context, which is missing; pass receiver=."
            )
        return fused_cache(receiver, self._added(params, cache, alignment, receiver), alignment, params.target), {}

    def trainable(self, params: FlowParams) -> FlowParams:
        """``True`` for everything but the tables of source layers and what controls need."""
        no = functools.partial(jax.tree.map, lambda _: False)
        marks = jax.tree.map(lambda _: True, params)
        flows = tuple(
            dataclasses.replace(mark, gather=False, keys=no(flow.keys), values=no(flow.values))
            for mark, flow in zip(marks.flows, params.flows, strict=True)
        )
        return dataclasses.replace(params, flows=flows)

    def calibrate(self, params: FlowParams, sample: Sample) -> FlowParams:
        """Mean and covariance of what is added on a sample, which the constant and the random control use."""
        found = calibrated(sample, functools.partial(_additions, self, params))
        if found is None:
            return params
        groups = groups_of(params.target)
        flows = []
        for flow in params.flows:
            at = next(n for n, group in enumerate(groups) if flow.layers[0] in group)
            rows = np.array([groups[at].index(layer) for layer in flow.layers])
            controls = [
                Control(old.offset, mean[rows], square[rows])
                for old, (mean, square) in zip((flow.keys, flow.values), found[at], strict=True)
            ]
            flows.append(dataclasses.replace(flow, keys=controls[0], values=controls[1]))
        return dataclasses.replace(params, flows=tuple(flows))

    def _added(self, params: FlowParams, cache: KVCache, alignment: Alignment, own: KVCache) -> Added:
        """What is added to keys and values of each group of target layers: zero where a layer is not fused."""
        fed = alignment if self.span is None else slot_by_slot(cache)
        blocks = source_blocks(cache, fed, (0, 1), False)
        real = cache.groups[0].pos[0, :, 0] >= 0
        last = jnp.where(alignment.weight > 0, alignment.index, 0).max(axis=2)
        found: Added = []
        for group in groups_of(params.target):
            keys, values = (jnp.zeros_like(x, jnp.float32) for x in own_sides(own, group))
            for flow in params.flows:
                if flow.layers[0] not in group:
                    continue

                def layer(_: None, one: tuple[Flow, Array, tuple[Array, Array]]) -> tuple[None, tuple[Array, Array]]:
                    flow, seen, held = one
                    return None, addition(flow, seen, held, real, last, self.span)

                feed = flow, blocks[flow.gather], own_sides(own, flow.layers)
                made = jax.lax.scan(layer, None, feed)[1]
                rows = np.array([group.index(i) for i in flow.layers])
                keys, values = (x.at[rows].set(y) for x, y in zip((keys, values), made, strict=True))
            found.append((keys, values))
        return found


@functools.partial(jax.jit, static_argnames=("method",))
def _additions(method: LatentFlow, params: FlowParams, cache: KVCache, alignment: Alignment, own: KVCache) -> Added:
    return method._added(params, cache, alignment, own)


def latent_flow(
    *, width: int = 128, layers: tuple[int, ...] | int | None = None, span: int | None = None, gate: float = 1.0
) -> LatentFlow:
    """Latent Cache Flow: the target reads the context too, and a narrow network adds to its cache what both say.

    For each target layer, with S the source's keys and values of the paired layer and R the target's own, all heads of
    a token flattened and keys un-rotated: ``z = W_down [S_K; S_V; R_K; R_V]``, ``[m_K; m_V] = MLP(z)``,
    ``R'_K = R_K + sigmoid(g_K(z)) W_K m_K`` and likewise for values, one gate a token and head. Layers are paired last
    with last.

    With a ``span`` (LCF-X, for contexts that differ) the source's slots are cut into spans: in each a learned query
    pools the latents ``W_down [S_K; S_V]`` of its tokens, a second query pools the spans, one pair of queries for each
    target head; what they give is put through the same network and added along the receiver. Token t then reads the
    slots up to the last one that feeds it; :func:`beside` makes the alignment of contexts that differ.

    Args:
        width: d of the latent; the network is twice as wide, half of it for keys, half for values.
        layers: target layers that are fused, or how many, evenly spread from the first to the last; ``None``: all.
            The others keep the target's own cache.
        span: slots of a span; ``None``: each token reads the source's tokens that the alignment feeds it.
        gate: first logit of all gates; from 0 they open slowly.

    Returns:
        The method; train it with :func:`kvx.train` on data made with ``receiver=True``.

    Raises:
        KvxError: settings out of range.

    Example:
        >>> import jax, kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> pairs = toy_pairs()
        >>> method = kvx.translators.latent_flow(width=8, layers=1)
        >>> start = kvx.translators.untrained(method, pairs.unfitted(), jax.random.key(0))
        >>> batch = next(iter(pairs))
        >>> fused = kvx.translate(start, batch.source, batch.alignment, receiver=batch.target)
        >>> bool((fused.keys(0)[:, :, 1:] == batch.target.keys(0)).all())
        True

    Reference: Latent Cache Flow, arXiv 2605.22863; sizes of the network are kvx's own.
    """
    count = layers if isinstance(layers, int) else 1 if layers is None else len(layers)
    if min(width, count, 1 if span is None else span) < 1:
        raise KvxError(f"width {width}, layers {layers} and span {span} must each be at least one.")
    kept = layers if layers is None or isinstance(layers, int) else tuple(sorted(set(layers)))
    return LatentFlow(width, kept, span, float(gate))


@typed
def beside(cache: KVCache, pos: Int[Array, "B T"]) -> Alignment:
    """The alignment of a receiver that reads another context than the source: every token sees the whole source.

    Args:
        cache: the source's, B rows.
        pos: int32: places of the receiver's tokens in its context (0, 1, 2, ...), -1 for padding.

    Returns:
        Alignment ``[B,T,1]`` for maps of :func:`latent_flow` with spans.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.cache.build import from_arrays
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry
        >>> k = jnp.ones((1, 1, 1, 4, 1))
        >>> source = from_arrays(k, k, jnp.array([0, 1, 2, -1]), CacheGeometry((LayerGeometry(1, 1, 1),)))
        >>> beside(source, jnp.array([[0, 1, -1]])).index.ravel().tolist()
        [2, 2, 0]
    """
    slots = cache.groups[0].slots
    filled = jnp.where(cache.groups[0].pos[0, :, 0] >= 0, jnp.arange(slots, dtype=jnp.int32)[None], 0).max(axis=1)
    fed = pos >= 0
    index = jnp.where(fed, filled[:, None], 0)[..., None]
    return Alignment(index, fed.astype(jnp.float32)[..., None], pos)


def slot_by_slot(cache: KVCache) -> Alignment:
    """The alignment of a cache's tokens onto themselves."""
    pos = cache.groups[0].pos[0, :, 0]
    slots = jnp.broadcast_to(jnp.arange(pos.shape[1], dtype=jnp.int32)[None], pos.shape)
    real = pos >= 0
    return Alignment(jnp.where(real, slots, 0)[..., None], real.astype(jnp.float32)[..., None], pos)


def _chosen(layers: tuple[int, ...] | int | None, count: int) -> tuple[int, ...]:
    """Target layers that are fused."""
    if layers is None:
        return tuple(range(count))
    if isinstance(layers, int):
        layers = tuple(sorted({round(x) for x in np.linspace(0, count - 1, min(layers, count)).tolist()}))
    if not layers or min(layers) < 0 or max(layers) >= count:
        raise KvxError(f"latent_flow shall fuse layers {layers}, but the target has layers 0..{count - 1}.")
    return layers


def _standardised(flow: Flow, sample: Sample) -> Flow:
    """The flow whose first layer reads features as if they had mean zero and deviation one on the sample."""
    sums = [_feature_sums(flow, *one) for one in sample]
    count, *rest = (sum(column[1:], start=column[0]) for column in zip(*sums, strict=True))
    weights, shift = [], flow.bias
    for weight, first, second in zip((flow.source_weight, flow.own_weight), rest[:2], rest[2:], strict=True):
        mean = first / count
        deviation = jnp.sqrt(jnp.maximum(second / count - jnp.square(mean), 0.0))
        scaled = weight / jnp.where(deviation > 0, deviation, 1.0)[..., None]
        weights.append(scaled)
        shift = shift - jnp.einsum("lf,lfd->ld", mean, scaled, precision=jax.lax.Precision.HIGHEST)
    return dataclasses.replace(flow, source_weight=weights[0], own_weight=weights[1], bias=shift)


@jax.jit
def _feature_sums(flow: Flow, cache: KVCache, alignment: Alignment, own: KVCache) -> tuple[Array, ...]:
    """Tokens, and first and second sums ``[L,F]`` of the source's and of the receiver's features."""
    real = (alignment.pos >= 0)[None, ..., None]
    blocks = source_blocks(cache, alignment, (0, 1), False)[flow.gather]
    sides = [x.swapaxes(2, 3).reshape(*x.shape[:2], x.shape[3], -1) for x in own_sides(own, flow.layers)]
    rows = [jnp.where(real, x.astype(jnp.float32), 0.0) for x in (blocks, jnp.concatenate(sides, axis=-1))]
    sums = [f(x).sum(axis=(1, 2)) for f in (lambda x: x, jnp.square) for x in rows]
    return (jnp.maximum(real.sum(), 1).astype(jnp.float32), *sums)
