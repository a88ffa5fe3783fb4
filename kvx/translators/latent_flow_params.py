"""Parameters of the latent flow and what they compute, layer by layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvx.cache.geometry import CacheGeometry
from kvx.translators.additions import Control, uniform
from kvx.translators.base import product
from kvx.typing import pytree, static

LOWEST = -1e30


@pytree
class Flow:
    """L like target layers that are fused.

    Attributes:
        gather: int32 ``[L]``: the source layer of each.
        source_weight, own_weight, bias: ``[L,F,d]``, ``[L,K(D+Dv),d]``, ``[L,d]``: from both caches to the latent.
        in_weight, in_bias, out_weight, out_bias: ``[L,d,2d]``, ``[L,2d]``, ``[L,2d,2d]``, ``[L,2d]``: the network,
            whose first half of channels makes keys, the second values.
        gate_weight, gate_bias: ``[L,d,2K]``, ``[L,2K]``: gate logits of the heads' keys, then of their values.
        key_weight, key_bias, value_weight, value_bias: ``[L,d,K,D]``, ``[L,K,D]``: from a half to what is added.
        queries: ``[L,2,K,d]`` of the tokens of a span, and of the spans; ``None``: tokens are fed by the alignment.
        keys, values: see :class:`kvx.translators.additions.Control`; never trained.
        layers: the L target layers, ascending.
    """

    gather: Array
    source_weight: Array
    own_weight: Array
    bias: Array
    in_weight: Array
    in_bias: Array
    out_weight: Array
    out_bias: Array
    gate_weight: Array
    gate_bias: Array
    key_weight: Array
    key_bias: Array
    value_weight: Array
    value_bias: Array
    queries: Array | None
    keys: Control
    values: Control
    layers: tuple[int, ...] = static()


@pytree
class FlowParams:
    """Parameters of :class:`kvx.translators.latent_flow.LatentFlow`: a :class:`Flow` for each group of like layers."""

    flows: tuple[Flow, ...]
    target: CacheGeometry = static()

    @property
    def _read(self) -> list[Array]:
        """Arrays that a translation reads, but for the tables of source layers."""
        others = ("gather", "keys", "values", "layers")
        names = [field.name for field in dataclasses.fields(Flow) if field.name not in others]
        return jax.tree.leaves([getattr(flow, name) for flow in self.flows for name in names])

    @property
    def stored(self) -> int:
        """Bytes that a translation reads: everything but what only controls need."""
        return sum(x.size * x.dtype.itemsize for x in self._read)

    @property
    def parameters(self) -> int:
        """Numbers that a translation reads."""
        return sum(x.size for x in self._read)

    def flops(self, tokens: int) -> int:
        """Operations of fusing so many tokens, the same number in both models: products, and sums over spans."""
        total = 0
        for flow in self.flows:
            network, heads = flow.in_weight.size + flow.out_weight.size, flow.gate_bias.shape[1] // 2
            rest = (flow.source_weight, flow.own_weight, flow.gate_weight, flow.key_weight, flow.value_weight)
            total += sum(x.size for x in rest) + network * (1 if flow.queries is None else heads)
            total += 0 if flow.queries is None else 4 * flow.queries.size  # scores, and sums of latents
        return 2 * tokens * total

    def silenced(self, key: Array) -> FlowParams:
        """The constant control: every token of the target's own cache gets the average addition."""
        return self._changed(lambda control, weight, bias, _: control.silence(weight, bias), key)

    def scrambled(self, key: Array) -> FlowParams:
        """The random control: additions as large as the flow's, in random directions."""
        return self._changed(lambda control, weight, bias, k: control.scramble(weight, bias, k), key)

    def _changed(self, change: Callable[..., tuple[Array, Array, Control]], key: Array) -> FlowParams:
        flows = []
        for n, flow in enumerate(self.flows):
            first, second = jax.random.split(jax.random.fold_in(key, n))
            key_weight, key_bias, keys = change(flow.keys, flow.key_weight, flow.key_bias, first)
            value_weight, value_bias, values = change(flow.values, flow.value_weight, flow.value_bias, second)
            flow = dataclasses.replace(flow, key_weight=key_weight, key_bias=key_bias, keys=keys)
            flows.append(dataclasses.replace(flow, value_weight=value_weight, value_bias=value_bias, values=values))
        return dataclasses.replace(self, flows=tuple(flows))


