"""Fit a mapper: stream pairs, gather moments, solve."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax

from kvx.errors import KvxError
from kvx.fitting.blocks import Block
from kvx.fitting.moments import Moments, accumulate, make_pivot, zeros
from kvx.fitting.pairs import Pairs
from kvx.fitting.plan import Plan
from kvx.fitting.report import FitReport
from kvx.fitting.stream import Reader
from kvx.fitting.weighted import Weighed, Weighing, fit_weighed
from kvx.mappers.base import CacheMap, Mapper, digest_map
from kvx.mappers.history import NONE
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
    them too. The same pairs give the same split. Methods that weigh rows by sensitivity, or choose by attention, read
    the pairs a second time and sum only what their chosen support needs.

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
    read = pairs.with_history(getattr(method, "history", NONE)).with_embeddings(getattr(method, "embeddings", 0))
    plan = Plan.of(read.source, read.target, method.reach(read.source, read.target))
    gathered = _Gathered(plan, rows, held_out)
    with reporting(progress, "reading pairs", "percent") as report:
        gathered.read(read, report)
    train, held = gathered.moments()
    solved = _solved(method, read, train, held, rows=rows, held_out=held_out, progress=progress)
    mapper = CacheMap(solved.params, pairs.prefix, method, pairs.source, pairs.target, pairs.rule)
    facts = {**pairs.provenance, "digest": digest_map(mapper), "pairs": pairs.digest, "facts": dict(pairs.facts)}
    mapper = dataclasses.replace(mapper, provenance=facts)
    return mapper, _report(mapper, pairs, gathered, train, held, solved)


def _solved(method: Mapper, pairs: Pairs, train: Moments, held: Moments | None, **settings: Any) -> Weighed:
    """Parameters from uniform moments alone, or from a weighted second pass where the method asks for one."""
    weighing = Weighing.of(method)
    if weighing is not None:
        return fit_weighed(method, weighing, pairs, train, held, **settings)
    started = time.perf_counter()
    with reporting(settings["progress"], "solving", "entries") as report:
        params = jax.block_until_ready(method.fit(dataclasses.replace(train, progress=report), held))
    return Weighed(params, {"solve": time.perf_counter() - started}, 0)


class _Gathered(Reader):
    """Moments of the fitted and of the held-out rows, gathered from a stream of pairs."""

    def __init__(self, plan: Plan, rows: int, held_out: float) -> None:
        super().__init__(rows, held_out)
        self.plan = plan
        self.sides: list[Moments | None] = [None, None]
        self.waiting: list[Block] = []

    def state(self) -> Any:
        """What the last block went into."""
        return self.sides

    def take(self, side: int, block: Block) -> None:
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
            self.take(1, self.waiting.pop())

    def moments(self) -> tuple[Moments, Moments | None]:
        """Fitted and held-out moments."""
        train, held = self.sides
        if train is None:
            raise KvxError(
                f"the pairs gave no token to fit ({sum(self.sequences)} sequences, {self.sequences[1]} held out); give "
                "more text, or a smaller held_out."
            )
        return train, held


def _report(
    mapper: CacheMap, pairs: Pairs, gathered: _Gathered, train: Moments, held: Moments | None, solved: Weighed
) -> FitReport:
    entries = tuple(getattr(mapper.params, "report", None) or ())
    plan = gathered.plan
    widest = max((entry.features for entry in entries), default=0)
    return FitReport(
        method=str(mapper.method),
        rows=train.rows + (held.rows if held else 0),
        held_out_rows=held.rows if held else 0,
        sequences=sum(gathered.sequences),
        held_out_sequences=gathered.sequences[1],
        features=widest,
        entries=entries,
        seconds={**gathered.seconds, **solved.seconds},
        map_bytes=mapper.size,
        moment_bytes=8 * plan.numbers * (2 if held else 1) + solved.bytes,
        pairs=pairs.digest,
        facts=dict(pairs.facts),
    )
