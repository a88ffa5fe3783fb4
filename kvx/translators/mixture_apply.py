"""What a mixture makes of a cache: the linear map layer by layer, and experts weighted by their routers."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvx.alignment import Alignment
from kvx.cache.cache import KVCache
from kvx.mappers.base import context_cache
from kvx.mappers.linear import HIGHEST, grouped
from kvx.translators.attention_expert import states
from kvx.translators.base import Aux, product
from kvx.translators.mixture_params import MixtureParams, Part
from kvx.translators.residual import read_blocks
from kvx.translators.router import imbalance, route, shares

if TYPE_CHECKING:
    from kvx.translators.mixture import Mixture

Routed = tuple[Array, Array]  # logits and weights [L,B,T,N]


@functools.partial(jax.jit, static_argnums=(0,))
def apply_mixture(
    method: Mixture, params: MixtureParams, cache: KVCache, alignment: Alignment, rng: Array | None = None
) -> tuple[KVCache, Aux]:
    """Map an un-rotated source cache onto the target's tokens; shapes as :func:`kvx.mappers.linear.apply_linear`."""
    made, routed = _outputs(method, params, cache, alignment, rng)
    dtype = jnp.dtype(params.dtype)
    sides = []
    for component in (0, 1):
        own = [n for n, part in enumerate(params.parts) if part.component == component]
        sides.append(grouped([made[n].astype(dtype) for n in own], [params.parts[n] for n in own], params.target))
    moved = context_cache(sides[0], sides[1], alignment, params.target)
    if method.experts == 1 or not method.balance:
        return moved, {}
    real = alignment.pos >= 0
    uneven = [jax.vmap(imbalance, in_axes=(0, 0, None))(*pair, real).mean() for pair in routed]
    return moved, {"balance": jnp.float32(method.balance) * jnp.stack(uneven).mean()}


def _outputs(
    method: Mixture, params: MixtureParams, cache: KVCache, alignment: Alignment, rng: Array | None
) -> tuple[list[Array], list[Routed]]:
    """Outputs ``[L,B,K,T,D]`` of each part, float32, and what each router did, in the order of ``params.routers``."""
    feeds = read_blocks(params, cache, alignment)
    hidden, routed = _attended(method, params, cache, alignment, rng)
    made = []
    for n, part in enumerate(params.parts):
        fixed = hidden[part.component] if hidden and part.gate is not None else None
        noise = None
        if part.router is not None:
            noise = _noise(method, rng, n, (len(part.layers), *alignment.pos.shape))
        step = functools.partial(_layer, blocks=feeds[part.component], fixed=fixed, rate=params.rate, top=method.top)
        y, did = jax.lax.scan(step, None, (part, noise))[1]
        made.append(y)
        if did is not None:
            routed.append(did)
    return made, routed


def _noise(method: Mixture, rng: Array | None, n: int, shape: tuple[int, ...]) -> Array | None:
    """What is added to the logits ``[L,B,T,N]`` in training."""
    if rng is None or not method.noise or method.top is None:
        return None
    drawn = jax.random.normal(jax.random.fold_in(rng, n), (*shape, method.experts), jnp.float32)
    return jnp.float32(method.noise) * drawn


def _attended(
    method: Mixture, params: MixtureParams, cache: KVCache, alignment: Alignment, rng: Array | None
) -> tuple[list[Array], list[Routed]]:
    """Weighted last states ``[N,1,B,T,X]`` of attention experts of keys and of values, and their routers' work."""
    if not params.banks:
        return [], []
    feeds = read_blocks(dataclasses.replace(params, by_head=False), cache, alignment)
    hidden, routed = [], []
    for n, (bank, feed) in enumerate(zip(params.banks, feeds, strict=True)):
        x = bank.features(feed)
        token = jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1)
        logits = jax.tree.map(lambda a: a[0], bank.router).logits(token)
        noise = _noise(method, rng, n, alignment.pos.shape)
        weights = route(logits, method.top, noise)
        last = states(bank, x, alignment.pos)
        hidden.append((last * jnp.moveaxis(weights, 2, 0)[..., None])[:, None])
        routed.append((logits[None], weights[None]))
    return hidden, routed


def _layer(
    _: None, given: tuple[Part, Array | None], *, blocks: Array, fixed: Array | None, rate: float, top: int | None
) -> tuple[None, tuple[Array, Routed | None]]:
    """Output ``[B,K,T,D]`` of one target layer and its router's logits and weights, as a step of a scan."""
    one, noise = given
    x = jnp.moveaxis(blocks[one.gather], 1, 3)  # [E,B,T,k,F]
    entries, batch, tokens = x.shape[:3]
    x = x.reshape(entries, batch, tokens, -1) - one.center[:, None, None]
    x = x * one.scale[:, None, None]
    y = _by_head(product("ebtp,epkd->ebktd", x, one.coefficients), one) + _rows(one.bias)
    did, hidden = None, fixed
    if one.router is not None and one.expand is not None:
        logits = one.router.logits(jnp.moveaxis(x, 0, 2).reshape(batch, tokens, -1))
        weights = route(logits, top, noise)
        did = (logits, weights)
        swished, factor = jnp.split(product("ebtp,nepw->nebtw", x, one.expand), 2, axis=-1)
        hidden = jax.nn.silu(swished) * factor * jnp.moveaxis(weights, 2, 0)[:, None, ..., None]
    if hidden is not None and one.down is not None and one.gate is not None:
        added = _by_head(product("nebtw,newkd->ebktd", hidden, one.down), one)
        y = y + jnp.float32(rate) * _rows(one.gate) * added
    y = y * _rows(one.spread) + _rows(one.mean)
    if one.turn is not None:
        offset = jnp.einsum("bktd,kdf->bktf", y - _rows(one.average), one.turn, precision=HIGHEST)
        y = _rows(one.average) + offset
    return None, (y, did)


def _by_head(y: Array, one: Part) -> Array:
    """``[E,B,K/E,T,D]`` to ``[B,K,T,D]``."""
    heads, width = one.mean.shape
    return y.swapaxes(0, 1).reshape(y.shape[1], heads, -1, width)


def _rows(x: Array) -> Array:
    """``[K,D]`` beside ``[B,K,T,D]``, float32."""
    return x.astype(jnp.float32)[None, :, None]


@functools.partial(jax.jit, static_argnums=(0,))
def output_sums(
    method: Mixture, params: MixtureParams, cache: KVCache, alignment: Alignment
) -> tuple[list[tuple[Array, Array, Array]], list[Array]]:
    """Per part tokens, first and second sums of what is made about the present average; shares of each router."""
    made, routed = _outputs(method, params, cache, alignment, None)
    tokens = alignment.pos >= 0
    real = tokens[None, :, None, :, None]
    count = real.sum().astype(jnp.float32)
    found = []
    for part, y in zip(params.parts, made, strict=True):
        y = jnp.where(real, y - part.average[:, None, :, None], 0.0)
        second = jnp.einsum("lbktd,lbkte->lkde", y, y, precision=HIGHEST)
        found.append((count, y.sum(axis=(1, 3)), second))
    return found, [jax.vmap(shares, in_axes=(0, None))(weights, tokens) for _, weights in routed]
