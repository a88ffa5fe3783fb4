"""Pairs: what both models make of the same texts, streamed batch by batch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.alignment import RULES, Alignment, align
from kvx.cache.cache import KVCache
from kvx.cache.geometry import CacheGeometry
from kvx.cache.ops import slice_slots, unrotate_keys
from kvx.errors import KvxError
from kvx.fitting.passages import sequences
from kvx.fitting.reading import Probes, probes_of
from kvx.fitting.sensitivity import check_mode, sensitivity
from kvx.mappers.base import CacheMap
from kvx.mappers.embeddings import lagged, with_embedding_layers
from kvx.mappers.history import History, with_history, with_history_layers
from kvx.mappers.identity import Identity
from kvx.mappers.linear import aligned_rows, cache_rows
from kvx.models.buckets import bucket_length
from kvx.models.decoder import forward
from kvx.models.prefill import prefill
from kvx.typing import host, pytree, static

if TYPE_CHECKING:
    from kvx.models.model import Model

SORT_BATCHES = 8  # batches' worth of sequences that are sorted by length together


@pytree
class PairBatch:
    """B sequences as both models cached them.

    Attributes:
        source: un-rotated cache of the source, its own BOS included, all tokens kept.
        target: the target's cache of the context alone (the prefix before it was read and is left out), T slots.
        alignment: of the target's tokens onto the source's slots, ``[B,T,R]``.
        weight: float32 ``[B,T]``: 1 for a token to fit, 0 for padding and tokens that nothing feeds.
        sequences: host only: index of each row's sequence in the stream; -1 for rows that only fill the batch.
        sensitivity: float32 ``[L,B,K,T,2]`` of the target's keys and values, ``None`` unless :meth:`Pairs.weighed`.
        probes: the target's queries at 32 positions of each context, ``None`` unless :meth:`Pairs.weighed`.
        embeddings: tokens (the aligned one and those before it) whose embeddings are features too.
    """

    source: KVCache
    target: KVCache
    alignment: Alignment
    weight: Array
    sequences: tuple[int, ...] | None = host(default=None)
    sensitivity: Array | None = None
    probes: Probes | None = None
    embeddings: int = static(default=0)

    def __repr__(self) -> str:
        batch, length = getattr(self.weight, "shape", ("?", "?"))
        return f"PairBatch({batch} sequences of up to {length} target tokens)"


Stream = Callable[[Callable[[float], Any]], Iterator[PairBatch]]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Pairs:
    """Paired caches, made anew each time they are iterated over, and what they were made from.

    Attributes:
        batches: makes the stream; called with a function that is told how far it is, in percent.
        source, target: geometries.
        prefix: the target's cache of its prefix, one row, ``None`` without a prefix.
        rule: alignment rule.
        provenance: ``source`` and ``target`` provenance, ``None`` where a model has none.
        facts: settings and digests, plain JSON.
        sensitive: makes the stream that also holds sensitivities, from their mode; ``None`` where nothing can.
        embedding_dim: channels of the target's embeddings in the alignments; 0: they hold none.
    """

    batches: Stream
    source: CacheGeometry
    target: CacheGeometry
    prefix: KVCache | None = None
    rule: str = "covering"
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sensitive: Callable[[str], Stream] | None = None
    embedding_dim: int = 0

    def weighed(self, mode: str) -> Pairs:
        """The same pairs, whose batches also hold sensitivities (``"probes"`` or ``"all"``) and queries.

        Raises:
            KvxError: an unknown mode, or pairs that come from no model with queries.
        """
        check_mode(mode)
        if self.sensitive is None:
            raise KvxError("these pairs hold caches without queries, so nothing tells sensitivities; use kvx.pairs.")
        return dataclasses.replace(self, batches=self.sensitive(mode))

    def with_history(self, history: History) -> Pairs:
        """The same pairs, whose source caches also hold the layers of a history; see :mod:`kvx.mappers.history`."""
        if not history.lags:
            return self
        longer = self._changed(lambda batch: dataclasses.replace(batch, source=_longer(batch.source, history)))
        return dataclasses.replace(longer, source=with_history_layers(self.source, history))

    def with_embeddings(self, count: int) -> Pairs:
        """The same pairs, whose features also hold the target's embeddings of ``count`` tokens, the aligned one and
        those before it, as further source layers; see :mod:`kvx.mappers.embeddings`.

        Raises:
            KvxError: pairs whose alignments hold no embeddings.
        """
        if not count:
            return self
        source = with_embedding_layers(self.source, count, self.embedding_dim)
        longer = self._changed(lambda batch: dataclasses.replace(batch, embeddings=count))
        return dataclasses.replace(longer, source=source)

    def _changed(self, change: Callable[[PairBatch], PairBatch]) -> Pairs:
        """The same pairs, each batch changed."""

        def changed(batches: Stream) -> Stream:
            return lambda report: map(change, batches(report))

        sensitive = self.sensitive
        weighed = None if sensitive is None else lambda mode: changed(sensitive(mode))
        return dataclasses.replace(self, batches=changed(self.batches), sensitive=weighed)

    @property
    def reads_embeddings(self) -> bool:
        """Nothing reads embeddings before a map is fitted."""
        return False

    def unfitted(self) -> CacheMap:
        """A map of the pair without parameters, for methods that begin from none: prefix, rule, and provenance."""
        facts = {**self.provenance, "pairs": self.digest}
        return CacheMap((), self.prefix, Identity(), self.source, self.target, self.rule, facts)

    def __iter__(self) -> Iterator[PairBatch]:
        return self.batches(lambda percent: None)

    @property
    def digest(self) -> str:
        """SHA-256 of the texts, the models and all settings: equal digests mean equal pairs."""
        return hashlib.sha256(json.dumps(dict(self.facts), sort_keys=True).encode()).hexdigest()

    def __repr__(self) -> str:
        names = [getattr(self.provenance.get(side), "model", "?") for side in ("source", "target")]
        settings = ", ".join(f"{k} {v}" for k, v in self.facts.items() if not isinstance(v, str | dict))
        return f"Pairs({names[0]} -> {names[1]}, {self.rule}, {settings}, {self.digest[:8]})"


def pairs(
    source: Model,
    target: Model,
    texts: str | Iterable[str],
    *,
    max_length: int = 512,
    batch_size: int = 4,
    rule: str = "covering",
    prefix: Sequence[int] | None = None,
    max_tokens: int | None = None,
    join: bool = True,
) -> Pairs:
    """Read texts with both models and pair what they cache, token by token.

    The source reads each sequence as it always does (its BOS included); the target reads its prefix, then the sequence.
    Nothing is computed before iteration, and every iteration computes it again, a batch at a time.

    Args:
        source, target: models with tokenizers.
        texts: one text or many; longer ones are cut at word boundaries.
        max_length: tokens of a sequence in either model, prefix and BOS included.
        batch_size: sequences read together; a few of about the same length.
        rule: alignment rule: ``"covering"``, ``"causal"`` or ``"overlap"``.
        prefix: target tokens before every context; ``None``: its BOS, or else its end token.
        max_tokens: target tokens in all, at most.
        join: put consecutive short texts into one sequence, a blank line between them.

    Returns:
        The stream, re-iterable.

    Raises:
        KvxError: no text, an unknown rule, a model without tokenizer, or lengths that leave no room for a context.

    Example:
        >>> import kvx
        >>> from kvx.models.random_model import byte_model
        >>> pairs = kvx.pairs(byte_model(), byte_model(3, seed=1), "A short text. " * 20, max_length=64)
        >>> batch = next(iter(pairs))
        >>> batch.source.num_layers, batch.target.num_layers, batch.weight.shape[0]
        (2, 3, 4)
    """
    reader, writer = source._tokenizer(), target._tokenizer()
    texts = [texts] if isinstance(texts, str) else list(texts)
    ids = tuple(int(i) for i in (writer.prefix_ids if prefix is None else prefix))
    if rule not in RULES:
        raise KvxError(f"alignment rule {rule!r} is not known; expected one of {', '.join(RULES)}.")
    if not any(text.strip() for text in texts):
        raise KvxError("there is no text to pair; give at least one that is not blank.")
    if batch_size < 1 or (max_tokens is not None and max_tokens < 1):
        raise KvxError(f"batch_size {batch_size} and max_tokens {max_tokens} must be at least 1.")
    room = (max_length - int(reader.adds_bos), max_length - len(ids))
    if min(room) < 2:
        raise KvxError(f"max_length {max_length} leaves no room for a context; the prefix takes {len(ids)} tokens.")
    facts = {
        "texts": _digest_texts(texts),
        "models": {side: identity(model) for side, model in (("source", source), ("target", target))},
        "prefix": list(ids),
        "rule": rule,
        "max_length": max_length,
        "max_tokens": max_tokens,
        "batch_size": batch_size,
        "join": join,
    }
    total = sum(map(len, texts))
    cached = prefill(target, jnp.asarray([ids], jnp.int32), keep="all") if ids else None
    held = slice_slots(cached, 0, len(ids)) if cached is not None else None

    def stream(report: Callable[[float], Any], mode: str | None = None) -> Iterator[PairBatch]:
        found = sequences(
            texts,
            reader,
            writer,
            source_limit=room[0],
            target_limit=room[1],
            join=join,
            max_tokens=max_tokens,
        )
        tokens, characters = 0, 0
        for rows in _batched(found, batch_size):
            tokens += sum(count for _, _, count in rows)
            characters += sum(len(text) for _, text, _ in rows)
            yield read_batch(
                source, target, [text for _, text, _ in rows], [n for n, _, _ in rows], ids, rule, batch_size, mode
            )
            share = characters / max(total, 1)
            report(100.0 * min(1.0, share if max_tokens is None else max(share, tokens / max_tokens)))

    provenance = {"source": source.provenance, "target": target.provenance}
    geometries = source.config.geometry, target.config.geometry
    return Pairs(
        stream,
        *geometries,
        prefix=held,
        rule=rule,
        provenance=provenance,
        facts=facts,
        sensitive=lambda mode: functools.partial(stream, mode=mode),
        embedding_dim=target.params["embed"].shape[1],
    )


def read_batch(
    source: Model,
    target: Model,
    texts: Sequence[str],
    indices: Sequence[int],
    prefix: Sequence[int],
    rule: str,
    batch_size: int,
    mode: str | None = None,
) -> PairBatch:
    """Prefill a batch of texts with both models and align them; missing rows repeat the first with weight 0.

    With a ``mode`` of :func:`kvx.fitting.sensitivity.sensitivity` the target's queries weigh its own cache.
    """
    count = len(texts)
    texts = [*texts, *[texts[0]] * (batch_size - count)]
    rows = [source._tokenizer().encode_batch(texts), target._tokenizer().encode_batch(texts, bos=False)]
    ours, theirs = (np.asarray(row) for row in rows)
    lead = np.broadcast_to(np.asarray(prefix, np.int32), (len(texts), len(prefix)))
    slots = bucket_length(len(prefix) + theirs.shape[1])
    tokens = np.full((len(texts), slots), -1, np.int32)
    tokens[:, : len(prefix) + theirs.shape[1]] = np.concatenate([lead, theirs], axis=1)
    alignment = align(source, target, texts, rule=rule, length=slots - len(prefix), embed=True)
    read = prefill(source, jnp.asarray(ours), keep="all")
    whole, weights, probes = _read_target(target, jnp.asarray(tokens), slots, len(prefix), mode)
    written = slice_slots(whole, len(prefix), slots)
    real = jnp.asarray(np.arange(len(texts)) < count)[:, None]
    weight = ((alignment.pos >= 0) & real).astype(jnp.float32)
    filled = (*indices, *[-1] * (len(texts) - count))
    return PairBatch(read, written, alignment, weight, filled, weights, probes)


def _read_target(
    target: Model, tokens: Array, slots: int, prefix: int, mode: str | None
) -> tuple[KVCache, Array | None, Probes | None]:
    """The target's cache of prefix and context; when a mode is given, the context's sensitivities and probes too."""
    if mode is None:
        return prefill(target, tokens, keep="all", capacity=slots), None, None
    out = forward(target, tokens, keep="all", capacity=slots, collect_queries=True)
    positions = jnp.where(tokens >= 0, jnp.cumsum(tokens >= 0, axis=1, dtype=jnp.int32) - 1, -1)
    queries = jnp.asarray(out.queries)
    found = sensitivity(target.config, queries, positions, out.cache, mode=mode, first=prefix)
    return out.cache, found[:, :, :, prefix:], probes_of(target.config, queries, positions, first=prefix)


@functools.partial(jax.jit, static_argnames=("history",))
def _longer(cache: KVCache, history: History) -> KVCache:
    """:func:`kvx.mappers.history.with_history`, compiled."""
    return with_history(unrotate_keys(cache) if cache.rotated else cache, history)


def _batched(found: Iterable[tuple[str, int]], size: int) -> Iterator[list[tuple[int, str, int]]]:
    """Batches of (index, text, tokens), those of similar length together."""
    window: list[tuple[int, str, int]] = []

    def cut() -> Iterator[list[tuple[int, str, int]]]:
        window.sort(key=lambda row: (row[2], row[0]))
        for i in range(0, len(window), size):
            yield window[i : i + size]
        window.clear()

    for n, (text, tokens) in enumerate(found):
        window.append((n, text, tokens))
        if len(window) == SORT_BATCHES * size:
            yield from cut()
    yield from cut()


def _digest_texts(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def identity(model: Model) -> str:
    """Weights and tokenizer of a model, or its shape where it has no provenance."""
    owner = model.provenance
    return f"{owner.weights} {owner.tokenizer}" if owner is not None else repr(model.config)


def rows_of(batch: PairBatch) -> tuple[Array, Array, Array]:
    """Features ``[N,P]``, outputs ``[N,Q]`` and weights ``[N]`` of a batch, N = B T, float32."""
    source, target = (unrotate_keys(c) if c.rotated else c for c in (batch.source, batch.target))
    x, y = aligned_rows(source, batch.alignment), cache_rows(target)
    if batch.embeddings and batch.alignment.embeddings is not None:
        x = jnp.concatenate([x, lagged(batch.alignment.embeddings, batch.embeddings)], axis=-1)
    return x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]), batch.weight.reshape(-1)
