"""Models with random weights: for examples, tests and speed measurements."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvx.models.config import ModelConfig, tiny_config
from kvx.models.model import Model
from kvx.models.weight_table import table
from kvx.models.weights import assemble


def byte_model(layers: int = 2, *, seed: int = 0) -> Model:
    """A small random model that reads and writes text, one token a byte: enough to try every function on.

    Args:
        layers: number of layers.
        seed: of the weights.

    Returns:
        A model of 257 tokens (256 bytes and BOS, which it adds), with tokenizer.

    Example:
        >>> from kvx.models.random_model import byte_model
        >>> model = byte_model()
        >>> model.encode("Zoë").ids.tolist(), model.decode(model.encode("Zoë").tokens[0])
        ([256, 57, 78, 127, 104], 'Zoë')
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    from kvx.models.tokenizer import Tokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate([*letters, "<s>"])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    made = random_model(tiny_config(vocab_size=257, num_layers=layers), seed=seed)
    return dataclasses.replace(made, tokenizer=Tokenizer.from_tokenizers(backend, bos="<s>", adds_bos=True))


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
        wide = row.path[-1] in ("embed", "head", "positions")
        shape = row.matrix if wide else (*row.matrix[:0:-1], row.matrix[0] * parts)  # [in, out], or flat
        if row.path[-1] == "scale":
            return 1.0 - config.norm_offset + 0.1 * rng.standard_normal(shape, np.float32)
        scale = shape[0] ** -0.5 if row.kind != "plain" else 0.5 if wide else 0.1
        array = np.float32(scale) * rng.standard_normal(shape, np.float32)
        return array.T if row.kind == "linear" else array

    return Model(assemble(config, read, rows, dtype=dtype, stacked=stacked), config)