@functools.partial(jax.jit, static_argnames=("gather", "layers", "shapes", "width", "spans"))
def first_flow(
    key: Array,
    gather: tuple[int, ...],
    layers: tuple[int, ...],
    shapes: tuple[int, int, int, int],
    width: int,
    gate: float,
    spans: bool,
) -> Flow:
    """Random parameters that add nothing yet.

    Args:
        key: of the draw; gather: source layers; layers: target layers.
        shapes: F of the source, K, D and Dv of the target; width: d; gate: first logit; spans: whether to draw queries.
    """
    features, heads, channels, value_channels = shapes
    count, own = len(layers), heads * (channels + value_channels)
    keys = jax.random.split(key, 5)
    zeros = lambda *shape: jnp.zeros((count, *shape), jnp.float32)  # noqa: E731
    return Flow(
        gather=jnp.array(gather, jnp.int32),
        source_weight=uniform(keys[0], (count, features, width), features + own),
        own_weight=uniform(keys[1], (count, own, width), features + own),
        bias=zeros(width),
        in_weight=uniform(keys[2], (count, width, 2 * width), width),
        in_bias=zeros(2 * width),
        out_weight=uniform(keys[3], (count, 2 * width, 2 * width), 2 * width),
        out_bias=zeros(2 * width),
        gate_weight=zeros(width, 2 * heads),
        gate_bias=jnp.full((count, 2 * heads), gate, jnp.float32),
        key_weight=zeros(width, heads, channels),
        key_bias=zeros(heads, channels),
        value_weight=zeros(width, heads, value_channels),
        value_bias=zeros(heads, value_channels),
        queries=uniform(keys[4], (count, 2, heads, width), 1) if spans else None,
        keys=Control.blank(count, heads, channels),
        values=Control.blank(count, heads, value_channels),
        layers=layers,
    )


def addition(
    flow: Flow, source: Array, own: tuple[Array, Array], real: Array, last: Array, span: int | None
) -> tuple[Array, Array]:
    """What one layer adds to the receiver's keys and values.

    Args:
        flow: of one layer, without the leading axis.
        source: ``[B,T,F]`` on the target's tokens, or with spans ``[B,S,F]`` in the source's slots.
        own: keys and values ``[B,K,T,D]`` of the receiver.
        real: bool ``[B,S]``: slots that hold a token; last: int32 ``[B,T]``: the last slot each token may see.
        span: slots of a span; ``None``: no spans.

    Returns:
        float32 ``[B,K,T,D]`` and ``[B,K,T,Dv]``.
    """
    batch, heads, length, _ = own[0].shape
    flat = jnp.concatenate([x.swapaxes(1, 2).reshape(batch, length, -1).astype(jnp.float32) for x in own], axis=-1)
    seen = product("btf,fd->btd", source, flow.source_weight) + flow.bias[None, None]
    mine = product("btf,fd->btd", flat, flow.own_weight)
    if span is None or flow.queries is None:
        latent = (seen + mine)[:, :, None]  # one for all heads
        mixed = latent[:, :, 0]
    else:
        pooled = pool(seen, real, flow.queries, span)
        latent = jnp.take_along_axis(pooled, last[:, :, None, None], axis=1)
        mixed = latent.mean(axis=2) + mine
    hidden = jax.nn.gelu(product("btkd,de->btke", latent, flow.in_weight) + flow.in_bias[None, None, None])
    halves = product("btke,ef->btkf", hidden, flow.out_weight) + flow.out_bias[None, None, None]
    halves = jnp.broadcast_to(halves, (batch, length, heads, halves.shape[-1]))
    gates = jax.nn.sigmoid(product("btd,dg->btg", mixed, flow.gate_weight) + flow.gate_bias[None, None])
    gates = gates.reshape(batch, length, 2, heads).transpose(2, 0, 3, 1)[..., None]
    made = []
    ups = ((flow.key_weight, flow.key_bias, flow.keys), (flow.value_weight, flow.value_bias, flow.values))
    for half, gate, (weight, bias, control) in zip(jnp.split(halves, 2, axis=-1), gates, ups, strict=True):
        added = product("btkd,dke->bkte", half, weight) + bias[None, :, None]
        made.append(gate * added + control.offset[None, :, None])
    return made[0], made[1]


