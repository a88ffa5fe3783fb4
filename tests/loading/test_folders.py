"""Hugging Face folders, hub ids, adapters, in-memory models: what loads, where it lands, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvx.errors import KvxError
from kvx.models.load import load_model
from tests.loading import ggufs


def same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("arch", ggufs.CONFIGS)
@pytest.mark.parametrize("shards", [1, 3])
def test_folder_equals_transformers(arch: str, shards: int, cache: Path, tmp_path: Path) -> None:
    """Single and sharded files give the weights that transformers reads from the same folder."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = ggufs.write_folder(tmp_path / "m", ggufs.tiny(arch), shards=shards)
    model = load_model(folder)
    oracle = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    same(load_model(oracle).params, model.params)
    assert model.config == load_model(oracle).config


def test_gguf_and_folder_agree(cache: Path, tmp_path: Path) -> None:
    for arch in ("llama", "qwen2", "qwen3"):
        model = ggufs.tiny(arch)
        folder = load_model(ggufs.write_folder(tmp_path / arch, model))
        file = load_model(ggufs.write(tmp_path / f"{arch}.gguf", arch, model))
        same(folder.params, file.params)
        assert folder.config == file.config


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_dtype(name: str, cache: Path, tmp_path: Path) -> None:
    folder = ggufs.write_folder(tmp_path / "m", ggufs.tiny("llama"), dtype=ml_dtypes.bfloat16)
    model = load_model(folder, dtype=name)
    assert {x.dtype.name for x in jax.tree.leaves(model.params)} == {name}
    exact = load_model(folder).params["embed"]  # bfloat16 in the file
    assert float(jnp.abs(model.params["embed"].astype(jnp.float32) - exact).max()) <= (1e-3 if name == "float16" else 0)


def test_stacked_and_unrolled_hold_the_same(cache: Path, tmp_path: Path) -> None:
    folder = ggufs.write_folder(tmp_path / "m", ggufs.tiny("qwen2"))
    unrolled, stacked = load_model(folder), load_model(folder, stacked=True)
    assert (unrolled.stacked, stacked.stacked) == (False, True)
    same(unrolled.stack().params, stacked.params)
    assert unrolled.provenance == stacked.provenance


def test_host_memory_is_not_shared_with_later_loads(cache: Path, tmp_path: Path) -> None:
    """CPU arrays may stand on the buffers that were read; nobody else writes to those."""
    folder = ggufs.write_folder(tmp_path / "m", ggufs.tiny("llama", seed=0))
    first = load_model(folder)
    before = np.array(first.params["layers"][0]["wq"])
    load_model(ggufs.write_folder(tmp_path / "n", ggufs.tiny("llama", seed=1)))
    np.testing.assert_array_equal(first.params["layers"][0]["wq"], before)


def test_unused_and_missing_tensors_are_one_error(cache: Path, tmp_path: Path) -> None:
    """Case 21, and case 29: fewer layers in the file than in the configuration."""
    model = ggufs.tiny("llama")
    lost = {n: a for n, a in model.weights.items() if n.startswith("layers.1.")}
    for name in lost:
        del model.weights[name]
    folder = ggufs.write_folder(tmp_path / "m", model, **{"model.layers.0.extra.weight": np.ones(2, np.float32)})
    with pytest.raises(KvxError) as caught:
        load_model(folder)
    for name in (*lost, "layers.0.extra.weight"):
        assert name in str(caught.value)


def test_wrong_shapes_are_one_error(cache: Path, tmp_path: Path) -> None:
    model = ggufs.tiny("llama")
    for i in range(2):
        model.weights[f"layers.{i}.mlp.up_proj.weight"] = np.ones((95, 64), np.float32)
    with pytest.raises(KvxError, match=r"layers\.0\.mlp\.up_proj.*layers\.1\.mlp\.up_proj"):
        load_model(ggufs.write_folder(tmp_path / "m", model))


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint8])
def test_integers_are_refused(dtype: Any, cache: Path, tmp_path: Path) -> None:
    """Case 29: 16777217 would become 16777216 in float32 without a word."""
    model = ggufs.tiny("llama")
    model.weights["norm.weight"] = np.full(64, 77, dtype)
    from safetensors.numpy import save_file

    folder = ggufs.write_folder(tmp_path / "m", model)
    save_file({f"model.{n}": a for n, a in model.weights.items()}, folder / "model.safetensors")
    with pytest.raises(KvxError, match=r"'model.norm.weight' is stored as [IU]\d+; expected one of F32, F16, BF16"):
        load_model(folder)


