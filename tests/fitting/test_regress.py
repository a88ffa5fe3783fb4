"""Scores of many source blocks at once, and moments read by ranges of features and outputs."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from kvx.cache.geometry import CacheGeometry, LayerGeometry
from kvx.errors import KvxError
from kvx.fitting import normal
from kvx.fitting import regress as module
from kvx.fitting.fit import _Gathered
from kvx.fitting.moments import Moments
from kvx.fitting.normal import Normals
from kvx.fitting.plan import Plan
from kvx.fitting.regress import regress, scores
from kvx.fitting.synthetic import toy_pairs
from kvx.mappers.support import head_entry

SOURCE = CacheGeometry((LayerGeometry(2, 4, 3), LayerGeometry(1, 5, 4)))
TARGET = CacheGeometry((LayerGeometry(3, 4, 2), LayerGeometry(2, 3, 5)))


@functools.cache
def gathered(reach: tuple | None = None, by_head: bool = False) -> tuple[Moments, Moments]:
    pairs = toy_pairs(SOURCE, TARGET, reads=2, noise=0.5)
    found = _Gathered(Plan.of(SOURCE, TARGET, reach, by_head=by_head), 64, 0.25)
    found.read(pairs, lambda what, done, total: None)
    train, held = found.moments()
    assert held is not None
    return train, held


def table(inputs: str) -> list:
    """Every source head on every target layer, component and run of heads, some of them left out."""
    blocks = [(0, 0), (0, 1), (1, 0)]
    entries = [
        head_entry(SOURCE, TARGET, layer, component, heads, [block], inputs)
        for block, layer, component in itertools.product(blocks, (0, 1), (0, 1))
        for heads in ([(0, 2), (1, 3)] if layer == 0 else [(1, 2)])
    ]
    return entries[::2] + entries[1::3]


@pytest.mark.parametrize("inputs", ["both", "same"])
@pytest.mark.parametrize("columns", [1, 7, 8192])
def test_scores_equal_those_of_single_fits(inputs: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    train, held = gathered()
    entries = table(inputs)
    monkeypatch.setattr(module, "COLUMNS", columns)
    for entry, found in zip(entries, scores(train, held, entries, 1e-2), strict=True):
        wanted = regress(train, held, [entry], [1e-2])[0].report.r2_held_out
        np.testing.assert_allclose(found, wanted, atol=1e-10)


def test_ranges_of_moments_are_parts_of_the_whole() -> None:
    both = Normals(*gathered())
    whole = both.cross_columns((0, 1), slice(0, 34))
    assert whole.shape == (23, 34)
    joined = np.concatenate([both.cross((0, 1), target, block) for target in (0, 1) for block in (0, 1)], axis=1)
    np.testing.assert_allclose(whole, joined, atol=1e-12)
    parts = ((0, 4, 8), (0, 6, 11), (1, 0, 9), (1, 6, 7))
    rows = [*range(4, 8), *range(6, 11), *range(14, 23), 20]
    np.testing.assert_allclose(both.cross_columns(parts, slice(5, 29)), whole[rows, 5:29], atol=1e-12)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("shared", [1, 1 << 40], ids=["read from whole layers", "read alone"])
def test_parts_of_a_gram_are_those_of_the_whole(by_head: bool, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normal, "SHARED", shared)
    both, reference = Normals(*gathered(None, by_head)), Normals(*gathered())
    whole = reference.gram((0, 1))
    parts = ((1, 0, 5), (0, 4, 8), (0, 8, 11), (0, 6, 11), (0, 0, 8), (1, 5, 9), (0, 0, 14))
    starts = {0: 0, 1: 14}
    rows = [starts[layer] + n for layer, first, stop in parts for n in range(first, stop)]
    np.testing.assert_allclose(both.gram(parts), whole[np.ix_(rows, rows)], atol=1e-5)
    w = np.random.default_rng(0).normal(size=(len(rows), 3))
    np.testing.assert_allclose(both.times_gram(parts, w), both.gram(parts) @ w, atol=1e-10)


def test_products_that_were_not_gathered_are_named() -> None:
    train, _ = gathered(((0,), (1,)))
    with pytest.raises(KvxError, match="source layer 0 and target layer 1"):
        Normals(train).cross((0,), 1)
    with pytest.raises(KvxError, match="source layer 1 and target layer 0"):
        Normals(train).cross_columns((1,), slice(10, 34))


def test_reports_name_the_heads_and_the_width() -> None:
    train, held = gathered()
    entry = head_entry(SOURCE, TARGET, 1, 0, (1, 2), [(0, 1), (1, 0)], "both")
    report = regress(train, held, [entry], [1e-2])[0].report
    assert (report.source_heads, report.source_layers, report.features) == (((0, 1), (1, 0)), (0, 1), 16)
