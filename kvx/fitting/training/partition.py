"""Parameters split into those that training changes, by name, and the rest."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvx.errors import KvxError

Named = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Partition:
    """Which arrays of a pytree are trained; hashable, so that it may be static.

    Attributes:
        structure: of the whole pytree.
        names: of its arrays in order, ``None`` for those that are not trained.
    """

    structure: Any
    names: tuple[str | None, ...]

    @classmethod
    def of(cls, params: Any, marks: Any) -> Partition:
        """The partition by a pytree of ``True`` and ``False`` with the parameters' structure.

        Raises:
            KvxError: marks of another structure, nothing to train, or integers marked.

        Example:
            >>> import jax.numpy as jnp
            >>> from kvx.fitting.training.partition import Partition
            >>> params = {"w": jnp.ones(2), "center": jnp.zeros(2)}
            >>> part = Partition.of(params, {"w": True, "center": False})
            >>> trained, rest = part.split(params)
            >>> list(trained), part.join({"w": jnp.full(2, 3.0)}, rest)["w"].tolist()
            (['w'], [3.0, 3.0])
        """
        paths, structure = jax.tree_util.tree_flatten_with_path(params)
        if structure != jax.tree.structure(marks):  # type: ignore[operator]
            raise KvxError("trainable() must mark every parameter, and nothing else, with True or False.")
        chosen = jax.tree.leaves(marks)
        names = tuple(name_of(path) if mark else None for (path, _), mark in zip(paths, chosen, strict=True))
        wrong = [n for n, (_, x) in zip(names, paths, strict=True) if n and not jnp.issubdtype(x.dtype, jnp.floating)]
        if wrong or not any(names):
            raise KvxError(f"training needs floating-point parameters to change; marked integers: {wrong}.")
        return cls(structure, names)

    def split(self, params: Any) -> tuple[Named, Any]:
        """The trained arrays in float32 by name, and the parameters with empty arrays in their place."""
        leaves = jax.tree.leaves(params)
        trained = {n: jnp.array(x, jnp.float32) for n, x in zip(self.names, leaves, strict=True) if n}
        rest = [jnp.zeros((0,), x.dtype) if n else x for n, x in zip(self.names, leaves, strict=True)]
        return trained, jax.tree.unflatten(self.structure, rest)

    def join(self, trained: Named, rest: Any) -> Any:
        """Whole parameters from both parts."""
        leaves = [trained[n] if n else x for n, x in zip(self.names, jax.tree.leaves(rest), strict=True)]
        return jax.tree.unflatten(self.structure, leaves)


def name_of(path: Any) -> str:
    """``branches.0.expand`` of a leaf's path."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
