"""Methods that read the target's own cache: how it reaches them, their controls, training, and evaluation's arms."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvx
from kvx.cache.join import select_batch
from kvx.cache.ops import rotate_keys
from kvx.commands.train import Train, method_of
from kvx.errors import KvxError
from kvx.evaluation.arms import build, read
from kvx.evaluation.comparison import evaluate_maps
from kvx.evaluation.evaluate import prepare
from kvx.fitting.synthetic import toy_pairs
from kvx.fitting.training.examples import Example
from kvx.mappers import CacheMap, constant, full_head, random
from kvx.mappers.receiver import context_start, receiver_rows
from kvx.pipeline import own_cache
from kvx.translators import beside, fuser, latent_flow, residual, untrained
from kvx.translators.base import with_params
from tests.cases import TRANSLATORS
from tests.contract.test_mappers import batch, fitted
from tests.evaluation import planted

pytestmark = pytest.mark.usefixtures("quick_compilation")
FUSED = [name for name, case in TRANSLATORS.items() if name.startswith(("fuser", "latent_flow"))]
FLOW = latent_flow(width=8)


def test_a_receiver_is_asked_for_by_name_and_refused_where_nothing_reads_it() -> None:
    one, mapper = batch(), fitted("latent_flow")
    with pytest.raises(KvxError, match=r"LatentFlow\(.*pass receiver="):
        kvx.translate(mapper, one.source, one.alignment)
    with pytest.raises(KvxError, match=r"FullHead\(.*leave receiver out"):
        kvx.translate(fitted("full_head"), one.source, one.alignment, receiver=one.target)
    with pytest.raises(KvxError, match="3 layers"):
        kvx.translate(mapper, one.source, one.alignment, receiver=one.source)
    with pytest.raises(KvxError, match="and 1 rows"):
        kvx.translate(mapper, one.source, one.alignment, receiver=select_batch(one.target, [0]))
    with pytest.raises(KvxError, match="no token at position"):
        kvx.translate(dataclasses.replace(mapper, prefix=None), one.source, one.alignment, receiver=one.target)
    with pytest.raises(KvxError, match="which a chain does not have"):
        kvx.chain(fitted("full_head"), dataclasses.replace(mapper, source=mapper.target))


def test_slots_and_rotation_of_the_receiver_do_not_matter() -> None:
    one, mapper = batch(), fitted("fuser")
    plain = kvx.translate(mapper, one.source, one.alignment, receiver=one.target)
    order = np.random.default_rng(0).permutation(one.target.groups[0].slots)
    mixed = dataclasses.replace(
        one.target,
        groups=tuple(
            dataclasses.replace(g, k=g.k[:, :, :, order], v=g.v[:, :, :, order], pos=g.pos[..., order])
            for g in one.target.groups
        ),
    )
    for other in (mixed, rotate_keys(one.target)):
        moved = kvx.translate(mapper, one.source, one.alignment, receiver=other)
        np.testing.assert_allclose(moved.keys(1), plain.keys(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FUSED)
def test_controls_add_the_average_or_noise_of_the_same_size(name: str) -> None:
    mapper = fitted(name)
    sample = [(b.source, b.alignment, _rows(mapper, b)) for b in toy_pairs(batches=4)]
    mapper = with_params(mapper, mapper.method, mapper.method.calibrate(mapper.params, sample))
    made, still, drawn = (_added(m) for m in (mapper, constant(mapper), random(mapper, jax.random.key(3))))
    assert made.std(axis=0).min() > 1e-3
    assert np.ptp(still, axis=0).max() < 1e-5
    np.testing.assert_allclose(still.mean(axis=0), made.mean(axis=0), atol=1e-4)
    np.testing.assert_allclose(drawn.mean(axis=0), made.mean(axis=0), atol=1e-3)
    np.testing.assert_allclose(drawn.var(axis=0), made.var(axis=0), rtol=2e-2)
    assert np.abs(drawn - made).mean() > 0.3 * made.std(axis=0).mean()


def _rows(mapper: CacheMap, one):
    return receiver_rows(one.target, one.alignment, context_start(mapper.prefix))


def _added(mapper: CacheMap) -> np.ndarray:
    """Additions to the values of the last layer, one row a token."""
    found = []
    for one in toy_pairs(batches=4):
        moved = kvx.translate(mapper, one.source, one.alignment, receiver=one.target)
        more = np.asarray(moved.values(1))[:, 0, 1:] - np.asarray(one.target.values(1))[:, 0]
        found.append(more[np.asarray(one.alignment.pos) >= 0])
    return np.concatenate(found)


def test_pruned_layers_keep_the_targets_own_cache() -> None:
    one, pairs = batch(), toy_pairs()
    start = untrained(latent_flow(width=6, layers=(1,)), pairs.unfitted(), jax.random.key(0))
    flow = start.params.flows[0]
    opened = dataclasses.replace(flow, value_bias=flow.value_bias + 1.0)
    made = with_params(start, start.method, dataclasses.replace(start.params, flows=(opened,)))
    moved = kvx.translate(made, one.source, one.alignment, receiver=one.target)
    np.testing.assert_array_equal(moved.values(0)[:, :, 1:], one.target.values(0))
    assert np.abs(moved.values(1)[:, :, 1:] - one.target.values(1)).max() > 0.5
    whole = untrained(latent_flow(width=6), pairs.unfitted(), jax.random.key(0))
    assert 2 * start.parameters == whole.parameters and 2 * start.flops(7) == whole.flops(7)
    assert latent_flow(layers=2).layers == 2
    with pytest.raises(KvxError, match=r"layers 0\.\.1"):
        untrained(latent_flow(layers=(2,)), pairs.unfitted(), jax.random.key(0))
    with pytest.raises(KvxError, match="at least one"):
        latent_flow(span=0)


def test_spans_read_another_context_whole_and_in_any_length() -> None:
    """Contexts that differ: every receiver token sees all source tokens, and none of its own neighbours."""
    one, mapper = batch(), fitted("latent_flow, spans")
    pos = jnp.where(jnp.arange(6)[None] < 5, jnp.arange(6, dtype=jnp.int32)[None], -1) * jnp.ones((4, 1), jnp.int32)
    own = select_batch(one.target, [0, 1, 2, 3])
    before = kvx.translate(mapper, one.source, beside(one.source, pos), receiver=own)
    assert before.next_position().tolist() == [6] * 4
    group = one.source.groups[0]
    for slot, seen in ((13, True), (15, False)):  # 14 tokens, two empty slots
        changed = dataclasses.replace(group, v=group.v.at[:, :, :, slot].set(7.0))
        other = dataclasses.replace(one.source, groups=(changed,))
        after = kvx.translate(mapper, other, beside(one.source, pos), receiver=own)
        moved = np.abs(after.values(0) - before.values(0)).max(axis=(1, 3))
        assert (moved[:, 1:6] > 1e-6).all() == seen and (seen or not moved.any())


@dataclasses.dataclass(frozen=True)
class Task:
    """A source that read the context's letters, and a target whose own cache of them is useless to it."""

    source: kvx.Model
    target: kvx.Model
    pairs: object
    data: object
    held: object