State = tuple[Array, Array, Array]  # largest score, sum of exponentials, weighted sum


def pool(latents: Array, real: Array, queries: Array, span: int) -> Array:
    """Each slot's latents pooled: by one query inside spans, by another over spans, of what stands up to that slot.

    Args:
        latents: ``[B,S,d]``; real: bool ``[B,S]``.
        queries: ``[2,K,d]``; span: slots of a span.

    Returns:
        ``[B,S,K,d]``; slots before the first token are zero.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.array([[[2.0], [4.0], [9.0]]])
        >>> even = jnp.zeros((2, 1, 1))  # averages of a span, then of the spans
        >>> pool(x, jnp.array([[True, True, True]]), even, 2).ravel().tolist()
        [2.0, 3.0, 6.0]
    """
    batch, slots, width = latents.shape
    more = -slots % span
    x = jnp.pad(jnp.where(real[..., None], latents, 0.0), ((0, 0), (0, more), (0, 0))).reshape(batch, -1, span, width)
    held = jnp.pad(real, ((0, 0), (0, more))).reshape(batch, -1, span)
    running = _scan(_state(x[..., None, :], held, queries[0]), axis=2)
    inside = running[2] / jnp.maximum(running[1], 1e-30)[..., None]  # [B,C,N,K,d]
    begun = jnp.cumsum(held, axis=2) > 0
    here = _state(inside, begun, queries[1])
    whole = _scan(tuple(part[:, :, -1] for part in here), axis=1)  # type: ignore[arg-type]
    empty = (jnp.full_like(whole[0][:, :1], LOWEST), *(jnp.zeros_like(part[:, :1]) for part in whole[1:]))
    before = [jnp.concatenate([e, part[:, :-1]], axis=1)[:, :, None] for e, part in zip(empty, whole, strict=True)]
    made = _joined((before[0], before[1], before[2]), here)
    pooled = made[2] / jnp.maximum(made[1], 1e-30)[..., None]
    return pooled.reshape(batch, slots + more, *pooled.shape[3:])[:, :slots]


def _state(x: Array, real: Array, query: Array) -> State:
    """Softmax of one element: x ``[B,C,N,K|1,d]``, real ``[B,C,N]``, query ``[K,d]``."""
    rows = jnp.broadcast_to(x, (*x.shape[:3], *query.shape))
    score = product("bcnkd,kd->bcnk", rows, query * jnp.float32(query.shape[1] ** -0.5))
    there = real[..., None]
    one = jnp.broadcast_to(there, score.shape).astype(jnp.float32)
    return jnp.where(there, score, LOWEST), one, rows * one[..., None]


def _joined(a: State, b: State) -> State:
    top = jnp.maximum(a[0], b[0])
    left, right = jnp.exp(a[0] - top), jnp.exp(b[0] - top)
    return top, a[1] * left + b[1] * right, a[2] * left[..., None] + b[2] * right[..., None]


def _scan(state: State, axis: int) -> State:
    made: State = jax.lax.associative_scan(_joined, state, axis=axis)
    return made
