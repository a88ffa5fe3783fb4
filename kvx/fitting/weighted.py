"""Fit with sensitivities: a first, uniform pass has chosen the support; a second one weighs its rows."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvx.errors import KvxError
from kvx.fitting.choice import choose, system_of, weighted_moments
from kvx.fitting.mixture import Centred, alpha_of, mixed, of_normals
from kvx.fitting.moments import Moments
from kvx.fitting.normal import Normals
from kvx.fitting.pairs import Pairs
from kvx.fitting.reading import HeldOutReading
from kvx.fitting.regress import Report, by_parts, explained
from kvx.fitting.solve import Solution
from kvx.fitting.weighted_sums import WeightedPass, bytes_of
from kvx.mappers.base import Entry, EntryReport, Fitted, Support
from kvx.models.progress import Hook, reporting

SUMS_BYTES = 4 << 30  # of weighted sums that are gathered in one pass over the pairs


@dataclasses.dataclass(frozen=True)
class Weighing:
    """What a method's settings ask of a second pass.

    Attributes:
        mode: of the sensitivities.
        fit: they weigh the rows of the fit; choose: held-out attention output chooses the ridge.
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

    The support, and with ``select="r2"`` the ridge, are those of the uniform fit; ``select="attention"`` moves it to
    where held-out attention output comes closest (:func:`kvx.fitting.choice.choose`). The second pass sums the weighted
    moments ``M_r`` of that support only; the solve uses ``M_w = (1 - alpha) M_1 + (alpha / mean r) M_r``. Sums of more
    than 4 GiB are gathered in several passes, some target layers each.

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
    support, first = _uniform(method, moments, held, progress)
    uniform = [Normals(moments)] if held is None else [Normals(moments), Normals(held)]
    whole = Normals(*uniform)
    reading = HeldOutReading(pairs.prefix) if weighing.choose else None
    sides = [0] * weighing.fit + [1] * (weighing.fit and weighing.choose)
    seconds, most = {"weighted": 0.0, "solve": time.perf_counter() - started}, 0
    solved: dict[int, Fitted] = {}
    portions = _portions(support.entries, len(sides))
    for n, members in enumerate(portions):
        started = time.perf_counter()
        own = [support.entries[i] for i in members]
        keep = reading if n == 0 else None
        gathered = WeightedPass(moments.plan, own, whole, rows=rows, held_out=held_out, sides=sides, reading=keep)
        part = f" ({n + 1} of {len(portions)})" if len(portions) > 1 else ""
        with reporting(progress, f"weighing pairs{part}", "percent") as report:
            gathered.read(pairs.weighed(weighing.mode), report)
        seconds["weighted"] += time.perf_counter() - started
        started, most = time.perf_counter(), max(most, gathered.bytes)
        before = [first[i] for i in members]
        if reading is not None:
            with reporting(progress, f"choosing{part}", "entries") as report:
                before = choose(reading, uniform[0], gathered, before, sorted(method.ridges), report)
        with reporting(progress, f"solving{part}", "entries") as report:
            solved |= zip(members, _solved(whole, gathered, before, report), strict=True)
        seconds["solve"] += time.perf_counter() - started
    params = jax.block_until_ready(support.finish([solved[i] for i in range(len(solved))]))
    return Weighed(params, seconds, most)


def _uniform(
    method: Any, moments: Moments, held: Moments | None, progress: Hook | bool | None
) -> tuple[Support, list[Fitted]]:
    """The support, and its fit with all rows counted evenly."""
    with reporting(progress, "solving", "entries") as report:
        told = dataclasses.replace(moments, progress=report)
        support = method.support(told, held)
        return support, told.regress(held, support.entries, method.ridges)


def _portions(entries: Sequence[Entry], sides: int) -> list[list[int]]:
    """Numbers of the entries that are summed in one pass: as many target layers as the limit allows, at least one."""
    layers: dict[int, list[int]] = {}
    for i, entry in enumerate(entries):
        layers.setdefault(entry.target, []).append(i)
    found: list[list[int]] = []
    left = 0
    for members in layers.values():
        size = sides * sum(bytes_of(entries[i]) for i in members)
        if not found or size > left:
            found.append([])
            left = SUMS_BYTES
        found[-1] += members
        left -= size
    return found


def _solved(whole: Normals, gathered: WeightedPass, first: Sequence[Fitted], report: Report) -> list[Fitted]:
    """Every entry of a pass, solved on all rows; those that read the same parts share what was read of them."""
    found: dict[int, Fitted] = {}
    for parts, members in by_parts(gathered.entries).items():
        gram = whole.gram(parts)
        for i in members:
            found[i] = _entry(whole, gathered, i, first[i], gram)
            report(gathered.entries[i].name, len(found), len(first))
    return [found[i] for i in range(len(found))]


def _entry(whole: Normals, gathered: WeightedPass, at: int, first: Fitted, gram: np.ndarray) -> Fitted:
    """Solve one entry on all rows, with the ridge of its first fit; ``gram``: of its parts, counted evenly."""
    entry, sides = gathered.entries[at], weighted_moments(gathered, at)
    even, joined, count = of_normals(whole, entry, gram), _joined(sides), sum(gathered.counts)
    alpha = 0.0 if joined is None else alpha_of(joined, count)
    used = even if joined is None else mixed(even, joined, alpha)
    rows = count / (1 + alpha**2 * (0.0 if joined is None else joined.variation(count)))
    solution = system_of(used, entry).factor(first.report.ridge).solve(used.cross, where=entry.name)
    return _finish(entry, even, used, solution, dataclasses.replace(first.report, alpha=alpha, effective_rows=rows))


def _joined(sides: Sequence[Centred | None]) -> Centred | None:
    """Weighted moments of both sides as one; ``None`` without any."""
    parts = [side for side in sides if side is not None]
    if len(parts) < 2:
        return parts[0] if parts else None
    a, b = parts
    return mixed(a, b, b.weight / (a.weight + b.weight))


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