def texts(count: int, seed: int) -> list[Example]:
    rng = np.random.default_rng(seed)
    found = [planted._letters(rng, 26, [0.25] * 4)[0] for _ in range(count)]
    return [Example(text[:20], text[20:]) for text in found]


@pytest.fixture(scope="module")
def task() -> Task:
    source, target = planted.letter_counter(seed=1), planted.letter_counter(marker=0.0)
    layer = dict(target.params["layers"][0])
    layer["wv"] = 0.1 * layer["wv"]  # the target hardly hears what it reads itself
    target = dataclasses.replace(target, params={**target.params, "layers": (layer,)})
    pairs = kvx.pairs(source, target, [e.context for e in texts(4, 5)], max_length=64, join=False)
    read = {"progress": False, "batch_size": 8, "receiver": True}
    data = kvx.training_data(source, target, texts(32, 0), pairs, **read)
    return Task(
        source, target, pairs, data, kvx.training_data(source, target, texts(8, 1), pairs, held_out=True, **read)
    )


TRAINED = {"flow": latent_flow(width=32), "fuser": fuser(hidden=32, inner=32, gate=0.5, dropout=0.0, anneal=20)}


@pytest.mark.parametrize("name", TRAINED)
def test_training_lowers_the_held_out_loss_and_resumes_exactly(task: Task, name: str, tmp_path) -> None:
    method = TRAINED[name]
    how = {"batch_size": 8, "optimizer": optax.adam(1e-2), "progress": False, "held_out": task.held, "patience": None}
    how |= {"steps": 16, "evaluate_every": 8, "checkpoint_every": 8, "select": ("loss",)}
    made, report = kvx.train(method, task.pairs, task.data, **how)
    assert report.best_step > 0 and report.best["loss"] < report.first["loss"] - 0.05
    assert report.best["mismatched"] > report.best["loss"] + 0.05  # another context's letters do not help

    def interrupt(what: str, done: int, total: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvx.train(method, task.pairs, task.data, **{**how, "folder": tmp_path, "progress": interrupt})
    again, told = kvx.train(method, task.pairs, task.data, **how, folder=tmp_path, resume=True)
    assert told.history == report.history
    for x, y in zip(jax.tree.leaves(made.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(x, y)
    kept = kvx.load(kvx.save(tmp_path / "map", made))
    assert kept.digest == made.digest and kept.reads_target
    answer = kvx.handoff(task.source, task.target, kept, "abcabcabcabc", "ab", max_new_tokens=2)
    assert len(answer.tokens) == 2 and {"source", "receiver", "translate", "answer"} == set(answer.seconds)


def test_data_without_the_targets_cache_are_refused(task: Task) -> None:
    bare = kvx.training_data(task.source, task.target, texts(2, 0), task.pairs, progress=False)
    for data, held in ((bare, None), (task.data, bare)):
        with pytest.raises(KvxError, match="receiver=True"):
            kvx.train(FLOW, task.pairs, data, held_out=held, steps=1, progress=False)


def test_crossed_examples_keep_the_targets_own_cache(task: Task) -> None:
    own, crossed = (task.held.batch([0, 1], crossed=crossed, fused=True) for crossed in (False, True))
    np.testing.assert_array_equal(own.native.keys(0), crossed.native.keys(0))
    np.testing.assert_array_equal(own.alignment.pos, crossed.alignment.pos)
    assert (np.asarray(own.source.keys(0)) != np.asarray(crossed.source.keys(0))).any()


@pytest.fixture(scope="module")
def opened(task: Task) -> CacheMap:
    """A flow that adds something, its controls measured."""
    start = untrained(FLOW, task.pairs.unfitted(), jax.random.key(0))
    flow = start.params.flows[0]
    draw = lambda x: 0.3 * jax.random.normal(jax.random.key(1), x.shape)  # noqa: E731
    flow = dataclasses.replace(flow, key_weight=draw(flow.key_weight), value_weight=draw(flow.value_weight))
    params = dataclasses.replace(start.params, flows=(flow,))
    return with_params(start, FLOW, FLOW.calibrate(params, task.data.sample(8, 8, fused=True)))


def test_every_arm_fuses_with_the_targets_own_cache_of_its_item(task: Task, opened: CacheMap) -> None:
    """What differs between translated and mismatched is the source's cache alone."""
    mapper = opened
    setup = prepare(task.source, task.target, mapper)
    contexts = ["abcabcabca", "xyzxyzxyzx", "mnomnomnom", "jkljkljklj"]
    (plan,) = setup.plan(contexts, 4)
    reading = read(setup, [contexts[i] for i in plan.items], plan)
    arms = build(setup, reading, plan, room=2).target
    other = select_batch(reading.source, plan.partner)
    wanted = kvx.translate(mapper, other, reading.alignment, receiver=reading.native)  # equal lengths: slot for slot
    held = wanted.groups[0].slots
    np.testing.assert_array_equal(arms["mismatched"].values(0)[:, :, :held], wanted.values(0))
    native = np.asarray(reading.native.values(0))[:, :, 1:11]
    still = np.asarray(arms["constant"].values(0))[:, :, 1:11] - native
    assert np.ptp(still, axis=(0, 2)).max() < 1e-5 and np.abs(still).max() > 1e-3
    assert np.abs(np.asarray(arms["random"].values(0))[:, :, 1:11] - native - still).max() > 1e-3
    direct = kvx.translate(
        mapper,
        reading.source,
        reading.alignment,
        receiver=own_cache(task.target, mapper, [contexts[i] for i in plan.items], plan.length),
    )
    np.testing.assert_allclose(arms["translated"].values(0)[:, :, :held], direct.values(0)[:, :, :held], atol=1e-5)


def test_tables_set_such_maps_apart_with_their_operations(task: Task, opened: CacheMap) -> None:
    pairs = kvx.pairs(task.source, task.target, [e.context for e in texts(8, 5)], max_length=64, join=False)
    plain, _ = kvx.fit(full_head(layers=1, ridge=0.1), pairs, held_out=0, progress=False)
    maps = {"plain": plain, "flow": opened}
    settings = {"progress": False, "cosine": False, "apply_tokens": 16, "batch_size": 8}
    found = evaluate_maps(task.source, task.target, maps, planted.items(8), **settings)
    assert found.parts == [("", ["plain"]), ("target also reads the context:", ["flow"])]
    facts = found.to_json()["maps"]
    assert facts["flow"]["target_reads_context"] and not facts["plain"]["target_reads_context"]
    assert facts["flow"]["flops"] > maps["flow"].flops(16) > 0 and facts["plain"]["flops"] == plain.flops(16) > 0
    assert facts["flow"]["parameters"] == maps["flow"].parameters
    result = found.results["flow"].to_json()
    assert result["target_reads_context"] and result["cost"]["target"] > 0
    assert "target also reads the context" in found.results["flow"].to_html()
    assert "target also reads the context" in found._repr_html_()
    assert "target also reads the context" not in found.results["plain"].to_html()


def test_the_same_model_as_source_is_measured_like_any_pair(task: Task) -> None:
    """Most of C2C's gain appears with the target as its own source, so that figure must be easy to have."""
    pairs = kvx.pairs(task.target, task.target, ["abcabc abcabc"], max_length=64)
    data = kvx.training_data(task.target, task.target, texts(8, 0), pairs, receiver=True, progress=False, batch_size=8)
    made, report = kvx.train(FLOW, pairs, data, steps=1, batch_size=8, progress=False)
    assert report.steps == 1 and made.source == made.target
    result = kvx.evaluate(task.target, task.target, made, planted.items(4), progress=False, latency=False, cosine=False)
    assert result.target_reads_context


def test_the_command_line_names_the_methods() -> None:
    flow = method_of(Train(method="latent_flow", width=16, fused_layers=9, span=8))
    assert flow == latent_flow(width=16, layers=9, span=8)
    assert method_of(Train(method="fuser", hidden=64)) == fuser(hidden=64, inner=64)
    assert method_of(Train(width=8, frozen=True)) == residual(width=8, frozen=True)
