"""Collect the rows of several batches into blocks of one size, so that products run at matrix speed."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.typing import pytree


@pytree
class Block:
    """Rows ``x [N,P]``, ``y [N,Q]``, ``weight [N]``; free rows have weight 0."""

    x: Array
    y: Array
    weight: Array


class RowBlocks:
    """Rows of non-zero weight, packed into blocks of ``size`` rows.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.fitting.blocks import RowBlocks
        >>> blocks, rows = RowBlocks(3), jnp.arange(4.0)[:, None]
        >>> weight = jnp.array([1.0, 0.0, 1.0, 1.0])
        >>> full = [b for _ in range(2) for b in blocks.add(rows, rows, weight)] + list(blocks.rest())
        >>> [b.x.ravel().tolist() for b in full]
        [[0.0, 2.0, 3.0], [0.0, 2.0, 3.0]]
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._block: Block | None = None
        self._filled = 0

    def add(self, x: Array, y: Array, weight: Array) -> Iterator[Block]:
        """Take rows in; give back each block that they fill."""
        count = int(np.count_nonzero(np.asarray(weight) > 0))
        taken = 0
        while taken < count:
            if self._block is None:
                shapes = ((self.size, x.shape[1]), (self.size, y.shape[1]), (self.size,))
                self._block = Block(*(jnp.zeros(shape, jnp.float32) for shape in shapes))
            self._block = _fill(self._block, Block(x, y, weight), jnp.int32(taken), jnp.int32(self._filled))
            fits = min(count - taken, self.size - self._filled)
            taken, self._filled = taken + fits, self._filled + fits
            if self._filled == self.size:
                yield from self.rest()

    def rest(self) -> Iterator[Block]:
        """The last block, filled up with rows of weight 0; nothing when there is none."""
        if self._block is not None and self._filled:
            block, self._block, self._filled = self._block, None, 0
            yield block


@functools.partial(jax.jit, donate_argnums=0)
def _fill(block: Block, rows: Block, skip: Array, start: Array) -> Block:
    """Put the rows of non-zero weight, the first ``skip`` of them left out, at ``start`` and after."""
    order = jnp.argsort(rows.weight <= 0, stable=True)
    count = (rows.weight > 0).sum(dtype=jnp.int32)
    take = jnp.arange(block.weight.shape[0], dtype=jnp.int32) - start + skip
    new = (take >= skip) & (take < count)
    at = order[jnp.where(new, take, 0)]
    x = jnp.where(new[:, None], rows.x[at].astype(jnp.float32), block.x)
    y = jnp.where(new[:, None], rows.y[at].astype(jnp.float32), block.y)
    return Block(x, y, jnp.where(new, rows.weight[at], block.weight))
