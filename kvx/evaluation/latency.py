"""Latency of a hand-off, warm and cold, against the target's own prefill: medians on this machine."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvx.alignment import align
from kvx.cache.cache import KVCache
from kvx.evaluation.arms import Setup, boundary_tokens
from kvx.models.prefill import next_token_logits, prefill
from kvx.models.replay import replay

REPEATS = 5


@dataclasses.dataclass(frozen=True)
class LatencyRow:
    """Median seconds of each step at one context length, batch 1.

    Attributes:
        context_tokens: target tokens of the context.
        boundary_tokens: target tokens of the boundary.
        source_prefill: the source reads the context.
        align: text to alignment, on the host.
        translate: source cache to target cache; with the target's prefill of the context for maps that read its own
            cache, and with the replay where there is one.
        boundary: the target prefills the boundary over the cache, up to the first answer token.
        native_prefill: the target reads the context itself.
    """

    context_tokens: int
    boundary_tokens: int
    source_prefill: float
    align: float
    translate: float
    boundary: float
    native_prefill: float

    @property
    def warm(self) -> float:
        """Seconds to the first answer token when the source cache exists."""
        return self.align + self.translate + self.boundary

    @property
    def cold(self) -> float:
        """Seconds to the first answer token when the source still has to read the context."""
        return self.source_prefill + self.warm

    @property
    def native(self) -> float:
        """Seconds to the first answer token when the target reads the context itself."""
        return self.native_prefill + self.boundary

    @property
    def warm_speedup(self) -> float:
        """Native over warm: above 1, the hand-off is faster."""
        return self.native / self.warm

    @property
    def cold_speedup(self) -> float:
        """Native over cold."""
        return self.native / self.cold


@dataclasses.dataclass(frozen=True)
class Latency:
    """Latency at the evaluated context lengths, shortest first."""

    rows: tuple[LatencyRow, ...]
    device: str

    @property
    def warm_speedup(self) -> float:
        """Warm speed-up at the longest context measured."""
        return self.rows[-1].warm_speedup

    @property
    def cold_speedup(self) -> float:
        """Cold speed-up at the longest context measured."""
        return self.rows[-1].cold_speedup

    def to_json(self) -> dict[str, Any]:
        """Seconds and speed-ups of every row."""
        derived = ("warm", "cold", "native", "warm_speedup", "cold_speedup")
        rows = [{**dataclasses.asdict(row), **{name: getattr(row, name) for name in derived}} for row in self.rows]
        return {"device": self.device, "rows": rows}


def median_seconds(step: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median wall time of ``step`` after one untimed call (which pays for compilation), results awaited.

    Example:
        >>> from kvx.evaluation.latency import median_seconds
        >>> median_seconds(lambda: 1, repeats=3) < 0.1
        True
    """
    jax.block_until_ready(step())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(step())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_latency(
    setup: Setup, contexts: Sequence[str], boundary: str, *, progress: Callable[[int, int], Any], repeats: int = REPEATS
) -> Latency:
    """Time a warm and a cold hand-off of each context, batch 1, and the target's own prefill of it.

    Args:
        setup: models, maps, prefix.
        contexts: texts to hand over, one row of the result each.
        boundary: text that the target prefills after each.
        progress: called with (contexts done, contexts in all).
        repeats: timed calls of each step.

    Returns:
        Medians, shortest context first.
    """
    rows = []
    for done, context in enumerate(contexts, 1):
        rows.append(_row(setup, context, boundary, repeats))
        progress(done, len(contexts))
    device = jax.devices()[0]
    rows.sort(key=lambda row: row.context_tokens)
    return Latency(tuple(rows), f"{device.platform}: {device.device_kind}")


def _row(setup: Setup, context: str, boundary: str, repeats: int) -> LatencyRow:
    """All steps for one context."""
    from kvx.pipeline import translate

    source_tokens = setup.source_tokenizer.encode_batch([context])
    target_tokens = setup.target_tokenizer.encode_batch([context], bos=False)
    last = jnp.asarray(boundary_tokens(setup.target_tokenizer, [boundary]))
    alignment = align(setup.source, setup.target, context, rule=setup.rule, embed=setup.mapper.reads_embeddings)
    cache = prefill(setup.source, source_tokens, keep="all")

    def move() -> KVCache:
        own = prefill(setup.target, target_tokens, setup.prefix, keep="all") if setup.mapper.reads_target else None
        made = translate(setup.mapper, cache, alignment, prefix=setup.prefix, receiver=own)
        return made if setup.replay is None else replay(setup.target, target_tokens, made, setup.replay)

    moved = move()
    steps: dict[str, Callable[[], Any]] = {
        "source_prefill": lambda: prefill(setup.source, source_tokens, keep="all"),
        "align": lambda: align(
            setup.source, setup.target, context, rule=setup.rule, embed=setup.mapper.reads_embeddings
        ),
        "translate": move,
        "boundary": lambda: next_token_logits(setup.target, last, moved),
        "native_prefill": lambda: prefill(setup.target, target_tokens, setup.prefix, keep="all"),
    }
    seconds = {name: median_seconds(step, repeats) for name, step in steps.items()}
    return LatencyRow(target_tokens.shape[1], int((last >= 0).sum()), **seconds)
