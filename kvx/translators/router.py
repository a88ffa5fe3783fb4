"""Routers: which experts translate a token, with gradients that flow whatever was chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from kvx.mappers.linear import HIGHEST
from kvx.typing import pytree, typed

_EPSILON = 1e-6


@pytree
class Router:
    """``logits = W_2 gelu(W_1 LN(x) + b_1) + b_2`` of each of L layers.

    Attributes:
        enter: ``[L,P,H]``; enter_bias: ``[L,H]``; leave: ``[L,H,N]``; leave_bias: ``[L,N]``.
        used: float32 ``[L,N]``: share of the tokens of a sample that each of the N experts translated; never trained.
    """

    enter: Array
    enter_bias: Array
    leave: Array
    leave_bias: Array
    used: Array

    @classmethod
    def create(cls, key: Array, layers: int, features: int, width: int, experts: int) -> Router:
        """Random weights, so that different tokens go to different experts from the start."""
        one, two = jax.random.split(key)
        return cls(
            jax.random.normal(one, (layers, features, width), jnp.float32) * features**-0.5,
            jnp.zeros((layers, width), jnp.float32),
            jax.random.normal(two, (layers, width, experts), jnp.float32) * width**-0.5,
            jnp.zeros((layers, experts), jnp.float32),
            jnp.full((layers, experts), 1 / experts, jnp.float32),
        )

    def logits(self, x: Float[Array, "B T P"]) -> Float32[Array, "B T N"]:
        """Logits of one layer's router (arrays without their first axis)."""
        hidden = _dot(normed(x), self.enter) + self.enter_bias[None, None]
        return _dot(jax.nn.gelu(hidden), self.leave) + self.leave_bias[None, None]


def _dot(x: Array, w: Array) -> Array:
    return jnp.einsum("...p,ph->...h", x, w.astype(jnp.float32), precision=HIGHEST)


def normed(x: Array) -> Array:
    """Layer norm over the last axis in float32, without scale and shift: the product after it has both."""
    x = x.astype(jnp.float32)
    x = x - x.mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + jnp.float32(_EPSILON))


@typed
def route(
    logits: Float32[Array, "B T N"], top: int | None, noise: Float32[Array, "B T N"] | None = None
) -> Float32[Array, "B T N"]:
    """Weight of each expert in each token's translation.

    With ``p = softmax(logits)`` and C the ``top`` experts with the largest noisy logits:

    * dense (``None``, or as many as there are): p;
    * several: ``p_i / sum_C p`` for i in C, else 0;
    * one: 1 for the chosen, else 0, with the gradient of p (straight-through): normalised over a single expert the
      weight would be 1 whatever the logits are, and the router would learn nothing.

    Args:
        logits: of N experts.
        top: how many translate a token.
        noise: added to the logits where experts are chosen, and only there; in training.

    Returns:
        Weights that sum to one.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from kvx.translators.router import route
        >>> logits = jnp.array([[[0.0, 1.0]]])
        >>> route(logits, 1).tolist()
        [[[0.0, 1.0]]]
        >>> bool((jax.grad(lambda x: route(x, 1)[0, 0, 1])(logits) != 0).all())
        True

    Reference: top-k routing, Shazeer et al., arXiv 1701.06538; straight-through: Bengio et al., arXiv 1308.3432.
    """
    chance = jax.nn.softmax(logits)
    if top is None or top >= logits.shape[-1]:
        return chance
    chosen = choice(logits if noise is None else logits + noise, top)
    if top == 1:
        return chosen.astype(jnp.float32) + (chance - jax.lax.stop_gradient(chance))
    kept = jnp.where(chosen, chance, 0.0)
    return kept / kept.sum(axis=-1, keepdims=True)


def choice(logits: Array, top: int) -> Bool[Array, "B T N"]:
    """The ``top`` largest of each row."""
    at = jax.lax.top_k(logits, top)[1]
    return jax.nn.one_hot(at, logits.shape[-1], dtype=jnp.bool_).any(axis=-2)


def shares(weights: Float32[Array, "B T N"], real: Bool[Array, "B T"]) -> Float32[Array, " N"]:
    """Share of the real tokens that each expert translates."""
    total = jnp.where(real[..., None], weights, 0.0).sum(axis=(0, 1))
    return total / jnp.maximum(real.sum(), 1).astype(jnp.float32)


def imbalance(
    logits: Float32[Array, "B T N"], weights: Float32[Array, "B T N"], real: Bool[Array, "B T"]
) -> Float32[Array, ""]:
    """``N sum_i f_i P_i - 1``: f the shares of tokens, P the mean probabilities; zero when all experts do as much.

    The shares get no gradient; the probabilities do, so that experts which translate much are chosen less.

    Reference: Fedus et al., arXiv 2101.03961, equation 4.
    """
    chance = shares(jax.nn.softmax(logits), real)
    done = jax.lax.stop_gradient(shares(weights, real))
    return jnp.float32(logits.shape[-1]) * (done * chance).sum() - 1.0
