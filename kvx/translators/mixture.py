"""Mixture-of-Translators: several experts beside the closed form, and a router that says which translates a token."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvx.alignment import Alignment
from kvx.cache.cache import KVCache
from kvx.errors import KvxError
from kvx.mappers.base import CacheMap
from kvx.mappers.history import with_history_layers
from kvx.mappers.linear import LinearParams, block_widths
from kvx.translators.base import Aux, Sample
from kvx.translators.channels import Window, window_layers
from kvx.translators.mixture_apply import apply_mixture, output_sums
from kvx.translators.mixture_params import MixtureParams, Part, first_params
from kvx.translators.residual import GATE_RATE, feature_sums, summed
from kvx.translators.router import Router
from kvx.translators.statistics import calibrated

EXPERTS = ("mlp", "attention")
WIDTHS = {"mlp": 128, "attention": 1024}


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Settings of :func:`mixture`, which makes it and documents them."""

    experts: int
    top: int | None
    expert: str
    width: int
    depth: int
    heads: int
    window: Window | None
    causal: bool
    balance: float
    noise: float
    router_width: int
    frozen: bool
    gate_rate: float
    needs: ClassVar[tuple[str, ...]] = ("rng",)

    def init(self, key: Array, start: CacheMap, sample: Sample = ()) -> MixtureParams:
        """Parameters whose gates are zero, so that they make what ``start`` makes.

        Args:
            key: of the experts' and routers' random layers.
            start: a fitted linear map.
            sample: source caches and alignments whose deviations scale the features; none: features are as they are.

        Raises:
            KvxError: a start without linear coefficients, or a window beyond the models' channels.
        """
        linear = start.params
        if not isinstance(linear, LinearParams):
            raise KvxError(
                f"mixture starts from a fitted linear map, such as full_head or head_matched; got {start.method}."
            )
        window = window_layers(self.window, start.source.num_layers, start.target.num_layers)
        deviations = _moments(linear, sample)[1] if sample else None
        if sample and self.expert == "attention":
            whole = _moments(dataclasses.replace(linear, by_head=False), sample)
        else:
            read = with_history_layers(start.source, linear.history)
            widths = [max(block_widths(read, linear.inputs, i, False)) for i in (0, 1)]
            shape = (2, read.num_layers, max(widths))
            whole = jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32)
        return first_params(self, linear, deviations, whole, window, key)

    def apply(
        self,
        params: MixtureParams,
        cache: KVCache,
        alignment: Alignment,
        *,
        receiver: KVCache | None = None,
        rng: Any = None,
    ) -> tuple[KVCache, Aux]:
        """The target's cache of the context, and the penalty ``balance``; ``rng`` makes the choice of experts noisy."""
        return apply_mixture(self, params, cache, alignment, rng)

    def trainable(self, params: MixtureParams) -> MixtureParams:
        """``True`` for experts and routers, and for the linear part of their layers unless it is frozen."""
        learns = self.experts > 1

        def routes(router: Router | None) -> Router | None:
            if router is None:
                return None
            return dataclasses.replace(jax.tree.map(lambda _: learns, router), used=False)

        def part(one: Part) -> Part:
            made = jax.tree.map(lambda _: False, one)
            if one.gate is None:
                return made
            own = {name: getattr(one, name) is not None or None for name in ("expand", "down", "gate")}
            linear = not self.frozen
            return dataclasses.replace(made, **own, coefficients=linear, bias=linear, router=routes(one.router))

        banks = tuple(
            dataclasses.replace(
                jax.tree.map(lambda _: True, bank), gather=False, center=False, scale=False, router=routes(bank.router)
            )
            for bank in params.banks
        )
        return dataclasses.replace(params, parts=tuple(part(p) for p in params.parts), banks=banks)

    def calibrate(self, params: MixtureParams, sample: Sample) -> MixtureParams:
        """Mean and covariance of the outputs on a sample, for controls, and how much each expert is used."""
        found = [output_sums(self, params, cache, alignment) for cache, alignment in sample]
        if not found:
            return params
        parts = [calibrated(part, [outputs[n] for outputs, _ in found]) for n, part in enumerate(params.parts)]
        total = functools.reduce(jnp.add, [outputs[0][0] for outputs, _ in found])
        use = [
            functools.reduce(jnp.add, [x * outputs[0][0] for x, (outputs, _) in zip(column, found, strict=True)])
            / total
            for column in zip(*(shares for _, shares in found), strict=True)
        ]
        return _with_use(dataclasses.replace(params, parts=tuple(parts)), use)

    def figures(self, params: MixtureParams) -> dict[str, Any]:
        """What a report of training tells beside losses: ``experts``, the shares found by :meth:`calibrate`."""
        return {"experts": {name: router.used.tolist() for name, router in params.routers.items()}}


