"""Moments as fp64 normal equations on the host: centred, weight-normalised, for any set of source layers."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Array
from scipy.linalg import solve_triangular

from kvx.errors import KvxError
from kvx.fitting.moments import Moments, Sums, same_pivot
from kvx.fitting.solve import Factor, factor

Part = int | tuple[int, int, int]
EPS32 = float(np.finfo(np.float32).eps)
CACHE_BYTES = 1 << 29  # of read-back covariances; supports of neighbouring target layers share most of them
SHARED = 64  # pairs of layers that must fit in the cache for single heads to be read from it


class Normals:
    """Read sub-problems out of moments; several moments (fitted and held-out rows) count as one without a merged copy.

    Sets of features are given as parts: a source layer's index for all of it, or ``(layer, first, stop)`` for a range
    of its features (keys ``[K,D]``, then values ``[K,Dv]``). They are ordered as given, in the units of the features.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from kvx.fitting.moments import start
        >>> from kvx.fitting.normal import Normals
        >>> from kvx.fitting.plan import Plan
        >>> x = jnp.array(np.random.default_rng(0).normal(size=(200, 2)) + 5, jnp.float32)
        >>> normals = Normals(start(Plan.create([(2,)], [(1,)]), x, 3 * x[:, :1] - x[:, 1:]))
        >>> w = normals.factor((0,), 0.0).solve(normals.cross((0,), 0)).coefficients
        >>> w.ravel().round(3).tolist()
        [3.0, -1.0]
    """

    def __init__(self, *moments: Moments | Normals) -> None:
        """Of one or several sets of moments, or of others' (which then share what has been read already).

        Raises:
            KvxError: none, other plans or pivots, or no rows.
        """
        self._own: list[_Own] = []
        for part in moments:
            self._own += part._own if isinstance(part, Normals) else [_Own(part)]
        own = self._own
        if not own:
            raise KvxError("normal equations need at least one set of moments.")
        if any(o.plan != own[0].plan or not same_pivot(o.moments, own[0].moments) for o in own):
            raise KvxError("moments of different plans or pivots cannot be read together; gather them from one pivot.")
        self.plan = own[0].plan
        self.rows = sum(o.moments.rows for o in own)
        self.weight = sum(o.weight for o in own)
        if not self.rows or not self.weight > 0:
            raise KvxError("the moments hold no rows of non-zero weight; nothing can be fitted on them.")
        self._shares = [o.weight / self.weight for o in own]

    @property
    def effective_rows(self) -> float:
        """Kish's effective sample size ``(sum w)^2 / sum w^2``."""
        return self.weight**2 / sum(o.weight2 for o in self._own)

    def width(self, parts: Sequence[Part]) -> int:
        """Features ``P`` of a set of parts."""
        return sum(stop - first for _, first, stop in self._ranges(parts))

    def mean(self, parts: Sequence[Part]) -> np.ndarray:
        """Mean of the features, float64 ``[P]``."""
        return np.concatenate([self._mean(layer)[first:stop] for layer, first, stop in self._ranges(parts)])

    def floor(self, parts: Sequence[Part]) -> np.ndarray:
        """Variance below which a feature counts as constant: what fp32 cannot tell from rounding, float64 ``[P]``."""
        return (8 * EPS32 * self.mean(parts)) ** 2

    def gram(self, parts: Sequence[Part]) -> np.ndarray:
        """Covariance of the features ``sum w (x-mu)(x-mu)' / sum w``, float64 ``[P,P]``.

        Raises:
            KvxError: the moments were not gathered for this set.
        """
        spans = self._spans(parts)
        gram = np.empty((spans[-1].stop, spans[-1].stop))
        for a, b, block in self._pairs(parts):
            gram[spans[a], spans[b]] = block
            gram[spans[b], spans[a]] = block.T
        return gram

    def times_gram(self, parts: Sequence[Part], w: np.ndarray) -> np.ndarray:
        """``A w`` for the covariance ``A`` of :meth:`gram`, without making it; float64 ``[P,q]``."""
        spans = self._spans(parts)
        result = np.zeros_like(w)
        for a, b, block in self._pairs(parts):
            result[spans[a]] += block @ w[spans[b]]
            if b < a:
                result[spans[b]] += block.T @ w[spans[a]]
        return result

    def cross(self, parts: Sequence[Part], target: int, block: int | None = None) -> np.ndarray:
        """Covariance of the features with outputs ``sum w (x-mu)(y-nu)' / sum w``, float64 ``[P,q]``.

        Args:
            parts: source features.
            target: target layer; block: 0 its keys, 1 its values, ``None`` both.

        Raises:
            KvxError: the moments were not gathered for this pair.
        """
        return self.cross_columns(parts, self.output_columns(target, block))

    def cross_columns(self, parts: Sequence[Part], columns: slice) -> np.ndarray:
        """Like :meth:`cross`, with any range of all outputs (target layers in order, keys before values)."""
        rows = []
        means = [(o.y_mean[columns], share) for o, share in zip(self._own, self._shares, strict=True)]
        nu = _add(share * mean for mean, share in means)
        for layer, first, stop in self._ranges(parts):
            mu = self._mean(layer)
            own = (
                share * (o.cross(layer, first, stop, columns) + np.outer((o.mean(layer) - mu)[first:stop], mean - nu))
                for o, (mean, share) in zip(self._own, means, strict=True)
            )
            rows.append(_add(own))
        return np.concatenate(rows)

    def output_columns(self, target: int, block: int | None = None) -> slice:
        """Where a target layer's keys (0), values (1) or both (``None``) stand among all outputs."""
        widths = self.plan.targets[target]
        start = self.plan.y_starts[target]
        if block is None:
            return slice(start, start + sum(widths))
        start += sum(widths[:block])
        return slice(start, start + widths[block])

    def output_mean(self, target: int, block: int | None = None) -> np.ndarray:
        """Mean of a target layer's outputs (0 keys, 1 values, ``None`` both), float64 ``[q]``."""
        columns = self.output_columns(target, block)
        return _add(share * o.y_mean[columns] for o, share in zip(self._own, self._shares, strict=True))

    def output_covariance(self, target: int, block: int) -> np.ndarray:
        """Covariance of a target layer's keys (0) or values (1), float64 ``[q,q]``."""
        columns, nu = self.output_columns(target, block), self.output_mean(target, block)
        index = sum(len(layer) for layer in self.plan.targets[:target]) + block
        shifts = [o.y_mean[columns] - nu for o in self._own]
        return _add(
            share * (o.output_covariance(index, columns) + np.outer(shift, shift))
            for o, share, shift in zip(self._own, self._shares, shifts, strict=True)
        )

    def factor(self, parts: Sequence[Part], ridge: float, *, where: str = "") -> Factor:
        """Factor the Gram of a set of parts; see :func:`kvx.fitting.solve.factor`."""
        return factor(self.gram(parts), ridge, floor=self.floor(parts), where=where)

    def _pairs(self, parts: Sequence[Part]) -> Iterator[tuple[int, int, np.ndarray]]:
        """Covariance of every pair of parts ``a >= b``, by their numbers."""
        ranges = self._ranges(parts)
        for a, (i, *rows) in enumerate(ranges):
            for b, (j, *columns) in enumerate(ranges[: a + 1]):
                yield a, b, self._covariance(i, j, slice(*rows), slice(*columns))

    def _covariance(self, i: int, j: int, rows: slice, columns: slice) -> np.ndarray:
        if len(self._own) == 1:
            return self._own[0].covariance(i, j, rows, columns)
        mu_i, mu_j = self._mean(i), self._mean(j)
        return _add(
            share
            * (o.covariance(i, j, rows, columns) + np.outer((o.mean(i) - mu_i)[rows], (o.mean(j) - mu_j)[columns]))
            for o, share in zip(self._own, self._shares, strict=True)
        )

    def _mean(self, layer: int) -> np.ndarray:
        return _add(share * o.mean(layer) for o, share in zip(self._own, self._shares, strict=True))

    def _ranges(self, parts: Sequence[Part]) -> list[tuple[int, int, int]]:
        return [(part, 0, sum(self.plan.sources[part])) if isinstance(part, int) else part for part in parts]

    def _spans(self, parts: Sequence[Part]) -> list[slice]:
        ends = np.cumsum([stop - first for _, first, stop in self._ranges(parts)]).tolist()
        return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]


