"""Second moments of chosen entries with their own row weights, gathered in a second pass over the pairs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.errors import KvxError
from kvx.fitting.blocks import Block
from kvx.fitting.head_sums import EntrySums, HeadSums, grouped, heads_of, pooled, two_sum
from kvx.fitting.moments import HIGHEST, whitening
from kvx.fitting.normal import Normals
from kvx.fitting.pairs import PairBatch, rows_of
from kvx.fitting.plan import Plan
from kvx.fitting.reading import HeldOutReading
from kvx.fitting.sensitivity import as_columns
from kvx.fitting.stream import Reader
from kvx.mappers.base import Entry
from kvx.typing import pytree


@pytree
class Frame:
    """Pivot coordinates of one set of parts: ``z = (x - mean) white``, part by part.

    Means and whitening come from the uniform moments of the first pass, so that fp32 sums neither cancel nor lose
    nearly collinear features.

    Attributes:
        mean: float32 ``[P]``; white: float32 ``[w,w]`` upper triangular, for each part.
        starts: int32, first column of each part among all features (traced: one program serves all frames of a shape).
    """

    mean: Array
    white: tuple[Array, ...]
    starts: Array


@pytree
class Outputs:
    """One entry's outputs ``u = (y - mean) scale``, and where its weights stand.

    Attributes:
        start: int32, first column of the entry among all outputs; heads: int32 ``[heads]``, columns of its
            sensitivities.
        mean, scale: float32 ``[q]``.
    """

    start: Array
    heads: Array
    mean: Array
    scale: Array


class WeightedPass(Reader):
    """Reads pairs that hold sensitivities (:meth:`kvx.fitting.pairs.Pairs.weighed`) and sums what the entries need.

    An entry of several heads weighs its rows by the mean of their sensitivities. The entries of a target layer and
    component that read blocks of one width are summed in one call; others one by one. Scratch is the chosen blocks of
    one block of rows, and one product; the sums take ``8 (P + q) P`` bytes an entry and side.

    Attributes:
        entries: the chosen support.
        frames: coordinates, by parts; outputs: of each entry.
        layers: sums of entries that are summed together.
        members: the other entries, by the parts they read; totals: for each of them and each side the fp32 sums and
            what their rounding has lost; ``None`` where not asked for.
        counts: rows of each side.
    """

    def __init__(
        self,
        plan: Plan,
        entries: Sequence[Entry],
        uniform: Normals,
        *,
        rows: int,
        held_out: float,
        sides: Sequence[int],
        reading: HeldOutReading | None = None,
    ) -> None:
        """For an accumulation on the given sides (0 fitted, 1 held out); without side 1 all rows go to side 0."""
        super().__init__(rows, held_out, reading)
        self.plan, self.entries, self.sides = plan, list(entries), tuple(sides)
        self.frames = {parts: _frame(plan, uniform, parts) for parts in dict.fromkeys(e.parts for e in entries)}
        self.outputs = [_outputs(plan, uniform, entry) for entry in entries]
        self.layers = [self._layers(members) for members in grouped(self.entries).values()]
        together = {i for layers in self.layers for members in layers.members for i in members}
        self.members: dict[Any, list[int]] = {}
        self.totals: dict[int, list[tuple[EntrySums, EntrySums] | None]] = {}
        for i, entry in enumerate(self.entries):
            if i not in together:
                zeros = functools.partial(_zeros, entry, self.frames[entry.parts])
                self.members.setdefault(entry.parts, []).append(i)
                self.totals[i] = [zeros() if side in self.sides else None for side in (0, 1)]
        self.counts = [0, 0]

    def rows(self, batch: PairBatch) -> tuple[Array, Array, Array]:
        """Sensitivities ride along as further outputs, ``[N,Q + L K 2]``."""
        if batch.sensitivity is None:
            raise KvxError("a weighted pass needs pairs with sensitivities; read pairs.weighed(mode).")
        x, y, weight = rows_of(batch)
        return x, jnp.concatenate([y, as_columns(batch.sensitivity)], axis=1), weight

    def take(self, side: int, block: Block) -> None:
        """Add a block to every entry, one set of parts after the other."""
        side = side if 1 in self.sides else 0
        self.counts[side] += int(np.count_nonzero(np.asarray(block.weight)))
        if side not in self.sides:
            return
        for parts, members in self.members.items():
            z = _coordinates(self.frames[parts], block.x, block.weight)
            for i in members:
                found = self.totals[i][side]
                if found is not None:
                    self.totals[i][side] = _add(*found, z, block.y, block.weight, self.outputs[i])

        for layers in self.layers:
            layers.take(side, block.x, block.y, block.weight)

    def sums(self, entry: int) -> list[tuple[EntrySums, EntrySums] | None]:
        """An entry's sums of each side."""
        if entry in self.totals:
            return self.totals[entry]
        return next(layers for layers in self.layers if any(entry in m for m in layers.members)).of(entry)

    def state(self) -> Any:
        """The sums."""
        return self.totals, [layers.totals for layers in self.layers]

    @property
    def bytes(self) -> int:
        """Size of the sums."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state()))

    def _layers(self, members: list[list[int]]) -> HeadSums:
        """Groups of entries whose blocks have one width."""
        blocks = {}
        for entry in (self.entries[i] for group in members for i in group):
            frame, at = self.frames[entry.parts], 0
            for i, part in enumerate(entry.parts):
                width = len(frame.white[i])
                blocks[part] = frame.mean[at : at + width], frame.white[i], frame.starts[i]
                at += width
        parts = sorted(blocks)
        number = {part: i for i, part in enumerate(parts)}
        groups = []
        for group in members:
            outputs = [(o.start, o.heads, o.mean, o.scale) for o in (self.outputs[i] for i in group)]
            groups.append(heads_of([self.entries[i] for i in group], number, outputs))
        return HeadSums.zeros(pooled(parts, blocks), groups, members, self.sides)


def bytes_of(entry: Entry) -> int:
    """Size of an entry's sums on one side.

    Example:
        >>> from kvx.fitting.weighted_sums import bytes_of
        >>> from kvx.mappers.base import Entry
        >>> bytes_of(Entry(0, 0, (0, 1), 4, ((0, 0, 8),)))  # of 8 x 8 + 8 x 4 + 8 + 4 + 4 + 2 numbers, two each
        912
    """
    width, outputs = sum(stop - first for _, first, stop in entry.parts), entry.columns.stop - entry.columns.start
    return 8 * (2 + width * (width + outputs + 1) + 2 * outputs)


def _frame(plan: Plan, uniform: Normals, parts: tuple[tuple[int, int, int], ...]) -> Frame:
    white = tuple(jnp.asarray(whitening(uniform.gram((part,)))) for part in parts)
    starts = [plan.x_starts[layer] + first for layer, first, _ in parts]
    return Frame(jnp.asarray(uniform.mean(parts), jnp.float32), white, jnp.asarray(starts, jnp.int32))


def _outputs(plan: Plan, uniform: Normals, entry: Entry) -> Outputs:
    where = (entry.target, entry.component)
    variance = np.diag(uniform.output_covariance(*where))[entry.columns]
    scale = np.where(variance > 0, 1 / np.sqrt(np.where(variance > 0, variance, 1.0)), 1.0)
    widths = plan.targets[entry.target]
    start = plan.y_starts[entry.target] + sum(widths[: entry.component]) + entry.columns.start
    if plan.target is None:
        raise KvxError("a weighted pass needs the target's geometry; make the plan with Plan.of(source, target).")
    heads = plan.target.layers[entry.target].kv_heads
    columns = plan.y_starts[-1] + (entry.target * heads + np.arange(*entry.heads)) * 2 + entry.component
    mean = uniform.output_mean(*where)[entry.columns]
    return Outputs(
        jnp.int32(start), jnp.asarray(columns, jnp.int32), *(jnp.asarray(a, jnp.float32) for a in (mean, scale))
    )


def _zeros(entry: Entry, frame: Frame) -> tuple[EntrySums, EntrySums]:
    width, outputs = len(frame.mean), entry.columns.stop - entry.columns.start

    def make() -> EntrySums:
        shapes = ((), (), (width,), (outputs,), (outputs,), (width, width), (width, outputs))
        return EntrySums(*(jnp.zeros(shape, jnp.float32) for shape in shapes))

    return make(), make()


@jax.jit
def _coordinates(frame: Frame, x: Array, weight: Array) -> Array:
    """Rows in pivot coordinates, ``[N,P]``; zero where the weight is (``where`` before the product)."""
    keep, at, parts = (weight > 0)[:, None], 0, []
    for i, white in enumerate(frame.white):
        width = len(white)
        own = jax.lax.dynamic_slice_in_dim(x, frame.starts[i], width, axis=1)
        parts.append(jnp.dot(jnp.where(keep, own - frame.mean[None, at : at + width], 0.0), white, precision=HIGHEST))
        at += width
    return jnp.concatenate(parts, axis=1)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _add(
    total: EntrySums, error: EntrySums, z: Array, y: Array, weight: Array, outputs: Outputs
) -> tuple[EntrySums, EntrySums]:
    """One block's sums, fp32 products at highest precision, added with Knuth's two-sum."""
    keep = weight > 0
    r = jnp.where(keep, y[:, outputs.heads].mean(axis=1) * weight, 0.0)
    root = jnp.sqrt(r)[:, None]
    u = jax.lax.dynamic_slice_in_dim(y, outputs.start, outputs.mean.shape[0], axis=1)
    u = jnp.where(keep[:, None], (u - outputs.mean[None]) * outputs.scale[None], 0.0) * root
    z = z * root
    block = EntrySums(
        r.sum(), (r * r).sum(), _dot(root, z)[0], _dot(root, u)[0], (u * u).sum(axis=0), _dot(z, z), _dot(z, u)
    )
    return two_sum(total, error, block)


def _dot(a: Array, b: Array) -> Array:
    return jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), precision=HIGHEST)
