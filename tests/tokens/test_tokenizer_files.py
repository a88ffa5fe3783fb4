"""Tokenizers from model folders: every file that says something is read, and what is saved reads back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx.errors import KvxError
from kvx.models.tokenizer import Tokenizer

FAMILIES = ["gpt2", "smollm2", "qwen2", "llama3", "llama2", "gemma", "nfkc_unigram", "words"]


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        stem, _, ext = name.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{stem}.{ext}").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def saved(zoo, tmp_path_factory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, folder in folders.items():
        zoo[name].save(folder)
    return folders


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_folder_reads_back_equal(zoo, saved, name):
    ours, back = zoo[name], Tokenizer.from_folder(saved[name])
    assert back.digest == ours.digest
    assert (back.bos_id, back.eos_ids, back.adds_bos) == (ours.bos_id, ours.eos_ids, ours.adds_bos)
    assert back.specials == ours.specials


@pytest.fixture(scope="module")
def oracles(saved) -> dict[str, object]:
    from transformers import AutoTokenizer

    return {name: AutoTokenizer.from_pretrained(str(folder)) for name, folder in saved.items()}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(FAMILIES))
def test_tokens_are_those_of_transformers(zoo, oracles, texts, data, name):
    text = data.draw(texts)
    assert zoo[name].encode(text).ids.tolist() == oracles[name](text)["input_ids"]


def test_folder_is_read_without_transformers_or_torch(saved, run_python):
    code = (
        "import sys; from kvx.models.tokenizer import Tokenizer; "
        f"t = Tokenizer.from_folder({str(saved['llama3'])!r}); t.encode('the fox'); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = run_python(code)
    assert done.stdout.strip() == "[]", done.stderr


def test_eos_ids_come_from_tokenizer_and_generation_config(zoo, saved, tmp_path):
    llama = zoo["llama3"]
    tokenizer_json = (saved["llama3"] / "tokenizer.json").read_text(encoding="utf-8")
    write(
        tmp_path,
        tokenizer_json=tokenizer_json,
        tokenizer_config_json={"eos_token": {"content": "<|eot_id|>"}, "bos_token": "<|begin_of_text|>"},
        generation_config_json={"eos_token_id": [5, llama.token_id("<|eot_id|>"), 6]},
        config_json={"eos_token_id": 7, "bos_token_id": 0},
    )
    found = Tokenizer.from_folder(tmp_path)
    assert found.eos_ids == (llama.token_id("<|eot_id|>"), 5, 6)
    assert found.adds_bos and found.bos_id == llama.bos_id


def test_special_tokens_map_and_config_fill_in(zoo, saved, tmp_path):
    gpt2 = zoo["gpt2"]
    tokenizer_json = (saved["gpt2"] / "tokenizer.json").read_text(encoding="utf-8")
    write(tmp_path, tokenizer_json=tokenizer_json, special_tokens_map_json={"eos_token": "<|endoftext|>"})
    assert Tokenizer.from_folder(tmp_path).eos_ids == (gpt2.bos_id,)
    (tmp_path / "special_tokens_map.json").unlink()
    write(tmp_path, config_json={"bos_token_id": gpt2.bos_id, "eos_token_id": gpt2.bos_id})
    found = Tokenizer.from_folder(tmp_path)
    assert (found.bos_id, found.eos_ids, found.adds_bos) == (gpt2.bos_id, (gpt2.bos_id,), False)


def test_generation_config_names_the_bos_of_a_tokenizer_without_one(zoo, saved, tmp_path):
    """Qwen: no bos_token, but its generation config starts texts with <|endoftext|>: the prefix a target can use."""
    end = zoo["qwen2"].token_id("<|endoftext|>")
    tokenizer_json = (saved["qwen2"] / "tokenizer.json").read_text(encoding="utf-8")
    config = {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False}
    write(tmp_path, tokenizer_json=tokenizer_json, tokenizer_config_json=config)
    write(tmp_path, generation_config_json={"bos_token_id": end, "eos_token_id": [end]})
    found = Tokenizer.from_folder(tmp_path)
    assert (found.bos_id, found.adds_bos, found.prefix_ids) == (end, False, (end,))


@pytest.mark.parametrize(("declared", "added"), [(True, True), (False, False), (None, True)])
def test_add_bos_token_decides_else_the_post_processor(saved, tmp_path, declared, added):
    tokenizer_json = (saved["llama3"] / "tokenizer.json").read_text(encoding="utf-8")
    config = {"bos_token": "<|begin_of_text|>"} | ({} if declared is None else {"add_bos_token": declared})
    write(tmp_path, tokenizer_json=tokenizer_json, tokenizer_config_json=config)
    assert Tokenizer.from_folder(tmp_path).adds_bos is added


def test_chat_template_file_wins_over_config(saved, tmp_path):
    tokenizer_json = (saved["gpt2"] / "tokenizer.json").read_text(encoding="utf-8")
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "listed"}]
    write(tmp_path, tokenizer_json=tokenizer_json, tokenizer_config_json={"chat_template": named})
    assert Tokenizer.from_folder(tmp_path).chat_template == "listed"
    write(tmp_path, chat_template_json={"chat_template": "own json"})
    assert Tokenizer.from_folder(tmp_path).chat_template == "own json"
    write(tmp_path, chat_template_jinja="own file")
    assert Tokenizer.from_folder(tmp_path).chat_template == "own file"


def test_tokens_that_only_the_config_declares_are_added(zoo, saved, tmp_path):
    tokenizer_json = (saved["gpt2"] / "tokenizer.json").read_text(encoding="utf-8")
    extra = zoo["gpt2"].vocab_size
    declared = {str(extra): {"content": "<|tool|>", "special": True}}
    write(tmp_path, tokenizer_json=tokenizer_json, tokenizer_config_json={"added_tokens_decoder": declared})
    assert Tokenizer.from_folder(tmp_path).encode("a<|tool|>").ids.tolist()[-1] == extra
    wrong = {str(extra + 3): {"content": "<|tool|>"}}
    write(tmp_path, tokenizer_config_json={"added_tokens_decoder": wrong})
    with pytest.raises(KvxError, match="files belong to different models"):
        Tokenizer.from_folder(tmp_path)


def test_older_files_go_through_transformers(zoo, tmp_path):
    """vocab.json and merges.txt alone, GPT-2's original files."""
    model = json.loads(zoo["gpt2"].backend.to_str())["model"]
    merges = "#version: 0.2\n" + "\n".join(" ".join(m) for m in model["merges"])
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    write(tmp_path, vocab_json=model["vocab"], merges_txt=merges, config_json={"model_type": "gpt2"})
    write(tmp_path, tokenizer_config_json=config)
    found = Tokenizer.from_folder(tmp_path)
    text = "the quick brown fox 中文 👍🏽"
    assert found.encode(text).ids.tolist() == zoo["gpt2"].encode(text).ids.tolist()
    assert not found.adds_bos and found.decode(found.encode(text).ids) == text


def test_refusals(tmp_path):
    with pytest.raises(KvxError, match="is not a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(KvxError, match="no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    write(tmp_path, tokenizer_json="{}")
    with pytest.raises(KvxError, match="cannot be read by tokenizers"):
        Tokenizer.from_folder(tmp_path)
    write(tmp_path, tokenizer_config_json="{")
    with pytest.raises(KvxError, match="not valid JSON"):
        Tokenizer.from_folder(tmp_path)


def test_saving_keeps_other_generation_settings(zoo, tmp_path):
    write(tmp_path, generation_config_json={"temperature": 0.7})
    zoo["gpt2"].save(tmp_path)
    kept = json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8"))
    assert kept["temperature"] == 0.7 and kept["eos_token_id"] == list(zoo["gpt2"].eos_ids)
