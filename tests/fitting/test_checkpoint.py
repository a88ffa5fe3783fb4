"""Artefacts: what is saved comes back, on any number of devices; whatever is not as it was saved is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvx
from kvx.cache.geometry import LayerGeometry
from kvx.cache.provenance import Provenance
from kvx.errors import KvxError
from kvx.fitting import checkpoint
from kvx.fitting.codec import decode, encode
from kvx.fitting.synthetic import toy_pairs
from kvx.mappers import full_head


@pytest.fixture(scope="module")
def mapper():
    return kvx.fit(full_head(layers=2, ridge=1e-3), toy_pairs(reads=2), progress=False)[0]


@pytest.fixture(scope="module")
def master(mapper, tmp_path_factory) -> Path:
    return kvx.save(tmp_path_factory.mktemp("maps") / "toy", mapper)


@pytest.fixture
def saved(master: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(master, tmp_path / "toy"))


def edit(folder: Path, change) -> None:
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))


def same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_round_trip(mapper, master: Path) -> None:
    loaded = kvx.load(master)
    same(loaded, mapper)
    assert loaded.method == mapper.method
    assert loaded.provenance == mapper.provenance
    assert loaded.params.report == mapper.params.report
    batch = next(iter(toy_pairs()))
    got, wanted = (kvx.translate(m, batch.source, batch.alignment) for m in (loaded, mapper))
    same(got, wanted)
    manifest = json.loads((master / "manifest.json").read_text())
    assert manifest["kvx"] == kvx.__version__
    assert set(manifest["files"]) == {
        str(f.relative_to(master / "arrays")) for f in (master / "arrays").rglob("*") if f.is_file()
    }


def test_loaded_maps_share_the_compiled_code(mapper, master: Path) -> None:
    from kvx import pipeline

    batch = next(iter(toy_pairs()))
    kvx.translate(mapper, batch.source, batch.alignment)
    before = pipeline._translate._cache_size()
    kvx.translate(kvx.load(master), batch.source, batch.alignment)
    assert pipeline._translate._cache_size() == before


def test_a_folder_is_not_overwritten_by_accident(mapper, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(KvxError, match="exists already"):
        kvx.save(saved, mapper)
    kvx.save(saved, mapper, overwrite=True)
    same(kvx.load(saved), mapper)
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(KvxError, match="no saved map"):
        kvx.save(other, mapper, overwrite=True)
    assert (other / "thesis.txt").exists()


def test_an_interrupted_save_leaves_nothing(mapper, saved: Path, tmp_path: Path, monkeypatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "digest_files", fail)
    with pytest.raises(KvxError, match="disk full"):
        kvx.save(tmp_path / "new", mapper)
    with pytest.raises(KvxError, match="disk full"):
        kvx.save(saved, mapper, overwrite=True)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]
    same(kvx.load(saved), mapper)


def test_missing_changed_and_added_files_are_refused(saved: Path) -> None:
    files = sorted(f for f in (saved / "arrays").rglob("*") if f.is_file())
    biggest = max(files, key=lambda f: f.stat().st_size)
    data = bytearray(biggest.read_bytes())
    data[len(data) // 2] ^= 1
    biggest.write_bytes(bytes(data))
    with pytest.raises(KvxError, match="was changed after it was saved"):
        kvx.load(saved)
    biggest.unlink()
    with pytest.raises(KvxError, match="files missing"):
        kvx.load(saved)
    data[len(data) // 2] ^= 1
    biggest.write_bytes(bytes(data))
    (saved / "arrays" / "extra").write_text("?")
    with pytest.raises(KvxError, match="files not part of it: extra"):
        kvx.load(saved)
    (saved / "arrays" / "extra").unlink()
    kvx.load(saved)


def test_case_29_no_partial_load_and_no_cast(saved: Path) -> None:
    """More or fewer arrays, another shape or dtype in the manifest than in the files: an error, never a cast."""
    name = "params.keys.0.gather"

    def ask(manifest) -> None:
        manifest["arrays"]["params.keys.1.gather"] = manifest["arrays"][name]

    def drop(manifest) -> None:
        del manifest["arrays"][name]

    def cast(manifest) -> None:
        manifest["arrays"][name]["dtype"] = "float32"

    def cut(manifest) -> None:
        manifest["arrays"]["params.keys.0.mean"]["shape"][0] = 1

    original = (saved / "manifest.json").read_text()
    for change in (ask, drop, cast, cut):
        edit(saved, change)
        with pytest.raises(KvxError, match="in the files and"):
            kvx.load(saved)
        (saved / "manifest.json").write_text(original)


def test_integers_beyond_fp32_survive(mapper, tmp_path: Path) -> None:
    """int32 16777217 through an fp32 template would become 16777216."""
    big = jnp.array([16777217, -1], jnp.int32)
    odd = kvx.mappers.CacheMap({"big": big, "half": jnp.ones(3, jnp.bfloat16)}, None, mapper.method)
    loaded = kvx.load(kvx.save(tmp_path / "odd", odd))
    assert loaded.params["big"].tolist() == [16777217, -1]
    assert loaded.params["half"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.update(format=2), "has format 2"),
        (lambda m: m.update(kvx="99.0.0"), "newer than this"),
        (lambda m: m.update(kvx="latest"), "not a version"),
        (lambda m: m.pop("files"), "lacks files"),
        (lambda m: m.update(digest="0" * 64), "not those of the map"),
        (lambda m: m["map"].update({"class": "os:system"}), "only kvx's own"),
        (lambda m: m["map"].update({"class": "kvx.mappers.base:Nothing"}), "has no kvx.mappers.base:Nothing"),
        (lambda m: m["map"].update({"class": "kvx.mappers.base:check_models"}), "no kvx dataclass"),
        (lambda m: m["map"]["fields"].pop("rule"), "differs from this kvx's in rule"),
        (lambda m: m["map"]["fields"].update(rule={"odd": 1}), "does not understand"),
        (lambda m: m["map"]["fields"].update(prefix=None), "belong to nothing"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_manifest_that_does_not_fit_is_refused(saved: Path, change, match: str) -> None:
    edit(saved, change)
    with pytest.raises(KvxError, match=match):
        kvx.load(saved)


def test_no_map_at_all(tmp_path: Path) -> None:
    with pytest.raises(KvxError, match="is no saved map"):
        kvx.load(tmp_path / "nothing")
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(KvxError, match="not valid JSON"):
        kvx.load(tmp_path)


def test_what_cannot_be_described_is_not_saved() -> None:
    for value in (object(), {"f": print}, np.float32):
        with pytest.raises(KvxError, match="cannot be saved"):
            encode(value)


def test_values_survive_the_codec() -> None:
    value = {
        "a": (1, 2.5, None, True, "x"),
        "b": [LayerGeometry(1, 2, 3, window=4), Provenance("m", "ab")],
        "c": {"array": np.arange(3)},
    }
    spec, arrays = encode(value)
    back = decode(json.loads(json.dumps(spec)), arrays)
    assert back["a"] == value["a"]
    assert back["b"] == value["b"]
    assert back["c"]["array"] is value["c"]["array"]


def test_case_28_other_device_count(mapper, tmp_path: Path, run_python) -> None:
    """Saved sharded over 8 devices, loaded on 2 with nothing but the path, then sharded over those."""
    folder = tmp_path / "sharded"
    save = f"""
