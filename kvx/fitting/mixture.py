"""Centred moments of one entry in fp64, mixtures of them, and how far weights may go before too few rows count."""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.linalg import solve_triangular

from kvx.fitting.normal import Normals
from kvx.fitting.weighted_sums import EntrySums, Frame, Outputs
from kvx.mappers.base import Entry


@dataclasses.dataclass(frozen=True, eq=False)
class Centred:
    """Weight-normalised, centred moments of one entry, in the units of its features and outputs.

    Attributes:
        gram: ``sum w (x-mu)(x-mu)' / sum w``, float64 ``[P,P]``; cross: with the outputs, ``[P,q]``.
        x_mean: ``[P]``; y_mean, variance: of the outputs ``[q]``.
        weight, weight2: ``sum w``, ``sum w^2``.
    """

    gram: np.ndarray
    cross: np.ndarray
    x_mean: np.ndarray
    y_mean: np.ndarray
    variance: np.ndarray
    weight: float = 0.0
    weight2: float = 0.0

    def variation(self, rows: int) -> float:
        """Squared coefficient of variation of the weights of that many rows."""
        return max(rows * self.weight2 / self.weight**2 - 1.0, 0.0) if self.weight > 0 else 0.0


def mixed(a: Centred, b: Centred, share: float) -> Centred:
    """``(1 - share) a + share b`` as one distribution: means move, and their distance adds to the covariances."""
    if share == 0.0:
        return a
    x, y = b.x_mean - a.x_mean, b.y_mean - a.y_mean
    between = share * (1 - share)
    return Centred(
        (1 - share) * a.gram + share * b.gram + between * np.outer(x, x),
        (1 - share) * a.cross + share * b.cross + between * np.outer(x, y),
        a.x_mean + share * x,
        a.y_mean + share * y,
        (1 - share) * a.variance + share * b.variance + between * y**2,
        a.weight + b.weight,
        a.weight2 + b.weight2,
    )


def of_normals(normals: Normals, entry: Entry, gram: np.ndarray | None = None) -> Centred:
    """The uniform moments of an entry; ``gram``: of its parts, where that has been read already."""
    where, columns = (entry.target, entry.component), entry.columns
    return Centred(
        normals.gram(entry.parts) if gram is None else gram,
        normals.cross(entry.parts, *where)[:, columns],
        normals.mean(entry.parts),
        normals.output_mean(*where)[columns],
        np.diag(normals.output_covariance(*where))[columns],
        normals.weight,
    )


def of_sums(frame: Frame, outputs: Outputs, sums: tuple[EntrySums, EntrySums]) -> Centred | None:
    """Weighted sums read back from their frame; ``None`` when no row had any weight."""

    def read(name: str) -> np.ndarray:
        return np.add(*(np.asarray(getattr(part, name)) for part in sums), dtype=np.float64)

    weight = float(read("weight"))
    if not weight > 0:
        return None
    z, u = read("x") / weight, read("y") / weight
    std = 1.0 / np.asarray(outputs.scale, np.float64)
    gram, cross = read("xx") / weight - np.outer(z, z), (read("xy") / weight - np.outer(z, u)) * std[None, :]
    mean, at = np.asarray(frame.mean, np.float64).copy(), 0
    for white in frame.white:
        block = np.asarray(white, np.float64)
        back, span = solve_triangular(block, np.eye(len(block))), slice(at, at + len(block))
        gram[span], cross[span], mean[span] = back.T @ gram[span], back.T @ cross[span], mean[span] + z[span] @ back
        gram[:, span] = gram[:, span] @ back
        at += len(block)
    variance = np.maximum(read("yy") / weight - u**2, 0.0) * std**2
    y_mean = np.asarray(outputs.mean, np.float64) + u * std
    return Centred(gram, cross, mean, y_mean, variance, weight, float(read("weight2")))


def shrinkage(rows: int, variation: float, width: int) -> float:
    """How far weights ``w = 1 + alpha (r - 1)`` may go from uniform (0) to the sensitivities r (1).

    Kish's effective sample size is ``n / (1 + alpha^2 CV^2(r))``; alpha is the largest, up to 1, that keeps
    ``tau = min(n, 2 P)`` effective rows: ``min(1, sqrt((n / tau - 1) / CV^2))``, and 0 when ``n <= 2 P``.

    Args:
        rows: n.
        variation: ``CV^2(r)``, the squared coefficient of variation of the sensitivities.
        width: features P of the entry.

    Returns:
        alpha.

    Example:
        >>> from kvx.fitting.mixture import shrinkage
        >>> shrinkage(100, 4.0, 50), shrinkage(200, 4.0, 50), shrinkage(10_000, 4.0, 50)
        (0.0, 0.5, 1.0)

    Reference: CacheBridge, arXiv 2609.00891; Kish, Survey Sampling (1965).
    """
    tau = min(rows, 2 * width)
    if rows <= tau:
        return 0.0
    return 1.0 if variation <= 0 else min(1.0, float(np.sqrt((rows / tau - 1) / variation)))


def alpha_of(weighted: Centred, rows: int) -> float:
    """:func:`shrinkage` of an entry's weighted moments, gathered over that many rows."""
    return shrinkage(rows, weighted.variation(rows), len(weighted.x_mean))
