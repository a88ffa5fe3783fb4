"""The full-head map: every target head reads all kv heads of a few source layers; closed-form ridge (Heo et al.)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvx.alignment import Alignment
from kvx.cache.cache import KVCache
from kvx.cache.geometry import CacheGeometry
from kvx.errors import KvxError
from kvx.mappers.base import Support
from kvx.mappers.history import NONE, History, check_history
from kvx.mappers.linear import LinearParams, apply_linear
from kvx.mappers.support import (
    RANKING_RIDGE,
    RIDGES,
    check_settings,
    check_weighing,
    layer_entry,
    reach_of,
    support_of,
    with_low,
)

if TYPE_CHECKING:
    from kvx.fitting.moments import Moments


@dataclasses.dataclass(frozen=True)
class FullHead:
    """Settings of the full-head map; build with :func:`full_head`.

    Attributes:
        layers: source layers that feed each target layer, or ``"all"``.
        inputs: ``"both"``: keys and values feed keys and values; ``"same"``: each only its own kind.
        choice: ``"nearest"`` in depth, or ``"best"`` by held-out explained variance.
        ridges: candidates; with several, each target layer and component takes the best on held-out rows.
        sensitivity: which sensitivities weigh the rows (``"probes"``, ``"all"``), ``None`` for uniform weights.
        select: the best ridge is that of held-out ``"r2"``, or of held-out ``"attention"`` output.
        history: earlier tokens that are read too; the geometries that methods below get hold its layers.
    """

    layers: int | str = 7
    inputs: str = "both"
    choice: str = "nearest"
    ridges: tuple[float, ...] = RIDGES
    sensitivity: str | None = None
    select: str = "r2"
    history: History = NONE

    def reach(self, source: CacheGeometry, target: CacheGeometry) -> tuple[tuple[int, ...], ...] | None:
        """Source layers that may feed each target layer; ``None`` when any may."""
        if self.choice == "best" or self.layers == "all":
            return None
        return reach_of(source, target, int(self.layers), self.history)

    def fit(self, moments: Moments, held_out: Moments | None = None) -> LinearParams:
        """Solve for every target layer; see :func:`full_head`.

        Args:
            moments: of a pair whose geometries are ``moments.source`` and ``moments.target``.
            held_out: rows of other texts; needed to choose layers or among several ridges, and fitted too in the end.

        Returns:
            Parameters; ``params.report`` tells how each entry went.
        """
        support = self.support(moments, held_out)
        return support.finish(moments.regress(held_out, support.entries, self.ridges))

    def support(self, moments: Moments, held_out: Moments | None = None) -> Support:
        """The chosen source layers as entries: one for each target layer's keys and one for its values."""
        source, target = moments.source, moments.target
        entries = [
            layer_entry(source, target, layer, component, layers, self.inputs)
            for layer, layers in enumerate(self._supports(moments, held_out))
            for component in (0, 1)
        ]
        return support_of(entries, source, target, inputs=self.inputs, history=self.history)

    def apply(self, params: LinearParams, cache: KVCache, alignment: Alignment) -> KVCache:
        """The target's cache of the context; see :func:`kvx.mappers.linear.apply_linear`."""
        return apply_linear(params, cache, alignment)

    def _supports(self, moments: Moments, held_out: Moments | None) -> tuple[tuple[int, ...], ...]:
        source, target = moments.source, moments.target
        own = source.num_layers - self.history.count
        count = own if self.layers == "all" else min(int(self.layers), own)
        if self.choice == "nearest" or count == own:
            return reach_of(source, target, count, self.history)
        if held_out is None:
            raise KvxError("choosing source layers by score needs held-out moments; fit with held_out above 0.")
        singles = [
            layer_entry(source, target, layer, component, (one,), self.inputs)
            for one in range(own)
            for layer in range(target.num_layers)
            for component in (0, 1)
        ]
        scores = np.array([score.mean() for score in moments.scores(held_out, singles, RANKING_RIDGE)])
        ranked = scores.reshape(own, target.num_layers, 2).mean(axis=2)
        best = np.argsort(-ranked, axis=0, kind="stable")[:count]
        return tuple(with_low(column.tolist(), source, self.history) for column in best.T)


def full_head(
    layers: int | Literal["all"] = 7,
    inputs: Literal["both", "same"] = "both",
    choice: Literal["nearest", "best"] = "nearest",
    ridge: float | tuple[float, ...] | None = None,
    sensitivity: bool | Literal["probes", "all"] | None = False,
    select: Literal["r2", "attention"] = "r2",
    history: int = 0,
    history_layers: int = 1,
) -> FullHead:
    """Ridge regression of each target layer's keys and values on all heads of k source layers.

    ``y = nu + (x - mu) W`` with ``W = (A + ridge diag A)^-1 B``, where x are the un-rotated keys and values of the k
    source layers on the target's tokens, A is their covariance and B that with y. One Gram serves all heads of a layer.

    Args:
        layers: k, or ``"all"`` source layers.
        inputs: ``"both"``: keys and values feed keys and values (better, twice the coefficients); ``"same"``: each only
            its own kind.
        choice: ``"nearest"``: source layers nearest in relative depth; ``"best"``: those that explain most held-out
            variance alone, averaged over heads and over keys and values.
        ridge: on the scaled Gram, without unit; ``None``: chosen on held-out rows from 1e-5 ... 1 for each target layer
            and component; a tuple: chosen among these.
        sensitivity: weigh each row by how strongly an error in its key or value moves the attention outputs of later
            queries (mean over the layer's heads), as far as enough effective rows remain; measured at 32 ``"probes"``
            (also ``True``) or with ``"all"`` queries. Needs a second pass over the pairs.
        select: what chooses among several ridges: held-out ``"r2"``, or held-out ``"attention"`` output: what the
            target's queries read from the predicted keys and values, against what they read natively (a second pass as
            well).
        history: source tokens before the aligned one that are read too, in the ``history_layers`` lowest source layers
            (which are then read at the aligned token as well); see :func:`kvx.mappers.history.with_history`.
        history_layers: see ``history``.

    Returns:
        The method; fit it with :func:`kvx.fit`.

    Raises:
        KvxError: settings out of range.

    Example:
        >>> import kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> from kvx.mappers import full_head
        >>> mapper, report = kvx.fit(full_head(layers=2), toy_pairs(), progress=False)
        >>> mapper.params.keys[0].coefficients.shape  # [L, entries, P, K, D]
        (2, 1, 32, 1, 6)
        >>> report.r2_held_out > 0.99
        True

    Reference: Heo et al., arXiv 2608.03893 (``inputs="same"``, ``choice="best"``).
    """
    ridges = check_settings(layers, inputs, choice, ridge)
    mode = check_weighing(sensitivity, select, ridges)
    return FullHead(layers, inputs, choice, ridges, mode, select, check_history(history, history_layers))
