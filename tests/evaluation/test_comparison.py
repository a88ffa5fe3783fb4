"""Several maps on the same items: each as if measured alone, and paired differences between them."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

import kvx
from kvx.errors import KvxError
from kvx.evaluation.comparison import Comparison, apply_seconds, evaluate_maps
from kvx.evaluation.evaluate import evaluate
from kvx.evaluation.metrics import Bootstrap
from kvx.fitting.synthetic import toy_pairs
from kvx.mappers import full_head, low_rank
from kvx.translators import trunk, untrained
from tests.evaluation import planted

QUIET = {"progress": False, "batch_size": 8, "max_new_tokens": 4, "bootstrap": Bootstrap(1000)}


@pytest.fixture(scope="module")
def models():
    return planted.letter_counter(1), planted.letter_counter(2, adds_bos=False)


@pytest.fixture(scope="module")
def maps(models):
    texts = [item.text for item in planted.items(60, seed=9)]
    pairs = kvx.pairs(*models, texts, max_length=64)
    methods = {"good": full_head(layers=1, ridge=1e-6), "shrunk": full_head(layers=1, ridge=30.0)}
    return {name: kvx.fit(method, pairs, progress=False)[0] for name, method in methods.items()}


@pytest.fixture(scope="module")
def items():
    return [*planted.items(), *planted.questions()]


@pytest.fixture(scope="module")
def found(models, maps, items) -> Comparison:
    return evaluate_maps(*models, maps, items, build_s={"good": 1.5}, apply_tokens=64, **QUIET)


def test_further_maps_get_the_figures_they_get_alone(models, maps, items, found: Comparison):
    alone = evaluate(*models, maps["shrunk"], items, latency=False, **QUIET)
    beside = found.results["shrunk"]
    assert set(beside.loss.nats) == {"native", "native_mismatched", "none", "translated", "mismatched"}
    for arm, nats in beside.loss.nats.items():
        np.testing.assert_allclose(nats, alone.loss.nats[arm], atol=1e-6)
    for arm, texts in beside.answer.texts.items():
        assert texts == alone.answer.texts[arm]
    assert beside.content == alone.content and beside.retained == alone.retained
    assert beside.cosine.mean() == pytest.approx(alone.cosine.mean(), abs=1e-6)
    assert beside.verdict.decision == alone.verdict.decision == "reprefill"


def test_differences_are_paired_and_signed(found: Comparison):
    worse = found.difference("shrunk")
    assert worse["content"].high < 0 and worse["retained"].high < 0
    shares = [found.results[name].content.value for name in ("shrunk", "good")]
    assert worse["content"].value == pytest.approx(shares[0] - shares[1])
    assert found.difference("good", than="shrunk")["content"].value == pytest.approx(-worse["content"].value)
    assert found.difference("good")["content"].value == 0.0


def test_table_and_json_tell_what_a_map_costs(maps, found: Comparison):
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["reference"] == "good"
    assert plain["maps"]["good"]["bytes"] == maps["good"].size
    assert plain["maps"]["good"]["build_s"] == 1.5 and plain["maps"]["shrunk"]["build_s"] is None
    assert plain["maps"]["shrunk"]["difference"]["content"]["value"] < 0
    assert plain["maps"]["good"]["apply_ms"] > 0 and plain["maps"]["good"]["tokens"] == 64
    assert found.row("shrunk")[0] == "shrunk" and found.row("good")[3] == "-"
    assert found.table().row_count == 2 and "<td>shrunk</td>" in found._repr_html_()


def test_maps_that_read_embeddings_are_timed_like_any_other():
    toy = toy_pairs(embedding_dim=4)
    mapper, _ = kvx.fit(low_rank(rank=8, embeddings=2), toy, progress=False)
    assert apply_seconds(mapper, 8, repeats=1) > 0
    again = untrained(trunk(width=8), mapper, jax.random.key(0))
    assert apply_seconds(again, 8, repeats=1) > 0


def test_one_map_or_maps_of_other_prefixes_are_refused(models, maps, items):
    with pytest.raises(KvxError, match="at least two"):
        evaluate_maps(*models, {"good": maps["good"]}, items, **QUIET)
    causal = kvx.pairs(*models, [i.text for i in planted.items(20, seed=3)], max_length=64, rule="causal")
    other = kvx.fit(full_head(layers=1, ridge=1e-3), causal, progress=False)[0]
    with pytest.raises(KvxError, match="map 2 aligns by 'causal'"):
        evaluate_maps(*models, {**maps, "causal": other}, items, **QUIET)
    with pytest.raises(KvxError, match="cannot be timed"):
        apply_seconds(kvx.identity(), 8)
