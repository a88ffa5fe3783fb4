"""First weights from which a small decoder learns to read in minutes: heads that look back, and heads that compare.

A random transformer stays for thousands of steps where it only knows which words are answers: looking something up
takes a head that says which token came before, and a later head that compares that with the question, and neither is
of use without the other. So the first layer's heads begin as readers of the token 1, 2, 3 ... places back, all writing
by one map; in later layers queries begin equal to keys and what is read is written as it was read. Everything is
trained from there.

Reference: induction heads, Olsson et al., arXiv 2209.11895; equal queries and keys, Trockman and Kolter (mimetic
initialisation), arXiv 2305.09828.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvx.cache.rope import frequencies
from kvx.models.config import ModelConfig
from kvx.models.model import Model
from kvx.models.random_model import random_model
from kvx.models.tokenizer import Tokenizer

EMBED, SHRINK = 0.3, 0.1  # of a random model's embeddings, and of what its sublayers write
LOOK_BACK = 3  # head h of the first layer looks 1 + h % LOOK_BACK tokens back
SHARP = 8.0  # score of that token above one that is far away, times the number of frequencies
QUIET = 0.1  # of the first layer's random queries and keys, and of learned positions
WRITE, MATCH = 0.5, 2.0  # of what the first layer's heads write, and of later queries
PERIODS = (6.0, 17.0, 50.0, 150.0)  # tokens, of the waves in learned positions
WAVE = 0.5  # their amplitude


def first_model(config: ModelConfig, tokenizer: Tokenizer, seed: int) -> Model:
    """A model to train, with tokenizer: random weights, attention arranged as this module says.

    Args:
        config: the decoder; without query and key biases its first layer looks nowhere in particular.
        tokenizer: of the config's vocabulary; seed: of the random weights.

    Returns:
        An unstacked fp32 model.

    Example:
        >>> from kvx.testing.first_weights import first_model
        >>> from kvx.testing.minis import MINIS, tokenizer
        >>> mini = MINIS["qwen2-small"]
        >>> first_model(mini.config, tokenizer(mini.vocabulary), mini.seed).config.num_layers
        3
    """
    made = random_model(config, seed=seed, stacked=False)
    params = {**made.params, "embed": made.params["embed"] * jnp.float32(EMBED)}
    arrays: list[dict[str, Any]] = [
        {name: np.array(w) if not isinstance(w, dict) else w for name, w in x.items()} for x in params["layers"]
    ]
    if "positions" in params:
        params.update(_waves(np.array(params["embed"]), np.array(params["positions"]) * np.float32(EMBED)))
    for number, w in enumerate(arrays):
        w["down"] = w["down"] * np.float32(SHRINK)
        if number:
            _compare(config, w)
        else:
            _look_back(config, w, params)
    layers = tuple({name: x if isinstance(x, dict) else jnp.asarray(x) for name, x in w.items()} for w in arrays)
    return dataclasses.replace(made, params={**params, "layers": layers}, tokenizer=tokenizer)


def _waves(embed: np.ndarray, positions: np.ndarray) -> dict[str, Any]:
    """Learned positions whose first channels are cosines and sines of the position, and words that leave them free."""
    angles = np.arange(len(positions))[:, None] * (2 * math.pi / np.array(PERIODS))
    waves = WAVE * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    positions *= QUIET
    positions[:, : waves.shape[1]] = waves
    embed[:, : waves.shape[1]] = 0
    return {"embed": jnp.asarray(embed), "positions": jnp.asarray(positions)}


def _look_back(c: ModelConfig, w: dict[str, Any], params: dict[str, Any]) -> None:
    """First layer: the score of a token falls with its distance from the one ``1 + h % LOOK_BACK`` places back."""
    if c.qkv_bias:
        _waves_apart(c, w, params)
    w["wv"][:] = w["wv"][:1]
    w["wo"][:] = w["wo"][:, :1]
    w["wo"] *= np.float32(WRITE)


def _waves_apart(c: ModelConfig, w: dict[str, Any], params: dict[str, Any]) -> None:
    for name in ("wq", "wk"):
        w[name] = w[name] * np.float32(QUIET)
    for heads, name in ((c.heads, "q"), (c.kv_heads, "k")):
        for head in range(heads):
            back = 1 + head % LOOK_BACK if name == "q" else 0
            _place(c, w[f"w{name}"][head], w[f"b{name}"][head], back, params)


def _place(c: ModelConfig, weight: np.ndarray, bias: np.ndarray, back: int, params: dict[str, Any]) -> None:
    """Make a head's query (or key, with ``back`` 0) a set of waves at its position, less ``back``."""
    count = len(PERIODS)
    rope = c.ropes[0]
    if rope is None:
        level = np.mean(np.square(params["embed"])) + np.mean(np.square(params["positions"]))  # of the normed input
        size = math.sqrt(SHARP / c.score_scale * level) / WAVE
        turn = -back * 2 * math.pi / np.array(PERIODS)
        weight[: 2 * count] = 0
        for i, angle in enumerate(turn):
            cos, sin = size * math.cos(angle), size * math.sin(angle)
            weight[i, i], weight[i, count + i] = cos, -sin
            weight[count + i, i], weight[count + i, count + i] = sin, cos
        return
    half = c.head_dim // 2
    speed = frequencies(rope)[:count]
    size = math.sqrt(SHARP / c.score_scale)
    bias[:] = 0
    bias[: len(speed)] = size * np.cos(back * speed)
    bias[half : half + len(speed)] = -size * np.sin(back * speed)


def _compare(c: ModelConfig, w: dict[str, Any]) -> None:
    """Later layers: queries are keys, so like tokens find each other, and what is read is written back as it was."""
    group = c.heads // c.kv_heads
    for head in range(c.heads):
        w["wq"][head] = np.float32(MATCH) * w["wk"][head // group]
        w["wo"][:, head] = w["wv"][head // group].T
