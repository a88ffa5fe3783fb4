"""The device check tells a wrong kernel from a right one, and what it cannot take from what fails."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import pytest

RATES = {"flops_per_s": 1e9, "bytes_per_s": 1e9}


@pytest.fixture(scope="module")
def check() -> Iterator[ModuleType]:
    path = Path(__file__).resolve().parents[2] / "scripts" / "device_check.py"
    spec = importlib.util.spec_from_file_location("device_check", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.REPEATS = 1
    yield module
    del sys.modules[spec.name]


def task(check: ModuleType, run):
    return check.Task("double", run, (jnp.arange(4.0),), 8.0, 32.0, 1e-6)


def test_right_wrong_and_not_taken(check: ModuleType):
    def double(x, *, implementation):
        if implementation == "shy":
            raise NotImplementedError("needs bfloat16")
        return x * 2 + (1 if implementation == "wrong" else 0)

    right = check.checked(task(check, double), "right", RATES)
    assert not right["failed"] and right["difference"] == 0.0 and right["of_roof"] > 0
    wrong = check.checked(task(check, double), "wrong", RATES)
    assert wrong["failed"] and wrong["difference"] == pytest.approx(1 / 6)
    shy = check.checked(task(check, double), "shy", RATES)
    assert not shy["failed"] and shy["not_taken"] == "needs bfloat16"
    assert all(row["name"] in check.line(row) for row in (right, wrong, shy))


def test_nan_is_a_failure(check: ModuleType):
    broken = task(check, lambda x, *, implementation: jnp.where(implementation == "xla", x, jnp.nan))
    assert check.checked(broken, "gpu", RATES)["failed"]


def test_every_op_agrees_with_itself_in_small(check: ModuleType):
    ours = [task for task in check.tasks(True) if "float32 D=64" in task.name]
    assert [task.name.split()[0] for task in ours] == ["moments", "sensitivity", "apply"]
    for one in ours:
        row = check.checked(one, None, RATES)
        assert not row["failed"] and row["difference"] == 0.0, row