class TestTied:
    """Case 23."""

    def test_no_head_when_tied(self, cache: Path, tmp_path: Path) -> None:
        model = load_model(ggufs.write_folder(tmp_path / "m", ggufs.tiny("llama")))
        assert model.config.tied and "head" not in model.params

    def test_untied_flag_without_the_tensor(self, cache: Path, tmp_path: Path) -> None:
        folder = ggufs.write_folder(tmp_path / "m", ggufs.tiny("llama"))
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": False}))
        with pytest.warns(UserWarning, match="no lm_head"):
            assert load_model(folder).config.tied

    def test_redundant_tensor(self, cache: Path, tmp_path: Path) -> None:
        model = ggufs.tiny("llama")
        copy = {"lm_head.weight": model.weights["embed_tokens.weight"].copy()}
        assert "head" not in load_model(ggufs.write_folder(tmp_path / "m", model, **copy)).params

    def test_tied_flag_with_another_tensor(self, cache: Path, tmp_path: Path) -> None:
        other = {"lm_head.weight": np.ones((64, 64), np.float32)}
        with pytest.warns(UserWarning, match="not tied"):
            model = load_model(ggufs.write_folder(tmp_path / "m", ggufs.tiny("llama"), **other))
        np.testing.assert_array_equal(model.params["head"], other["lm_head.weight"])


def test_same_name_other_weights(cache: Path, tmp_path: Path) -> None:
    """Case 17: identity is the weights', whatever the folder is called or the files inside are."""
    one = load_model(ggufs.write_folder(tmp_path / "a" / "m", ggufs.tiny("llama", seed=0)))
    copy = load_model(ggufs.write_folder(tmp_path / "b" / "m", ggufs.tiny("llama", seed=0)))
    other = load_model(ggufs.write_folder(tmp_path / "c" / "m", ggufs.tiny("llama", seed=1)))
    assert one.provenance and copy.provenance and other.provenance
    assert one.provenance.same_model(copy.provenance)
    assert not one.provenance.same_model(other.provenance)


