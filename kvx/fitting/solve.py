"""Ridge regression from normal equations: scaled, factored once in fp64 on the host, checked, never silently NaN."""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.linalg import lapack

from kvx.errors import KvxError

RESIDUAL_LIMIT = 1e-6
CONDITION_LIMIT = 1e15  # beyond it a double-precision solve can return anything that fits the equations
ESCALATION = 100.0
FIRST_RIDGE = 1e-12
PROBES = 8


@dataclasses.dataclass(frozen=True)
class Solution:
    """A solved ridge problem and how far to trust it.

    Attributes:
        coefficients: float64 ``[P,Q]``, in the units of the unscaled features.
        ridge: the ridge that was used, on the scaled Gram; larger than the one asked for after an escalation.
        condition: estimated 1-norm condition number of the scaled Gram plus ridge.
        residual: relative residual of the scaled normal equations, on random combinations of the right-hand sides.
        escalations: how many times the ridge was raised.
    """

    coefficients: np.ndarray
    ridge: float
    condition: float
    residual: float
    escalations: int


@dataclasses.dataclass(frozen=True, eq=False)
class System:
    """A Gram brought to correlations, ready to be factored with any ridge; build with :func:`prepare`.

    Attributes:
        matrix: ``S_ij = s_i A_ij s_j``, float64 ``[P,P]``, with ones on the diagonal.
        scale: float64 ``[P]``, one over each feature's standard deviation; 0 for features that do not vary.
        norm: its 1-norm.
        where: names the problem in errors.
    """

    matrix: np.ndarray
    scale: np.ndarray
    norm: float
    where: str = ""

    def factor(self, ridge: float) -> Factor:
        """Factor ``S + ridge I``.

        When that fails, is singular to working precision or solves badly, the ridge is raised a hundredfold, to at most
        ``max(1e-4, 100 ridge)``.

        Raises:
            KvxError: a ridge below zero, or no permitted ridge makes the matrix positive definite.
        """
        if not 0.0 <= ridge < np.inf:
            raise KvxError(f"{_name(self.where)}ridge is {ridge}; expected a finite number of at least 0.")
        used, limit, escalations = float(ridge), max(1e-4, ESCALATION * ridge), 0
        while True:
            cholesky, condition = self._cholesky(used)
            if cholesky is not None and condition < CONDITION_LIMIT:
                found = Factor(self, cholesky, used, condition, escalations)
                if found.solves():
                    return found
            following = used * ESCALATION if used else FIRST_RIDGE
            if following > limit * (1 + 1e-9):
                raise KvxError(self._failure(used, condition))
            used, escalations = following, escalations + 1

    def _cholesky(self, ridge: float) -> tuple[np.ndarray | None, float]:
        """Lower Cholesky factor and condition estimate of ``S + ridge I``; ``None, inf`` when it fails."""
        matrix = np.array(self.matrix, order="F")
        np.einsum("ii->i", matrix)[:] = np.where(self.scale > 0, 1.0 + ridge, 1.0)
        cholesky, info = lapack.dpotrf(matrix, lower=1, clean=0, overwrite_a=1)
        if info != 0 or not np.isfinite(np.diag(cholesky)).all():
            return None, np.inf
        reciprocal, info = lapack.dpocon(cholesky, self.norm + ridge, uplo="L")
        return cholesky, float(1.0 / reciprocal) if info == 0 and reciprocal > 0 else np.inf

    def _failure(self, ridge: float, condition: float) -> str:
        detail = f"condition estimate {condition:.1e}"
        if len(self.scale) <= 1024:
            values = np.linalg.eigvalsh(self.matrix)
            detail += f", eigenvalues {values[0]:.1e} to {values[-1]:.1e}"
        return (
            f"{_name(self.where)}the scaled Gram is not positive definite even with ridge {ridge:.1e} ({detail}); "
            "expected moments of real rows: fit on more rows, use a larger ridge or fewer source layers."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Factor:
    """A factored system, ready for any number of right-hand sides.

    Attributes:
        system: what was factored.
        cholesky: lower Cholesky factor of ``S + ridge I``, float64 ``[P,P]``; the upper triangle is junk.
        ridge, condition, escalations: as in :class:`Solution`.
    """

    system: System
    cholesky: np.ndarray
    ridge: float
    condition: float
    escalations: int

    def solve(self, cross: np.ndarray, *, where: str = "") -> Solution:
        """Coefficients for one block of right-hand sides.

        Args:
            cross: float64 ``[P,Q]``, centred and weight-normalised like the Gram.
            where: names the block in errors; by default as the system does.

        Returns:
            The solution; the coefficients of features that do not vary are zero.

        Raises:
            KvxError: the right-hand sides are not finite, or the result does not solve the equations.

        Example:
            >>> import numpy as np
            >>> from kvx.fitting.solve import factor
            >>> factor(np.diag([4.0, 1.0]), 0.0).solve(np.array([[8.0], [3.0]])).coefficients.ravel().tolist()
            [2.0, 3.0]
        """
        where = _name(where or self.system.where)
        if not np.isfinite(cross).all():
            raise KvxError(f"{where}the cross moments hold NaN or infinity; mask those rows with weight 0.")
        scale = self.system.scale[:, None]
        right = np.asfortranarray(cross * scale)
        scaled, info = lapack.dpotrs(self.cholesky, right, lower=1)
        residual = self._residual(scaled, right) if info == 0 else np.inf
        if not residual <= RESIDUAL_LIMIT:
            raise KvxError(
                f"{where}the solve leaves a relative residual of {residual:.1e} (condition estimate "
                f"{self.condition:.1e}, ridge {self.ridge:.1e}); expected below {RESIDUAL_LIMIT:.0e}: raise the ridge."
            )
        scaled *= scale
        return Solution(scaled, self.ridge, self.condition, residual, self.escalations)

    def solves(self) -> bool:
        """Whether the factor solves a right-hand side that the matrix itself produces."""
        direction = np.random.default_rng(1).standard_normal((len(self.system.scale), 1))
        direction *= self.system.scale[:, None] > 0
        right = self.system.matrix @ direction + self.ridge * direction
        scaled, info = lapack.dpotrs(self.cholesky, np.asfortranarray(right), lower=1)
        return info == 0 and bool(np.isfinite(scaled).all()) and self._residual(scaled, right) <= RESIDUAL_LIMIT

    def _residual(self, scaled: np.ndarray, right: np.ndarray) -> float:
        """Relative residual of ``(S + ridge I) w = r`` on a few random sign combinations of the columns."""
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(right.shape[1], min(PROBES, right.shape[1])))
        w, r = scaled @ signs, right @ signs
        gap = np.linalg.norm(self.system.matrix @ w + self.ridge * w - r)
        size = np.linalg.norm(r)
        return float(gap / size) if size else float(gap)


