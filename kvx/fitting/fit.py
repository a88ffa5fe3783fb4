"""Fit a mapper: stream pairs, gather moments, solve."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from kvx.errors import KvxError
from kvx.fitting.blocks import Block, RowBlocks
from kvx.fitting.moments import Moments, accumulate, make_pivot, zeros
from kvx.fitting.pairs import PairBatch, Pairs, rows_of
from kvx.fitting.plan import Plan
from kvx.fitting.report import FitReport
from kvx.mappers.base import CacheMap, Mapper, digest_map
from kvx.models.progress import Hook, reporting

ROWS = 2048


def fit(
    method: Mapper,
    pairs: Pairs,
    *,
    held_out: float = 0.1,
    rows: int = ROWS,
    progress: bool | Hook | None = True,
) -> tuple[CacheMap, FitReport]:
    """Fit a method to pairs: one pass for the moments, then the solves.

    A share of the sequences is held out to choose what the method leaves open (ridge, layers); the final solve uses
    them too. The same pairs give the same split.

    Args:
        method: settings, such as ``kvx.mappers.full_head(layers=7)``.
        pairs: from :func:`kvx.pairs`.
        held_out: share of the sequences, 0 (nothing to choose) to below 1.
        rows: tokens in one block of products.
        progress: ``True`` shows a bar with the time left on a terminal or in a notebook, ``False`` nothing; or a
            function ``(what, done, total)``.

    Returns:
        The map and the report.

    Raises:
        KvxError: no tokens, nothing held out although something is to be chosen, or a solve that fails (naming layer
            and heads).

    Example:
        >>> import kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> mapper, report = kvx.fit(kvx.mappers.full_head(layers=2, ridge=1e-4), toy_pairs(), progress=False)
        >>> report.rows, report.held_out_rows
        (448, 56)
    """
    if not 0.0 <= held_out < 1.0:
        raise KvxError(f"held_out is {held_out}; expected a share of the sequences from 0 to below 1.")
    plan = Plan.of(pairs.source, pairs.target, method.reach(pairs.source, pairs.target))
    gathered = _Gathered(plan, rows, held_out)
    with reporting(progress, "reading pairs", "percent") as report:
        gathered.read(pairs, report)
    train, held = gathered.moments()
    started = time.perf_counter()
    with reporting(progress, "solving", "entries") as report:
        params = method.fit(dataclasses.replace(train, progress=report), held)
        params = jax.block_until_ready(params)
    seconds = {**gathered.seconds, "solve": time.perf_counter() - started}
    mapper = CacheMap(params, pairs.prefix, method, pairs.source, pairs.target, pairs.rule)
    facts = {**pairs.provenance, "digest": digest_map(mapper), "pairs": pairs.digest, "facts": dict(pairs.facts)}
    mapper = dataclasses.replace(mapper, provenance=facts)
    return mapper, _report(mapper, pairs, gathered, train, held, seconds)


class _Gathered:
    """Moments of the fitted and of the held-out rows, gathered from a stream of pairs."""

    def __init__(self, plan: Plan, rows: int, held_out: float) -> None:
        self.plan, self.held_out = plan, held_out
        self.sides: list[Moments | None] = [None, None]
        self.waiting: list[Block] = []
        self.blocks = [RowBlocks(rows), RowBlocks(rows)]
        self.sequences = [0, 0]
        self.seconds = {"pairs": 0.0, "moments": 0.0}

    def read(self, pairs: Pairs, report: Hook) -> None:
        """Take in every batch, then what is left in the blocks."""
        tokens = 0
        percent = 0.0

        def told(value: float) -> None:
            nonlocal percent
            percent = max(percent, min(value, 100.0))
            report(f"{tokens:,} tokens", int(percent), 100)

        stream = iter(pairs.batches(told))
        while (batch := self._next(stream)) is not None:
            started = time.perf_counter()
            tokens += self._add(batch)
            told(percent)
            self.seconds["moments"] += time.perf_counter() - started
        started = time.perf_counter()
        for side in (0, 1):
            for block in self.blocks[side].rest():
                self._take(side, block)
        jax.block_until_ready(self.sides)
        self.seconds["moments"] += time.perf_counter() - started

    def _next(self, stream: Iterator[PairBatch]) -> PairBatch | None:
        started = time.perf_counter()
        batch = jax.block_until_ready(next(stream, None))
        self.seconds["pairs"] += time.perf_counter() - started
        return batch

    def _add(self, batch: PairBatch) -> int:
        """Rows of one batch into the blocks of both sides; returns the tokens taken."""
        count, length = batch.weight.shape
        known = batch.sequences
        numbers = np.arange(count) + sum(self.sequences) if known is None else np.array(known)
        aside = np.array([_is_held_out(int(n), self.held_out) for n in numbers])
        x, y, weight = rows_of(batch)
        weights, by_token = np.asarray(weight), np.repeat(aside, length)
        for side in (0, 1):
            self.sequences[side] += int(((numbers >= 0) & (aside == bool(side))).sum())
            share = np.where(by_token == bool(side), weights, np.float32(0))
            for block in self.blocks[side].add(x, y, jnp.asarray(share)):
                self._take(side, block)
        return int(np.count_nonzero(weights))

    def _take(self, side: int, block: Block) -> None:
        """Accumulate a block; held-out ones wait until the first fitted one has made the pivot."""
        if side == 1 and self.sides[0] is None:
            self.waiting.append(block)
            return
        moments = self.sides[side]
        if moments is None:
            pivot = self.sides[0].pivot if self.sides[0] else make_pivot(self.plan, block.x, block.y, block.weight)
            moments = zeros(self.plan, pivot)
        self.sides[side] = accumulate(moments, block.x, block.y, block.weight)
        while side == 0 and self.waiting:
            self._take(1, self.waiting.pop())

    def moments(self) -> tuple[Moments, Moments | None]:
        """Fitted and held-out moments."""
        train, held = self.sides
        if train is None:
            raise KvxError(
                f"the pairs gave no token to fit ({sum(self.sequences)} sequences, {self.sequences[1]} held out); give "
                "more text, or a smaller held_out."
            )
        return train, held


def _is_held_out(n: int, share: float) -> bool:
    """Whether sequence n is held out: the second one, and then evenly spread so that the share holds."""
    return n >= 1 and math.ceil(n * share) > math.ceil((n - 1) * share)


def _report(
    mapper: CacheMap, pairs: Pairs, gathered: _Gathered, train: Moments, held: Moments | None, seconds: dict[str, float]
) -> FitReport:
    entries = tuple(getattr(mapper.params, "report", None) or ())
    plan = gathered.plan
    widest = max((sum(sum(plan.sources[i]) for i in entry.source_layers) for entry in entries), default=0)
    return FitReport(
        method=str(mapper.method),
        rows=train.rows + (held.rows if held else 0),
        held_out_rows=held.rows if held else 0,
        sequences=sum(gathered.sequences),
        held_out_sequences=gathered.sequences[1],
        features=widest,
        entries=entries,
        seconds=seconds,
        map_bytes=mapper.size,
        moment_bytes=8 * plan.numbers * (2 if held else 1),
        pairs=pairs.digest,
        facts=dict(pairs.facts),
    )
