"""Losses of continuations, in every arm and by the source alone, with attention-output cosines on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvx.cache.cache import KVCache
from kvx.errors import KvxError
from kvx.evaluation.arms import ArmCaches, Setup, boundary_tokens, build
from kvx.evaluation.batches import Batch
from kvx.evaluation.cosine import AttentionCosine, attention_cosine
from kvx.evaluation.items import Item, digest
from kvx.evaluation.metrics import nats_per_byte
from kvx.evaluation.report import ARMS, SOURCE_ALONE, LossResult
from kvx.models.buckets import bucket_length
from kvx.models.decoder import forward
from kvx.models.model import Model
from kvx.models.prefill import token_logprobs
from kvx.models.tokenizer import Encoding

# Arms whose attention outputs are compared with the native ones. Their contexts stand where the native one stands
# (native mismatched: to within the difference of two nearly equal lengths), which gives the figure its scale.
COSINE_ARMS = ("translated", "native_mismatched", "constant", "random")


def measure_losses(
    setup: Setup,
    items: Sequence[Item],
    *,
    batch_size: int,
    cosine: bool = True,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> tuple[LossResult, AttentionCosine | None]:
    """Score every item's continuation in every arm.

    The continuation's target tokens except the first are scored, the same tokens in every arm, given what the arm sees
    before them. The source alone scores its own tokens of the same text over its own cache; ``nats_per_byte`` compares
    the two on the text that follows the first place where both have a token boundary.

    Args:
        setup: models, maps, prefix.
        items: at least two, of different contexts.
        batch_size: items run together.
        cosine: also compare attention outputs.
        progress: called with (items done, items in all).

    Returns:
        Losses, and the cosines or ``None``.

    Raises:
        KvxError: a continuation of fewer than two target tokens, or items that cannot be paired.
    """
    ours = [setup.target_tokenizer.encode(item.continuation, bos=False) for item in items]
    theirs = [setup.source_tokenizer.encode(item.continuation, bos=False) for item in items]
    _check(items, ours)
    batches = setup.plan([item.context for item in items], batch_size)
    widths = [bucket_length(max(len(e) for e in side)) for side in (ours, theirs)]
    nats = {arm: np.zeros(len(items)) for arm in ARMS}
    spans: dict[str, list[float]] = {"native": [], SOURCE_ALONE: [], "bytes": []}
    pooled: AttentionCosine | None = None
    done = 0
    for batch in batches:
        caches = build(setup, [items[i].context for i in batch.items], batch, room=max(widths))
        texts = [items[i].continuation for i in batch.items]
        tokens = boundary_tokens(setup.target_tokenizer, texts, widths[0])
        scores = {arm: _logprobs(setup.target, tokens, caches.target[arm]) for arm in ARMS}
        own = boundary_tokens(setup.source_tokenizer, texts, widths[1])
        alone = _logprobs(setup.source, own, caches.source)
        for row, i in enumerate(batch.items[: batch.real]):
            for arm in ARMS:
                nats[arm][i] = -scores[arm][row].sum() / (len(ours[i]) - 1)
            _add_span(spans, items[i].continuation, (ours[i], scores["native"][row]), (theirs[i], alone[row]))
        if cosine:
            found = _cosines(setup, tokens, caches, batch)
            pooled = found if pooled is None else pooled + found
        done += batch.real
        progress(done, len(items))
    rates = {arm: nats_per_byte(spans[arm], spans["bytes"]) for arm in ("native", SOURCE_ALONE)}
    counts = np.array([len(e) - 1 for e in ours])
    return LossResult(nats, counts, rates, len({item.context for item in items}), digest(items)), pooled


def _check(items: Sequence[Item], encodings: Sequence[Encoding]) -> None:
    """Every continuation has a token to score."""
    for at, (item, encoding) in enumerate(zip(items, encodings, strict=True)):
        if len(encoding) < 2:
            raise KvxError(
                f"the continuation of item {at} ({item.continuation!r}) has {len(encoding)} target tokens; the first "
                "is never scored, so give at least two."
            )


def _logprobs(model: Model, tokens: np.ndarray, cache: KVCache) -> np.ndarray:
    """float64 ``[B,T]`` on the host."""
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


def _cosines(setup: Setup, tokens: np.ndarray, caches: ArmCaches, batch: Batch) -> AttentionCosine:
    """Cosines of one batch; rows that only fill the batch are blanked."""
    counted = tokens.copy()
    counted[batch.real :] = -1
    native = caches.target["native"]
    queries = forward(setup.target, jnp.asarray(tokens), native, collect_queries=True).queries
    if queries is None:
        raise KvxError("the target gave no queries; forward(collect_queries=True) must collect them.")
    steps = np.cumsum(counted >= 0, axis=1) - 1
    positions = np.where(counted >= 0, np.asarray(native.next_position())[:, None] + steps, -1).astype(np.int32)
    others = {arm: caches.target[arm] for arm in COSINE_ARMS}
    first = setup.prefix_length
    return attention_cosine(setup.target.config, queries, jnp.asarray(positions), native, others, first=first)
