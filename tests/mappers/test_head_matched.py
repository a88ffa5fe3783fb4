"""The head-matched map: planted heads found, budgets kept, wider support announced, the arithmetic of apply."""

from __future__ import annotations

import dataclasses
import itertools
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import kvx
from kvx.cache.build import check
from kvx.cache.geometry import CacheGeometry, LayerGeometry, RopeSpec
from kvx.errors import KvxError
from kvx.fitting.fit import _Gathered
from kvx.fitting.plan import Plan
from kvx.fitting.synthetic import planted_heads, toy_pairs
from kvx.mappers import head_matched
from kvx.mappers.base import Fitted
from kvx.mappers.linear import assemble
from kvx.mappers.matching import Table, map_bytes
from kvx.mappers.support import layer_entry, nearest_layers, support_of


def geometry(layers: int, heads: int, key: int, value: int | None = None) -> CacheGeometry:
    return CacheGeometry((LayerGeometry(heads, key, value or key, rope=RopeSpec.create(dim=key)),) * layers)


SHAPES = {  # source layers, heads and widths, then the target's
    "3 -> 1": (geometry(4, 3, 4, 6), geometry(3, 1, 6, 4)),
    "2 -> 8": (geometry(3, 2, 6, 4), geometry(2, 8, 4)),
    "8 -> 2": (geometry(3, 8, 4, 2), geometry(3, 2, 6)),
    "4 -> 4": (geometry(3, 4, 4), geometry(2, 4, 4)),
}


@dataclasses.dataclass(frozen=True)
class Given:
    """A method whose support table is given."""

    table: tuple
    ridges: tuple[float, ...] = (1e-3,)

    def reach(self, source, target):
        return None

    def fit(self, moments, held_out=None):
        support = support_of(self.table, moments.source, moments.target, by_head=True)
        return support.finish(moments.regress(held_out, self.table, self.ridges))


