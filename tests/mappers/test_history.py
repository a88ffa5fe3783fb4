"""History: what maps read of the tokens before the aligned one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvx
from kvx.cache.geometry import CacheGeometry, LayerGeometry, RopeSpec
from kvx.errors import KvxError
from kvx.fitting.pairs import PairBatch, Pairs
from kvx.fitting.synthetic import SOURCE, TARGET, toy_pairs
from kvx.mappers import full_head
from kvx.mappers.base import context_cache, groups_of
from kvx.mappers.history import History, with_history
from kvx.mappers.linear import aligned_rows

NARROW, WIDE = (
    LayerGeometry(1, 4, 6, rope=RopeSpec.create(dim=4)),
    LayerGeometry(2, 6, 4, rope=RopeSpec.create(dim=6)),
)
HYBRID = CacheGeometry((NARROW, WIDE, NARROW))


def neighbourly(source: CacheGeometry, history: History, batches: int = 12) -> Pairs:
    """Pairs whose target holds a random linear function of all layers at the aligned token and the low ones before."""
    drawn = toy_pairs(source, TARGET, batches=batches, noise=0.0)
    first = next(iter(drawn))
    width = aligned_rows(with_history(first.source, history), first.alignment).shape[-1]
    rng = np.random.default_rng(3)
    weights = [
        jnp.asarray(rng.normal(size=(width, shape.kv_heads, (shape.key_dim, shape.value_dim)[side])), jnp.float32)
        for shape in TARGET.layers
        for side in (0, 1)
    ]

    def made(batch: PairBatch) -> PairBatch:
        rows = aligned_rows(with_history(batch.source, history), batch.alignment)
        sides: list[list[jax.Array]] = [[], []]
        for layers in groups_of(TARGET):
            for component in (0, 1):
                maps = [weights[2 * layer + component] for layer in layers]
                y = jnp.stack([jnp.einsum("btp,pkd->bktd", rows, w, precision="highest") for w in maps])
                sides[component].append(y / jnp.float32(width) ** 0.5)
        target = context_cache(sides[0], sides[1], batch.alignment, TARGET)
        return dataclasses.replace(batch, target=target)

    def stream(report: Callable[[float], Any]) -> Iterator[PairBatch]:
        for batch in drawn.batches(report):
            yield made(batch)

    return dataclasses.replace(drawn, batches=stream)


@pytest.mark.parametrize("source", [SOURCE, HYBRID], ids=["like layers", "hybrid"])
def test_what_earlier_tokens_hold_is_recovered(source: CacheGeometry) -> None:
    history = History(lags=2, layers=1)
    pairs = neighbourly(source, history)
    blind, without = kvx.fit(full_head(layers="all", ridge=1e-7), pairs, progress=False)
    mapper, report = kvx.fit(full_head(layers="all", ridge=1e-7, history=2), pairs, progress=False)
    assert without.r2_held_out < 0.8
    assert report.r2_held_out > 0.9999
    batch = next(iter(pairs))
    for layer in range(TARGET.num_layers):
        assert mapper.source == source
        moved = kvx.translate(mapper, batch.source, batch.alignment)
        held = moved.layer(layer).k[:, :, mapper.prefix_length :]
        real = (batch.alignment.pos >= 0)[:, None, :, None]
        gap = jnp.where(real, held - batch.target.keys(layer), 0.0)
        assert float(jnp.abs(gap).max()) < 2e-3
    assert mapper.size > blind.size


def test_slots_move_by_their_lag_and_empty_ones_are_never_read() -> None:
    cache = next(iter(toy_pairs(HYBRID, TARGET))).source
    assert (cache.groups[0].pos < 0).any()
    poisoned = dataclasses.replace(
        cache,
        groups=tuple(
            dataclasses.replace(
                g,
                k=jnp.where((g.pos < 0)[..., None], jnp.nan, g.k),
                v=jnp.where((g.pos < 0)[..., None], jnp.nan, g.v),
            )
            for g in cache.groups
        ),
    )
    longer = with_history(poisoned, History(lags=3, layers=2))
    assert longer.num_layers == 3 + 6
    assert longer.geometry.layers[3:] == (NARROW, WIDE) * 3
    for lag in (1, 2, 3):
        for low in (0, 1):
            got = longer.values(3 + 2 * (lag - 1) + low)
            assert (got[:, :, :lag] == 0).all()
            kept = cache.values(low)[:, :, :-lag]
            np.testing.assert_array_equal(np.asarray(got[:, :, lag:]), np.asarray(kept))


def test_a_history_longer_than_the_context_is_empty() -> None:
    cache = next(iter(toy_pairs(length=8))).source
    slots = cache.groups[0].slots
    longer = with_history(cache, History(lags=slots + 3, layers=1))
    assert (longer.keys(longer.num_layers - 1) == 0).all()


def test_later_tokens_change_nothing() -> None:
    pairs = neighbourly(SOURCE, History(lags=2, layers=1))
    mapper, _ = kvx.fit(full_head(layers=1, ridge=1e-3, history=3, history_layers=2), pairs, progress=False)
    batch = next(iter(pairs))
    cut = 7
    changed = jax.tree.map(lambda x: x, batch.source)
    groups = tuple(dataclasses.replace(g, k=g.k.at[:, :, :, cut:].add(5.0)) for g in changed.groups)
    changed = dataclasses.replace(changed, groups=groups)
    before, after = (kvx.translate(mapper, c, batch.alignment) for c in (batch.source, changed))
    seen = np.asarray((batch.alignment.index[..., 0] < cut) & (batch.alignment.pos >= 0))
    for layer in range(TARGET.num_layers):
        a, b = (np.asarray(c.keys(layer)[:, :, mapper.prefix_length :]).swapaxes(1, 2)[seen] for c in (before, after))
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(np.asarray(before.keys(0)), np.asarray(after.keys(0)))


@pytest.mark.parametrize("settings", [{"history": -1}, {"history": 1.5}, {"history": 2, "history_layers": 0}])
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(KvxError, match="history is"):
        full_head(**settings)


def test_more_low_layers_than_the_source_has_are_refused() -> None:
    with pytest.raises(KvxError, match="reads the 9 lowest source layers, but the source has 3"):
        kvx.fit(full_head(layers=1, history=1, history_layers=9), toy_pairs(), progress=False)
