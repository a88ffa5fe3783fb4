"""Attention-output cosine: case 1, masks, windows, grouped heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvx.cache.cache import LayerView
from kvx.errors import KvxError
from kvx.evaluation.cosine import AttentionCosine, attention_outputs, head_cosine
from kvx.evaluation.metrics import Estimate
from kvx.evaluation.verdict import Evidence, judge


def _view(k: np.ndarray, v: np.ndarray, pos: np.ndarray | None = None) -> LayerView:
    """A single head's keys and values as one layer of a batch of one."""
    pos = np.arange(len(k)) if pos is None else pos
    return LayerView(jnp.asarray(k)[None, None], jnp.asarray(v)[None, None], jnp.asarray(pos, jnp.int32)[None, None])


def _r2(y: np.ndarray, predicted: np.ndarray) -> float:
    return 1.0 - float(((y - predicted) ** 2).sum() / ((y - y.mean(axis=0, keepdims=True)) ** 2).sum())


def _huge_channel(seed: int = 0) -> dict[str, tuple[float, float]]:
    """Case 1: (R^2, attention-output cosine) of map A, which keeps the huge channel only, and B, which drops it."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((256, 32)).astype(np.float32)
    k[:, 0] *= 60.0
    v = rng.standard_normal((256, 32)).astype(np.float32)
    q = 2.0 * rng.standard_normal((64, 32)).astype(np.float32)
    q[:, 0] = 0.0
    only, dropped = np.zeros_like(k), k.copy()
    only[:, 0], dropped[:, 0] = k[:, 0], 0.0
    positions = jnp.full((1, 64), 256, jnp.int32)
    found = {}
    for name, keys in (("A", only), ("B", dropped)):
        outputs = [
            attention_outputs(jnp.asarray(q)[None, None], positions, _view(x, v), scale=32.0**-0.5) for x in (k, keys)
        ]
        total, count = head_cosine(outputs[0], outputs[1], positions)
        found[name] = (_r2(k, keys), float(total[0]) / int(count[0]))
    return found


def test_case_1_r2_ranks_the_maps_in_the_wrong_order_and_the_cosine_does_not():
    maps = _huge_channel()
    assert maps["A"][0] > 0.98 and maps["B"][0] < 0.02, "R^2 prefers map A"
    assert maps["A"][1] < 0.5, "what attention reads through A is wrong"
    assert maps["B"][1] == pytest.approx(1.0, abs=1e-5), "what attention reads through B is right"


def test_case_1_map_b_wins_the_verdict():
    good = {"contexts": 100, "content": Estimate(0.9, 0.8, 1.0), "question_contexts": 100}
    good |= {"answers": Estimate(0.9, 0.8, 1.0), "f1": {"native": 0.4, "translated": 0.38, "source_alone": 0.2}}
    decisions = {
        name: judge(Evidence(**good, attention_cosine=cosine)).decision for name, (_, cosine) in _huge_channel().items()
    }
    assert decisions == {"A": "reprefill", "B": "use"}


def test_outputs_equal_plain_softmax_attention_with_grouped_heads():
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 4, 3, 8)).astype(np.float32)
    k, v = (rng.standard_normal((2, 2, 5, 8)).astype(np.float32) for _ in range(2))
    pos = np.tile(np.arange(5, dtype=np.int32), (2, 1, 1))
    out = attention_outputs(
        jnp.asarray(q),
        jnp.full((2, 3), 5, jnp.int32),
        LayerView(jnp.asarray(k), jnp.asarray(v), jnp.asarray(pos)),
        scale=0.3,
    )
    scores = np.einsum("bhtd,bhsd->bhts", q, k.repeat(2, axis=1)) * 0.3
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(out, np.einsum("bhts,bhsd->bhtd", weights, v.repeat(2, axis=1)), atol=1e-5)


def test_window_prefix_and_padding_are_masked():
    k = np.zeros((6, 4), np.float32)
    v = np.arange(6, dtype=np.float32)[:, None].repeat(4, 1)
    pos = np.array([0, 1, 2, 3, 4, -1])
    v[5] = k[5] = np.nan
    q = jnp.ones((1, 1, 1, 4))

    def seen(position: int, **kwargs: int) -> float:
        positions = jnp.array([[position]], jnp.int32)
        return float(attention_outputs(q, positions, _view(k, v, pos), scale=1.0, **kwargs)[0, 0, 0, 0])

    assert seen(5) == pytest.approx(2.0)  # 0..4
    assert seen(2) == pytest.approx(1.0)  # causal: 0..2
    assert seen(5, first=3) == pytest.approx(3.5)  # without the prefix: 3, 4
    assert seen(5, window=3) == pytest.approx(3.5)  # 3, 4
    assert seen(9, window=3) == 0.0  # sees nothing


def test_queries_that_see_nothing_do_not_count():
    a = jnp.stack([jnp.ones((1, 2, 4)), jnp.zeros((1, 2, 4))])  # second row sees no context
    total, count = head_cosine(a, jnp.ones((2, 1, 2, 4)), jnp.array([[7, -1], [7, 8]], jnp.int32))
    assert (float(total[0]), int(count[0])) == (pytest.approx(1.0), 1)


def test_scale_matters_and_softcap_is_applied():
    rng = np.random.default_rng(2)
    k, v, q = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 8), (9, 8), (1, 1, 2, 8)))
    positions = jnp.full((1, 2), 9, jnp.int32)
    plain = attention_outputs(jnp.asarray(q), positions, _view(k, v), scale=1.0)
    capped = attention_outputs(jnp.asarray(q), positions, _view(k, v), scale=1.0, softcap=0.5)
    scores = 0.5 * np.tanh(q[0, 0] @ k.T / 0.5)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(capped[0, 0], weights @ v, atol=1e-5)
    assert not np.allclose(plain, capped, atol=1e-3)


def test_pooling_worst_and_layers_that_no_query_reads():
    one = AttentionCosine(
        {"translated": np.array([[1.0, 3.0], [0.0, 0.0]])}, {"translated": np.array([[2, 4], [0, 0]])}
    )
    pooled = one + one
    np.testing.assert_array_equal(pooled.per_head()[0], [0.5, 0.75])
    assert pooled.mean() == pytest.approx(0.625)
    assert pooled.worst_layer() == (0, 0.625) and pooled.worst_head() == (0, 0, 0.5)
    assert pooled.to_json()["translated"]["per_head"][1] == [None, None]
    with pytest.raises(KvxError, match="cannot be pooled"):
        _ = one + AttentionCosine({"constant": np.ones((2, 2))}, {"constant": np.ones((2, 2), int)})


def test_outputs_are_differentiable_for_a_query_that_sees_nothing():
    view = _view(np.ones((3, 4), np.float32), np.ones((3, 4), np.float32))

    def loss(q: jax.Array) -> jax.Array:
        return attention_outputs(q, jnp.array([[-1]], jnp.int32), view, scale=1.0).sum()

    assert np.isfinite(jax.grad(loss)(jnp.ones((1, 1, 1, 4)))).all()
