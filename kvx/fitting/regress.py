"""Solve the entries of a support table from moments: ridge chosen on held-out moments, then fitted on all rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvx.errors import KvxError
from kvx.fitting.moments import Moments
from kvx.fitting.normal import Normals
from kvx.fitting.solve import Solution, prepare
from kvx.mappers.base import COMPONENTS, Entry, EntryReport, Fitted

RIDGES = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
SKETCH_FROM = 4096
SKETCH = 48
COLUMNS = 8192  # outputs scored at a time
Report = Callable[[str, int, int], object]
Parts = tuple[tuple[int, int, int], ...]


@dataclasses.dataclass
class _Choice:
    """Best ridge so far for one entry: its held-out explained variance per head, and its number."""

    r2: np.ndarray
    at: int


def regress(
    moments: Moments,
    held_out: Moments | None,
    entries: Sequence[Entry],
    ridges: Sequence[float] = RIDGES,
    *,
    progress: Report = lambda what, done, total: None,
) -> list[Fitted]:
    """Fit every entry: ``W = argmin sum w |y - nu - (x - mu) W|^2 + ridge``, one factorisation per set of source parts.

    With several ridges each entry takes the one that predicts the held-out rows best; it is then fitted on all rows,
    the held-out ones included. Entries that read the same parts share the Gram and its factors.

    Args:
        moments: rows to fit.
        held_out: rows of other texts, about the same pivot; needed to choose among several ridges.
        entries: blocks of outputs and what feeds them.
        ridges: candidates, on the scaled Gram.
        progress: called with (what, entries done, entries in all).

    Returns:
        One solved block for each entry, in their order.

    Raises:
        KvxError: several ridges without held-out rows, or a system that cannot be solved (naming layer and heads).

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from kvx.fitting.moments import start
        >>> from kvx.fitting.plan import Plan
        >>> from kvx.fitting.regress import regress
        >>> from kvx.mappers.base import Entry
        >>> x = jnp.array(np.random.default_rng(0).normal(size=(200, 2)), jnp.float32)
        >>> moments = start(Plan.create([(1, 1)], [(2, 2)]), x, jnp.concatenate([x, 2 * x], axis=1))
        >>> fitted = regress(moments, None, [Entry(0, 1, (0, 1), 2, ((0, 0, 2),))], [1e-6])
        >>> (fitted[0].coefficients.round(2) + 0.0).tolist()
        [[2.0, 0.0], [0.0, 2.0]]
    """
    ridges = sorted({float(ridge) for ridge in ridges})
    if not ridges or (len(ridges) > 1 and held_out is None):
        raise KvxError(
            f"choosing among {len(ridges)} ridges needs held-out moments; fit with held_out above 0, or give one ridge."
        )
    train = Normals(moments)
    held = None if held_out is None else Normals(held_out)
    both = train if held is None else Normals(train, held)
    fitted: dict[int, Fitted] = {}
    for parts, members in by_parts(entries).items():
        chosen = {i: _Choice(np.array([]), 0) for i in members}
        if held is not None:
            chosen = _choose(train, held, parts, {i: entries[i] for i in members}, ridges)
        for i, one in _solve(both, parts, {i: entries[i] for i in members}, chosen, ridges):
            fitted[i] = one
            progress(entries[i].name, len(fitted), len(entries))
    return [fitted[i] for i in range(len(entries))]


def scores(
    moments: Moments, held_out: Moments, entries: Sequence[Entry], ridge: float, *, progress: Report | None = None
) -> list[np.ndarray]:
    """Held-out explained variance of each entry's outputs, per head, by the fit without the held-out rows.

    Entries that read the same parts share one factorisation, and those whose outputs adjoin one product; so scoring
    every source block on every output costs little more than the products themselves.

    Args:
        moments, held_out, entries: as for :func:`regress`.
        ridge: one for all.
        progress: called with (what, entries done, entries in all).

    Returns:
        For each entry float64 ``[heads]`` (one number for entries too wide to score head by head).
    """
    train, held = Normals(moments), Normals(held_out)
    outputs = _Outputs(train, held, entries)
    found: dict[int, np.ndarray] = {}
    for parts, members in by_parts(entries).items():
        ours = {i: entries[i] for i in members}
        if train.width(parts) < SKETCH_FROM:
            found |= _score(train, held, parts, ours, ridge, outputs)
        else:
            found |= {i: choice.r2 for i, choice in _choose(train, held, parts, ours, [ridge]).items()}
        if progress is not None:
            progress("scoring", len(found), len(entries))
    return [found[i] for i in range(len(entries))]


def by_parts(entries: Sequence[Entry]) -> dict[Parts, list[int]]:
    """Entries by what feeds them."""
    groups: dict[Parts, list[int]] = {}
    for i, entry in enumerate(entries):
        groups.setdefault(entry.parts, []).append(i)
    return groups


class _Outputs:
    """Held-out variance of every output that is scored, and how far its mean moved from the fitted rows'."""

    def __init__(self, train: Normals, held: Normals, entries: Sequence[Entry]) -> None:
        self.normals = held
        self.variance, self.shift = np.zeros(train.plan.y_starts[-1]), np.zeros(train.plan.y_starts[-1])
        for where in sorted({(entry.target, entry.component) for entry in entries}):
            columns = held.output_columns(*where)
            self.variance[columns] = np.diag(held.output_covariance(*where))
            self.shift[columns] = held.output_mean(*where) - train.output_mean(*where)

    def runs(self, entries: dict[int, Entry]) -> Iterator[tuple[slice, list[int]]]:
        """Ranges of adjoining outputs, and the entries whose outputs lie there."""
        columns = {i: _columns(self.normals, entry) for i, entry in entries.items()}
        spans = sorted((span.start, span.stop, i) for i, span in columns.items())
        first, end, members = spans[0][0], spans[0][0], list[int]()
        for start, stop, i in spans:
            if members and (start > end or stop - first > COLUMNS):
                yield slice(first, end), members
                first, end, members = start, start, []
            end = max(end, stop)
            members.append(i)
        yield slice(first, end), members