def _add(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Sum of at least one array."""
    first, *rest = arrays
    return sum(rest, first)


class _Own:
    """One set of moments, read back layer by layer into the units of the features."""

    def __init__(self, moments: Moments) -> None:
        self.moments, self.plan = moments, moments.plan
        pivot = moments.pivot
        self.weight, self.weight2 = (float(self._sum(read)) for read in (lambda s: s.weight, lambda s: s.weight2))
        scale = max(self.weight, np.finfo(np.float64).tiny)
        self._x_pivot = np.asarray(pivot.x_mean, np.float64)
        self._y_std = 1.0 / np.asarray(pivot.y_scale, np.float64)
        self._z, self._u = (self._sum(read) / scale for read in (lambda s: s.x, lambda s: s.y))
        self.y_mean = np.asarray(pivot.y_mean, np.float64) + self._u * self._y_std
        self._back: dict[int, np.ndarray] = {}
        self._blocks: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def mean(self, layer: int) -> np.ndarray:
        """Mean of a source layer's features."""
        columns = self._x(layer)
        return self._x_pivot[columns] + self._z[columns] @ self._unwhiten(layer)

    def covariance(self, i: int, j: int, rows: slice, columns: slice) -> np.ndarray:
        """Covariance of ranges of two source layers' features; only what the ranges depend on is read."""
        if i < j:
            return self.covariance(j, i, columns, rows).T
        whole = [sum(self.plan.sources[layer]) for layer in (i, j)]
        sizes = (rows.stop - rows.start, columns.stop - columns.start)
        small = 8 * whole[0] * whole[1] * SHARED <= CACHE_BYTES
        if small or all(4 * size >= width for size, width in zip(sizes, whole, strict=True)):
            return self._kept(i, j)[rows, columns]  # neighbouring supports share it
        blocks = self._block_rows(i, rows.start, rows.stop), self._block_rows(j, columns.start, columns.stop)
        return self._product(i, j, rows, columns, *blocks)

    def _kept(self, i: int, j: int) -> np.ndarray:
        """All of two layers' covariance; the latest ones are kept."""
        if (i, j) in self._blocks:
            self._blocks.move_to_end((i, j))
            return self._blocks[i, j]
        whole = slice(0, sum(self.plan.sources[i])), slice(0, sum(self.plan.sources[j]))
        block = self._blocks[i, j] = self._product(i, j, *whole, *whole)
        while len(self._blocks) * block.nbytes > CACHE_BYTES:
            self._blocks.popitem(last=False)
        return block

    def _product(self, i: int, j: int, rows: slice, columns: slice, left: slice, right: slice) -> np.ndarray:
        """``U_i' S_ij U_j`` for ranges of features and the whitened coordinates that they depend on."""
        first, starts = self.plan.gram_from[i], self.plan.x_starts
        if j < first:
            raise KvxError(
                f"these moments hold no products of source layers {i} and {j}; gather them with a reach of both."
            )
        offset = starts[j] - starts[first]
        inside = slice(offset + right.start, offset + right.stop)
        raw = self._sum(lambda s: np.asarray(s.xx[i])[left, inside]) / self.weight
        if i == j:  # products of a block with itself are symmetric only up to rounding on some CPUs
            mirrored = slice(offset + left.start, offset + left.stop)
            raw = (raw + self._sum(lambda s: np.asarray(s.xx[i])[right, mirrored]).T / self.weight) / 2
        raw -= np.outer(self._z[self._x(i)][left], self._z[self._x(j)][right])
        product: np.ndarray = self._unwhiten(i)[left, rows].T @ raw @ self._unwhiten(j)[right, columns]
        return product

    def cross(self, layer: int, first: int, stop: int, columns: slice) -> np.ndarray:
        """Covariance of a range of a source layer's features with a range of all outputs."""
        starts = self.plan.y_starts
        a, b = self.plan.cross[layer]
        if not starts[a] <= columns.start < columns.stop <= starts[b]:
            wanted = columns.start if columns.start < starts[a] else columns.stop - 1
            raise KvxError(
                f"these moments hold no products of source layer {layer} and target layer "
                f"{bisect.bisect_right(starts, wanted) - 1}; gather them with a reach that joins both."
            )
        inside = slice(columns.start - starts[a], columns.stop - starts[a])
        back = self._unwhiten(layer)[:, first:stop]
        rows = self._block_rows(layer, first, stop)
        raw = self._sum(lambda s: np.asarray(s.xy[layer])[rows, inside]) / self.weight
        raw -= np.outer(self._z[self._x(layer)][rows], self._u[columns])
        return back[rows].T @ (raw * self._y_std[columns])

    def _block_rows(self, layer: int, first: int, stop: int) -> slice:
        """The whitened coordinates that a range of a layer's features depends on: those of the blocks it touches."""
        edges = np.cumsum([0, *self.plan.sources[layer]]).tolist()
        return slice(edges[bisect.bisect_right(edges, first) - 1], edges[bisect.bisect_left(edges, stop)])

    def output_covariance(self, index: int, columns: slice) -> np.ndarray:
        """Covariance of one block of outputs."""
        mean, std = self._u[columns], self._y_std[columns]
        raw = self._sum(lambda s: s.yy[index]) / self.weight - np.outer(mean, mean)
        return raw * std[:, None] * std[None, :]

    def _x(self, layer: int) -> slice:
        return slice(self.plan.x_starts[layer], self.plan.x_starts[layer + 1])

    def _sum(self, read: Callable[[Sums], Array | np.ndarray]) -> np.ndarray:
        total, error = (np.asarray(read(sums)) for sums in (self.moments.total, self.moments.error))
        return np.add(total, error, dtype=np.float64)

    def _unwhiten(self, layer: int) -> np.ndarray:
        """``U`` with ``x - mean = z U`` for one source layer, block diagonal, float64 ``[w,w]``."""
        if layer in self._back:
            return self._back[layer]
        widths = self.plan.sources[layer]
        result, row = np.zeros((sum(widths), sum(widths))), 0
        before = sum(len(blocks) for blocks in self.plan.sources[:layer])
        for white in self.moments.pivot.white[before : before + len(widths)]:
            block = np.asarray(white, np.float64)
            span = slice(row, row + len(block))
            result[span, span] = solve_triangular(block, np.eye(len(block)))
            row += len(block)
        self._back[layer] = result
        return result
