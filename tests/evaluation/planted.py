"""Models whose right answers are known: they predict the letters they have seen, and nothing else.

One attention layer with zero queries averages one-hot values over everything seen; the head turns the averages into
logits. So a continuation made of the context's letters is cheap after that context and dear after another one, and the
greedy continuation is the context's most frequent letter.
"""

from __future__ import annotations

import string

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from kvx.cache.provenance import Provenance
from kvx.evaluation.items import Item, Question
from kvx.models.config import ModelConfig, tiny_config
from kvx.models.model import Model
from kvx.models.tokenizer import Tokenizer

PIECES = ["<s>", *string.ascii_lowercase, " ", ":", "?", "\n"]
SHARPNESS = 12.0


def tokenizer(adds_bos: bool = True) -> Tokenizer:
    """One token a character."""
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(PIECES)}, []))
    backend.decoder = decoders.Fuse()
    return Tokenizer.from_tokenizers(backend, bos="<s>", adds_bos=adds_bos)


def config() -> ModelConfig:
    """Residual stream: the present letter in the first half, what attention averaged in the second."""
    vocab = len(PIECES)
    return tiny_config(
        vocab_size=vocab, dim=2 * vocab, num_layers=1, heads=1, kv_heads=1, head_dim=32, ffn_dim=4, tied=False
    )


def letter_counter(seed: int | None = None, *, adds_bos: bool = True, marker: float = 0.0) -> Model:
    """The planted model; with a ``seed`` its cache lives in a rotated basis, so that another model cannot read it.

    With a ``marker`` a line break that was read votes that strongly for a "z": the valid way to begin an answer.
    """
    c = config()
    vocab, dim = c.vocab_size, c.dim
    basis = np.eye(32, dtype=np.float32)
    if seed is not None:
        basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((32, 32)))[0].astype(np.float32)
    half = np.eye(vocab, 32, dtype=np.float32) @ basis
    values = half.copy()
    if marker:
        values[PIECES.index("\n")] = marker * half[PIECES.index("z")]
    here, spoken = (np.concatenate([x, np.zeros_like(x)]) for x in (half, values))
    layer = {
        "attn_norm": {"scale": np.ones(dim, np.float32)},
        "mlp_norm": {"scale": np.ones(dim, np.float32)},
        "wq": np.zeros((1, 32, dim), np.float32),
        "wk": here.T[None],
        "wv": spoken.T[None],
        "wo": np.concatenate([np.zeros_like(half), half])[:, None] / dim**0.5,
        **{name: np.zeros((4, dim), np.float32) for name in ("gate", "up")},
        "down": np.zeros((dim, 4), np.float32),
    }
    params = {
        "embed": np.concatenate([np.eye(vocab, dtype=np.float32), np.zeros((vocab, vocab), np.float32)], axis=1),
        "final_norm": {"scale": np.ones(dim, np.float32)},
        "head": SHARPNESS
        / dim**0.5
        * np.concatenate([np.zeros((vocab, vocab), np.float32), np.eye(vocab, dtype=np.float32)], axis=1),
        "layers": (layer,),
    }
    params["head"][PIECES.index("<s>")] = -1.0
    owner = Provenance(f"planted-{seed}", f"weights-{seed}-{adds_bos}", "letters")
    made = jnp.asarray
    return Model(_map(made, params), c, tokenizer(adds_bos), owner)


def _map(function, tree):
    if isinstance(tree, dict):
        return {k: _map(function, v) for k, v in tree.items()}
    return tuple(_map(function, v) for v in tree) if isinstance(tree, tuple) else function(tree)


def _letters(rng: np.random.Generator, length: int, shares: list[float]) -> tuple[str, str]:
    """A text over four letters in the given shares, and the first of them."""
    few = rng.choice(list(string.ascii_lowercase), 4, replace=False)
    return "".join(rng.choice(few, length, p=shares)), str(few[0])


def items(count: int = 40, seed: int = 0) -> list[Item]:
    """Continuations over the same four letters as their context; lengths vary."""
    rng = np.random.default_rng(seed)
    texts = [_letters(rng, int(rng.integers(30, 60)), [0.25] * 4)[0] for _ in range(count)]
    return [Item(text[:-6], text[-6:]) for text in texts]


def questions(count: int = 40, seed: int = 1, answer_tokens: int = 4) -> list[Question]:
    """The answer is the context's most frequent letter, as often as the answer may have tokens."""
    rng = np.random.default_rng(seed)
    pairs = [_letters(rng, int(rng.integers(40, 60)), [0.7, 0.1, 0.1, 0.1]) for _ in range(count)]
    return [Question(context, "which", (letter * answer_tokens,)) for context, letter in pairs]
