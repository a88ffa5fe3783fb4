"""Rotary position embeddings: frequencies on the host in fp64, rotation and its inverse with fp32 angles.

A pair of channels ``(a, b)`` at position ``p`` turns by the angle ``p f_i``::

    a' = m (a cos(p f_i) - b sin(p f_i)),   b' = m (b cos(p f_i) + a sin(p f_i))

with ``f_i`` the i-th frequency and ``m`` the attention factor (1 except for YaRN). Pairs are ``(i, i + dim/2)``
(half-split) or ``(2i, 2i + 1)`` (interleaved); channels from ``dim`` on pass through (partial rotary).
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvx.cache.geometry import CacheGeometry, RopeSpec
from kvx.errors import KvxError
from kvx.typing import typed


def frequencies(spec: RopeSpec, length: int | None = None) -> np.ndarray:
    """Angular frequencies of one layer's rotary embedding, in radians per token.

    ``theta^(-2i/dim)``, then changed by the length extension: divided by ``factor`` (linear), with a larger base
    (dynamic NTK), divided only where the wavelength is long (llama3), or interpolated channel by channel (yarn).

    Args:
        spec: rotary facts.
        length: dynamic NTK only: sequence length in tokens; ``spec.length`` when not given.

    Returns:
        read-only float32 ``[dim/2]``, computed in fp64 and rounded once.

    Raises:
        KvxError: dynamic NTK without a length, or with one that differs from the recorded one; an unknown kind.

    Example:
        >>> frequencies(RopeSpec.create(dim=4)).tolist()
        [1.0, 0.009999999776482582]

    Reference: Su et al., arXiv 2104.09864, eq. 15; Peng et al. (YaRN), arXiv 2309.00071, eqs. 17-23.
    """
    if spec.kind == "dynamic":
        spec = with_length(spec, length)
    return _frequencies(spec)


@functools.lru_cache(maxsize=1024)
def _frequencies(spec: RopeSpec) -> np.ndarray:
    kinds = {"default": _plain, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn}
    if spec.kind not in kinds:
        raise KvxError(f"RoPE type {spec.kind!r} is not supported; expected one of {', '.join(kinds)}.")
    out = kinds[spec.kind](spec).astype(np.float32)
    out.flags.writeable = False
    return out


def _plain(spec: RopeSpec, theta: float | None = None) -> np.ndarray:
    exponents = np.arange(0, spec.dim, 2, dtype=np.float64) / spec.dim
    return (spec.theta if theta is None else theta) ** -exponents


def _linear(spec: RopeSpec) -> np.ndarray:
    return _plain(spec) / spec.factor


def _dynamic(spec: RopeSpec) -> np.ndarray:
    original = _original(spec)
    if spec.length is None or spec.length <= original:
        return _plain(spec)
    if spec.dim == 2:
        return _plain(spec)  # a single frequency of 1, whatever the base
    stretch = spec.factor * spec.length / original - (spec.factor - 1.0)
    return _plain(spec, spec.theta * stretch ** (spec.dim / (spec.dim - 2)))


def _llama3(spec: RopeSpec) -> np.ndarray:
    plain, original = _plain(spec), _original(spec)
    turns = original * plain / (2.0 * math.pi)  # full turns over the trained length
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    middle = (1.0 - blend) * plain / spec.factor + blend * plain
    slow, fast = turns < spec.low_freq_factor, turns > spec.high_freq_factor
    return np.where(fast, plain, np.where(slow, plain / spec.factor, middle))


def _yarn(spec: RopeSpec) -> np.ndarray:
    plain, original = _plain(spec), _original(spec)

    def channel(turns: float) -> float:
        """Channel pair that makes this many full turns over the trained length."""
        return spec.dim * math.log(original / (turns * 2.0 * math.pi)) / (2.0 * math.log(spec.theta))

    low, high = channel(spec.beta_fast), channel(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    high = high + 0.001 if low == high else high
    interpolated = np.clip((np.arange(spec.dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return plain / spec.factor * interpolated + plain * (1.0 - interpolated)


def _original(spec: RopeSpec) -> int:
    if not spec.original_length:
        raise KvxError(f"RoPE type {spec.kind!r} needs original_length; build the spec with RopeSpec.create.")
    return spec.original_length


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """YaRN's multiplier of rotated queries and keys when the model's configuration does not give one.

    ``0.1 ln(factor) + 1``; with both ``mscale`` settings (DeepSeek) the ratio of ``0.1 mscale ln(factor) + 1``.

    Example:
        >>> round(yarn_attention_factor(4.0), 4)
        1.1386

    Reference: Peng et al., arXiv 2309.00071, eq. 22.
    """

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def with_length(spec: RopeSpec, length: int | None) -> RopeSpec:
    """The spec with the sequence length recorded that its dynamic NTK frequencies are computed for.

    Other kinds are returned as they are. Lengths up to ``original_length`` change nothing and are recorded as
    ``original_length``, so all short sequences share one spec (and one compiled function).

    Raises:
        KvxError: dynamic NTK and no length, neither here nor in the spec; or two that disagree.

    Example:
        >>> spec = RopeSpec.create("dynamic", dim=8, factor=2.0, original_length=16)
        >>> with_length(spec, 10).length, with_length(spec, 40).length
        (16, 40)
    """
    if spec.kind != "dynamic":
        return spec
    if length is None and spec.length is None:
        raise KvxError(
            "dynamic NTK RoPE depends on the sequence length and none is recorded; give length=, or record it with "
            "kvx.cache.rope.record_length(geometry, length)."
        )
    if length is None:
        return spec
    length = max(length, _original(spec))
    if spec.length is not None and max(spec.length, _original(spec)) != length:
        raise KvxError(
            f"this dynamic NTK RoPE is recorded for {spec.length} tokens, got {length}; un-rotate with the recorded "
            "length, then rotate with the other."
        )
    return dataclasses.replace(spec, length=length)


def record_length(geometry: CacheGeometry, length: int) -> CacheGeometry:
    """The geometry with ``length`` (tokens) recorded in every dynamic NTK layer; other layers unchanged.

    Raises:
        KvxError: another length is recorded already.

    Example:
        >>> from kvx.cache.geometry import LayerGeometry
        >>> spec = RopeSpec.create("dynamic", dim=8, factor=2.0, original_length=16)
        >>> record_length(CacheGeometry((LayerGeometry(1, 8, 8, rope=spec),)), 40).layers[0].rope.length
        40
    """
    layers = (
        dataclasses.replace(g, rope=None if g.rope is None else with_length(g.rope, length)) for g in geometry.layers
    )
    return CacheGeometry(tuple(layers))


@typed
def cos_sin(
    pos: Int[Array, "*T"], inv_freq: Float[Array, " F"] | np.ndarray, factor: float | Array = 1.0
) -> tuple[Float[Array, "*T F"], Float[Array, "*T F"]]:
    """Cosines and sines of the rotation angles, in fp32 and times the attention factor.

    Args:
        pos: int ``[...,T]`` positions in tokens; empty slots (-1) get angle 0.
        inv_freq: float32 ``[dim/2]`` radians per token, possibly traced.
        factor: attention factor.

    Returns:
        two float32 ``[...,T,dim/2]``.

    Example:
        >>> cos, sin = cos_sin(jnp.array([0, -1]), np.ones(2, np.float32))
        >>> cos.tolist(), sin.tolist()
        ([[1.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]])
    """
    turns = jnp.maximum(pos, 0).astype(jnp.float32)[..., None]
    inv_freq = jnp.asarray(inv_freq, jnp.float32)
    angle = turns * inv_freq.reshape((1,) * pos.ndim + (-1,))
    factor = jnp.asarray(factor, jnp.float32)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


@typed
def rotate_by(x: Float[Array, "*T D"], cos: Array, sin: Array, *, interleaved: bool = False) -> Float[Array, "*T D"]:
    """Rotate the first ``2 F`` channels of ``x`` by given cosines and sines ``[...,F]`` of the same rank.

    Products are fp32; the result has the dtype of ``x``. Compute the cosines once and use them in every layer.

    Example:
        >>> quarter = jnp.zeros((1, 1)), jnp.ones((1, 1))
        >>> rotate_by(jnp.array([[1.0, 0.0, 7.0]]), *quarter).tolist()
        [[0.0, 1.0, 7.0]]
    """
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., :half], turned[..., half:]
    a, b = a * cos - b * sin, b * cos + a * sin
    out = jnp.stack([a, b], axis=-1).reshape(turned.shape) if interleaved else jnp.concatenate([a, b], axis=-1)
    out = out.astype(x.dtype)
    return jnp.concatenate([out, rest], axis=-1) if rest.shape[-1] else out


def rotate_with(
    x: Array,
    pos: Array,
    inv_freq: Array | np.ndarray,
    interleaved: bool = False,
    dim: int | None = None,
    factor: float | Array = 1.0,
    *,
    inverse: bool = False,
) -> Array:
    """Rotate with frequencies that may be traced (a scan over layers that differ only in their frequencies).

    Args:
        x: ``[...,T,D]``.
        pos: int ``[...,T]`` of rank one less than ``x`` (size-1 axes broadcast, as in ``[B,1,T]`` for all heads), or
            ``[T]`` for all rows; -1 marks empty slots, which are not turned.
        inv_freq: float32 ``[dim/2]``.
        interleaved: pairs are neighbours instead of halves.
        dim: rotated channels, ``2 len(inv_freq)``; given only to be checked.
        factor: attention factor (multiplied in, divided out when ``inverse``).
        inverse: undo the rotation.

    Returns:
        ``[...,T,D]``, dtype of ``x``.

    Raises:
        KvxError: ranks that do not match, or more rotated channels than there are.
    """
    if dim is not None and dim != 2 * inv_freq.shape[-1]:
        raise KvxError(f"dim is {dim} but there are {inv_freq.shape[-1]} frequencies; expected dim/2 of them.")
    if 2 * inv_freq.shape[-1] > x.shape[-1]:
        raise KvxError(
            f"RoPE rotates {2 * inv_freq.shape[-1]} channels but vectors have {x.shape[-1]}; check head_dim."
        )
    if pos.ndim == 1:
        pos = pos.reshape((1,) * (x.ndim - 2) + pos.shape)
    if pos.ndim != x.ndim - 1:
        raise KvxError(
            f"positions of shape {pos.shape} do not fit vectors of shape {x.shape}; expected one axis less, with size "
            "1 where they are shared (pos[:, None] for positions [B,T] and vectors [B,K,T,D])."
        )
    return _rotate_compiled(x, pos, inv_freq, factor, interleaved, inverse)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _rotate_compiled(
    x: Array, pos: Array, inv_freq: Array, factor: float | Array, interleaved: bool, inverse: bool
) -> Array:
    """One compilation a shape when called eagerly; inlined when called inside another jitted function."""
    cos, sin = cos_sin(pos, inv_freq, 1.0 / factor if inverse else factor)
    return rotate_by(x, cos, -sin if inverse else sin, interleaved=interleaved)


@typed
def rotate(x: Float[Array, "*T D"], pos: Array, spec: RopeSpec) -> Float[Array, "*T D"]:
    """Apply RoPE: un-rotated vectors in, rotated vectors out.

    Args:
        x: ``[...,T,D]`` queries or keys; the first ``spec.dim`` channels turn.
        pos: int ``[...,T]`` positions in tokens, one axis less than ``x`` (``[B,1|K,T]`` for ``[B,K,T,D]``); -1: empty.
        spec: rotary facts.

    Returns:
        ``[...,T,D]``, dtype of ``x``; angles and products in fp32.

    Raises:
        KvxError: shapes that do not fit, or dynamic NTK without a recorded length.

    Example:
        >>> k = jnp.array([[1.0, 2.0, 3.0, 4.0]])
        >>> print(np.asarray(rotate(k, jnp.array([1]), RopeSpec.create(dim=4))).round(4))
        [[-1.9841  1.9599  2.4624  4.0198]]

    Reference: Su et al., arXiv 2104.09864, eq. 34.
    """
    return rotate_with(x, pos, frequencies(spec), spec.interleaved, spec.dim, spec.attention_factor)


@typed
def unrotate(x: Float[Array, "*T D"], pos: Array, spec: RopeSpec) -> Float[Array, "*T D"]:
    """Undo :func:`rotate` to fp32 rounding; the attention factor is divided out. Same arguments.

    Example:
        >>> spec, k = RopeSpec.create(dim=4, theta=1e6), jnp.array([[1.0, 2.0, 3.0, 4.0]])
        >>> back = unrotate(rotate(k, jnp.array([32000]), spec), jnp.array([32000]), spec)
        >>> bool(jnp.abs(back - k).max() < 1e-5)
        True
    """
    factor = spec.attention_factor
    return rotate_with(x, pos, frequencies(spec), spec.interleaved, spec.dim, factor, inverse=True)


def interleave(x: jax.Array, dim: int | None = None) -> jax.Array:
    """Reorder half-split channels ``[..., (2, dim/2)]`` into interleaved ones ``[..., (dim/2, 2)]``.

    Rotating half-split and then reordering equals reordering and then rotating interleaved.

    Example:
        >>> interleave(jnp.arange(4)).tolist()
        [0, 2, 1, 3]
    """
    return _permute(x, dim, lambda d: np.arange(d).reshape(2, -1).T.ravel())


def deinterleave(x: jax.Array, dim: int | None = None) -> jax.Array:
    """Inverse of :func:`interleave`.

    Example:
        >>> deinterleave(interleave(jnp.arange(6))).tolist()
        [0, 1, 2, 3, 4, 5]
    """
    return _permute(x, dim, lambda d: np.arange(d).reshape(-1, 2).T.ravel())


def _permute(x: jax.Array, dim: int | None, order) -> jax.Array:
    dim = x.shape[-1] if dim is None else dim
    if dim % 2 or dim > x.shape[-1]:
        raise KvxError(f"expected an even number of rotated channels, at most {x.shape[-1]}, got {dim}.")
    return x[..., np.concatenate([order(dim), np.arange(dim, x.shape[-1])])]
