"""The low-rank map: all outputs from one shared state of a token; reduced-rank ridge regression in closed form."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import jax.numpy as jnp
import numpy as np
from scipy.linalg import cholesky, qr, solve_triangular

from kvx.alignment import Alignment
from kvx.cache.cache import KVCache
from kvx.cache.geometry import CacheGeometry
from kvx.errors import KvxError
from kvx.mappers.base import Entry, EntryReport, Fitted, groups_of
from kvx.mappers.low_rank_params import LowRankParams, Reads, Writes, apply_low_rank
from kvx.mappers.support import check_settings, layer_entry

if TYPE_CHECKING:
    from kvx.fitting.moments import Moments

_ITERATIONS = 4  # of the randomised range finder
_SPARE = 64  # directions it draws beyond the rank


@dataclasses.dataclass(frozen=True)
class LowRank:
    """Settings of the low-rank map; build with :func:`low_rank`.

    Attributes:
        rank: numbers in the state of a token, at most.
        layers: source layers, evenly spaced over its depth, or ``"all"``.
        embeddings: tokens whose target embeddings are read: the aligned one and those before it.
        ridges: candidates; with several, each target layer and component takes the best on held-out rows.
    """

    rank: int
    layers: int | str
    embeddings: int
    ridges: tuple[float, ...]

    def reach(self, source: CacheGeometry, target: CacheGeometry) -> tuple[tuple[int, ...], ...]:
        """The same source layers for every target layer."""
        return (self._layers(source),) * target.num_layers

    def fit(self, moments: Moments, held_out: Moments | None = None) -> LowRankParams:
        """Solve for all outputs together; see :func:`low_rank`.

        Args:
            moments: of a pair whose geometries are ``moments.source`` (with a layer for each embedding) and
                ``moments.target``.
            held_out: rows of other texts; needed to choose among several ridges, and fitted too in the end.
        """
        source, target = moments.source, moments.target
        layers = self._layers(source)
        entries = [
            layer_entry(source, target, layer, component, layers, "both")
            for layer in range(target.num_layers)
            for component in (0, 1)
        ]
        fitted = moments.regress(held_out, entries, self.ridges)
        both = moments.normals(held_out)
        gram, parts = both.gram(entries[0].parts), entries[0].parts
        down, ups = reduced(gram, fitted, self.rank)
        variance = down.T @ gram @ down
        own = source.num_layers - self.embeddings
        dim = sum(stop - first for layer, first, stop in parts if layer == own) if self.embeddings else 0
        center = jnp.asarray(fitted[0].center, jnp.float32)
        reads = Reads(center, jnp.asarray(down, jnp.float32), tuple(n for n in layers if n < own), self.embeddings, dim)
        writes = tuple(
            _writes(entries, fitted, ups, variance, group, component, target)
            for group in groups_of(target)
            for component in (0, 1)
        )
        spreads = [np.diag(both.output_covariance(e.target, e.component)) for e in entries]
        report = tuple(_report(*row, variance) for row in zip(fitted, ups, spreads, strict=True))
        return LowRankParams(reads, writes, target, report=report)

    def apply(self, params: LowRankParams, cache: KVCache, alignment: Alignment) -> KVCache:
        """The target's cache of the context; see :func:`kvx.mappers.low_rank_params.apply_low_rank`."""
        return apply_low_rank(params, cache, alignment)

    def _layers(self, source: CacheGeometry) -> tuple[int, ...]:
        """Source layers that are read, those of the embeddings last."""
        own = source.num_layers - self.embeddings
        count = own if self.layers == "all" else min(int(self.layers), own)
        chosen = np.unique(np.linspace(0, own - 1, count).round().astype(int)) if count else np.array([], int)
        return (*(int(n) for n in chosen), *range(own, source.num_layers))


def low_rank(
    rank: int = 1024,
    layers: int | Literal["all"] = "all",
    embeddings: int = 0,
    ridge: float | tuple[float, ...] | None = None,
) -> LowRank:
    """Ridge regression of all target layers at once through a state of R numbers a token.

    ``y = nu + (x - mu) D U``: x joins the un-rotated keys and values of many source layers (and embeddings), D makes
    the state of it, U every target layer's keys and values. Of all maps of that rank it is the one closest to the full
    ridge solution W on the fitted rows, each output in units of its deviation: with ``A = L L'`` the features'
    covariance and u the leading left singular vectors of ``L' W``, ``D = L'^-1 u`` and ``U = u' L' W``. A map through a
    state costs ``R (P + Q)`` numbers in the place of ``P Q``, so that each output can read all of the source.

    Args:
        rank: R; at least as many as features or outputs: the full solution.
        layers: source layers, evenly spaced over the source's depth, first and last included; ``"all"``; or 0, with
            embeddings, for a map that does not read the source at all (a control).
        embeddings: tokens whose embeddings in the target are read beside the source's cache: 1: of the aligned token,
            3: of the two before it too. They are looked up (``kvx.align(..., embed=True)``); no layer of the target
            runs on the context.
        ridge: on the scaled Gram, without unit; ``None``: chosen on held-out rows for each target layer and component;
            a tuple: chosen among these.

    Returns:
        The method; fit it with :func:`kvx.fit`. Its report gives the held-out variance that the regression explains
        before its rank is reduced, and the fitted rows' that the map explains in the end.

    Raises:
        KvxError: settings out of range.

    Example:
        >>> import kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> mapper, report = kvx.fit(kvx.mappers.low_rank(rank=24), toy_pairs(), progress=False)
        >>> mapper.params.reads.weight.shape, mapper.params.writes[0].up.shape
        ((48, 24), (2, 24, 1, 6))

    Reference: reduced-rank regression: Izenman, J. Multivariate Analysis 5 (1975); the Reuse map of SCD, arXiv
    2606.07684, has a rank for each layer.
    """
    ridges = check_settings(layers if layers != 0 else 1, "both", "nearest", ridge)
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (rank, embeddings))
    if not whole or rank < 1 or embeddings < 0:
        raise KvxError(f"rank is {rank!r} and embeddings {embeddings!r}; expected at least 1 and at least 0.")
    if layers == 0 and not embeddings:
        raise KvxError("layers=0 reads no source layer, and embeddings=0 no embedding; read at least one of them.")
    return LowRank(rank, layers, embeddings, ridges)


