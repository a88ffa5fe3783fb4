"""Closed form plus a gated residual: the linear map of a fitted mapper, trained on, with a small network beside it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvx.alignment import Alignment
from kvx.cache.cache import KVCache
from kvx.errors import KvxError
from kvx.mappers.base import CacheMap, context_cache
from kvx.mappers.history import with_history
from kvx.mappers.linear import HIGHEST, LinearParams, grouped, source_blocks
from kvx.translators.base import Aux, Sample
from kvx.translators.residual_params import Branch, Output, ResidualParams, branches_of
from kvx.translators.statistics import Sums, calibrated, output_sums

GATE_RATE = 8.0


@dataclasses.dataclass(frozen=True)
class Residual:
    """Settings of :func:`residual`, which makes it and documents them."""

    width: int
    frozen: bool
    gate_rate: float
    needs: ClassVar[tuple[str, ...]] = ()

    def init(self, key: Array, start: CacheMap, sample: Sample = ()) -> ResidualParams:
        """Parameters whose gates are zero, so that they make what ``start`` makes.

        Args:
            key: of the residual's random layers.
            start: a fitted linear map.
            sample: source caches and alignments whose deviations scale the features; none: features are only centred.

        Raises:
            KvxError: a start without linear coefficients.
        """
        linear = start.params
        if not isinstance(linear, LinearParams):
            raise KvxError(
                f"residual starts from a fitted linear map, such as full_head or head_matched; got {start.method}."
            )
        deviations = _deviations(linear, sample) if sample else None
        branches = branches_of(linear, deviations, self.width, key)
        settings = (
            linear.target,
            linear.inputs,
            linear.by_head,
            linear.dtype,
            self.gate_rate,
            linear.history,
            linear.report,
        )
        return ResidualParams(branches, *settings)

    def apply(
        self,
        params: ResidualParams,
        cache: KVCache,
        alignment: Alignment,
        *,
        receiver: KVCache | None = None,
        rng: Any = None,
    ) -> tuple[KVCache, Aux]:
        """The target's cache of the context, token by token: nothing is read of other tokens than those aligned."""
        return apply_residual(params, cache, alignment), {}

    def trainable(self, params: ResidualParams) -> ResidualParams:
        """``True`` for the residual, and for the linear part unless it is frozen."""

        def marks(out: Output) -> Output:
            none = jax.tree.map(lambda _: False, out)
            return dataclasses.replace(none, down=True, gate=True, coefficients=not self.frozen, bias=not self.frozen)

        branches = tuple(
            dataclasses.replace(
                jax.tree.map(lambda _: False, branch), expand=True, outputs=tuple(marks(out) for out in branch.outputs)
            )
            for branch in params.branches
        )
        return dataclasses.replace(params, branches=branches)

    def calibrate(self, params: ResidualParams, sample: Sample) -> ResidualParams:
        """Mean and covariance of the outputs on a sample, which the constant and the random control use."""
        sums = [_output_sums(params, cache, alignment) for cache, alignment in sample]
        if not sums:
            return params
        branches = []
        for n, branch in enumerate(params.branches):
            outputs = []
            for m, out in enumerate(branch.outputs):
                outputs.append(calibrated(out, [found[n][m] for found in sums]))
            branches.append(dataclasses.replace(branch, outputs=tuple(outputs)))
        return dataclasses.replace(params, branches=tuple(branches))


def residual(*, width: int = 128, frozen: bool = False, gate_rate: float = GATE_RATE) -> Residual:
    """The linear map of a fitted mapper, trained on, plus a gated SwiGLU residual for each target layer.

    ``y = mean + spread * (b + x W + rate g * (silu(x A) * (x U)) D)``, where x joins the source blocks that the closed
    form reads, each feature centred and scaled by its deviation. W starts as the closed form's coefficients, b at zero
    and the gates g (one a channel) at exactly zero, so the first translator is the closed form. Keys and values that
    read the same blocks share A and U. Heads, widths and layers may differ freely between the models.

    Args:
        width: W, channels between the residual's two layers, of each entry (a layer, or a head of head-matched maps).
        frozen: leave the closed form's coefficients and biases as they are, and train the residual alone.
        gate_rate: multiplier of the gates, which lets a small step of the optimizer open them.

    Returns:
        The method; train it with :func:`kvx.train`.

    Raises:
        KvxError: settings out of range.

    Example:
        >>> import jax, kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> pairs = toy_pairs()
        >>> mapper, _ = kvx.fit(kvx.mappers.full_head(layers=2), pairs, progress=False)
        >>> start = kvx.translators.untrained(kvx.translators.residual(width=8), mapper, jax.random.key(0))
        >>> batch = next(iter(pairs))
        >>> ours, theirs = (kvx.translate(m, batch.source, batch.alignment) for m in (start, mapper))
        >>> bool((ours.keys(0) == theirs.keys(0)).all())
        True

    Reference: ridge plus gated residual, trained on continuation loss (no paper); SwiGLU: Shazeer, arXiv 2002.05202.
    """
    if width < 1:
        raise KvxError(f"width is {width}; expected at least one channel.")
    if not 0 < gate_rate < float("inf"):
        raise KvxError(f"gate_rate is {gate_rate}; expected a number above zero.")
    return Residual(width, frozen, float(gate_rate))


