"""Input embeddings of a model as features: a look-up in its table, no layer of it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

if TYPE_CHECKING:
    from kvx.models.model import Model

_TINY = 1e-12


@jax.jit
def token_embeddings(model: Model, tokens: Int[Array, "B T"]) -> Float32[Array, "B T M"]:
    """Rows of the embedding table, each brought to unit root mean square (as the first norm of most models does).

    Positions, where a model learns them, are left out. Tables are read as they are: no scale, no layer, no product.

    Args:
        model: its table has M columns.
        tokens: ids; -1 for padding.

    Returns:
        Float32; zeros at padding.

    Example:
        >>> import jax.numpy as jnp
        >>> from kvx.models.embeddings import token_embeddings
        >>> from kvx.models.random_model import byte_model
        >>> rows = token_embeddings(byte_model(), jnp.array([[65, -1]]))
        >>> jnp.square(rows).mean(axis=-1).round(3).tolist()
        [[1.0, 0.0]]
    """
    rows = model.params["embed"].at[jnp.maximum(tokens, 0)].get(mode="clip").astype(jnp.float32)
    size = jnp.sqrt(jnp.square(rows).mean(axis=-1, keepdims=True) + _TINY)
    return jnp.where((tokens >= 0)[..., None], rows / size, 0.0)