SHARDED = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from kvx.models.load import load_model
from kvx.models.prefill import prefill
mesh = jax.make_mesh((2, 4), ("data", "model"))
plain = load_model(FOLDER, stacked=STACKED)
split = load_model(FOLDER, mesh=mesh, stacked=STACKED)
jax.tree.map(np.testing.assert_array_equal, plain.params, split.params)
layer = split.params["layers"] if STACKED else split.params["layers"][0]
lead = (None,) if STACKED else ()
assert layer["wq"].sharding.spec == P(*lead, "model", None, None), layer["wq"].sharding
assert layer["wk"].sharding.spec == P(*lead, None, None, None), layer["wk"].sharding  # 2 heads, 4 devices
assert layer["down"].sharding.spec == P(*lead, None, "model")
assert split.params["embed"].addressable_shards[0].data.shape == (16, 64)
tokens = np.arange(10, dtype=np.int32)[None]
caches = [prefill(model, tokens) for model in (plain, split)]
np.testing.assert_allclose(caches[0].groups[0].v, caches[1].groups[0].v, atol=2e-5)
one = NamedSharding(mesh, P())
assert load_model(FOLDER, sharding=one).params["embed"].sharding == one
rule = lambda path, shape: NamedSharding(mesh, P("model") if shape[0] % 4 == 0 and path[-1] == "embed" else P())
assert load_model(FOLDER, sharding=rule).params["embed"].sharding.spec == P("model")
print("ok")
"""


@pytest.mark.parametrize("stacked", [False, True])
def test_weights_land_in_their_sharding(stacked: bool, cache: Path, tmp_path: Path, run_python: Callable) -> None:
    folder = ggufs.write_folder(tmp_path / "m", ggufs.tiny("llama"))
    code = SHARDED.replace("FOLDER", repr(str(folder))).replace("STACKED", str(stacked))
    done = run_python(code, devices=8, KVX_CACHE=str(cache))
    assert done.stdout.strip() == "ok", done.stderr


def test_refusals(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(ggufs.CONFIGS["llama"]))
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "x.bin").write_bytes(b"x")
    folder = ggufs.write_folder(tmp_path / "m", ggufs.tiny("llama"), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    for name, word in (
        (tmp_path / "empty", "no config.json"),
        (tmp_path / "old", "does not unpickle"),
        (tmp_path / "x.bin", "not a .gguf"),
        (folder, "lacks shards: model-00002-of-00002"),
        ("no such thing", "neither a folder"),
        ("demo:gpt9", "no demo model 'gpt9'; expected one of smollm2, gemma3"),
    ):
        with pytest.raises(KvxError, match=word):
            load_model(name)
    with pytest.raises(KvxError, match="float64"):
        load_model(tmp_path, dtype=np.float64)


def test_damaged_shard(cache: Path, tmp_path: Path) -> None:
    folder = ggufs.write_folder(tmp_path / "m", ggufs.tiny("llama"))
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(KvxError, match="damaged or cut short"):
        load_model(folder)


def test_hub_without_network(cache: Path, tmp_path: Path, run_python: Callable) -> None:
    code = (
        "from kvx.models.load import load_model\nfrom kvx.errors import KvxError\n"
        "try:\n    load_model('someone/some-model')\nexcept KvxError as e:\n    print(e)\n"
    )
    done = run_python(code, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"), KVX_CACHE=str(cache))
    assert "could not fetch someone/some-model from the hub" in done.stdout, done.stderr
    assert "pass a local Hugging Face folder or a .gguf file" in done.stdout


def test_hub_downloads_only_what_is_needed(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ggufs.write_folder(tmp_path / "m", ggufs.tiny("llama"))
    asked: dict[str, Any] = {}

    def fake(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fake)
    model = load_model("owner/some-model", revision="v1")
    assert model.provenance and model.provenance.model == "owner/some-model"
    assert asked["revision"] == "v1" and not any(p.endswith((".bin", ".gguf")) for p in asked["allow_patterns"])


def test_hub_gguf_file(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ggufs.write(tmp_path / "m.gguf", "llama", ggufs.tiny("llama"))
    asked: list[Any] = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *a, **k: asked.append((a, k)) or str(path))
    assert load_model("owner/some-GGUF/sub/m.gguf").config.num_layers == 2
    assert asked == [(("owner/some-GGUF", "sub/m.gguf"), {"revision": None})]


class TestAdapter:
    def write(self, folder: Path, **changes: Any) -> Path:
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", **changes}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        rng = np.random.default_rng(5)
        self.a, self.b = rng.standard_normal((2, 64), np.float32), rng.standard_normal((32, 2), np.float32)
        base = "base_model.model.model.layers.1.self_attn.k_proj"
        save_file(
            {f"{base}.lora_A.weight": self.a, f"{base}.lora_B.weight": self.b}, folder / "adapter_model.safetensors"
        )
        return folder

    def test_merged(self, cache: Path, tmp_path: Path) -> None:
        base = ggufs.write_folder(tmp_path / "m", ggufs.tiny("llama"))
        plain, tuned = load_model(base), load_model(base, adapter=self.write(tmp_path / "lora"))
        change = np.asarray(tuned.params["layers"][1]["wk"] - plain.params["layers"][1]["wk"]).reshape(32, 64)
        np.testing.assert_allclose(change, 3.0 * self.b @ self.a, atol=1e-5)
        np.testing.assert_array_equal(tuned.params["layers"][0]["wk"], plain.params["layers"][0]["wk"])
        assert plain.provenance and tuned.provenance and not plain.provenance.same_model(tuned.provenance)

    def test_rank_stabilised_and_patterns(self, cache: Path, tmp_path: Path) -> None:
        base = ggufs.write_folder(tmp_path / "m", ggufs.tiny("llama"))
        plain = load_model(base)
        for options, scale in (({"use_rslora": True}, 6 / np.sqrt(2)), ({"alpha_pattern": {"k_proj": 4}}, 2.0)):
            tuned = load_model(base, adapter=self.write(tmp_path / "lora", **options))
            change = np.asarray(tuned.params["layers"][1]["wk"] - plain.params["layers"][1]["wk"]).reshape(32, 64)
            np.testing.assert_allclose(change, scale * self.b @ self.a, atol=1e-5)

    def test_an_adapter_folder_finds_its_base(self, cache: Path, tmp_path: Path) -> None:
        base = ggufs.write_folder(tmp_path / "m", ggufs.tiny("llama"))
        folder = self.write(tmp_path / "lora", base_model_name_or_path=str(base))
        same(load_model(folder).params, load_model(base, adapter=folder).params)

    def test_refusals(self, cache: Path, tmp_path: Path) -> None:
        base = ggufs.write_folder(tmp_path / "m", ggufs.tiny("llama"))
        with pytest.raises(KvxError, match="use_dora"):
            load_model(base, adapter=self.write(tmp_path / "dora", use_dora=True))
        with pytest.raises(KvxError, match="IA3"):
            load_model(base, adapter=self.write(tmp_path / "ia3", peft_type="IA3"))
        with pytest.raises(KvxError, match="not an adapter"):
            load_model(base, adapter=tmp_path)
        other = ggufs.write_folder(tmp_path / "n", ggufs.tiny("llama", num_hidden_layers=1))
        with pytest.raises(KvxError, match=r"does not have: layers\.1\.self_attn\.k_proj"):
            load_model(other, adapter=self.write(tmp_path / "lora"))


MEMORY = """
import os, resource, sys
import jax, jax.numpy as jnp
from kvx.models.load import load_model
jax.block_until_ready(jnp.ones(8) + 1)
def peak():
    if not os.path.exists("/proc/self/status"):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
before = peak()
model = load_model(sys.argv[1], stacked=sys.argv[2] == "True")
jax.block_until_ready(model.params)
weights = sum(x.nbytes for x in jax.tree.leaves(model.params))
print(weights, (peak() - before) / weights)
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model of 350 MB in float32."""
    sizes = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "head_dim": 64}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 6000}
    folder = tmp_path_factory.mktemp("big")
    yield ggufs.write_folder(folder, ggufs.tiny("llama", **sizes, **heads), shards=2)
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize("stacked", [False, True])
def test_peak_memory(stacked: bool, big: Path, tmp_path: Path) -> None:
    """Loading takes at most 1.3x the weights, measured as resident memory of a fresh process."""
    env = {**os.environ, "KVX_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu", "KVX_TYPECHECK": "0"}
    command = [sys.executable, "-c", MEMORY, str(big), str(stacked)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    weights, ratio = done.stdout.split()
    assert int(weights) > 300e6
    assert float(ratio) <= 1.3, ratio
