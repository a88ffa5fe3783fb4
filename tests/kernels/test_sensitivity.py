"""Kernels of sensitivity: equal to the reference and to autodiff's Jacobian, blind to padding, cheap in traffic."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import sensitivity as op
from pallas_kernels.sensitivity import check, gpu, reference, tpu

STATIC = ("scale", "window", "softcap", "block")
fast = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
sensitivity, statistics, masses = (
    fast(f, static_argnames=names)
    for f, names in ((op.sensitivity, (*STATIC, "implementation")), (op.statistics, STATIC), (op.masses, STATIC))
)

# heads, kv heads, queries, slots, D, Dv, heads of positions, dtypes of q, k, v, settings
F, B = "float32", "bfloat16"
SHAPES: dict[str, tuple[Any, ...]] = {
    "one slot": (1, 1, 1, 1, 8, 8, 1, (F, F, F), {}),
    "grouped": (6, 2, 5, 13, 64, 80, 1, (F, F, F), {"window": 6}),
    "soft cap, positions by head": (2, 2, 3, 130, 96, 16, 2, (F, F, F), {"softcap": 2.0}),
    "bfloat16": (4, 2, 3, 140, 192, 256, 2, (B, B, B), {"window": 40, "softcap": 3.0}),
    "mixed": (2, 1, 4, 20, 16, 24, 1, (F, B, B), {}),
}


def problem(shape: tuple[Any, ...], batch: int = 2) -> tuple[list[jax.Array], dict[str, Any]]:
    """Arrays of a call, the last slots and one query of the first sequence padding, and its settings."""
    heads, kv_heads, queries, slots, dim, value_dim, pos_heads, kinds, settings = shape
    rng = np.random.default_rng(slots)
    draw = lambda *size: rng.normal(size=size).astype(np.float32)  # noqa: E731
    q, k = draw(batch, heads, queries, dim), draw(batch, kv_heads, slots, dim)
    v = draw(batch, kv_heads, slots, value_dim) + 3
    q, k, v = (x.astype(jnp.dtype(kind)) for x, kind in zip((q, k, v), kinds, strict=True))
    query_pos = np.tile(np.linspace(0, slots - 1, queries).astype(np.int32), (batch, 1))
    key_pos = np.tile(np.arange(slots, dtype=np.int32), (batch, pos_heads, 1))
    if slots > 4:
        query_pos[0, 0] = -1
        key_pos[0, :, -3:] = -1
        key_pos[-1, -1] = np.roll(key_pos[-1, -1], 2)
    settings = {"scale": dim**-0.5, **settings}
    weights = np.abs(rng.normal(size=(batch, kv_heads, queries, 2))).astype(np.float32)
    found = dense(q, k, v, query_pos, key_pos, **settings)
    return [jnp.asarray(x) for x in (q, k, v, query_pos, key_pos, *found, weights)], settings


def dense(
    q: Any,
    k: Any,
    v: Any,
    query_pos: Any,
    key_pos: Any,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 1e9,
) -> tuple[np.ndarray, np.ndarray]:
    """Log-sum-exp and outputs in float64, all scores at once."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v, key = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v, key_pos))
    key, query = key[:, :, None], query_pos[:, None, :, None]
    seen = (key >= 0) & (key <= query) & (key > query - (window or 1 << 30))
    score = softcap * np.tanh(scale * np.einsum("bhud,bhtd->bhut", q, k) / softcap)
    weight = np.where(seen, np.exp(score), 0.0)
    total = weight.sum(axis=-1)
    with np.errstate(divide="ignore"):
        lse = np.log(total)
    o = np.einsum("bhut,bhtd->bhud", weight, v) / np.where(total > 0, total, 1)[..., None]
    return lse.astype(np.float32), o.astype(np.float32)


