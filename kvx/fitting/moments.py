"""Streaming sufficient statistics of a least-squares fit: pivoted, whitened, in compensated fp32."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.linalg import solve_triangular

from kvx.cache.geometry import CacheGeometry
from kvx.errors import KvxError
from kvx.fitting.plan import Plan
from kvx.mappers.base import Entry, Fitted
from kvx.typing import host, pytree, static, typed

HIGHEST = jax.lax.Precision.HIGHEST
WHITENING_FLOOR = 1e-12
COUNT_BASE = 1 << 30


@pytree
class Pivot:
    """The coordinates in which sums are taken: ``z = (x - mean) white`` and ``u = (y - mean) / std``.

    Centring at a first batch keeps one-pass centring from cancelling; whitening each block by that batch keeps fp32
    products accurate for features that are nearly collinear (condition numbers of 1e4 and more).

    Attributes:
        x_mean: float32 ``[P]``; white: float32 ``[w,w]`` upper triangular, for each block of the plan's source layers.
        y_mean: float32 ``[Q]``; y_scale: float32 ``[Q]``, one over the standard deviation.
    """

    x_mean: Array
    white: tuple[Array, ...]
    y_mean: Array
    y_scale: Array


@pytree
class Sums:
    """Weighted sums over rows, in pivot coordinates.

    Attributes:
        weight, weight2: ``sum w``, ``sum w^2``.
        x: ``sum w z`` ``[P]``; y: ``sum w u`` ``[Q]``.
        xx: for each source layer ``i``: ``sum w z_i z_j'`` against layers ``gram_from[i]..i``, ``[w_i, ...]``.
        xy: for each source layer: ``sum w z_i u'`` against its target layers, ``[w_i, ...]``.
        yy: for each block of each target layer: ``sum w u u'``.
    """

    weight: Array
    weight2: Array
    x: Array
    y: Array
    xx: tuple[Array, ...]
    xy: tuple[Array, ...]
    yy: tuple[Array, ...]


@pytree
class Moments:
    """Moments of all rows seen so far; build with :func:`start`, extend by :func:`accumulate` and :func:`merge`.

    Attributes:
        pivot: coordinates of the sums, shared by everything that is ever merged.
        total: fp32 sums; error: what their rounding has lost so far (compensated summation).
        count: int32 ``[2]``: rows of non-zero weight, low and high part to the base 2^30.
        plan: which sums are kept.
        progress: host only: told ``(what, done, total)`` while entries are solved.
    """

    pivot: Pivot
    total: Sums
    error: Sums
    count: Array
    plan: Plan = static()
    progress: Callable[[str, int, int], Any] | None = host(default=None)

    @property
    def rows(self) -> int:
        """Rows of non-zero weight."""
        low, high = np.asarray(self.count).tolist()
        return high * COUNT_BASE + low

    @property
    def source(self) -> CacheGeometry:
        """Geometry of the source's caches."""
        return self._geometry(self.plan.source)

    @property
    def target(self) -> CacheGeometry:
        """Geometry of the target's caches."""
        return self._geometry(self.plan.target)

    @staticmethod
    def _geometry(geometry: CacheGeometry | None) -> CacheGeometry:
        if geometry is None:
            raise KvxError(
                "these moments are of plain rows, not of caches; make their plan with Plan.of(source, target)."
            )
        return geometry

    def regress(self, held_out: Moments | None, entries: Sequence[Entry], ridges: Sequence[float]) -> list[Fitted]:
        """Solve entries of a support table; see :func:`kvx.fitting.regress.regress`."""
        from kvx.fitting.regress import regress

        return regress(self, held_out, entries, ridges, progress=self.progress or (lambda what, done, total: None))

    def normals(self, held_out: Moments | None = None) -> Any:
        """The normal equations of these rows, and the held-out ones: :class:`kvx.fitting.normal.Normals`."""
        from kvx.fitting.normal import Normals

        return Normals(self) if held_out is None else Normals(self, held_out)

    def scores(self, held_out: Moments, entries: Sequence[Entry], ridge: float) -> list[np.ndarray]:
        """Held-out explained variance of entries; see :func:`kvx.fitting.regress.scores`."""
        from kvx.fitting.regress import scores

        return scores(self, held_out, entries, ridge, progress=self.progress)

    def __repr__(self) -> str:
        sides = f"{len(self.plan.sources)} source layers, {len(self.plan.targets)} target layers"
        return f"Moments({self.rows:,} rows, {sides}, {8 * self.plan.numbers / 1e6:,.0f} MB)"


