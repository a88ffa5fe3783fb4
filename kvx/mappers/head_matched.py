"""The head-matched map: every target head reads one head of each of a few source layers; closed-form ridge."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from kvx.alignment import Alignment
from kvx.cache.cache import KVCache
from kvx.cache.geometry import CacheGeometry
from kvx.errors import KvxError
from kvx.mappers.base import Entry, Support
from kvx.mappers.linear import LinearParams, apply_linear
from kvx.mappers.matching import Table, map_bytes
from kvx.mappers.support import RIDGES, check_choice, check_settings, check_weighing, nearest_layers, support_of

if TYPE_CHECKING:
    from kvx.fitting.moments import Moments


@dataclasses.dataclass(frozen=True)
class HeadMatched:
    """Settings of the head-matched map; build with :func:`head_matched`.

    Attributes:
        layers: source layers that feed each target head, at most, or ``"all"``.
        inputs: ``"both"``: a block is a head's key and value; ``"same"``: only what it feeds.
        heads: ``"learned"`` by held-out explained variance, or by ``"index"``.
        choice: source layers ``"nearest"`` in depth, or ``"best"`` by held-out explained variance.
        ridges: candidates; with several, each target head takes the best on held-out rows.
        budget: bytes of the map, at most; ``None``: no limit.
        sensitivity, select: as in :class:`kvx.mappers.full_head.FullHead`.
    """

    layers: int | str = 7
    inputs: str = "both"
    heads: str = "learned"
    choice: str = "nearest"
    ridges: tuple[float, ...] = RIDGES
    budget: int | None = None
    sensitivity: str | None = None
    select: str = "r2"

    def reach(self, source: CacheGeometry, target: CacheGeometry) -> tuple[tuple[int, ...], ...] | None:
        """Source layers that may feed each target layer; ``None`` when any may."""
        count = self._count(source, target)
        if self.choice == "best" or count >= source.num_layers:
            return None
        return nearest_layers(source.num_layers, target.num_layers, count)

    def fit(self, moments: Moments, held_out: Moments | None = None) -> LinearParams:
        """Choose the support table and solve every entry of it; see :func:`head_matched`.

        Args:
            moments: of a pair whose geometries are ``moments.source`` and ``moments.target``.
            held_out: rows of other texts; needed to choose heads, layers or among several ridges, and fitted too in
                the end.

        Returns:
            Parameters; ``params.report`` tells what each target head reads and how its fit went.
        """
        support = self.support(moments, held_out)
        return support.finish(moments.regress(held_out, support.entries, self.ridges))

    def support(self, moments: Moments, held_out: Moments | None = None) -> Support:
        """The chosen table, to be solved with any weights; see :meth:`entries`."""
        entries = self.entries(moments, held_out)
        return support_of(entries, moments.source, moments.target, inputs=self.inputs, by_head=True)

    def apply(self, params: LinearParams, cache: KVCache, alignment: Alignment) -> KVCache:
        """The target's cache of the context; see :func:`kvx.mappers.linear.apply_linear`."""
        alike = self.heads == "index" and self.choice == "nearest" and self.inputs == "both"
        return apply_linear(params, cache, alignment, alike=alike)

    def entries(self, moments: Moments, held_out: Moments | None = None) -> list[Entry]:
        """The support table: one entry a target layer, component and head.

        Raises:
            KvxError: no held-out moments although heads or layers are to be chosen, or a budget that is too small.
        """
        source, target = moments.source, moments.target
        near = self.reach(source, target) or (tuple(range(source.num_layers)),) * target.num_layers
        table = Table(source, target, near, count=self._count(source, target), inputs=self.inputs, heads=self.heads)
        if table.decided:
            return table.all_entries()
        if held_out is None:
            raise KvxError("choosing heads or layers by score needs held-out moments; fit with held_out above 0.")
        table.score(moments, held_out)
        if self.heads == "learned":
            table.widen(moments, held_out, self.budget)
        return table.all_entries()

    def _count(self, source: CacheGeometry, target: CacheGeometry) -> int:
        """Source layers of each target head: as many as asked for and as the budget allows."""
        wanted = source.num_layers if self.layers == "all" else min(int(self.layers), source.num_layers)
        if self.budget is None:
            return wanted
        sizes = [map_bytes(source, target, self.inputs, k) for k in range(1, wanted + 1)]
        fits = sum(size <= self.budget for size in sizes)
        if not fits:
            raise KvxError(
                f"budget is {self.budget:,} bytes, but a map that reads one head of one source layer already takes "
                f"{sizes[0]:,}; expected at least that many bytes."
            )
        return fits


