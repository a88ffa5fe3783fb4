"""What one step of training reads: source caches, their alignments, and suffixes with what is known about them."""

from __future__ import annotations

from jaxtyping import Array

from kvx.alignment import Alignment
from kvx.cache.cache import KVCache
from kvx.typing import pytree


@pytree
class Contexts:
    """B contexts as the models read them.

    Attributes:
        source: un-rotated cache of the source, all tokens kept.
        alignment: of the target's context tokens to it.
        native: the target's own cache of the context (without the prefix), when a loss compares with it.
        sensitivity: float32 ``[L,B,K,T,2]`` of it, when a loss weighs by it.
        tokens: int32 ``[B,T]`` of the context in the target, -1 for padding, when a loss replays it.
    """

    source: KVCache
    alignment: Alignment
    native: KVCache | None = None
    sensitivity: Array | None = None
    tokens: Array | None = None


@pytree
class Suffix:
    """B suffixes, U tokens each, of which up to N are scored.

    Attributes:
        tokens: int32 ``[B,U]``, -1 for padding.
        where: int32 ``[B,N]``: the token whose hidden state predicts each scored one; 0 at padding.
        targets: int32 ``[B,N]``: the scored tokens; -1 at padding.
        native, none, crossed: float32 ``[B,N]`` log-probabilities of the scored tokens over the target's own cache,
            over its prefix alone, and over its own cache of another context; 0 at padding; absent: not measured.
        hidden: ``[B,N,M]`` the target's hidden states over its own cache, when a loss distils them.
        trail: un-rotated keys and values ``[L,B,K,U,D]`` that the target makes of the tokens over its own cache, zeros
            and position -1 at padding, when a loss compares with them.
    """

    tokens: Array
    where: Array
    targets: Array
    native: Array | None = None
    none: Array | None = None
    crossed: Array | None = None
    hidden: Array | None = None
    trail: KVCache | None = None


@pytree
class TrainBatch:
    """B examples of one shape; rows that only fill the batch have no scored token.

    Attributes:
        source, alignment, native, sensitivity, tokens: as in :class:`Contexts`.
        suffix: see :class:`Suffix`.
        variance: float32 ``[L,2,K]`` of the target's keys and values, mean over channels, when ``native`` is given.
        trail_variance: the same of those in ``suffix.trail``.
    """

    source: KVCache
    alignment: Alignment
    suffix: Suffix
    native: KVCache | None = None
    sensitivity: Array | None = None
    variance: Array | None = None
    tokens: Array | None = None
    trail_variance: Array | None = None