@typed
def make_pivot(
    plan: Plan, x: Float[Array, "N P"], y: Float[Array, "N Q"], weight: Float[Array, " N"] | None = None
) -> Pivot:
    """Pivot from a first batch: means, Cholesky whitening of each source block, standard deviations of the outputs.

    Args:
        plan: layout of the columns.
        x: features of the batch; y: its outputs; weight: rows with weight 0 are left out.

    Raises:
        KvxError: widths that do not fit the plan, no rows, or NaN in a row that counts.
    """
    _check_widths(plan, x, y)
    keep = np.ones(x.shape[0], bool) if weight is None else np.asarray(weight) > 0
    if not keep.any():
        raise KvxError(
            "the first batch has no rows of non-zero weight; give one with real tokens to make the pivot from."
        )
    rows = np.flatnonzero(keep)
    x_blocks = [_finite_block(x, rows, *span) for span in _spans(plan.sources)]
    y_blocks = [_finite_block(y, rows, *span) for span in _spans(plan.targets)]
    white = tuple(jnp.asarray(_whitening(block - mean)) for block, mean in x_blocks)
    x_mean, y_mean = (np.concatenate([mean for _, mean in blocks]) for blocks in (x_blocks, y_blocks))
    std = np.concatenate([np.sqrt(np.mean((block - mean) ** 2, axis=0)) for block, mean in y_blocks])
    scale = np.where(std > 0, 1.0 / np.where(std > 0, std, 1.0), 1.0).astype(np.float32)
    return Pivot(jnp.asarray(x_mean), white, jnp.asarray(y_mean), jnp.asarray(scale))


def zeros(plan: Plan, pivot: Pivot) -> Moments:
    """Moments of no rows yet.

    Hosts that will merge their moments start from one pivot (see :func:`make_pivot`).
    """
    x, y = plan.x_starts, plan.y_starts

    def make() -> Sums:
        sizes = [b - a for a, b in zip(x[:-1], x[1:], strict=True)]
        xx = tuple(jnp.zeros((w, x[i + 1] - x[plan.gram_from[i]])) for i, w in enumerate(sizes))
        xy = tuple(jnp.zeros((w, y[b] - y[a])) for w, (a, b) in zip(sizes, plan.cross, strict=True))
        yy = tuple(jnp.zeros((w, w)) for layer in plan.targets for w in layer)
        return Sums(jnp.zeros(()), jnp.zeros(()), jnp.zeros(x[-1]), jnp.zeros(y[-1]), xx, xy, yy)

    return Moments(pivot, make(), make(), jnp.zeros(2, jnp.int32), plan)


@typed
def start(
    plan: Plan, x: Float[Array, "N P"], y: Float[Array, "N Q"], weight: Float[Array, " N"] | None = None
) -> Moments:
    """Moments of a first batch, whose means and covariances become the pivot. See :func:`accumulate`.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.fitting.moments import accumulate, start
        >>> from kvx.fitting.plan import Plan
        >>> plan = Plan.create([(1,)], [(1,)])
        >>> x = jnp.arange(4.0)[:, None]
        >>> moments = start(plan, x, 2 * x)
        >>> accumulate(moments, x, 2 * x).rows
        8
    """
    return accumulate(zeros(plan, make_pivot(plan, x, y, weight)), x, y, weight)


