"""One table from logical axes to mesh axes, and the layout of every weight that follows from it."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# Logical axis -> mesh axis. Everything else is replicated; so is an axis that the mesh axis does not divide.
RULES: Mapping[str, str] = {"heads": "model", "kv_heads": "model", "ffn": "model", "vocab": "model", "batch": "data"}

# Trailing logical axes of every parameter of a model; a leading layer axis (stacked weights) is never split.
AXES: Mapping[str, tuple[str | None, ...]] = {
    "embed": ("vocab", None),
    "head": ("vocab", None),
    "positions": (None, None),
    "wq": ("heads", None, None),
    "wk": ("kv_heads", None, None),
    "wv": ("kv_heads", None, None),
    "wo": (None, "heads", None),
    "bq": ("heads", None),
    "bk": ("kv_heads", None),
    "bv": ("kv_heads", None),
    "bo": (None,),
    "gate": ("ffn", None),
    "up": ("ffn", None),
    "down": (None, "ffn"),
    "b_gate": ("ffn",),
    "b_up": ("ffn",),
    "b_down": (None,),
    "scale": (None,),
    "bias": (None,),
}


def automatic(mesh: Mesh) -> Mesh:
    """The same devices and axes, sharded by the compiler.

    ``jax.make_mesh`` makes Explicit axes, whose types refuse to contract or gather over a sharded axis; a mesh that is
    Auto already comes back as it is.

    Example:
        >>> import jax
        >>> from kvx.sharding import automatic
        >>> [kind.name for kind in automatic(jax.make_mesh((1,), ("model",))).axis_types]
        ['Auto']
    """
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return mesh if mesh.axis_types == kinds else Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def parameter_sharding(
    mesh: Mesh, path: tuple[str, ...], shape: tuple[int, ...], rules: Mapping[str, str] = RULES
) -> NamedSharding:
    """Layout of one parameter over a mesh: tensor parallelism over heads, feed-forward width and vocabulary.

    Args:
        mesh: device mesh, of Auto or Explicit axes (taken as Auto); a rule whose axis it lacks is skipped.
        path: where the parameter stands in ``Model.params``, such as ``("layers", "wq")``.
        shape: its shape, with or without a leading layer axis.
        rules: logical axis -> mesh axis.

    Returns:
        Its sharding.

    Example:
        >>> import jax
        >>> from jax.sharding import PartitionSpec as P
        >>> from kvx.sharding import parameter_sharding
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> parameter_sharding(mesh, ("layers", "wq"), (30, 9, 64, 576)).spec == P(None, "model", None, None)
        True
    """
    axes = AXES.get(path[-1], ())
    axes = (None,) * (len(shape) - len(axes)) + tuple(axes)
    return NamedSharding(
        automatic(mesh), PartitionSpec(*(_mesh_axis(mesh, rules, a, n) for a, n in zip(axes, shape, strict=True)))
    )


def _mesh_axis(mesh: Mesh, rules: Mapping[str, str], axis: str | None, size: int) -> str | None:
    name = rules.get(axis) if axis else None
    return name if name in mesh.shape and size % mesh.shape[name] == 0 else None
