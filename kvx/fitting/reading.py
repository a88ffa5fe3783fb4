"""Held-out attention output: what the target's later queries read from a predicted cache, against its own.

Explained variance of keys and values says little about what a map is worth. What counts is the output of attention, so
the choices that a fit leaves open can be made by it: the queries of held-out sequences read the predicted context, the
target's own prefix before it, and are compared with what they read natively.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvx.cache.cache import KVCache, LayerView
from kvx.cache.geometry import RopeSpec
from kvx.cache.join import select_batch
from kvx.cache.ops import unrotate_keys
from kvx.cache.rope import rotate
from kvx.errors import KvxError
from kvx.fitting.sensitivity import pick_probes
from kvx.mappers.linear import aligned_rows
from kvx.models.attention import attend
from kvx.typing import pytree, static

if TYPE_CHECKING:
    from kvx.fitting.pairs import PairBatch
    from kvx.models.config import ModelConfig

SEQUENCES = 32  # held-out sequences whose features and queries are kept


@pytree
class Probes:
    """The target's queries at log-spaced positions of a context, and how its attention scores them.

    Attributes:
        queries: ``[L,B,H,N,D]``, rotated; positions: int32 ``[B,N]``, -1 for none.
        scale: multiplier of the scores; softcap: tanh cap of them, ``None`` without.
    """

    queries: Array
    positions: Array
    scale: float = static(default=1.0)
    softcap: float | None = static(default=None)


def probes_of(
    config: ModelConfig, queries: Float[Array, "L B H U D"], positions: Int[Array, "B U"], *, first: int
) -> Probes:
    """Queries at the probes of :func:`kvx.fitting.sensitivity.sensitivity`, of contexts that start at ``first``."""
    picked, at = pick_probes(queries, positions, jnp.int32(first))
    return Probes(picked, at, config.score_scale, config.attn_softcap)


@dataclasses.dataclass(frozen=True, eq=False)
class _Kept:
    """Held-out sequences of one batch.

    Attributes:
        features: float32 ``[B,T,P]`` of every source layer on the target's tokens.
        positions: int32 ``[B,T]`` where a predicted token stands; -1 for tokens that nothing feeds.
        native: the target's own, un-rotated cache; probes: its queries.
    """

    features: np.ndarray
    positions: Array
    native: KVCache
    probes: Probes


@dataclasses.dataclass(frozen=True, eq=False)
class Predicted:
    """Keys (component 0, un-rotated) or values (1) of some kv heads, float32 ``[B,T,heads*D]`` of every kept batch."""

    component: int
    heads: tuple[int, int]
    rows: Sequence[np.ndarray]


class HeldOutReading:
    """Held-out sequences, read by the target's attention.

    At most 32 sequences are kept, the first of the stream: their features, the target's cache and its queries at 32
    probes.

    Example:
        >>> import numpy as np
        >>> from kvx.fitting.reading import HeldOutReading
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> pairs = toy_pairs()
        >>> reading = HeldOutReading(pairs.prefix)
        >>> batch = next(iter(pairs.weighed("probes")))
        >>> reading.add(batch, np.ones(len(batch.sequences), bool))
        >>> reading.explained(0, (0, 1), []).tolist()  # nothing predicted: the native cache itself
        [1.0]
    """

    def __init__(self, prefix: KVCache | None) -> None:
        self.prefix = unrotate_keys(prefix) if prefix is not None and prefix.rotated else prefix
        self.kept: list[_Kept] = []
        self._native: dict[tuple[int, tuple[int, int]], np.ndarray] = {}

    def add(self, batch: PairBatch, held_out: np.ndarray) -> None:
        """Keep the held-out rows of a batch, bool ``[B]``.

        Raises:
            KvxError: a batch without queries.
        """
        if batch.probes is None:
            raise KvxError("these pairs hold no queries, so attention cannot choose; read pairs.weighed(mode).")
        room = SEQUENCES - sum(len(kept.features) for kept in self.kept)
        rows = np.flatnonzero(held_out)[:room]
        if not len(rows):
            return
        source, native = (unrotate_keys(c) if c.rotated else c for c in (batch.source, batch.target))
        alignment = jax.tree.map(lambda a: a[rows], batch.alignment)
        features = np.asarray(aligned_rows(select_batch(source, rows), alignment))
        start = 0 if self.prefix is None else int(self.prefix.next_position()[0])
        fed = (batch.weight[rows] > 0) & (alignment.pos >= 0)
        probes = dataclasses.replace(
            batch.probes, queries=batch.probes.queries[:, rows], positions=batch.probes.positions[rows]
        )
        positions = jnp.where(fed, alignment.pos + start, -1)
        self.kept.append(_Kept(features, positions, select_batch(native, rows), probes))
        self._native.clear()

    def predict(self, columns: np.ndarray, center: np.ndarray, w: np.ndarray, mean: np.ndarray) -> list[np.ndarray]:
        """``mean + (x - center) W`` of every kept batch, float32 ``[B,T,q]``; ``columns``: of the features."""
        bias = (mean - center @ w).astype(np.float32)
        w = w.astype(np.float32)
        return [kept.features[..., columns] @ w + bias for kept in self.kept]

    def explained(self, layer: int, heads: tuple[int, int], predicted: Sequence[Predicted]) -> np.ndarray:
        """Explained variance of the attention output, per kv head of a range.

        ``1 - sum |o' - o|^2 / sum |o - mean o|^2`` over the probes' queries of the head's group, where o' is read from
        the predicted context, o from the native one, both after the native prefix.

        Args:
            layer: of the target.
            heads: first kv head and the one after the last.
            predicted: what is predicted of them; the rest is native.

        Returns:
            float64 ``[heads]``.
        """
        if (layer, heads) not in self._native:
            self._native[layer, heads] = self._read(layer, heads, [])
        theirs = self._native[layer, heads]
        ours = self._read(layer, heads, predicted) if predicted else theirs
        spread = ((theirs - theirs.mean(axis=1, keepdims=True)) ** 2).sum(axis=(1, 2))
        error = ((theirs - ours) ** 2).sum(axis=(1, 2))
        return np.asarray(1.0 - error / np.where(spread > 0, spread, 1.0))

    def _read(self, layer: int, heads: tuple[int, int], predicted: Sequence[Predicted]) -> np.ndarray:
        """Attention outputs of the queries that exist, by kv head: float64 ``[heads,queries,Dv]``."""
        first, stop = heads
        found = []
        for i, kept in enumerate(self.kept):
            native, geometry = kept.native.layer(layer), kept.native.geometry.layers[layer]
            group = kept.probes.queries.shape[2] // native.k.shape[1]
            lead = None if self.prefix is None else _heads_of(self.prefix.layer(layer), first, stop)
            read = _outputs(
                kept.probes.queries[layer][:, first * group : stop * group],
                kept.probes.positions,
                lead,
                _replaced(_heads_of(native, first, stop), kept.positions, first, predicted, i),
                rope=geometry.rope,
                scale=kept.probes.scale,
                window=geometry.window,
                softcap=kept.probes.softcap,
            )
            found.append(_by_head(np.asarray(read, np.float64), kept.probes, stop - first))
        return np.concatenate(found, axis=1)


def _replaced(native: LayerView, positions: Array, first: int, predicted: Sequence[Predicted], batch: int) -> LayerView:
    """A native view, and what is predicted of it in its place, at the positions that a translation fills."""
    if not predicted:
        return native
    sides = [np.array(native.k, np.float32), np.array(native.v, np.float32)]
    for part in predicted:
        rows, (a, b) = part.rows[batch], part.heads
        sides[part.component][:, a - first : b - first] = rows.reshape(*rows.shape[:2], b - a, -1).swapaxes(1, 2)
    return LayerView(jnp.asarray(sides[0]), jnp.asarray(sides[1]), positions[:, None])


def _heads_of(view: LayerView, first: int, stop: int) -> LayerView:
    pos = view.pos if view.pos.shape[1] == 1 else view.pos[:, first:stop]
    return LayerView(view.k[:, first:stop], view.v[:, first:stop], pos)


def _by_head(outputs: np.ndarray, probes: Probes, count: int) -> np.ndarray:
    """Outputs ``[B,H,N,Dv]`` of the queries that exist, by kv head: ``[heads,queries,Dv]``."""
    batch, heads, number, width = outputs.shape
    by_head = outputs.reshape(batch, count, heads // count, number, width)
    real = np.broadcast_to((np.asarray(probes.positions) >= 0)[:, None], (batch, heads // count, number))
    return by_head.swapaxes(0, 1)[:, real]


@functools.partial(jax.jit, static_argnames=("rope", "scale", "window", "softcap"))
def _outputs(
    queries: Array,
    positions: Array,
    prefix: LayerView | None,
    context: LayerView,
    *,
    rope: RopeSpec | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Array:
    """Attention outputs over prefix and context, whose keys are un-rotated."""
    parts: list[Any] = []
    for part in (prefix, context):
        if part is None:
            continue
        rows = [jnp.broadcast_to(a, (queries.shape[0], *a.shape[1:])) for a in (part.k, part.v, part.pos)]
        hole = (rows[2] < 0)[..., None]
        k, v = (jnp.where(hole, 0.0, a.astype(jnp.float32)) for a in rows[:2])
        parts.append(LayerView(k if rope is None else rotate(k, rows[2], rope), v, rows[2]))
    return attend(queries.astype(jnp.float32), parts, positions, scale=scale, window=window, softcap=softcap)
