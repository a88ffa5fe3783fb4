"""Moments of gathered blocks: reference against float64, kernel against reference, traffic, lowering, gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.launch import vmem_limit
from pallas_kernels.moments import Sums, backward, check, gpu, moments, reference, tpu, whiten


@pytest.fixture(autouse=True, scope="module")
def compile_in_a_hurry():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def make(u, n, f, h, q, k, dtype=jnp.float32, *, seed=0, poison=True):
    """Random arguments; a fifth of the rows has weight zero in a head, and some in all: those hold NaN."""
    rng = np.random.default_rng(seed)
    weight = rng.uniform(0.1, 2, size=(h, n)) * (rng.uniform(size=(h, n)) > 0.2)
    weight[:, rng.uniform(size=n) < 0.2] = 0
    x, y = rng.normal(size=(u, n, f)) + 3, rng.normal(size=(h, n, q)) - 2
    if poison:
        x[:, (weight == 0).all(axis=0)] = np.nan
        y[weight == 0] = np.nan
    arrays = (x, y, rng.integers(0, u, (h, k)), weight, rng.normal(size=(u, f)) + 3, rng.normal(size=(h, q)) - 2)
    dtypes = (dtype, dtype, jnp.int32, jnp.float32, jnp.float32, jnp.float32)
    return tuple(jnp.asarray(a, t) for a, t in zip(arrays, dtypes, strict=True))


def plain(blocks, y, gather, weight, x_mean, y_mean):
    """The definition in float64, head by head."""
    blocks, y, weight, x_mean, y_mean = (np.asarray(a, np.float64) for a in (blocks, y, weight, x_mean, y_mean))
    heads = []
    for h, own in enumerate(np.asarray(gather)):
        keep = weight[h] > 0
        z = np.concatenate([(blocks[i] - x_mean[i])[keep] for i in own], axis=1)
        w, u = weight[h][keep], (y[h] - y_mean[h])[keep]
        wz = w[:, None] * z
        heads.append((w.sum(), (w**2).sum(), wz.sum(0), w @ u, w @ u**2, wz.T @ z, wz.T @ u))
    return Sums(*(np.stack(part) for part in zip(*heads, strict=True)))


def assert_close(got, wanted, rtol=2e-6):
    for name, a, b in zip(Sums._fields, got, wanted, strict=True):
        scale = max(1.0, float(np.abs(np.asarray(b)).max()))
        np.testing.assert_allclose(a, b, atol=rtol * scale, rtol=rtol, err_msg=name)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 20, 8, 2, 5, 2), jnp.bfloat16), ((5, 33, 96, 3, 7, 5), jnp.float32), ((4, 70, 128, 1, 16, 13), jnp.float32)],
)
def test_the_reference_is_the_definition(shape, dtype) -> None:
    args = make(*shape, dtype)
    found = moments(*args, implementation="xla")
    assert {a.dtype for a in found} == {jnp.dtype(jnp.float32)}
    assert_close(found, plain(*args))
    np.testing.assert_array_equal(found.xx, np.swapaxes(found.xx, 1, 2))


@pytest.mark.parametrize("rows", [1, 9, 16, 20])
def test_the_reference_streams_chunks_of_rows(rows, monkeypatch) -> None:
    monkeypatch.setattr(reference, "ROWS", 8)
    args = make(4, rows, 6, 2, 3, 3, seed=rows)
    assert_close(reference.moments(*args), plain(*args))


def kernel(*args, **sizes):
    """The TPU kernel in the interpreter."""
    return jax.jit(functools.partial(tpu.moments, interpret=True, **sizes))(*args)


SHAPES = [
    (3, 20, 8, 2, 5, 2, {"block": 8}),
    (5, 20, 6, 2, 3, 5, {"block": 8, "unit": 2, "held": 4}),
    (4, 9, 16, 3, 8, 4, {"block": 8, "unit": 1, "held": 5}),
    (3, 130, 80, 2, 16, 3, {}),
    (3, 1, 64, 1, 1, 1, {}),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_is_the_definition(shape) -> None:
    *shape, sizes = shape
    args = make(*shape, jnp.bfloat16 if shape[1] % 2 == 0 else jnp.float32)
    got = kernel(*args, **sizes)
    assert_close(got, plain(*args))
    np.testing.assert_allclose(got.xx, np.swapaxes(got.xx, 1, 2), rtol=1e-5, atol=1e-4)


@settings(max_examples=3, deadline=None)
@given(st.data())
def test_the_kernel_takes_any_shape(data) -> None:
    pick = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    k, unit = pick(1, 5), pick(1, 3)
    units = -(-k // min(k, unit))
    args = make(pick(1, 4), pick(1, 30), pick(1, 9), pick(1, 3), pick(1, 9), k, seed=pick(0, 99))
    sizes = {"block": 8 * pick(1, 3), "unit": min(k, unit), "held": pick(units, units * (units + 1) // 2)}
    assert_close(kernel(*args, **sizes), plain(*args))


def test_an_unaligned_tail_counts_its_own_rows() -> None:
    ones = jnp.ones((1, 20, 8))
    zero = jnp.zeros((1, 8))
    weight = jnp.asarray(np.arange(20) // 8 == np.arange(3)[:, None], jnp.float32)  # a head for each block of rows
    gather, y, y_mean = jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 20, 8)), jnp.zeros((3, 8))
    found = kernel(ones, y, gather, weight, zero, y_mean, block=8)
    for part in (found.xx[:, 0, 0], found.xy[:, 0, 0], found.x[:, 0], found.y[:, 0], found.yy[:, 0], found.weight):
        assert part.tolist() == [8, 8, 4]


def test_the_public_function_runs_the_kernel_by_the_interpreter() -> None:
    args = make(3, 20, 8, 2, 5, 2)
    found = jax.jit(functools.partial(moments, implementation="interpret"))(*args)
    assert_close(found, jax.jit(reference.moments)(*args))


def test_rows_one_head_reads_and_another_does_not() -> None:
    blocks = jnp.array([[[1.0], [jnp.nan]]])
    weight = jnp.array([[1.0, 0.0], [1.0, 1.0]])
    args = (blocks, jnp.ones((2, 2, 1)), jnp.zeros((2, 1), jnp.int32), weight, jnp.zeros((1, 1)), jnp.zeros((2, 1)))
    for found in (moments(*args), moments(*args, jnp.ones((1, 1, 1))), kernel(*args)):
        assert found.xx[0, 0, 0] == 1 and np.isnan(found.xx[1, 0, 0])


def test_nearly_collinear_features_need_whitening() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=(4096, 1))
    x = np.concatenate([base, base + 1e-4 * rng.normal(size=(4096, 1))], axis=1).astype(np.float32)
    y = (x.astype(np.float64) @ np.array([[1.0], [2.0]])).astype(np.float32)
    exact = x.astype(np.float64).T @ x.astype(np.float64) / 4096
    white = np.linalg.inv(np.linalg.cholesky(exact)).T.astype(np.float32)

    def solve(white):
        args = (jnp.asarray(x)[None], jnp.asarray(y)[None], jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 4096)))
        extra = () if white is None else (jnp.asarray(white)[None],)
        found = moments(*args, jnp.zeros((1, 2)), jnp.zeros((1, 1)), *extra)
        w = np.linalg.solve(np.asarray(found.xx[0], np.float64), np.asarray(found.xy[0], np.float64))
        return np.abs((w if white is None else white.astype(np.float64) @ w)[:, 0] - [1, 2]).max()

    assert solve(white) < 2e-3 < 0.05 < solve(None)


def test_whitening_keeps_rows_that_no_head_reads_out() -> None:
    args = make(3, 20, 4, 2, 5, 2)
    white = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, 4)), jnp.float32)
    z = whiten(args[0], args[2], args[3], args[4], white)
    assert jnp.isfinite(z).all()
    own = plain(z, args[1], args[2], args[3], jnp.zeros((3, 4)), args[5])
    assert_close(moments(*args, white), own)


def test_gradients_are_those_of_autodiff(monkeypatch) -> None:
    monkeypatch.setattr(backward, "ROWS", 8)
    args = make(3, 20, 4, 2, 3, 2, poison=False)
    gather, rng = args[2], np.random.default_rng(1)
    white = jnp.asarray(rng.normal(size=(3, 4, 4)), jnp.float32)
    bars = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32), reference.moments(*args))

    def loss(run, blocks, y, weight, x_mean, y_mean, *white):
        found = run(blocks, y, gather, weight, x_mean, y_mean, *white)
        return sum(jnp.vdot(a, b) for a, b in zip(found, bars, strict=True))

    leaves = (args[0], args[1], *args[3:])

    def gradients(run, *extra):
        with_respect_to = tuple(range(5 + len(extra)))
        return jax.jit(jax.grad(functools.partial(loss, run), argnums=with_respect_to))(*leaves, *extra)

    def whitened(blocks, y, gather, weight, x_mean, y_mean, white):
        z = jnp.einsum("unf,ufg->ung", blocks - x_mean[:, None], white, precision="highest")
        return reference.moments(z, y, gather, weight, jnp.zeros_like(x_mean), y_mean)

    for own, oracle, extra in ((moments, reference.moments, ()), (moments, whitened, (white,))):
        for a, b in zip(gradients(own, *extra), gradients(oracle, *extra), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_gradients_of_padding_are_zero() -> None:
    args = make(3, 20, 4, 2, 3, 2, jnp.bfloat16)
    white = jnp.ones((3, 4, 4))

    def loss(blocks, y, weight, white):
        found = moments(blocks, y, args[2], weight, args[4], args[5], white)
        return sum(a.sum() for a in found)

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(args[0], args[1], args[3], white)
    assert found[0].dtype == found[1].dtype == jnp.bfloat16
    assert all(bool(jnp.isfinite(a).all()) for a in found)
    assert not jnp.where(args[3] == 0, found[2], 0).any() and not jnp.where(args[3][..., None] == 0, found[1], 0).any()


def test_products_name_the_highest_precision() -> None:
    args = make(3, 20, 8, 2, 5, 2)
    grad = jax.value_and_grad(lambda x, *rest: sum(a.sum() for a in moments(x, *rest, jnp.ones((3, 8, 8)))))
    products = [line for line in jax.jit(grad).lower(*args).as_text().splitlines() if "dot_general" in line]
    assert len(products) > 5 and all("precision = [HIGHEST, HIGHEST]" in line for line in products)


@pytest.mark.parametrize("chip", check.KINDS)
def test_traffic_is_close_to_the_minimum(chip) -> None:
    for case in check.cases(chip):
        traffic, vmem = case.cost()
        assert traffic.ratio < 1.01, case
        assert vmem_limit(vmem) <= tpu.VMEM[check.KINDS[chip]] << 20


@pytest.mark.parametrize(("k", "features"), [(8, 512), (16, 256), (24, 128), (64, 128)])
def test_traffic_is_close_to_the_bound_where_the_gram_does_not_fit(k, features) -> None:
    args = check.arguments(16384, features, jnp.float32, k=k)
    own = tpu.plan(args[0], args[1], k, device_kind="TPU v5")
    traffic, _ = check.cost("TPU v5", args)
    reads = check.bound(own.units, own.held) / own.units
    least = traffic.minimum + (reads - 1) * args[0].size * 4
    assert traffic.total < 1.15 * least or own.tiles > 3, (own.tiles, traffic.total / least)
    assert own.limit[0] == own.units and (np.diff(own.limit) < 0).all()


def test_an_index_that_moves_too_often_shows_in_the_traffic() -> None:
    args = check.arguments(4096, 128, jnp.float32)
    traffic, _ = check.cost("TPU v5 lite", args)
    assert traffic.bytes["blocks"] == args[0].size * 4 and traffic.bytes["xx"] == 8 * 1024**2 * 4
    twice, _ = check.cost("TPU v5 lite", args, held=7)
    assert 1.3 < twice.bytes["blocks"] / traffic.bytes["blocks"] < 2 and twice.bytes["xx"] == traffic.bytes["xx"]


def test_it_lowers_for_a_tpu_without_one() -> None:
    for dtype in (jnp.float32, jnp.bfloat16):
        args = check.arguments(1000, 80, dtype, k=3)
        text = jax.jit(moments).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
        assert "tpu_custom_call" in text
    args = check.arguments(64, 12, jnp.float32, k=3)  # the kernel's rule; the reference takes over
    assert "tpu_custom_call" not in jax.jit(moments).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    with pytest.raises(NotImplementedError, match="multiples of 8"):
        jax.eval_shape(functools.partial(moments, implementation="tpu"), *args)
    wide = check.arguments(64, 8192, jnp.float32, k=1)
    with pytest.raises(NotImplementedError, match="a row of the Gram"):
        jax.eval_shape(functools.partial(moments, implementation="tpu"), *wide)


def test_it_lowers_for_cuda_without_one() -> None:
    for case in check.gpu_cases():
        text = jax.jit(case.run).trace(*case.args).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in text
    for args, match in (
        (check.arguments(64, 64, jnp.float32), "reads bfloat16"),
        (check.arguments(64, 80, jnp.bfloat16), "multiples of 64"),
    ):
        with pytest.raises(NotImplementedError, match=match):
            jax.eval_shape(gpu.moments, *args)
        assert "mosaic_gpu" not in jax.jit(moments).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_the_gpu_path_without_whole_steps_is_the_reference() -> None:
    args = make(2, 20, 64, 2, 64, 2, jnp.bfloat16)
    assert_close(gpu.moments(*args), reference.moments(*args))
    found = gpu._vectors(*args)
    assert_close(Sums(*found, *reference.moments(*args)[5:]), plain(*args))


def test_arguments_are_checked() -> None:
    args = list(make(3, 20, 4, 2, 3, 2))
    for at, other, match in (
        (0, args[0][0], "must be"),
        (1, args[1][:, :5], "y is"),
        (2, args[2].astype(jnp.uint32), "gather is uint32"),
        (3, args[3][0], "weight is"),
        (4, args[4].T, "x_mean is"),
        (0, args[0].astype(jnp.float16), "bfloat16 or float32"),
        (2, args[2][:, :0], "nothing"),
    ):
        wrong = [*args[:at], other, *args[at + 1 :]]
        with pytest.raises(ValueError, match=match):
            moments(*wrong)
    with pytest.raises(ValueError, match="white is"):
        moments(*args, jnp.ones((3, 4, 3)))
    with pytest.raises(ValueError, match="no implementation"):
        moments(*args, implementation="torch")
