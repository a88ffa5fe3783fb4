"""Arms: for a batch of contexts, every cache that the target may see before the boundary.

The boundary itself (the question, the text that follows) is no part of a cache: the target prefills it natively in
every arm, right after whatever stands before it, so no delimiter is ever read from a translated cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvx.alignment import Alignment, align
from kvx.cache.build import empty
from kvx.cache.cache import CacheGroup, KVCache
from kvx.cache.join import select_batch
from kvx.cache.ops import pad_to
from kvx.errors import KvxError
from kvx.evaluation.controls import mean_cache, noise_cache
from kvx.evaluation.items import derange
from kvx.models.model import Model
from kvx.models.prefill import prefill
from kvx.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvx.mappers.base import CacheMap


@dataclasses.dataclass(frozen=True)
class Setup:
    """Both models, the map, its two controls, and the prefix: all that the arms share.

    Attributes:
        source, target: models with tokenizers.
        mapper: the map to judge; constant, random: its controls, ``None`` for a map without coefficients (then made
            from its caches).
        key: seed of the random control.
        prefix: the target's cache of its prefix, one row; ``None`` when there is no prefix.
        rule: alignment rule.
    """

    source: Model
    target: Model
    mapper: CacheMap
    constant: CacheMap | None
    random: CacheMap | None
    key: jax.Array
    prefix: KVCache | None
    rule: str

    @property
    def prefix_length(self) -> int:
        """Tokens of the prefix: where the context starts."""
        return 0 if self.prefix is None else int(self.prefix.next_position()[0])

    @property
    def source_tokenizer(self) -> Tokenizer:
        """The source's tokenizer."""
        return tokenizer_of(self.source, "source")

    @property
    def target_tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return tokenizer_of(self.target, "target")


def tokenizer_of(model: Model, role: str) -> Tokenizer:
    """The model's tokenizer.

    Raises:
        KvxError: it has none.
    """
    if model.tokenizer is None:
        raise KvxError(f"the {role} has no tokenizer, so texts cannot be measured; pass tokenizer= to load_model.")
    return model.tokenizer


@dataclasses.dataclass(frozen=True)
class Batch:
    """Items that are run together.

    Attributes:
        items: indices of the items, one a row; rows beyond ``real`` repeat earlier ones to keep one compiled shape.
        partner: for each row, the row whose cache it borrows in the mismatched arms.
        real: how many rows count.
    """

    items: tuple[int, ...]
    partner: tuple[int, ...]
    real: int


def plan(lengths: Sequence[int], contexts: Sequence[str], size: int) -> list[Batch]:
    """Batches of about ``size`` items, shortest first, in which every item has its partner.

    Args:
        lengths: tokens of each context.
        contexts: text of each context.
        size: rows of a batch, at least 2.

    Returns:
        Batches that cover every item once; all have the same number of rows, except that one may hold three for two.

    Raises:
        KvxError: ``size`` below 2, or items without a partner.

    Example:
        >>> from kvx.evaluation.arms import plan
        >>> plan([5, 6, 7, 8, 9, 9], list("abcdef"), 4)[1]
        Batch(items=(4, 5, 4, 5), partner=(1, 0, 1, 0), real=2)
    """
    if size < 2:
        raise KvxError(f"batch_size is {size}; every item is run beside its partner, so use at least 2.")
    batches: list[Batch] = []
    rows: list[int] = []
    partner: list[int] = []
    for group in [*derange(lengths, contexts), ()]:
        if rows and (not group or len(rows) + len(group) > size):
            real, count = len(rows), max(size, len(rows))
            again = [row % real for row in range(count)]
            batches.append(Batch(tuple(rows[r] for r in again), tuple(partner[r] for r in again), real))
            rows, partner = [], []
        partner += [len(rows) + (at + 1) % len(group) for at in range(len(group))]
        rows += group
    return batches


@dataclasses.dataclass(frozen=True)
class ArmCaches:
    """What every arm sees before the boundary, for one batch.

    Attributes:
        target: arm -> cache of the target, all with the same slots.
        source: the source's own cache of the contexts.
        alignment: of the target's context tokens to it.
    """

    target: Mapping[str, KVCache]
    source: KVCache
    alignment: Alignment