def fit(method, pairs, **kwargs):
    """The map and its report; a warning is an error unless a test asks for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return kvx.fit(method, pairs, progress=False, **kwargs)


def fits(pairs, *methods, held_out: float = 0.2):
    """Reports of several methods on the same moments."""
    found = _Gathered(Plan.of(pairs.source, pairs.target), 128, held_out)
    found.read(pairs, lambda what, done, total: None)
    moments, held = found.moments()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return [method.fit(moments, held).report for method in methods]


def reads(report) -> list[tuple]:
    return [entry.source_heads for entry in report]


def r2(report) -> float:
    return float(np.mean([np.mean(entry.r2_held_out) for entry in report]))


@pytest.mark.parametrize("shape", SHAPES)
def test_planted_heads_are_found_and_beat_other_assignments(shape: str) -> None:
    source, target = SHAPES[shape]
    planted = planted_heads(source, target, reads=2, seed=3)
    different = {dict(entry.blocks).get(layer) for entry in planted for layer in range(source.num_layers)}
    assert len(different) > 1
    learned, index, drawn = fits(
        toy_pairs(source, target, support=planted, noise=0.3, batches=16),
        head_matched(layers=2, ridge=1e-3),
        head_matched(layers=2, heads="index", ridge=1e-3),
        Given(planted_heads(source, target, reads=2, seed=11)),
    )
    assert reads(learned) == [entry.blocks for entry in planted]
    assert r2(learned) > 0.8
    assert r2(learned) > max(r2(index), r2(drawn)) + 0.1


def test_index_assignment_is_proportional() -> None:
    wanted = {"3 -> 1": {0: 0}, "2 -> 8": {0: 0, 3: 0, 4: 1, 7: 1}, "8 -> 2": {0: 0, 1: 4}, "4 -> 4": {1: 1, 3: 3}}
    for shape, heads in wanted.items():
        method = head_matched(layers=2, heads="index", ridge=0.1)
        (report,) = fits(toy_pairs(*SHAPES[shape], batches=2), method, held_out=0.0)
        found = {entry.heads[0]: {head for _, head in entry.source_heads} for entry in report}
        assert {h: found[h] for h in heads} == {h: {s} for h, s in heads.items()}, shape


def test_keys_and_values_choose_for_themselves() -> None:
    source, target = SHAPES["4 -> 4"]
    planted = planted_heads(source, target, reads=1, inputs="same")
    by_side = [{e.heads[0]: e.blocks for e in planted if (e.target, e.component) == (0, c)} for c in (0, 1)]
    assert by_side[0] != by_side[1]
    pairs = toy_pairs(source, target, support=planted, noise=0.1, batches=12)
    mapper, report = fit(head_matched(layers=1, inputs="same", ridge=1e-3), pairs)
    assert reads(report.entries) == [entry.blocks for entry in planted]
    assert mapper.params.keys[0].coefficients.shape == (2, 4, 4, 1, 4)
    assert (np.asarray(mapper.params.keys[0].gather) != np.asarray(mapper.params.values[0].gather)).any()


def test_best_layers_are_found_for_each_head() -> None:
    """Every target head depends on one block, wherever it is."""
    source, target = geometry(5, 2, 4), geometry(2, 3, 4)
    rng = np.random.default_rng(0)
    planted = tuple(
        dataclasses.replace(entry, blocks=((i, h),), parts=((i, 4 * h, 4 * h + 4), (i, 8 + 4 * h, 12 + 4 * h)))
        for entry in planted_heads(source, target)
        for i, h in [tuple(rng.integers((5, 2)).tolist())]
    )
    pairs = toy_pairs(source, target, support=planted, noise=0.1, batches=12)
    methods = [head_matched(layers=1, choice="best", heads=heads, ridge=1e-3) for heads in ("learned", "index")]
    report, index = fits(pairs, *methods)
    assert reads(report) == [entry.blocks for entry in planted]
    assert len({entry.source_layers for entry in report}) > 2
    assert r2(report) > r2(index) + 0.2


def test_apply_is_a_loop_over_target_heads() -> None:
    source, target = SHAPES["8 -> 2"]
    mapper, report = fit(head_matched(layers=2, ridge=0.1, heads="index"), toy_pairs(source, target), held_out=0.0)
    batch = next(iter(toy_pairs(source, target, batches=1)))
    moved = mapper.method.apply(mapper.params, batch.source, batch.alignment)
    check(moved)
    entries = iter(report.entries)
    for layer, (component, block) in itertools.product(
        range(target.num_layers), (("keys", mapper.params.keys[0]), ("values", mapper.params.values[0]))
    ):
        for head in range(2):
            entry, tokens = next(entries), int((batch.alignment.pos[0] >= 0).sum())
            assert (entry.target, entry.component, entry.heads) == (layer, component, (head, head + 1))
            read = [(side(i), h) for i, h in entry.source_heads for side in (batch.source.keys, batch.source.values)]
            x = np.concatenate([np.asarray(a)[0, h, :tokens] for a, h in read], axis=1)
            w, center = np.asarray(block.coefficients)[layer, head, :, 0], np.asarray(block.center)[layer, head]
            wanted = np.asarray(block.mean)[layer, head] + (x - center) @ w
            np.testing.assert_allclose(
                np.asarray(getattr(moved, component)(layer))[0, head, :tokens], wanted, atol=1e-4
            )


def test_hybrid_layers_are_padded_and_recovered() -> None:
    narrow, wide = (geometry(1, *shape).layers[0] for shape in ((1, 4, 6), (3, 6, 4)))
    hybrid = CacheGeometry((narrow, wide, narrow))
    planted = planted_heads(hybrid, hybrid, reads=3, seed=1)
    pairs = toy_pairs(hybrid, hybrid, support=planted, batches=16)
    mapper, report = fit(head_matched(layers="all", ridge=1e-8), pairs)
    assert reads(report.entries) == [entry.blocks for entry in planted]
    assert report.r2_held_out > 0.9999
    batch = next(iter(pairs))
    moved = mapper.method.apply(mapper.params, batch.source, batch.alignment)
    for layer in range(3):
        np.testing.assert_allclose(moved.values(layer), batch.target.values(layer), atol=2e-3)


def test_a_mixing_head_is_widened_and_announced() -> None:
    """Keys of every head mix two source heads of a layer; the values read one."""
    source, target = geometry(3, 4, 4), geometry(2, 2, 4)
    mixed, plain = (planted_heads(source, target, reads=2, heads=n, seed=5) for n in (2, 1))
    planted = [a if a.component == 0 else b for a, b in zip(mixed, plain, strict=True)]
    pairs = toy_pairs(source, target, support=planted, noise=0.1, batches=16)
    with pytest.warns(UserWarning, match=r"carry 2 of 4 .* target layer 0 keys \(2 heads, R2 0.\d+ -> 0.9"):
        mapper, report = kvx.fit(head_matched(layers=2, ridge=1e-3), pairs, progress=False)
    assert reads(report.entries) == [entry.blocks for entry in planted]
    assert report.r2_held_out > 0.95
    assert "4 of 8 target heads read several heads" in report.summary
    one = size(pairs, layers=2)
    assert mapper.size > one
    with pytest.warns(UserWarning, match="carry 1 of 4"):
        half, _ = kvx.fit(head_matched(layers=2, ridge=1e-3, budget=one + 1000), pairs, progress=False)
    assert one < half.size <= one + 1000 < mapper.size
    _, narrow = fit(head_matched(layers=2, ridge=1e-3, budget=one), pairs)
    assert {len(entry.source_heads) for entry in narrow.entries} == {2}
    assert narrow.r2_held_out < report.r2_held_out - 0.1


def test_sides_of_unlike_width_stand_beside_each_other() -> None:
    """Only target layer 1 is widened, so the layers of one group are stored apart and come back in order."""
    source, target = geometry(3, 4, 4), geometry(3, 2, 4)
    tables = [planted_heads(source, target, reads=1, heads=n, seed=2) for n in (1, 2)]
    planted = [b if a.target == 1 else a for a, b in zip(*tables, strict=True)]
    pairs = toy_pairs(source, target, support=planted, batches=16)
    with pytest.warns(UserWarning, match="carry 2 of 6"):
        mapper, report = kvx.fit(head_matched(layers=1, ridge=1e-8), pairs, progress=False)
    assert [block.layers for block in mapper.params.keys] == [(0, 2), (1,)]
    batch = next(iter(pairs))
    moved = mapper.method.apply(mapper.params, batch.source, batch.alignment)
    for layer in range(3):
        np.testing.assert_allclose(moved.keys(layer), batch.target.keys(layer), atol=2e-3)
    silent = kvx.mappers.constant(mapper)
    assert not np.asarray(silent.params.keys[1].coefficients).any()


def size(pairs, **settings) -> int:
    """Bytes of the map by index, which is never widened."""
    return fit(head_matched(heads="index", ridge=0.1, **settings), pairs, held_out=0.0)[0].size


def test_a_budget_chooses_the_source_layers() -> None:
    source, target = SHAPES["8 -> 2"]
    pairs = toy_pairs(source, target, batches=2)
    sizes = [size(pairs, layers=k) for k in (1, 2, 3)]
    for budget, count in ((sizes[0], 1), (sizes[1] - 1, 1), (sizes[1], 2), (sizes[2] + 5, 3), (10**9, 3)):
        method = head_matched("all", heads="index", ridge=0.1, budget=budget)
        mapper, report = fit(method, pairs, held_out=0.0)
        assert {len(entry.source_layers) for entry in report.entries} == {count}
        assert mapper.size == sizes[count - 1] <= budget
    assert head_matched("all", budget=sizes[0]).reach(source, target) == ((0,), (1,), (2,))
    with pytest.raises(KvxError, match=f"budget is {sizes[0] - 1:,} bytes.*takes {sizes[0]:,}"):
        fit(head_matched(heads="index", ridge=0.1, budget=sizes[0] - 1), pairs, held_out=0.0)


def test_storage_is_an_eighth_of_full_head_for_eight_heads() -> None:
    """Coefficients are exactly an eighth; biases (centres and means) are as many."""
    source, target = geometry(2, 8, 128), geometry(1, 8, 128)
    near = nearest_layers(2, 1, 2)
    whole = [layer_entry(source, target, 0, c, near[0], "same") for c in (0, 1)]
    single = Table(source, target, near, count=2, inputs="same", heads="index").all_entries()
    maps = [
        assemble(t, blank(t), source, target, inputs="same", by_head=h) for t, h in ((whole, False), (single, True))
    ]
    assert maps[0].keys[0].coefficients.size == 8 * maps[1].keys[0].coefficients.size
    assert maps[0].stored / maps[1].stored >= 7.9
    assert maps[1].stored == map_bytes(source, target, "same", 2)


def blank(entries) -> list[Fitted]:
    """Solutions of the right shapes."""
    solved = []
    for entry in entries:
        features = sum(stop - first for _, first, stop in entry.parts)
        heads = entry.heads[1] - entry.heads[0]
        covariance = np.zeros((heads, entry.channels, entry.channels))
        outputs = heads * entry.channels
        solved.append(Fitted(np.ones((features, outputs)), np.ones(features), np.ones(outputs), covariance, None))
    return solved


def test_held_out_rows_are_needed_only_to_choose() -> None:
    pairs = toy_pairs()
    for settings in ({"heads": "learned"}, {"heads": "index", "choice": "best"}):
        with pytest.raises(KvxError, match="held-out moments"):
            fit(head_matched(1, ridge=0.1, **settings), pairs, held_out=0.0)
    with pytest.raises(KvxError, match="held-out moments"):
        fit(head_matched(1, heads="index"), pairs, held_out=0.0)
    single = toy_pairs(geometry(3, 1, 4), geometry(2, 2, 4))
    (report,) = fits(single, head_matched(1, ridge=0.1), held_out=0.0)
    assert {entry.source_heads for entry in report} == {((0, 0),), ((2, 0),)}


@pytest.mark.parametrize(
    "settings",
    [
        {"layers": 0},
        {"layers": "most"},
        {"inputs": "none"},
        {"choice": "worst"},
        {"heads": "random"},
        {"ridge": -1.0},
        {"budget": 0},
        {"budget": 1.5},
        {"budget": True},
    ],
)
def test_settings_out_of_range_are_refused(settings) -> None:
    with pytest.raises(KvxError, match=f"^{next(iter(settings))} is"):
        head_matched(**settings)


def test_bf16_pairs_fit_and_translate() -> None:
    source, target = SHAPES["3 -> 1"]
    pairs = toy_pairs(source, target, support=planted_heads(source, target), batches=12, dtype=jnp.bfloat16)
    mapper, report = fit(head_matched(layers=1), pairs)
    batch = next(iter(pairs))
    assert kvx.translate(mapper, batch.source, batch.alignment).groups[0].k.dtype == jnp.bfloat16
    assert report.r2_held_out > 0.99
