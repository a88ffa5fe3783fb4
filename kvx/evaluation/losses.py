"""Losses of continuations, in every arm and by the source alone, with attention-output cosines on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvx.cache.cache import KVCache
from kvx.cache.ops import pad_to
from kvx.errors import KvxError
from kvx.evaluation.arms import ArmCaches, Setup, arms_of, boundary_tokens, build, read, shared_arms
from kvx.evaluation.batches import Batch
from kvx.evaluation.cosine import AttentionCosine, attention_cosine
from kvx.evaluation.items import Item, digest
from kvx.evaluation.metrics import nats_per_byte
from kvx.evaluation.report import SOURCE_ALONE, LossResult
from kvx.models.buckets import bucket_length
from kvx.models.decoder import forward
from kvx.models.model import Model
from kvx.models.prefill import token_logprobs
from kvx.models.tokenizer import Encoding

# Arms whose attention outputs are compared with the native ones. Their contexts stand where the native one stands
# (native mismatched: to within the difference of two nearly equal lengths), which gives the figure its scale.
COSINE_ARMS = ("translated", "native_mismatched", "constant", "random")


def measure_losses(
    setups: Sequence[Setup],
    items: Sequence[Item],
    *,
    batch_size: int,
    cosine: bool = True,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> list[tuple[LossResult, AttentionCosine | None]]:
    """Score every item's continuation in every arm.

    The continuation's target tokens except the first are scored, the same tokens in every arm, given what the arm sees
    before them. The source alone scores its own tokens of the same text over its own cache; ``nats_per_byte`` compares
    the two on the text that follows the first place where both have a token boundary.

    Args:
        setups: models, prefix and a map; further ones, with other maps of the same models, are measured in the arms
            that depend on the map (without its controls) and share the others.
        items: at least two, of different contexts.
        batch_size: items run together.
        cosine: also compare attention outputs.
        progress: called with (items done, items in all).

    Returns:
        For each setup losses, and the cosines or ``None``.

    Raises:
        KvxError: a continuation of fewer than two target tokens, or items that cannot be paired.
    """
    setup = setups[0]
    ours = [setup.target_tokenizer.encode(item.continuation, bos=False) for item in items]
    theirs = [setup.source_tokenizer.encode(item.continuation, bos=False) for item in items]
    check_scored(items, ours)
    batches = setup.plan([item.context for item in items], batch_size)
    widths = [bucket_length(max(len(e) for e in side)) for side in (ours, theirs)]
    counts = np.array([len(e) - 1 for e in ours])
    nats = [{arm: np.zeros(len(items)) for arm in arms_of(at)} for at in range(len(setups))]
    spans: dict[str, list[float]] = {"native": [], SOURCE_ALONE: [], "bytes": []}
    pooled: list[AttentionCosine | None] = [None] * len(setups)
    done = 0
    for batch in batches:
        rows = list(batch.items[: batch.real])
        reading = read(setup, [items[i].context for i in batch.items], batch)
        texts = [items[i].continuation for i in batch.items]
        tokens = boundary_tokens(setup.target_tokenizer, texts, widths[0])
        for at, one in enumerate(setups):
            caches = build(one, reading, batch, max(widths), arms_of(at))
            scores = {arm: logprobs(setup.target, tokens, cache) for arm, cache in caches.target.items()}
            for arm, found in scores.items():
                nats[at][arm][rows] = -found.sum(axis=1)[: batch.real] / counts[rows]
            if cosine:
                pooled[at] = _pooled(pooled[at], _cosines(one, tokens, caches, reading.native, batch))
            if at:
                continue
            own = boundary_tokens(setup.source_tokenizer, texts, widths[1])
            alone, native = logprobs(setup.source, own, caches.source), scores["native"]
            for row, i in enumerate(rows):
                _add_span(spans, items[i].continuation, (ours[i], native[row]), (theirs[i], alone[row]))
        done += batch.real
        progress(done, len(items))
    rates = {arm: nats_per_byte(spans[arm], spans["bytes"]) for arm in ("native", SOURCE_ALONE)}
    contexts, sha256 = len({item.context for item in items}), digest(items)
    return [
        (LossResult(shared_arms(nats, at), counts, rates, contexts, sha256), pooled[at]) for at in range(len(setups))
    ]


def _pooled(known: AttentionCosine | None, found: AttentionCosine) -> AttentionCosine:
    return found if known is None else known + found


def check_scored(items: Sequence[Item], encodings: Sequence[Encoding]) -> None:
    """Refuse items without a token to score.

    Args:
        items: passages; encodings: of their continuations, in the target's tokens.

    Raises:
        KvxError: a continuation of fewer than two target tokens.
    """
    for at, (item, encoding) in enumerate(zip(items, encodings, strict=True)):
        if len(encoding) < 2:
            raise KvxError(
                f"the continuation of item {at} ({item.continuation!r}) has {len(encoding)} target tokens; the first "
                "is never scored, so give at least two."
            )


def logprobs(model: Model, tokens: np.ndarray, cache: KVCache) -> np.ndarray:
    """:func:`kvx.models.prefill.token_logprobs`, as float64 ``[B,T]`` on the host."""
    return np.asarray(token_logprobs(model, jnp.asarray(tokens), cache), np.float64)


def _add_span(
    spans: dict[str, list[float]], text: str, ours: tuple[Encoding, np.ndarray], theirs: tuple[Encoding, np.ndarray]
) -> None:
    """Nats of both models on the text behind the first token end they share, and its bytes."""
    shared = np.intersect1d(ours[0].ends, theirs[0].ends)
    if len(shared) < 2:
        return
    start = shared[0]
    for arm, (encoding, scores) in (("native", ours), (SOURCE_ALONE, theirs)):
        spans[arm].append(-float(scores[: len(encoding)][encoding.ends > start].sum()))
    spans["bytes"].append(len(text[int(start) :].encode()))


def _cosines(setup: Setup, tokens: np.ndarray, caches: ArmCaches, native: KVCache, batch: Batch) -> AttentionCosine:
    """Cosines of one batch; rows that only fill the batch are blanked."""
    counted = tokens.copy()
    counted[batch.real :] = -1
    slots = next(iter(caches.target.values())).groups[0].slots
    native = pad_to(native, slots)
    queries = forward(setup.target, jnp.asarray(tokens), native, collect_queries=True).queries
    if queries is None:
        raise KvxError("the target gave no queries; forward(collect_queries=True) must collect them.")
    steps = np.cumsum(counted >= 0, axis=1) - 1
    positions = np.where(counted >= 0, np.asarray(native.next_position())[:, None] + steps, -1).astype(np.int32)
    others = {arm: caches.target[arm] for arm in COSINE_ARMS if arm in caches.target}
    first = setup.prefix_length
    return attention_cosine(setup.target.config, queries, jnp.asarray(positions), native, others, first=first)
