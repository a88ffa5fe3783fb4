"""Figures over items: means, paired differences and ratios of means, each with a paired bootstrap interval.

The unit that is resampled is the item, and one resample picks the same items in every arm (paired): what items have in
common (hard text, an easy question) cancels. Ratios are ratios of means over items, never means of ratios, and are
undefined, with the reason, where the denominator's interval is not clear of zero.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvx.errors import KvxError

RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 20260


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One figure with its interval; ``value`` is ``None`` where the figure is undefined and ``reason`` says why.

    Attributes:
        value: the figure on the items as they are.
        low, high: percentile bootstrap interval (95 % by default).
        reason: why the figure is undefined; empty when it is defined.

    Example:
        >>> from kvx.evaluation.metrics import Estimate
        >>> str(Estimate(0.6, 0.55, 0.65)), str(Estimate(None, None, None, "no questions were asked"))
        ('0.600 [0.550, 0.650]', 'undefined: no questions were asked')
    """

    value: float | None
    low: float | None
    high: float | None
    reason: str = ""

    @classmethod
    def undefined(cls, reason: str) -> Estimate:
        """A figure that cannot be given, and why."""
        return cls(None, None, None, reason)

    @property
    def defined(self) -> bool:
        """Whether there is a value."""
        return self.value is not None

    def at_least(self, bar: float) -> bool:
        """Whether the interval's lower end meets ``bar``; an undefined figure meets no bar."""
        return self.low is not None and self.low >= bar

    def __str__(self) -> str:
        """``value [low, high]``, or why it is undefined."""
        if self.value is None or self.low is None or self.high is None:
            return f"undefined: {self.reason}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """Paired bootstrap over items, vectorised, with a fixed seed: the same items always give the same interval.

    The bootstrap mean of resample r is ``c_r . x / n``, with ``c_r`` how often each item was drawn; all estimates of
    one evaluation share the ``c_r``, which is what pairs them.

    Attributes:
        resamples: how many resamples.
        confidence: mass of the interval.
        seed: of the draws.
    """

    resamples: int = RESAMPLES
    confidence: float = CONFIDENCE
    seed: int = SEED

    def means(self, values: np.ndarray) -> np.ndarray:
        """Bootstrap means.

        Args:
            values: float ``[n, a]``: a paired quantities of n items.

        Returns:
            float64 ``[resamples, a]``.
        """
        n = len(values)
        rng = np.random.default_rng([self.seed, n])
        blocks, block = [], max(1, 4_000_000 // n)
        for start in range(0, self.resamples, block):
            rows = min(block, self.resamples - start)
            counts = rng.multinomial(n, np.full(n, 1.0 / n), size=rows)
            blocks.append(counts.astype(np.float64) @ values / n)
        return np.concatenate(blocks)

    def interval(self, draws: np.ndarray) -> tuple[float, float]:
        """Lower and upper end of the percentile interval of bootstrap draws ``[resamples]``."""
        tail = (1.0 - self.confidence) / 2.0
        return float(np.quantile(draws, tail)), float(np.quantile(draws, 1.0 - tail))

    def mean(self, values: Sequence[float] | np.ndarray) -> Estimate:
        """Mean over items.

        Example:
            >>> from kvx.evaluation.metrics import Bootstrap
            >>> str(Bootstrap().mean([1.0] * 10))
            '1.000 [1.000, 1.000]'
        """
        x = _column(values, "values")
        if not len(x):
            return Estimate.undefined("there are no items")
        return Estimate(float(x.mean()), *self.interval(self.means(x[:, None])[:, 0]))

    def columns(self, values: Mapping[Any, Sequence[float] | np.ndarray]) -> dict[Any, Estimate]:
        """:meth:`mean` of many figures of the same items, in one go.

        Args:
            values: name -> float ``[n]``.

        Returns:
            name -> mean over items, with its interval.

        Raises:
            KvxError: different item counts or non-finite values.

        Example:
            >>> from kvx.evaluation.metrics import Bootstrap
            >>> {name: str(found) for name, found in Bootstrap().columns({"a": [1.0, 1.0], "b": [2.0, 2.0]}).items()}
            {'a': '1.000 [1.000, 1.000]', 'b': '2.000 [2.000, 2.000]'}
        """
        columns = np.stack(_paired({str(name): column for name, column in values.items()}), axis=1)
        if not len(columns):
            return dict.fromkeys(values, Estimate.undefined("there are no items"))
        draws, means = self.means(columns), columns.mean(axis=0)
        return {name: Estimate(float(means[i]), *self.interval(draws[:, i])) for i, name in enumerate(values)}

    def difference(self, a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> Estimate:
        """Mean over items of ``a - b``, paired.

        Raises:
            KvxError: different item counts or non-finite values.

        Example:
            >>> from kvx.evaluation.metrics import Bootstrap
            >>> str(Bootstrap().difference([3.0, 5.0, 9.0], [2.0, 4.0, 8.0]))
            '1.000 [1.000, 1.000]'
        """
        x, y = _paired({"a": a, "b": b})
        return self.mean(x - y)

    def ratio(self, numerator: Sequence[float] | np.ndarray, denominator: Sequence[float] | np.ndarray) -> Estimate:
        """Ratio of means over items, ``sum(numerator) / sum(denominator)``.

        Undefined unless the denominator's whole interval lies above zero: below that, what the ratio compares against
        is not there. The few resamples of a defined ratio whose denominator is not positive count against it on both
        sides (as minus infinity for the lower end, plus infinity for the upper).

        Args:
            numerator: float ``[n]``, one per item.
            denominator: float ``[n]``, of the same items.

        Returns:
            The estimate.

        Raises:
            KvxError: different item counts or non-finite values.

        Example:
            >>> from kvx.evaluation.metrics import Bootstrap
            >>> str(Bootstrap().ratio([0.5, 1.0, 2.0], [1.0, 2.0, 4.0]))
            '0.500 [0.500, 0.500]'
            >>> Bootstrap().ratio([0.5, 1.0], [1.0, -1.0]).defined
            False
        """
        top, bottom = _paired({"numerator": numerator, "denominator": denominator})
        if not len(top):
            return Estimate.undefined("there are no items")
        draws = self.means(np.stack([top, bottom], axis=1))
        low, high = self.interval(draws[:, 1])
        if not low > 0.0:
            where = "contains zero" if high >= 0.0 else "lies below zero"
            return Estimate.undefined(f"the denominator's interval [{low:.3g}, {high:.3g}] {where}")
        positive = draws[:, 1] > 0.0
        safe = np.where(positive, draws[:, 1], 1.0)
        ratios = draws[:, 0] / safe
        ends = (
            self.interval(np.where(positive, ratios, -np.inf))[0],
            self.interval(np.where(positive, ratios, np.inf))[1],
        )
        return Estimate(float(top.mean() / bottom.mean()), *ends)


def _column(values: Sequence[float] | np.ndarray, name: str) -> np.ndarray:
    """float64 ``[n]``, finite."""
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1:
        raise KvxError(f"{name} must hold one number per item, a vector; got shape {x.shape}.")
    bad = np.flatnonzero(~np.isfinite(x))
    if bad.size:
        raise KvxError(
            f"{name} of item {int(bad[0])} is {x[bad[0]]} ({bad.size} of {len(x)} items are not finite); a figure over "
            "them would be meaningless; look at that item's cache and tokens first."
        )
    return x


def _paired(arms: Mapping[str, Sequence[float] | np.ndarray]) -> list[np.ndarray]:
    """Columns of the same items; refuses arms measured on different numbers of items."""
    columns = {name: _column(values, name) for name, values in arms.items()}
    counts = {name: len(column) for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise KvxError(f"arms must be measured on the same items, got {counts} items; evaluate all arms together.")
    return list(columns.values())


def content_carried(
    losses: Mapping[str, Sequence[float] | np.ndarray], bootstrap: Bootstrap | None = None, *, arm: str = "translated"
) -> Estimate:
    """Share of the native cache's content effect that a translated cache carries.

    ``(mismatched - translated) / (native mismatched - native)``, means over items: how much the prediction depends on
    the right content, relative to the native cache. Generic help (style, domain, "some context is there") cancels in
    both differences.

    Args:
        losses: nats per token, ``[n]`` each, of ``mismatched``, ``native_mismatched``, ``native`` and ``arm``.
        bootstrap: resampling settings.
        arm: the arm to judge.

    Returns:
        The estimate; undefined where the native cache itself shows no content effect.

    Example:
        >>> from kvx.evaluation.metrics import content_carried
        >>> losses = {"native": [3.0, 3.1], "native_mismatched": [3.5, 3.6], "translated": [3.2, 3.3],
        ...           "mismatched": [3.5, 3.6]}
        >>> str(content_carried(losses))
        '0.600 [0.600, 0.600]'
    """
    mis, own, native_mis, native = _paired({k: losses[k] for k in ("mismatched", arm, "native_mismatched", "native")})
    return (bootstrap or Bootstrap()).ratio(mis - own, native_mis - native)


def benefit_retained(
    losses: Mapping[str, Sequence[float] | np.ndarray], bootstrap: Bootstrap | None = None, *, arm: str = "translated"
) -> Estimate:
    """Share of the context's benefit that a cache retains; never quoted without :func:`content_carried`.

    ``(none - translated) / (none - native)``, means over items. Generic help counts in it: a map that knows nothing of
    the item can reach a high value.

    Args:
        losses: nats per token, ``[n]`` each, of ``none``, ``native`` and ``arm``.
        bootstrap: resampling settings.
        arm: the arm to judge.

    Returns:
        The estimate; undefined where the native cache itself does not help.

    Example:
        >>> from kvx.evaluation.metrics import benefit_retained
        >>> str(benefit_retained({"none": [4.0, 4.2], "native": [3.0, 3.2], "translated": [3.25, 3.45]}))
        '0.750 [0.750, 0.750]'
    """
    none, own, native = _paired({k: losses[k] for k in ("none", arm, "native")})
    return (bootstrap or Bootstrap()).ratio(none - own, none - native)


def answers_carried(
    scores: Mapping[str, Sequence[float] | np.ndarray], bootstrap: Bootstrap | None = None, *, arm: str = "translated"
) -> Estimate:
    """Content carried, on answers: ``(translated - mismatched) / (native - native mismatched)`` of a score in 0..1.

    Args:
        scores: F1 or exact match, ``[n]`` each, higher is better.
        bootstrap: resampling settings.
        arm: the arm to judge.

    Returns:
        The estimate; undefined where the native target itself does not answer from the context.

    Example:
        >>> from kvx.evaluation.metrics import answers_carried
        >>> f1 = {"native": [1.0, 0.8], "native_mismatched": [0.0, 0.0], "translated": [0.5, 0.4], "mismatched": [0, 0]}
        >>> str(answers_carried(f1))
        '0.500 [0.500, 0.500]'
    """
    own, mis, native, native_mis = _paired({k: scores[k] for k in (arm, "mismatched", "native", "native_mismatched")})
    return (bootstrap or Bootstrap()).ratio(own - mis, native - native_mis)


def nats_per_byte(nats: Sequence[float] | np.ndarray, text_bytes: Sequence[float] | np.ndarray) -> float:
    """Loss per UTF-8 byte of text, total over total: the unit in which models with different tokenizers compare.

    Args:
        nats: total negative log-likelihood of each text.
        text_bytes: UTF-8 bytes of each text.

    Returns:
        Nats per byte.

    Raises:
        KvxError: no bytes at all.

    Example:
        >>> from kvx.evaluation.metrics import bits_per_byte, nats_per_byte
        >>> round(nats_per_byte([80.0, 120.0], [100, 150]), 3), round(bits_per_byte([80.0, 120.0], [100, 150]), 3)
        (0.8, 1.154)
    """
    total = float(np.sum(text_bytes))
    if total <= 0:
        raise KvxError("nats per byte of an empty text is undefined; score at least one token.")
    return float(np.sum(np.asarray(nats, dtype=np.float64))) / total


def bits_per_byte(nats: Sequence[float] | np.ndarray, text_bytes: Sequence[float] | np.ndarray) -> float:
    """:func:`nats_per_byte` in bits: divided by ln 2."""
    return nats_per_byte(nats, text_bytes) / math.log(2.0)