import jax, jax.numpy as jnp, kvx
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.make_mesh((8,), ("x",))
big = jax.device_put(jnp.arange(64.0).reshape(16, 4), NamedSharding(mesh, PartitionSpec("x")))
kvx.save({str(folder)!r}, kvx.mappers.CacheMap({{"big": big}}, None, kvx.mappers.full_head()))
"""
    load = f"""
import jax, kvx
from jax.sharding import NamedSharding, PartitionSpec
plain = kvx.load({str(folder)!r}).params["big"]
mesh = jax.make_mesh((2,), ("x",))
split = kvx.load({str(folder)!r}, sharding=NamedSharding(mesh, PartitionSpec())).params["big"]
print(len(jax.devices()), plain.sum(), len(plain.sharding.device_set), len(split.sharding.device_set))
"""
    done = run_python(save, devices=8)
    assert done.returncode == 0, done.stderr
    done = run_python(load, devices=2)
    assert done.stdout.split() == ["2", "2016.0", "1", "2"], done.stderr


def test_case_33_maps_are_pytrees_with_hashable_structure(mapper) -> None:
    """A map goes through jit twice: no array hides in a static field."""

    @jax.jit
    def total(m) -> jax.Array:  # type: ignore[no-untyped-def]
        return m.params.keys[0].coefficients.sum()

    assert total(mapper) == total(mapper)
    hash(jax.tree.structure(mapper))
    leaves, structure = jax.tree.flatten(mapper)
    same(jax.tree.unflatten(structure, leaves), mapper)
