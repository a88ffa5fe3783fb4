"""C2C's fuser: the target's own cache plus, gated by layer and weighted by token and head, what both caches say."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvx.alignment import Alignment
from kvx.cache.cache import KVCache
from kvx.cache.ops import rotate_keys
from kvx.errors import KvxError
from kvx.mappers.base import CacheMap, groups_of
from kvx.mappers.linear import block_widths, source_blocks
from kvx.translators.additions import Added, Control, calibrated, check_start, fused_cache, last_with_last, own_sides
from kvx.translators.base import Aux, Sample
from kvx.translators.fuser_params import FuserParams, Noise, Part, addition, first_half

ANNEAL = 1929


@dataclasses.dataclass(frozen=True)
class Fuser:
    """Settings of :func:`fuser`, which makes it and documents them."""

    hidden: int
    inner: int
    layers: int
    dropout: float
    gate: float
    anneal: int
    temperatures: tuple[float, float]
    needs: ClassVar[tuple[str, ...]] = ("receiver", "rng", "step")
    rotated: ClassVar[bool] = True

    def init(self, key: Array, start: CacheMap, sample: Sample = ()) -> FuserParams:
        """Random parameters for the shapes of ``start``, whose own coefficients are not used.

        Raises:
            KvxError: a start that does not say its shapes.
        """
        source, target = check_start("fuser", start)
        pairing = last_with_last(source.num_layers, target.num_layers)
        parts = []
        for n, layers in enumerate(groups_of(target)):
            shape = target.layers[layers[0]]
            halves = []
            for component, k in enumerate(jax.random.split(jax.random.fold_in(key, n))):
                features = max(block_widths(source, "same", component, False))
                channels = (shape.key_dim, shape.value_dim)[component]
                sizes = (self.hidden, self.inner, self.layers)
                halves.append(first_half(k, len(layers), (features, shape.kv_heads, channels), sizes, self.gate))
            parts.append(Part(jnp.array([pairing[i] for i in layers], jnp.int32), halves[0], halves[1], layers))
        return FuserParams(tuple(parts), target)

    def apply(
        self,
        params: FuserParams,
        cache: KVCache,
        alignment: Alignment,
        *,
        receiver: KVCache | None = None,
        rng: Any = None,
        step: Array | None = None,
    ) -> tuple[KVCache, Aux]:
        """The receiver's cache with what is added to it, token by token; keys rotated in and out.

        Args:
            params: of this method.
            cache: of the source, keys rotated.
            alignment: ``[B,T,R]``; receiver: the target's own tokens in its slots, keys rotated.
            rng: key of the gates' noise and of dropout; ``None``: gates are hard, as at inference.
            step: steps done, for the temperature of the gates.

        Raises:
            KvxError: no receiver.
        """
        own = _present(receiver)
        return fused_cache(own, self._added(params, cache, alignment, own, rng, step), alignment, params.target), {}

    def trainable(self, params: FuserParams) -> FuserParams:
        """``True`` for everything but the tables of source layers and what controls need."""
        parts = []
        for part in jax.tree.map(lambda _: True, params).parts:
            halves = [
                dataclasses.replace(half, control=jax.tree.map(lambda _: False, half.control))
                for half in (part.keys, part.values)
            ]
            parts.append(dataclasses.replace(part, gather=False, keys=halves[0], values=halves[1]))
        return dataclasses.replace(params, parts=tuple(parts))

    def calibrate(self, params: FuserParams, sample: Sample) -> FuserParams:
        """Mean and covariance of what is added on a sample, which the constant and the random control use."""
        turned = [(rotate_keys(cache), alignment, rotate_keys(own)) for cache, alignment, own in sample]
        found = calibrated(turned, functools.partial(_additions, self, params))
        if found is None:
            return params
        parts = []
        for part, facts in zip(params.parts, found, strict=True):
            halves = [
                dataclasses.replace(half, control=Control(half.control.offset, *fact))
                for half, fact in zip((part.keys, part.values), facts, strict=True)
            ]
            parts.append(dataclasses.replace(part, keys=halves[0], values=halves[1]))
        return dataclasses.replace(params, parts=tuple(parts))

    def _added(
        self, params: FuserParams, cache: KVCache, alignment: Alignment, own: KVCache, rng: Any, step: Array | None
    ) -> Added:
        """What is added to keys and values of each group."""
        sources = [source_blocks(cache, alignment, (component,), False) for component in (0, 1)]
        low, high = self.temperatures[1], self.temperatures[0]
        done = jnp.zeros((), jnp.int32) if step is None else step
        share = jnp.minimum(done.astype(jnp.float32) / self.anneal, 1.0)
        temperature = jnp.float32(high) * jnp.float32(low / high) ** share
        found = []
        for n, part in enumerate(params.parts):
            drawn = None if rng is None else jax.random.split(jax.random.fold_in(rng, n), (len(part.layers), 2))

            def layer(_: None, one: Any) -> tuple[None, tuple[Array, Array]]:
                halves, seen, held, keys = one
                noises = [None if keys is None else Noise(keys[i], temperature, self.dropout) for i in (0, 1)]
                made = [addition(*each) for each in zip(halves, seen, held, noises, strict=True)]
                return None, (made[0], made[1])

            seen = tuple(blocks[part.gather] for blocks in sources)
            held = own_sides(own, part.layers)
            found.append(jax.lax.scan(layer, None, ((part.keys, part.values), seen, held, drawn))[1])
        return found


@functools.partial(jax.jit, static_argnames=("method",))
def _additions(method: Fuser, params: FuserParams, cache: KVCache, alignment: Alignment, own: KVCache) -> Added:
    return method._added(params, cache, alignment, own, None, None)


def _present(receiver: KVCache | None) -> KVCache:
    if receiver is None:
        raise KvxError("fuser adds to the target's own cache of the context, which is missing; pass receiver=.")
    return receiver


def fuser(
    *,
    hidden: int = 1024,
    inner: int = 1024,
    layers: int = 3,
    dropout: float = 0.1,
    gate: float = 0.0,
    anneal: int = ANNEAL,
    temperatures: tuple[float, float] = (1.0, 0.001),
) -> Fuser:
    """C2C: the target reads the context too, and the source's cache is fused into its own.

    For keys and values of each target layer, with S the source's and R the target's own, all heads of a token flattened
    and keys rotated: ``h = f(W_in [S; R])``, ``R' = R + g sigmoid(W_w f(h)) (W_p f(h))``, where f are pre-norm blocks
    ``x + W_2 gelu(W_1 rms(x))``, the sigmoid weighs each token and head, and g is one gate a layer. In training
    ``g = sigmoid((logit + Gumbel noise) / temperature)``, the temperature falling geometrically; at inference g is 1
    where the logit is above zero, else 0. Layers are paired last with last. Layers whose gate is closed pass the
    target's own cache on unchanged, so that an untrained fuser changes nothing.

    Args:
        hidden: width of h.
        inner: width inside the blocks, but for the one before the weights, which is as wide as h.
        layers: blocks from the input to what is added, the input's projection counted: at least 3.
        dropout: of the blocks' outputs in training.
        gate: first logit of all gates.
        anneal: steps over which the temperature falls.
        temperatures: the first and the last one.

    Returns:
        The method; train it with :func:`kvx.train` on data made with ``receiver=True``.

    Raises:
        KvxError: settings out of range.

    Example:
        >>> import jax, kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> pairs = toy_pairs()
        >>> start = kvx.translators.untrained(kvx.translators.fuser(hidden=8), pairs.unfitted(), jax.random.key(0))
        >>> batch = next(iter(pairs))
        >>> fused = kvx.translate(start, batch.source, batch.alignment, receiver=batch.target)
        >>> bool(abs(fused.values(0)[:, :, 1:] - batch.target.values(0)).max() == 0)
        True

    Reference: Cache-to-Cache, arXiv 2510.03215, and its public ``C2CProjector`` (thu-nics/C2C).
    """
    if min(hidden, inner, anneal) < 1 or layers < 3:
        raise KvxError(f"hidden {hidden}, inner {inner} and anneal {anneal} must be at least 1, layers {layers} 3.")
    if not 0 <= dropout < 1 or min(temperatures) <= 0:
        raise KvxError(f"dropout {dropout} must be from 0 to below 1, and temperatures {temperatures} above zero.")
    return Fuser(hidden, inner, layers, float(dropout), float(gate), anneal, (temperatures[0], temperatures[1]))
