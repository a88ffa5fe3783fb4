"""Alignment: which source tokens, with which weights, feed each target token."""

from __future__ import annotations

from jaxtyping import Array

from kvx.typing import pytree


@pytree
class Alignment:
    """Padded, batched alignment of a target context onto a source cache.

    Attributes:
        index: int32 ``[B,T,R]``: for each of T target tokens, R slots of the source cache (the source's token order).
        weight: float32 ``[B,T,R]``: their weights; rows of real tokens sum to 1, rows of padding are all zero.
        pos: int32 ``[B,T]``: position of each target token in the target's cache; -1 for padding.
    """

    index: Array
    weight: Array
    pos: Array
