"""Token embeddings: what the target looks up for the aligned token and those before it, as further source layers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvx.alignment import Alignment
from kvx.cache.geometry import CacheGeometry, LayerGeometry
from kvx.errors import KvxError


def reads_embeddings(params: Any) -> bool:
    """Whether a map (the last one of a chain), by its parameters, reads the target's embeddings of the tokens.

    Example:
        >>> import kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> from kvx.mappers.embeddings import reads_embeddings
        >>> method = kvx.mappers.low_rank(rank=8, embeddings=2)
        >>> mapper, _ = kvx.fit(method, toy_pairs(embedding_dim=4), progress=False)
        >>> reads_embeddings(mapper.params), reads_embeddings(kvx.identity().params)
        (True, False)
    """
    last = params[-1] if type(params) is tuple and params else params
    return getattr(last, "embeddings", 0) > 0


def lagged(embeddings: Float[Array, "B T M"], count: int) -> Float[Array, "B T W"]:
    """Embeddings of each token and of the ``count - 1`` tokens before it side by side, ``W = count M``.

    Attention heads that copy compare a query with the tokens *before* a key's own, so the target's keys hold which
    tokens these are. Its own table says so plainly, and is only looked up. Zeros where no token stands so far back.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.mappers.embeddings import lagged
        >>> lagged(jnp.array([[[1.0], [2.0], [3.0]]]), 2)[0].tolist()
        [[1.0, 0.0], [2.0, 1.0], [3.0, 2.0]]
    """
    length = embeddings.shape[1]
    moved = [jnp.pad(embeddings, ((0, 0), (lag, 0), (0, 0)))[:, :length] for lag in range(count)]
    return jnp.concatenate(moved, axis=-1) if moved else embeddings[..., :0]


def with_embedding_layers(geometry: CacheGeometry, count: int, dim: int) -> CacheGeometry:
    """The source's geometry with a layer for each of ``count`` tokens after its own, of ``dim`` features.

    Raises:
        KvxError: pairs without embeddings.
    """
    if count and not dim:
        raise KvxError("these pairs hold no embeddings of the target's tokens; make them with kvx.pairs.")
    one = LayerGeometry(1, dim - dim // 2, dim // 2)
    return CacheGeometry(geometry.layers + (one,) * count)


def features_of(alignment: Alignment, count: int, dim: int) -> Float[Array, "B T W"]:
    """The embeddings that a map reads for each target token, ``W = count dim``.

    Raises:
        KvxError: an alignment without embeddings, or with those of another model.
    """
    found = alignment.embeddings
    if found is None:
        raise KvxError(
            "this map reads the target's embeddings of the context's tokens, and the alignment has none; make it with "
            "kvx.align(source, target, texts, embed=True)."
        )
    if found.shape[-1] != dim:
        raise KvxError(
            f"the alignment's embeddings have {found.shape[-1]} channels, this map reads {dim}; align to the target "
            "the map was fitted for."
        )
    return lagged(found.astype(jnp.float32), count)