def _columns(normals: Normals, entry: Entry) -> slice:
    """Where an entry's outputs stand among those of all target layers."""
    start = normals.output_columns(entry.target, entry.component).start
    return slice(start + entry.columns.start, start + entry.columns.stop)


def _score(
    train: Normals, held: Normals, parts: Parts, entries: dict[int, Entry], ridge: float, outputs: _Outputs
) -> dict[int, np.ndarray]:
    """Held-out explained variance per head of entries that read the same parts."""
    factored = train.factor(parts, ridge, where=next(iter(entries.values())).name)
    shift, gram = held.mean(parts) - train.mean(parts), held.gram(parts)
    found: dict[int, np.ndarray] = {}
    for run, members in outputs.runs(entries):
        w = factored.solve(train.cross_columns(parts, run), where=entries[members[0]].name).coefficients
        lost = _lost(w, gram @ w, held.cross_columns(parts, run), outputs.shift[run] - shift @ w)
        error = outputs.variance[run] + lost
        for i in members:
            columns, (first, stop) = _columns(held, entries[i]), entries[i].heads
            own = error[columns.start - run.start : columns.stop - run.start]
            found[i] = explained(own, outputs.variance[columns], stop - first)
    return found


def _choose(
    train: Normals,
    held: Normals,
    parts: Parts,
    entries: dict[int, Entry],
    ridges: Sequence[float],
) -> dict[int, _Choice]:
    """For each entry the ridge with the best held-out explained variance (mean over heads).

    Starts in the middle of the (sorted) ridges and tries the neighbours of every entry's best until all are beaten.
    """
    system = prepare(train.gram(parts), floor=train.floor(parts), where=next(iter(entries.values())).name)
    shift = held.mean(parts) - train.mean(parts)
    held_gram = held.gram(parts) if len(shift) < SKETCH_FROM else None
    problems = {i: _problem(train, held, parts, entry) for i, entry in entries.items()}
    best: dict[int, _Choice] = {}
    tried: set[int] = set()
    following = [len(ridges) // 2]
    while following:
        at = following[0]
        tried.add(at)
        factored = system.factor(ridges[at])
        solved = [factored.solve(p.cross, where=entries[i].name).coefficients for i, p in problems.items()]
        joined = np.concatenate(solved, axis=1)
        products = held.times_gram(parts, joined) if held_gram is None else held_gram @ joined
        splits = np.cumsum([w.shape[1] for w in solved])[:-1]
        for (i, problem), w, aw in zip(problems.items(), solved, np.split(products, splits, axis=1), strict=True):
            r2 = problem.r2(w, aw, shift)
            if i not in best or r2.mean() > best[i].r2.mean():
                best[i] = _Choice(r2, at)
        beside = {choice.at + step for choice in best.values() for step in (-1, 1)}
        following = sorted(n for n in beside - tried if 0 <= n < len(ridges))
    return best


@dataclasses.dataclass
class _Problem:
    """Moments of one entry's outputs (or, for wide systems, of random sign combinations of them)."""

    cross: np.ndarray
    held_cross: np.ndarray
    variance: np.ndarray
    mean_shift: np.ndarray
    heads: int

    def r2(self, w: np.ndarray, aw: np.ndarray, shift: np.ndarray) -> np.ndarray:
        """Held-out explained variance per head; an error of the mean counts as error."""
        return explained(
            self.variance + _lost(w, aw, self.held_cross, self.mean_shift - shift @ w), self.variance, self.heads
        )


def _problem(train: Normals, held: Normals, parts: Parts, entry: Entry) -> _Problem:
    columns, where = entry.columns, (entry.target, entry.component)
    cross, held_cross = (n.cross_columns(parts, _columns(n, entry)) for n in (train, held))
    covariance = held.output_covariance(*where)[columns, columns]
    shift = (held.output_mean(*where) - train.output_mean(*where))[columns]
    if len(cross) < SKETCH_FROM or cross.shape[1] <= SKETCH:
        return _Problem(cross, held_cross, np.diag(covariance), shift, entry.heads[1] - entry.heads[0])
    signs = np.random.default_rng(entry.target).choice([-1.0, 1.0], size=(cross.shape[1], SKETCH))
    variance = np.einsum("qs,qs->s", signs, covariance @ signs)
    return _Problem(cross @ signs, held_cross @ signs, variance, shift @ signs, 1)


def _lost(w: np.ndarray, aw: np.ndarray, cross: np.ndarray, mean_error: np.ndarray) -> np.ndarray:
    """What predicting adds to each output's squared error (``w'Aw - 2 w'b``), an error of the mean included."""
    added: np.ndarray = np.einsum("pq,pq->q", w, aw - 2 * cross) + mean_error**2
    return added


def explained(error: np.ndarray, variance: np.ndarray, heads: int) -> np.ndarray:
    """Explained variance per head, from error and variance of every output column."""
    lost, all_of_it = (part.reshape(heads, -1).sum(axis=1) for part in (error, variance))
    return 1.0 - lost / np.where(all_of_it > 0, all_of_it, 1.0)


def _solve(
    both: Normals, parts: Parts, entries: dict[int, Entry], chosen: dict[int, _Choice], ridges: Sequence[float]
) -> Iterator[tuple[int, Fitted]]:
    """Final fits, one factorisation for each ridge that was chosen."""
    gram, center = both.gram(parts), both.mean(parts)
    variance = np.diag(gram).copy()
    system = prepare(gram, floor=both.floor(parts), where=next(iter(entries.values())).name)
    del gram
    for at in sorted({choice.at for choice in chosen.values()}):
        factored = system.factor(ridges[at])
        for i in [i for i in entries if chosen[i].at == at]:
            entry = entries[i]
            cross = both.cross_columns(parts, _columns(both, entry))
            solution = factored.solve(cross, where=entry.name)
            yield i, _finish(both, entry, solution, cross, variance, center, chosen[i].r2)


def _finish(
    both: Normals,
    entry: Entry,
    solution: Solution,
    cross: np.ndarray,
    variance: np.ndarray,
    center: np.ndarray,
    r2: np.ndarray,
) -> Fitted:
    """Coefficients, means and the covariance of the fitted outputs, ``W'AW = W'B - ridge W' diag(A) W``."""
    heads, w = entry.heads[1] - entry.heads[0], solution.coefficients
    by_head = w.reshape(len(w), heads, -1)
    crossed = cross.reshape(by_head.shape)
    covariance = np.einsum("phd,phe->hde", by_head, crossed, optimize=True)
    shrunk = (solution.ridge * variance)[:, None, None] * by_head
    covariance -= np.einsum("phd,phe->hde", by_head, shrunk, optimize=True)
    covariance = (covariance + covariance.swapaxes(1, 2)) / 2
    total = np.diag(both.output_covariance(entry.target, entry.component))[entry.columns]
    carried = np.einsum("hdd->hd", covariance).ravel()
    error = total - 2 * np.einsum("pq,pq->q", w, cross) + carried
    report = EntryReport(
        entry.target,
        COMPONENTS[entry.component],
        entry.heads,
        entry.source_layers,
        solution.ridge,
        float(explained(error, total, heads).mean()),
        tuple(float(x) for x in r2),
        solution.condition,
        solution.residual,
        solution.escalations,
        len(w),
        entry.blocks,
    )
    mean = both.output_mean(entry.target, entry.component)[entry.columns]
    return Fitted(w, center, mean, covariance, report)
