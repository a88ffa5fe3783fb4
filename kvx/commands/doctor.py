"""``kvx doctor``: what this machine has, what is missing, and the next step."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from kvx.commands.common import FAILED, OK, Common, Outcome, Output

PACKAGES = (
    "jax",
    "jaxlib",
    "numpy",
    "orbax-checkpoint",
    "tokenizers",
    "safetensors",
    "gguf",
    "huggingface-hub",
    "tyro",
)
OPTIONAL = ("torch", "transformers")  # oracles of the tests and of `kvx bench`; kvx runs without them
DEMO_DISK_GB = 3.0  # wheels 0.33, converted fp32 models 1.7, fits and compiled programs below 1
DEMO_MEMORY_GB = 6.0


@dataclasses.dataclass(frozen=True)
class Doctor(Common):
    """Settings of ``kvx doctor``: only the common ones."""


def run(settings: Doctor, out: Output) -> Outcome:
    """Print versions, devices, memory and disk, and what to do next; code 1 when kvx cannot run here."""
    facts = examine()
    if not out.as_json:
        _print(facts, out)
    return Outcome(facts, FAILED if facts["problems"] else OK)


def examine() -> dict[str, Any]:
    """Facts about this machine as plain values; sizes in GB (1e9 bytes).

    Returns:
        ``versions``, ``devices`` (JAX's), ``unused`` (accelerators present that JAX does not use), ``cpu_cores``,
        ``memory_free_gb``, ``cache`` (folder), ``disk_free_gb``, ``problems`` (kvx cannot run), ``warnings`` (the demo
        may not) and ``next`` (a sentence).
    """
    from kvx.models.disk_cache import cache_dir

    cache = cache_dir()
    devices, trouble = _devices()
    unused = _unused_accelerators(devices)
    facts: dict[str, Any] = {
        "versions": _versions(),
        "devices": devices,
        "unused": unused,
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_free_gb": _memory_free_gb(),
        "cache": str(cache),
        "disk_free_gb": round(shutil.disk_usage(_existing(cache)).free / 1e9, 1),
    }
    facts["problems"] = trouble + _problems(facts, cache)
    facts["warnings"] = _warnings(facts)
    facts["next"] = _next_step(facts)
    return facts


def _versions() -> dict[str, str | None]:
    from kvx import __version__

    found: dict[str, str | None] = {"kvx": __version__, "python": platform.python_version()}
    for name in (*PACKAGES, *OPTIONAL):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _devices() -> tuple[list[str], list[str]]:
    """Names of JAX's devices, and what went wrong if JAX could not start."""
    try:
        import jax

        return [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()], []
    except (ImportError, RuntimeError) as error:
        return [], [f"JAX cannot start: {' '.join(str(error).split())}"]


def _unused_accelerators(devices: list[str]) -> list[str]:
    """Accelerators whose driver is present while JAX runs on the CPU, with the extra that would use them."""
    if any(not name.startswith("cpu") for name in devices):
        return []
    found = []
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists():
        found.append("an NVIDIA GPU (pip install 'kvx[cuda13]')")
    if any(Path("/dev").glob("accel*")) or importlib.util.find_spec("libtpu") or os.environ.get("TPU_NAME"):
        found.append("a TPU (pip install 'kvx[tpu]')")
    return found


def _memory_free_gb() -> float | None:
    """Memory that a new process can have, in GB; ``None`` where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    free = int(rows["MemAvailable"].split()[0]) * 1024 / 1e9 if "MemAvailable" in rows else None
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free = min(free or 1e9, (int(limit.read_text()) - used) / 1e9)
    return None if free is None else round(free, 1)


def _existing(path: Path) -> Path:
    """The nearest parent that exists, whose disk the folder would be on."""
    while not path.exists():
        path = path.parent
    return path


def _problems(facts: dict[str, Any], cache: Path) -> list[str]:
    problems = [f"{name} is not installed; pip install kvx again" for name in PACKAGES if not facts["versions"][name]]
    if not os.access(_existing(cache), os.W_OK):
        problems.append(f"{cache} cannot be written; set KVX_CACHE to a folder of yours")
    return problems


def _warnings(facts: dict[str, Any]) -> list[str]:
    warnings = []
    if facts["disk_free_gb"] < DEMO_DISK_GB:
        warnings.append(f"{facts['disk_free_gb']} GB of disk are free and the demo needs {DEMO_DISK_GB}; set KVX_CACHE")
    if facts["memory_free_gb"] is not None and facts["memory_free_gb"] < DEMO_MEMORY_GB:
        warnings.append(f"{facts['memory_free_gb']} GB of memory are free and the demo needs {DEMO_MEMORY_GB}")
    return warnings


def _next_step(facts: dict[str, Any]) -> str:
    if trouble := facts["problems"] + facts["warnings"]:
        return f"First: {trouble[0]}."
    if facts["unused"]:
        return f"JAX runs on the CPU, but this machine has {facts['unused'][0]}; or go on with: kvx demo"
    return "All is well; next: kvx demo (the first time it downloads 0.33 GB and takes some minutes)."


def _print(facts: dict[str, Any], out: Output) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, version in facts["versions"].items():
        absent = "absent (only the tests and `kvx bench` use it)" if name in OPTIONAL else "[red]missing[/red]"
        table.add_row(name, version or absent)
    table.add_row("devices", ", ".join(facts["devices"]) or "[red]none[/red]")
    table.add_row("unused", ", ".join(facts["unused"]).replace("[", r"\[") or "nothing")
    table.add_row("cpu cores", str(facts["cpu_cores"]))
    table.add_row("free memory", "unknown" if facts["memory_free_gb"] is None else f"{facts['memory_free_gb']} GB")
    table.add_row("kvx cache", f"{facts['cache']} ({facts['disk_free_gb']} GB free)")
    out.console.print(table)
    for trouble in facts["problems"] + facts["warnings"]:
        out.console.print(f"problem: {trouble}", markup=False, style="yellow")
    out.console.print(facts["next"], markup=False, soft_wrap=True)
