"""Parameters of the fuser and what they compute, layer by layer: the layers of C2C's public projector."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvx.cache.geometry import CacheGeometry
from kvx.translators.additions import Control, matrices, uniform
from kvx.translators.base import product
from kvx.typing import pytree, static

EPSILON = 1e-6


@pytree
class Block:
    """``x + W_down gelu(W_up rms(x))`` of L layers: scale ``[L,H]``, up ``[L,H,I]``, down ``[L,I,H]``, no biases."""

    scale: Array
    up_weight: Array
    down_weight: Array


@pytree
class Half:
    """Keys or values of L like target layers.

    Attributes:
        source_weight, target_weight, bias: ``[L,F,H]``, ``[L,K*D,H]``, ``[L,H]``: from both caches to the hidden width.
        shared: the block that both branches read.
        weigh, head_weight, head_bias: the branch of one weight a token and head: ``[L,H,K]`` and ``[L,K]``.
        project, out_weight, out_bias: the branch of what is added: ``[L,H,K,D]`` and ``[L,K,D]``.
        gate: logits ``[L]``: a layer adds where its logit is above zero.
        control: see :class:`kvx.translators.additions.Control`; never trained.
    """

    source_weight: Array
    target_weight: Array
    bias: Array
    shared: Block
    weigh: Block
    head_weight: Array
    head_bias: Array
    project: tuple[Block, ...]
    out_weight: Array
    out_bias: Array
    gate: Array
    control: Control


@pytree
class Part:
    """Target layers of one group: gather int32 ``[L]`` names the source layer of each."""

    gather: Array
    keys: Half
    values: Half
    layers: tuple[int, ...] = static()


@pytree
class FuserParams:
    """Parameters of :class:`kvx.translators.fuser.Fuser`: a :class:`Part` for each group of like target layers."""

    parts: tuple[Part, ...]
    target: CacheGeometry = static()

    @property
    def _read(self) -> list[Array]:
        """Arrays that a translation reads, but for the tables of source layers."""
        halves = [half for part in self.parts for half in (part.keys, part.values)]
        names = [field.name for field in dataclasses.fields(Half) if field.name != "control"]
        return jax.tree.leaves([getattr(half, name) for half in halves for name in names])

    @property
    def stored(self) -> int:
        """Bytes that a translation reads: everything but what only controls need."""
        return sum(x.size * x.dtype.itemsize for x in self._read)

    @property
    def parameters(self) -> int:
        """Numbers that a translation reads, as C2C counts them."""
        return sum(x.size for x in self._read)

    def flops(self, tokens: int) -> int:
        """Operations of fusing so many tokens: a product and a sum an element of each matrix."""
        return 2 * tokens * matrices(self.parts)

    def silenced(self, key: Array) -> FuserParams:
        """The constant control: every token of the target's own cache gets the average addition."""
        return self._changed(lambda half, _: half.control.silence(half.out_weight, half.out_bias), key)

    def scrambled(self, key: Array) -> FuserParams:
        """The random control: additions as large as the fuser's, in random directions."""
        return self._changed(lambda half, k: half.control.scramble(half.out_weight, half.out_bias, k), key)

    def _changed(self, change: Callable[[Half, Array], tuple[Array, Array, Control]], key: Array) -> FuserParams:
        parts = []
        for n, part in enumerate(self.parts):
            halves = []
            for half, k in zip((part.keys, part.values), jax.random.split(jax.random.fold_in(key, n)), strict=True):
                weight, bias, control = change(half, k)
                halves.append(dataclasses.replace(half, out_weight=weight, out_bias=bias, control=control))
            parts.append(dataclasses.replace(part, keys=halves[0], values=halves[1]))
        return dataclasses.replace(self, parts=tuple(parts))


