"""Translate a source cache: align-gather, one product a target head, bias, rotation; keys and values together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.apply import reference, tpu
from pallas_kernels.apply.reference import Linear, Rotation, Settings
from pallas_kernels.dispatch import dispatch

Array = jax.Array
__all__ = ["Linear", "Rotation", "apply", "folded_bias", "project"]


def apply(
    keys: Array,
    values: Array,
    index: Array | None,
    weight: Array | None,
    key_map: Linear,
    value_map: Linear,
    *,
    inputs: str = "both",
    rotation: Rotation | None = None,
    interleaved: bool = False,
    dtype: Any = None,
    schedule: str | None = None,
    tile: tuple[int | None, int | None] = (None, None),
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Target keys and values of one context from the source's.

    With ``x_u[t] = sum_r weight[t,r] source_u[index[t,r]]`` and u the block ``gather[l,h,p]``::

        y[l,h,t] = bias[l,h] + sum_p x_{gather[l,h,p]}[t] W[l,h,pF:(p+1)F],   zero where no weight of t is above zero

    and keys are then turned by the angles of their token. Products accumulate in float32, float32 ones at the highest
    precision; gathered rows are rounded to the dtype of the coefficients before the product.

    Args:
        keys: ``[U,S,Ds]``, one block a head of a source layer, S cache slots, un-rotated.
        values: ``[U,S,Dv_s]``.
        index: int32 ``[T,R]``, R source slots for each of T target tokens; ``None``: slot t feeds token t (then S = T),
            and nothing is gathered. On TPU rows are read in windows, which is cheap as long as the alignment is nearly
            monotone; where it is not, XLA gathers first.
        weight: float32 ``[T,R]``; rows of weight zero are never read. ``None``: ones.
        key_map, value_map: :class:`Linear` of keys and values with the same L and H; pass the same array as ``gather``
            of both where they read the same blocks. A mean removed before the product belongs into the bias, see
            :func:`folded_bias`.
        inputs: ``"both"``: a block holds a slot's key and then its value; ``"same"``: keys feed keys and values values.
        rotation: of the keys; ``None``: they stay un-rotated.
        interleaved: rotated pairs are neighbours instead of halves.
        dtype: of the outputs; ``None``: of the coefficients.
        schedule: order of the TPU kernel's steps: ``"heads"`` walks through all layers of a head, least traffic where
            the heads read do not change from layer to layer; ``"layers"`` (``None``) through all heads of a layer, for
            any others.
        tile: target rows, and bytes of VMEM, of the TPU kernel's tiles; ``None``: by kind of device.
        implementation: ``"xla"``, ``"tpu"``, ``"gpu"``, ``"interpret"`` (the TPU kernel, interpreted), or ``None``: by
            platform.

    Returns:
        Keys ``[L,H,T,D]`` and values ``[L,H,T,Dv]``.

    Raises:
        ValueError: shapes that do not belong together, an unknown name.
        NotImplementedError: an implementation asked for by name that cannot take these arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels.apply import Linear, apply
        >>> keys, values = jnp.arange(6.0).reshape(1, 3, 2), jnp.zeros((1, 3, 2))
        >>> double = Linear(jnp.zeros((1, 1, 1), jnp.int32), 2 * jnp.eye(2)[None, None], jnp.ones((1, 1, 2)))
        >>> k, v = apply(keys, values, jnp.array([[2], [0]]), None, double, double, inputs="same")
        >>> k[0, 0].tolist(), v[0, 0].tolist()
        ([[9.0, 11.0], [1.0, 3.0]], [[1.0, 1.0], [1.0, 1.0]])

    Reference: CacheBridge, arXiv 2609.00891.
    """
    if inputs not in ("both", "same"):
        raise ValueError(f"inputs is {inputs!r}; expected 'both' or 'same'.")
    settings: dict[str, Any] = {
        "dtype": dtype,
        "interleaved": interleaved,
        "schedule": schedule,
        "tile": tile,
        "implementation": implementation,
    }
    if inputs == "both":
        k, v = project((keys, values), (key_map, value_map), index, weight, rotation=rotation, **settings)
    else:
        (k,) = project((keys,), (key_map,), index, weight, rotation=rotation, **settings)
        (v,) = project((values,), (value_map,), index, weight, **settings)
    return k, v


