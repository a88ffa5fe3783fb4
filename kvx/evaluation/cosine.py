"""Attention-output cosine: does the target's attention read the same thing from a translated cache as from its own?

For every target layer and query head, the boundary's queries of the native run attend over the context once in the
native cache and once in the other; the figure is the mean cosine of the two outputs. What matters is measured, what
does not is not: an error on channels that no query reads, or on tokens that none attends to, costs nothing.

The prefix is left out on both sides. It is the target's own in every arm and takes most of the attention, so with it
any cache would look good.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvx.cache.cache import KVCache, LayerView
from kvx.cache.geometry import RopeSpec
from kvx.cache.rope import rotate
from kvx.errors import KvxError
from kvx.models.attention import attend
from kvx.models.config import ModelConfig
from kvx.typing import typed


@typed
def attention_outputs(
    queries: Float[Array, "B H T D"],
    positions: Int[Array, "B T"],
    view: LayerView,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    first: Int[Array, ""] | int = 0,
) -> Float[Array, "B H T Dv"]:
    """Attention of queries over one layer of a cache, and over nothing else.

    ``o_u = sum_i softmax_i(scale q_u . k_i) v_i`` over the filled slots i with ``first <= pos_i <= pos_u`` (and inside
    the window). A query that sees no slot gets zero.

    Args:
        queries: ``[B,H,T,D]``, rotated; query head h reads kv head ``h // G``.
        positions: int ``[B,T]``; -1 marks padding.
        view: rotated keys ``[B,K,S,D]``, values ``[B,K,S,Dv]``, positions ``[B,1|K,S]``.
        scale: multiplier of q . k.
        window: sliding-window width in tokens.
        softcap: tanh cap of the scores.
        first: lowest position read.

    Returns:
        fp32 ``[B,H,T,Dv]``.
    """
    read = jnp.where(view.pos >= jnp.asarray(first, jnp.int32), view.pos, jnp.int32(-1))
    context = LayerView(view.k, view.v, read)
    return attend(queries.astype(jnp.float32), [context], positions, scale=scale, window=window, softcap=softcap)


@typed
def head_cosine(
    a: Float[Array, "B H T D"], b: Float[Array, "B H T D"], real: Int[Array, "B T"]
) -> tuple[Float[Array, " H"], Int[Array, " H"]]:
    """Sum over queries of the cosine of two attention outputs, and how many queries counted, per head.

    Queries that are padding or whose output ``a`` is zero (they see no context) do not count; a zero ``b`` scores 0.

    Args:
        a: ``[B,H,T,D]`` outputs over the native cache.
        b: ``[B,H,T,D]`` outputs over the other cache.
        real: int ``[B,T]`` positions of the queries; -1 marks padding.

    Returns:
        ``(sum [H], count [H])``.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.evaluation.cosine import head_cosine
        >>> a, b = jnp.array([[[[1.0, 0.0]]]]), jnp.array([[[[1.0, 1.0]]]])
        >>> total, count = head_cosine(a, b, jnp.array([[0]]))
        >>> round(float(total[0]), 4), int(count[0])
        (0.7071, 1)
    """
    norm_a, norm_b = jnp.linalg.norm(a, axis=-1), jnp.linalg.norm(b, axis=-1)
    counted = (real[:, None, :] >= 0) & (norm_a > 0)
    product = norm_a * norm_b
    cosine = jnp.where(product > 0, (a * b).sum(axis=-1) / jnp.where(product > 0, product, 1.0), 0.0)
    return jnp.where(counted, cosine, 0.0).sum(axis=(0, 2)), counted.sum(axis=(0, 2)).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("scale", "window", "softcap", "ropes"))
def _layer_cosines(
    queries: Array,
    positions: Array,
    views: Sequence[LayerView],
    first: Array,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    ropes: tuple[RopeSpec | None, ...],
) -> list[tuple[Array, Array]]:
    """:func:`head_cosine` of every further view with the first, at one layer; ``ropes``: of un-rotated keys."""
    outputs = []
    for view, rope in zip(views, ropes, strict=True):
        if rope is not None:
            view = dataclasses.replace(view, k=rotate(view.k, view.pos, rope))
        outputs.append(
            attention_outputs(queries, positions, view, scale=scale, window=window, softcap=softcap, first=first)
        )
    return [head_cosine(outputs[0], other, positions) for other in outputs[1:]]


@dataclasses.dataclass(frozen=True)
class AttentionCosine:
    """Mean cosine of attention outputs with the native cache's, per arm, layer and head.

    Add two to pool their queries.

    Attributes:
        sums: arm -> float64 ``[L,H]`` sums over queries.
        counts: arm -> int64 ``[L,H]`` how many queries counted.
    """

    sums: Mapping[str, np.ndarray]
    counts: Mapping[str, np.ndarray]

    def __add__(self, other: AttentionCosine) -> AttentionCosine:
        if self.arms != other.arms:
            raise KvxError(f"cosines of arms {self.arms} and {other.arms} cannot be pooled; measure the same arms.")
        return AttentionCosine(
            {arm: self.sums[arm] + other.sums[arm] for arm in self.arms},
            {arm: self.counts[arm] + other.counts[arm] for arm in self.arms},
        )

    @property
    def arms(self) -> tuple[str, ...]:
        """Arms that were compared with the native cache."""
        return tuple(self.sums)

    def per_head(self, arm: str = "translated") -> np.ndarray:
        """float64 ``[L,H]``; NaN where no query sees any context (a window layer far behind it)."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.sums[arm] / self.counts[arm]

    def mean(self, arm: str = "translated") -> float:
        """Mean over layers and heads."""
        return float(np.nanmean(self.per_head(arm)))

    def worst_layer(self, arm: str = "translated") -> tuple[int, float]:
        """``(layer, mean over its heads)`` of the layer that is read worst."""
        per_head = self.per_head(arm)
        known = [layer for layer in range(len(per_head)) if not np.isnan(per_head[layer]).all()]
        means = [float(np.nanmean(per_head[layer])) for layer in known]
        at = int(np.argmin(means))
        return known[at], means[at]

    def worst_head(self, arm: str = "translated") -> tuple[int, int, float]:
        """``(layer, head, cosine)`` of the head that is read worst."""
        per_head = self.per_head(arm)
        layer, head = np.unravel_index(np.nanargmin(per_head), per_head.shape)
        return int(layer), int(head), float(per_head[layer, head])

    def to_json(self) -> dict[str, Any]:
        """Per arm: ``mean``, ``worst_layer``, ``worst_head`` and the whole ``per_head`` table (``None``: no query)."""
        out: dict[str, Any] = {}
        for arm in self.arms:
            rows = [[None if np.isnan(x) else round(float(x), 6) for x in row] for row in self.per_head(arm)]
            layer, head = self.worst_layer(arm), self.worst_head(arm)
            out[arm] = {
                "mean": self.mean(arm),
                "worst_layer": {"layer": layer[0], "cosine": layer[1]},
                "worst_head": {"layer": head[0], "head": head[1], "cosine": head[2]},
                "per_head": rows,
            }
        return out