def prepare(gram: np.ndarray, *, floor: np.ndarray | float = 0.0, where: str = "") -> System:
    """Scale a centred, weight-normalised Gram to correlations.

    With ``s_i = A_ii^(-1/2)`` a ridge on ``S_ij = s_i A_ij s_j`` means the same for any number of rows and any scale of
    the features.

    Args:
        gram: float64 ``[P,P]``, symmetric.
        floor: variances at or below it (scalar or ``[P]``, squared units of the features) count as zero: such features
            get zero coefficients.
        where: names the layer and head in errors.

    Returns:
        The system.

    Raises:
        KvxError: NaN in the Gram.
    """
    gram = np.asarray(gram, np.float64)
    if not np.isfinite(gram).all():
        raise KvxError(
            f"{_name(where)}the Gram holds NaN or infinity; mask those rows with weight 0 before accumulating."
        )
    variance = np.diag(gram)
    alive = (variance > floor) & (variance > 0)
    scale = np.where(alive, 1.0 / np.sqrt(np.where(alive, variance, 1.0)), 0.0)
    matrix = gram * scale[:, None]
    matrix *= scale[None, :]
    np.einsum("ii->i", matrix)[:] = 1.0
    norm = float(np.linalg.norm(matrix, 1)) if len(matrix) else 0.0
    return System(matrix, scale, norm, where)


def factor(gram: np.ndarray, ridge: float, *, floor: np.ndarray | float = 0.0, where: str = "") -> Factor:
    """Factor a centred, weight-normalised Gram plus a ridge that acts on its correlations.

    Args:
        gram, floor, where: as for :func:`prepare`.
        ridge: without unit, on the scaled Gram; zero asks for plain least squares.

    Returns:
        The factored problem; its ridge may have been raised (see :meth:`System.factor`).

    Raises:
        KvxError: see :func:`prepare` and :meth:`System.factor`.

    Example:
        >>> import numpy as np
        >>> from kvx.fitting.solve import factor
        >>> twins = np.ones((2, 2))
        >>> factor(twins, 0.0).escalations > 0, factor(twins, 1e-3).escalations
        (True, 0)
    """
    return prepare(gram, floor=floor, where=where).factor(ridge)


def ridge(
    gram: np.ndarray, cross: np.ndarray, lam: float, *, floor: np.ndarray | float = 0.0, where: str = ""
) -> Solution:
    """Solve ``(S + lam I) u = s B``, ``w = s u`` for the centred moments ``A = gram``, ``B = cross``.

    Args:
        gram: float64 ``[P,P]``, centred and weight-normalised: ``sum w (x-mu)(x-mu)' / sum w``.
        cross: float64 ``[P,Q]``, the same for ``(x-mu)(y-nu)'``.
        lam: ridge on the column-scaled Gram ``S``, without unit.
        floor: variances at or below it count as zero.
        where: names the layer and head in errors.

    Returns:
        Coefficients with condition estimate, residual and escalations. The bias is ``nu - mu w``.

    Raises:
        KvxError: see :func:`prepare`, :meth:`System.factor` and :meth:`Factor.solve`.

    Example:
        >>> import numpy as np
        >>> from kvx.fitting.solve import ridge
        >>> x = np.random.default_rng(0).normal(size=(100, 3))
        >>> w = ridge(x.T @ x / 100, x.T @ (2 * x) / 100, 0.0).coefficients
        >>> bool(np.allclose(w, 2 * np.eye(3)))
        True

    Reference: Hoerl and Kennard, Technometrics 12 (1970); condition estimate: LAPACK ``dpocon``.
    """
    cross = np.asarray(cross, np.float64)
    flat = cross[:, None] if cross.ndim == 1 else cross
    solution = factor(gram, lam, floor=floor, where=where).solve(flat)
    return dataclasses.replace(solution, coefficients=solution.coefficients.reshape(cross.shape))


def _name(where: str) -> str:
    return f"{where}: " if where else ""
