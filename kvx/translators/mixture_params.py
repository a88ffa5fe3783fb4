"""Parameters of the mixture: the closed form in standard units, experts beside it, and what controls need."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.cache.geometry import CacheGeometry
from kvx.mappers.base import EntryReport
from kvx.mappers.controls import scrambling
from kvx.mappers.history import NONE, History
from kvx.mappers.linear import HIGHEST, BlockMap, LinearParams
from kvx.translators.attention_expert import AttentionExperts
from kvx.translators.residual_params import power_of_two
from kvx.translators.router import Router
from kvx.typing import host, pytree, static

if TYPE_CHECKING:
    from kvx.translators.mixture import Mixture


@pytree
class Part:
    """Keys or values of like target layers: ``y = mean + spread (b + x W + rate g sum_n w_n e_n)``.

    Attributes:
        gather: int32 ``[L,E,k]``: the source blocks that each entry reads.
        center, scale: ``[L,E,P]``: features are ``(x - center) scale``; never trained. Scales are powers of two.
        coefficients: ``[L,E,P,K/E,D]`` of standardised features, in units of ``spread``; bias: ``[L,K,D]``.
        gate: ``[L,K,D]`` of what the experts add, zero before training; absent outside the window.
        mean, spread: ``[L,K,D]`` of the fitted outputs; never trained. Spreads are powers of two.
        average, covariance: ``[L,K,D]``, ``[L,K,D,D]`` of what the translator makes, for controls.
        turn: ``[L,K,D,D]``, by which the random control multiplies deviations from the average; else absent.
        expand: ``[L,N,E,P,2W]`` first layer of the MLP experts: W swished channels, then their W factors.
        down: ``[L,N,E,X,K/E,D]`` last layer of the experts, from W channels of an MLP or all states of an attention
            expert.
        router: of the MLP experts, one a layer.
        component: 0 keys, 1 values; layers: the L target layers, ascending.
    """

    gather: Array
    center: Array
    scale: Array
    coefficients: Array
    bias: Array
    mean: Array
    spread: Array
    average: Array
    covariance: Array
    turn: Array | None
    gate: Array | None
    expand: Array | None
    down: Array | None
    router: Router | None
    component: int = static()
    layers: tuple[int, ...] = static()


@pytree
class MixtureParams:
    """Parameters of :class:`kvx.translators.mixture.Mixture`.

    Attributes:
        parts: see :class:`Part`; those outside the window are the closed form and never trained.
        banks: attention experts of keys and of values, or nothing.
        target, inputs, by_head, dtype, history: as in :class:`kvx.mappers.linear.LinearParams`.
        rate: multiplier of the gates.
        report: host only: how each entry of the closed form was fitted.
    """

    parts: tuple[Part, ...]
    banks: tuple[AttentionExperts, ...]
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
        controls = [(part.average, part.covariance, part.turn) for part in self.parts]
        return _bytes((self.parts, self.banks)) - _bytes(controls)

    @property
    def parameters(self) -> int:
        """Numbers that a translation reads, but for the tables of what is read."""
        owners: tuple[Part | AttentionExperts, ...] = (*self.parts, *self.banks)
        unread = [(p.average, p.covariance, p.turn) for p in self.parts], [o.gather for o in owners]
        told = [o.router.used for o in owners if o.router is not None]
        return _numbers((self.parts, self.banks)) - _numbers((unread, told))

    def flops(self, tokens: int) -> int:
        """Operations of translating so many tokens: every expert is computed for every token."""
        owners: tuple[Part | AttentionExperts, ...] = (*self.parts, *self.banks)
        matrices = [(p.coefficients, p.expand, p.down, p.turn) for p in self.parts]
        routers = [(o.router.enter, o.router.leave) for o in owners if o.router is not None]
        return 2 * tokens * _numbers((matrices, routers)) + sum(bank.flops(tokens) for bank in self.banks)

    @property
    def routers(self) -> dict[str, Router]:
        """Every router, by the component and the target layers whose experts it chooses among."""
        sides = ("keys", "values")
        if self.banks:
            return dict(zip(sides, (bank.router for bank in self.banks), strict=True))
        named = {f"{sides[p.component]} of layers {_range(p.layers)}": p.router for p in self.parts}
        return {name: router for name, router in named.items() if router is not None}

    def silenced(self, key: Array) -> MixtureParams:
        """The constant control: every token gets the average output, whatever was read."""

        def silence(part: Part, _: Array) -> Part:
            return dataclasses.replace(
                part,
                coefficients=jnp.zeros_like(part.coefficients),
                bias=jnp.zeros_like(part.bias),
                covariance=jnp.zeros_like(part.covariance),
                gate=None if part.gate is None else jnp.zeros_like(part.gate),
                mean=part.average,
                turn=None,
            )

        return self._changed(silence, key)

    def scrambled(self, key: Array) -> MixtureParams:
        """The random control: deviations from the average output times a random matrix that keeps each variance."""

        def scramble(part: Part, key: Array) -> Part:
            draw = scrambling(part.covariance, key)
            turn = draw if part.turn is None else _mixed("lkde,lkef->lkdf", part.turn, draw)
            covariance = _mixed("lkde,lkdf,lkfg->lkeg", draw, part.covariance, draw)
            return dataclasses.replace(part, turn=turn, covariance=covariance)

        return self._changed(scramble, key)

    def _changed(self, change, key: Array) -> MixtureParams:  # type: ignore[no-untyped-def]
        keys = jax.random.split(key, len(self.parts))
        made = tuple(change(part, k) for part, k in zip(self.parts, keys, strict=True))
        return dataclasses.replace(self, parts=made, report=None)


def _numbers(tree: Any) -> int:
    return sum(a.size for a in jax.tree.leaves(tree))


def _bytes(tree: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def _mixed(spec: str, *arrays: Array) -> Array:
    return jnp.einsum(spec, *arrays, precision=HIGHEST)


def _range(layers: Sequence[int]) -> str:
    dense = len(layers) > 2 and layers[-1] - layers[0] == len(layers) - 1
    return f"{layers[0]}-{layers[-1]}" if dense else ", ".join(map(str, layers))


def first_params(
    method: Mixture,
    linear: LinearParams,
    deviations: Array | None,
    whole: tuple[Array, Array],
    window: tuple[Sequence[int], Sequence[int]],
    key: Array,
) -> MixtureParams:
    """The closed form, and experts whose gates are zero.

    Args:
        method: settings.
        linear: the fitted map.
        deviations: ``[2,U,F]`` of the source blocks' features that keys and values read, or ``None``: one.
        whole: mean and deviation, ``[2,S,F]`` each, of the features of whole source layers, for attention experts.
        window: source layers that attention experts read, and target layers that get experts.
        key: of what is drawn.
    """
    sources, inside = window
    parts: list[Part] = []
    for component, maps in enumerate((linear.keys, linear.values)):
        for block in maps:
            for layers, into in _split(block.layers, inside):
                rows = np.array([block.layers.index(i) for i in layers])
                cut = dataclasses.replace(jax.tree.map(lambda x, rows=rows: x[rows], block), layers=layers)
                key, own = jax.random.split(key)
                part = _part(component, cut, deviations)
                parts.append(_with_experts(method, part, len(sources), own) if into else part)
    banks: tuple[AttentionExperts, ...] = ()
    if method.expert == "attention":
        keys = jax.random.split(key, 2)
        banks = tuple(AttentionExperts.create(method, sources, whole[0][i], whole[1][i], keys[i]) for i in (0, 1))
    settings = (
        linear.target,
        linear.inputs,
        linear.by_head,
        linear.dtype,
        method.gate_rate,
        linear.history,
        linear.report,
    )
    return MixtureParams(tuple(parts), banks, *settings)


def _split(layers: tuple[int, ...], inside: Sequence[int]) -> list[tuple[tuple[int, ...], bool]]:
    """The layers outside a window and those inside, where there are any."""
    sides = [(tuple(i for i in layers if (i in inside) == into), into) for into in (False, True)]
    return [(chosen, into) for chosen, into in sides if chosen]


def _part(component: int, block: BlockMap, deviations: Array | None) -> Part:
    """One map in standard units; powers of two change no product."""
    layers, entries, features = block.center.shape
    channels = block.mean.shape[2]
    scale = jnp.ones_like(block.center)
    if deviations is not None:
        scale = 1 / power_of_two(deviations[component][block.gather].reshape(layers, entries, features))
    spread = power_of_two(jnp.sqrt(jnp.maximum(jnp.diagonal(block.covariance, axis1=-2, axis2=-1), 0)))
    units = spread.reshape(layers, entries, 1, -1, channels)
    return Part(
        gather=block.gather,
        center=block.center,
        scale=scale,
        coefficients=block.coefficients.astype(jnp.float32) / (scale[..., None, None] * units),
        bias=jnp.zeros_like(block.mean),
        mean=block.mean,
        spread=spread,
        average=block.mean,
        covariance=block.covariance,
        turn=None,
        gate=None,
        expand=None,
        down=None,
        router=None,
        component=component,
        layers=block.layers,
    )


def _with_experts(method: Mixture, part: Part, sources: int, key: Array) -> Part:
    """The part with closed gates, and with MLP experts or the last layers of attention experts."""
    layers, entries, features, per, channels = part.coefficients.shape
    into, out, route = jax.random.split(key, 3)
    count, width = method.experts, method.width
    gate = jnp.zeros_like(part.bias)
    if method.expert == "attention":
        heads, states = part.mean.shape[1], width * sources
        down = jax.random.normal(out, (layers, count, 1, states, heads, channels), jnp.float32) * states**-0.5
        return dataclasses.replace(part, gate=gate, down=down)
    expand = jax.random.normal(into, (layers, count, entries, features, 2 * width), jnp.float32) * features**-0.5
    down = jax.random.normal(out, (layers, count, entries, width, per, channels), jnp.float32) * width**-0.5
    router = Router.create(route, layers, entries * features, method.router_width, count)
    return dataclasses.replace(part, gate=gate, expand=expand, down=down, router=router)