@jax.jit
def apply_residual(params: ResidualParams, cache: KVCache, alignment: Alignment) -> KVCache:
    """Map an un-rotated source cache onto the target's tokens; shapes as :func:`kvx.mappers.linear.apply_linear`."""
    sides: tuple[list[Array], list[Array]] = ([], [])
    owners: tuple[list[Branch], list[Branch]] = ([], [])
    dtype = jnp.dtype(params.dtype)
    for branch, made in zip(params.branches, _outputs(params, cache, alignment), strict=True):
        for out, y in zip(branch.outputs, made, strict=True):
            sides[out.component].append(y.astype(dtype))
            owners[out.component].append(branch)
    keys, values = (grouped(made, own, params.target) for made, own in zip(sides, owners, strict=True))
    return context_cache(keys, values, alignment, params.target)


def _outputs(params: ResidualParams, cache: KVCache, alignment: Alignment) -> list[tuple[Array, ...]]:
    """For each branch its outputs, float32 ``[L,B,K,T,D]``."""
    blocks = read_blocks(params, cache, alignment)
    made = []
    for branch in params.branches:
        feed = blocks[branch.outputs[0].component]
        step = functools.partial(_layer, blocks=feed, rate=params.rate)
        made.append(jax.lax.scan(step, None, branch)[1])
    return made


def read_blocks(params: Any, cache: KVCache, alignment: Alignment) -> tuple[Array, Array]:
    """Source blocks ``[U,B,T,F]`` that keys and values read, as ``inputs`` and ``by_head`` of the parameters say."""
    cache = with_history(cache, params.history)
    if params.inputs == "both":
        both = source_blocks(cache, alignment, (0, 1), params.by_head)
        return both, both
    keys, values = (source_blocks(cache, alignment, (i,), params.by_head) for i in (0, 1))
    return keys, values


def _layer(_: None, one: Branch, *, blocks: Array, rate: float) -> tuple[None, tuple[Array, ...]]:
    """Outputs ``[B,K,T,D]`` of one target layer, as a step of a scan."""
    x = jnp.moveaxis(blocks[one.gather], 1, 3)  # [E,B,T,k,F]
    entries, batch, tokens = x.shape[:3]
    x = x.reshape(entries, batch, tokens, -1) - one.center[:, None, None]
    x = (x * one.scale[:, None, None]).astype(one.expand.dtype)
    swished, factor = jnp.split(_product("ebtp,epw->ebtw", x, one.expand), 2, axis=-1)
    hidden = (jax.nn.silu(swished) * factor).astype(x.dtype)
    return None, tuple(_component(out, x, hidden, rate) for out in one.outputs)


def _component(out: Output, x: Array, hidden: Array, rate: float) -> Array:
    heads, width = out.mean.shape

    def by_head(y: Array) -> Array:
        return y.reshape(y.shape[1], heads, -1, width) if y.shape[0] == 1 else _joined(y, heads)

    straight = by_head(_product("ebtp,epkd->ebktd", x, out.coefficients))
    added = by_head(_product("ebtw,ewkd->ebktd", hidden, out.down))
    total = straight + _rows(out.bias) + jnp.float32(rate) * _rows(out.gate) * added
    return total * _rows(out.spread) + _rows(out.mean)


def _joined(y: Array, heads: int) -> Array:
    """``[E,B,K/E,T,D]`` to ``[B,K,T,D]``."""
    return y.swapaxes(0, 1).reshape(y.shape[1], heads, *y.shape[3:])


def _rows(x: Array) -> Array:
    """``[K,D]`` beside ``[B,K,T,D]``, float32."""
    return x.astype(jnp.float32)[None, :, None]


def _product(spec: str, x: Array, w: Array) -> Array:
    return jnp.einsum(spec, x, w.astype(x.dtype), precision=HIGHEST, preferred_element_type=jnp.float32)


def _deviations(linear: LinearParams, sample: Sample) -> Array:
    """Standard deviation ``[2,U,F]`` of the source blocks' features that keys and values read, over fed tokens."""
    sums = [feature_sums(linear, cache, alignment) for cache, alignment in sample]
    count, first, second = summed(sums)
    mean = first / count
    return jnp.sqrt(jnp.maximum(second / count - jnp.square(mean), 0))


def summed(parts: Sequence[tuple[Array, Array, Array]]) -> tuple[Array, Array, Array]:
    """Counts, first and second sums of several batches together."""
    count, first, second = (functools.reduce(jnp.add, column) for column in zip(*parts, strict=True))
    return count, first, second


@jax.jit
def feature_sums(linear: LinearParams, cache: KVCache, alignment: Alignment) -> tuple[Array, Array, Array]:
    real = (alignment.pos >= 0)[None, :, :, None]
    sides = [jnp.where(real, x, 0.0) for x in read_blocks(linear, cache, alignment)]
    count = jnp.maximum(real.sum(), 1).astype(jnp.float32)
    first, second = ([f(x).sum(axis=(1, 2)) for x in sides] for f in (lambda x: x, jnp.square))
    return count, jnp.stack(first), jnp.stack(second)


@jax.jit
def _output_sums(params: ResidualParams, cache: KVCache, alignment: Alignment) -> list[list[Sums]]:
    """Per branch and output: tokens, and first and second sums of what is made, about the present average."""
    real = alignment.pos >= 0
    return [
        [output_sums(out, y, real) for out, y in zip(branch.outputs, made, strict=True)]
        for branch, made in zip(params.branches, _outputs(params, cache, alignment), strict=True)
    ]
