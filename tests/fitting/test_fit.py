"""The fit: splitting, block packing, one compile, equal results however the rows arrive."""

from __future__ import annotations

import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import kvx
from kvx.errors import KvxError
from kvx.fitting.blocks import RowBlocks
from kvx.fitting.normal import Normals
from kvx.fitting.regress import regress
from kvx.fitting.stream import is_held_out
from kvx.fitting.synthetic import SOURCE, TARGET, toy_pairs
from kvx.mappers import full_head
from kvx.mappers.base import Entry


def test_the_split_holds_its_share_and_starts_early() -> None:
    for share in (0.05, 0.1, 0.25, 0.5):
        held = [is_held_out(n, share) for n in range(1000)]
        assert not held[0]
        assert held[1]
        assert abs(np.mean(held) - share) < 0.002
    assert not any(is_held_out(n, 0.0) for n in range(100))


def test_rows_are_packed_once_each_and_in_order() -> None:
    rng = np.random.default_rng(0)
    blocks, seen = RowBlocks(7), []
    wanted = []
    for n in (3, 20, 1, 7, 0, 5):
        x = jnp.asarray(rng.normal(size=(n + 2, 2)), jnp.float32)
        weight = jnp.asarray(np.r_[0.0, rng.uniform(0.5, 1, n), 0.0], jnp.float32)
        wanted.append(np.asarray(x)[1:-1])
        seen += [np.asarray(b.x)[np.asarray(b.weight) > 0] for b in blocks.add(x, x, weight)]
        assert all(len(s) == 7 for s in seen)
    seen += [np.asarray(b.x)[np.asarray(b.weight) > 0] for b in blocks.rest()]
    np.testing.assert_array_equal(np.concatenate(seen), np.concatenate(wanted))
    assert not list(blocks.rest())


def test_results_do_not_depend_on_how_rows_arrive() -> None:
    one = dataclasses.replace(full_head(layers=2, ridge=1e-2))
    maps = [
        kvx.fit(one, toy_pairs(reads=2, noise=0.3, batches=6), rows=rows, held_out=0.0, progress=False)[0]
        for rows in (16, 100, 4096)
    ]
    batch = next(iter(toy_pairs(reads=2)))
    first, *others = [kvx.translate(m, batch.source, batch.alignment).keys(1) for m in maps]
    for other in others:
        np.testing.assert_allclose(other, first, atol=2e-4)


def test_the_last_fit_includes_the_held_out_rows() -> None:
    pairs = toy_pairs(noise=0.5)
    chosen, report = kvx.fit(full_head(layers=1, ridge=1e-2), pairs, held_out=0.25, progress=False)
    whole, _ = kvx.fit(full_head(layers=1, ridge=1e-2), pairs, held_out=0.0, progress=False)
    np.testing.assert_allclose(chosen.params.keys[0].coefficients, whole.params.keys[0].coefficients, atol=1e-4)
    assert report.rows == 8 * 56
    assert (report.sequences, report.held_out_sequences, report.held_out_rows) == (32, 8, 8 * 14)


def test_the_report_prints_and_turns_into_json() -> None:
    _, report = kvx.fit(full_head(layers=2), toy_pairs(), progress=False)
    console = Console(width=160, file=io.StringIO())
    console.print(report)
    text = console.file.getvalue()
    assert "target layer" in text and "held-out R2" in text
    assert "condition" in text and f"{report.condition:.0e}" in text and 1.0 < report.condition < 1e6
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["entries"][0]["source_layers"] == [0, 1]
    assert plain["rows"] == report.rows
    assert "448 tokens of 32 sequences" in str(report)


def test_the_map_knows_what_it_was_fitted_on() -> None:
    pairs = toy_pairs()
    mapper, report = kvx.fit(full_head(layers=1, ridge=1e-2), pairs, progress=False)
    assert mapper.provenance["pairs"] == pairs.digest == report.pairs
    assert mapper.digest == mapper.provenance["digest"]
    assert jax.tree.map(lambda x: x, mapper).digest == mapper.digest  # computed anew once the record is lost
    assert pairs.digest != toy_pairs(seed=1).digest
    assert "MB" in repr(mapper)


def test_progress_is_told_and_ends() -> None:
    told = []
    kvx.fit(full_head(layers=1), toy_pairs(), progress=lambda *facts: told.append(facts))
    assert [facts[1] for facts in told if facts[2] == 100][-1] == 100
    assert told[-1][1:] == (4, 4)  # entries solved


def test_nothing_to_fit_is_said() -> None:
    empty = dataclasses.replace(toy_pairs(), batches=lambda report: iter(()))
    with pytest.raises(KvxError, match="gave no token"):
        kvx.fit(full_head(layers=1), empty, progress=False)
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(KvxError, match="held_out is"):
            kvx.fit(full_head(layers=1), toy_pairs(), held_out=share, progress=False)


def gathered(pairs):
    from kvx.fitting.fit import _Gathered
    from kvx.fitting.plan import Plan

    found = _Gathered(Plan.of(pairs.source, pairs.target), 64, 0.25)
    found.read(pairs, lambda what, done, total: None)
    return found.moments()


