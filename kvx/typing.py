"""Array aliases, the run-time type check used under pytest, and pytree registration with host-only fields.

Axis letters, everywhere in kvx: ``L`` layer, ``B`` batch, ``K`` kv head, ``T`` cache slot or token, ``D`` head dim,
``G`` query heads per kv head, ``H`` query heads, ``M`` model dim, ``V`` vocabulary, ``P`` mapper input width.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast, dataclass_transform

import jax

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


def typed(function: F) -> F:
    """Check jaxtyping annotations with beartype when ``KVX_TYPECHECK=1`` (set by the test suite); free otherwise.

    Example:
        >>> from kvx.typing import typed
        >>> @typed
        ... def double(x: int) -> int:
        ...     return 2 * x
        >>> double(2)
        4
    """
    if os.environ.get("KVX_TYPECHECK") != "1":
        return function
    from beartype import beartype
    from jaxtyping import jaxtyped

    return jaxtyped(typechecker=beartype)(function)


def static(**kwargs: Any) -> Any:
    """Field that is part of the pytree's structure: hashable, never traced, compared when jit looks up its cache."""
    return dataclasses.field(metadata={"role": "static"}, **kwargs)


def host(**kwargs: Any) -> Any:
    """Field that lives on the host only: dropped (set to its default) whenever JAX takes the pytree apart."""
    kwargs.setdefault("default", None)
    return dataclasses.field(metadata={"role": "host"}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static, host))
def pytree(cls: C) -> C:
    """Frozen dataclass registered as a pytree: plain fields are leaves, ``static()`` structure, ``host()`` dropped.

    Host fields (a tokenizer, provenance) ride along for the user but never reach a traced function, so another
    checkpoint with the same shapes never retraces and never brings the first one's tokenizer along.

    Example:
        >>> import jax
        >>> from kvx.typing import host, pytree, static
        >>> @pytree
        ... class Point:
        ...     x: float
        ...     unit: str = static(default="m")
        ...     note: str | None = host(default=None)
        >>> jax.tree.map(lambda x: x + 1, Point(1.0, "cm", "mine"))
        Point(x=2.0, unit='cm', note=None)
    """
    cls = cast(C, dataclasses.dataclass(frozen=True, eq=False)(cls))
    roles: dict[str, list[str]] = {"data": [], "static": [], "host": []}
    for field in dataclasses.fields(cls):
        roles[field.metadata.get("role", "data")].append(field.name)
    register = partial(jax.tree_util.register_dataclass, cls, data_fields=roles["data"], meta_fields=roles["static"])
    try:
        register(drop_fields=roles["host"])
    except ValueError:  # older JAX (0.9.0 for one) takes the letters of each name for fields
        register(drop_fields=[(name,) for name in roles["host"]])  # type: ignore[misc]
    return cls
