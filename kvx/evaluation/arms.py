"""Arms: for a batch of contexts, every cache that the target may see before the boundary.

The boundary itself (the question, the text that follows) is no part of a cache: the target prefills it natively in
every arm, right after whatever stands before it, so no delimiter is ever read from a translated cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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
from kvx.evaluation.batches import Batch, plan
from kvx.evaluation.controls import mean_cache, noise_cache
from kvx.evaluation.report import ARMS
from kvx.mappers.receiver import laid_under
from kvx.models.buckets import bucket_length
from kvx.models.model import Model
from kvx.models.prefill import prefill
from kvx.models.replay import ReplayPlan, replay
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
        replay: what of the context the target reads again over the translated cache; ``None``: nothing. The prefix has
            no free slots then.
    """

    source: Model
    target: Model
    mapper: CacheMap
    constant: CacheMap | None
    random: CacheMap | None
    key: jax.Array
    prefix: KVCache | None
    rule: str
    replay: ReplayPlan | None = None

    @property
    def prefix_length(self) -> int:
        """Tokens of the prefix: where the context starts."""
        return 0 if self.prefix is None else int(self.prefix.next_position()[0])

    def plan(self, contexts: Sequence[str], size: int) -> list[Batch]:
        """Batches of contexts; see :func:`kvx.evaluation.batches.plan`."""
        token_bytes = len(ARMS) * self.target.config.geometry.cache_bytes(1, self.target.dtype.itemsize)
        return plan(self.source_tokenizer, self.target_tokenizer, contexts, size, token_bytes)

    @property
    def source_tokenizer(self) -> Tokenizer:
        """The source's tokenizer."""
        return tokenizer_of(self.source, "source")

    @property
    def target_tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return tokenizer_of(self.target, "target")


MAP_ARMS = ("translated", "mismatched")  # what a further map of the same pair is measured in
SHARED_ARMS = ("native", "native_mismatched", "none")  # what no map has a part in


def arms_of(at: int) -> tuple[str, ...]:
    """Arms to run for the first map (0), and for further ones."""
    return MAP_ARMS if at else tuple(ARMS)


def shared_arms(found: Sequence[Mapping[str, Any]], at: int) -> dict[str, Any]:
    """Arms of one map: its own, and those that it shares with the first."""
    return {arm: found[0][arm] for arm in SHARED_ARMS} | dict(found[at])


def tokenizer_of(model: Model, role: str) -> Tokenizer:
    """The model's tokenizer.

    Raises:
        KvxError: it has none.
    """
    if model.tokenizer is None:
        raise KvxError(f"the {role} has no tokenizer, so texts cannot be measured; pass tokenizer= to load_model.")
    return model.tokenizer


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


@dataclasses.dataclass(frozen=True)
class Reading:
    """One batch of contexts, read once with each model: what no map has a part in.

    Attributes:
        source: the source's own cache; alignment: of the target's context tokens to it.
        native: the target's own cache, prefix included; tokens: int ``[B,T]`` of the contexts, the target's.
    """

    source: KVCache
    alignment: Alignment
    native: KVCache
    tokens: Any


def read(setup: Setup, contexts: Sequence[str], batch: Batch) -> Reading:
    """Read the contexts of a batch's rows with both models."""
    length = batch.length
    source = prefill(setup.source, setup.source_tokenizer.encode_batch(contexts, length=length), capacity=length)
    alignment = align(setup.source, setup.target, contexts, rule=setup.rule, length=length, embed=True)
    prefix = repeat(setup.prefix, len(contexts))
    tokens = setup.target_tokenizer.encode_batch(contexts, bos=False, length=length)
    native = prefill(setup.target, tokens, prefix, capacity=_held(prefix) + length)
    return Reading(source, alignment, native, tokens)


def build(setup: Setup, reading: Reading, batch: Batch, room: int, arms: Sequence[str] = tuple(ARMS)) -> ArmCaches:
    """Make the caches of arms from contexts that have been read.

    Args:
        setup: models, maps, prefix.
        reading: of the batch's contexts.
        batch: who borrows from whom, and the padded length.
        room: free slots after the context, for the boundary (and an answer).
        arms: which arms.

    Returns:
        Caches with the batch's rows, all of one shape.
    """
    source, native = reading.source, reading.native
    first, prefix = setup.prefix_length, repeat(setup.prefix, native.batch)
    dtype = native.groups[0].k.dtype
    translated = _moved(setup, setup.mapper, reading)
    makers: dict[str, Callable[[], KVCache]] = {
        "native": lambda: native,
        "native_mismatched": lambda: select_batch(native, batch.partner),
        "none": lambda: prefix or empty(setup.target.config.geometry, native.batch, 1, dtype),
        "translated": lambda: translated,
        "mismatched": lambda: _mismatched(setup, reading, batch, translated),
    }
    if setup.constant is None or setup.random is None:
        makers["constant"] = lambda: mean_cache(translated, first)
        makers["random"] = lambda: noise_cache(translated, setup.key, first)
    else:
        constant, random = setup.constant, setup.random
        makers["constant"] = lambda: _moved(setup, constant, reading)
        makers["random"] = lambda: _moved(setup, random, reading)
    slots = _held(prefix) + batch.length + room
    same = {arm: pad_to(with_dtype(makers[arm](), dtype), slots) for arm in arms}
    return ArmCaches(same, pad_to(source, batch.length + room), reading.alignment)


def _held(prefix: KVCache | None) -> int:
    """Slots of the prefix."""
    return prefix.groups[0].slots if prefix else 0


def _moved(setup: Setup, mapper: CacheMap, reading: Reading) -> KVCache:
    from kvx.pipeline import translate

    own = reading.native if mapper.reads_target else None
    moved = translate(mapper, reading.source, reading.alignment, prefix=setup.prefix, receiver=own)
    return moved if setup.replay is None else replay(setup.target, reading.tokens, moved, setup.replay)


def _mismatched(setup: Setup, reading: Reading, batch: Batch, translated: KVCache) -> KVCache:
    """The translated cache of another item; where the target reads the context itself, its own reading of this item
    with the source's cache of the other one, so that only what the source brings is exchanged."""
    if not (setup.mapper.reads_target or setup.replay):
        return select_batch(translated, batch.partner)
    other = select_batch(reading.source, batch.partner)
    under = dataclasses.replace(reading, source=other, alignment=laid_under(reading.alignment, other))
    return _moved(setup, setup.mapper, under)


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
    rows = [tokenizer.encode(text, bos=False).ids for text in texts]
    tokens = np.full((len(rows), bucket_length(max(length or 1, *map(len, rows)))), -1, np.int32)
    for row, out in zip(rows, tokens, strict=True):
        out[: len(row)] = row
    return tokens