def test_an_entry_of_one_head_matches_its_own_regression() -> None:
    """Parts of layers (one head's keys and values) and single target heads: what head-matched maps need."""
    two_heads = dataclasses.replace(TARGET.layers[0], kv_heads=2)
    target = dataclasses.replace(TARGET, layers=(two_heads, two_heads))
    pairs = toy_pairs(SOURCE, target, reads=3, noise=0.2)
    moments, held = gathered(pairs)
    parts = ((0, 4, 8), (2, 0, 4), (2, 12, 16))
    entry = Entry(1, 1, (1, 2), 6, parts)
    (fitted,) = regress(moments, held, [entry], [1e-3])
    x, y = [], []
    for batch in pairs:
        keep = np.asarray(batch.weight).ravel() > 0
        k, v = ([np.asarray(side(i)) for i in range(3)] for side in (batch.source.keys, batch.source.values))
        rows = np.concatenate([k[0][:, 1], k[2][:, 0], v[2][:, 1]], axis=-1)
        x.append(rows.reshape(-1, 12)[keep])
        y.append(np.asarray(batch.target.values(1))[:, 1].reshape(-1, 6)[keep])
    x, y = np.concatenate(x).astype(np.float64), np.concatenate(y).astype(np.float64)
    xc, yc = x - x.mean(axis=0), y - y.mean(axis=0)
    gram = xc.T @ xc
    wanted = np.linalg.solve(gram + 1e-3 * np.diag(np.diag(gram)), xc.T @ yc)
    np.testing.assert_allclose(fitted.coefficients, wanted, atol=1e-5)
    np.testing.assert_allclose(fitted.center, x.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(fitted.mean, y.mean(axis=0), atol=1e-4)
    np.testing.assert_allclose(fitted.covariance[0], np.cov((xc @ wanted).T, bias=True), atol=1e-4)
    assert fitted.report.r2_fit == pytest.approx(1 - ((yc - xc @ wanted) ** 2).sum() / (yc**2).sum(), abs=1e-4)
    assert len(fitted.report.r2_held_out) == 1


def test_case_4_a_fit_that_cannot_be_solved_names_layer_and_heads() -> None:
    """Two source layers whose Gram is [[1, 2], [2, 1]] in blocks: an error that says where, never NaN."""
    moments, held = gathered(toy_pairs())
    own, joint, last = moments.total.xx
    joint = joint.at[:, :16].set(2 * moments.total.weight * jnp.eye(16))
    broken = dataclasses.replace(moments, total=dataclasses.replace(moments.total, xx=(own, joint, last)))
    entry = Entry(1, 0, (0, 1), 6, ((0, 0, 16), (1, 0, 16)))
    for ridges, aside in (([1e-3], None), ([1e-3, 1e-2], held)):
        with pytest.raises(KvxError, match="target layer 1, head 0, keys.*not positive definite"):
            regress(broken, aside, [entry], ridges)


def test_held_out_scores_match_a_direct_count() -> None:
    pairs = toy_pairs(reads=3, noise=1.0)
    moments, held = gathered(pairs)
    entry = Entry(0, 0, (0, 1), 6, ((1, 0, 16),))
    score = moments.scores(held, [entry], 1e-2)[0]
    train, other = Normals(moments), Normals(held)
    w = train.factor(((1, 0, 16),), 1e-2).solve(train.cross((1,), 0, 0)).coefficients
    errors, total, rows, n = 0.0, 0.0, [], 0
    for batch in pairs:
        for b in range(4):
            if is_held_out(n, 0.25):
                x = np.concatenate(
                    [
                        np.moveaxis(np.asarray(s(1))[b], 0, 1).reshape(16, -1)
                        for s in (batch.source.keys, batch.source.values)
                    ],
                    axis=1,
                )
                y = np.asarray(batch.target.keys(0))[b, 0]
                rows.append((x[:14], y[:14]))
            n += 1
    x, y = (np.concatenate(side).astype(np.float64) for side in zip(*rows, strict=True))
    predicted = train.output_mean(0, 0) + (x - train.mean((1,))) @ w
    errors, total = ((y - predicted) ** 2).sum(), ((y - y.mean(axis=0)) ** 2).sum()
    assert score[0] == pytest.approx(1 - errors / total, abs=1e-4)
    assert other.rows == len(x)


def test_wide_systems_choose_their_ridge_on_a_sketch(monkeypatch) -> None:
    from kvx.fitting import regress as module

    pairs = toy_pairs(SOURCE, TARGET, reads=2, noise=0.5)
    moments, held = gathered(pairs)
    entries = [Entry(0, 0, (0, 1), 6, ((0, 0, 16), (1, 0, 16)))]
    exact = regress(moments, held, entries)[0].report
    monkeypatch.setattr(module, "SKETCH_FROM", 0)
    monkeypatch.setattr(module, "SKETCH", 5)
    rough = regress(moments, held, entries)[0].report
    assert rough.r2_held_out[0] == pytest.approx(np.mean(exact.r2_held_out), abs=0.1)


def test_fitting_traces_the_products_once() -> None:
    from kvx.fitting import moments as module

    pairs = toy_pairs(batches=10)
    kvx.fit(full_head(layers=1, ridge=0.1), pairs, rows=32, progress=False)
    before = module._fold._cache_size()
    kvx.fit(full_head(layers=1, ridge=0.2), pairs, rows=32, progress=False)
    assert module._fold._cache_size() == before
