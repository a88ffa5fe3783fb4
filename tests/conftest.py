"""Settings of the whole test session, doctests included: run-time type checks and strict JAX promotion rules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Before the first import of kvx: functions are wrapped by the type checker when their module is imported.
os.environ["KVX_TYPECHECK"] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

ROOT = Path(__file__).resolve().parent.parent
MAPS = 30_000  # of at most 65,530 that Linux gives a process by default; every compiled program takes some


class _Programs:
    """Forgets compiled programs between files before the process runs out of memory maps, which aborts it."""

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        held = Path("/proc/self/maps")
        if (nextitem is not None and nextitem.path == item.path) or not held.exists():
            return
        with held.open("rb") as lines:
            count = sum(1 for _ in lines)
        if count > MAPS:
            jax.clear_caches()


def pytest_configure(config: pytest.Config) -> None:
    """Registered as a plugin of its own, the hook also runs after doctests, which stand outside this folder."""
    config.pluginmanager.register(_Programs(), "kvx-programs")


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Compile quickly rather than well: for tests that run many programs once."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run_python(code, devices=1, **env)``: run code in a new interpreter, with that many fake CPU devices."""

    def run(code: str, *, devices: int = 1, timeout: float = 300.0, **env: str) -> subprocess.CompletedProcess[str]:
        flags = f"--xla_force_host_platform_device_count={devices}"
        full = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), **env}
        return subprocess.run(
            [sys.executable, "-c", code],
            env=full,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