def project(
    sources: Sequence[Array],
    maps: Sequence[Linear],
    index: Array | None,
    weight: Array | None = None,
    *,
    rotation: Rotation | None = None,
    interleaved: bool = False,
    dtype: Any = None,
    schedule: str | None = None,
    tile: tuple[int | None, int | None] = (None, None),
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """:func:`apply` for any number of sources and maps: every map reads all the sources.

    Args:
        sources: arrays ``[U,S,F_i]`` whose features stand side by side in a block.
        maps: of the same L and H; the first one's outputs are rotated.
        index, weight, rotation, interleaved, dtype, schedule, tile, implementation: as for :func:`apply`.

    Returns:
        ``[L,H,T,D]`` of each map.

    Raises:
        ValueError: as :func:`apply`.
        NotImplementedError: as :func:`apply`.

    Example:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels.apply import Linear, project
        >>> total = Linear(jnp.array([[[0, 1]]]), jnp.ones((1, 1, 4, 1)), jnp.zeros((1, 1, 1)))
        >>> project([jnp.ones((2, 3, 2))], [total], None)[0].ravel().tolist()
        [4.0, 4.0, 4.0]
    """
    index, weight = _alignment(sources[0], index, weight)
    dtype = maps[0].coefficients.dtype if dtype is None else dtype
    _check(sources, maps, index, weight, rotation)
    shared = len(maps) > 1 and all(m.gather is maps[0].gather for m in maps)
    settings = Settings(jnp.dtype(dtype).name, interleaved, shared, schedule, *tile, implementation)
    return _project(settings, tuple(sources), tuple(maps), index, weight, rotation)


def folded_bias(coefficients: Array, center: Array, mean: Array) -> Array:
    """Bias of ``mean + (x - center) W`` in float32: ``mean - center W``.

    The product uses the coefficients as they are stored, so rounding them to bfloat16 first changes the map by
    ``(x - center)`` times their rounding errors, not by ``x`` times them; and bfloat16 rows stay exact, which
    ``x - center`` rounded again would not.

    Args:
        coefficients: ``[L,H,P,D]``; center: ``[L,H,P]``; mean: ``[L,H,D]``.

    Returns:
        float32 ``[L,H,D]``.

    Example:
        >>> import jax.numpy as jnp
        >>> folded_bias(jnp.ones((1, 1, 2, 1)), jnp.array([[[1.0, 2.0]]]), jnp.array([[[5.0]]])).tolist()
        [[[2.0]]]
    """
    moved = jnp.einsum(
        "lhp,lhpd->lhd",
        center.astype(jnp.float32),
        coefficients.astype(jnp.float32),
        precision=reference.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return mean.astype(jnp.float32) - moved


def _implementations(settings: Settings) -> dict[str, Callable[..., Any]]:
    kernels: dict[str, Callable[..., Any]] = {
        "tpu": functools.partial(tpu.project, settings=settings, interpret=False),
        "gpu": functools.partial(_gpu, settings=settings),
        "interpret": functools.partial(tpu.project, settings=settings, interpret=True),
    }
    looped = {name: jax.custom_batching.sequential_vmap(run) for name, run in kernels.items()}
    return {"xla": functools.partial(reference.project, settings=settings), **looped}


def _gpu(*args: Any, settings: Settings) -> tuple[Array, ...]:
    """The kernel of a GPU, imported when it is asked for: Mosaic GPU needs a package that jax does not install."""
    try:
        from pallas_kernels.apply import gpu
    except ImportError as error:
        raise NotImplementedError(f"apply on a GPU needs Mosaic GPU, which cannot be imported: {error}.") from error
    return gpu.project(*args, settings=settings)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(
    settings: Settings,
    sources: tuple[Array, ...],
    maps: tuple[Linear, ...],
    index: Array | None,
    weight: Array,
    rotation: Rotation | None,
) -> tuple[Array, ...]:
    found: tuple[Array, ...] = dispatch(
        "apply", _implementations(settings), settings.implementation, sources, maps, index, weight, rotation
    )
    return found


def _forward(settings: Settings, *args: Any) -> tuple[Any, Any]:
    return _project(settings, *args), args


def _backward(settings: Settings, kept: Any, slopes: tuple[Array, ...]) -> tuple[Any, ...]:
    sources, maps, index, weight, rotation = kept
    d_sources, grads, d_weight, d_turns = reference.backward(sources, maps, index, weight, rotation, settings, slopes)
    d_maps = tuple(one._replace(gather=None, coefficients=w, bias=b) for one, (w, b) in zip(maps, grads, strict=True))
    d_rotation = None if rotation is None else rotation._replace(cos=d_turns[0], sin=d_turns[1], groups=None)
    return d_sources, d_maps, None, d_weight, d_rotation


_project.defvjp(_forward, _backward)


def _alignment(source: Array, index: Array | None, weight: Array | None) -> tuple[Array | None, Array]:
    """Weights where there are none, and no index where it is known to be the identity."""
    rows = source.shape[1] if index is None else index.shape[0]
    if weight is None:
        weight = jnp.ones((rows, 1 if index is None else index.shape[1]), jnp.float32)
    if index is None or isinstance(index, jax.core.Tracer) or index.shape != (source.shape[1], 1):
        return index, weight
    same = (np.asarray(index)[:, 0] == np.arange(rows)).all()
    return (None if same else index), weight


def _check(
    sources: Sequence[Array], maps: Sequence[Linear], index: Array | None, weight: Array, rotation: Rotation | None
) -> None:
    blocks = sources[0].shape[:2]
    if any(s.shape[:2] != blocks for s in sources):
        raise ValueError(f"sources of shapes {[s.shape for s in sources]}; expected the same blocks and slots.")
    rows = (blocks[1], 1) if index is None else index.shape
    if weight.shape != rows:
        raise ValueError(f"weights of shape {weight.shape}; expected {rows}, as the index has.")
    width, table = sum(s.shape[2] for s in sources), maps[0].bias.shape[:2]
    for one in maps:
        wanted = (*table, one.gather.shape[-1] * width, one.bias.shape[-1])
        if one.coefficients.shape != wanted or one.gather.shape[:2] != table or one.bias.shape[:2] != table:
            raise ValueError(
                f"coefficients {one.coefficients.shape}, gather {one.gather.shape} and bias {one.bias.shape} do not "
                f"belong together; blocks of {width} features need coefficients {wanted}."
            )
    if rotation is not None and (
        rotation.cos.shape != rotation.sin.shape
        or rotation.cos.shape[1] != rows[0]
        or 2 * rotation.cos.shape[2] > maps[0].bias.shape[-1]
    ):
        raise ValueError(
            f"cosines {rotation.cos.shape} and sines {rotation.sin.shape} do not fit {rows[0]} tokens and keys of "
            f"{maps[0].bias.shape[-1]} channels; expected [G,T,rot/2]."
        )
