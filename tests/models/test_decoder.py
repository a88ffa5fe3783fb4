"""The decoder around a cache: chunks, raggedness, positions, poison, transforms, traces (CASES 12, 13, 32, 33)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvx.cache.cache import KVCache
from kvx.cache.geometry import RopeSpec
from kvx.cache.ops import pad_to, rotate_keys
from kvx.errors import KvxError
from kvx.models import prefill as reading
from kvx.models.buckets import bucket_length
from kvx.models.config import tiny_config
from kvx.models.decoder import forward
from kvx.models.prefill import next_token_logits, prefill, token_logprobs
from kvx.models.random_model import random_model

ROPE = RopeSpec.create(dim=8)
WINDOWED = tiny_config(num_layers=3, windows=(6, 6, None), ropes=(ROPE, ROPE, RopeSpec.create(theta=1e6, dim=8)))


@pytest.fixture(scope="module", params=["unrolled", "stacked"])
def model(request):
    return random_model(WINDOWED, stacked=request.param == "stacked")


def ids(batch, length, seed=0):
    return np.random.default_rng(seed).integers(0, 64, (batch, length)).astype(np.int32)


def held(cache, layer, row=0):
    """``{position: (key, value)}`` of one layer and row."""
    view = cache.layer(layer)
    where = np.asarray(view.pos)[row, 0]
    return {
        int(p): (np.asarray(view.k)[row, :, i], np.asarray(view.v)[row, :, i]) for i, p in enumerate(where) if p >= 0
    }


def same(a, b, layers=3, row_a=0, row_b=0, atol=2e-6):
    for layer in range(layers):
        left, right = held(a, layer, row_a), held(b, layer, row_b)
        assert left.keys() == right.keys()
        for p in left:
            np.testing.assert_allclose(left[p][0], right[p][0], atol=atol)
            np.testing.assert_allclose(left[p][1], right[p][1], atol=atol)


def empties_are_zero(cache):
    for group in cache.groups:
        for x in (group.k, group.v):
            assert not np.where(np.asarray(group.pos >= 0)[..., None], 0, x).any()


@pytest.mark.parametrize("keep", ["all", "window"])
@pytest.mark.parametrize("chunk", [4, 7])
def test_chunked_equals_one_shot(model, keep, chunk):
    tokens = ids(2, 23)
    whole, pieces = prefill(model, tokens, keep=keep), prefill(model, tokens, keep=keep, chunk=chunk)
    same(whole, pieces)
    assert [g.ring for g in whole.groups] == ([True, False] if keep == "window" else [False])
    if keep == "window":
        assert sorted(held(whole, 0)) == list(range(17, 23))
    after = ids(2, 3, seed=1)
    np.testing.assert_allclose(
        next_token_logits(model, after, pieces), next_token_logits(model, np.concatenate([tokens, after], 1)), atol=1e-5
    )
    empties_are_zero(pieces)


def test_padding_anywhere_changes_nothing(model):
    tokens = ids(1, 9)
    plain = forward(model, tokens)
    for layout in ([0, 1, 2, 3, 4, 5, 6, 7, 8, None], [None, 0, 1, 2, None, None, 3, 4, 5, 6, 7, 8]):
        padded = np.array([[-1 if i is None else tokens[0, i] for i in layout]], np.int32)
        out = forward(model, padded)
        same(plain.cache, out.cache)
        kept = [t for t, i in enumerate(layout) if i is not None]
        np.testing.assert_allclose(out.hidden[:, kept], plain.hidden, atol=2e-6)
        assert np.isfinite(out.hidden).all()
        empties_are_zero(out.cache)


def test_ragged_rows_equal_single_rows(model):
    tokens, after = ids(2, 11), ids(2, 5, seed=1)
    tokens[1, 6:], after[0, 2:] = -1, -1
    cache = prefill(model, tokens)
    assert cache.next_position().tolist() == [11, 6]
    logits, longer = next_token_logits(model, after, cache), prefill(model, after, cache)
    assert longer.next_position().tolist() == [13, 11]
    for row, (a, b) in enumerate([(11, 2), (6, 5)]):
        alone = prefill(model, tokens[row : row + 1, :a])
        np.testing.assert_allclose(next_token_logits(model, after[row : row + 1, :b], alone)[0], logits[row], atol=1e-5)
        same(prefill(model, after[row : row + 1, :b], alone), longer, row_b=row)


def test_two_continuations_never_see_each_other(model):
    cache = prefill(model, ids(1, 10))
    before = jax.tree.map(np.asarray, cache)
    one, two = ids(1, 4, seed=1), ids(1, 4, seed=2)
    first = next_token_logits(model, one, cache)
    prefill(model, two, cache), next_token_logits(model, two, cache)
    np.testing.assert_array_equal(next_token_logits(model, one, cache), first)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("keep", ["all", "window"])
def test_nan_in_empty_slots_is_never_read(model, keep):
    cache = pad_to(prefill(model, ids(1, 5), keep=keep), 24)
    bad = [
        dataclasses.replace(g, **{n: jnp.where((g.pos >= 0)[..., None], getattr(g, n), jnp.nan) for n in ("k", "v")})
        for g in cache.groups
    ]
    poisoned = KVCache(tuple(bad), cache.rotated, cache.geometry)
    assert any(np.isnan(x).any() for x in jax.tree.leaves(poisoned) if x.dtype == jnp.float32)
    after = ids(1, 4, seed=1)
    np.testing.assert_array_equal(next_token_logits(model, after, poisoned), next_token_logits(model, after, cache))
    longer = prefill(model, after, poisoned)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(longer))
    grad = jax.grad(lambda c: token_logprobs(model, after, c).sum(), allow_int=True)(poisoned)
    for x in jax.tree.leaves(grad):
        assert x.dtype == jax.dtypes.float0 or np.isfinite(x).all()


def test_positions_are_taken_as_given(model):
    """Two chunks read at swapped times but at their own positions hold what RoPE and the mask say."""
    tokens = ids(1, 8)
    where = np.arange(8, dtype=np.int32)[None]
    shifted = prefill(model, tokens, positions=where + 40)
    assert sorted(held(shifted, 0)) == list(range(40, 48))
    plain = prefill(model, tokens)
    for layer in range(3):  # RoPE is relative: nothing else changes
        np.testing.assert_allclose(shifted.values(layer), plain.values(layer), atol=1e-5)
    order = np.array([3, 0, 5, 1, 7, 2, 6, 4])
    mixed = prefill(model, tokens[:, order], positions=where[:, order])
    same(plain, mixed, atol=5e-6)


def test_a_rotated_cache_reads_the_same_and_stays_rotated(model):
    cache, after = prefill(model, ids(1, 9)), ids(1, 4, seed=1)
    turned = rotate_keys(cache)
    np.testing.assert_allclose(
        next_token_logits(model, after, turned), next_token_logits(model, after, cache), atol=1e-5
    )
    same(prefill(model, after, turned), rotate_keys(prefill(model, after, cache)), atol=1e-5)


def test_stacked_and_unrolled_agree():
    plain, tokens = random_model(WINDOWED), ids(2, 13)
    a, b = forward(plain, tokens, collect_queries=True), forward(plain.stack(), tokens, collect_queries=True)
    np.testing.assert_allclose(a.hidden, b.hidden, atol=2e-6)
    np.testing.assert_allclose(a.queries, b.queries, atol=2e-6)
    same(a.cache, b.cache)


def test_collected_queries_reproduce_the_scores_of_the_layer(model):
    from kvx.cache.rope import rotate

    tokens = ids(1, 7)
    out = forward(model, tokens, collect_queries=True)
    assert out.queries.shape == (3, 1, 4, 7, 8)
    where = jnp.arange(7)[None, None]
    keys = rotate(out.cache.keys(0), where, model.config.ropes[0])
    scores = np.einsum("htd,hsd->hts", out.queries[0, 0, ::2], keys[0]) * model.config.score_scale
    later = forward(model, ids(1, 7), positions=np.arange(7, dtype=np.int32)[None] + 9, collect_queries=True)
    moved = rotate(later.cache.keys(0), where + 9, model.config.ropes[0])
    again = np.einsum("htd,hsd->hts", later.queries[0, 0, ::2], moved[0]) * model.config.score_scale
    np.testing.assert_allclose(scores, again, atol=1e-4)


def test_jit_vmap_and_export(model):
    tokens = ids(3, 6)
    plain = prefill(model, tokens)
    jitted = jax.jit(lambda m, t: prefill(m, t))(model, tokens)
    same(plain, jitted)
    mapped = jax.vmap(lambda t: prefill(model, t[None]))(jnp.asarray(tokens))
    for row in range(3):
        same(jax.tree.map(lambda x, row=row: x[row], mapped), plain, row_b=row)
    exported = jax.export.export(jax.jit(lambda t: prefill(model, t).keys(2)))(jnp.asarray(tokens))
    np.testing.assert_allclose(exported.call(jnp.asarray(tokens)), jitted.keys(2), atol=1e-6)


def test_gradient_through_the_cache(model):
    """Against central differences in fp32, along a random direction."""
    cache, after = prefill(model, ids(1, 9)), jnp.asarray(ids(1, 6, seed=1))

    def loss(k):
        group = dataclasses.replace(cache.groups[0], k=k)
        return -token_logprobs(model, after, KVCache((group,), cache.rotated, cache.geometry)).sum()

    k = cache.groups[0].k
    way = jnp.asarray(np.random.default_rng(0).standard_normal(k.shape), jnp.float32)
    way = jnp.where((cache.groups[0].pos >= 0)[..., None], way, 0.0)
    slope = (loss(k + 1e-2 * way) - loss(k - 1e-2 * way)) / 2e-2
    grad = jax.jit(jax.grad(loss))(k)
    np.testing.assert_allclose(jnp.vdot(grad, way), slope, rtol=2e-2, atol=1e-3)
    assert not np.where(np.asarray(cache.groups[0].pos >= 0)[..., None], 0, grad).any()


def test_scores_in_blocks(model, monkeypatch):
    tokens, cache = ids(2, 9), prefill(model, ids(2, 4, seed=1))
    tokens[1, 3:5] = -1
    whole = token_logprobs(model, tokens, cache)
    grad = jax.grad(lambda c: token_logprobs(model, tokens, c).sum(), allow_int=True)(cache)
    monkeypatch.setattr(reading, "_LOGIT_BYTES", 4 * 64 * 5)
    jax.clear_caches()
    np.testing.assert_allclose(token_logprobs(model, tokens, cache), whole, atol=1e-6)
    again = jax.grad(lambda c: token_logprobs(model, tokens, c).sum(), allow_int=True)(cache)
    np.testing.assert_allclose(again.groups[0].v, grad.groups[0].v, atol=1e-5)
    jax.clear_caches()
    assert whole[1, 3:5].tolist() == [0, 0] and whole[:, 0].tolist() == [0, 0]
    row = np.concatenate([tokens[1:, :3], tokens[1:, 5:]], axis=1)
    alone = token_logprobs(model, row, prefill(model, ids(2, 4, seed=1)[1:]))[0]
    np.testing.assert_allclose(np.delete(whole[1], [3, 4]), alone, atol=1e-5)


def test_64_lengths_compile_three_times():
    model = random_model(tiny_config(num_layers=1, vocab_size=63))
    jax.clear_caches()
    for length in range(1, 65):
        prefill(model, np.ones((1, length), np.int32))
        next_token_logits(model, np.ones((1, length), np.int32))
    assert reading._prefill._cache_size() == 3
    assert reading._next_token_logits._cache_size() == 3


def test_another_checkpoint_never_retraces(model):
    tokens = ids(1, 5)
    prefill(model, tokens)
    before = reading._prefill._cache_size()
    other = dataclasses.replace(jax.tree.map(lambda x: x + 0.1, model), tokenizer=None)
    prefill(other, tokens), prefill(other, ids(1, 7))
    assert reading._prefill._cache_size() == before


def test_pytrees_pass_through_jit_twice(model):
    """Static fields are hashable facts, never arrays: the second call must find the first one's trace."""
    cache = prefill(model, ids(1, 5))
    add = jax.jit(lambda m, c: (c.next_position() + 1, m.params["embed"].sum()))
    for _ in range(2):
        assert add(model, cache)[0].tolist() == [6]
    assert add._cache_size() == 1
    hash(model.config), hash(cache.geometry), hash(jax.tree.structure(model))