def reduced(gram: np.ndarray, fitted: Sequence[Fitted], rank: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """The map of this rank that is closest to solved entries on the fitted rows.

    Args:
        gram: float64 ``[P,P]`` covariance of the features.
        fitted: entries that all read these features, coefficients ``[P,q]``.
        rank: R.

    Returns:
        ``D [P,R]``, whose states have unit variance on the fitted rows, and ``U [R,q]`` of each entry.
    """
    spread = [np.sqrt(_carried(one)) for one in fitted]
    units = np.concatenate([1.0 / np.where(s > 0, s, 1.0) for s in spread])
    joined = np.concatenate([one.coefficients for one in fitted], axis=1)
    damped = gram.copy()
    variance = np.diag(gram)
    ridge = np.median([one.report.ridge for one in fitted])
    damped[np.diag_indices_from(damped)] += max(ridge, 1e-9) * variance + np.where(variance > 0, 0.0, 1.0)
    lower = cholesky(damped, lower=True, overwrite_a=True, check_finite=False)
    seen = lower.T @ joined
    directions = _leading(seen * units[None], rank)
    down = solve_triangular(lower, directions, lower=True, trans="T", check_finite=False)
    up = directions.T @ seen
    splits = np.cumsum([one.coefficients.shape[1] for one in fitted])[:-1]
    return down, np.split(up, splits, axis=1)


def _report(one: Fitted, up: np.ndarray, total: np.ndarray, variance: np.ndarray) -> EntryReport:
    """How an entry was fitted, with the variance that the map of lower rank explains on the fitted rows.

    Args:
        one: the solved entry; up: ``[R,q]``; total: ``[q]`` variance of its outputs; variance: of the state ``[R,R]``.
    """
    heads = len(one.covariance)
    carried = 2 * np.square(up).sum(axis=0) - np.einsum("rq,rs,sq->q", up, variance, up, optimize=True)
    share = [part.reshape(heads, -1).sum(axis=1) for part in (carried, total)]
    r2 = share[0] / np.where(share[1] > 0, share[1], 1.0)
    return dataclasses.replace(one.report, r2_fit=float(r2.mean()))


def _carried(one: Fitted) -> np.ndarray:
    """Mean variance of the fitted outputs of each head, for each of its channels."""
    heads, channels, _ = one.covariance.shape
    mean = np.einsum("hdd->h", one.covariance).clip(0) / channels
    return np.repeat(mean, channels)


def _leading(matrix: np.ndarray, rank: int) -> np.ndarray:
    """Leading left singular vectors ``[P,R]``, by randomised subspace iteration where that is cheaper.

    Reference: Halko, Martinsson and Tropp, SIAM Review 53 (2011), algorithm 4.4.
    """
    drawn = rank + _SPARE
    if 2 * drawn >= min(matrix.shape):
        left, _, _ = np.linalg.svd(matrix, full_matrices=False)
        return left[:, :rank]
    basis = np.random.default_rng(0).standard_normal((matrix.shape[0], drawn))
    for _ in range(_ITERATIONS):
        basis = qr(matrix @ (matrix.T @ basis), mode="economic", overwrite_a=True, check_finite=False)[0]
    left, _, _ = np.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ left[:, :rank]


def _writes(
    entries: Sequence[Entry],
    fitted: Sequence[Fitted],
    ups: Sequence[np.ndarray],
    variance: np.ndarray,
    layers: tuple[int, ...],
    component: int,
    target: CacheGeometry,
) -> Writes:
    """One component of a group of target layers; ``variance``: of the state ``[R,R]``."""
    chosen = [
        next(n for n, e in enumerate(entries) if (e.target, e.component) == (layer, component)) for layer in layers
    ]
    shape = target.layers[layers[0]]
    heads, channels = shape.kv_heads, (shape.key_dim, shape.value_dim)[component]
    up = np.stack([ups[n].reshape(-1, heads, channels) for n in chosen])
    covariance = np.einsum("lrkd,rs,lske->lkde", up, variance, up, optimize=True)
    mean = np.stack([fitted[n].mean.reshape(heads, channels) for n in chosen])
    first, second, third = (jnp.asarray(x, jnp.float32) for x in (up, mean, covariance))
    return Writes(first, second, third, component=component, layers=layers)
