"""The cache: a set of (key, value, position) triples, as an immutable pytree."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvx.cache.geometry import CacheGeometry
from kvx.errors import KvxError
from kvx.typing import pytree, static


def _facts(x: Any) -> str:
    """``float32[1,2,3]`` of an array; the type's name of a placeholder."""
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    return type(x).__name__ if shape is None else f"{dtype}[{','.join(map(str, shape))}]"


def _ranges(layers: tuple[int, ...]) -> str:
    """``layers 0-4,6``."""
    runs: list[list[int]] = []
    for i in layers:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return "layers " + ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


@pytree
class CacheGroup:
    """Layers that share heads, head dims and slot count, stacked.

    Attributes:
        k: ``[L,B,K,T,D]`` keys.
        v: ``[L,B,K,T,Dv]`` values.
        pos: int32 ``[L|1,B,K|1,T]`` positions; -1 marks an empty slot, which is never read.
        next: int32 ``[B]`` number of tokens written so far: the next chunk goes to slots ``next, next+1, ...``
            (modulo T in a ring).
        layers: which model layers this group holds, ascending.
        ring: whether writes wrap around (a sliding-window layer that keeps only its window).
    """

    k: Array
    v: Array
    pos: Array
    next: Array
    layers: tuple[int, ...] = static()
    ring: bool = static(default=False)

    @property
    def slots(self) -> int:
        """Slot count ``T``."""
        return self.k.shape[3]

    def __repr__(self) -> str:
        kind = "ring" if self.ring else "slots"
        shapes = ", ".join(f"{name} {_facts(getattr(self, name))}" for name in ("k", "v", "pos"))
        return f"CacheGroup({_ranges(self.layers)}, {kind}, {shapes})"


@pytree
class LayerView:
    """One layer of a cache, as the attention reads it.

    Attributes:
        k: ``[B,K,T,D]``; v: ``[B,K,T,Dv]``; pos: int32 ``[B,K|1,T]``, -1 for empty slots.
    """

    k: Array
    v: Array
    pos: Array


@pytree
class KVCache:
    """Keys, values and positions of every layer of one model, for a batch of sequences.

    Attributes:
        groups: layers stacked by shape; read through :meth:`layer`, :meth:`keys`, :meth:`values`.
        rotated: whether keys carry RoPE; kvx stores them un-rotated unless a method says otherwise.
        geometry: static shapes and position facts.
    """

    groups: tuple[CacheGroup, ...]
    rotated: bool = static(default=False)
    geometry: CacheGeometry = static(default=CacheGeometry(()))

    def __repr__(self) -> str:
        keys = "rotated" if self.rotated else "un-rotated"
        return "\n  ".join([f"KVCache({self.num_layers} layers, keys {keys})", *map(repr, self.groups)])

    @property
    def batch(self) -> int:
        """Batch size ``B``."""
        return self.groups[0].k.shape[1]

    @property
    def num_layers(self) -> int:
        """Number of layers ``L`` of the model."""
        return self.geometry.num_layers

    def locate(self, layer: int) -> tuple[int, int]:
        """``(group index, index inside the group)`` of a model layer.

        Raises:
            KvxError: the cache does not hold that layer.
        """
        for g, group in enumerate(self.groups):
            if layer in group.layers:
                return g, group.layers.index(layer)
        raise KvxError(f"layer {layer} is not in this cache, which holds layers 0..{self.num_layers - 1}.")

    def layer(self, layer: int) -> LayerView:
        """Keys, values and positions of one model layer."""
        g, i = self.locate(layer)
        group = self.groups[g]
        return LayerView(group.k[i], group.v[i], group.pos[i if group.pos.shape[0] > 1 else 0])

    def keys(self, layer: int) -> Array:
        """Keys ``[B,K,T,D]`` of one model layer."""
        g, i = self.locate(layer)
        return self.groups[g].k[i]

    def values(self, layer: int) -> Array:
        """Values ``[B,K,T,Dv]`` of one model layer."""
        g, i = self.locate(layer)
        return self.groups[g].v[i]

    def next_position(self) -> Int[Array, " B"]:
        """Position after the largest one held, per sequence: where a boundary continues; 0 for an empty cache."""
        tops = [group.pos.max(axis=(0, 2, 3)) for group in self.groups]
        return jnp.stack(tops).max(axis=0) + 1
