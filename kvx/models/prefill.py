"""Reading a context: prefill, and the two things one asks of it (next-token logits, log-probabilities)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from kvx.cache.build import Keep, concrete, empty
from kvx.cache.cache import KVCache
from kvx.errors import KvxError
from kvx.models.decoder import resolve_positions, run
from kvx.models.layers import lm_head
from kvx.models.model import Model
from kvx.models.request import Request, grown, request

_LOGIT_BYTES = 1 << 26  # logits that exist at any one time


def prefill(
    model: Model,
    tokens: Int[Array, "B T"] | np.ndarray,
    cache: KVCache | None = None,
    *,
    positions: Int[Array, "B T"] | np.ndarray | None = None,
    keep: Keep = "all",
    capacity: int | None = None,
    chunk: int | None = None,
) -> KVCache:
    """Read tokens into a cache. No logits are computed.

    Args:
        model: the decoder.
        tokens: int ``[B,T]``; -1 (anywhere) is padding. Concrete tokens are padded to a bucket (one compilation each).
        cache: what came before; it is not changed.
        positions: int ``[B,T]``, -1 at padding; by default counted on after ``cache.next_position()``.
        keep: for a new cache: ``"all"`` tokens (what the source of a hand-off needs), or ``"window"``: sliding-window
            layers keep only their window.
        capacity: slots of the returned cache (rings aside); by default the bucket of what is needed.
        chunk: read that many tokens at a time: the same result in less memory.

    Returns:
        The cache of everything read, keys un-rotated unless the given cache's are rotated.

    Raises:
        KvxError: shapes, batch, geometry or token ids that do not fit the model, or no room within ``capacity``.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.models.random_model import random_model
        >>> cache = prefill(random_model(), jnp.array([[5, 6, 7]]))
        >>> cache.next_position().tolist(), cache.keys(0).shape
        ([3], (1, 2, 16, 8))
    """
    if chunk is not None and chunk < 1:
        raise KvxError(f"chunk is {chunk}; expected at least one token, or None.")
    made = request(model, tokens, cache, positions, keep=keep, capacity=capacity)
    return _prefill(model, made, chunk=chunk)


@partial(jax.jit, static_argnames=("chunk",))
def _prefill(model: Model, made: Request, *, chunk: int | None) -> KVCache:
    if chunk is None or made.tokens.shape[1] <= chunk:
        return run(model, made).cache
    batch, length = made.tokens.shape
    cache = grown(made)
    if cache is None:
        cache = empty(model.config.geometry, batch, made.capacity, model.dtype, keep=made.keep)
    count = -(-length // chunk)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, count * chunk - length)), constant_values=-1)
        return x.reshape(batch, count, chunk).swapaxes(0, 1)

    def step(cache: KVCache, piece: tuple[Array, Array]) -> tuple[KVCache, None]:
        tokens, pos = piece
        return run(model, Request(tokens, pos, cache, grow=(0,) * len(cache.groups), ordered=made.ordered)).cache, None

    return jax.lax.scan(step, cache, (cut(made.tokens), cut(resolve_positions(made))))[0]


def next_token_logits(
    model: Model,
    tokens: Int[Array, "B T"] | np.ndarray,
    cache: KVCache | None = None,
    *,
    positions: Int[Array, "B T"] | np.ndarray | None = None,
) -> Float32[Array, "B V"]:
    """Logits of the token after the last real one of each row.

    Args:
        model: the decoder.
        tokens: int ``[B,T]`` that continue the cache, at least one real token per row; -1 is padding.
        cache: what came before.
        positions: as in :func:`prefill`.

    Returns:
        float32 ``[B,V]``.

    Raises:
        KvxError: as :func:`prefill`, or a row without tokens.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.models.random_model import random_model
        >>> next_token_logits(random_model(), jnp.array([[5, 6, 7]])).shape
        (1, 64)
    """
    made = request(model, tokens, cache, positions)
    check_rows(made)
    return _next_token_logits(model, made)[0]


def check_rows(made: Request) -> None:
    """Every row has a token to continue from (seen only on concrete tokens)."""
    seen = concrete(made.tokens)
    if seen is not None and (seen < 0).all(axis=1).any():
        raise KvxError("a row has no token at all; give every row at least one, such as the BOS or the last one read.")


@jax.jit
def _next_token_logits(model: Model, made: Request) -> tuple[Array, KVCache]:
    out = run(model, made)
    return lm_head(model.config, model.params, last_hidden(made.tokens, out.hidden)), out.cache


def last_hidden(tokens: Int[Array, "B T"], hidden: Float[Array, "B T M"]) -> Float[Array, "B M"]:
    """Hidden state of the last real token of each row."""
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    last = jnp.where(tokens >= 0, index, 0).max(axis=1)
    return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]


def token_logprobs(
    model: Model,
    tokens: Int[Array, "B T"] | np.ndarray,
    cache: KVCache | None = None,
    *,
    positions: Int[Array, "B T"] | np.ndarray | None = None,
) -> Float32[Array, "B T"]:
    """``log p(token_t | cache, tokens before t)`` of every token but each row's first.

    Logits are made in blocks of tokens, so ``[T, V]`` never exists as a whole, in the gradient neither.

    Args:
        model: the decoder.
        tokens: int ``[B,T]`` that continue the cache; -1 is padding.
        cache: what came before. Differentiable.
        positions: as in :func:`prefill`.

    Returns:
        float32 ``[B,T]`` in nats; 0 at each row's first token (what precedes it is not among ``tokens``: include the
        last token read to score it) and at padding.

    Raises:
        KvxError: as :func:`prefill`.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.models.random_model import random_model
        >>> scores = token_logprobs(random_model(), jnp.array([[5, 6, 7, -1]]))
        >>> [bool(x < 0) for x in scores[0]]
        [False, True, True, False]
    """
    length = tokens.shape[1]
    return _token_logprobs(model, request(model, tokens, cache, positions))[:, :length]


@jax.jit
def _token_logprobs(model: Model, made: Request) -> Array:
    hidden, tokens = run(model, made).hidden, made.tokens
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    seen = jax.lax.cummax(jnp.where(tokens >= 0, index, -1), axis=1)
    before = jnp.pad(seen[:, :-1], ((0, 0), (1, 0)), constant_values=-1)  # the real token that predicts this one
    scored = (tokens >= 0) & (before >= 0)
    hidden = jnp.take_along_axis(hidden, jnp.maximum(before, 0)[..., None], axis=1)
    scores = _scores(model, hidden.reshape(-1, hidden.shape[-1]), jnp.maximum(tokens, 0).reshape(-1))
    return jnp.where(scored, scores.reshape(tokens.shape), 0.0)


def _scores(model: Model, hidden: Float[Array, "N M"], targets: Int[Array, N]) -> Float32[Array, N]:
    """Log-probability of each target, the head applied block by block."""
    rows = hidden.shape[0]
    block = max(1, min(rows, _LOGIT_BYTES // (4 * model.config.vocab_size)))
    count = -(-rows // block)
    pad = count * block - rows
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(count, block, -1)
    targets = jnp.pad(targets, (0, pad)).reshape(count, block)

    @jax.checkpoint
    def score(x: tuple[Array, Array]) -> Array:
        logits = lm_head(model.config, model.params, x[0])
        chosen = jnp.take_along_axis(logits, x[1][:, None], axis=1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=1)

    return jax.lax.map(score, (hidden, targets)).reshape(-1)[:rows]