@typed
def accumulate(
    moments: Moments, x: Float[Array, "N P"], y: Float[Array, "N Q"], weight: Float[Array, " N"] | None = None
) -> Moments:
    """Add a block of rows: ``sum w z z'``, ``sum w z u'`` and the lower ones, fp32 products at highest precision.

    The moments passed in are donated: use the ones returned. Blocks of 1,000 to 2,000 rows run at matrix speed.

    Args:
        moments: so far.
        x: features ``[N,P]``, any float dtype.
        y: outputs ``[N,Q]``.
        weight: ``[N]``, at least zero; ``None`` counts every row once. Rows of weight 0 are never read (NaN included).

    Returns:
        Moments of all rows.

    Raises:
        KvxError: widths that do not fit the plan.
    """
    _check_widths(moments.plan, x, y)
    weight = jnp.ones(x.shape[0]) if weight is None else weight.astype(jnp.float32)
    return _accumulate(moments, x, y, weight)


def merge(a: Moments, b: Moments) -> Moments:
    """Moments of all rows of both: the same as one run over both, in any order.

    Raises:
        KvxError: another plan, or another pivot (sums in other coordinates cannot be added).

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.fitting.moments import accumulate, merge, start, zeros
        >>> from kvx.fitting.plan import Plan
        >>> x = jnp.arange(4.0)[:, None]
        >>> a = start(Plan.create([(1,)], [(1,)]), x, x)
        >>> merge(a, accumulate(zeros(a.plan, a.pivot), x, x)).rows
        8
    """
    if a.plan != b.plan:
        raise KvxError("moments of different plans (models or reach) cannot be merged; gather them with the same plan.")
    if not same_pivot(a, b):
        raise KvxError(
            "moments about different pivots cannot be merged; make the pivot once (make_pivot), start each part from "
            "it with zeros(plan, pivot)."
        )
    return _merge(a, b)


def same_pivot(a: Moments, b: Moments) -> bool:
    """Whether both were gathered in the same coordinates."""
    if a.pivot is b.pivot:
        return True
    pairs = zip(jax.tree.leaves(a.pivot), jax.tree.leaves(b.pivot), strict=True)
    return all(p is q or np.array_equal(np.asarray(p), np.asarray(q)) for p, q in pairs)


def _accumulate(moments: Moments, x: Array, y: Array, weight: Array) -> Moments:
    """Fold one product after the other into donated sums, so that scratch stays one layer's block."""
    plan = moments.plan
    z, u, root = _rows(plan, moments.pivot, x, y, weight)
    xs, ys = plan.x_starts, plan.y_starts
    products = {
        "xx": [(z, xs[i], z, xs[first]) for i, first in enumerate(plan.gram_from)],
        "xy": [(z, xs[i], u, ys[first]) for i, (first, _) in enumerate(plan.cross)],
        "yy": [(u, at, u, at) for at, _ in _spans(plan.targets)],
    }
    vectors = {"weight": weight.sum(), "weight2": (weight * weight).sum(), "x": _vector(root, z), "y": _vector(root, u)}
    total: dict[str, Any] = {}
    error: dict[str, Any] = {}
    for name, jobs in products.items():
        sums = zip(getattr(moments.total, name), getattr(moments.error, name), jobs, strict=True)
        folded = [_fold(t, e, *job) if t.size else (t, e) for t, e, job in sums]
        total[name], error[name] = (tuple(pair[k] for pair in folded) for k in (0, 1))
    for name, block in vectors.items():
        total[name], error[name] = _two_sum(getattr(moments.total, name), getattr(moments.error, name), block)
    count = _carry(moments.count + jnp.stack([(weight > 0).sum(dtype=jnp.int32), jnp.zeros((), jnp.int32)]))
    return dataclasses.replace(moments, total=Sums(**total), error=Sums(**error), count=count)


