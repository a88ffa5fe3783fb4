"""A pair of tiny models in folders, as a user would have them, with a text and questions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

SUBJECTS = ("the miller", "a heron", "my aunt", "the old clock", "a red boat", "the baker", "one fox", "the choir")
VERBS = ("found", "sold", "painted", "forgot", "carried", "counted", "hid", "praised")
OBJECTS = ("the bridge", "nine pears", "a silver spoon", "the north wind", "two letters", "the well", "a tin lamp")


@dataclasses.dataclass(frozen=True)
class Pair:
    """Paths of everything a command line needs."""

    source: Path
    target: Path
    text: Path
    questions: Path

    @property
    def models(self) -> list[str]:
        return ["--source", str(self.source), "--target", str(self.target)]


def prose(seed: int = 0, paragraphs: int = 160) -> str:
    rng = np.random.default_rng(seed)
    sentence = lambda: " ".join(rng.choice(words) for words in (SUBJECTS, VERBS, OBJECTS)).capitalize() + "."  # noqa: E731
    return "\n\n".join(" ".join(sentence() for _ in range(6)) for _ in range(paragraphs))


def write_model(folder: Path, vocabulary: int, bos: str | None, layers: int, seed: int) -> Path:
    """A Llama with random weights and a tokenizer trained on the text, saved by transformers and tokenizers."""
    import torch
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvx.models.tokenizer import Tokenizer

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [*([bos] if bos else []), "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([prose()], trainer)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=backend.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    Tokenizer.from_tokenizers(backend, bos=bos, eos="</s>", adds_bos=bos is not None).save(folder)
    return folder


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    home = tmp_path_factory.mktemp("pair")
    source = write_model(home / "source", 290, None, 3, seed=0)
    target = write_model(home / "target", 320, "<s>", 2, seed=1)
    (home / "text.txt").write_text(prose())
    rows = [
        {"context": prose(seed=n, paragraphs=1), "question": "who found it?", "answers": ["the miller"]}
        for n in range(1, 7)
    ]
    (home / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Pair(source, target, home / "text.txt", home / "questions.jsonl")
