"""The low-rank map: the best of its rank, equal to the full solution at full rank; what embeddings add to it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvx
from kvx.errors import KvxError
from kvx.evaluation.items import Question
from kvx.evaluation.scorer import answer_scorer
from kvx.fitting.moments import start
from kvx.fitting.pairs import rows_of
from kvx.fitting.plan import Plan
from kvx.fitting.synthetic import SOURCE, TARGET, toy_pairs
from kvx.fitting.training.examples import Example
from kvx.mappers import full_head, low_rank
from kvx.mappers.low_rank import _leading
from kvx.models.embeddings import token_embeddings
from kvx.models.random_model import byte_model

FEATURES = 48  # of the toy source
TEXT = "Ann lives in Rome, and Bob in Oslo. " * 20


def _rows(pairs):
    rows = [[np.asarray(a, np.float64) for a in rows_of(batch)] for batch in pairs]
    x, y, weight = (np.concatenate(column) for column in zip(*rows, strict=True))
    return x[weight > 0], y[weight > 0]


def _moved(mapper, batch) -> np.ndarray:
    moved = kvx.translate(dataclasses.replace(mapper, prefix=None), batch.source, batch.alignment)
    return np.concatenate([np.asarray(side(i)) for i in range(2) for side in (moved.keys, moved.values)], axis=-1)


def test_at_full_rank_it_is_the_full_solution() -> None:
    pairs = toy_pairs(reads=3, noise=0.5)
    ours, theirs = (
        kvx.fit(m, pairs, progress=False)[0] for m in (low_rank(24, ridge=0.1), full_head("all", ridge=0.1))
    )
    batch = next(iter(pairs))
    np.testing.assert_allclose(_moved(ours, batch), _moved(theirs, batch), atol=2e-4)
    assert ours.params.reads.weight.shape == (FEATURES, 24) and ours.params.rank == 24


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_no_map_of_its_rank_is_closer_to_the_regression(rank: int) -> None:
    """Against the truncated singular value decomposition of the fitted rows, outputs in units of their deviations."""
    pairs = toy_pairs(reads=3, noise=0.5)
    params = kvx.fit(low_rank(rank, ridge=1e-6), pairs, held_out=0.0, progress=False)[0].params
    x, y = _rows(pairs)
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    fitted = x @ np.linalg.lstsq(x, y, rcond=None)[0]
    sides = np.split(fitted, 4, axis=1)  # layer 0 keys, values, layer 1 keys, values: one head each
    units = np.repeat([1 / np.sqrt(np.square(side).mean()) for side in sides], 6)
    left, size, right = np.linalg.svd(fitted * units, full_matrices=False)
    best = (left[:, :rank] * size[:rank]) @ right[:rank]
    state = x @ np.asarray(params.reads.weight, np.float64)
    np.testing.assert_allclose(np.cov(state.T, bias=True).reshape(rank, rank), np.eye(rank), atol=2e-3)
    ups = {(layer, w.component): np.asarray(w.up[i][:, 0]) for w in params.writes for i, layer in enumerate(w.layers)}
    made = np.concatenate([state @ ups[layer, component] for layer in (0, 1) for component in (0, 1)], axis=1)
    np.testing.assert_allclose(made * units, best, atol=2e-3 * np.abs(best).max())


def test_its_report_tells_what_the_lower_rank_explains() -> None:
    pairs = toy_pairs(reads=3, noise=0.5)
    mapper, report = kvx.fit(low_rank(3, ridge=1e-6), pairs, held_out=0.0, progress=False)
    x, y = _rows(pairs)
    batches = [_moved(mapper, b)[:, 0][np.asarray(b.weight) > 0] for b in pairs]
    error = np.square(np.concatenate(batches) - y).sum(axis=0)
    total = np.square(y - y.mean(axis=0)).sum(axis=0)
    for n, entry in enumerate(report.entries):
        columns = slice(6 * n, 6 * n + 6)
        assert entry.r2_fit == pytest.approx(1 - error[columns].sum() / total[columns].sum(), abs=1e-3)


def test_leading_directions_by_random_iteration_are_the_singular_vectors() -> None:
    rng = np.random.default_rng(0)
    left = np.linalg.qr(rng.normal(size=(400, 400)))[0]
    right = np.linalg.qr(rng.normal(size=(450, 400)))[0]
    matrix = (left * 0.9 ** np.arange(400)) @ right.T
    found = _leading(matrix, 16)  # 2 (16 + 64) < 400: iterated, not decomposed
    assert np.linalg.norm(left[:, :16].T @ found, 2) <= 1 + 1e-9
    np.testing.assert_allclose(np.abs(np.diag(left[:, :16].T @ found)), 1, atol=1e-3)


def test_features_that_do_not_vary_are_left_out() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, FEATURES))
    x[:, 5] = 2.0
    y = x @ rng.normal(size=(FEATURES, 24))
    moments = start(Plan.of(SOURCE, TARGET), jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32))
    params = low_rank(24, ridge=1e-6).fit(moments)
    made = np.concatenate([np.asarray(w.up[i][:, 0]) for i in (0, 1) for w in params.writes], axis=1)
    weight = np.asarray(params.reads.weight)
    assert np.isfinite(weight).all() and np.isfinite(made).all()
    np.testing.assert_allclose((x - x.mean(axis=0)) @ weight @ made, y - y.mean(axis=0), atol=2e-2)


def test_layers_are_spread_over_the_depth_and_read_in_order() -> None:
    assert low_rank(4, layers=2).reach(SOURCE, TARGET) == ((0, 2),) * 2
    assert low_rank(4, layers=9).reach(SOURCE, TARGET) == ((0, 1, 2),) * 2
    mapper = kvx.fit(low_rank(4, layers=2, ridge=0.1), toy_pairs(), progress=False)[0]
    batch = next(iter(toy_pairs()))
    group = batch.source.groups[0]
    other = dataclasses.replace(batch.source, groups=(dataclasses.replace(group, k=group.k.at[1].set(7.0)),))
    np.testing.assert_array_equal(_moved(mapper, batch), _moved(mapper, dataclasses.replace(batch, source=other)))


def test_embeddings_of_the_token_before_are_recovered_and_its_own_do_not_tell_them() -> None:
    pairs = toy_pairs(embedding_dim=5)

    def keys(count: int) -> float:
        report = kvx.fit(low_rank(40, embeddings=count, ridge=1e-6), pairs, progress=False)[1]
        return next(e.r2_held_out[0] for e in report.entries if (e.target, e.component) == (0, "keys"))

    assert keys(2) > 0.999 and keys(3) > 0.999
    assert keys(1) < 0.9 and keys(0) < 0.9


def test_without_source_layers_only_embeddings_are_read() -> None:
    mapper = kvx.fit(low_rank(10, layers=0, embeddings=2, ridge=1e-3), toy_pairs(embedding_dim=5), progress=False)[0]
    batch = next(iter(toy_pairs(embedding_dim=5)))
    assert mapper.params.reads.layers == () and mapper.params.reads.weight.shape[0] == 10
    louder = dataclasses.replace(batch, source=jax.tree.map(lambda x: x, batch.source))
    group = louder.source.groups[0]
    louder = dataclasses.replace(
        louder, source=dataclasses.replace(louder.source, groups=(dataclasses.replace(group, k=3 * group.k),))
    )
    np.testing.assert_array_equal(_moved(mapper, batch), _moved(mapper, louder))
    other = batch.alignment.embeddings.at[:, 3].add(1.0)
    changed = dataclasses.replace(batch, alignment=dataclasses.replace(batch.alignment, embeddings=other))
    moved = np.abs(_moved(mapper, changed) - _moved(mapper, batch)).max(axis=(0, 1, 3))
    assert (moved[:3] == 0).all() and (moved[3:5] > 0).all() and (moved[5:] == 0).all()


def test_the_target_table_is_looked_up_for_each_of_its_tokens() -> None:
    model = byte_model(2, seed=3)
    made = kvx.align(byte_model(), model, ["ab", "c"], length=4, embed=True)
    table = np.asarray(model.params["embed"], np.float64)
    ids = model.tokenizer.encode("ab", bos=False).ids
    rows = table[ids] / np.sqrt(np.square(table[ids]).mean(axis=1, keepdims=True))
    np.testing.assert_allclose(made.embeddings[0, :2], rows, rtol=1e-5)
    assert (np.asarray(made.embeddings)[0, 2:] == 0).all() and (np.asarray(made.embeddings)[1, 1:] == 0).all()
    assert kvx.align(byte_model(), model, "ab").embeddings is None
    with pytest.raises(KvxError, match="a tokenizer has no embeddings"):
        kvx.align(byte_model(), model.tokenizer, "ab", embed=True)
    bf16 = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
    assert token_embeddings(bf16, jnp.array([[1, -1]])).dtype == jnp.float32


def _pair():
    source, target = byte_model(2), byte_model(3, seed=1)
    pairs = kvx.pairs(source, target, TEXT, max_length=64)
    return source, target, kvx.fit(low_rank(12, embeddings=3, ridge=0.1), pairs, held_out=0, progress=False)[0]


def test_every_way_from_text_to_an_answer_looks_embeddings_up() -> None:
    source, target, mapper = _pair()
    assert mapper.reads_embeddings and not mapper.reads_target
    said = kvx.handoff(source, target, mapper, "Ann lives in Rome.", "\nWhere?", max_new_tokens=4)
    cache = kvx.prefill(source, source.encode("Ann lives in Rome.").tokens, keep="all")
    moved = kvx.translate(mapper, cache, kvx.align(source, target, "Ann lives in Rome.", embed=True))
    out = kvx.generate(target, target.tokenizer.encode("\nWhere?", bos=False).tokens, moved, max_new_tokens=4)
    assert list(said.tokens) == np.asarray(out.tokens)[0, : int(out.lengths[0])].tolist()
    asked = [Question("Ann is in Rome.", "who", ("Ann",)), Question("Bob is in Bonn.", "who", ("Bob",))]
    assert set(answer_scorer(source, target, asked, max_new_tokens=2)(mapper)) == {"f1"}
    items = [kvx.evaluation.items.Item(TEXT[n : n + 40], TEXT[n + 40 : n + 60]) for n in (0, 9, 17)]
    result = kvx.evaluate(source, target, mapper, items, progress=False)
    assert np.isfinite(list(result.to_json()["loss"].values())).all()


def test_training_data_keeps_embeddings_for_maps_that_read_them(tmp_path) -> None:
    source, target, mapper = _pair()
    examples = [Example("Ann lives in Rome.", " She likes it."), Example("Bob lives in Oslo.", " It is cold.")]
    kept = {"folder": tmp_path, "dtype": "bfloat16", "progress": False}
    data = kvx.training_data(source, target, examples, mapper, **kept)
    held = data.batch([0]).alignment.embeddings
    expected = kvx.align(source, target, examples[0].context, embed=True).embeddings
    assert held.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(held[0, :18], np.float32), expected[0, :18], rtol=1e-2)
    trained, _ = kvx.train(
        kvx.translators.trunk(width=4, heads=1, head_dim=4), mapper, data, steps=2, batch_size=2, progress=False
    )
    assert trained.reads_embeddings
    plain = kvx.fit(full_head(1, ridge=0.1), kvx.pairs(source, target, TEXT, max_length=64), held_out=0, progress=False)
    assert kvx.training_data(source, target, examples, plain[0], progress=False).batch([0]).alignment.embeddings is None


def test_bad_settings_and_missing_embeddings_are_refused() -> None:
    for settings in ({"rank": 0}, {"embeddings": -1}, {"rank": 1.5}, {"layers": 0}, {"layers": -1}):
        with pytest.raises(KvxError):
            low_rank(**settings)
    with pytest.raises(KvxError, match="hold no embeddings"):
        kvx.fit(low_rank(4, embeddings=1), toy_pairs(), progress=False)
    mapper = kvx.fit(low_rank(4, embeddings=1, ridge=0.1), toy_pairs(embedding_dim=4), progress=False)[0]
    batch = next(iter(toy_pairs()))
    with pytest.raises(KvxError, match=r"embed=True"):
        kvx.translate(mapper, batch.source, batch.alignment)
    wider = dataclasses.replace(batch.alignment, embeddings=jnp.zeros((4, 16, 7)))
    with pytest.raises(KvxError, match="7 channels, this map reads 4"):
        kvx.translate(mapper, batch.source, wider)
    back = kvx.fit(full_head(1, ridge=0.1), toy_pairs(source=TARGET, target=SOURCE), progress=False)[0]
    with pytest.raises(KvxError, match="map 0 .* reads embeddings"):
        kvx.chain(mapper, back)
    assert kvx.chain(back, kvx.fit(low_rank(4, embeddings=1, ridge=0.1), toy_pairs(embedding_dim=4), progress=False)[0])
