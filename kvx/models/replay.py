"""Replay: the target reads the context again, with translated keys and values as what its attention reads."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvx.cache.build import blank_group, concrete, last_filled
from kvx.cache.cache import CacheGroup, KVCache, LayerView
from kvx.cache.ops import slice_slots, unrotate_keys
from kvx.errors import KvxError
from kvx.models.config import ModelConfig
from kvx.models.decoder import layer_weights, read, resolve_positions, rope_angles, rotated_view, stacked
from kvx.models.layers import Angles, Weights, embed, enter, leave
from kvx.models.model import Model
from kvx.models.request import Request, check_fit, request


@dataclasses.dataclass(frozen=True)
class ReplayPlan:
    """Where translated keys and values are read, and which tokens are run again.

    Attributes:
        start, stop: first target layer that reads translated keys and values and the one after the last; ``None``: up
            to the top.
        every: run only every so-many-th token of the context again, from the first on.

    Example:
        >>> from kvx.models.config import tiny_config
        >>> from kvx.models.replay import ReplayPlan
        >>> full, half = (ReplayPlan(1, every=n).flops(tiny_config(), tokens=100) for n in (1, 2))
        >>> full, round(half / full, 2)
        (2387200, 0.5)
    """

    start: int = 0
    stop: int | None = None
    every: int = 1

    def layers(self, config: ModelConfig) -> range:
        """The target layers of the window.

        Raises:
            KvxError: a window beyond the model's layers, or ``every`` below one.
        """
        stop = config.num_layers if self.stop is None else self.stop
        if not 0 <= self.start < stop <= config.num_layers:
            raise KvxError(
                f"layers {self.start}..{stop} are no window of this model's {config.num_layers} layers; expected "
                "0 <= start < stop <= layers."
            )
        if self.every < 1:
            raise KvxError(f"every is {self.every}; expected 1 (each token) or more.")
        return range(self.start, stop)

    def flops(self, config: ModelConfig, tokens: int, prefix: int = 0) -> int:
        """Floating-point operations of a replay of one context, a product and its sum counted as two.

        Where the window lies changes nothing: every layer makes its own keys and values. Of the last layer nothing
        else is needed. With ``every=1`` it is what a prefill of the context costs.

        Args:
            config: of the target.
            tokens: of the context; prefix: tokens before it.
        """
        self.layers(config)
        c = config
        own = 4 * c.dim * c.kv_heads * c.head_dim
        rest = 4 * c.dim * c.heads * c.head_dim + 2 * c.dim * c.ffn_dim * (3 if c.gated else 2)
        reach = prefix + 1 + np.arange(0, tokens, self.every)
        total = len(reach) * (c.num_layers * own + (c.num_layers - 1) * rest)
        for window in c.windows[:-1]:
            pairs = reach if window is None else np.minimum(reach, window)
            total += 4 * c.heads * c.head_dim * int(pairs.sum())
        return int(total)


def replay(
    target: Model, tokens: Int[Array, "B T"] | np.ndarray, moved: KVCache, plan: ReplayPlan, *, remat: bool = False
) -> KVCache:
    """Run the target over the context again, reading translated keys and values inside a window of layers.

    A token's query in layer l reads the prefix and, of each token up to itself, the translated key and value if l lies
    in the window or that token is not run again, else what the token itself makes in this run. Every layer keeps the
    keys and values that the tokens make themselves from the stream that this changes; tokens that are not run again
    keep their translated ones. Layers below the window hold what the target would have made without a translation.
    Pure, jittable and differentiable with respect to ``moved``.

    Args:
        target: reads the context.
        tokens: int ``[B,T]`` the context's tokens, without the prefix; -1 is padding.
        moved: translated cache from :func:`kvx.translate`: prefix, then one slot a token of the context.
        plan: window and share of tokens.
        remat: compute each layer again for the gradient.

    Returns:
        The cache ``[L,B,K,prefix + T,D]``, keys un-rotated, zeros in empty slots. Tokens that the alignment left out
        of ``moved`` are in it when they are run again.

    Raises:
        KvxError: a window beyond the model's layers, or a cache that is not of these tokens.

    Example:
        >>> import jax.numpy as jnp
        >>> import kvx
        >>> from kvx.models.random_model import random_model
        >>> from kvx.models.replay import ReplayPlan
        >>> model, tokens = random_model(), jnp.array([[5, 6, 7]])
        >>> native = kvx.prefill(model, tokens, capacity=3)
        >>> again = kvx.replay(model, tokens, native, ReplayPlan(start=1))
        >>> float(abs(again.keys(1) - native.keys(1)).max()) < 1e-5
        True

    Reference: Mixture-of-Translators, arXiv 2607.28979.
    """
    made, held = _checked(target, tokens, moved, plan)
    return _replay(target, made, moved, plan, held, remat)[0]


def replay_states(
    target: Model, tokens: Int[Array, "B T"] | np.ndarray, moved: KVCache, plan: ReplayPlan
) -> tuple[KVCache, Float[Array, "L1 B N M"]]:
    """:func:`replay`, with the residual stream.

    Returns:
        The cache, and ``[L+1,B,N,M]``: what enters each layer and what leaves the last, of the N tokens run again.
    """
    made, held = _checked(target, tokens, moved, plan)
    cache, states = _replay(target, made, moved, plan, held, collect=True)
    return cache, jnp.stack(states)


def _checked(target: Model, tokens: Any, moved: KVCache, plan: ReplayPlan) -> tuple[Request, int]:
    """The tokens as a request, and the slots of the prefix."""
    plan.layers(target.config)
    length = tokens.shape[1] if getattr(tokens, "ndim", 0) == 2 else 0
    slots = {group.slots for group in moved.groups}
    if len(slots) != 1 or any(group.ring for group in moved.groups) or min(slots) < length:
        raise KvxError(
            f"the translated cache has {sorted(slots)} slots, rings included, for a context of {length} tokens; "
            "expected a prefix and one slot a token, as kvx.translate makes them."
        )
    held = min(slots) - length
    made = request(target, tokens, slice_slots(moved, 0, held) if held else None, bucketed=False)
    check_fit(target.config, made.tokens, moved, None)
    seen, pos = concrete(made.tokens), concrete(moved.groups[0].pos)
    if seen is not None and pos is not None and (pos[0, :, 0, held:][seen < 0] >= 0).any():
        raise KvxError("the translated cache holds tokens where the context has padding; give the tokens it is of.")
    return Request(made.tokens, None, made.cache), held


@partial(jax.jit, static_argnames=("plan", "held", "remat", "collect"))
def _replay(
    target: Model,
    made: Request,
    moved: KVCache,
    plan: ReplayPlan,
    held: int,
    remat: bool = False,
    collect: bool = False,
) -> tuple[KVCache, list[Array]]:
    """The cache, and on demand the residual stream before each layer and after the last."""
    c, window = target.config, plan.layers(target.config)
    moved = unrotate_keys(moved) if moved.rotated else moved
    pos = resolve_positions(made)
    chosen = np.arange(0, pos.shape[1], plan.every)
    at = pos[:, chosen]
    x = embed(c, target.params, made.tokens[:, chosen], at)
    memo: dict[Any, Angles] = {}
    mine: dict[Any, Angles] = {}
    keys, values, states = [], [], [x]
    for i, w in enumerate(layer_weights(target)):
        rope = c.ropes[i]
        if rope not in mine:
            mine[rope] = rope_angles(rope, at[:, None])
        past, masked = _operands(rotated_view(moved, i, rope, memo), at, held, plan.every, i in window)

        def layer(
            x: Array, past: list[LayerView], masked: Array, w: Weights = w, i: int = i
        ) -> tuple[Array, Array, Array]:
            rope = c.ropes[i]
            q, k, turned, v = enter(c, w, x, mine[rope], rope is not None and rope.interleaved)
            parts = [*past, LayerView(turned, v, masked)]
            return leave(c, w, x, read(c, q, parts, at, c.windows[i])), k, v

        x, k, v = (jax.checkpoint(layer) if remat else layer)(x, past, masked)
        keys.append(k)
        values.append(v)
        states.append(x)
    return _written(moved, keys, values, pos, held, plan.every), states if collect else []


def _operands(view: LayerView, at: Array, held: int, every: int, inside: bool) -> tuple[list[LayerView], Array]:
    """Translated keys and values that a layer reads, and the positions of its own that it reads beside them."""
    slot = np.arange(view.pos.shape[-1]) - held
    again = (slot >= 0) & (slot % every == 0)
    if not inside:
        kept = np.flatnonzero(~again)
        past = [LayerView(view.k[:, :, kept], view.v[:, :, kept], view.pos[..., kept])] if len(kept) else []
        return past, at[:, None]
    fed = view.pos[..., np.flatnonzero(again)] >= 0
    return [view], jnp.where(fed, -1, at[:, None])


def _written(moved: KVCache, keys: list[Array], values: list[Array], pos: Array, held: int, every: int) -> KVCache:
    """The translated cache with the tokens that were run again in their slots."""
    into = np.arange(held, held + pos.shape[1], every)

    def write(group: CacheGroup) -> CacheGroup:
        k = group.k.at[:, :, :, into].set(stacked(keys, group.layers).astype(group.k.dtype))
        v = group.v.at[:, :, :, into].set(stacked(values, group.layers).astype(group.v.dtype))
        own = pos[None, :, None, ::every]
        where = group.pos.at[..., into].set(jnp.broadcast_to(own, group.pos[..., into].shape))
        return blank_group(CacheGroup(k, v, where, last_filled(where), group.layers))

    return dataclasses.replace(moved, groups=tuple(write(group) for group in moved.groups))
