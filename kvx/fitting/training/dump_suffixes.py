"""What is kept of training examples beside their contexts: suffixes as the target reads them, and its variances."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.cache.build import empty
from kvx.cache.cache import KVCache
from kvx.cache.join import select_batch
from kvx.fitting.training.batch import Suffix
from kvx.fitting.training.data import Place, Shape
from kvx.fitting.training.examples import SuffixTokens
from kvx.fitting.training.head import token_nats
from kvx.fitting.training.loss import predicting, suffix_hidden
from kvx.fitting.training.store import Table
from kvx.fitting.training.trail import trail
from kvx.models.decoder import forward
from kvx.models.model import Model


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is measured of suffixes.

    Attributes:
        nats: log-probabilities of the scored tokens over the target's own cache, another context's, and none.
        hidden: hidden states over its own cache; trail: keys and values over it, in ``dtype`` (``None``: as they are).
    """

    nats: bool = False
    hidden: bool = False
    trail: bool = False
    dtype: Any = None

    def __bool__(self) -> bool:
        return self.nats or self.hidden or self.trail


class Suffixes:
    """Suffixes that wait for their contexts' caches, measured and written as these come."""

    def __init__(
        self,
        target: Model,
        prefix: KVCache | None,
        tokens: Sequence[SuffixTokens],
        shapes: Sequence[Shape],
        home: Path | None,
        batch_size: int,
        wanted: Wanted,
    ) -> None:
        self.target, self.prefix, self.tokens, self.shapes = target, prefix, tokens, shapes
        self.home, self.batch_size, self.wanted = home, batch_size, wanted
        self.spread = Variance()
        self.tables: dict[Shape, Table] = {}
        self.filled: dict[Shape, int] = {}
        self.places: dict[int, Place] = {}
        self.waiting: dict[Shape, list[tuple[int, Place, int, int]]] = {}

    def wait(self, n: int, place: Place, row: int, mate: int) -> None:
        """Example n reads row ``row`` of the present batch of contexts; its partner is row ``mate``."""
        self.waiting.setdefault(place.shape, []).append((n, place, row, mate))

    def flush(self, whole: KVCache | None) -> None:
        """Write everything that waits, with what is wanted of it over the target's own cache."""
        for shape, rows in self.waiting.items():
            for i in range(0, len(rows), self.batch_size):
                self._write(shape, rows[i : i + self.batch_size], whole)
        self.waiting.clear()

    def _write(self, shape: Shape, rows: list[tuple[int, Place, int, int]], whole: KVCache | None) -> None:
        filled = rows + [rows[0]] * (self.batch_size - len(rows))
        suffix = _padded([self.tokens[n] for n, *_ in filled], shape)
        if whole is not None and self.wanted:
            own, other = (select_batch(whole, rows) for rows in ([r for *_, r, _ in filled], [m for *_, m in filled]))
            suffix = _measured(self.target, suffix, own, other, self._bare(whole), self.wanted)
            self.spread.add(suffix.trail, len(rows))
        if shape not in self.tables:
            name = f"suffixes-{'-'.join(map(str, shape))}"
            self.tables[shape] = Table.create(self.home, name, suffix, self.shapes.count(shape))
        first = self.filled.get(shape, 0)
        self.tables[shape].write(first, suffix, len(rows))
        for at, (n, place, *_) in enumerate(rows):
            self.places[n] = dataclasses.replace(place, suffix=first + at)
        self.filled[shape] = first + len(rows)

    def _bare(self, whole: KVCache) -> KVCache:
        """What the target has without the context."""
        if self.prefix is not None:
            return select_batch(self.prefix, [0] * self.batch_size)
        return empty(whole.geometry, self.batch_size, 1, whole.groups[0].k.dtype)


def _padded(tokens: list[SuffixTokens], shape: Shape) -> Suffix:
    """Suffixes as arrays of one shape."""

    def pad(rows: list[np.ndarray], length: int, fill: int) -> Array:
        out = np.full((len(rows), length), fill, np.int32)
        for row, into in zip(rows, out, strict=True):
            into[: len(row)] = row
        return jnp.asarray(out)

    return Suffix(
        pad([t.ids for t in tokens], shape[1], -1),
        pad([t.where for t in tokens], shape[2], 0),
        pad([t.targets for t in tokens], shape[2], -1),
    )


@functools.partial(jax.jit, static_argnames=("wanted",))
def _measured(target: Model, suffix: Suffix, own: KVCache, other: KVCache, bare: KVCache, wanted: Wanted) -> Suffix:
    """The suffix with what the target makes of it over its own cache, over another context's, and without any."""
    out = forward(target, suffix.tokens, own, remat=True)
    hidden = predicting(out.hidden, suffix)
    made = suffix
    if wanted.nats:
        states = [hidden, *(suffix_hidden(target, suffix, cache) for cache in (bare, other))]
        native, none, crossed = (-token_nats(target, h, suffix.targets) for h in states)
        made = dataclasses.replace(made, native=native, none=none, crossed=crossed)
    if wanted.hidden:
        made = dataclasses.replace(made, hidden=hidden)
    if wanted.trail:
        made = dataclasses.replace(made, trail=cast(trail(suffix.tokens, own, out.cache), wanted.dtype))
    return made


def cast(cache: KVCache, dtype: Any) -> KVCache:
    """The cache in the type in which it is kept; ``None``: as it is."""
    if dtype is None:
        return cache
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, cache)


class Variance:
    """Variance of the target's keys and values per layer, component and head, about each channel's mean."""

    def __init__(self) -> None:
        self.count = 0.0
        self.sums: list[np.ndarray] | None = None

    def add(self, cache: KVCache | None, rows: int) -> None:
        """Take in the first rows of a batch."""
        if cache is None:
            return
        found = []
        for layer in range(cache.num_layers):
            view = cache.layer(layer)
            real = np.asarray(view.pos[:rows, 0] >= 0)
            for side in (view.k, view.v):
                x = np.asarray(side[:rows], np.float64).swapaxes(1, 2)[real]  # [tokens,K,D]
                found.append(np.stack([x.sum(axis=0), np.square(x).sum(axis=0)]))
        self.count += float(real.sum())
        self.sums = found if self.sums is None else [a + b for a, b in zip(self.sums, found, strict=True)]

    def result(self) -> list[Any] | None:
        """``[L][2][K]``; ``None`` when nothing was added."""
        if self.sums is None:
            return None
        spread = [np.mean(s[1] / self.count - np.square(s[0] / self.count), axis=-1).clip(1e-12) for s in self.sums]
        return [[spread[2 * i].tolist(), spread[2 * i + 1].tolist()] for i in range(len(spread) // 2)]