@functools.partial(jax.jit, static_argnames=("layers", "widths", "sizes"))
def first_half(key: Array, layers: int, widths: tuple[int, int, int], sizes: tuple[int, int, int], gate: float) -> Half:
    """Random parameters.

    Args:
        key: of the draw; layers: L.
        widths: F of the source, K and D of the target; sizes: hidden width H, inner width I, number of blocks.
    """
    (features, heads, channels), (hidden, inner, blocks) = widths, sizes
    keys = iter(jax.random.split(key, 9 + 2 * blocks))
    fan = features + heads * channels

    def block(inside: int) -> Block:
        up = uniform(next(keys), (layers, hidden, inside), hidden)
        return Block(jnp.ones((layers, hidden)), up, uniform(next(keys), (layers, inside, hidden), inside))

    return Half(
        source_weight=uniform(next(keys), (layers, features, hidden), fan),
        target_weight=uniform(next(keys), (layers, heads * channels, hidden), fan),
        bias=uniform(next(keys), (layers, hidden), fan),
        shared=block(inner),
        weigh=block(hidden),
        head_weight=uniform(next(keys), (layers, hidden, heads), hidden),
        head_bias=uniform(next(keys), (layers, heads), hidden),
        project=tuple(block(inner) for _ in range(blocks - 2)),
        out_weight=uniform(next(keys), (layers, hidden, heads, channels), hidden),
        out_bias=uniform(next(keys), (layers, heads, channels), hidden),
        gate=jnp.full((layers,), gate, jnp.float32),
        control=Control.blank(layers, heads, channels),
    )


@dataclasses.dataclass(frozen=True)
class Noise:
    """What training adds: key of one layer's keys or values, temperature of the gates, rate of dropout."""

    key: Array
    temperature: Array
    dropout: float


def addition(half: Half, source: Array, own: Array, noise: Noise | None) -> Array:
    """What one layer adds to the receiver: ``gate sigmoid(w) P``.

    Args:
        half: of one layer, without the leading axis.
        source: ``[B,T,F]`` of the source; own: ``[B,K,T,D]`` of the receiver.
        noise: in training; ``None``: the gate is 1 where its logit is above zero, else 0.

    Returns:
        float32 ``[B,K,T,D]``.
    """
    flat = own.swapaxes(1, 2).reshape(*source.shape[:2], -1)
    h = product("btf,fh->bth", source, half.source_weight) + product("btf,fh->bth", flat, half.target_weight)
    keys = (
        [None] * (3 + len(half.project)) if noise is None else list(jax.random.split(noise.key, 3 + len(half.project)))
    )
    dropout = 0.0 if noise is None else noise.dropout
    h = _block(half.shared, h + half.bias[None, None], keys[0], dropout)
    weights = product("bth,hk->btk", _block(half.weigh, h, keys[1], dropout), half.head_weight)
    weights = jax.nn.sigmoid(weights + half.head_bias[None, None]).swapaxes(1, 2)[..., None]
    for block, key in zip(half.project, keys[3:], strict=True):
        h = _block(block, h, key, dropout)
    made = product("bth,hkd->bktd", h, half.out_weight) + half.out_bias[None, :, None]
    gate = _gate(half.gate, weights.shape, keys[2], noise)
    return gate * weights * made + half.control.offset[None, :, None]


def _block(block: Block, x: Array, key: Any, dropout: float) -> Array:
    mean = jnp.square(x).mean(axis=-1, keepdims=True)
    h = x * jax.lax.rsqrt(mean + EPSILON) * block.scale[None, None]
    h = jax.nn.gelu(product("bth,hi->bti", h, block.up_weight), approximate=False)
    h = product("bti,ih->bth", h, block.down_weight)
    if key is not None and dropout:
        h = jnp.where(jax.random.bernoulli(key, 1 - dropout, h.shape), h / (1 - dropout), 0.0)
    return x + h


def _gate(logit: Array, shape: tuple[int, ...], key: Any, noise: Noise | None) -> Array:
    if noise is None:
        return (logit > 0).astype(jnp.float32)
    drawn = jax.random.gumbel(key, shape, jnp.float32)
    return jax.nn.sigmoid((logit + drawn) / noise.temperature)
