"""Laws of every op in ``tests/cases.py``; what is particular to one stands in ``tests/kernels``."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from tests.cases import KERNELS, KernelCase

CLOSE = {"rtol": 2e-5, "atol": 2e-5}


pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def arrays(name: str) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    return KERNELS[name].arrays()


@pytest.fixture(params=KERNELS, ids=str)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def case(name: str) -> KernelCase:
    return KERNELS[name]


def close(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(x, y, **CLOSE)


def test_the_kernel_is_its_reference_and_so_is_the_default_here(name: str, case: KernelCase) -> None:
    floats, rest, _ = arrays(name)
    wanted = case.run(*floats, *rest, implementation="xla")
    assert all(np.isfinite(x).all() and np.abs(x).max() > 0.1 for x in jax.tree.leaves(wanted))
    close(case.run(*floats, *rest, implementation="interpret"), wanted)
    close(case.run(*floats, *rest), wanted)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_what_may_not_be_read_may_hold_nan(name: str, case: KernelCase, implementation: str) -> None:
    floats, rest, poisoned = arrays(name)
    assert any(np.isnan(x).any() for x in poisoned)
    run = functools.partial(case.run, implementation=implementation)
    close(run(*poisoned, *rest), run(*floats, *rest))


def test_gradients_are_those_of_the_reference(name: str, case: KernelCase) -> None:
    floats, rest, _ = arrays(name)

    def loss(floats: tuple[Any, ...], implementation: str) -> jax.Array:
        found = case.run(*floats, *rest, implementation=implementation)
        parts = [(jnp.cos(jnp.arange(x.size, dtype=x.dtype)) * x.ravel()).sum() for x in jax.tree.leaves(found)]
        return sum(parts[1:], parts[0])

    wanted, got = (jax.grad(loss)(floats, kind) for kind in ("xla", "interpret"))
    for a, b in zip(got, wanted, strict=True):
        scale = float(jnp.abs(b).max())
        assert np.isfinite(scale)
        np.testing.assert_allclose(a, b, atol=1e-5 * max(scale, 1.0))
    assert sum(float(jnp.abs(b).max()) > 0 for b in wanted) >= 4


def test_vmap_is_one_after_the_other(name: str, case: KernelCase) -> None:
    floats, rest, _ = arrays(name)
    stacked = [jnp.stack([x, 0.5 * x]) for x in floats[:2]]
    found = jax.vmap(lambda a, b: case.run(a, b, *floats[2:], *rest))(*stacked)
    for i in range(2):
        close(jax.tree.map(lambda x, i=i: x[i], found), case.run(*(x[i] for x in stacked), *floats[2:], *rest))


def test_a_second_call_does_not_trace_again(name: str, case: KernelCase) -> None:
    floats, rest, _ = arrays(name)
    traces = []

    @jax.jit
    def run(*args: jax.Array) -> Any:
        traces.append(1)
        return case.run(*args)

    first = run(*floats, *rest)
    close(run(*floats, *rest), first)
    assert len(traces) == 1


def test_it_can_be_exported(name: str, case: KernelCase) -> None:
    floats, rest, _ = arrays(name)
    run = jax.jit(lambda *args: jax.tree.leaves(case.run(*args, implementation="xla")))
    again = export.deserialize(export.export(run)(*floats, *rest).serialize())
    for a, b in zip(again.call(*floats, *rest), run(*floats, *rest), strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)


def test_an_unknown_implementation_is_named(name: str, case: KernelCase) -> None:
    floats, rest, _ = arrays(name)
    with pytest.raises(ValueError, match="has no implementation 'triton'; choose one of xla, tpu, gpu, interpret"):
        case.run(*floats, *rest, implementation="triton")
