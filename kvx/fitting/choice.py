"""Choose ridges by held-out attention output, keys and values of the same heads together: attention mixes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from kvx.fitting.mixture import Centred, alpha_of, mixed, of_normals, of_sums
from kvx.fitting.normal import EPS32, Normals
from kvx.fitting.reading import HeldOutReading, Predicted
from kvx.fitting.regress import Report
from kvx.fitting.solve import Factor, System, prepare
from kvx.fitting.weighted_sums import WeightedPass
from kvx.mappers.base import Entry, Fitted


def choose(
    reading: HeldOutReading,
    train: Normals,
    gathered: WeightedPass,
    first: Sequence[Fitted],
    ridges: Sequence[float],
    report: Report,
) -> list[Fitted]:
    """The given fits, their ridge replaced by the one whose held-out attention output is closest to the native one.

    Entries of the same target heads are chosen together by coordinate search: from their present ridges each moves to
    the neighbour that raises the explained variance of the attention output (mean over the heads), until none does.
    Candidates are fitted without the held-out rows.

    Args:
        reading: held-out sequences.
        train: uniform moments without them; gathered: entries, and their weighted moments where the fit is weighted.
        first: fits with the present ridges, of each entry.
        ridges: candidates, ascending.
        report: called with (what, entries done, entries in all).

    Returns:
        ``first`` with ``ridge`` and ``attention_held_out`` of each report replaced.

    Example:
        >>> import kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> method = kvx.mappers.full_head(layers=1, ridge=(1e-3, 10.0), select="attention")
        >>> _, report = kvx.fit(method, toy_pairs(), progress=False)
        >>> [entry.ridge for entry in report.entries], report.entries[0].attention_held_out[0] > 0.99
        ([0.001, 0.001, 0.001, 0.001], True)
    """
    found = list(first)
    done = 0
    for members in together(gathered.entries):
        candidates = _Candidates(reading, train, gathered, members, ridges)
        start = {i: _nearest(ridges, first[i].report.ridge) for i in members}
        at, explained = _search(candidates.explained, start, len(ridges))
        for i in members:
            a, b = (head - candidates.heads[0] for head in gathered.entries[i].heads)
            own = tuple(float(r2) for r2 in explained[a:b])
            changed = dataclasses.replace(first[i].report, ridge=ridges[at[i]], attention_held_out=own)
            found[i] = dataclasses.replace(first[i], report=changed)
        done += len(members)
        report(gathered.entries[members[0]].name, done, len(found))
    return found


def together(entries: Sequence[Entry]) -> list[list[int]]:
    """Numbers of the entries of each target layer whose heads overlap, directly or through others.

    Example:
        >>> from kvx.fitting.choice import together
        >>> from kvx.mappers.base import Entry
        >>> heads = [(0, 0, (0, 1)), (0, 0, (1, 2)), (0, 1, (0, 1)), (0, 1, (1, 2)), (1, 0, (0, 2)), (1, 1, (1, 2))]
        >>> together([Entry(layer, component, own, 4, ()) for layer, component, own in heads])
        [[0, 2], [1, 3], [4, 5]]
    """
    groups: list[list[int]] = []
    order = sorted(range(len(entries)), key=lambda i: (entries[i].target, entries[i].heads, entries[i].component))
    stop = layer = -1
    for i in order:
        entry = entries[i]
        if entry.target != layer or entry.heads[0] >= stop:
            groups.append([])
            layer, stop = entry.target, entry.heads[1]
        groups[-1].append(i)
        stop = max(stop, entry.heads[1])
    return groups


def weighted_moments(gathered: WeightedPass, at: int) -> list[Centred | None]:
    """An entry's weighted moments of each side, ``None`` where none were summed."""
    frame, outputs = gathered.frames[gathered.entries[at].parts], gathered.outputs[at]
    return [None if sums is None else of_sums(frame, outputs, sums) for sums in gathered.sums(at)]


def system_of(moments: Centred, entry: Entry) -> System:
    """What is to be factored for an entry."""
    return prepare(moments.gram, floor=(8 * EPS32 * moments.x_mean) ** 2, where=entry.name)


class _Candidates:
    """Fits of a few entries with every ridge that is asked for, each made once."""

    def __init__(
        self,
        reading: HeldOutReading,
        train: Normals,
        gathered: WeightedPass,
        members: Sequence[int],
        ridges: Sequence[float],
    ) -> None:
        self.reading, self.train, self.gathered, self.ridges = reading, train, gathered, ridges
        own = [gathered.entries[i] for i in members]
        self.layer = own[0].target
        self.heads = min(entry.heads[0] for entry in own), max(entry.heads[1] for entry in own)
        self._grams: dict[object, np.ndarray] = {}
        self._moments: dict[int, Centred] = {}
        self._systems: dict[object, System] = {}
        self._factors: dict[object, Factor] = {}
        self._predicted: dict[tuple[int, int], Predicted] = {}
        self._explained: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def explained(self, at: dict[int, int]) -> np.ndarray:
        """Explained variance of the attention output per head, by entry and number of its ridge."""
        key = tuple(sorted(at.items()))
        if key not in self._explained:
            predicted = [self._prediction(i, number) for i, number in key]
            self._explained[key] = self.reading.explained(self.layer, self.heads, predicted)
        return self._explained[key]

    def _prediction(self, i: int, number: int) -> Predicted:
        if (i, number) not in self._predicted:
            entry, moments = self.gathered.entries[i], self._fitted(i)
            w = self._factor(i, number).solve(moments.cross, where=entry.name).coefficients
            starts = self.gathered.plan.x_starts
            columns = np.concatenate([starts[part] + np.arange(a, b) for part, a, b in entry.parts])
            rows = self.reading.predict(columns, moments.x_mean, w, moments.y_mean)
            self._predicted[i, number] = Predicted(entry.component, entry.heads, rows)
        return self._predicted[i, number]

    def _factor(self, i: int, number: int) -> Factor:
        """Entries that read the same parts share their factors while all rows count evenly."""
        entry = self.gathered.entries[i]
        shared = i if 0 in self.gathered.sides else entry.parts
        if shared not in self._systems:
            self._systems[shared] = system_of(self._fitted(i), entry)
        if (shared, number) not in self._factors:
            self._factors[shared, number] = self._systems[shared].factor(self.ridges[number])
        return self._factors[shared, number]

    def _fitted(self, i: int) -> Centred:
        if i not in self._moments:
            entry = self.gathered.entries[i]
            even = of_normals(self.train, entry, self._grams.get(entry.parts))
            self._grams[entry.parts] = even.gram
            weighted = weighted_moments(self.gathered, i)[0] if 0 in self.gathered.sides else None
            alpha = 0.0 if weighted is None else alpha_of(weighted, self.gathered.counts[0])
            self._moments[i] = even if weighted is None else mixed(even, weighted, alpha)
        return self._moments[i]


def _search(
    score: Callable[[dict[int, int]], np.ndarray], at: dict[int, int], count: int
) -> tuple[dict[int, int], np.ndarray]:
    """Coordinate search over numbers below ``count`` for the highest mean score."""
    best, moved = score(at), True
    while moved:
        moved = False
        for i in at:
            for step in (-1, 1):
                while 0 <= at[i] + step < count:
                    trial = at | {i: at[i] + step}
                    found = score(trial)
                    if not found.mean() > best.mean():
                        break
                    at, best, moved = trial, found, True
    return at, best


def _nearest(ridges: Sequence[float], ridge: float) -> int:
    return int(np.argmin([abs(np.log((r + 1e-30) / (ridge + 1e-30))) for r in ridges]))
