"""Read a stream of pairs once: which sequences are held out, and their rows packed into blocks."""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.fitting.blocks import Block, RowBlocks
from kvx.fitting.pairs import PairBatch, Pairs, rows_of
from kvx.fitting.reading import HeldOutReading
from kvx.models.progress import Hook


class Reader(abc.ABC):
    """One pass over pairs; a subclass takes the blocks of fitted (side 0) and held-out rows (side 1) as they fill.

    Attributes:
        held_out: share of the sequences on side 1. Every pass over the same pairs makes the same split.
        reading: keeps held-out sequences on the way, for attention to read them.
        sequences: sequences read, by side.
        seconds: wall time of ``pairs`` (reading with both models) and ``moments`` (the sums).
    """

    def __init__(self, rows: int, held_out: float, reading: HeldOutReading | None = None) -> None:
        self.held_out, self.reading = held_out, reading
        self.blocks = [RowBlocks(rows), RowBlocks(rows)]
        self.sequences = [0, 0]
        self.seconds = {"pairs": 0.0, "moments": 0.0}

    @abc.abstractmethod
    def take(self, side: int, block: Block) -> None:
        """Use one block of rows."""

    @abc.abstractmethod
    def state(self) -> Any:
        """Arrays that are ready once every block has been used."""

    def rows(self, batch: PairBatch) -> tuple[Array, Array, Array]:
        """Features ``[N,P]``, outputs ``[N,Q]`` and weights ``[N]`` of a batch."""
        return rows_of(batch)

    def read(self, pairs: Pairs, report: Hook) -> None:
        """Take in every batch, then what is left in the blocks."""
        tokens = 0
        percent = 0.0

        def told(value: float) -> None:
            nonlocal percent
            percent = max(percent, min(value, 100.0))
            report(f"{tokens:,} tokens", int(percent), 100)

        stream = iter(pairs.batches(told))
        while (batch := self._next(stream)) is not None:
            started = time.perf_counter()
            tokens += self._add(batch)
            told(percent)
            self.seconds["moments"] += time.perf_counter() - started
        started = time.perf_counter()
        for side in (0, 1):
            for block in self.blocks[side].rest():
                self.take(side, block)
        jax.block_until_ready(self.state())
        self.seconds["moments"] += time.perf_counter() - started

    def _next(self, stream: Iterator[PairBatch]) -> PairBatch | None:
        started = time.perf_counter()
        batch = jax.block_until_ready(next(stream, None))
        self.seconds["pairs"] += time.perf_counter() - started
        return batch

    def _add(self, batch: PairBatch) -> int:
        """Rows of one batch into the blocks of both sides; returns the tokens taken."""
        count, length = batch.weight.shape
        known = batch.sequences
        numbers = np.arange(count) + sum(self.sequences) if known is None else np.array(known)
        aside = np.array([is_held_out(int(n), self.held_out) for n in numbers])
        if self.reading is not None:
            self.reading.add(batch, aside & (numbers >= 0))
        x, y, weight = self.rows(batch)
        weights, by_token = np.asarray(weight), np.repeat(aside, length)
        for side in (0, 1):
            self.sequences[side] += int(((numbers >= 0) & (aside == bool(side))).sum())
            share = np.where(by_token == bool(side), weights, np.float32(0))
            for block in self.blocks[side].add(x, y, jnp.asarray(share)):
                self.take(side, block)
        return int(np.count_nonzero(weights))


def is_held_out(n: int, share: float) -> bool:
    """Whether sequence n is held out: the second one, and then evenly spread so that the share holds."""
    return n >= 1 and math.ceil(n * share) > math.ceil((n - 1) * share)
