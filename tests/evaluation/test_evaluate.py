"""Whole evaluations of planted models whose right answers are known."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

import kvx
from kvx.errors import KvxError
from kvx.evaluation.answers import load_template
from kvx.evaluation.evaluate import evaluate
from kvx.evaluation.items import Item, Question
from kvx.evaluation.metrics import Bootstrap, benefit_retained, content_carried
from kvx.evaluation.report import ARMS, SOURCE_ALONE, Evaluation, compare
from kvx.mappers import constant, full_head, random
from kvx.models.random_model import random_model
from tests.cases import MODELS
from tests.evaluation import planted

QUIET = {"progress": False, "latency": False, "batch_size": 8, "max_new_tokens": 4, "bootstrap": Bootstrap(1000)}


@pytest.fixture(scope="module")
def models():
    return planted.letter_counter(1), planted.letter_counter(2, adds_bos=False)


@pytest.fixture(scope="module")
def mapper(models):
    source, target = models
    texts = [item.text for item in planted.items(60, seed=9)]
    return kvx.fit(full_head(layers=1, ridge=1e-6), kvx.pairs(source, target, texts, max_length=64), progress=False)[0]


@pytest.fixture(scope="module")
def fitted(models, mapper) -> Evaluation:
    return evaluate(*models, mapper, [*planted.items(), *planted.questions()], **{**QUIET, "latency": True})


@pytest.fixture(scope="module")
def same() -> Evaluation:
    model = planted.letter_counter(1)
    return evaluate(model, model, kvx.identity(), [*planted.items(), *planted.questions()], **QUIET)


def test_the_identity_on_one_model_carries_everything(same: Evaluation):
    for figure in (same.content, same.retained, same.answers):
        assert figure.value == pytest.approx(1.0, abs=1e-4)
        assert figure.high - figure.low < 1e-3, "pairing leaves no spread"
    for arm, native in (("translated", "native"), ("mismatched", "native_mismatched")):
        np.testing.assert_allclose(same.loss.nats[arm], same.loss.nats[native], atol=1e-4)
        assert same.answer.texts[arm] == same.answer.texts[native]
    assert same.cosine.mean("translated") == pytest.approx(1.0, abs=1e-5)
    assert same.verdict.decision == "use"


def test_planted_effects_are_seen_in_every_arm(same: Evaluation):
    loss = {arm: same.loss.nats[arm].mean() for arm in ARMS}
    assert loss["native"] + 0.5 < loss["none"] < loss["native_mismatched"]
    assert loss["native"] + 0.3 < min(loss["constant"], loss["random"]), "controls carry nothing of the item"
    f1 = {arm: same.answer.f1[arm].mean() for arm in (*ARMS, SOURCE_ALONE)}
    assert f1["native"] == f1["translated"] == f1[SOURCE_ALONE] == 1.0
    assert max(f1[arm] for arm in ("none", "native_mismatched", "mismatched", "constant", "random")) < 0.3


def test_a_fitted_map_between_two_bases_carries_the_content_and_its_controls_do_not(fitted: Evaluation):
    assert fitted.content.low > 0.95 and fitted.retained.low > 0.95 and fitted.answers.low > 0.95
    for arm in ("constant", "random"):
        share = content_carried({**fitted.loss.nats, "mismatched": fitted.loss.nats["constant"]}, arm=arm)
        assert share.value is not None and share.value < 0.2
        assert fitted.answer.f1[arm].mean() < 0.3
    assert fitted.cosine.mean("translated") > 0.99 > fitted.cosine.mean("native_mismatched")
    assert fitted.verdict.reasons


def test_the_constant_map_judged_by_itself_has_content_zero(models, mapper):
    result = evaluate(*models, constant(mapper), planted.items(), **QUIET)
    assert abs(result.content.value) < 0.05
    assert result.verdict.decision == "reprefill" and "content carried" in result.verdict.reasons[0]
    assert benefit_retained(result.loss.nats).value < 0.9


def test_a_map_of_random_coefficients_is_rejected(models, mapper):
    result = evaluate(*models, random(mapper, jax.random.key(5)), [*planted.items(), *planted.questions()], **QUIET)
    assert result.content.high < 0.5 and result.verdict.decision == "reprefill"


def test_source_alone_is_compared_in_nats_per_byte_on_the_same_text(same: Evaluation, fitted: Evaluation):
    rates = same.loss.nats_per_byte
    assert rates[SOURCE_ALONE] == pytest.approx(rates["native"], rel=1e-4), "one model: one rate"
    expected = same.loss.nats["native"].mean()  # one byte a token
    assert rates["native"] == pytest.approx(expected, rel=1e-4)
    assert fitted.loss.nats_per_byte[SOURCE_ALONE] == pytest.approx(fitted.loss.nats_per_byte["native"], rel=0.2)


def test_all_tokens_of_the_continuation_but_the_first_are_scored(same: Evaluation):
    assert same.loss.tokens.tolist() == [5] * 40


def test_order_and_batch_size_do_not_change_an_item(models, mapper):
    items = planted.items(11)
    one = evaluate(*models, mapper, items, **{**QUIET, "cosine": False, "batch_size": 4})
    two = evaluate(*models, mapper, items[::-1], **{**QUIET, "cosine": False, "batch_size": 8})
    for arm in ("native", "none", "translated"):
        np.testing.assert_allclose(one.loss.nats[arm], two.loss.nats[arm][::-1], atol=1e-4)


def test_json_has_the_keys_and_survives_a_round_trip(fitted: Evaluation):
    out = json.loads(json.dumps(fitted.to_json(per_item=True), allow_nan=False))
    for name in ("retained", "content"):
        assert out[f"{name}_low"] <= out[name] <= out[f"{name}_high"]
    assert out["items"] == 40 and out["questions"] == 40
    assert set(out["loss"]) >= {*ARMS, "source_alone_nats_per_byte"} and set(out["f1"]) == {*ARMS, SOURCE_ALONE}
    assert out["verdict"] in ("use", "reprefill", None) and out["seconds"] > 0
    assert len(out["per_item"]["loss"]["native"]) == 40 and len(out["per_item"]["answers"]["native"]) == 40
    hashes = out["hashes"]
    assert {"mapper", "items", "questions", "template", "settings", "source", "target"} <= set(hashes)
    assert all(hashes[name] for name in ("mapper", "items", "questions", "template", "settings"))


def test_latency_is_given_warm_and_cold(fitted: Evaluation):
    row = fitted.latency.rows[-1]
    assert row.cold == pytest.approx(row.warm + row.source_prefill) and row.native > row.boundary > 0
    assert fitted.to_json()["latency"]["rows"][0]["warm_speedup"] > 0


def test_tables_hold_every_arm_and_never_retained_without_content(fitted: Evaluation):
    html = fitted._repr_html_()
    for arm in (*ARMS, SOURCE_ALONE):
        assert arm.replace("_", " ") in html
    assert "content carried" in html and "context benefit retained" in html and "verdict" in html
    assert "content carried" in repr(fitted)


def test_only_passages_or_only_questions(models, mapper):
    losses = evaluate(*models, mapper, planted.items(32), **QUIET)
    assert losses.answer is None and losses.verdict.decision is None and not losses.answers.defined
    assert losses.to_json()["f1"]["native"] is None
    answers = evaluate(*models, mapper, planted.questions(32), **QUIET)
    assert answers.loss is None and not answers.content.defined and answers.to_json()["loss"]["native"] is None
    assert answers.verdict.decision is None
    assert "no passages" in repr(answers) and answers._repr_html_()


def test_case_9_too_few_items_give_no_verdict(models, mapper):
    result = evaluate(*models, mapper, [*planted.items(5), *planted.questions(5)], **QUIET)
    assert result.verdict.decision is None and "fewer than 30" in result.verdict.reasons[0]


def test_results_on_the_same_items_are_compared_and_on_others_refused(models, mapper, fitted: Evaluation):
    worse = evaluate(*models, constant(mapper), [*planted.items(), *planted.questions()], **QUIET)
    found = compare(fitted, worse)
    assert found["loss"].low > 0 and found["content"].low > 0 and found["f1"].low > 0.5
    other = evaluate(*models, mapper, planted.items(32, seed=5), **QUIET)
    with pytest.raises(KvxError, match="items, questions"):
        compare(fitted, other)


def test_progress_is_reported_to_a_function(models, mapper):
    seen: list[tuple[str, int, int]] = []
    options = {**QUIET, "progress": lambda what, done, total: seen.append((what, done, total))}
    evaluate(*models, mapper, planted.items(10), **options)
    assert [row[1:] for row in seen][-1] == (10, 10) and len(seen) == 2


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "at least two"),
        (["text"], "Item or Question"),
        ([Item("same", " ab"), Item("same", " cd")], "different contexts"),
        ([Item("abc", "d"), Item("efg", "hi")], "at least two"),
        ([Question("same", "q", ("a",))], "different contexts"),
    ],
)
def test_items_that_cannot_be_measured_are_refused(models, mapper, items: list, message: str):
    with pytest.raises(KvxError, match=message):
        evaluate(*models, mapper, items, **QUIET)


def test_a_map_of_another_pair_is_refused(models, mapper):
    with pytest.raises(KvxError, match="fitted for"):
        evaluate(planted.letter_counter(7), models[1], mapper, planted.items(), **QUIET)


def test_case_27_a_fresh_turn_boundary_restores_the_format_that_a_mapped_context_loses(models):
    """A delimiter that comes out of a bad map no longer says "answer now"; the same one, natively prefilled, does."""
    source, target = models[0], planted.letter_counter(2, adds_bos=False, marker=80.0)
    texts = [item.text + "\n" for item in planted.items(60, seed=9)]
    pairs = kvx.pairs(source, target, texts, max_length=64, join=False)
    mapper = random(kvx.fit(full_head(layers=1, ridge=1e-6), pairs, progress=False)[0], jax.random.key(1))

    def valid(end_of_context: str, boundary: str) -> float:
        contexts = [item.context + end_of_context for item in planted.items(40, seed=3)]
        cache = kvx.prefill(source, source.tokenizer.encode_batch(contexts))
        moved = kvx.translate(mapper, cache, kvx.align(source, target, contexts))
        tokens = target.tokenizer.encode_batch([boundary] * 40, bos=False)
        said = np.asarray(kvx.generate(target, tokens, moved, max_new_tokens=1).tokens)[:, 0]
        return float((said == planted.PIECES.index("z")).mean())

    assert valid("\n", "?") <= 0.2, "the old delimiter, mapped"
    assert valid("", "\n?") >= 0.78, "a fresh one, natively prefilled"
    assert load_template().boundary("who").startswith("\n"), "evaluations open a fresh turn"


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_windows_shorter_than_the_context_and_learned_positions(family: str):
    """A model handed to itself: nothing changes, past the sliding window and with a fixed table of positions."""
    model = dataclasses.replace(random_model(MODELS[family], stacked=True), tokenizer=planted.tokenizer())
    items = [Item(item.context[:40], item.continuation) for item in planted.items(4)]
    result = evaluate(model, model, kvx.identity(), items, **{**QUIET, "batch_size": 4})
    np.testing.assert_allclose(result.loss.nats["translated"], result.loss.nats["native"], atol=1e-4)
    np.testing.assert_allclose(result.cosine.per_head(), 1.0, atol=1e-4)
