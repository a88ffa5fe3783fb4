"""Sensitivity: equal to autodiff's Jacobian, blind to padding and prefix, linear in memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvx.cache.cache import LayerView
from kvx.cache.geometry import RopeSpec
from kvx.cache.ops import rotate_keys
from kvx.errors import KvxError
from kvx.fitting import sensitivity as module
from kvx.fitting.sensitivity import PROBES, as_columns, column_sums, probe_positions, sensitivity
from kvx.models.attention import attend
from kvx.models.config import tiny_config
from kvx.models.decoder import forward
from kvx.models.random_model import random_model

CASES = {
    "plain": (2, 2, 4, {}),
    "grouped": (6, 2, 4, {"scale": 0.7}),
    "window": (2, 1, 4, {"window": 5}),
    "soft cap": (4, 2, 4, {"softcap": 1.5}),
    "all of it": (6, 3, 6, {"window": 7, "softcap": 2.0, "scale": 1.3}),
}


def problem(heads: int, kv_heads: int, value_dim: int, *, length: int = 11, batch: int = 2):
    rng = np.random.default_rng(heads)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    q, k = draw(batch, heads, length, 4), draw(batch, kv_heads, length, 4)
    v = draw(batch, kv_heads, length, value_dim) + 20  # far from zero: |v - o|^2 must not cancel
    pos = np.tile(np.arange(length, dtype=np.int32), (batch, 1))
    pos[0, -3:] = -1  # padding on the right, and on the left of the other row
    pos[1] = np.r_[[-1, -1], np.arange(length - 2)]
    return q, k, v, jnp.asarray(pos)


@pytest.mark.parametrize("name", CASES)
def test_sums_equal_the_jacobian(name: str, monkeypatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 4)  # several blocks, the last one not full
    column_sums.clear_cache()
    heads, kv_heads, value_dim, settings = CASES[name]
    settings = {"scale": 0.5, **settings}
    q, k, v, pos = problem(heads, kv_heads, value_dim)
    slots = pos[:, None]

    def output(k, v):
        return attend(q, [LayerView(k, v, slots)], pos, **settings)

    by_key, by_value = jax.jit(jax.jacrev(output, argnums=(0, 1)))(k, v)  # [B,H,U,Dv, B,K,T,D]
    keys = (by_key**2).sum(axis=(0, 1, 2, 3, 7))
    values = (by_value**2).sum(axis=(0, 1, 2, 3, 7)) / value_dim
    filled = (slots >= 0)[..., None]
    nan = jnp.float32(jnp.nan)
    poisoned = LayerView(jnp.where(filled, k, nan), jnp.where(filled, v, nan), slots)
    queries = jnp.where((pos >= 0)[:, None, :, None], q, nan)
    got = column_sums(queries, pos, poisoned, **settings)
    np.testing.assert_allclose(got[..., 0], keys, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got[..., 1], values, rtol=1e-4, atol=1e-6)
    assert float(got[0, :, -3:].max()) == 0.0


@pytest.fixture(scope="module")
def run():
    """A hybrid model over two rows of 40 and 29 tokens."""
    ropes = (RopeSpec.create(dim=8), RopeSpec.create(theta=1e6, dim=8))
    model = random_model(tiny_config(windows=(9, None), ropes=ropes, attn_softcap=5.0, score_scale=0.9))
    tokens = np.random.default_rng(0).integers(0, 60, (2, 40))
    tokens[1, 29:] = -1
    out = forward(model, jnp.asarray(tokens, jnp.int32), collect_queries=True)
    pos = jnp.asarray(np.where(tokens >= 0, np.arange(40), -1), jnp.int32)
    return model.config, out.queries, pos, out.cache


@pytest.mark.parametrize("mode", ["probes", "all"])
def test_mean_one_over_the_context_and_zero_elsewhere(run, mode: str) -> None:
    config, queries, pos, cache = run
    r = np.asarray(sensitivity(config, queries, pos, cache, mode=mode, first=3))
    assert r.shape == (2, 2, 2, 40, 2) and r.dtype == np.float32
    assert (r >= 0).all()
    np.testing.assert_allclose(r[:, 0, :, 3:].mean(axis=2), 1, atol=1e-5)
    np.testing.assert_allclose(r[:, 1, :, 3:29].mean(axis=2), 1, atol=1e-5)
    assert r[:, :, :, :3].max() == 0 and r[:, 1, :, 29:].max() == 0


def test_all_is_the_sum_over_every_query(run) -> None:
    """Against a straight count in float64 of one global layer, prefix in the softmax but not in the result."""
    config, queries, pos, cache = run
    r = np.asarray(sensitivity(config, queries, pos, cache, mode="all", first=2))
    view = rotate_keys(cache).layer(1)
    q, k, v = (np.asarray(x, np.float64) for x in (queries[1, 0], view.k[0, 1], view.v[0, 1]))
    keys, values = np.zeros(40), np.zeros(40)
    for head in (2, 3):
        for u in range(40):
            capped = np.tanh(0.9 * k[: u + 1] @ q[head, u] / 5)
            a = np.exp(5 * capped)
            a /= a.sum()
            o = a @ v[: u + 1]
            c = 0.9 * (1 - capped**2)
            values[: u + 1] += a**2
            keys[: u + 1] += (a * c) ** 2 * ((v[: u + 1] - o) ** 2).sum(axis=1) * (q[head, u] ** 2).sum()
    for component, wanted in enumerate((keys, values)):
        np.testing.assert_allclose(r[1, 0, 1, 2:, component], wanted[2:] / wanted[2:].mean(), rtol=1e-4)


def test_probes_count_equally(run) -> None:
    config, queries, pos, cache = run
    r = np.asarray(sensitivity(config, queries, pos, cache, mode="probes", first=1))
    view = rotate_keys(cache).layer(1)
    probes = [int(p) for p in probe_positions(jnp.array([39, 28]), 1)[1] if p >= 0]
    assert (probes[0], probes[-1]) == (13, 28) and len(set(probes)) == len(probes) <= PROBES
    total = np.zeros(28)
    for probe in probes:
        one = jnp.full_like(pos, -1).at[1, probe].set(probe)
        sums = column_sums(queries[1], one, view, scale=0.9, softcap=5.0)
        own = np.asarray(sums)[1, 0, 1:29, 0]
        total += own / own.sum()
    np.testing.assert_allclose(r[1, 1, 0, 1:29, 0], total / total.mean(), rtol=1e-4, atol=1e-6)


def test_probes_of_short_contexts() -> None:
    found = np.asarray(probe_positions(jnp.array([0, 1, 5, 13, 1000]), 0))
    assert [row[row >= 0].tolist() for row in found[:4]] == [[], [0], [4], [12]]
    assert found[4, 0] == 12 and found[4, -1] == 999 and (found[4] >= 0).all()
    ratios = np.diff(np.log(found[4, 10:]))
    assert ratios.max() < 1.2 * ratios.min() + 0.01


@pytest.mark.parametrize("mode", ["probes", "all"])
def test_poisoned_padding_is_never_read(run, mode: str) -> None:
    config, queries, pos, cache = run
    clean = sensitivity(config, queries, pos, cache, mode=mode, first=1)
    (group,) = cache.groups
    hole = (group.pos < 0)[..., None]
    group = dataclasses.replace(group, k=jnp.where(hole, jnp.nan, group.k), v=jnp.where(hole, jnp.nan, group.v))
    bad = jnp.where((pos < 0)[None, :, None, :, None], jnp.nan, queries)
    got = sensitivity(config, bad, pos, dataclasses.replace(cache, groups=(group,)), mode=mode, first=1)
    np.testing.assert_array_equal(got, clean)


def test_rotated_caches_give_the_same(run) -> None:
    config, queries, pos, cache = run
    a, b = (sensitivity(config, queries, pos, c, mode="all") for c in (cache, rotate_keys(cache)))
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["probes", "all"])
def test_memory_grows_linearly(mode: str) -> None:
    sizes = []
    for length in (512, 2048, 8192):
        f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
        pos = jax.ShapeDtypeStruct((1, length), jnp.int32)
        view = LayerView(f32(1, 1, length, 8), f32(1, 1, length, 8), jax.ShapeDtypeStruct((1, 1, length), jnp.int32))
        settings = {"mode": mode, "rope": None, "scale": 1.0, "window": 512, "softcap": None}
        compiled = module._layer.lower(f32(1, 2, length, 8), pos, view, 1, **settings).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    ratios = np.array(sizes[1:]) / np.array(sizes[:-1])
    assert (ratios < 4.5).all(), sizes


def test_rows_stand_beside_the_batch() -> None:
    found = jnp.arange(2 * 3 * 2 * 5 * 2, dtype=jnp.float32).reshape(2, 3, 2, 5, 2)
    rows = as_columns(found)
    assert float(rows[1 * 5 + 4, (1 * 2 + 0) * 2 + 1]) == float(found[1, 1, 0, 4, 1])


def test_what_does_not_fit_is_refused(run) -> None:
    config, queries, pos, cache = run
    with pytest.raises(KvxError, match="sensitivity is 'some'"):
        sensitivity(config, queries, pos, cache, mode="some")
    with pytest.raises(KvxError, match="queries must be"):
        sensitivity(config, queries[:1], pos, cache)
    ring = dataclasses.replace(cache, groups=(dataclasses.replace(cache.groups[0], ring=True),))
    with pytest.raises(KvxError, match="keep='all'"):
        sensitivity(config, queries, pos, ring)
