"""Choosing the next token: greedy, temperature, top-k and top-p."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from kvx.cache.build import concrete
from kvx.errors import KvxError
from kvx.typing import pytree, static


@pytree
class Sampling:
    """How tokens are chosen; build with :func:`sampling`, which validates.

    Attributes:
        temperature: float32 scalar, ``None`` for greedy.
        top_p: float32 scalar, or ``None``.
        top_k: number of candidates, or ``None``.
    """

    temperature: Array | None = None
    top_p: Array | None = None
    top_k: int | None = static(default=None)


def sampling(temperature: Any = 0.0, top_k: int | None = None, top_p: Any = None, rng: Any = None) -> Sampling:
    """Check the settings of a random choice.

    Args:
        temperature: divides the logits; 0 (not traced): greedy, and the other settings do not matter.
        top_k: keep the k most likely tokens.
        top_p: then keep the smallest set of the most likely ones whose probabilities sum to ``top_p`` or more.
        rng: the key that will be used; needed unless greedy.

    Raises:
        KvxError: a setting out of range, or a random choice without a key.

    Example:
        >>> sampling(0.0).temperature is None
        True
    """
    heat, mass = concrete(temperature), None if top_p is None else concrete(top_p)
    if heat is not None and heat < 0:
        raise KvxError(f"temperature is {temperature}; expected 0 (greedy) or more.")
    if heat is not None and heat == 0:
        return Sampling()
    if rng is None:
        raise KvxError("a temperature above 0 draws at random; give rng=jax.random.key(seed), or temperature=0.")
    if top_k is not None and top_k < 1:
        raise KvxError(f"top_k is {top_k}; expected at least 1, or None.")
    if mass is not None and not 0 < mass <= 1:
        raise KvxError(f"top_p is {top_p}; expected a probability above 0 and at most 1, or None.")
    share = None if top_p is None else jnp.asarray(top_p, jnp.float32)
    return Sampling(jnp.asarray(temperature, jnp.float32), share, top_k)


def greedy(logits: Float32[Array, "B V"]) -> Int32[Array, B]:
    """The most likely token of each row, the first of equals.

    Two plain reductions: XLA's argmax carries pairs and is several times slower on a CPU.

    Example:
        >>> greedy(jnp.array([[0.0, 2.0, 2.0]])).tolist()
        [1]
    """
    top = logits.max(axis=-1, keepdims=True)
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None]
    return jnp.where(logits == top, index, logits.shape[-1] - 1).min(axis=-1)


def choose(logits: Float32[Array, "B V"], how: Sampling, rng: Any) -> Int32[Array, B]:
    """Draw one token per row.

    Args:
        logits: float32 ``[B,V]``.
        how: from :func:`sampling`.
        rng: key of this draw; not read when greedy.

    Returns:
        int32 ``[B]``.

    Example:
        >>> how = sampling(1.0, top_k=1, rng=jax.random.key(0))
        >>> choose(jnp.array([[0.0, 5.0, 1.0]]), how, jax.random.key(1)).tolist()
        [1]
    """
    if how.temperature is None:
        return greedy(logits)
    logits = logits / jnp.maximum(how.temperature, jnp.float32(1e-6))
    if how.top_k is None and how.top_p is None:
        return jax.random.categorical(rng, logits).astype(jnp.int32)
    count = logits.shape[-1] if how.top_k is None else min(how.top_k, logits.shape[-1])
    values, tokens = jax.lax.top_k(logits, count)
    if how.top_p is not None:
        values = nucleus(values, how.top_p)
    drawn = jax.random.categorical(rng, values)
    return jnp.take_along_axis(tokens, drawn[:, None], axis=1)[:, 0].astype(jnp.int32)


def nucleus(values: Float32[Array, "B N"], top_p: Array | float) -> Float32[Array, "B N"]:
    """Logits in falling order, with -inf outside the smallest head whose probabilities sum to ``top_p`` or more.

    Example:
        >>> probabilities = jnp.array([[0.5, 0.3, 0.2]])
        >>> nucleus(jnp.log(probabilities), 0.6)[0].tolist()[2]
        -inf

    Reference: Holtzman et al., arXiv 1904.09751.
    """
    mass = jax.nn.softmax(values, axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    return jnp.where(before < jnp.asarray(top_p, jnp.float32), values, -jnp.inf)
