"""Chains: a map from a to b, then one from b to c, as one map from a to c."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvx.alignment import Alignment
from kvx.cache.cache import KVCache
from kvx.cache.geometry import CacheGeometry
from kvx.errors import KvxError
from kvx.mappers.base import CacheMap, context_of, describe, shapes
from kvx.mappers.identity import Identity

if TYPE_CHECKING:
    from kvx.fitting.moments import Moments


@dataclasses.dataclass(frozen=True)
class Chain:
    """Methods applied one after the other; the parameters are a tuple with one entry a method."""

    methods: tuple[Any, ...]

    def reach(self, source: CacheGeometry, target: CacheGeometry) -> tuple[tuple[int, ...], ...] | None:
        """Links are fitted one by one."""
        return None

    def fit(self, moments: Moments, held_out: Moments | None = None) -> Any:
        """Links are fitted one by one.

        Raises:
            KvxError: always.
        """
        raise KvxError("a chain is not fitted as a whole; fit each map on its own pair, then chain them.")

    def apply(self, params: tuple[Any, ...], cache: KVCache, alignment: Alignment) -> KVCache:
        """All links but the last on the source's own tokens, the last one onto the target's.

        Affine maps commute with averages whose weights sum to one, so this equals resampling at every hop by the
        alignments that ``alignment`` is composed of.
        """
        here = _own_tokens(cache)
        for method, link in zip(self.methods[:-1], params[:-1], strict=True):
            cache = context_of(method, link, cache, here)
        return context_of(self.methods[-1], params[-1], cache, alignment)


def chain(*maps: CacheMap) -> CacheMap:
    """Compose fitted maps: ``chain(a_to_b, b_to_c)`` reads a's caches and writes c's.

    Translate with the composed alignment, :func:`kvx.alignment.compose` of a -> b and b -> c (or one of a -> c
    directly). The prefix is the last map's.

    Args:
        maps: in the order in which they are applied.

    Returns:
        One map; the identity for no maps, the map itself for one.

    Raises:
        KvxError: a map that does not write what the next one reads, one that reads its target's own cache, or one
            before the last that reads its target's embeddings.

    Example:
        >>> import kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> from kvx.mappers import full_head
        >>> mapper, _ = kvx.fit(full_head(layers=1, ridge=1e-3), toy_pairs(), progress=False)
        >>> kvx.chain(kvx.identity(), mapper) is mapper
        True
    """
    links = [m for m in maps if not isinstance(m.method, Identity)]
    if len(links) == 1:
        return links[0]
    if not links:
        return maps[0] if maps else CacheMap((), None, Identity())
    fused = [n for n, link in enumerate(links) if link.reads_target]
    if fused:
        raise KvxError(
            f"map {fused[0]} ({links[fused[0]].method}) fuses with its target's own cache of the context, which a "
            "chain does not have; translate with each map by itself."
        )
    looked = [n for n, link in enumerate(links[:-1]) if link.reads_embeddings]
    if looked:
        raise KvxError(
            f"map {looked[0]} ({links[looked[0]].method}) reads embeddings of its own target's tokens, which a chain "
            "does not have for any but its last map; translate with each map by itself."
        )
    for n, (first, second) in enumerate(zip(links[:-1], links[1:], strict=True)):
        if shapes(first.target) != shapes(second.source):
            raise KvxError(
                f"map {n} writes caches of {describe(first.target)}, but the next one reads {describe(second.source)}; "
                "chain maps whose models meet."
            )
        ours, theirs = ((m.provenance or {}).get(side) for m, side in ((first, "target"), (second, "source")))
        if ours is not None and theirs is not None and not ours.same_model(theirs):
            raise KvxError(
                f"map {n} was fitted for target {ours.model} ({ours.weights[:12]}), the next one for source "
                f"{theirs.model} ({theirs.weights[:12]}): other weights or tokenizer; chain maps whose models meet."
            )
    first, last = links[0], links[-1]
    facts = {
        "source": (first.provenance or {}).get("source"),
        "target": (last.provenance or {}).get("target"),
        "links": [link.digest for link in links],
    }
    params, methods = tuple(link.params for link in links), tuple(link.method for link in links)
    return CacheMap(params, last.prefix, Chain(methods), first.source, last.target, last.rule, facts)


def _own_tokens(cache: KVCache) -> Alignment:
    """The alignment of a cache's tokens onto themselves: same slots, same positions."""
    pos = cache.groups[0].pos[0, :, 0]
    slots = jnp.broadcast_to(jnp.arange(pos.shape[1], dtype=jnp.int32)[None], pos.shape)
    weight = (pos >= 0).astype(jnp.float32)[..., None]
    return Alignment(jnp.where(pos >= 0, slots, 0)[..., None], weight, pos)
