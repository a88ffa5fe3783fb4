"""SmolLM2-135M-Instruct and Gemma 3 270M from their GGUF files, beside transformers' own GGUF path."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvx.models.demo_weights import DEMO_MODELS, demo_folder, write_gguf
from kvx.models.generate import generate
from kvx.models.gguf_file import GgufFile
from kvx.models.gguf_tokenizer import build_tokenizer
from kvx.models.load import load_model
from kvx.models.safetensors_folder import SafetensorsFolder

NAMES = ("smollm2", "gemma3")
TEXTS = [
    "Hello, world! It's a test; don't WON'T we'LL.",
    "  two  spaces\n\nnewlines\n\n\n\t tab\r\n\r\n",
    "日本語のテキスト、漢字とかな。 中文也要。",
    "Привет, мир! Ёлка",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "한국어 텍스트",
    "ไทยไม่มีช่องว่าง",
    "👩‍👩‍👧‍👦 emoji 🤷🏽‍♂️🇵🇹",
    "e\u0301 combining a\u0308 \u1e9b\u0323",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<bos><start_of_turn>user\nhi<end_of_turn>\n<eos><unused5><table>[multimodal]",
    "\u00a0nbsp\u2003em\u200bzero",
    "\x00\x01control",
    "https://a.b/c?d=e#f def f(x):\n    return x**2\n\n\n        # deep",
    "ﷺ ﬁ ｆｕｌｌ 𝔘𝔫𝔦 𐍈",
    "",
    "   ",
    "\n",
    "a" * 300,
    "In 1984, 12 of 3,456 (78.9%) came.",
]
PROMPTS = {
    "smollm2": "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "gemma3": "The history of the printing press begins in",
}


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def gguf_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``gguf_of(name)``: the joined GGUF file."""
    folder = tmp_path_factory.mktemp("gguf")
    return functools.cache(lambda name: write_gguf(name, folder / f"{name}.gguf"))


@pytest.fixture(scope="module")
def their_tokenizer(gguf_of: Callable[[str], Path]) -> Callable[[str], Any]:
    from transformers import AutoTokenizer

    def build(name: str) -> Any:
        path = gguf_of(name)
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)

    return functools.cache(build)


@pytest.fixture(scope="module")
def metadata_of(gguf_of: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    return functools.cache(lambda name: dict(GgufFile.open(gguf_of(name)).metadata))


def noise(count: int) -> list[str]:
    """Random text over many scripts, spaces, digits and emoji."""
    rng = random.Random(0)
    ranges = [(32, 127), (160, 0x2FFF), (0x3000, 0xD7FF), (0x1F300, 0x1FA00)]

    def char() -> str:
        return rng.choice([chr(rng.randrange(*rng.choice(ranges))), " ", "\n", rng.choice("0123456789")])

    return ["".join(char() for _ in range(30)) for _ in range(count)]


def test_tokenization_matches_transformers(name: str, metadata_of: Callable, their_tokenizer: Callable) -> None:
    """Every text, token for token, and back.

    transformers' GGUF path knows no ``smollm`` pre-tokenizer and falls back to GPT-2's, so SmolLM2 is compared with
    that one here; the difference, cutting digits off first, is pinned in the next test.
    """
    meta = dict(metadata_of(name))
    if name == "smollm2":
        meta["tokenizer.ggml.pre"] = "gpt-2"
    ours, theirs = build_tokenizer(meta).backend, their_tokenizer(name)
    for text in [*TEXTS, *noise(300)]:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text


def test_smollm_cuts_digits_off_first(metadata_of: Callable, their_tokenizer: Callable) -> None:
    """As in the original tokenizer.json and in llama.cpp; it shows where spaces or marks meet digits."""
    ours = build_tokenizer(metadata_of("smollm2")).backend
    assert ours.encode("and  12,\n 8").tokens == ["and", "ĠĠ", "1", "2", ",", "ĊĠ", "8"]
    plain = [text for text in TEXTS if not any(c.isnumeric() for c in text)]
    for text in [*plain, "In 1984, 12 of 3,456 (78.9%) came."]:
        assert ours.encode(text).ids == their_tokenizer("smollm2").encode(text, add_special_tokens=False), text


def test_facts(name: str) -> None:
    model = load_model(f"demo:{name}")
    tokenizer = model.tokenizer
    assert tokenizer is not None and model.provenance is not None
    assert model.provenance.weights == DEMO_MODELS[name].sha256
    facts = (model.config.family, model.config.vocab_size, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos)
    if name == "smollm2":
        assert facts == ("llama", 49152, 1, (2, 0), False)
        assert "SmolLM" in tokenizer.apply_chat([{"role": "user", "content": "hi"}])
    else:
        assert facts == ("gemma3_text", 262144, 2, (1, 106), True)
        assert model.config.windows == tuple(None if i % 6 == 5 else 512 for i in range(18))
        assert {rope.theta for rope in model.config.ropes if rope} == {1e4, 1e6}


def torch_model(path: Path) -> Any:
    """The file through transformers' own GGUF reader."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    with pytest.MonkeyPatch.context() as patch:  # initial random weights take a while and are replaced at once
        patch.setattr("transformers.PreTrainedModel.init_weights", lambda self: None)
        model = AutoModelForCausalLM.from_config(config).float().eval()
    state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return model


def test_same_weights_and_same_greedy_text_as_transformers(name: str, gguf_of: Callable) -> None:
    import torch

    oracle = torch_model(gguf_of(name))
    state, stored = oracle.state_dict(), SafetensorsFolder.open(demo_folder(name))
    assert set(state) - set(stored.slots) == {"lm_head.weight"}
    for tensor in stored.slots:
        assert np.array_equal(stored.read(tensor), state[tensor].numpy()), tensor
    del state
    model = load_model(f"demo:{name}")
    tokens = model.tokenizer.encode(PROMPTS[name]).ids[None]  # type: ignore[union-attr]
    with torch.no_grad():
        theirs = oracle.generate(torch.from_numpy(tokens).long(), max_new_tokens=64, do_sample=False)
    theirs = theirs[0, tokens.shape[1] :].tolist()
    del oracle
    gc.collect()
    stops = model.tokenizer.eos_ids  # type: ignore[union-attr]
    ours = generate(model, jnp.asarray(tokens), max_new_tokens=64, stop_tokens=stops)
    count = int(ours.lengths[0])
    assert model.decode(ours.tokens[0, :count]) == model.decode(theirs)
    assert ours.tokens[0, :count].tolist() == theirs
