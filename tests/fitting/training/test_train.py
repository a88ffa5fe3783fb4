"""Training: a planted task gets better, steps add up, runs resume exactly, data are read once."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest

import kvx
from kvx.errors import KvxError
from kvx.fitting.checkpoint import save_state
from kvx.fitting.training.data import TrainingData
from kvx.fitting.training.examples import Example, suffix_tokens
from kvx.fitting.training.loss import TrainingLoss
from kvx.mappers import CacheMap, full_head
from kvx.models.model import Model
from kvx.translators import mixture, residual
from tests.evaluation import planted

pytestmark = pytest.mark.usefixtures("quick_compilation")
METHOD = residual(width=4)
ADAM = optax.adam(3e-3)
PLAIN = TrainingLoss()
EVERYTHING = TrainingLoss(suffix=1.0, gain=0.5, distil=0.5, cache=0.1, sensitivity=True, correction=0.1)


@dataclasses.dataclass(frozen=True)
class Toy:
    """Letter counters whose caches differ by a rotation, a map that was shrunk far too much, and texts."""

    source: Model
    target: Model
    start: CacheMap
    data: TrainingData
    held: TrainingData

    def read(self, examples: list[Example], **how) -> TrainingData:
        return kvx.training_data(self.source, self.target, examples, self.start, progress=False, batch_size=8, **how)


def texts(count: int, seed: int) -> list[Example]:
    """Contexts of twenty letters, each with six more of the same four."""
    rng = np.random.default_rng(seed)
    found = [planted._letters(rng, 26, [0.25] * 4)[0] for _ in range(count)]
    return [Example(text[:20], text[20:]) for text in found]


@pytest.fixture(scope="module")
def toy() -> Toy:
    source, target = planted.letter_counter(seed=1), planted.letter_counter()
    fitted = [example.context + example.suffix for example in texts(12, seed=5)]
    pairs = kvx.pairs(source, target, fitted, max_length=64, join=False)
    start, _ = kvx.fit(full_head(layers=1, ridge=3.0), pairs, held_out=0, progress=False)
    bare = Toy(source, target, start, None, None)  # type: ignore[arg-type]
    return dataclasses.replace(bare, data=bare.read(texts(32, 0)), held=bare.read(texts(8, 1), held_out=True))


def train(toy: Toy, data: TrainingData | None = None, **settings):
    how = {"steps": 4, "batch_size": 8, "optimizer": ADAM, "loss": PLAIN, "progress": False, **settings}
    return kvx.train(METHOD, toy.start, data or toy.data, **how)


def arrays(mapper: CacheMap) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(mapper.params)]


def test_training_beats_the_closed_form_on_held_out_text(toy: Toy, tmp_path) -> None:
    how = {"held_out": toy.held, "steps": 16, "evaluate_every": 8, "folder": tmp_path, "ema": 0.5}
    made, report = train(toy, **how)
    first, best = report.first, report.best
    assert report.best_step > 0 and best["loss"] < first["loss"] - 0.05
    assert best["content"] > first["content"] and best["retained"] > first["retained"]
    assert [row["step"] for row in report.history] == [0, 8, 16] and report.select == ("content", "retained")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 17))
    assert (report.steps, report.examples, report.tokens, report.stopped) == (16, 128, 640, "steps")
    again = kvx.load(kvx.save(tmp_path / "map", made))
    assert again.digest == made.digest and again.method == METHOD and again.prefix_length == 1
    assert len(kvx.handoff(toy.source, toy.target, again, "abcabcabcabc", "ab", max_new_tokens=2).tokens) == 2


def test_2_times_4_is_1_times_8_in_every_term(toy: Toy) -> None:
    data = toy.read(texts(8, 0), loss=EVERYTHING)
    how = {"steps": 1, "loss": EVERYTHING, "optimizer": optax.sgd(1.0)}
    found = [train(toy, data, batch_size=size, accumulate=n, **how)[0] for size, n in ((4, 2), (8, 1))]
    start = arrays(kvx.translators.untrained(METHOD, toy.start, jax.random.key(0), data.sample(64, 8)))
    moved = 0
    for x, y, was in zip(*map(arrays, found), start, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
        moved += int(not np.array_equal(x, was))
    assert moved >= 5  # gates, biases and coefficients of keys and values; what lies behind closed gates waits


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(toy: Toy, tmp_path) -> None:
    how = {"steps": 5, "ema": 0.5, "checkpoint_every": 2, "evaluate_every": 2, "held_out": toy.held, "patience": None}
    whole, told = train(toy, **how)

    def interrupt(what: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(toy, **{**how, "folder": tmp_path, "progress": interrupt})
    with pytest.raises(KvxError, match="--resume"):
        train(toy, **how, folder=tmp_path)
    with pytest.raises(KvxError, match="other run"):
        train(toy, **how, folder=tmp_path, resume=True, seed=1)
    with pytest.raises(KvxError, match="another optimizer"):
        train(toy, **{**how, "optimizer": optax.sgd(0.1)}, folder=tmp_path, resume=True)
    parts, again = train(toy, **how, folder=tmp_path, resume=True)
    for x, y in zip(arrays(whole), arrays(parts), strict=True):
        np.testing.assert_array_equal(x, y)
    assert again.history == told.history and (again.examples, again.tokens) == (told.examples, told.tokens)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and steps.count(3) == 1


def test_runs_end_by_minutes_and_patience_and_keep_the_best(toy: Toy) -> None:
    made, report = train(toy, held_out=toy.held, minutes=0.0)
    assert (report.stopped, report.steps) == ("minutes", 1) and len(report.history) == 2
    worse = {"optimizer": optax.sgd(-30.0), "evaluate_every": 1, "patience": 2, "held_out": toy.held}
    made, report = train(toy, **worse, select=("loss",))
    assert (report.stopped, report.steps, report.best_step) == ("patience", 2, 0)
    cache, aligned = toy.data.sample(1, 1)[0]
    for x, y in zip(*(kvx.translate(m, cache, aligned).groups for m in (made, toy.start)), strict=True):
        np.testing.assert_array_equal(x.k, y.k)


def test_frozen_coefficients_stay_and_types_are_as_asked(toy: Toy) -> None:
    frozen = residual(width=4, frozen=True)
    how = {"steps": 2, "batch_size": 8, "loss": PLAIN, "compute": "bfloat16", "kept": "bfloat16", "progress": False}
    made, report = kvx.train(frozen, toy.start, toy.data, **how)
    sample = toy.data.sample(64, 8)
    closed = kvx.translators.untrained(frozen, toy.start, jax.random.key(0), sample).params.branches[0]
    ours = made.params.branches[0].outputs[1]
    np.testing.assert_array_equal(ours.coefficients, closed.outputs[1].coefficients)
    assert (ours.gate != 0).any() and ours.gate.dtype == np.float32
    assert ours.down.dtype == jax.numpy.bfloat16 and report.select == ()


def test_a_mixture_trains_with_its_replay_and_tells_its_experts(toy: Toy, tmp_path) -> None:
    loss = TrainingLoss(correction=1.0)
    data = toy.read(texts(8, 0), loss=loss)
    how = {"steps": 2, "batch_size": 8, "optimizer": ADAM, "held_out": toy.held, "folder": tmp_path, "progress": False}
    made, report = kvx.train(mixture(width=4, balance=0.5), toy.start, data, **how)
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()[1:3])
    assert first["balance"] > 0 and first["correction"] < 1e-6  # one layer: what it makes itself is native
    assert second["suffix"] < first["suffix"] and "experts translate" in report.summary
    shares = report.to_json()["extra"]["experts"]
    assert [len(rows[0]) for rows in shares.values()] == [2, 2]
    np.testing.assert_allclose([np.sum(rows) for rows in shares.values()], 1.0, rtol=1e-5)
    assert kvx.load(kvx.save(tmp_path / "map", made)).digest == made.digest
    with pytest.raises(KvxError, match="window"):
        train(toy, data, loss=TrainingLoss(correction=1.0, injection=(0, 2)))
    with pytest.raises(KvxError, match="correction"):
        train(toy, loss=loss)


def test_a_window_search_trains_a_proxy_for_each_window(toy: Toy) -> None:
    how = {"steps": 1, "batch_size": 8, "optimizer": ADAM, "progress": False}
    found = kvx.search_window(mixture(experts=1, width=4), toy.start, toy.data, toy.held, **how)
    assert found.window == (0, 1) and list(found.tried) == [(0, 1)]
    _, report = kvx.train(mixture(experts=1, width=4), toy.start, toy.data, held_out=toy.held, **how)
    assert found.loss == pytest.approx(report.history[-1]["loss"], rel=1e-5)


def test_pairs_are_fitted_first(toy: Toy) -> None:
    passages = [example.context + example.suffix for example in texts(12, seed=5)]
    pairs = kvx.pairs(toy.source, toy.target, passages, max_length=64, join=False)
    made, report = train(dataclasses.replace(toy, start=pairs), steps=1)
    assert made.params.report and report.data["start"] != toy.start.digest


def test_what_cannot_be_trained_is_refused(toy: Toy, tmp_path) -> None:
    plain = toy.read([Example("abcabc", "abc")])
    for loss, lacks in ((TrainingLoss(gain=1.0), "gain"), (EVERYTHING, "gain, distil, cache, correction, sensitivity")):
        with pytest.raises(KvxError, match=lacks):
            train(toy, plain, loss=loss)
    with pytest.raises(KvxError, match="held_out=True"):
        train(toy, plain, held_out=plain)
    with pytest.raises(KvxError, match="at least 1"):
        train(toy, steps=0)
    with pytest.raises(KvxError, match="not finite"):
        train(toy, optimizer=optax.sgd(float("inf")), steps=2)
    with pytest.raises(KvxError, match="another prefix"):
        train(dataclasses.replace(toy, start=dataclasses.replace(toy.start, prefix=None)))
    other = planted.letter_counter(seed=2)
    with pytest.raises(KvxError, match="other weights"):
        train(toy, dataclasses.replace(toy.data, source=other))
    (tmp_path / "x").mkdir()
    with pytest.raises(KvxError, match="no saved run"):
        save_state(tmp_path / "x", {}, {})


def test_data_are_read_once_and_kept_on_disk(toy: Toy, tmp_path, monkeypatch) -> None:
    examples = [Example("abcabcabc", "abca"), Example("abcabcabc", "cab"), Example("xyz" * 9, "zzz")]
    make = lambda **how: toy.read(examples, folder=tmp_path / "d", dtype="bfloat16", **how)  # noqa: E731
    first = make()
    assert sum(table.rows for table in first.contexts.values()) == 2 and len(first) == 3
    monkeypatch.setattr("kvx.fitting.training.dump.prefill", None)
    second = make()
    for n in range(3):
        for x, y in zip(*(jax.tree.leaves(data.batch([n], 2)) for data in (first, second)), strict=True):
            np.testing.assert_array_equal(x, y)
    with pytest.raises(KvxError, match="other max_length"):
        make(max_length=40)
    (tmp_path / "d" / "index.json").write_text("{")
    with pytest.raises(KvxError, match="damaged"):
        make()


def test_order_is_a_shuffle_by_seed_and_pass(toy: Toy) -> None:
    one, two = (toy.data.order(3, 0, epoch) for epoch in (0, 1))
    assert sorted(n for rows in one for n in rows) == list(range(32)) and one != two
    assert one == toy.data.order(3, 0, 0) != toy.data.order(3, 1, 0)
    stream = toy.data.stream(3, 0, first=len(one))
    assert [next(stream) for _ in two] == two


def test_scored_tokens_are_those_of_the_ranges() -> None:
    tokenizer = planted.tokenizer()
    made = suffix_tokens(Example("c", "ab:cd", ((3, 5),)), tokenizer)
    assert tokenizer.decode(made.targets) == "cd" and made.where.tolist() == [2, 3]
    assert suffix_tokens(Example("c", "abc"), tokenizer).where.tolist() == [0, 1]
    for example, says in ((Example("c", "a"), "no token to score"), (Example("c", "ab", ((1, 9),)), "not inside")):
        with pytest.raises(KvxError, match=says):
            suffix_tokens(example, tokenizer)