@pytest.mark.parametrize(
    ("n", "bucket"),
    [(0, 16), (16, 16), (17, 32), (33, 64), (65, 96), (512, 512), (513, 640), (1025, 1280), (4096, 4096)],
)
def test_buckets(n, bucket):
    assert bucket_length(n) == bucket


def test_buckets_rise_and_waste_little():
    sizes = [bucket_length(n) for n in range(1, 5000)]
    assert sizes == sorted(sizes) and all(size >= n for n, size in enumerate(sizes, 1))
    assert all(size <= 1.25 * n + 1 for n, size in enumerate(sizes, 1) if n > 512)
    assert len(set(sizes[:4096])) == 21


def test_capacity_and_growth(model):
    tokens = ids(1, 10)
    assert prefill(model, tokens).groups[-1].slots == 16
    assert prefill(model, tokens, capacity=12).groups[-1].slots == 12
    same(prefill(model, tokens, capacity=12), prefill(model, tokens))
    cache = prefill(model, tokens)
    assert prefill(model, ids(1, 6), cache).groups[-1].slots == 16  # it still fits
    assert prefill(model, ids(1, 7), cache).groups[-1].slots == 32
    assert prefill(model, ids(1, 7), cache, capacity=40).groups[-1].slots == 40
    with pytest.raises(KvxError, match="capacity 9 is too small for 10 tokens"):
        prefill(model, tokens, capacity=9)


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (np.zeros(4, np.int32), {}, r"expected integers \[batch, tokens\]"),
        (np.zeros((1, 4), np.float32), {}, "expected integers"),
        (np.full((1, 4), 64, np.int32), {}, "another model's tokenizer"),
        (np.full((1, 4), -2, np.int32), {}, "padding"),
        (np.zeros((1, 4), np.int32), {"positions": np.zeros((1, 3), np.int32)}, "differ in shape"),
        (np.zeros((1, 2), np.int32), {"positions": np.array([[0, -1]], np.int32)}, "negative position"),
        (np.zeros((1, 4), np.int32), {"keep": "some"}, "keep is 'some'"),
        (np.zeros((1, 4), np.int32), {"chunk": 0}, "chunk is 0"),
    ],
)
def test_bad_input_gets_a_sentence(model, tokens, options, message):
    with pytest.raises(KvxError, match=message):
        prefill(model, tokens, **options)