def attention_cosine(
    config: ModelConfig,
    queries: Array,
    positions: Array,
    native: KVCache,
    others: Mapping[str, KVCache],
    *,
    first: int = 0,
) -> AttentionCosine:
    """Cosine of attention outputs over each other cache with those over the native one.

    Args:
        config: of the target.
        queries: ``[L,B,H,T,D]`` rotated queries of the boundary in the native run (``forward(collect_queries=True)``).
        positions: int32 ``[B,T]`` of those queries; -1 marks padding.
        native: the target's own cache of the contexts, B rows.
        others: arm -> cache whose context stands at the same positions, B rows; slot counts may differ.
        first: lowest position that counts as context (the number of prefix tokens).

    Returns:
        Sums and counts per arm, layer and head.

    Raises:
        KvxError: ``queries`` do not fit the model and the cache.
    """
    wanted = (config.num_layers, native.batch, config.heads)
    if queries.ndim != 5 or queries.shape[:3] != wanted:
        raise KvxError(
            f"queries must be [L,B,H,T,D] with L,B,H = {wanted}, got shape {queries.shape}; collect them with "
            "forward(collect_queries=True) over this cache."
        )
    caches = (native, *others.values())
    found = []
    for layer, geometry in enumerate(config.geometry.layers):
        views = tuple(cache.layer(layer) for cache in caches)
        ropes = tuple(None if cache.rotated else geometry.rope for cache in caches)
        settings = {"scale": config.score_scale, "window": geometry.window, "softcap": config.attn_softcap}
        found.append(_layer_cosines(queries[layer], positions, views, jnp.int32(first), ropes=ropes, **settings))
    table = jax.device_get(found)
    return AttentionCosine(
        {arm: np.stack([row[at][0] for row in table]).astype(np.float64) for at, arm in enumerate(others)},
        {arm: np.stack([row[at][1] for row in table]).astype(np.int64) for at, arm in enumerate(others)},
    )
