"""The hand-off in one screen: source prefill, align, map, boundary, decode."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvx.alignment import Alignment, AlignmentReport, align
from kvx.cache.build import concrete
from kvx.cache.cache import KVCache
from kvx.cache.join import select_batch
from kvx.errors import KvxError
from kvx.mappers.base import CacheMap, after_prefix, check_alignment, check_models, context_of, describe, shapes
from kvx.mappers.receiver import context_start
from kvx.models.generate import stream
from kvx.models.prefill import prefill

if TYPE_CHECKING:
    from kvx.models.model import Model


def translate(
    mapper: CacheMap,
    cache: KVCache,
    alignment: Alignment,
    *,
    prefix: KVCache | None = None,
    receiver: KVCache | None = None,
) -> KVCache:
    """Turn a source cache of a context into a cache the target can continue from.

    The target's own cache of its prefix comes first, then the mapped context at the positions after it. Pure, jittable,
    differentiable, exportable.

    Args:
        mapper: a fitted map or a trained translator.
        cache: the source's cache of the context, all tokens kept (``prefill(source, tokens, keep="all")``).
        alignment: of the target's context tokens onto it, ``[B,T,R]``.
        prefix: the target's cache of its prefix, one row or B; ``None``: the one stored in the map.
        receiver: the target's own cache of the same context after that prefix, all tokens kept
            (``prefill(target, tokens, prefix, keep="all")``), for maps that fuse with it (``mapper.reads_target``).

    Returns:
        The target's cache: keys un-rotated, finite zeros in empty slots, dtype of the prefix (or of the map).

    Raises:
        KvxError: a cache or alignment that does not belong to this map or to each other; another prefix length for a
            target with learned positions; a receiver that is missing, or that the map does not read.

    Example:
        >>> import kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> from kvx.mappers import full_head
        >>> pairs = toy_pairs()
        >>> mapper, _ = kvx.fit(full_head(layers=2), pairs, progress=False)
        >>> batch = next(iter(pairs))
        >>> moved = kvx.translate(mapper, batch.source, batch.alignment)
        >>> moved.next_position().tolist() == (batch.source.next_position() + mapper.prefix_length).tolist()
        True
    """
    if mapper.source.layers and shapes(mapper.source) != shapes(cache.geometry):
        raise KvxError(
            f"this map reads caches of {describe(mapper.source)}, the given one has {describe(cache.geometry)}; "
            "translate caches of the model the map was fitted for."
        )
    check_alignment(cache, alignment)
    prefix = mapper.prefix if prefix is None else prefix
    if prefix is not None:
        _check_prefix(mapper, prefix)
    _check_receiver(mapper, receiver, alignment, prefix)
    return _translate(mapper, cache, alignment, prefix, receiver)


def _check_prefix(mapper: CacheMap, prefix: KVCache) -> None:
    pos = concrete(prefix.groups[0].pos)
    if not mapper.target.learned_positions or not mapper.target.layers or pos is None:
        return
    length = int(pos.max(initial=-1)) + 1
    if mapper.prefix_length != length:
        raise KvxError(
            f"a prefix of {length} tokens would shift the context, which this map was fitted to put after "
            f"{mapper.prefix_length}; the target has learned positions (GPT-2, OPT): they cannot be shifted."
        )


def _check_receiver(mapper: CacheMap, receiver: KVCache | None, alignment: Alignment, prefix: KVCache | None) -> None:
    """Refuse a receiver that is missing or not wanted, of another shape, or without a token of the context."""
    if receiver is None or not mapper.reads_target:
        if mapper.reads_target:
            raise KvxError(
                f"{mapper.method} fuses with the target's own cache of the context, which is missing; pass "
                "receiver=kvx.prefill(target, tokens, prefix, keep='all')."
            )
        if receiver is not None:
            raise KvxError(f"{mapper.method} does not read the target's own cache of the context; leave receiver out.")
        return
    if shapes(mapper.target) != shapes(receiver.geometry) or receiver.batch != alignment.pos.shape[0]:
        raise KvxError(
            f"the receiver has {describe(receiver.geometry)} and {receiver.batch} rows; this map writes "
            f"{describe(mapper.target)}, and the alignment has {alignment.pos.shape[0]} rows."
        )
    if any(g.ring or g.pos.shape[0] > 1 or g.pos.shape[2] > 1 for g in receiver.groups):
        raise KvxError("the receiver has dropped tokens in some layers or heads; prefill the target with keep='all'.")
    pos, start = concrete(alignment.pos), concrete(context_start(prefix))
    held = [concrete(group.pos) for group in receiver.groups]
    if pos is None or start is None or any(h is None for h in held):
        return
    wanted = np.where(pos >= 0, pos + start.reshape(-1, 1), -1)
    for row, want in enumerate(wanted):
        for here in held:
            lacks = np.setdiff1d(want[want >= 0], here[0, row, 0])  # type: ignore[index]
            if lacks.size:
                raise KvxError(
                    f"row {row}: the receiver holds no token at position {lacks[0]}, which the alignment feeds; let "
                    "the target read the whole context, after the same prefix."
                )


@jax.jit
def _translate(
    mapper: CacheMap, cache: KVCache, alignment: Alignment, prefix: KVCache | None, receiver: KVCache | None
) -> KVCache:
    made = context_of(mapper.method, mapper.params, cache, alignment, receiver=receiver, prefix=prefix)
    return after_prefix(prefix, made)


@dataclasses.dataclass(frozen=True)
class Handoff:
    """What a hand-off said, and what it cost.

    Attributes:
        text: the answer, cut before a stop string.
        tokens: ids the target generated.
        alignment: coverage of the context; ``None`` where it is not known.
        seconds: wall time of ``source`` (prefill), ``receiver`` (the target's own prefill, for maps that read it),
            ``translate`` and ``answer`` (boundary and decoding), compilation included where it happens.
    """

    text: str
    tokens: tuple[int, ...]
    alignment: AlignmentReport | None
    seconds: dict[str, float]

    def __str__(self) -> str:
        return self.text


def handoff(
    source: Model,
    target: Model,
    mapper: CacheMap,
    context: str,
    question: str,
    *,
    max_new_tokens: int = 64,
    stop: Sequence[str] = (),
    stop_tokens: Sequence[int] | None = None,
    rule: str | None = None,
    on_text: Callable[[str], Any] | None = None,
    **sampling: Any,
) -> Handoff:
    """Let the source read a context and the target go on from it: text to text.

    Args:
        source: reads ``context``; target: never sees it (unless ``mapper.reads_target``), prefills ``question`` and
            answers.
        mapper: fitted for the pair.
        context: what is handed over.
        question: the boundary, exactly as the target shall read it: turn marker or delimiter included.
        max_new_tokens: of the answer.
        stop: texts that end the answer; not part of it.
        stop_tokens: ids that end it; ``None``: the target's end tokens.
        rule: alignment rule; ``None``: the one the map was fitted with.
        on_text: called with each piece of text as soon as it is certain.
        sampling: ``temperature``, ``top_k``, ``top_p``, ``rng`` as for :func:`kvx.generate`; greedy by default.

    Returns:
        Text, tokens, coverage and times.

    Raises:
        KvxError: models the map was not fitted for, or without tokenizer; an empty context or question.

    Example:
        >>> import kvx
        >>> from kvx.models.random_model import byte_model
        >>> source, target = byte_model(), byte_model(3, seed=1)
        >>> pairs = kvx.pairs(source, target, "Ann lives in Rome. " * 20, max_length=64)
        >>> mapper, _ = kvx.fit(kvx.mappers.full_head(layers=1, ridge=0.1), pairs, held_out=0, progress=False)
        >>> answer = kvx.handoff(source, target, mapper, "Ann lives in Rome.", "\\nWhere?", max_new_tokens=4)
        >>> len(answer.tokens), answer.alignment.coverage
        (4, 1.0)
    """
    check_models(mapper, source, target)
    reader, writer = source._tokenizer(), target._tokenizer()
    if not context or not question:
        raise KvxError("a hand-off needs a context and a question, both not empty.")
    clock = _Clock()
    cache = clock("source", lambda: prefill(source, reader.encode_batch([context]), keep="all"))
    alignment = align(source, target, context, rule=rule or mapper.rule, embed=mapper.reads_embeddings)
    own = clock("receiver", lambda: own_cache(target, mapper, [context])) if mapper.reads_target else None
    moved = clock("translate", lambda: translate(mapper, cache, alignment, receiver=own))
    boundary = writer.encode(question, bos=False).tokens
    ends = writer.eos_ids if stop_tokens is None else tuple(stop_tokens)
    tokens: list[int] = []

    def ids() -> Iterator[int]:
        for token in stream(target, boundary, moved, max_new_tokens=max_new_tokens, stop_tokens=ends, **sampling):
            tokens.append(token)
            yield token

    text = clock("answer", lambda: _until(writer.decode_stream(ids()), tuple(stop), on_text or (lambda piece: None)))
    return Handoff(text, tuple(tokens), alignment.report, clock.seconds)


def own_cache(target: Model, mapper: CacheMap, contexts: Sequence[str], length: int | None = None) -> KVCache:
    """The target's own cache of some contexts after the map's prefix: the ``receiver`` of :func:`translate`.

    Args:
        target: with tokenizer; mapper: holds the prefix.
        contexts: B texts; length: tokens after padding, ``None``: the bucket of the longest.
    """
    tokens = target._tokenizer().encode_batch(contexts, bos=False, length=length)
    prefix = None if mapper.prefix is None else select_batch(mapper.prefix, [0] * len(contexts))
    return prefill(target, tokens, prefix, keep="all")


def _until(pieces: Iterator[str], stop: tuple[str, ...], on_text: Callable[[str], Any]) -> str:
    """Join pieces up to the first stop text; what could still become one is held back from ``on_text``.

    Example:
        >>> from kvx.pipeline import _until
        >>> seen = []
        >>> _until(iter(["one", "\\n", "two\\n", "\\nthree"]), ("\\n\\n",), seen.append), seen
        ('one\\ntwo', ['one', '\\ntwo'])
    """
    text, told = "", 0
    for piece in pieces:
        text += piece
        ends = [at for at in (text.find(s) for s in stop if s) if at >= 0]
        if ends:
            text = text[: min(ends)]
            break
        held = max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        if len(text) - held > told:
            on_text(text[told : len(text) - held])
            told = len(text) - held
    if len(text) > told:
        on_text(text[told:])
    return text


class _Clock:
    """Wall time of named steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, step: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = jax.block_until_ready(step())
        self.seconds[name] = time.perf_counter() - started
        return result
