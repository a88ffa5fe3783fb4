"""What every translator shares: the protocol of a trained method, and the map that training starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array

from kvx.alignment import Alignment
from kvx.cache.cache import KVCache
from kvx.mappers.base import CacheMap, digest_map
from kvx.mappers.linear import HIGHEST

Aux = dict[str, Array]
Sample = Sequence[tuple[Any, ...]]  # source caches, alignments, and receivers where the method reads them


@runtime_checkable
class Translator(Protocol):
    """A gradient-trained cache map as a frozen, hashable dataclass of settings; arrays live in ``params``.

    A trained translator is a :class:`kvx.mappers.base.CacheMap` like any other: its ``method`` is the translator.

    Attributes:
        needs: what :meth:`apply` reads beside the source's cache: ``"receiver"`` (the target's own cache of the
            context, each token in its slot of the alignment, at its own position), ``"rng"`` (noise, in training
            only), ``"step"`` (int32, steps done, in training only); empty: nothing. A method with a true ``rotated``
            gets both caches with rotated keys, and returns such keys.
    """

    needs: ClassVar[tuple[str, ...]]

    def init(self, key: Array, start: CacheMap, sample: Sample = ()) -> Any:
        """Parameters (a pytree) before training; ``sample``: source caches and alignments to measure scales on."""

    def apply(
        self, params: Any, cache: KVCache, alignment: Alignment, *, receiver: KVCache | None = None, rng: Any = None
    ) -> tuple[KVCache, Aux]:
        """The target's cache of the context alone, and penalties by name that training adds to its loss."""

    def trainable(self, params: Any) -> Any:
        """The parameters' structure with ``True`` where training may change an array."""

    def calibrate(self, params: Any, sample: Sample) -> Any:
        """The parameters with the statistics that controls need, measured anew on what they make now."""


def untrained(method: Translator, start: CacheMap, key: Array, sample: Sample = ()) -> CacheMap:
    """The map that training begins with: the method's first parameters in place of the closed form's.

    Args:
        method: settings of the translator.
        start: a fitted map of the pair, whose prefix, geometries, rule and provenance it keeps; a map that this very
            method has been trained to already is returned as it is.
        key: of what is drawn at random.
        sample: source caches with their alignments, of the kind that will be translated.

    Returns:
        The map.

    Raises:
        KvxError: a start that the method cannot begin from.

    Example:
        >>> import jax, kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> from kvx.translators import residual, untrained
        >>> mapper, _ = kvx.fit(kvx.mappers.full_head(layers=1), toy_pairs(), progress=False)
        >>> untrained(residual(width=8), mapper, jax.random.key(0)).method
        Residual(width=8, frozen=False, gate_rate=8.0)
    """
    if start.method == method:
        return start
    return with_params(start, method, method.init(key, start, sample), closed_form=start.digest)


def with_params(mapper: CacheMap, method: Any, params: Any, **facts: Any) -> CacheMap:
    """The map with another method and other parameters, its digest renewed and further facts recorded."""
    made = dataclasses.replace(mapper, params=params, method=method)
    known = {name: fact for name, fact in (mapper.provenance or {}).items() if name != "digest"}
    return dataclasses.replace(made, provenance={**known, **facts, "digest": digest_map(made)})


def product(spec: str, x: Array, weight: Array) -> Array:
    """A product in the type of the weights, its sums in float32."""
    return jnp.einsum(spec, x.astype(weight.dtype), weight, precision=HIGHEST, preferred_element_type=jnp.float32)
