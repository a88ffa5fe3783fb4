"""Models with random weights: for examples, tests and speed measurements."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from kvx.models.config import ModelConfig, tiny_config
from kvx.models.model import Model
from kvx.models.weight_table import table
from kvx.models.weights import assemble


def random_model(
    config: ModelConfig | None = None, *, seed: int = 0, dtype: Any = jnp.float32, stacked: bool = False
) -> Model:
    """A model whose weights are drawn at random: matrices ``N(0, 1/rows)``, norm scales near one.

    Args:
        config: static facts; :func:`kvx.models.config.tiny_config` when ``None``.
        seed: seed of the generator.
        dtype: dtype of the weights.
        stacked: stack layers (scanned) instead of one dict per layer.

    Returns:
        The model, without tokenizer or provenance.

    Example:
        >>> from kvx.models.random_model import random_model
        >>> random_model().params["embed"].shape
        (64, 32)
    """
    config = config or tiny_config()
    rng = np.random.default_rng(seed)

    rows = {
        row.name("hf", layer): row
        for row in table(config)
        for layer in range(config.num_layers if row.per_layer else 1)
    }

    def read(name: str) -> np.ndarray:
        row = rows[name]
        parts = row.part[1] if row.part else 1
        shape = (*row.matrix[:-1], row.matrix[-1] * parts)
        if row.path[-1] == "scale":
            return 1.0 - config.norm_offset + 0.1 * rng.standard_normal(shape, np.float32)
        wide = row.path[-1] in ("embed", "head", "positions")
        scale = shape[0] ** -0.5 if row.kind != "plain" else 0.5 if wide else 0.1
        array = np.float32(scale) * rng.standard_normal(shape, np.float32)
        return array.T if row.kind == "linear" else array

    return Model(assemble(config, read, rows, dtype=dtype, stacked=stacked), config)
