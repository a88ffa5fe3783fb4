"""Fit with sensitivities: a first, uniform pass has chosen the support; a second one weighs its rows."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvx.errors import KvxError
from kvx.fitting.mixture import Centred, alpha_of, mixed, of_normals, of_sums
from kvx.fitting.moments import Moments
from kvx.fitting.normal import EPS32, Normals
from kvx.fitting.pairs import Pairs
from kvx.fitting.regress import explained
from kvx.fitting.solve import Solution, System, prepare
from kvx.fitting.weighted_sums import WeightedPass
from kvx.mappers.base import Entry, EntryReport, Fitted
from kvx.models.progress import Hook, reporting


@dataclasses.dataclass(frozen=True)
class Weighing:
    """What a method's settings ask of a second pass.

    Attributes:
        mode: of the sensitivities.
        fit: they weigh the rows of the fit; choose: they weigh the held-out rows that choose the ridge.
    """

    mode: str
    fit: bool
    choose: bool

    @classmethod
    def of(cls, method: Any) -> Weighing | None:
        """``None`` when the method asks for none."""
        mode = getattr(method, "sensitivity", None)
        choose = getattr(method, "select", "r2") == "attention" and len(method.ridges) > 1
        return cls(mode or "probes", bool(mode), choose) if mode or choose else None


@dataclasses.dataclass(frozen=True, eq=False)
class Weighed:
    """Parameters of a weighted fit, the seconds of its second pass and of its solves, and the bytes of its sums."""

    params: Any
    seconds: dict[str, float]
    bytes: int


def fit_weighed(
    method: Any,
    weighing: Weighing,
    pairs: Pairs,
    moments: Moments,
    held: Moments | None,
    *,
    rows: int,
    held_out: float,
    progress: Hook | bool | None,
) -> Weighed:
    """Fit a method with weights ``w = 1 + alpha (r - 1)``, r the sensitivities of each entry's own heads.

    The support, and with ``select="r2"`` the ridge, are those of the uniform fit. The second pass sums the weighted
    moments ``M_r`` of that support only; the solve uses ``M_w = (1 - alpha) M_1 + (alpha / mean r) M_r``.

    Args:
        method: with ``support``, ``ridges`` (see :class:`kvx.mappers.base.Support`).
        weighing: what it asks for.
        pairs: read a second time, with sensitivities.
        moments, held: uniform moments of the first pass.
        rows, held_out: as in the first pass, so that the split is the same.
        progress: see :func:`kvx.fitting.fit.fit`.

    Raises:
        KvxError: nothing held out although something is to be chosen, pairs without queries, or a solve that fails.
    """
    if weighing.choose and held is None:
        raise KvxError("choosing the ridge by attention needs held-out moments; fit with held_out above 0.")
    started = time.perf_counter()
    with reporting(progress, "solving", "entries") as report:
        told = dataclasses.replace(moments, progress=report)
        support = method.support(told, held)
        first = told.regress(held, support.entries, method.ridges)
    uniform = [Normals(moments)] if held is None else [Normals(moments), Normals(held)]
    whole = Normals(*uniform)
    sides = [0] * weighing.fit + [1] * weighing.choose
    solving = time.perf_counter() - started
    started = time.perf_counter()
    gathered = WeightedPass(moments.plan, support.entries, whole, rows=rows, held_out=held_out, sides=sides)
    with reporting(progress, "weighing pairs", "percent") as report:
        gathered.read(pairs.weighed(weighing.mode), report)
    seconds = {"weighted": time.perf_counter() - started}
    started = time.perf_counter()
    solved = []
    with reporting(progress, "solving", "entries") as report:
        for i, entry in enumerate(support.entries):
            solved.append(_entry(uniform[0], whole, gathered, i, first[i], sorted(method.ridges), weighing))
            report(entry.name, i + 1, len(support.entries))
    params = jax.block_until_ready(support.finish(solved))
    seconds["solve"] = solving + time.perf_counter() - started
    return Weighed(params, seconds, gathered.bytes)


def _entry(
    train: Normals,
    whole: Normals,
    gathered: WeightedPass,
    at: int,
    first: Fitted,
    ridges: Sequence[float],
    weighing: Weighing,
) -> Fitted:
    """Choose the ridge of one entry if that is asked for, and solve it on all rows."""
    entry, sides = gathered.entries[at], gathered.sums(at)
    frame, outputs = gathered.frames[entry.parts], gathered.outputs[at]
    weighted = [None if sums is None else of_sums(frame, outputs, sums) for sums in sides]
    ridge, attention = first.report.ridge, np.array([])
    if weighing.choose and weighted[1] is not None:
        system = of_normals(train, entry)
        if weighted[0] is not None:
            system = mixed(system, weighted[0], alpha_of(weighted[0], gathered.counts[0]))
        ridge, attention = _choose(system, weighted[1], ridges, ridge, entry)
    even, joined, count = of_normals(whole, entry), _joined(weighted) if weighing.fit else None, sum(gathered.counts)
    alpha = 0.0 if joined is None else alpha_of(joined, count)
    used = even if joined is None else mixed(even, joined, alpha)
    rows = count / (1 + alpha**2 * (0.0 if joined is None else joined.variation(count)))
    solution = _system(used, entry).factor(ridge).solve(used.cross, where=entry.name)
    report = dataclasses.replace(
        first.report, alpha=alpha, effective_rows=rows, attention_held_out=tuple(map(float, attention))
    )
    return _finish(entry, even, used, solution, report)


def _joined(sides: Sequence[Centred | None]) -> Centred | None:
    """Weighted moments of both sides as one; ``None`` without any."""
    parts = [side for side in sides if side is not None]
    if len(parts) < 2:
        return parts[0] if parts else None
    a, b = parts
    return mixed(a, b, b.weight / (a.weight + b.weight))


def _system(moments: Centred, entry: Entry) -> System:
    return prepare(moments.gram, floor=(8 * EPS32 * moments.x_mean) ** 2, where=entry.name)


def _choose(
    fitted: Centred, held: Centred, ridges: Sequence[float], start: float, entry: Entry
) -> tuple[float, np.ndarray]:
    """The ridge with the smallest weighted held-out error, searched from the given one, and its score per head."""
    system, heads = _system(fitted, entry), entry.heads[1] - entry.heads[0]
    shift = held.x_mean - fitted.x_mean
    offset = held.y_mean - fitted.y_mean
    scores: dict[int, np.ndarray] = {}
    following = [int(np.argmin([abs(np.log((r + 1e-30) / (start + 1e-30))) for r in ridges]))]
    while following:
        at = following[0]
        w = system.factor(ridges[at]).solve(fitted.cross, where=entry.name).coefficients
        error = held.variance + np.einsum("pq,pq->q", w, held.gram @ w - 2 * held.cross) + (offset - shift @ w) ** 2
        scores[at] = explained(error, held.variance, heads)
        best = max(scores, key=lambda n: scores[n].mean())
        following = [n for n in (best - 1, best + 1) if 0 <= n < len(ridges) and n not in scores]
    return ridges[best], scores[best]


def _finish(entry: Entry, even: Centred, used: Centred, solution: Solution, report: EntryReport) -> Fitted:
    """Coefficients and means of the weighted fit; covariance and explained variance of all rows, counted evenly."""
    heads, w = entry.heads[1] - entry.heads[0], solution.coefficients
    moved = even.gram @ w
    by_head, image = (a.reshape(len(w), heads, -1) for a in (w, moved))
    covariance = np.einsum("phd,phe->hde", by_head, image, optimize=True)
    covariance = (covariance + covariance.swapaxes(1, 2)) / 2
    offset = even.y_mean - used.y_mean - (even.x_mean - used.x_mean) @ w
    error = even.variance + np.einsum("pq,pq->q", w, moved - 2 * even.cross) + offset**2
    report = dataclasses.replace(
        report,
        ridge=solution.ridge,
        r2_fit=float(explained(error, even.variance, heads).mean()),
        condition=solution.condition,
        residual=solution.residual,
        escalations=solution.escalations,
    )
    return Fitted(w, used.x_mean, used.y_mean, covariance, report)