def close(got: jax.Array, wanted: jax.Array, kind: str = F) -> None:
    assert got.shape == wanted.shape and got.dtype == jnp.float32
    scale = float(jnp.abs(wanted).max()) + 1e-30
    np.testing.assert_allclose(got / scale, wanted / scale, atol=2e-5 if kind == F else 2e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_equals_the_reference(name: str) -> None:
    arrays, settings = problem(SHAPES[name])
    wanted = sensitivity(*arrays, **settings, implementation="xla")
    close(sensitivity(*arrays, **settings, implementation="interpret"), wanted, SHAPES[name][7][2])


@pytest.mark.parametrize(("order", "window"), [("in order", 100), ("shuffled", None)])
def test_many_queries_stream_past_blocks_of_slots(order: str, window: int | None) -> None:
    """Two sections of three blocks of rows by three blocks of two chunks, the last ones not full."""
    shape = (2, 1, 300, 600, 8, 8, 1, (F, F, F), {"window": window})
    arrays, settings = problem(shape, batch=1)
    if order == "shuffled":
        rng = np.random.default_rng(0)
        slots, rows = rng.permutation(600), rng.permutation(300)
        arrays[1:3] = [x[:, :, slots] for x in arrays[1:3]]
        arrays[4] = arrays[4][..., slots]
        arrays[0], arrays[5:] = arrays[0][:, :, rows], [x[:, :, rows] for x in arrays[5:]]
        arrays[3] = arrays[3][:, rows]
    run = functools.partial(tpu.sensitivity, **settings, tile=tpu.Tiles(128, 256, 128, 1), interpret=True)
    in_blocks = functools.partial(reference.sensitivity, **settings, block=70, width=250)
    close(fast(run)(*arrays), fast(in_blocks)(*arrays))


def test_tails_count_nothing_twice() -> None:
    """20 slots in blocks of 8, each with the same share: sums of 8, 8 and 4."""
    at = jnp.arange(20, dtype=jnp.int32)[None]
    q, k, v = jnp.ones((1, 1, 1, 8)), jnp.ones((1, 1, 20, 8)), jnp.ones((1, 1, 20, 8))
    arrays = (q, k, v, at[:, -1:], at[:, None])
    found = (jnp.full((1, 1, 1), 8 + jnp.log(20.0)), jnp.ones((1, 1, 1, 8)))
    weights = jnp.full((1, 1, 1, 2), 400.0)
    run = functools.partial(tpu.sensitivity, scale=1.0, tile=tpu.Tiles(16, 8, 8, 2), interpret=True)
    got = fast(run)(*arrays, *found, weights)
    sums = [float(got[0, 0, i : i + 8, 1].sum()) for i in (0, 8, 16)]
    np.testing.assert_allclose(sums, [8, 8, 4], rtol=1e-5)


def test_sums_equal_the_jacobian() -> None:
    """Of attention written out here, so that reference and kernel cannot be wrong together."""
    (q, k, v, query_pos, key_pos, *rest), settings = problem((4, 2, 3, 9, 4, 6, 1, (F, F, F), {"softcap": 2.0}))

    def output(k: jax.Array, v: jax.Array) -> jax.Array:
        score = jnp.einsum("bkgud,bktd->bkgut", q.reshape(2, 2, 2, 3, 4), k) * settings["scale"]
        seen = (key_pos >= 0)[:, :, None, None] & (key_pos[:, :, None, None] <= query_pos[:, None, None, :, None])
        weight = jnp.where(seen, jnp.exp(2 * jnp.tanh(score / 2)), 0.0)
        total = weight.sum(axis=-1, keepdims=True)
        return jnp.einsum("bkgut,bktd->bkgud", weight / jnp.where(total > 0, total, 1.0), v)

    by_key, by_value = (x**2 for x in fast(jax.jacrev(output, argnums=(0, 1)))(k, v))
    wanted = jnp.stack([by_key.sum(axis=(0, 1, 2, 3, 4, 8)), by_value.sum(axis=(0, 1, 2, 3, 4, 8)) / 6], axis=-1)
    ones = jnp.ones_like(rest[-1])
    for implementation in ("xla", "interpret"):
        got = sensitivity(q, k, v, query_pos, key_pos, *rest[:2], ones, **settings, implementation=implementation)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def poisoned(arrays: list[jax.Array]) -> list[jax.Array]:
    """NaN wherever nothing may be read: empty slots, padding, and a query of weight zero."""
    q, k, v, query_pos, key_pos, lse, o, weights = arrays
    dead = (query_pos < 0)[:, None] | (weights == 0).all(axis=(1, 3))[:, None]
    hide = lambda x, mask: jnp.where(mask, jnp.asarray(jnp.nan, x.dtype), x)  # noqa: E731
    empty = (key_pos < 0)[..., None]
    q, o = (hide(x, dead[..., None]) for x in (q, o))
    return [q, hide(k, empty), hide(v, empty), query_pos, key_pos, hide(lse, dead), o, weights]


@pytest.mark.parametrize(("implementation", "kind"), [("xla", F), ("interpret", F), ("interpret", B)])
def test_poison_is_never_read(implementation: str, kind: str) -> None:
    arrays, settings = problem((4, 2, 5, 20, 16, 16, 2, (kind,) * 3, {"softcap": 2.0, "window": 12}))
    arrays[-1] = arrays[-1].at[:, :, 2].set(0.0)
    clean = sensitivity(*arrays, **settings, implementation=implementation)
    bad = poisoned(arrays)
    np.testing.assert_array_equal(sensitivity(*bad, **settings, implementation=implementation), clean)
    assert float(jnp.abs(jnp.where(arrays[4][..., None] < 0, clean, 0.0)).max()) == 0.0


def test_gradients_are_the_references_and_finite() -> None:
    arrays, settings = problem((4, 2, 5, 20, 4, 6, 1, (F, F, F), {"softcap": 2.0, "window": 12}))
    floats = (0, 1, 2, 5, 6, 7)
    arrays[5] = jnp.where(jnp.isfinite(arrays[5]), arrays[5], 0.0)
    mix = jnp.asarray(np.random.default_rng(1).normal(size=(2, 2, 20, 2)), jnp.float32)

    def loss(run: Any, *arrays: jax.Array) -> jax.Array:
        return (run(*arrays, **settings) * mix).sum()

    plain = functools.partial(reference.sensitivity, block=2, width=7)
    wanted = fast(jax.grad(functools.partial(loss, plain), argnums=floats))(*arrays)
    kernel = functools.partial(op.sensitivity, implementation="interpret")
    bad = poisoned(arrays)
    found = fast(jax.grad(functools.partial(loss, kernel), argnums=floats))(*bad)
    for got, want in zip(found, wanted, strict=True):
        assert bool(jnp.isfinite(got).all()) and float(jnp.abs(want).max()) > 0
        close(got, want)


def test_statistics_and_masses_in_blocks() -> None:
    arrays, settings = problem((6, 2, 11, 33, 8, 12, 1, (F, F, F), {"window": 20}))
    head, weights = poisoned(arrays)[:5], arrays[-1]
    lse, o = fast(functools.partial(reference.statistics, **settings, block=4, width=10))(*head)
    whole = statistics(*head, **settings)
    np.testing.assert_allclose(o, whole[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(jnp.isfinite(lse), jnp.isfinite(whole[0]))
    np.testing.assert_allclose(lse, whole[0], rtol=1e-5)
    np.testing.assert_allclose(lse, arrays[5], rtol=1e-5)
    np.testing.assert_allclose(o, arrays[6], rtol=1e-5, atol=1e-6)
    mass = masses(*head, *whole, first=4, **settings)
    blocked = fast(functools.partial(reference.masses, **settings, block=4, width=10))
    in_blocks = blocked(*head, *whole, jnp.int32(4))
    np.testing.assert_allclose(mass, in_blocks, rtol=2e-5)
    counted = jnp.where((head[4] >= 4)[..., None], sensitivity(*head, *whole, weights, **settings), 0.0)
    np.testing.assert_allclose((mass * weights).sum(axis=2), counted.sum(axis=2), rtol=2e-5)


def test_weights_of_query_heads() -> None:
    arrays, settings = problem(SHAPES["grouped"])
    wide = jnp.repeat(arrays[-1], 3, axis=1)
    close(sensitivity(*arrays[:-1], wide, **settings), sensitivity(*arrays, **settings))


def test_nothing_is_seen() -> None:
    arrays, settings = problem(SHAPES["grouped"])
    arrays[3] = jnp.full_like(arrays[3], -1)
    assert float(jnp.abs(sensitivity(*arrays, **settings, implementation="interpret")).max()) == 0.0


@pytest.mark.parametrize("dtype", check.DTYPES)
@pytest.mark.parametrize("dim", check.HEAD_DIMS)
def test_traffic_of_probes(dtype: str, dim: int) -> None:
    traffic, vmem = check.cost("v5p", check.structs(dtype, dim, 131072, check.PROBES, kv_heads=8))
    assert traffic.ratio <= 1.05, traffic
    assert vmem < 16 << 20


@pytest.mark.parametrize(("chip", "dtype", "dim"), [("v5e", B, 256), ("v5p", B, 64), ("v5p", F, 256)])
def test_traffic_of_every_query(chip: str, dtype: str, dim: int) -> None:
    """Near the least that this much VMEM allows, and near the least of all with a window or where the slots fit."""
    args = check.structs(dtype, dim, 131072, 131072)
    shape = tpu.shape_of(*args[:3], args[4])
    traffic, vmem = check.cost(chip, args)
    assert traffic.total <= 1.1 * tpu.bound(shape, int(check.VMEM[chip] * tpu.SHARE))
    assert vmem <= tpu.SHARE * check.VMEM[chip]
    assert check.cost(chip, args, window=1024)[0].ratio <= 1.15


def test_hidden_blocks_are_not_fetched() -> None:
    """Queries in the first tenth of a window's reach see one block of slots, so only that one moves."""
    shape = tpu.Shape(1, 1, 1, 128, 4096, 128, 128)
    tile = tpu.Tiles(128, 512, 512, 2)
    rows, slots = np.arange(128, dtype=np.int32)[None] + 1024, np.arange(4096, dtype=np.int32)[None, None]
    scalars = tpu.plan(shape, tile, jnp.asarray(rows), jnp.asarray(slots), 1)
    moved = tpu.launch(shape, tile).traffic(*(np.asarray(x) for x in scalars)).bytes
    assert moved["k"] == moved["v"] == 512 * 128 * 4
    assert moved["q"] == 128 * 128 * 4


@pytest.mark.parametrize(("dtype", "dim", "queries"), [(F, 64, 32), (F, 80, 700), (B, 80, 32), (B, 256, 700)])
def test_lowers_for_tpu_without_one(dtype: str, dim: int, queries: int) -> None:
    args = check.structs(dtype, dim, 1001, queries)
    run = functools.partial(op.sensitivity, scale=0.1, window=50, softcap=3.0)
    text = jax.jit(run).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text


@pytest.mark.parametrize("dim", [64, 80, 96, 192, 256])
def test_lowers_for_cuda_without_one(dim: int) -> None:
    args = check.structs("bfloat16", dim, 1001, 33)
    run = functools.partial(op.sensitivity, scale=0.1, window=50, softcap=3.0)
    text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_what_a_kernel_cannot_take_goes_to_the_reference() -> None:
    args = check.structs("float32", 64, 100, 4)
    run = functools.partial(op.sensitivity, scale=0.1)
    assert "mosaic_gpu" not in jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    with pytest.raises(NotImplementedError, match="bfloat16: tensor cores"):
        jax.eval_shape(functools.partial(run, implementation="gpu"), *args)
    with pytest.raises(NotImplementedError, match="multiples of 16"):
        jax.eval_shape(functools.partial(gpu.sensitivity, scale=0.1), *check.structs("bfloat16", 40, 100, 4))
    with pytest.raises(NotImplementedError, match="float32 or bfloat16"):
        jax.eval_shape(functools.partial(tpu.sensitivity, scale=0.1), *check.structs("float16", 64, 100, 4))


def test_shapes_that_do_not_belong_together() -> None:
    arrays, settings = problem(SHAPES["grouped"])
    with pytest.raises(ValueError, match="weights must be"):
        sensitivity(*arrays[:-1], arrays[-1][:, :1], **settings)
    with pytest.raises(ValueError, match="positions are"):
        statistics(*arrays[:3], arrays[3][:, :2], arrays[4], **settings)
    with pytest.raises(ValueError, match="H a multiple of K"):
        statistics(arrays[0][:, :5], *arrays[1:5], **settings)


def test_memory_grows_linearly() -> None:
    """Temporaries of statistics, masses and sums together over every query, 512 to 8192 slots."""

    def run(q: Any, k: Any, v: Any, query_pos: Any, key_pos: Any, lse: Any, o: Any, weights: Any) -> jax.Array:
        found = op.statistics(q, k, v, query_pos, key_pos, scale=0.1)
        mass = op.masses(q, k, v, query_pos, key_pos, *found, scale=0.1)
        return op.sensitivity(q, k, v, query_pos, key_pos, *found, weights / (1 + mass), scale=0.1)

    sizes = []
    for length in (512, 8192):
        args = check.structs("float32", 8, length, length, kv_heads=1)
        sizes.append(fast(run).lower(*args).compile().memory_analysis().temp_size_in_bytes)
    assert sizes[1] < 20 * sizes[0], sizes


def test_precision_is_named() -> None:
    """Every product of floats in the reference is at the highest precision."""
    args = check.structs("float32", 8, 64, 4)
    text = jax.jit(functools.partial(reference.sensitivity, scale=0.1)).lower(*args).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products and all("HIGHEST" in line for line in products)
