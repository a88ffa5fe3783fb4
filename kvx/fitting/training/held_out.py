"""Held-out score of a map in training: losses over its own and over another context, beside the target's own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from kvx.errors import KvxError
from kvx.fitting.training.data import TrainingData
from kvx.fitting.training.trainer import example_nats
from kvx.mappers.base import CacheMap

Scorer = Callable[[CacheMap], Mapping[str, float]]
RATIOS = ("content", "retained")
EFFECT = 0.02  # nats by which the right context must help the target, for ratios to mean something
LOWER = ("loss", "mismatched")  # figures that are better when lower


@dataclasses.dataclass(frozen=True, eq=False)
class HeldOut:
    """Examples to judge on, and what the target itself makes of them.

    Attributes:
        data: from ``kvx.training_data(..., held_out=True)``.
        batch_size: examples run together.
        native, none, crossed: nats a token of each example over the target's own cache, its prefix alone, its own
            cache of another context.
        paired: which examples have another context to be compared with.
        scorer: further figures of a map, such as ``{"f1": ...}``.
    """

    data: TrainingData
    batch_size: int
    native: np.ndarray
    none: np.ndarray
    crossed: np.ndarray
    paired: np.ndarray
    scorer: Scorer | None = None

    @classmethod
    def create(cls, data: TrainingData, batch_size: int, scorer: Scorer | None = None) -> HeldOut:
        """Read the target's own losses from the data.

        Raises:
            KvxError: data without them.
        """
        if any(table.columns.get("native") is None for table in data.suffixes.values()):
            raise KvxError("held-out data lacks the target's own losses; make it with training_data(held_out=True).")
        own = np.zeros((3, len(data)))
        for shape in data.suffixes:
            rows = [(n, place.suffix) for n, place in enumerate(data.places) if place.shape == shape]
            suffix = data.suffixes[shape].read([row for _, row in rows])
            counts = np.maximum((np.asarray(suffix.targets) >= 0).sum(axis=1), 1)
            for at, side in enumerate((suffix.native, suffix.none, suffix.crossed)):
                own[at, [n for n, _ in rows]] = -np.asarray(side, np.float64).sum(axis=1) / counts
        paired = np.array([place.partner >= 0 for place in data.places])
        native, none, crossed = own
        return cls(data, batch_size, native, none, crossed, paired, scorer)

    @property
    def informative(self) -> bool:
        """Whether the right context helps the target enough for content and retained to be told."""
        if not self.paired.any():
            return False
        content = (self.crossed - self.native)[self.paired].mean()
        return bool(content > EFFECT and (self.none - self.native).mean() > EFFECT)

    def figures(self, mapper: CacheMap) -> dict[str, float]:
        """``loss``, ``mismatched`` (nats a token, mean over examples), ``content``, ``retained``, and the scorer's.

        Ratios are NaN where the target's own losses do not differ.
        """
        own = self._nats(mapper, range(len(self.data)), crossed=False)
        pairs = np.flatnonzero(self.paired)
        other = self._nats(mapper, pairs, crossed=True)
        figures = {
            "loss": float(own.mean()),
            "mismatched": float(other.mean()) if len(pairs) else math.nan,
            "native": float(self.native.mean()),
            "none": float(self.none.mean()),
            "retained": _ratio((self.none - own).mean(), (self.none - self.native).mean()),
            "content": math.nan,
        }
        if len(pairs):
            effect = (self.crossed - self.native)[self.paired].mean()
            figures["content"] = _ratio((other - own[self.paired]).mean(), effect)
        return figures | dict(self.scorer(mapper) if self.scorer else {})

    def _nats(self, mapper: CacheMap, examples: Any, crossed: bool) -> np.ndarray:
        """Nats a token of each of some examples."""
        wanted = list(examples)
        found = np.zeros(len(wanted))
        place_of = {n: at for at, n in enumerate(wanted)}
        for batch in _batches(self.data, wanted, self.batch_size):
            read = self.data.batch(batch, self.batch_size, crossed=crossed, fused=mapper.reads_target)
            sums = np.asarray(example_nats(mapper, self.data.target, read, self.data.prefix), np.float64)
            for n, (nats, count) in zip(batch, sums, strict=False):
                found[place_of[n]] = nats / max(count, 1.0)
        return found


def _batches(data: TrainingData, examples: list[int], size: int) -> Iterator[list[int]]:
    """Examples of one shape together."""
    for shape in sorted(data.suffixes):
        own = [n for n in examples if data.places[n].shape == shape]
        for i in range(0, len(own), size):
            yield own[i : i + size]


def _ratio(part: Any, whole: Any) -> float:
    return float(part / whole) if abs(float(whole)) > 1e-9 else math.nan


def score_of(figures: Mapping[str, float], select: tuple[str, ...]) -> float:
    """Mean of the chosen figures, those of which less is better with a minus; minus infinity if one is not finite.

    Example:
        >>> from kvx.fitting.training.held_out import score_of
        >>> score_of({"content": 0.5, "retained": 0.9, "loss": 3.0}, ("content", "retained"))
        0.7
    """
    missing = [name for name in select if name not in figures]
    if missing:
        raise KvxError(f"there is no held-out figure {', '.join(missing)}; there are {', '.join(sorted(figures))}.")
    values = [-figures[name] if name in LOWER else figures[name] for name in select]
    return float(np.mean(values)) if all(map(math.isfinite, values)) else -math.inf
