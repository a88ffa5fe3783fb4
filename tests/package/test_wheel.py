"""The wheel: what it holds, what it asks for, and that it leaves an installed JAX alone."""

from __future__ import annotations

import email
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COLAB = Path(__file__).with_name("colab_constraints.txt")
ACCELERATORS = re.compile(r"^(torch|nvidia|libtpu|jax[-_](cuda|rocm)|triton|flax|transformers)", re.IGNORECASE)


def pip(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", *args], capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    result = pip("wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(ROOT))
    assert result.returncode == 0, result.stderr
    return next(folder.glob("kvx-*.whl"))


@pytest.fixture(scope="session")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def would_install(wheel: Path, tmp_path: Path, *args: str) -> dict[str, str]:
    """Packages and versions that pip would install for the wheel."""
    report = tmp_path / "report.json"
    result = pip("install", "--dry-run", "--quiet", "--report", str(report), *args, str(wheel))
    assert result.returncode == 0, result.stderr
    found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {row["name"].lower().replace("_", "-"): row["version"] for row in found}


def pins() -> Iterator[tuple[str, str]]:
    for line in COLAB.read_text().splitlines():
        if "==" in line:
            name, version = line.split("==")
            yield name, version


def test_both_packages_with_their_types_and_data(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    files = [
        p
        for d in ("kvx", "pallas_kernels")
        for p in (ROOT / d).rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    ]
    wanted = {p.relative_to(ROOT).as_posix() for p in files}
    assert {"kvx/py.typed", "pallas_kernels/py.typed"} <= wanted
    assert wanted - held == set()
    assert {n.split("/")[0] for n in held if ".dist-info" not in n} == {"kvx", "pallas_kernels"}


def test_the_console_script(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert "kvx = kvx.cli:main" in archive.read(name).decode()


def test_a_base_install_asks_for_no_accelerator_and_no_torch(metadata: email.message.Message) -> None:
    base = [row for row in metadata.get_all("Requires-Dist", []) if "extra ==" not in row]
    assert any(row.startswith("jax>=") for row in base)
    assert not [row for row in base if ACCELERATORS.match(row) or "[" in row.split(";")[0]]
    assert not [row for row in base if "==" in row or "<" in row], "floors only: a cap would replace what is installed"


def test_the_extras(metadata: email.message.Message) -> None:
    assert set(metadata.get_all("Provides-Extra", [])) == {"test", "tpu", "cuda13", "plot", "docs", "dev"}
    rows = metadata.get_all("Requires-Dist", [])
    assert any(row.startswith("jax[cuda13]") and "cuda13" in row.split(";")[1] for row in rows)
    assert any(row.startswith("jax[tpu]") for row in rows)


def test_a_hosted_notebook_keeps_its_jax(wheel: Path, tmp_path: Path) -> None:
    """CASES 34: resolved from nothing under a notebook's pins, every pinned package has its pinned version."""
    found = would_install(wheel, tmp_path, "--ignore-installed", "--constraint", str(COLAB))
    assert {name: found[name] for name, version in pins() if name in found and found[name] != version} == {}
    assert found["jax"] == "0.7.2" and found["numpy"] == "2.0.2"
    assert not [name for name in found if ACCELERATORS.match(name)]


def test_an_installed_jax_is_not_touched(wheel: Path, tmp_path: Path) -> None:
    found = would_install(wheel, tmp_path)
    assert not [
        name for name in found if name.startswith(("jax", "numpy", "ml-dtypes", "orbax")) and name != "jaxtyping"
    ]


def test_a_jax_below_the_floor_is_refused(wheel: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.txt"
    old.write_text("jax==0.7.1\n")
    result = pip("install", "--dry-run", "--quiet", "--ignore-installed", "--constraint", str(old), str(wheel))
    assert result.returncode != 0 and "jax" in result.stderr
