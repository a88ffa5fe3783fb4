"""Moments as fp64 normal equations on the host: centred, weight-normalised, for any set of source layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Array
from scipy.linalg import solve_triangular

from kvx.errors import KvxError
from kvx.fitting.moments import Moments, Sums, same_pivot
from kvx.fitting.solve import Factor, factor

Part = int | tuple[int, int, int]
EPS32 = float(np.finfo(np.float32).eps)


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

    def __init__(self, *parts: Moments) -> None:
        if not parts:
            raise KvxError("normal equations need at least one set of moments.")
        if any(part.plan != parts[0].plan or not same_pivot(part, parts[0]) for part in parts):
            raise KvxError("moments of different plans or pivots cannot be read together; gather them from one pivot.")
        self.plan = parts[0].plan
        self.rows = sum(part.rows for part in parts)
        self._sums = [(part.total, part.error) for part in parts]
        self.weight = float(self._add(lambda s: s.weight))
        self.weight2 = float(self._add(lambda s: s.weight2))
        if not self.rows or not self.weight > 0:
            raise KvxError("the moments hold no rows of non-zero weight; nothing can be fitted on them.")
        pivot = parts[0].pivot
        self._x_pivot, self._y_pivot = (np.asarray(m, np.float64) for m in (pivot.x_mean, pivot.y_mean))
        self._y_std = 1.0 / np.asarray(pivot.y_scale, np.float64)
        self._white = pivot.white
        self._back: dict[int, np.ndarray] = {}
        self._z = self._add(lambda s: s.x) / self.weight
        self._u = self._add(lambda s: s.y) / self.weight

    @property
    def effective_rows(self) -> float:
        """Kish's effective sample size ``(sum w)^2 / sum w^2``."""
        return self.weight**2 / self.weight2

    def width(self, parts: Sequence[Part]) -> int:
        """Features ``P`` of a set of parts."""
        return sum(stop - first for _, first, stop in self._ranges(parts))

    def mean(self, parts: Sequence[Part]) -> np.ndarray:
        """Mean of the features, float64 ``[P]``."""
        found = []
        for layer, first, stop in self._ranges(parts):
            columns, back = self._x(layer), self._unwhiten(layer)
            found.append((self._x_pivot[columns] + self._z[columns] @ back)[first:stop])
        return np.concatenate(found)

    def floor(self, parts: Sequence[Part]) -> np.ndarray:
        """Variance below which a feature counts as constant: what fp32 cannot tell from rounding, float64 ``[P]``."""
        return (8 * EPS32 * self.mean(parts)) ** 2

    def gram(self, parts: Sequence[Part]) -> np.ndarray:
        """Covariance of the features ``sum w (x-mu)(x-mu)' / sum w``, float64 ``[P,P]``.

        Raises:
            KvxError: the moments were not gathered for this set.
        """
        ranges, spans = self._ranges(parts), self._offsets(parts)
        gram = np.empty((spans[-1].stop, spans[-1].stop))
        back = [self._unwhiten(layer)[:, first:stop] for layer, first, stop in ranges]
        for a, (i, *_) in enumerate(ranges):
            for b, (j, *_) in enumerate(ranges[: a + 1]):
                block = back[a].T @ self._gram_block(i, j) @ back[b]
                gram[spans[a], spans[b]] = block
                gram[spans[b], spans[a]] = block.T
        return gram

    def times_gram(self, parts: Sequence[Part], w: np.ndarray) -> np.ndarray:
        """``A w`` for the covariance ``A`` of :meth:`gram`, without making it; float64 ``[P,q]``."""
        ranges, spans = self._ranges(parts), self._offsets(parts)
        back = [self._unwhiten(layer)[:, first:stop] for layer, first, stop in ranges]
        inner = [u @ w[span] for u, span in zip(back, spans, strict=True)]
        outer = [np.zeros_like(part) for part in inner]
        for a, (i, *_) in enumerate(ranges):
            for b, (j, *_) in enumerate(ranges[: a + 1]):
                block = self._gram_block(i, j)
                outer[a] += block @ inner[b]
                if b < a:
                    outer[b] += block.T @ inner[a]
        return np.concatenate([u.T @ part for u, part in zip(back, outer, strict=True)])

    def cross(self, parts: Sequence[Part], target: int, block: int | None = None) -> np.ndarray:
        """Covariance of the features with outputs ``sum w (x-mu)(y-nu)' / sum w``, float64 ``[P,q]``.

        Args:
            parts: source features.
            target: target layer; block: 0 its keys, 1 its values, ``None`` both.

        Raises:
            KvxError: the moments were not gathered for this pair.
        """
        columns = self._outputs(target, block)
        rows = [
            self._unwhiten(layer)[:, first:stop].T @ self._cross_block(layer, target, columns)
            for layer, first, stop in self._ranges(parts)
        ]
        return np.concatenate(rows) * self._y_std[columns][None, :]

    def output_mean(self, target: int, block: int | None = None) -> np.ndarray:
        """Mean of a target layer's outputs (0 keys, 1 values, ``None`` both), float64 ``[q]``."""
        columns = self._outputs(target, block)
        return self._y_pivot[columns] + self._u[columns] * self._y_std[columns]

    def output_covariance(self, target: int, block: int) -> np.ndarray:
        """Covariance of a target layer's keys (0) or values (1), float64 ``[q,q]``."""
        index = sum(len(layer) for layer in self.plan.targets[:target]) + block
        columns = self._outputs(target, block)
        mean, std = self._u[columns], self._y_std[columns]
        scaled = self._add(lambda s: s.yy[index]) / self.weight - np.outer(mean, mean)
        return scaled * std[:, None] * std[None, :]

    def factor(self, parts: Sequence[Part], ridge: float, *, where: str = "") -> Factor:
        """Factor the Gram of a set of parts; see :func:`kvx.fitting.solve.factor`."""
        return factor(self.gram(parts), ridge, floor=self.floor(parts), where=where)

    def _ranges(self, parts: Sequence[Part]) -> list[tuple[int, int, int]]:
        return [(part, 0, sum(self.plan.sources[part])) if isinstance(part, int) else part for part in parts]

    def _offsets(self, parts: Sequence[Part]) -> list[slice]:
        ends = np.cumsum([stop - first for _, first, stop in self._ranges(parts)]).tolist()
        return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]

    def _outputs(self, target: int, block: int | None) -> slice:
        widths = self.plan.targets[target]
        start = self.plan.y_starts[target]
        if block is None:
            return slice(start, start + sum(widths))
        start += sum(widths[:block])
        return slice(start, start + widths[block])

    def _x(self, layer: int) -> slice:
        return slice(self.plan.x_starts[layer], self.plan.x_starts[layer + 1])

    def _add(self, read: Callable[[Sums], Array | np.ndarray]) -> np.ndarray:
        parts = [
            np.asarray(read(total), np.float64) + np.asarray(read(error), np.float64) for total, error in self._sums
        ]
        return parts[0] if len(parts) == 1 else np.sum(parts, axis=0)

    def _unwhiten(self, layer: int) -> np.ndarray:
        """``U`` with ``x - mean = z U`` for one source layer, block diagonal, float64 ``[w,w]``."""
        if layer in self._back:
            return self._back[layer]
        widths = self.plan.sources[layer]
        result, row = np.zeros((sum(widths), sum(widths))), 0
        before = sum(len(blocks) for blocks in self.plan.sources[:layer])
        for white in self._white[before : before + len(widths)]:
            block = np.asarray(white, np.float64)
            span = slice(row, row + len(block))
            result[span, span] = solve_triangular(block, np.eye(len(block)))
            row += len(block)
        self._back[layer] = result
        return result

    def _gram_block(self, i: int, j: int) -> np.ndarray:
        if i < j:
            return self._gram_block(j, i).T
        first = self.plan.gram_from[i]
        if j < first:
            raise KvxError(
                f"these moments hold no products of source layers {i} and {j}; gather them with a reach of both."
            )
        starts = self.plan.x_starts
        columns = slice(starts[j] - starts[first], starts[j + 1] - starts[first])
        raw = self._add(lambda s: np.asarray(s.xx[i])[:, columns]) / self.weight
        return raw - np.outer(self._z[self._x(i)], self._z[self._x(j)])

    def _cross_block(self, layer: int, target: int, columns: slice) -> np.ndarray:
        first, stop = self.plan.cross[layer]
        if not first <= target < stop:
            raise KvxError(
                f"these moments hold no products of source layer {layer} and target layer {target}; gather them with a "
                "reach that joins both."
            )
        origin = self.plan.y_starts[first]
        inside = slice(columns.start - origin, columns.stop - origin)
        raw = self._add(lambda s: np.asarray(s.xy[layer])[:, inside]) / self.weight
        return raw - np.outer(self._z[self._x(layer)], self._u[columns])