def test_remat_keeps_less_and_changes_nothing(model):
    cache = prefill(model, ids(2, 9))

    def energy(k, remat):
        read = dataclasses.replace(cache, groups=(dataclasses.replace(cache.groups[0], k=k),))
        return jnp.square(forward(model, ids(2, 4, seed=1), read, remat=remat).hidden).sum()

    k = cache.groups[0].k
    plain, less = (jax.grad(energy)(k, remat) for remat in (False, True))
    np.testing.assert_allclose(less, plain, rtol=1e-4, atol=1e-5)
    assert (np.asarray(plain) != 0).any()
    marks = [
        str(jax.make_jaxpr(lambda k, remat=remat: energy(k, remat))(k)).count("prevent_cse") for remat in (False, True)
    ]
    assert marks[1] > marks[0]


def test_other_caches_are_refused(model):
    cache = prefill(model, ids(2, 4))
    with pytest.raises(KvxError, match="holds 2 sequences and the tokens 1"):
        prefill(model, ids(1, 4), cache)
    with pytest.raises(KvxError, match="not the model's"):
        prefill(random_model(tiny_config(num_layers=2)), ids(2, 4), cache)


def test_learned_positions_end_with_their_table():
    config = tiny_config(
        family="opt", kv_heads=4, ropes=(None, None), norm="layer", gated=False, qkv_bias=True, out_bias=True,
        mlp_bias=True, activation="relu", max_positions=20, position_offset=2,
    )  # fmt: skip
    model = random_model(config)
    cache = prefill(model, ids(1, 18))
    prefill(model, ids(1, 2), cache)
    with pytest.raises(KvxError, match="position 20 is beyond this model's 20 learned positions"):
        prefill(model, ids(1, 3), cache)


def test_dynamic_rope_asks_for_the_length():
    rope = RopeSpec.create("dynamic", dim=8, factor=2.0, original_length=16)
    model = random_model(tiny_config(ropes=(rope, rope)))
    with pytest.raises(KvxError, match="at_length"):
        prefill(model, ids(1, 4))
    short, long = prefill(model.at_length(16), ids(1, 4)), prefill(model.at_length(64), ids(1, 4))
    plain = prefill(random_model(tiny_config()), ids(1, 4))
    np.testing.assert_allclose(short.values(1), plain.values(1), atol=1e-6)
    assert np.abs(np.asarray(long.values(1) - plain.values(1))).max() > 1e-4
