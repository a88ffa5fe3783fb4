"""Attention experts of the mixture: a running state that reads the tokens of each source layer in a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvx.cache.cache import LayerView
from kvx.models.attention import attend
from kvx.translators.base import product
from kvx.translators.router import Router, normed
from kvx.typing import pytree, static

if TYPE_CHECKING:
    from kvx.translators.mixture import Mixture

_EVERYWHERE = 1 << 30  # the position of a query that may read every token


@pytree
class Stage:
    """Weights of N experts' S stages, each shared by the window's layers.

    Attributes:
        query, key, value, out: ``[N,S,W,W]``; out_bias: ``[N,S,W]``.
        up: ``[N,S,W,4W]``, up_bias: ``[N,S,4W]``; down: ``[N,S,4W,W]``, down_bias: ``[N,S,W]``.
    """

    query: Array
    key: Array
    value: Array
    out: Array
    out_bias: Array
    up: Array
    up_bias: Array
    down: Array
    down_bias: Array

    @classmethod
    def create(cls, key: Array, experts: int, depth: int, width: int) -> Stage:
        """Random matrices, zero biases."""
        shapes = {**dict.fromkeys(("query", "key", "value", "out"), (width, width))}
        shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
        keys = jax.random.split(key, len(shapes))
        drawn = {
            name: jax.random.normal(k, (experts, depth, *shape), jnp.float32) * shape[0] ** -0.5
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        biases = {"out_bias": width, "up_bias": 4 * width, "down_bias": width}
        zeros = {name: jnp.zeros((experts, depth, size), jnp.float32) for name, size in biases.items()}
        return cls(**drawn, **zeros)


@pytree
class AttentionExperts:
    """N experts of keys or of values.

    Attributes:
        gather: int32 ``[R]``: source layers of the window.
        center, scale: ``[R,F]``: of their features; never trained.
        enter: ``[N,R,F,W]``; enter_bias: ``[N,R,W]``: features to states.
        stage: see :class:`Stage`.
        router: of the tokens' features of all R layers; one for the whole window.
        heads: of attention; causal: whether a token reads later ones.
    """

    gather: Array
    center: Array
    scale: Array
    enter: Array
    enter_bias: Array
    stage: Stage
    router: Router
    heads: int = static()
    causal: bool = static()

    @classmethod
    def create(
        cls,
        method: Mixture,
        layers: Sequence[int],
        mean: Array,
        deviation: Array,
        key: Array,
    ) -> AttentionExperts:
        """Random experts that read the given source layers; mean and deviation ``[S,F]`` of all layers' features."""
        gather = jnp.array(layers, jnp.int32)
        mean, deviation = mean[gather], deviation[gather]
        count, features = mean.shape
        one, two, three = jax.random.split(key, 3)
        width = method.width
        return cls(
            gather=gather,
            center=mean,
            scale=1 / jnp.where(deviation > 0, deviation, 1.0),
            enter=jax.random.normal(one, (method.experts, count, features, width), jnp.float32) * features**-0.5,
            enter_bias=jnp.zeros((method.experts, count, width), jnp.float32),
            stage=Stage.create(two, method.experts, method.depth, width),
            router=Router.create(three, 1, count * features, method.router_width, method.experts),
            heads=method.heads,
            causal=method.causal,
        )

    def flops(self, tokens: int) -> int:
        """Operations of every expert's states of so many tokens: products, and attention to what each token reads."""
        count, layers, _, width = self.enter.shape
        stage = sum(x.size for x in jax.tree.leaves(self.stage) if x.ndim == 4)
        read = tokens * (tokens + 1) // 2 if self.causal else tokens * tokens
        pairs = count * self.stage.query.shape[1] * layers * 2 * width * read
        return 2 * (tokens * (self.enter.size + layers * stage) + pairs)

    def features(self, blocks: Array) -> Array:
        """Standardised features ``[R,B,T,F]`` of source layers ``[U,B,T,F]``."""
        return (blocks[self.gather] - self.center[:, None, None]) * self.scale[:, None, None]


def states(experts: AttentionExperts, x: Array, pos: Array) -> Array:
    """Last states ``[N,B,T,RW]`` of every expert.

    ``z_r = gelu(W_r LN(x_r))``, ``h = z_0``; then, stage by stage and layer by layer, h reads the tokens of layer r
    (pre-norm cross-attention) and passes a feed-forward, both added to it. The states after each layer of the last
    stage stand side by side.

    Args:
        experts: the bank.
        x: ``[R,B,T,F]`` standardised features.
        pos: int32 ``[B,T]``; -1: no token.
    """

    def one(own: tuple[Array, Array, Stage]) -> Array:
        enter, bias, stage = own
        z = jax.nn.gelu(product("rbtf,rfw->rbtw", normed(x), enter) + bias[:, None, None])
        _, kept = jax.lax.scan(lambda h, s: _stage(experts, s, h, z, pos), z[0], stage)
        last = jnp.moveaxis(kept[-1], 0, 2)  # [B,T,R,W]
        return last.reshape(*last.shape[:2], -1)

    return jax.lax.map(one, (experts.enter, experts.enter_bias, experts.stage))


def _stage(experts: AttentionExperts, stage: Stage, h: Array, z: Array, pos: Array) -> tuple[Array, Array]:
    """One stage over the window's layers: the state at its end, and those after each layer ``[R,B,T,W]``."""

    @jax.checkpoint
    def read(h: Array, tokens: Array) -> tuple[Array, Array]:
        query, key, value = (
            _heads(product("btw,wx->btx", normed(x), w), experts.heads)
            for x, w in ((h, stage.query), (tokens, stage.key), (tokens, stage.value))
        )
        at = pos if experts.causal else jnp.where(pos >= 0, _EVERYWHERE, -1)
        seen = [LayerView(key, value, pos[:, None])]
        found = attend(query, seen, at, scale=query.shape[-1] ** -0.5).swapaxes(1, 2).reshape(h.shape)
        h = h + product("btw,wx->btx", found, stage.out) + stage.out_bias[None, None]
        hidden = jax.nn.gelu(product("btw,wx->btx", normed(h), stage.up) + stage.up_bias[None, None])
        h = h + product("btw,wx->btx", hidden, stage.down) + stage.down_bias[None, None]
        return h, h

    return jax.lax.scan(read, h, z)


def _heads(x: Array, heads: int) -> Array:
    """``[B,T,W]`` to ``[B,H,T,W/H]``."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)
