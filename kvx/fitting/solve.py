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


@dataclasses.dataclass(frozen=True)
class Factor:
    """A factored Gram, ready for any number of right-hand sides; build with :func:`factor`.

    Attributes:
        gram: the Gram as given, float64 ``[P,P]``.
        cholesky: lower Cholesky factor of the scaled Gram plus ridge, float64 ``[P,P]``; the upper triangle is junk.
        scale: float64 ``[P]``, one over each feature's standard deviation; 0 for features that do not vary.
        ridge, condition, escalations: as in :class:`Solution`.
        where: names the problem in errors.
    """

    gram: np.ndarray
    cholesky: np.ndarray
    scale: np.ndarray
    ridge: float
    condition: float
    escalations: int
    where: str = ""

    def solve(self, cross: np.ndarray) -> Solution:
        """Coefficients for one block of right-hand sides.

        Args:
            cross: float64 ``[P,Q]``, centred and weight-normalised like the Gram.

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
        if not np.isfinite(cross).all():
            raise KvxError(f"{_name(self.where)}the cross moments hold NaN or infinity; mask those rows with weight 0.")
        right = np.asfortranarray(cross * self.scale[:, None])
        scaled, info = lapack.dpotrs(self.cholesky, right, lower=1)
        residual = self._residual(scaled, right) if info == 0 else np.inf
        if not residual <= RESIDUAL_LIMIT:
            raise KvxError(
                f"{_name(self.where)}the solve leaves a relative residual of {residual:.1e} (condition estimate "
                f"{self.condition:.1e}, ridge {self.ridge:.1e}); expected below {RESIDUAL_LIMIT:.0e}: raise the ridge."
            )
        scaled *= self.scale[:, None]
        return Solution(scaled, self.ridge, self.condition, residual, self.escalations)

    def _residual(self, scaled: np.ndarray, right: np.ndarray) -> float:
        """Relative residual of ``(S + ridge) w = r`` on a few random sign combinations of the columns."""
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(right.shape[1], min(PROBES, right.shape[1])))
        w, r = scaled @ signs, right @ signs
        left = self.scale[:, None] * (self.gram @ (self.scale[:, None] * w)) + self.ridge * w
        size = np.linalg.norm(r)
        return float(np.linalg.norm(left - r) / size) if size else float(np.linalg.norm(left))


def factor(gram: np.ndarray, ridge: float, *, floor: np.ndarray | float = 0.0, where: str = "") -> Factor:
    """Factor a centred, weight-normalised Gram plus a ridge that acts on its correlations.

    With ``s_i = A_ii^(-1/2)`` the matrix ``S + ridge I``, ``S_ij = s_i A_ij s_j``, is factored, so the same ridge means
    the same for any number of rows and any scale of the features. When the factorisation fails, is singular to working
    precision or solves badly, the ridge is raised a hundredfold, to at most ``max(1e-4, 100 ridge)``.

    Args:
        gram: float64 ``[P,P]``, symmetric.
        ridge: without unit, on the scaled Gram; zero asks for plain least squares.
        floor: variances at or below it (scalar or ``[P]``, squared units of the features) count as zero: such features
            get zero coefficients.
        where: names the layer and head in errors.

    Returns:
        The factored problem.

    Raises:
        KvxError: a ridge below zero, NaN in the Gram, or a Gram that no permitted ridge makes positive definite.

    Example:
        >>> import numpy as np
        >>> from kvx.fitting.solve import factor
        >>> twins = np.ones((2, 2))
        >>> factor(twins, 0.0).escalations > 0, factor(twins, 1e-3).escalations
        (True, 0)
    """
    gram = np.asarray(gram, np.float64)
    if not 0.0 <= ridge < np.inf:
        raise KvxError(f"{_name(where)}ridge is {ridge}; expected a finite number of at least 0.")
    if not np.isfinite(gram).all():
        raise KvxError(
            f"{_name(where)}the Gram holds NaN or infinity; mask those rows with weight 0 before accumulating."
        )
    variance = np.diag(gram)
    alive = (variance > floor) & (variance > 0)
    scale = np.where(alive, 1.0 / np.sqrt(np.where(alive, variance, 1.0)), 0.0)
    used, limit, escalations = float(ridge), max(1e-4, ESCALATION * ridge), 0
    while True:
        cholesky, condition = _cholesky(gram, scale, used)
        if cholesky is not None and condition < CONDITION_LIMIT:
            found = Factor(gram, cholesky, scale, used, condition, escalations, where)
            if _solves(found):
                return found
        following = used * ESCALATION if used else FIRST_RIDGE
        if following > limit * (1 + 1e-9):
            raise KvxError(_failure(gram, scale, used, condition, where))
        used, escalations = following, escalations + 1


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
        KvxError: see :func:`factor` and :meth:`Factor.solve`.

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


def _cholesky(gram: np.ndarray, scale: np.ndarray, ridge: float) -> tuple[np.ndarray | None, float]:
    """Lower Cholesky factor of the scaled Gram plus ridge and its condition estimate; ``None, inf`` when it fails."""
    matrix = np.array(gram, order="F")
    matrix *= scale[:, None]
    matrix *= scale[None, :]
    diagonal = np.einsum("ii->i", matrix)
    diagonal[:] = np.where(scale > 0, 1.0 + ridge, 1.0)
    norm = np.abs(matrix).sum(axis=0).max(initial=0.0)
    cholesky, info = lapack.dpotrf(matrix, lower=1, clean=0, overwrite_a=1)
    if info != 0 or not np.isfinite(np.diag(cholesky)).all():
        return None, np.inf
    reciprocal, info = lapack.dpocon(cholesky, norm, uplo="L")
    return cholesky, float(1.0 / reciprocal) if info == 0 and reciprocal > 0 else np.inf


def _solves(found: Factor) -> bool:
    """Whether the factor solves a random right-hand side that the Gram can produce."""
    direction = np.random.default_rng(1).standard_normal((len(found.scale), 1))
    right = found.scale[:, None] * (found.gram @ (found.scale[:, None] * direction)) + found.ridge * direction
    right *= found.scale[:, None] > 0
    scaled, info = lapack.dpotrs(found.cholesky, np.asfortranarray(right), lower=1)
    return info == 0 and bool(np.isfinite(scaled).all()) and found._residual(scaled, right) <= RESIDUAL_LIMIT


def _failure(gram: np.ndarray, scale: np.ndarray, ridge: float, condition: float, where: str) -> str:
    detail = f"condition estimate {condition:.1e}"
    if len(scale) <= 1024:
        values = np.linalg.eigvalsh(gram * scale[:, None] * scale[None, :])
        detail += f", eigenvalues {values[0]:.1e} to {values[-1]:.1e}"
    return (
        f"{_name(where)}the scaled Gram is not positive definite even with ridge {ridge:.1e} ({detail}); expected "
        "moments of real rows: fit on more rows, use a larger ridge or fewer source layers."
    )


def _name(where: str) -> str:
    return f"{where}: " if where else ""
