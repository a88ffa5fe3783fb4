"""Weighted sums of a layer's heads in one call: the same as one by one, and only where the entries fit together."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import kvx
from kvx.fitting import head_sums, weighted_sums
from kvx.fitting.synthetic import SOURCE, TARGET, toy_pairs
from kvx.mappers import head_matched
from kvx.mappers.base import Entry

TWO_HEADS = dataclasses.replace(TARGET, layers=(dataclasses.replace(TARGET.layers[0], kv_heads=2),) * 2)


def test_entries_are_grouped_by_layer_component_and_width() -> None:
    def entry(target, component, head, *parts):
        return Entry(target, component, (head, head + 1), 6, parts)

    entries = [
        entry(0, 0, 0, (0, 0, 4), (1, 4, 8)),
        entry(0, 1, 0, (0, 0, 4), (1, 4, 8)),
        entry(0, 0, 1, (0, 4, 8), (1, 4, 8)),
        entry(0, 1, 1, (0, 0, 6)),  # another count of blocks
        entry(1, 0, 0, (0, 0, 4), (1, 4, 10)),  # blocks of two widths
        entry(1, 0, 1, (0, 0, 4), (1, 4, 10)),
        entry(1, 1, 0, (2, 0, 6)),
        entry(1, 1, 1, (2, 0, 6)),
    ]
    assert head_sums.grouped(entries) == {4: [[0, 2]], 6: [[6, 7]]}


def test_a_layer_in_one_call_is_its_heads_one_by_one(monkeypatch) -> None:
    pairs = toy_pairs(SOURCE, TWO_HEADS, reads=3, noise=1.0, batches=2)
    method = head_matched(layers=2, ridge=(1e-2, 1e-1), sensitivity=True, select="attention")
    taken = []
    take = head_sums.HeadSums.take
    monkeypatch.setattr(head_sums.HeadSums, "take", lambda self, *args: (taken.append(self.members), take(self, *args)))
    got, report = kvx.fit(method, pairs, rows=96, progress=False)
    assert taken and all(len(group) == 2 for members in taken for group in members)
    monkeypatch.setattr(weighted_sums, "grouped", lambda entries: {})
    count = len(taken)
    wanted, plain = kvx.fit(method, pairs, rows=96, progress=False)
    assert len(taken) == count
    for a, b in zip(jax.tree.leaves(got.params), jax.tree.leaves(wanted.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
    for one, other in zip(report.entries, plain.entries, strict=True):
        assert one.ridge == other.ridge
        np.testing.assert_allclose(one.alpha, other.alpha, rtol=1e-5)
        np.testing.assert_allclose(one.attention_held_out, other.attention_held_out, atol=1e-5)


def test_products_of_a_group_name_the_highest_precision() -> None:
    pool = head_sums.Pool(jnp.zeros((3, 4)), jnp.ones((3, 4, 4)), jnp.array([0, 4, 8]))
    heads = head_sums.Heads(
        jnp.array([[0, 1], [0, 2]]), jnp.array([0, 5]), jnp.array([[10], [11]]), jnp.zeros((2, 5)), jnp.ones((2, 5))
    )
    x, y, weight = jnp.ones((8, 12)), jnp.ones((8, 12)), jnp.ones(8)
    z = head_sums._whitened(pool, x, weight)
    zeros = head_sums._zeros(pool, heads)
    texts = [
        head_sums._whitened.lower(pool, x, weight).as_text(),
        head_sums._add.lower(*zeros, z, y, weight, heads).as_text(),
    ]
    products = [line for text in texts for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 5 and all("precision = [HIGHEST, HIGHEST]" in line for line in products)
    total, error = head_sums._add(*zeros, z, y, weight, heads)
    assert total.xx.shape == (2, 8, 8) and total.xy[0, 0, 0] == 8 * 4 and not error.xx.any()