def mixture(
    *,
    experts: int = 2,
    top: int | None = 1,
    expert: str = "mlp",
    width: int | None = None,
    depth: int = 2,
    heads: int = 16,
    window: Window | None = None,
    causal: bool = True,
    balance: float = 0.01,
    noise: float = 0.5,
    router_width: int = 16,
    frozen: bool = False,
    gate_rate: float = GATE_RATE,
) -> Mixture:
    """N experts beside the linear map of a fitted mapper, and routers that choose among them token by token.

    ``y = mean + spread * (b + x W + rate g * sum_n w_n(x) e_n(x))``: W, b and the gates g start as in
    :func:`kvx.translators.residual`, so the first translator is the closed form. Keys and values have separate experts
    and routers. An expert is either

    * ``"mlp"``: a SwiGLU of the source features that the closed form reads, of each target layer by itself, with a
      router a layer; no token reads another one; or
    * ``"attention"``, as published: states of the source's layers, and ``depth`` stages in which a running state reads
      the tokens of each layer in turn (pre-norm cross-attention and feed-forward); the last stage's states are
      projected to every target layer. One router serves the whole window.

    Every expert is computed for every token, whatever the router chooses: routing saves no work here.

    Args:
        experts: N, of keys and as many of values.
        top: experts that translate a token; ``None``: all, weighted by the router.
        expert: ``"mlp"`` or ``"attention"``.
        width: channels inside an expert; ``None``: 128 (mlp) or 1024 (attention, as published).
        depth, heads: stages and attention heads of an attention expert.
        window: ``(start, size)`` of the channels (see :func:`kvx.translators.channels.channels`) that get experts;
            all other target layers keep the closed form, untrained. ``None``: all layers of both models.
        causal: attention experts read no later token, so a context can be extended; ``False``: they read the whole
            context, as published.
        balance: weight of the penalty on experts that translate more than others.
        noise: standard deviation of what is added to the logits where experts are chosen, in training.
        router_width: hidden channels of a router.
        frozen: leave the closed form's coefficients and biases as they are.
        gate_rate: multiplier of the gates.

    Returns:
        The method; train it with :func:`kvx.train`.

    Raises:
        KvxError: settings out of range.

    Example:
        >>> import jax, kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> pairs = toy_pairs()
        >>> mapper, _ = kvx.fit(kvx.mappers.full_head(layers=2), pairs, progress=False)
        >>> method = kvx.translators.mixture(experts=2, width=8)
        >>> start = kvx.translators.untrained(method, mapper, jax.random.key(0))
        >>> batch = next(iter(pairs))
        >>> ours, theirs = (kvx.translate(m, batch.source, batch.alignment) for m in (start, mapper))
        >>> bool((ours.keys(0) == theirs.keys(0)).all())
        True

    Reference: Mixture-of-Translators, arXiv 2607.28979.
    """
    _check(experts, top, expert, (depth, heads, router_width), balance, noise, gate_rate)
    channels = WIDTHS[expert] if width is None else width
    if channels < 1 or (expert == "attention" and channels % heads):
        raise KvxError(
            f"width is {channels}; expected at least one channel, and a multiple of {heads} attention heads."
        )
    top = None if top is None or top >= experts > 1 else top
    settings = (window, causal, float(balance), float(noise), router_width, frozen, float(gate_rate))
    return Mixture(experts, top, expert, channels, depth, heads, *settings)


def _check(
    experts: int,
    top: int | None,
    expert: str,
    sizes: tuple[int, int, int],
    balance: float,
    noise: float,
    gate_rate: float,
) -> None:
    if expert not in EXPERTS:
        raise KvxError(f"expert is {expert!r}; expected one of {', '.join(EXPERTS)}.")
    if experts < 1 or (top is not None and not 1 <= top <= experts):
        raise KvxError(f"{experts} experts of which {top} translate a token; expected 1 <= top <= experts, or None.")
    if min(sizes) < 1:
        raise KvxError(f"depth, heads and router_width are {sizes}; expected at least one of each.")
    if balance < 0 or noise < 0:
        raise KvxError(f"balance {balance} and noise {noise} must not be below zero.")
    if not 0 < gate_rate < float("inf"):
        raise KvxError(f"gate_rate is {gate_rate}; expected a number above zero.")


def utilisation(mapper: CacheMap, cache: KVCache, alignment: Alignment) -> dict[str, Array]:
    """Share of a context's tokens that each expert translates.

    Args:
        mapper: a map whose method is a mixture.
        cache: un-rotated source cache; alignment: of the target's tokens to it.

    Returns:
        For each router, by the component and the target layers it serves, float32 ``[L,N]``: one row a target layer
        (attention experts: one for the whole window), rows sum to one.

    Raises:
        KvxError: a map without experts.

    Example:
        >>> import jax, kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> from kvx.translators.mixture import mixture, utilisation
        >>> pairs = toy_pairs()
        >>> mapper, _ = kvx.fit(kvx.mappers.full_head(layers=2), pairs, progress=False)
        >>> start = kvx.translators.untrained(mixture(width=8), mapper, jax.random.key(0))
        >>> batch = next(iter(pairs))
        >>> {name: used.shape for name, used in utilisation(start, batch.source, batch.alignment).items()}
        {'keys of layers 0, 1': (2, 2), 'values of layers 0, 1': (2, 2)}
    """
    if not isinstance(mapper.method, Mixture):
        raise KvxError(f"only a mixture has experts to count; got {mapper.method}.")
    found = output_sums(mapper.method, mapper.params, cache, alignment)[1]
    return dict(zip(mapper.params.routers, found, strict=True))


def _moments(linear: LinearParams, sample: Sample) -> tuple[Array, Array]:
    """Mean and deviation ``[2,U,F]`` of the source blocks' features that keys and values read, over fed tokens."""
    count, first, second = summed([feature_sums(linear, cache, alignment) for cache, alignment in sample])
    mean = first / count
    return mean, jnp.sqrt(jnp.maximum(second / count - jnp.square(mean), 0))


def _with_use(params: MixtureParams, use: list[Array]) -> MixtureParams:
    """The parameters with the routers' shares, in the order of ``params.routers``."""
    left = iter(use)

    def told(owner: Any) -> Any:
        if owner.router is None:
            return owner
        return dataclasses.replace(owner, router=dataclasses.replace(owner.router, used=next(left)))

    if params.banks:
        return dataclasses.replace(params, banks=tuple(told(bank) for bank in params.banks))
    return dataclasses.replace(params, parts=tuple(told(part) for part in params.parts))
