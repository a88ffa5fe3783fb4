"""The trunk: a shared state of each token, changed by gated causal blocks, from which every target layer is made."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvx.alignment import Alignment
from kvx.cache.cache import KVCache, LayerView
from kvx.cache.geometry import RopeSpec
from kvx.cache.rope import rotate
from kvx.errors import KvxError
from kvx.mappers.base import CacheMap
from kvx.mappers.low_rank_params import LowRankParams, read_features, written
from kvx.models.attention import attend
from kvx.translators.base import Aux, Sample, product
from kvx.translators.residual import GATE_RATE
from kvx.translators.statistics import Sums, calibrated, output_sums
from kvx.translators.trunk_params import Blocks, TrunkParams, trunk_of

_TINY = 1e-6


@dataclasses.dataclass(frozen=True)
class Trunk:
    """Settings of :func:`trunk`, which makes it and documents them."""

    blocks: int
    width: int
    heads: int
    head_dim: int
    gate_rate: float
    needs: ClassVar[tuple[str, ...]] = ()

    def init(self, key: Array, start: CacheMap, sample: Sample = ()) -> TrunkParams:
        """Parameters whose gates are zero, so that they make what ``start`` makes.

        Args:
            key: of the blocks' random matrices.
            start: a fitted low-rank map.
            sample: source caches and alignments whose deviations scale the features; none: features are only centred.

        Raises:
            KvxError: a start of another kind.
        """
        linear = start.params
        if not isinstance(linear, LowRankParams):
            raise KvxError(f"trunk starts from a fitted low_rank map; got {start.method}.")
        sizes = self.blocks, self.width, self.heads, self.head_dim
        return trunk_of(linear, _deviations(linear, sample) if sample else None, sizes, self.gate_rate, key)

    def apply(
        self,
        params: TrunkParams,
        cache: KVCache,
        alignment: Alignment,
        *,
        receiver: KVCache | None = None,
        rng: Any = None,
    ) -> tuple[KVCache, Aux]:
        """The target's cache of the context; each token reads itself and earlier ones."""
        return apply_trunk(params, cache, alignment), {}

    def trainable(self, params: TrunkParams) -> TrunkParams:
        """``True`` for all matrices, biases and gates."""
        none = jax.tree.map(lambda _: False, params)
        writes = tuple(dataclasses.replace(w, up=True, bias=True) for w in none.writes)
        reads = dataclasses.replace(none.reads, weight=True)
        blocks = jax.tree.map(lambda _: True, params.blocks)
        return dataclasses.replace(none, reads=reads, blocks=blocks, writes=writes)

    def calibrate(self, params: TrunkParams, sample: Sample) -> TrunkParams:
        """Mean and covariance of the outputs on a sample, which the constant and the random control use."""
        sums = [_output_sums(params, cache, alignment) for cache, alignment in sample]
        if not sums:
            return params
        writes = tuple(calibrated(out, [found[n] for found in sums]) for n, out in enumerate(params.writes))
        return dataclasses.replace(params, writes=writes)


def trunk(
    *, blocks: int = 2, width: int = 512, heads: int = 4, head_dim: int = 64, gate_rate: float = GATE_RATE
) -> Trunk:
    """A low-rank map, trained on, whose shared state passes gated blocks of causal attention and SwiGLU.

    ``h = (x - center) / scale E``, then for every block ``h += rate a . attend(rms h)`` and ``h += rate g . swiglu(rms
    h)``, and ``y = mean + spread (b + h U)`` for the keys and values of all target layers. E and U start as the closed
    form's, b and the gates a, g (one a channel) at zero, so the first translator is the closed form. What a token's
    neighbours are is worked out once, in the state, and not by each target layer for itself; attention is rotary and
    reads earlier tokens only, so contexts may be extended (with the ``causal`` alignment rule).

    Args:
        blocks: how many; 0: the linear map alone is trained.
        width: channels inside each SwiGLU.
        heads, head_dim: of each attention; ``head_dim`` is even.
        gate_rate: multiplier of the gates, which lets a small step of the optimizer open them.

    Returns:
        The method; train it with :func:`kvx.train` from a :func:`kvx.mappers.low_rank` map.

    Raises:
        KvxError: settings out of range.

    Example:
        >>> import jax, kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> pairs = toy_pairs()
        >>> mapper, _ = kvx.fit(kvx.mappers.low_rank(rank=24), pairs, progress=False)
        >>> start = kvx.translators.untrained(kvx.translators.trunk(width=8), mapper, jax.random.key(0))
        >>> batch = next(iter(pairs))
        >>> ours, theirs = (kvx.translate(m, batch.source, batch.alignment) for m in (start, mapper))
        >>> bool(abs(ours.keys(0) - theirs.keys(0)).max() < 1e-4)
        True

    Reference: own design; SwiGLU: Shazeer, arXiv 2002.05202; rotary attention: Su et al., arXiv 2104.09864.
    """
    sizes = {"blocks": blocks, "width": width, "heads": heads, "head_dim": head_dim}
    if blocks < 0 or min(width, heads, head_dim) < 1 or head_dim % 2:
        raise KvxError(f"{sizes}: expected at least 0 blocks, at least 1 of the others, and an even head_dim.")
    if not 0 < gate_rate < float("inf"):
        raise KvxError(f"gate_rate is {gate_rate}; expected a number above zero.")
    return Trunk(blocks, width, heads, head_dim, float(gate_rate))


