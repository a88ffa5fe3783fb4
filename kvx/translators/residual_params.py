"""Parameters of the residual translator: standardised linear coefficients, and what is added to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.cache.geometry import CacheGeometry
from kvx.mappers.base import EntryReport
from kvx.mappers.controls import scrambling
from kvx.mappers.history import NONE, History
from kvx.mappers.linear import HIGHEST, BlockMap, LinearParams
from kvx.typing import host, pytree, static

_LARGEST = 30  # powers of two that a scale may take


@pytree
class Output:
    """Keys or values of the L target layers of a :class:`Branch`.

    Attributes:
        coefficients: ``[L,E,P,K/E,D]`` of standardised features, in units of ``spread``.
        bias: ``[L,K,D]`` in units of ``spread``.
        down: ``[L,E,W,K/E,D]`` second layer of the residual; gate: ``[L,K,D]``, zero before training.
        mean, spread: ``[L,K,D]`` of the fitted outputs; never trained. Spreads are powers of two.
        average, covariance: ``[L,K,D]`` and ``[L,K,D,D]`` of what the translator makes, for controls.
        component: 0 keys, 1 values.
    """

    coefficients: Array
    bias: Array
    down: Array
    gate: Array
    mean: Array
    spread: Array
    average: Array
    covariance: Array
    component: int = static()


@pytree
class Branch:
    """Like target layers whose outputs read the same source blocks.

    Attributes:
        gather: int32 ``[L,E,k]``: the source blocks that each entry reads.
        center, scale: ``[L,E,P]``: features are ``(x - center) scale``; never trained. Scales are powers of two.
        expand: ``[L,E,P,2W]`` first layer of the residual: the W swished channels, then their W factors.
        outputs: keys, values, or both.
        layers: the L target layers, ascending.
    """

    gather: Array
    center: Array
    scale: Array
    expand: Array
    outputs: tuple[Output, ...]
    layers: tuple[int, ...] = static()


@pytree
class ResidualParams:
    """Parameters of :class:`kvx.translators.residual.Residual`.

    Attributes:
        branches: see :class:`Branch`.
        target, inputs, by_head, dtype, history: as in :class:`kvx.mappers.linear.LinearParams`.
        rate: multiplier of the gates.
        report: host only: how each entry of the closed form was fitted.
    """

    branches: tuple[Branch, ...]
    target: CacheGeometry = static()
    inputs: str = static(default="both")
    by_head: bool = static(default=False)
    dtype: str = static(default="float32")
    rate: float = static(default=1.0)
    history: History = static(default=NONE)
    report: tuple[EntryReport, ...] | None = host(default=None)

    @property
    def stored(self) -> int:
        """Bytes that a translation reads: everything but what only controls need."""
        arrays = [a for b in self.branches for a in (b.gather, b.center, b.scale, b.expand)]
        names = ("coefficients", "bias", "down", "gate", "mean", "spread")
        arrays += [getattr(out, name) for b in self.branches for out in b.outputs for name in names]
        return sum(a.size * a.dtype.itemsize for a in arrays)

    @property
    def parameters(self) -> int:
        """Numbers that a translation reads, but for the tables of what is read."""
        outputs = [out for branch in self.branches for out in branch.outputs]
        names = ("coefficients", "bias", "down", "gate", "mean", "spread")
        numbers = sum(getattr(out, name).size for out in outputs for name in names)
        return numbers + sum(a.size for b in self.branches for a in (b.center, b.scale, b.expand))

    def flops(self, tokens: int) -> int:
        """Operations of translating so many tokens: a product and a sum an element of each matrix."""
        outputs = [out for branch in self.branches for out in branch.outputs]
        matrices = [b.expand.size for b in self.branches] + [out.coefficients.size + out.down.size for out in outputs]
        return 2 * tokens * sum(matrices)

    def silenced(self, key: Array) -> ResidualParams:
        """The constant control: every token gets the average output, whatever was read."""

        def silence(out: Output, _: Array) -> Output:
            return dataclasses.replace(
                out,
                coefficients=jnp.zeros_like(out.coefficients),
                bias=jnp.zeros_like(out.bias),
                gate=jnp.zeros_like(out.gate),
                mean=out.average,
                covariance=jnp.zeros_like(out.covariance),
            )

        return self._changed(silence, key)

    def scrambled(self, key: Array) -> ResidualParams:
        """The random control: deviations from the average output times a random matrix that keeps each variance."""
        return self._changed(lambda out, key: _scramble(out, key, self.rate), key)

    def _changed(self, change, key: Array) -> ResidualParams:  # type: ignore[no-untyped-def]
        branches = []
        for n, branch in enumerate(self.branches):
            keys = jax.random.split(jax.random.fold_in(key, n), len(branch.outputs))
            made = tuple(change(out, k) for out, k in zip(branch.outputs, keys, strict=True))
            branches.append(dataclasses.replace(branch, outputs=made))
        return dataclasses.replace(self, branches=tuple(branches), report=None)


def _scramble(out: Output, key: Array, rate: float) -> Output:
    draw = scrambling(out.covariance, key)
    mixed = jnp.einsum("lkde,lkdf,lkfg->lkeg", draw, out.covariance, draw, precision=HIGHEST)
    inner = out.spread[..., :, None] * draw / out.spread[..., None, :]
    layers, entries, _, per, width = out.coefficients.shape
    by_entry = inner.reshape(layers, entries, per, width, width)
    gated = out.down * (rate * out.gate).reshape(layers, entries, 1, per, width)
    coefficients, down = (
        jnp.einsum("lepkd,lekdf->lepkf", x, by_entry, precision=HIGHEST) for x in (out.coefficients, gated)
    )
    offset = out.bias + (out.mean - out.average) / out.spread
    return dataclasses.replace(
        out,
        coefficients=coefficients,
        down=down,
        gate=jnp.full_like(out.gate, 1 / rate),
        bias=jnp.einsum("lkd,lkdf->lkf", offset, inner, precision=HIGHEST),
        mean=out.average,
        covariance=mixed,
    )


def branches_of(linear: LinearParams, deviations: Array | None, width: int, key: Array) -> tuple[Branch, ...]:
    """The closed form in standardised features, with a residual whose gates are zero.

    Keys and values of the same layers that read the same blocks share the first layer of their residual.

    Args:
        linear: the fitted map.
        deviations: ``[2,U,F]`` standard deviations of the source blocks' features that keys and values read, or
            ``None``: one.
        width: W of each entry.
        key: of the random first and second layers.

    Returns:
        Branches in the order of the target layers.
    """
    found: list[list[tuple[int, BlockMap]]] = [[(0, block)] for block in linear.keys]
    for block in linear.values:
        partner = next((f for f in found if len(f) == 1 and _alike(f[0], block, linear.inputs)), None)
        if partner is None:
            found.append([(1, block)])
        else:
            partner.append((1, block))
    keys = jax.random.split(key, len(found))
    return tuple(_branch(maps, deviations, width, k) for maps, k in zip(found, keys, strict=True))


def _alike(first: tuple[int, BlockMap], block: BlockMap, inputs: str) -> bool:
    """Whether keys' and values' blocks read the same."""
    component, other = first
    same = component == 0 and inputs == "both" and other.layers == block.layers
    return same and np.array_equal(other.gather, block.gather)


def _branch(maps: Sequence[tuple[int, BlockMap]], deviations: Array | None, width: int, key: Array) -> Branch:
    component, first = maps[0]
    layers, entries, features = first.center.shape
    scale = jnp.ones_like(first.center)
    if deviations is not None:
        gathered = deviations[component][first.gather].reshape(layers, entries, features)
        scale = 1 / power_of_two(gathered)
    into, *outs = jax.random.split(key, 1 + len(maps))
    expand = jax.random.normal(into, (layers, entries, features, 2 * width), jnp.float32) * features**-0.5
    outputs = tuple(_output(n, block, first, scale, width, k) for (n, block), k in zip(maps, outs, strict=True))
    return Branch(first.gather, first.center, scale, expand, outputs, first.layers)


def _output(component: int, block: BlockMap, first: BlockMap, scale: Array, width: int, key: Array) -> Output:
    """One component; a centre of its own (of a weighted fit) goes into its mean."""
    layers, heads, channels = block.mean.shape
    entries, per = block.coefficients.shape[1], block.coefficients.shape[3]
    spread = power_of_two(jnp.sqrt(jnp.maximum(jnp.diagonal(block.covariance, axis1=-2, axis2=-1), 0)))
    units = spread.reshape(layers, entries, 1, per, channels)
    wide = block.coefficients.astype(jnp.float32)
    shift = jnp.einsum("lep,lepkd->lekd", first.center - block.center, wide, precision=HIGHEST)
    draw = jax.random.normal(key, (layers, entries, width, per, channels), jnp.float32)
    return Output(
        coefficients=wide / (scale[..., None, None] * units),
        bias=jnp.zeros_like(block.mean),
        down=draw * width**-0.5,
        gate=jnp.zeros_like(block.mean),
        mean=block.mean + shift.reshape(layers, heads, channels),
        spread=spread,
        average=block.mean,
        covariance=block.covariance,
        component=component,
    )


def power_of_two(x: Array) -> Array:
    """The nearest power of two, by which products are exact; one for zeros.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.translators.residual_params import power_of_two
        >>> power_of_two(jnp.array([0.0, 0.3, 5.0])).tolist()
        [1.0, 0.25, 4.0]
    """
    exponent = jnp.round(jnp.log2(jnp.where(x > 0, x, 1.0))).clip(-_LARGEST, _LARGEST)
    return jnp.ldexp(jnp.ones_like(x), exponent.astype(jnp.int32))