def head_matched(
    layers: int | Literal["all"] = 7,
    inputs: Literal["both", "same"] = "both",
    heads: Literal["learned", "index"] = "learned",
    choice: Literal["nearest", "best"] = "nearest",
    ridge: float | tuple[float, ...] | None = None,
    budget: int | None = None,
    sensitivity: bool | Literal["probes", "all"] | None = False,
    select: Literal["r2", "attention"] = "r2",
) -> HeadMatched:
    """Ridge regression of each target head's keys and values on one head of each of k source layers.

    ``y_h = nu + (x_h - mu) W_h`` with ``W_h = (A_h + ridge diag A_h)^-1 B_h``, where x_h joins, for k source layers,
    the un-rotated key and value of the one head that this target head reads there. With K source heads that is a Kth of
    the coefficients of :func:`kvx.mappers.full_head`. Keys and values of a target head choose for themselves.

    *Wider support.* One head cannot carry a target head that mixes several. With ``heads="learned"`` the heads read in
    each source layer are doubled, for the keys or the values of a whole target layer, as long as that adds more than
    0.1 to the held-out explained variance (at ridge 0.01) of one of its heads and the budget allows it, largest gain
    first. A warning names what was widened, and ``params.report`` every block that is read.

    Args:
        layers: k, or ``"all"`` source layers; fewer where the budget asks for it.
        inputs: ``"both"``: key and value of a source head feed key and value (better, twice the coefficients);
            ``"same"``: each only its own kind.
        heads: ``"learned"``: for each target layer, component, head and source layer the head that explains most
            held-out variance alone; ``"index"``: the head of the same index, ``floor(h Ks / Kt)`` for unequal counts.
        choice: ``"nearest"``: source layers nearest in relative depth; ``"best"``: for each target layer, component and
            head those whose best head explains most held-out variance alone.
        ridge: on the scaled Gram, without unit; ``None``: chosen on held-out rows from 1e-5 ... 1 for each target
            layer, component and head; a tuple: chosen among these.
        budget: bytes of coefficients, biases and indices, at most: the largest k up to ``layers`` that stays within it
            is taken, and what is left may widen the support. ``None``: no limit.
        sensitivity: weigh each row by how strongly an error in this very head's key or value moves the attention
            outputs of later queries; ``select``: what chooses among several ridges. See :func:`kvx.mappers.full_head`.

    Returns:
        The method; fit it with :func:`kvx.fit`.

    Raises:
        KvxError: settings out of range.

    Example:
        >>> import kvx
        >>> from kvx.fitting.synthetic import SOURCE, TARGET, planted_heads, toy_pairs
        >>> from kvx.mappers import head_matched
        >>> planted = planted_heads(SOURCE, TARGET, reads=2)
        >>> mapper, report = kvx.fit(head_matched(layers=2), toy_pairs(support=planted, batches=16), progress=False)
        >>> mapper.params.keys[0].coefficients.shape  # [L, K, P, 1, D]
        (2, 1, 16, 1, 6)
        >>> [entry.source_heads for entry in report.entries] == [entry.blocks for entry in planted]
        True

    Reference: CacheBridge, arXiv 2609.00891 (``inputs="same"``, ``heads="index"``).
    """
    ridges = check_settings(layers, inputs, choice, ridge)
    check_choice("heads", heads, ("learned", "index"))
    if budget is not None and not (isinstance(budget, int) and not isinstance(budget, bool) and budget > 0):
        raise KvxError(f"budget is {budget!r}; expected a whole number of bytes above 0, or None for no limit.")
    mode = check_weighing(sensitivity, select, ridges)
    return HeadMatched(layers, inputs, heads, choice, ridges, budget, mode, select)
