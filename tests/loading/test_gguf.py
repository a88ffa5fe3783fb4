"""GGUF files of every architecture and type against the weights they were written from and against transformers."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from kvx.errors import KvxError
from kvx.models.gguf import convert_gguf
from kvx.models.gguf_config import gguf_config
from kvx.models.gguf_file import GgufFile
from kvx.models.hf_config import from_hf_config
from kvx.models.load import load_model
from kvx.models.safetensors_folder import SafetensorsFolder
from tests.loading import ggufs, k_quants

ROUND_TRIP = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def loaded(path: Path) -> dict[str, np.ndarray]:
    """Converted weights under the names of the weight table."""
    reader = SafetensorsFolder.open(convert_gguf(path))
    return {name.removeprefix("model."): reader.read(name) for name in reader.slots}


@pytest.mark.parametrize("arch", ggufs.CONFIGS)
@pytest.mark.parametrize("quant", ROUND_TRIP)
def test_values(arch: str, quant: str, cache: Path, tmp_path: Path) -> None:
    """Every weight is what dequantising the original gives, in the original order; untouched types are exact."""
    model = ggufs.tiny(arch)
    got = loaded(ggufs.write(tmp_path / "m.gguf", arch, model, quant=quant))
    kind = gguf.GGMLQuantizationType[quant]
    assert set(got) == set(model.weights)
    for name, want in model.weights.items():
        if want.ndim > 1:
            want = gguf.quants.dequantize(gguf.quants.quantize(want, kind), kind)
        tolerance = 1e-6 if arch == "gemma3" and want.ndim == 1 else 0  # 1 + w in float32, then - 1
        np.testing.assert_allclose(got[name].astype(np.float32), want, rtol=0, atol=tolerance, err_msg=name)


def test_quantised_types_stay_float32_and_plain_ones_keep_their_type(cache: Path, tmp_path: Path) -> None:
    model = ggufs.tiny("qwen3")
    for quant, want in (("Q8_0", "float32"), ("F16", "float16"), ("BF16", "bfloat16")):
        got = loaded(ggufs.write(tmp_path / f"{quant}.gguf", "qwen3", model, quant=quant))
        assert got["embed_tokens.weight"].dtype.name == want


@pytest.mark.parametrize("quant", k_quants.ORACLES)
def test_k_quants_by_the_letter(quant: str, tmp_path: Path) -> None:
    """Blocks of random bits with sane scales, against the format's definition spelt out number by number."""
    kind = gguf.GGMLQuantizationType[quant]
    block, width = gguf.GGML_QUANT_SIZES[kind]
    oracle, scales = k_quants.ORACLES[quant]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (6, 2 * width), np.uint8)
    blocks = data.reshape(-1, width)
    halves = rng.uniform(0.001, 0.1, (len(blocks), (scales.stop - scales.start) // 2)).astype(np.float16)
    blocks[:, scales] = halves.view(np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "k.gguf"), "llama")
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    ggufs.finish(writer)
    file = GgufFile.open(tmp_path / "k.gguf")
    got = file.read("token_embd.weight")
    want = np.array([oracle(bytes(row)) for row in blocks]).reshape(6, 2 * block)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(file.rows("token_embd.weight", np.array([4, 1])), got[[4, 1]])


def test_long_matrices_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ggufs.tiny("llama")
    path = ggufs.write(tmp_path / "m.gguf", "llama", model, quant="Q8_0")
    whole = GgufFile.open(path).read("token_embd.weight")
    monkeypatch.setattr("kvx.models.gguf_file.CHUNK_BYTES", 5 * 64 * 4)
    blocks = list(GgufFile.open(path).chunks("token_embd.weight"))
    assert [len(block) for block in blocks] == [5] * 12 + [4]
    np.testing.assert_array_equal(np.concatenate(blocks), whole)


@pytest.mark.parametrize("arch", ggufs.CONFIGS)
def test_logits_match_transformers_gguf_path(arch: str, cache: Path, tmp_path: Path) -> None:
    """The file through transformers' own reader, and through kvx: same configuration, same logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from kvx.models.prefill import next_token_logits

    path = ggufs.write(tmp_path / "m.gguf", arch, ggufs.tiny(arch), quant="Q8_0")
    config = AutoConfig.from_pretrained(str(tmp_path), gguf_file="m.gguf")
    if arch in ("qwen3", "gemma3"):  # transformers' mapping drops what the header says about these
        config.head_dim = 32
    if arch == "gemma3":
        config.layer_types, config.query_pre_attn_scalar = ggufs.GEMMA["layer_types"], 32
    torch_model = AutoModelForCausalLM.from_config(config).float().eval()
    state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=torch_model)["tensors"]
    torch_model.load_state_dict(state, strict=False)
    torch_model.tie_weights()
    tokens = np.arange(12, dtype=np.int32)[None] * 5 % 64
    with torch.no_grad():
        want = torch_model(torch.from_numpy(tokens).long()).logits[:, -1].numpy()
    got = next_token_logits(load_model(path), jax.numpy.asarray(tokens))
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=1e-4)


def test_missing_and_unknown_tensors_are_one_error(cache: Path, tmp_path: Path) -> None:
    """Case 21: every tensor that is absent or not understood is named, at once."""
    rogue = {"blk.0.attn_q.bias": np.ones(64, np.float32), "blk.1.weird.weight": np.ones(3, np.float32)}
    absent = ("blk.1.ffn_up.weight", "output_norm.weight")
    path = ggufs.write(tmp_path / "m.gguf", "qwen3", ggufs.tiny("qwen3"), drop=absent, extra=rogue)
    with pytest.raises(KvxError) as caught:
        convert_gguf(path)
    for name in (*absent, "blk.1.weird.weight"):
        assert name in str(caught.value)
    assert not list(cache.glob("converted/*"))


def test_biases_are_kept(cache: Path, tmp_path: Path) -> None:
    """Case 21: Qwen2's q, k and v have biases."""
    model = ggufs.tiny("qwen2")
    layer = load_model(ggufs.write(tmp_path / "m.gguf", "qwen2", model)).params["layers"][1]
    np.testing.assert_array_equal(layer["bk"].reshape(-1), model.weights["layers.1.self_attn.k_proj.bias"])
    assert "bo" not in layer


@pytest.mark.parametrize("better", ["output.weight", "token_embd.weight"])
def test_double_matrix_is_tied_to_the_better_copy(better: str, cache: Path, tmp_path: Path, caplog: Any) -> None:
    """Case 37: one matrix in two quantisations."""
    model = ggufs.tiny("llama")
    matrix = model.weights["embed_tokens.weight"]
    kinds = {name: "Q8_0" if name == better else "Q4_0" for name in ("output.weight", "token_embd.weight")}
    path = ggufs.write(tmp_path / "m.gguf", "llama", model, extra={"output.weight": matrix}, kinds=kinds)
    with caplog.at_level(logging.WARNING, logger="kvx"):
        params = load_model(path).params
    assert "head" not in params
    q8 = gguf.GGMLQuantizationType.Q8_0
    np.testing.assert_array_equal(params["embed"], gguf.quants.dequantize(gguf.quants.quantize(matrix, q8), q8))
    assert "stored twice" in caplog.text and better in caplog.text


def test_untied_head_stays(cache: Path, tmp_path: Path) -> None:
    """Case 23: another matrix in ``output.weight`` is the head."""
    model = ggufs.tiny("llama")
    head = np.random.default_rng(9).standard_normal((64, 64), np.float32)
    params = load_model(ggufs.write(tmp_path / "m.gguf", "llama", model, extra={"output.weight": head})).params
    np.testing.assert_array_equal(params["head"], head)
    np.testing.assert_array_equal(params["embed"], model.weights["embed_tokens.weight"])


def test_refusals_name_the_culprit(cache: Path, tmp_path: Path) -> None:
    model = ggufs.tiny("llama")
    for arch, meta, word in (
        ("llama", {"llama.expert_count": 8}, "mixtures of experts"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "longrope"),
        ("llama", {"llama.rope.freq_base": None}, "RoPE base"),
        ("llama", {"llama.embedding_length": None}, "llama.embedding_length"),
        ("llama", {"split.count": 3}, "llama-gguf-split"),
    ):
        with pytest.raises(KvxError, match=word):
            convert_gguf(ggufs.write(tmp_path / "m.gguf", arch, model, meta=meta))


@pytest.mark.parametrize("meta", [{"tokenizer.ggml.pre": "klingon-bpe"}, {"tokenizer.ggml.model": "klingon-bpe"}])
def test_unknown_tokenizer_is_refused_unless_one_is_given(meta: dict[str, str], cache: Path, tmp_path: Path) -> None:
    path = ggufs.write(tmp_path / "m.gguf", "llama", ggufs.tiny("llama"), meta=meta)
    for _ in range(2):  # at the conversion, and from the cache
        with pytest.raises(KvxError, match="klingon-bpe.*pass tokenizer="):
            load_model(path)
    other = convert_gguf(ggufs.write(tmp_path / "n.gguf", "llama", ggufs.tiny("llama", seed=1)))
    model = load_model(path, tokenizer=other)
    assert model.tokenizer is not None and model.tokenizer.encode("ab").ids.tolist() == [4]


def test_file_without_tokenizer(cache: Path, tmp_path: Path) -> None:
    meta = dict.fromkeys(ggufs.tokenizer_metadata())
    model = load_model(ggufs.write(tmp_path / "m.gguf", "llama", ggufs.tiny("llama"), meta=meta))
    assert model.tokenizer is None and model.provenance and model.provenance.tokenizer == ""


def test_unknown_architecture(cache: Path, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "mamba")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    ggufs.finish(writer)
    with pytest.raises(KvxError, match="'mamba' is not supported; expected one of llama, qwen2, qwen3, gemma3"):
        convert_gguf(tmp_path / "x.gguf")


def test_unsupported_quantisation_is_named(cache: Path, tmp_path: Path) -> None:
    model = ggufs.tiny("llama", hidden_size=256, intermediate_size=256, head_dim=64)
    kinds = {f"blk.{i}.ffn_down.weight": "IQ4_XS" for i in range(2)}
    path = ggufs.write(tmp_path / "m.gguf", "llama", model, kinds=kinds)
    with pytest.raises(KvxError, match=r"IQ4_XS \(2 tensors, such as blk.0.ffn_down.weight\)"):
        convert_gguf(path)


@pytest.mark.parametrize("cut", [10, 400, -1000])
def test_truncated_files_are_refused(cut: int, cache: Path, tmp_path: Path) -> None:
    path = ggufs.write(tmp_path / "m.gguf", "llama", ggufs.tiny("llama"))
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    with pytest.raises(KvxError, match="download it again"):
        convert_gguf(path)


def test_other_files_are_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\3\4" + b"\0" * 100)
    with pytest.raises(KvxError, match="not a GGUF file"):
        convert_gguf(tmp_path / "m.gguf")
    with pytest.raises(KvxError, match="does not exist"):
        convert_gguf(tmp_path / "absent.gguf")


def test_conversion_happens_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 38: the second load reads the converted form; the GGUF is not parsed again."""
    path = ggufs.write(tmp_path / "m.gguf", "llama", ggufs.tiny("llama"), quant="Q4_1")
    first = load_model(path)
    monkeypatch.setattr(GgufFile, "open", lambda path: pytest.fail("parsed again"))
    start = time.perf_counter()
    second = load_model(path)
    assert time.perf_counter() - start < 2
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
    assert first.provenance.same_model(second.provenance)


def test_same_name_other_weights(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 17: a perturbed copy under the same name, of the same size and time, is another model."""
    monkeypatch.setattr("kvx.models.disk_cache.BLOCK", 1024)  # digests of files this small are remembered, too
    path = ggufs.write(tmp_path / "m.gguf", "llama", ggufs.tiny("llama", seed=0))
    facts = path.stat()
    first = load_model(path)
    other = ggufs.write(tmp_path / "other.gguf", "llama", ggufs.tiny("llama", seed=1))
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert path.stat().st_size == facts.st_size and list((cache / "digests").iterdir())
    second = load_model(path)
    assert first.provenance.model == second.provenance.model
    assert not first.provenance.same_model(second.provenance)
    assert float(np.abs(first.params["embed"] - second.params["embed"]).max()) > 0.1


def test_interrupted_conversion_leaves_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ggufs.write(tmp_path / "m.gguf", "llama", ggufs.tiny("llama"))

    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("kvx.models.gguf.write_safetensors", stop)
        convert_gguf(path)
    assert list((cache / "converted").iterdir()) == []
    assert load_model(path).config.num_layers == 2


def test_llama3_frequencies_are_recovered(tmp_path: Path) -> None:
    """GGUF stores Llama 3's scaling as divisors; they come from the published formula."""
    theta, dim, factor = 500000.0, 64, 32.0
    inverse = theta ** -(np.arange(0, dim, 2) / dim)
    wavelength = 2 * np.pi / inverse
    divisors = np.ones(dim // 2, np.float32)
    divisors[wavelength > 8192] = factor
    middle = (wavelength <= 8192) & (wavelength >= 2048)
    smooth = (8192 / wavelength[middle] - 1) / 3
    divisors[middle] = 1 / ((1 - smooth) / factor + smooth)
    assert middle.any()
    model = ggufs.tiny("llama", head_dim=dim)
    meta = {"llama.rope.freq_base": theta}
    extra = {"rope_freqs.weight": divisors}
    path = ggufs.write(tmp_path / "m.gguf", "llama", model, meta=meta, extra=extra)
    rope = from_hf_config(gguf_config(GgufFile.open(path))).ropes[0]
    assert (rope.kind, rope.factor, rope.original_length) == ("llama3", 32.0, 8192)
    odd = ggufs.write(tmp_path / "o.gguf", "llama", model, meta=meta, extra={"rope_freqs.weight": divisors * 1.5})
    with pytest.raises(KvxError, match="rope_freqs"):
        gguf_config(GgufFile.open(odd))


@pytest.mark.parametrize(
    ("meta", "want"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        ({"scale_linear": 8.0}, {"kind": "linear", "factor": 8.0}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64},
            {"kind": "yarn", "factor": 4.0, "original_length": 64, "attention_factor": 0.1 * np.log(4.0) + 1},
        ),
        ({"dimension_count": 8}, {"kind": "default", "dim": 8}),
    ],
)
def test_rope_extensions(meta: dict[str, Any], want: dict[str, Any], tmp_path: Path) -> None:
    named = {f"llama.rope.{key}": value for key, value in meta.items()}
    path = ggufs.write(tmp_path / "m.gguf", "llama", ggufs.tiny("llama"), meta=named)
    rope = from_hf_config(gguf_config(GgufFile.open(path))).ropes[0]
    assert rope.theta == 50000.0
    for name, value in want.items():
        assert getattr(rope, name) == pytest.approx(value), name


def test_gemma_has_two_bases_and_a_pattern(tmp_path: Path) -> None:
    """Cases 19 and 20: local layers keep their own base; scaling touches only the global ones."""
    meta = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    path = ggufs.write(tmp_path / "m.gguf", "gemma3", ggufs.tiny("gemma3"), meta=meta)
    config = from_hf_config(gguf_config(GgufFile.open(path)))
    local, wide = config.ropes
    assert (local.theta, local.factor, wide.theta, wide.factor) == (10000.0, 1.0, 50000.0, 8.0)
    assert config.windows == (8, None)
    assert config.norm_eps == 1e-6


def test_mistral_files_say_llama(cache: Path, tmp_path: Path) -> None:
    path = ggufs.write(tmp_path / "m.gguf", "llama", ggufs.tiny("llama"), meta={"llama.attention.sliding_window": 16})
    config = load_model(path).config
    assert (config.family, config.windows) == ("mistral", (16, 16))
