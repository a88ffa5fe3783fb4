"""Attention over positions (CASES 13, 14, 24)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvx.cache.cache import LayerView
from kvx.models import attention
from kvx.models.attention import attend


def reference(q, parts, pos, scale, window=None, softcap=None):
    """Softmax attention, one query at a time, in fp64."""
    batch, heads, tokens, _ = q.shape
    kv = parts[0].k.shape[1]
    out = np.zeros((batch, heads, tokens, parts[0].v.shape[-1]))
    for b, h, t in np.ndindex(batch, heads, tokens):
        g = h // (heads // kv)
        keys, values = [], []
        for part in parts:
            where = np.asarray(part.pos)[b, g if part.pos.shape[1] > 1 else 0]
            seen = (where >= 0) & (where <= pos[b, t])
            if window is not None:
                seen &= where > pos[b, t] - window
            keys.append(np.asarray(part.k, np.float64)[b, g][seen])
            values.append(np.asarray(part.v, np.float64)[b, g][seen])
        k, v = np.concatenate(keys), np.concatenate(values)
        if len(k):
            s = k @ np.asarray(q, np.float64)[b, h, t] * scale
            s = s if softcap is None else softcap * np.tanh(s / softcap)
            p = np.exp(s - s.max())
            out[b, h, t] = p @ v / p.sum()
    return out


def case(tokens=9, slots=12, heads=4, kv=2, per_head=False, seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    where = np.full((2, kv if per_head else 1, slots), -1)
    for row in where.reshape(-1, slots):
        row[rng.permutation(slots)[: slots - 3]] = rng.permutation(slots)[: slots - 3]
    past = LayerView(normal(2, kv, slots, 8), normal(2, kv, slots, 6), jnp.asarray(where, jnp.int32))
    pos = np.tile(np.arange(slots, slots + tokens), (2, 1))
    pos[0, -2:] = -1
    own = LayerView(normal(2, kv, tokens, 8), normal(2, kv, tokens, 6), jnp.asarray(pos[:, None], jnp.int32))
    return normal(2, heads, tokens, 8), [past, own], jnp.asarray(pos, jnp.int32)


@pytest.mark.parametrize("settings", [{}, {"window": 4}, {"softcap": 0.7}, {"window": 5, "softcap": 2.0}])
@pytest.mark.parametrize("per_head", [False, True])
def test_against_the_definition(settings, per_head):
    q, parts, pos = case(per_head=per_head)
    out = attend(q, parts, pos, scale=0.4, ordered=True, **settings)
    np.testing.assert_allclose(out, reference(q, parts, pos, 0.4, **settings), atol=2e-6)
    traced = jax.jit(lambda w: attend(q, parts, pos, scale=0.4, **{**settings, "window": w}))
    np.testing.assert_allclose(traced(jnp.int32(settings.get("window", 1 << 30))), out, atol=1e-6)


@pytest.mark.parametrize(("ordered", "segments"), [(False, 8), (True, 8), (True, 2)])
def test_blocks_equal_one_piece(ordered, segments, monkeypatch):
    q, parts, pos = case(tokens=22)
    whole = attend(q, parts, pos, scale=0.4, window=7)
    monkeypatch.setattr(attention, "BLOCK", 4)
    monkeypatch.setattr(attention, "SEGMENTS", segments)
    blocks = attend(q, parts, pos, scale=0.4, window=7, ordered=ordered)
    np.testing.assert_allclose(blocks, whole, atol=1e-6)
    loss = lambda k: (  # noqa: E731
        attend(q, [LayerView(k, *_rest(parts[0])), parts[1]], pos, scale=0.4, ordered=ordered) ** 2
    ).sum()
    small = jax.grad(loss)(parts[0].k)
    monkeypatch.setattr(attention, "BLOCK", 128)
    np.testing.assert_allclose(small, jax.grad(loss)(parts[0].k), atol=1e-5)


def _rest(part):
    return part.v, part.pos


def test_long_chunks_never_make_the_square():
    """1,024 queries: no array of 1,024 x 1,024 scores in the program."""
    q = jnp.zeros((1, 2, 1024, 8))
    pos = jnp.arange(1024, dtype=jnp.int32)[None]
    own = LayerView(q[:, :1], q[:, :1], pos[:, None])
    text = str(jax.make_jaxpr(lambda q: attend(q, [own], pos, scale=1.0, ordered=True))(q))
    assert "1024,1024" not in text and "2048,1024" not in text
    assert "128,1024" in text or "256,1024" in text


def test_nan_in_empty_slots_is_never_read():
    q, parts, pos = case()
    empty = np.asarray(parts[0].pos < 0)[..., None]
    poisoned = LayerView(jnp.where(empty, jnp.nan, parts[0].k), jnp.where(empty, jnp.nan, parts[0].v), parts[0].pos)
    out = attend(q, [poisoned, parts[1]], pos, scale=0.4)
    np.testing.assert_array_equal(out, attend(q, parts, pos, scale=0.4))
    weighed = lambda k, v: (attend(q, [LayerView(k, v, poisoned.pos), parts[1]], pos, scale=0.4) ** 2).sum()  # noqa: E731
    for grad in jax.grad(weighed, (0, 1))(poisoned.k, poisoned.v):
        assert np.isfinite(grad).all()


def test_a_row_with_nothing_to_read_is_zero_with_finite_gradients():
    q, parts, pos = case()
    lost = jnp.full_like(pos, 3)
    late = [LayerView(p.k, p.v, jnp.where(p.pos >= 0, p.pos + 10, -1)) for p in parts]
    total = lambda q, k, v: attend(q, [LayerView(k, v, late[0].pos), late[1]], lost, scale=0.4).sum()  # noqa: E731
    assert not np.asarray(attend(q, late, lost, scale=0.4)).any()
    for grad in jax.grad(total, (0, 1, 2))(q, late[0].k, late[0].v):
        assert not np.asarray(grad).any()


def test_no_slots_at_all():
    q, parts, pos = case()
    none = LayerView(parts[0].k[:, :, :0], parts[0].v[:, :, :0], parts[0].pos[..., :0])
    assert not np.asarray(attend(q, [none], pos, scale=0.4)).any()
    np.testing.assert_array_equal(attend(q, [none, parts[1]], pos, scale=0.4), attend(q, parts[1:], pos, scale=0.4))


def test_query_heads_0011():
    """Heads 0, 1 read kv head 0 and heads 2, 3 read kv head 1 (repeat), not 0, 1, 0, 1 (tile)."""
    v = jnp.arange(2.0).reshape(1, 2, 1, 1) * jnp.ones((1, 2, 1, 3))
    part = LayerView(jnp.ones((1, 2, 1, 3)), v, jnp.zeros((1, 1, 1), jnp.int32))
    out = attend(jnp.ones((1, 4, 1, 3)), [part], jnp.zeros((1, 1), jnp.int32), scale=1.0)
    assert out[0, :, 0, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    q = 50.0 * jnp.array([[1, 0], [0, 1], [1, 0], [0, 1]], jnp.float32)[None, :, None]  # even heads read slot 0
    k, v = jnp.stack([jnp.eye(2)] * 2)[None], jnp.array([[1.0, 2.0], [3.0, 4.0]])[None, ..., None]
    part = LayerView(k, v, jnp.zeros((1, 1, 2), jnp.int32))
    out = attend(q, [part], jnp.zeros((1, 1), jnp.int32), scale=1.0)
    np.testing.assert_allclose(out.ravel(), [1.0, 2.0, 3.0, 4.0], atol=1e-6)


def test_slot_order_does_not_matter():
    q, parts, pos = case()
    order = np.random.default_rng(1).permutation(12)
    mixed = LayerView(parts[0].k[:, :, order], parts[0].v[:, :, order], parts[0].pos[..., order])
    np.testing.assert_allclose(
        attend(q, [mixed, parts[1]], pos, scale=0.4), attend(q, parts, pos, scale=0.4), atol=1e-6
    )
