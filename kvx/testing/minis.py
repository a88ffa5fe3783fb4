"""The minis: tiny GPT-2-, OPT- and Qwen2.5-shaped models, two sizes each, for :mod:`kvx.testing.reading`.

``scripts/make_minis.py`` trains them with ``RECIPE`` and writes their weights beside this file.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from kvx.cache.geometry import RopeSpec
from kvx.errors import KvxError
from kvx.models.config import ModelConfig
from kvx.models.tokenizer import Tokenizer
from kvx.testing.pretrain import Recipe, Stage
from kvx.testing.reading import READING, passages, questions_of

if TYPE_CHECKING:
    from kvx.models.model import Model

MAX_POSITIONS = 256
VOCABULARIES = {"words": 1024, "pieces": 512}  # at most: whole words, and words in pieces


@dataclasses.dataclass(frozen=True)
class Mini:
    """What one mini looks like.

    Attributes:
        family: transformers' ``model_type``; vocabulary: of its tokenizer, a key of ``VOCABULARIES``.
        layers, dim, heads, kv_heads, head_dim, ffn_dim: as in :class:`kvx.models.config.ModelConfig`.
        seed: of its first weights and of what it reads.
    """

    family: str
    vocabulary: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    seed: int

    @property
    def config(self) -> ModelConfig:
        """Static facts of the decoder."""
        rotary = self.family == "qwen2"
        made = ModelConfig(
            family=self.family,
            vocab_size=tokenizer(self.vocabulary).vocab_size,
            dim=self.dim,
            num_layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            ffn_dim=self.ffn_dim,
            windows=(None,) * self.layers,
            ropes=(RopeSpec.create(dim=self.head_dim) if rotary else None,) * self.layers,
            score_scale=self.head_dim**-0.5,
            qkv_bias=True,
            max_positions=MAX_POSITIONS,
        )
        if rotary:
            return made
        activation, offset = ("relu", 2) if self.family == "opt" else ("gelu_tanh", 0)
        facts: dict[str, Any] = {"norm": "layer", "norm_eps": 1e-5, "gated": False, "out_bias": True, "mlp_bias": True}
        return dataclasses.replace(made, activation=activation, position_offset=offset, **facts)


MINIS = {
    "gpt2-small": Mini("gpt2", "words", 3, 64, 2, 2, 32, 128, 1),
    "gpt2-large": Mini("gpt2", "pieces", 4, 96, 3, 3, 32, 192, 2),
    "opt-small": Mini("opt", "pieces", 3, 80, 2, 2, 40, 160, 3),
    "opt-large": Mini("opt", "words", 4, 96, 4, 4, 24, 192, 4),
    "qwen2-small": Mini("qwen2", "words", 3, 64, 4, 2, 16, 96, 5),
    "qwen2-large": Mini("qwen2", "words", 5, 80, 5, 1, 16, 128, 6),
}
PEOPLE, RELATIONS = 4, 2  # of the passages that minis are measured on
RECIPE = Recipe(
    (Stage(150, PEOPLE, 1, 4), Stage(650, PEOPLE, RELATIONS, 6, batch_size=32, prose=0.1)), peak=3e-3, warmup=50
)


@functools.cache
def tokenizer(vocabulary: str) -> Tokenizer:
    """One of the two tokenizers: byte-level BPE learned from passages of the task, the same ones on every call.

    Args:
        vocabulary: ``"words"`` (nearly every word is one token) or ``"pieces"`` (half as many merges).

    Example:
        >>> from kvx.testing.minis import tokenizer
        >>> [len(tokenizer(name).encode("Ursula wears grey boots.")) for name in ("words", "pieces")]
        [7, 11]
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocabulary not in VOCABULARIES:
        raise KvxError(f"no vocabulary {vocabulary!r} of the minis; expected one of {', '.join(VOCABULARIES)}.")
    texts = (passage.text + passage.asked(tuple(range(6))) for passage in islice(passages(0), 3000))
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARIES[vocabulary],
            initial_alphabet=letters,
            special_tokens=["<s>"],
            show_progress=False,
        ),
    )
    return Tokenizer.from_tokenizers(backend, bos="<s>", adds_bos=True)


def folder_of(name: str) -> Path:
    """Where a mini's files lie.

    Raises:
        KvxError: no such mini, or its files are missing.
    """
    if name not in MINIS:
        raise KvxError(f"no mini {name!r}; expected one of {', '.join(MINIS)}.")
    folder = Path(str(importlib.resources.files("kvx.testing"))) / "weights" / name
    if not (folder / "config.json").is_file():
        raise KvxError(f"the mini {name!r} has no files in {folder}; make them with scripts/make_minis.py.")
    return folder


def load_mini(name: str, *, dtype: Any = jnp.float32, stacked: bool = False) -> Model:
    """A trained mini with its tokenizer.

    Args:
        name: a key of ``MINIS``; dtype: of weights and activations; stacked: scan the layers, to compile sooner.

    Raises:
        KvxError: as :func:`folder_of`.

    Example:
        >>> import kvx
        >>> from kvx.testing.minis import load_mini
        >>> model = load_mini("qwen2-small")
        >>> notes = "Notes: Ada eats figs. Bela sells keys. Ada sells drums. Bela eats rice."
        >>> out = kvx.generate(model, model.encode(notes + "\\n> Bela eats what?").tokens, max_new_tokens=1)
        >>> model.decode(out.tokens[0])
        ' rice'
    """
    from kvx.models.load import load_model

    model = load_model(folder_of(name), dtype=dtype, stacked=stacked)
    named = dataclasses.replace(model.provenance, model=f"mini:{name}") if model.provenance else None
    return dataclasses.replace(model, provenance=named)


def write_mini(model: Model, folder: Path, facts: dict[str, Any]) -> Path:
    """Write a mini as a Hugging Face folder, weights in their own dtype, ``facts`` as ``training.json`` beside them."""
    from safetensors.numpy import save_file

    from kvx.models.export import hf_tensors, to_hf_config
    from kvx.models.tokenizer_files import write_folder

    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(hf_tensors(model)), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(to_hf_config(model.config), indent=1) + "\n", encoding="utf-8")
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    write_folder(model._tokenizer(), folder)
    return folder


def native_scores(model: Model, questions: int = 200, *, seed: int = 1) -> dict[str, float]:
    """How well a model answers when it reads the passage itself, greedily.

    Args:
        model: with tokenizer; questions: of each kind, each about a passage of its own; seed: of the passages.

    Returns:
        ``accuracy``: share of closed-set answers that are exactly right; ``f1``: word-overlap F1 of extractive answers.
    """
    from kvx.evaluation.answering import answerer
    from kvx.evaluation.answers import exact_match, f1_score
    from kvx.evaluation.arms import boundary_tokens
    from kvx.models.prefill import prefill

    words, found = model._tokenizer(), {}
    for key, closed, score in (("accuracy", True, exact_match), ("f1", False, f1_score)):
        asked = questions_of(seed, questions, closed=closed, people=PEOPLE, relations=RELATIONS)
        boundary = boundary_tokens(words, [READING.boundary(q.question) for q in asked])
        contexts = words.encode_batch([q.context for q in asked])
        cache = prefill(model, contexts, capacity=contexts.shape[1] + boundary.shape[1] + 8)
        said = answerer(model, words, boundary, 8)(cache, range(len(asked)))
        found[key] = sum(score(text, q.answers) for text, q in zip(said, asked, strict=True)) / len(asked)
    return found