@functools.partial(jax.jit, static_argnums=0)
def _rows(plan: Plan, pivot: Pivot, x: Array, y: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Rows in pivot coordinates times ``sqrt w``, and ``sqrt w``; ``where`` before every product (NaN in padding)."""
    keep = (weight > 0)[:, None]
    root = jnp.sqrt(jnp.where(keep[:, 0], weight, 0.0))
    x = jnp.where(keep, (x.astype(jnp.float32) - pivot.x_mean[None]) * root[:, None], 0.0)
    scale = pivot.y_scale[None] * root[:, None]
    u = jnp.where(keep, (y.astype(jnp.float32) - pivot.y_mean[None]) * scale, 0.0)
    parts = [
        jnp.dot(x[:, start : start + width], white, precision=HIGHEST)
        for (start, width), white in zip(_spans(plan.sources), pivot.white, strict=True)
    ]
    return jnp.concatenate(parts, axis=1), u, root


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _fold(
    total: Array, error: Array, left: Array, row: int | Array, right: Array, column: int | Array
) -> tuple[Array, Array]:
    """Add ``left[:, row:]' right[:, column:]`` (as many columns as the sum has) in fp32 at highest precision."""
    a = jax.lax.dynamic_slice_in_dim(left, row, total.shape[0], axis=1)
    b = jax.lax.dynamic_slice_in_dim(right, column, total.shape[1], axis=1)
    block = jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), precision=HIGHEST)
    return _two_sum(total, error, block)


@jax.jit
def _merge(a: Moments, b: Moments) -> Moments:
    carried = jax.tree.map(jnp.add, a.error, b.error)
    total = jax.tree.map(jnp.add, a.total, b.total)
    error = jax.tree.map(lambda t, e, block: _two_sum(t, e, block)[1], a.total, carried, b.total)
    return dataclasses.replace(a, total=total, error=error, count=_carry(a.count + b.count))


def _carry(count: Array) -> Array:
    return jnp.stack([count[0] % COUNT_BASE, count[1] + count[0] // COUNT_BASE])


def _two_sum(total: Array, error: Array, block: Array) -> tuple[Array, Array]:
    """``total + block`` and the running sum of what its rounding loses (Knuth, TAOCP 2, 4.2.2)."""
    new = total + block
    virtual = new - total
    return new, error + ((total - (new - virtual)) + (block - virtual))


def _vector(root: Array, rows: Array) -> Array:
    return jnp.dot(root, rows, precision=HIGHEST)


def _spans(layers: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
    """First column and width of every block."""
    spans, start = [], 0
    for width in (width for layer in layers for width in layer):
        spans.append((start, width))
        start += width
    return spans


def _finite_block(a: Array, rows: np.ndarray, start: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """One block's counted rows in float64 and their mean rounded to float32."""
    block = np.asarray(a[:, start : start + width])[rows].astype(np.float64)
    mean = block.mean(axis=0).astype(np.float32)
    if not np.isfinite(mean).all():
        raise KvxError("the first batch holds NaN or infinity in a row that counts; give such rows weight 0.")
    return block, mean


def _whitening(x: np.ndarray) -> np.ndarray:
    """Upper-triangular ``T`` such that the centred batch times ``T`` is nearly white; identity where nothing varies."""
    scale = np.sqrt(np.mean(x**2, axis=0))
    scale = np.where(scale > 0, scale, 1.0)
    x = x / scale
    return _whitening_of(x.T @ x / len(x), scale)


def whitening(covariance: np.ndarray) -> np.ndarray:
    """Upper-triangular ``T`` such that rows of this covariance times ``T`` are nearly white, float32 ``[w,w]``."""
    scale = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    scale = np.where(scale > 0, scale, 1.0)
    return _whitening_of(covariance / np.outer(scale, scale), scale)


def _whitening_of(covariance: np.ndarray, scale: np.ndarray) -> np.ndarray:
    covariance[np.diag_indices_from(covariance)] += WHITENING_FLOOR + (np.diag(covariance) == 0)
    lower = np.linalg.cholesky(covariance)
    inverse = solve_triangular(lower, np.eye(len(lower)), lower=True)
    return (inverse / scale[None, :]).T.astype(np.float32)


def _check_widths(plan: Plan, x: Array, y: Array) -> None:
    wanted: Sequence[int] = (plan.x_starts[-1], plan.y_starts[-1])
    if x.shape[1] != wanted[0] or y.shape[1] != wanted[1]:
        raise KvxError(
            f"rows have {x.shape[1]} features and {y.shape[1]} outputs; the plan expects {wanted[0]} and {wanted[1]}."
        )
