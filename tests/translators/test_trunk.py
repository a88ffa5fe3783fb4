"""The trunk: linear without blocks, able to learn what no linear map of single tokens can, rotary and causal."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvx
from kvx.errors import KvxError
from kvx.fitting.synthetic import toy_pairs
from kvx.mappers import low_rank
from kvx.translators import trunk, untrained
from kvx.translators.trunk_params import Blocks
from kvx.translators.trunks import state


def _start(**settings):
    return kvx.fit(low_rank(12, ridge=0.1, **settings), toy_pairs(), progress=False)[0]


def test_settings_out_of_range_are_refused() -> None:
    for settings in ({"blocks": -1}, {"width": 0}, {"heads": 0}, {"head_dim": 3}):
        with pytest.raises(KvxError, match="even head_dim"):
            trunk(**settings)
    with pytest.raises(KvxError, match="gate_rate"):
        trunk(gate_rate=0.0)


def test_a_block_is_attention_to_earlier_tokens_then_a_swiglu() -> None:
    """One block against its formulas in numpy, token by token."""
    start = _start()
    batch = next(iter(toy_pairs()))
    first = untrained(trunk(blocks=1, width=3, heads=2, head_dim=4), start, jax.random.key(1)).params
    rng = np.random.default_rng(0)
    gates = {name: jnp.asarray(rng.normal(size=(1, 12)), jnp.float32) for name in ("read_gate", "gate")}
    params = dataclasses.replace(first, blocks=dataclasses.replace(first.blocks, **gates))
    none = dataclasses.replace(first, blocks=jax.tree.map(lambda x: x[:0], first.blocks))
    h = np.asarray(state(none, batch.source, batch.alignment), np.float64)[0]
    got = np.asarray(state(params, batch.source, batch.alignment))[0]
    block: Blocks = jax.tree.map(lambda x: np.asarray(x, np.float64)[0], params.blocks)
    normed = lambda x: x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-6)  # noqa: E731

    def turned(x: np.ndarray, pos: int) -> np.ndarray:
        angle = pos / 10000.0 ** (np.arange(2) / 2)
        a, b = x[:, :2], x[:, 2:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1)

    n = normed(h)
    q, k, v = ((n @ w).reshape(len(h), 2, 4) for w in (block.query_weight, block.key_weight, block.value_weight))
    for t in range(14):
        scores = np.array([(turned(q[t], t) * turned(k[s], s)).sum(axis=1) for s in range(t + 1)]) / 2
        share = np.exp(scores - scores.max(axis=0))
        share /= share.sum(axis=0)
        read = np.einsum("sh,shd->hd", share, v[: t + 1]).ravel() @ block.out_weight
        after = h[t] + 8 * block.read_gate * read
        a, b = np.split(normed(after) @ block.expand_weight, 2)
        after = after + 8 * block.gate * ((a / (1 + np.exp(-a)) * b) @ block.contract_weight)
        np.testing.assert_allclose(got[t], after, rtol=1e-3, atol=1e-3)


def test_without_blocks_it_is_the_linear_map_trained_on() -> None:
    start = _start()
    made = untrained(trunk(blocks=0), start, jax.random.key(0))
    batch = next(iter(toy_pairs()))
    ours, theirs = (kvx.translate(m, batch.source, batch.alignment) for m in (made, start))
    np.testing.assert_allclose(ours.keys(1), theirs.keys(1), atol=1e-4)
    assert made.parameters < start.parameters * 1.2 and made.flops(10) == start.flops(10)


def test_its_cost_counts_products_and_attention() -> None:
    start = _start()
    made = untrained(trunk(blocks=2, width=3, heads=2, head_dim=4), start, jax.random.key(0))
    matrices = 2 * (4 * 12 * 8 + 3 * 12 * 3)
    pairs = 10 * 11 // 2
    assert made.flops(10) - start.flops(10) == 2 * (10 * matrices + 2 * 2 * 8 * pairs)


def test_training_opens_the_gates_and_explains_what_one_token_cannot() -> None:
    """Targets that hold the mean of all earlier tokens' features: linear maps of one token miss it."""
    batch = next(iter(toy_pairs(batches=1, batch_size=4, length=24)))
    start = kvx.fit(low_rank(12, ridge=0.1), toy_pairs(length=24), progress=False)[0]
    method = trunk(blocks=1, width=8, heads=2, head_dim=8)
    first = untrained(method, start, jax.random.key(0), [(batch.source, batch.alignment)])
    real = batch.alignment.pos >= 0
    x = jnp.where(real, batch.source.keys(0)[:, 0, :, 0], 0.0)
    wanted = jnp.cumsum(x, axis=1) / (1.0 + jnp.arange(x.shape[1], dtype=jnp.float32))[None]
    wanted = (wanted - wanted.mean()) / wanted.std()

    def error(params):
        made = method.apply(params, batch.source, batch.alignment)[0].values(1)[:, 0, :, 0]
        gap = jnp.where(real, made - made.mean() - wanted, 0.0)
        return jnp.square(gap).mean()

    marks = method.trainable(first.params)

    @jax.jit
    def move(params, speed):
        slopes = jax.grad(error)(params)
        speed = jax.tree.map(lambda m, g: 0.9 * m + g, speed, slopes)
        size = jnp.sqrt(sum(jnp.square(s).sum() for s in jax.tree.leaves(slopes)))
        step = 0.01 / jnp.maximum(size, 1.0)
        return jax.tree.map(lambda p, v, mark: p - step * v if mark else p, params, speed, marks), speed

    def after(blocks: bool) -> float:
        params = first.params
        if not blocks:
            params = dataclasses.replace(params, blocks=jax.tree.map(lambda b: b[:0], params.blocks))
        speed = jax.tree.map(jnp.zeros_like, params)
        for _ in range(150):
            params, speed = move(params, speed)
        return float(error(params))

    with_blocks = after(True)
    assert with_blocks < 0.7 * after(False), with_blocks
