"""Choose an implementation of an op: by platform when lowering, or by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

PLATFORMS = {"tpu": "tpu", "gpu": "cuda"}  # implementation -> platform it is lowered for


def dispatch(op: str, implementations: Mapping[str, Callable[..., Any]], implementation: str | None, *args: Any) -> Any:
    """Run an op.

    Args:
        op: its name, for messages.
        implementations: ``"xla"`` (the reference, runs everywhere), and any of ``"tpu"``, ``"gpu"``, ``"interpret"``;
            functions of arrays only. One that cannot take the given shapes or dtypes raises ``NotImplementedError``
            when called, saying which rule is broken.
        implementation: one of the names; ``None``: the kernel of the platform the program is lowered for, and the
            reference where there is none, or where it cannot take these arguments. Arrays that the compiler is to
            spread over several devices get the reference too: kernels cannot be partitioned by it; inside
            ``jax.shard_map`` each device runs the kernel on its part.
        args: arrays.

    Raises:
        ValueError: a name that is not there.
        NotImplementedError: an implementation asked for by name cannot take these arguments; the message says why.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels.dispatch import dispatch
        >>> dispatch("double", {"xla": lambda x: 2 * x}, None, jnp.arange(3)).tolist()
        [0, 2, 4]
    """
    if implementation is not None:
        if implementation not in implementations:
            known = ", ".join(implementations)
            raise ValueError(f"{op} has no implementation {implementation!r}; choose one of {known}, or None.")
        return implementations[implementation](*args)
    branches = {}
    spread = any(_spread(x) for x in jax.tree.leaves(args))
    for name, platform in PLATFORMS.items():
        run = None if spread else implementations.get(name)
        if run is not None and _takes(run, *args):
            branches[platform] = run
    reference = implementations["xla"]
    return jax.lax.platform_dependent(*args, default=reference, **branches) if branches else reference(*args)


def _spread(x: Any) -> bool:
    """Whether the compiler decides how an array lies on several devices."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        return False
    manual = jax.sharding.AxisType.Manual
    return any(size > 1 and kind != manual for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True))


def _takes(run: Callable[..., Any], *args: Any) -> bool:
    try:
        jax.eval_shape(run, *args)
    except NotImplementedError:
        return False
    return True