def build(setup: Setup, contexts: Sequence[str], partner: Sequence[int]) -> ArmCaches:
    """Read the contexts once with each model and make the caches of all arms.

    Args:
        setup: models, maps, prefix.
        contexts: B texts.
        partner: for each row, the row whose cache the mismatched arms borrow.

    Returns:
        Caches of B rows.
    """
    from kvx.pipeline import translate

    batch = len(contexts)
    source = prefill(setup.source, setup.source_tokenizer.encode_batch(contexts), keep="all")
    alignment = align(setup.source, setup.target, contexts, rule=setup.rule)
    prefix = repeat(setup.prefix, batch)
    native = prefill(setup.target, setup.target_tokenizer.encode_batch(contexts, bos=False), prefix, keep="all")
    translated = translate(setup.mapper, source, alignment, prefix=setup.prefix)
    dtype = native.groups[0].k.dtype
    none = prefix or empty(setup.target.config.geometry, batch, 1, dtype)
    caches = {
        "native": native,
        "native_mismatched": select_batch(native, partner),
        "none": none,
        "translated": translated,
        "mismatched": select_batch(translated, partner),
        "constant": translate(setup.constant, source, alignment, prefix=setup.prefix)
        if setup.constant
        else mean_cache(translated, setup.prefix_length),
        "random": translate(setup.random, source, alignment, prefix=setup.prefix)
        if setup.random
        else noise_cache(translated, setup.key, setup.prefix_length),
    }
    slots = max(group.slots for cache in caches.values() for group in cache.groups)
    same = {arm: pad_to(with_dtype(cache, dtype), slots) for arm, cache in caches.items()}
    return ArmCaches(same, source, alignment)


def repeat(cache: KVCache | None, batch: int) -> KVCache | None:
    """A cache of one row as ``batch`` equal rows."""
    return None if cache is None else select_batch(cache, [0] * batch)


def with_dtype(cache: KVCache, dtype: Any) -> KVCache:
    """The cache with keys and values in ``dtype``; positions stay integers."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, cache)


def stack_rows(caches: Sequence[KVCache]) -> KVCache:
    """Caches of one geometry and slot count as one batch: the rows of the first, then of the second, and so on.

    Raises:
        KvxError: caches that group their layers or slots differently.
    """
    shapes = [[(g.layers, g.ring, *g.k.shape[2:4]) for g in cache.groups] for cache in caches]
    if any(shape != shapes[0] for shape in shapes) or len({cache.rotated for cache in caches}) > 1:
        raise KvxError("these caches cannot be batched together: layers, slots or rotation differ; see pad_to.")

    def stack(groups: Sequence[CacheGroup]) -> CacheGroup:
        layers, heads = (max(g.pos.shape[axis] for g in groups) for axis in (0, 2))
        pos = [jnp.broadcast_to(g.pos, (layers, g.pos.shape[1], heads, g.slots)) for g in groups]
        k, v = (jnp.concatenate([getattr(g, name) for g in groups], axis=1) for name in ("k", "v"))
        filled = jnp.concatenate([g.next for g in groups])
        return dataclasses.replace(groups[0], k=k, v=v, pos=jnp.concatenate(pos, axis=1), next=filled)

    groups = [stack(group) for group in zip(*(cache.groups for cache in caches), strict=True)]
    return dataclasses.replace(caches[0], groups=tuple(groups))


def boundary_tokens(tokenizer: Tokenizer, texts: Sequence[str], length: int | None = None) -> np.ndarray:
    """Boundaries as int32 ``[B,T]``, without BOS, padded with -1 to a bucket that is at least ``length``."""
    from kvx.models.buckets import bucket_length

    rows = [tokenizer.encode(text, bos=False).ids for text in texts]
    tokens = np.full((len(rows), bucket_length(max(length or 1, *map(len, rows)))), -1, np.int32)
    for row, out in zip(rows, tokens, strict=True):
        out[: len(row)] = row
    return tokens
