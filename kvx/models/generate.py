"""Generation: the whole loop inside one compiled function, or token by token for a reader who watches."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from kvx.cache.build import concrete, empty
from kvx.cache.cache import KVCache
from kvx.errors import KvxError
from kvx.models.buckets import bucket_length
from kvx.models.decode import Fresh, Past, extend, freeze, room, thaw
from kvx.models.decoder import resolve_positions
from kvx.models.layers import lm_head
from kvx.models.model import Model
from kvx.models.prefill import check_rows, last_hidden
from kvx.models.request import Request, grown, request
from kvx.models.sampling import Sampling, choose, sampling
from kvx.typing import pytree

_STOPS = 8  # stop tokens are padded to a multiple, so that their number seldom compiles anew


@pytree
class Generation:
    """What was generated.

    Attributes:
        tokens: int32 ``[B,N]``: up to and including the stop token; -1 after it.
        lengths: int32 ``[B]`` tokens of each row, the stop token counted.
        cache: the cache of all that was read and generated (the last token too): continue from it with the next turn.
    """

    tokens: Int32[Array, "B N"]
    lengths: Int32[Array, B]
    cache: KVCache


@pytree
class _State:
    """Carried from step to step.

    Attributes:
        step: int32 steps done; pos: int32 ``[B]`` next position; done: bool ``[B]``; hidden ``[B,M]`` that the next
        token is drawn from; tokens: int32 ``[B,N]``; fresh: keys and values of the generated tokens.
    """

    step: Array
    pos: Array
    done: Array
    hidden: Array
    tokens: Array
    fresh: Fresh


def generate(
    model: Model,
    boundary: Int[Array, "B T"] | np.ndarray,
    cache: KVCache | None = None,
    *,
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
    temperature: float | Array = 0.0,
    top_k: int | None = None,
    top_p: float | Array | None = None,
    rng: Array | None = None,
    positions: Int[Array, "B T"] | np.ndarray | None = None,
) -> Generation:
    """Read the boundary, then generate.

    Keys of the cache are rotated once on entry; the loop reads them and writes only its own tokens, so a step costs
    the same however often the caller continues from one cache, and the given cache is never changed.

    Args:
        model: the decoder.
        boundary: int ``[B,T]`` that continue the cache, at least one real token per row; -1 is padding. Rows may differ
            in length.
        cache: what came before.
        max_new_tokens: ``N``; generation ends earlier when every row has stopped.
        stop_tokens: ids that end a row.
        temperature: 0: greedy. Else logits are divided by it and tokens drawn.
        top_k: draw among the k most likely tokens only.
        top_p: draw among the smallest set of most likely tokens that holds this probability.
        rng: key of the draws.
        positions: int ``[B,T]`` of the boundary; by default counted on after ``cache.next_position()``.

    Returns:
        tokens, lengths and the longer cache.

    Raises:
        KvxError: input that does not fit the model, a row without tokens, or sampling settings out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.models.prefill import prefill
        >>> from kvx.models.random_model import random_model
        >>> model = random_model()
        >>> cache = prefill(model, jnp.array([[5, 6, 7]]))
        >>> out = generate(model, jnp.array([[8]]), cache, max_new_tokens=4)
        >>> out.tokens.shape, out.lengths.tolist(), out.cache.next_position().tolist()
        ((1, 4), [4], [8])
    """
    how = sampling(temperature, top_k, top_p, rng)
    made, steps = _opening(model, boundary, cache, positions, max_new_tokens)
    out = _generate(model, made, _stops(stop_tokens), jnp.int32(max_new_tokens), how, rng, steps=steps)
    return Generation(out.tokens[:, :max_new_tokens], out.lengths, out.cache)


def _opening(
    model: Model, boundary: Any, cache: KVCache | None, positions: Any, max_new_tokens: int
) -> tuple[Request, int]:
    """The checked request and the number of steps to compile for."""
    if max_new_tokens < 1:
        raise KvxError(f"max_new_tokens is {max_new_tokens}; expected at least 1.")
    made = request(model, boundary, cache, positions, extra=max_new_tokens)
    check_rows(made)
    _check_learned(model, made, max_new_tokens)
    return made, max_new_tokens if concrete(made.tokens) is None else bucket_length(max_new_tokens)


def _check_learned(model: Model, made: Request, steps: int) -> None:
    """Learned positions must not run out on the way."""
    held = None if made.cache is None else concrete(made.cache.groups[0].pos)
    tokens, limit = concrete(made.tokens), model.config.max_positions
    if not model.config.learned_positions or tokens is None or (made.cache is not None and held is None):
        return
    at = None if made.positions is None else concrete(made.positions)
    first = 0 if held is None else int(held.max(initial=-1)) + 1
    last = first + int((tokens >= 0).sum(axis=1).max()) if at is None else int(at.max()) + 1
    if last + steps > limit:
        raise KvxError(
            f"{steps} new tokens after {last} would pass this model's {limit} learned positions; ask for fewer."
        )


def _stops(stop_tokens: Sequence[int]) -> np.ndarray:
    ids = [int(token) for token in stop_tokens]
    return np.array(ids + [-2] * (-len(ids) % _STOPS or _STOPS * (not ids)), np.int32)


@partial(jax.jit, static_argnames=("steps",))
def _generate(
    model: Model, made: Request, stops: Array, limit: Array, how: Sampling, rng: Array | None, *, steps: int
) -> Generation:
    past, state = _begin(model, made, steps)

    def going(state: _State) -> Array:
        return (state.step < limit) & ~state.done.all()

    def turn(state: _State) -> _State:
        return _advance(model, past, state, stops, how, rng)

    return _finish(model, made, jax.lax.while_loop(going, turn, state))


def _begin(model: Model, made: Request, steps: int) -> tuple[Past | None, _State]:
    """Rotate the cache, read the boundary, and lay everything out for the steps."""
    (batch, length), cache = made.tokens.shape, made.cache
    pos = resolve_positions(made)
    past = None if cache is None else freeze(model, cache)
    fresh = room(model, cache, batch, length + steps)
    hidden, fresh = extend(model, past, fresh, 0, made.tokens, pos, first=True, ordered=made.ordered)
    state = _State(
        step=jnp.int32(0),
        pos=pos.max(axis=1) + 1,
        done=jnp.zeros((batch,), bool),
        hidden=last_hidden(made.tokens, hidden),
        tokens=jnp.full((batch, steps), -1, jnp.int32),
        fresh=fresh,
    )
    return past, state


def _advance(model: Model, past: Past | None, state: _State, stops: Array, how: Sampling, rng: Array | None) -> _State:
    """Draw one token per row and run it through the decoder."""
    logits = lm_head(model.config, model.params, state.hidden)
    key = None if rng is None else jax.random.fold_in(rng, state.step)
    token = jnp.where(state.done, -1, choose(logits, how, key))
    pos = jnp.where(state.done, -1, state.pos)
    column = state.fresh.pos.shape[1] - state.tokens.shape[1] + state.step
    hidden, fresh = extend(model, past, state.fresh, column, token[:, None], pos[:, None])
    return _State(
        step=state.step + 1,
        pos=state.pos + 1,
        done=state.done | (token[:, None] == stops[None]).any(axis=1),
        hidden=hidden[:, 0],
        tokens=jax.lax.dynamic_update_slice(state.tokens, token[:, None], (jnp.int32(0), state.step)),
        fresh=fresh,
    )


def _finish(model: Model, made: Request, state: _State) -> Generation:
    """Everything read and generated, appended to the cache."""
    cache = grown(made)
    if cache is None:
        cache = empty(model.config.geometry, state.tokens.shape[0], made.capacity, model.dtype)
    lengths = (state.tokens >= 0).sum(axis=1, dtype=jnp.int32)
    return Generation(state.tokens, lengths, thaw(cache, state.fresh))


def stream(
    model: Model,
    boundary: Int[Array, "B T"] | np.ndarray,
    cache: KVCache | None = None,
    *,
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    rng: Array | None = None,
    positions: Int[Array, "B T"] | np.ndarray | None = None,
) -> Generator[Any, None, Generation]:
    """Generate on the host, one token at a time: the same tokens as :func:`generate`.

    Args:
        model, boundary, cache, max_new_tokens, stop_tokens, temperature, top_k, top_p, rng, positions: as for
            :func:`generate`, all concrete.

    Yields:
        each token as soon as it is known: an int for a single row, else a list of B ints (-1: that row has stopped).
        The generator's return value (``out = yield from stream(...)``) is the :class:`Generation`.

    Raises:
        KvxError: as :func:`generate`.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.models.random_model import random_model
        >>> model, boundary = random_model(), jnp.array([[5, 6, 7]])
        >>> tokens = list(stream(model, boundary, max_new_tokens=5))
        >>> tokens == generate(model, boundary, max_new_tokens=5).tokens[0].tolist()
        True
    """
    how = sampling(temperature, top_k, top_p, rng)
    made, steps = _opening(model, boundary, cache, positions, max_new_tokens)
    stops = _stops(stop_tokens)
    past, state = _begin_stream(model, made, steps=steps)
    for i in range(max_new_tokens):
        state = _advance_stream(model, past, state, stops, how, rng)
        row = np.asarray(state.tokens[:, i]).tolist()
        yield row[0] if len(row) == 1 else row
        if np.asarray(state.done).all():
            break
    out = _finish_stream(model, made, state)
    return Generation(out.tokens[:, :max_new_tokens], out.lengths, out.cache)


_begin_stream = partial(jax.jit, static_argnames=("steps",))(_begin)
_advance_stream = partial(jax.jit, donate_argnames=("state",))(_advance)
_finish_stream = jax.jit(_finish)