@jax.jit
def apply_trunk(params: TrunkParams, cache: KVCache, alignment: Alignment) -> KVCache:
    """Map an un-rotated source cache onto the target's tokens; as
    :func:`kvx.mappers.low_rank_params.apply_low_rank`.
    """
    dtype = jnp.dtype(params.dtype)
    made = [y.astype(dtype) for y in _outputs(params, cache, alignment)]
    return written(params.writes, made, alignment, params.target)


def _outputs(params: TrunkParams, cache: KVCache, alignment: Alignment) -> list[Array]:
    """For each of ``writes`` its outputs, float32 ``[L,B,K,T,D]``."""
    h = state(params, cache, alignment)
    made = []
    for out in params.writes:
        y = product("btr,lrkd->lbktd", h, out.up) + out.bias[:, None, :, None]
        made.append(y * out.spread[:, None, :, None] + out.mean[:, None, :, None])
    return made


def state(params: TrunkParams, cache: KVCache, alignment: Alignment) -> Array:
    """The state of every target token after all blocks, float32 ``[B,T,R]``."""
    x = (read_features(params.reads, cache, alignment) - params.reads.center[None, None]) / params.scale[None, None]
    h = product("btp,pr->btr", x, params.reads.weight)
    step = jax.checkpoint(functools.partial(_block, pos=alignment.pos, rate=params.rate))
    return jax.lax.scan(step, h, params.blocks)[0]


def _block(h: Array, one: Blocks, *, pos: Array, rate: float) -> tuple[Array, None]:
    """One block on ``[B,T,R]``, as a step of a scan."""
    x = _normed(h)
    spec = RopeSpec.create(dim=one.query_weight.shape[1] // one.heads)
    query, key, value = (
        _heads(product("btr,ra->bta", x, w), one.heads) for w in (one.query_weight, one.key_weight, one.value_weight)
    )
    query, key = (rotate(y, jnp.maximum(pos, 0)[:, None], spec) for y in (query, key))
    seen = [LayerView(key, value, pos[:, None])]
    found = attend(query, seen, pos, scale=query.shape[-1] ** -0.5).swapaxes(1, 2).reshape(*pos.shape, -1)
    h = h + jnp.float32(rate) * one.read_gate[None, None] * product("bta,ar->btr", found, one.out_weight)
    swished, factor = jnp.split(product("btr,rw->btw", _normed(h), one.expand_weight), 2, axis=-1)
    inner = product("btw,wr->btr", jax.nn.silu(swished) * factor, one.contract_weight)
    return h + jnp.float32(rate) * one.gate[None, None] * inner, None


def _normed(h: Array) -> Array:
    return h * jax.lax.rsqrt(jnp.square(h).mean(axis=-1, keepdims=True) + _TINY)


def _heads(x: Array, heads: int) -> Array:
    """``[B,T,A]`` to ``[B,H,T,A/H]``."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _deviations(linear: LowRankParams, sample: Sample) -> Array:
    """Standard deviation ``[P]`` of the features about the fit's centre, over fed tokens."""
    sums = [_feature_sums(linear, cache, alignment) for cache, alignment in sample]
    count, first, second = (sum(column[1:], start=column[0]) for column in zip(*sums, strict=True))
    mean = first / count
    return jnp.sqrt(jnp.maximum(second / count - jnp.square(mean), 0))


@jax.jit
def _feature_sums(linear: LowRankParams, cache: KVCache, alignment: Alignment) -> Sums:
    real = (alignment.pos >= 0)[..., None]
    x = read_features(linear.reads, cache, alignment) - linear.reads.center[None, None]
    x = jnp.where(real, x, 0.0)
    count = jnp.maximum(real.sum(), 1).astype(jnp.float32)
    return count, x.sum(axis=(0, 1)), jnp.square(x).sum(axis=(0, 1))


@jax.jit
def _output_sums(params: TrunkParams, cache: KVCache, alignment: Alignment) -> list[Sums]:
    real = alignment.pos >= 0
    made = _outputs(params, cache, alignment)
    return [output_sums(out, y, real) for out, y in zip(params.writes, made, strict=True)]
