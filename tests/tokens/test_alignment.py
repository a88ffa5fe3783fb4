"""Alignment rules against their definitions, on every pair of tokenizers and texts of every kind."""

from __future__ import annotations

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx.alignment import Alignment, align, align_encodings, compose, resample
from kvx.errors import KvxError
from kvx.models.buckets import bucket_length
from kvx.models.tokenizer import Encoding

RULES = ("covering", "causal", "overlap")
NAMES = ["gpt2", "prefix_gpt2", "smollm2", "qwen2", "llama3", "llama2", "gemma"]
NAMES += ["nfkc_unigram", "nfkc_bytes", "words"]
COMPOSE, RESAMPLE, LENGTH = jax.jit(compose), jax.jit(resample), 768  # one compilation for all examples
PAIRS = [*itertools.permutations(NAMES, 2), *((n, n) for n in NAMES)]


def rows(alignment: Alignment, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Context index (BOS taken off), weight and position of the real rows of the first text."""
    index, weight, pos = (np.asarray(x)[0, :tokens] for x in (alignment.index, alignment.weight, alignment.pos))
    return index - alignment.source_prefix, weight, pos


@settings(max_examples=100, deadline=None)
@given(data=st.data(), rule=st.sampled_from(RULES), name=st.sampled_from(NAMES))
def test_equal_tokenizers_give_the_identity(zoo, texts, data, rule, name):
    text = data.draw(texts)
    tokenizer = zoo[name]
    alignment = align(tokenizer, tokenizer, text, rule=rule)
    tokens = len(tokenizer.encode(text, bos=False))
    index, weight, pos = rows(alignment, tokens)
    assert index[:, 0].tolist() == list(range(tokens)) == pos.tolist()
    assert (weight[:, 0] == 1).all() and (weight[:, 1:] == 0).all()
    assert alignment.source_prefix == int(tokenizer.adds_bos)
    assert alignment.report.coverage == 1.0


@settings(max_examples=150, deadline=None)
@given(data=st.data(), pair=st.sampled_from(PAIRS))
def test_rules_match_their_definitions(zoo, texts, data, pair):
    """Brute force over tokens: ``min {s: e_s >= e_t}`` and the last source token not beyond the last character."""
    text = data.draw(texts)
    source, target = (zoo[name] for name in pair)
    s, t = source.encode(text, bos=False), target.encode(text, bos=False)
    if not len(s):
        assert align(source, target, text).report.covered == 0
        return
    covering, weight, _ = rows(align(source, target, text), len(t))
    causal, causal_weight, pos = rows(align(source, target, text, rule="causal"), len(t))
    assert (weight == 1).all()
    for j in range(len(t)):
        holders = [i for i in range(len(s)) if s.ends[i] >= t.ends[j]]
        holder = holders[0] if holders else len(s) - 1
        assert covering[j, 0] == holder
        stop = t.offsets[j, 1]
        before = [i for i in range(len(s)) if s.ends[i] <= stop and s.ends[i] < t.ends[j]]
        inside = [holder] if holders and s.ends[holder] <= stop else []
        last = max(before + inside, default=None)
        if last is None:
            assert causal_weight[j, 0] == 0 and pos[j] == -1
        else:
            assert causal[j, 0] == last and causal_weight[j, 0] == 1 and pos[j] == j


@settings(max_examples=150, deadline=None)
@given(data=st.data(), pair=st.sampled_from(PAIRS))
def test_characters_say_the_same(zoo, texts, data, pair):
    """Stated on characters alone: covering holds the last character, causal never sees beyond it, both are monotone."""
    text = data.draw(texts)
    source, target = (zoo[name] for name in pair)
    s, t = source.encode(text, bos=False), target.encode(text, bos=False)
    covering, weight, _ = rows(align(source, target, text), len(t))
    causal, fed, _ = rows(align(source, target, text, rule="causal"), len(t))
    for j in np.flatnonzero(weight[:, 0]):
        held = s.offsets[covering[j, 0]]
        last = t.offsets[j, 1]
        if last and any(a < last <= b for a, b in s.offsets):
            assert held[0] < last <= held[1]
    for j in np.flatnonzero(fed[:, 0]):
        assert s.offsets[causal[j, 0], 1] <= t.offsets[j, 1]
    assert (np.diff(covering[:, 0]) >= 0).all()
    assert (np.diff(causal[fed[:, 0] > 0, 0]) >= 0).all()


@settings(max_examples=100, deadline=None)
@given(data=st.data(), pair=st.sampled_from(PAIRS))
def test_causal_is_extension_safe(zoo, texts, data, pair):
    """Tokens that both versions of a growing text share keep their alignment when text is added."""
    text, more = data.draw(texts), data.draw(texts)
    source, target = (zoo[name] for name in pair)

    def shared(a: Encoding, b: Encoding) -> int:
        same = [x == y for x, y in zip(zip(a.ids, a.ends, strict=True), zip(b.ids, b.ends, strict=True), strict=False)]
        return same.index(False) if False in same else len(same)

    s1, s2 = source.encode(text, bos=False), source.encode(text + more, bos=False)
    t1, t2 = target.encode(text, bos=False), target.encode(text + more, bos=False)
    same_s, same_t = shared(s1, s2), shared(t1, t2)
    reach = s1.ends[same_s - 1] if same_s else -np.inf  # beyond it the source itself reads the text differently
    first, second = (align(source, target, x, rule="causal") for x in (text, text + more))
    for j in range(same_t):
        if t1.offsets[j, 1] <= reach and t1.offsets[j, 1] == t2.offsets[j, 1]:
            assert first.index[0, j, 0] == second.index[0, j, 0]
            assert first.weight[0, j, 0] == second.weight[0, j, 0]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), pair=st.sampled_from(PAIRS))
def test_overlap_weights_are_shares_of_the_target_token(zoo, texts, data, pair):
    text = data.draw(texts)
    source, target = (zoo[name] for name in pair)
    t = target.encode(text, bos=False)
    s = source.encode(text, bos=False)
    index, weight, pos = rows(align(source, target, text, rule="overlap"), len(t))
    if not len(s):
        assert (weight == 0).all()
        return
    np.testing.assert_allclose(weight.sum(axis=1), 1, rtol=1e-6)
    assert pos.tolist() == list(range(len(t)))
    for j in range(len(t)):
        used = index[j][weight[j] > 0]
        assert used.tolist() == list(range(used[0], used[0] + len(used)))
        for i in used:
            touches = s.offsets[i, 0] < t.offsets[j, 1] and s.offsets[i, 1] > t.offsets[j, 0]
            assert touches or len(used) == 1


def test_planted_example():
    """Source [ab][cde][f], target [a][bcd][ef]: worked by hand."""
    source = Encoding(np.arange(3, dtype=np.int32), np.array([[0, 2], [2, 5], [5, 6]], np.int32), characters=6)
    target = Encoding(np.arange(3, dtype=np.int32), np.array([[0, 1], [1, 4], [4, 6]], np.int32), characters=6)
    covering = align_encodings([source], [target], length=4)
    assert covering.index[0, :, 0].tolist() == [0, 1, 2, 0]
    assert covering.pos[0].tolist() == [0, 1, 2, -1]
    causal = align_encodings([source], [target], length=4, rule="causal")
    assert causal.index[0, :, 0].tolist() == [0, 0, 2, 0]
    assert causal.weight[0, :, 0].tolist() == [0, 1, 1, 0]
    assert causal.pos[0].tolist() == [-1, 1, 2, -1]
    assert (causal.report.covered, causal.report.target_tokens, causal.report.shared_ends) == (2, 3, 1)
    overlap = align_encodings([source], [target], length=3, rule="overlap")
    np.testing.assert_allclose(overlap.weight[0], [[1, 0], [1 / 3, 2 / 3], [0.5, 0.5]], rtol=1e-6)
    assert overlap.index[0].tolist() == [[0, 0], [0, 1], [1, 2]]
    narrow = align_encodings([source], [target], length=3, rule="overlap", width=1)
    assert narrow.index[0, 1].tolist() == [1] and narrow.weight[0, 1].tolist() == [1]
    padded = align_encodings([source], [target], length=3, width=4)
    assert padded.index.shape == (1, 3, 4) and float(padded.weight[..., 1:].sum()) == 0


def test_bytes_of_one_character_align_one_to_one(zoo):
    """Two byte-level tokenizers split the same unseen character alike, so its bytes correspond."""
    text = "a\U00020bb7b"
    for rule in RULES:
        assert align(zoo["gpt2"], zoo["smollm2"], text, rule=rule).index[0, :6, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_target_token_inside_a_character_waits_for_it():
    """Target splits a character that the source holds whole: causal counts the character as complete for all parts."""
    whole = Encoding(np.zeros(2, np.int32), np.array([[0, 1], [1, 2]], np.int32), characters=2)
    parts = Encoding(
        np.zeros(3, np.int32), np.array([[0, 1], [1, 2], [1, 2]], np.int32), np.array([1.0, 1.5, 2.0]), characters=2
    )
    assert align_encodings([whole], [parts], rule="causal", length=3).index[0, :, 0].tolist() == [0, 1, 1]
    assert align_encodings([parts], [whole], rule="causal", length=2).index[0, :, 0].tolist() == [0, 2]


@pytest.mark.parametrize("rule", RULES)
def test_case_25_bos_of_source_and_target(zoo, rule):
    """Slots count the source's own BOS; the target's is prefix, so positions never shift."""
    text = "the quick brown fox"
    plain = np.asarray(align(zoo["gpt2"], zoo["smollm2"], text, rule=rule).index)[0]
    for source in ("gpt2", "gemma"):
        for target in ("smollm2", "llama3"):
            alignment = align(zoo[source], zoo[target], text, rule=rule)
            tokens = len(zoo[target].encode(text, bos=False))
            assert alignment.source_prefix == int(source == "gemma")
            assert (alignment.report.source_bos, alignment.report.target_bos) == (source == "gemma", target == "llama3")
            assert alignment.report.target_tokens == tokens
            fed = np.asarray(alignment.weight)[0, :tokens, 0] > 0
            used = np.asarray(alignment.weight) > 0
            assert (np.asarray(alignment.index)[used] >= alignment.source_prefix).all()
            assert np.asarray(alignment.pos)[0, :tokens][fed].tolist() == np.arange(tokens)[fed].tolist()
    forced = np.asarray(align(zoo["gpt2"], zoo["smollm2"], text, rule=rule, source_bos=True).index)[0]
    used = np.asarray(align(zoo["gpt2"], zoo["smollm2"], text, rule=rule).weight)[0] > 0
    assert (forced[used] == plain[used] + 1).all()


def test_slots_point_into_the_encoded_batch(zoo):
    """index is a column of encode_batch's array: the token found there holds the target token's last character."""
    texts = ["the quick brown fox", "Straße 中文 👍🏽", "x"]
    for source in ("gemma", "smollm2"):
        tokens = np.asarray(zoo[source].encode_batch(texts))
        alignment = align(zoo[source], zoo["qwen2"], texts)
        for b, text in enumerate(texts):
            s, t = zoo[source].encode(text), zoo["qwen2"].encode(text)
            for j in range(len(t)):
                slot = int(alignment.index[b, j, 0])
                assert tokens[b, slot] == s.ids[slot]
                assert s.offsets[slot, 0] < t.offsets[j, 1] <= s.offsets[slot, 1]


def test_batches_pad_to_buckets(zoo):
    texts = ["the fox " * 30, "x", ""]
    alignment = align(zoo["gemma"], zoo["gpt2"], texts)
    longest = len(zoo["gpt2"].encode(texts[0]))
    assert alignment.index.shape == (3, bucket_length(longest), 1)
    assert alignment.index.dtype == alignment.pos.dtype == jnp.int32 and alignment.weight.dtype == jnp.float32
    for b, text in enumerate(texts):
        single = align(zoo["gemma"], zoo["gpt2"], text, length=alignment.pos.shape[1])
        for x, y in zip(jax.tree.leaves(alignment), jax.tree.leaves(single), strict=True):
            np.testing.assert_array_equal(x[b], y[0])
    assert (np.asarray(alignment.pos)[2] == -1).all()


def test_report_says_what_happened(zoo):
    text = "the quick brown fox"
    report = align(zoo["llama2"], zoo["gpt2"], text, rule="causal").report
    assert report.characters == len(text)
    assert report.target_tokens_per_character == pytest.approx(len(zoo["gpt2"].encode(text)) / len(text))
    assert report.source_tokens_per_character == pytest.approx(len(zoo["llama2"].encode(text, bos=False)) / len(text))
    assert 0 < report.coverage <= 1
    assert "source (with BOS)" in str(report) and "target (no BOS)" in str(report)
    assert str(report) in repr(align(zoo["llama2"], zoo["gpt2"], text, rule="causal"))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), names=st.tuples(*[st.sampled_from(NAMES)] * 3), rule=st.sampled_from(RULES))
def test_composing_equals_aligning_through(zoo, texts, data, names, rule):
    """Resampling a -> b -> c equals resampling a -> c through the composition, where b's cache keeps its slots."""
    text = data.draw(texts)[:30]
    a, b, c = (zoo[name] for name in names)
    size = {"rule": rule, "length": LENGTH, "width": 4 if rule == "overlap" else 1}
    first, second = align(a, b, text, **size), align(b, c, text, **size)
    x = np.random.default_rng(0).normal(size=(1, 2, LENGTH + 1, 3)).astype(np.float32)
    middle = RESAMPLE(first, x)
    shifted = np.pad(middle, ((0, 0), (0, 0), (1, 0), (0, 0)), constant_values=np.nan)[:, :, 1 - second.source_prefix :]
    through = np.asarray(RESAMPLE(second, jnp.asarray(shifted[:, :, :LENGTH])))
    both = COMPOSE(first, second)
    mass = np.asarray(second.weight * _fed(first, second)).sum(axis=2)[:, None, :, None]
    np.testing.assert_allclose(np.asarray(RESAMPLE(both, x)) * mass, through, rtol=1e-4, atol=1e-5)
    totals = np.asarray(both.weight).sum(axis=2)
    np.testing.assert_allclose(totals, (totals > 0).astype(np.float32), rtol=1e-5)
    assert (np.asarray(both.pos) == np.where(totals > 0, np.asarray(second.pos), -1)).all()
    assert both.source_prefix == first.source_prefix


def _fed(first: Alignment, second: Alignment) -> np.ndarray:
    """Whether each token that ``second`` reads is fed by ``first``."""
    fed = np.asarray(first.weight).sum(axis=2) > 0
    return fed[0][np.maximum(np.asarray(second.index) - second.source_prefix, 0)].astype(np.float32)


def test_composition_has_a_unit_and_is_associative(zoo):
    text = ["the quick brown fox 中文 👍🏽", "Быстрая лиса"]
    a, b, c, d = (zoo[name] for name in ("gemma", "smollm2", "llama2", "qwen2"))
    length = 96
    size = {"length": length, "width": 2, "rule": "overlap"}
    ab, bc, cd = (align(x, y, text, **size) for x, y in ((a, b), (b, c), (c, d)))
    left, right = COMPOSE(COMPOSE(ab, bc), cd), COMPOSE(ab, COMPOSE(bc, cd))
    x = np.random.default_rng(1).normal(size=(2, length, 5)).astype(np.float32)
    np.testing.assert_allclose(RESAMPLE(left, x), RESAMPLE(right, x), rtol=1e-5, atol=1e-6)
    for alone in (COMPOSE(align(a, a, text, **size), ab), COMPOSE(ab, align(b, b, text, **size))):
        np.testing.assert_allclose(RESAMPLE(alone, x), RESAMPLE(ab, x), rtol=1e-6)
        np.testing.assert_array_equal(alone.pos, ab.pos)


def test_compose_and_resample_under_jit_vmap_and_poison(zoo):
    text = ["the quick brown fox", "lazy"]
    ab, bc = align(zoo["gemma"], zoo["words"], text, rule="causal"), align(zoo["words"], zoo["gpt2"], text)
    eager, jitted = compose(ab, bc), jax.jit(compose)(ab, bc)
    for x, y in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
        np.testing.assert_array_equal(x, y)
    x = jnp.ones((2, 40, 3)).at[:, 30:].set(jnp.nan).at[:, 0].set(jnp.nan)  # padding and BOS are never read
    assert bool(jnp.isfinite(resample(ab, x)).all())
    assert bool(jnp.isfinite(jax.grad(lambda v: jax.jit(resample)(ab, v).sum())(x)).all())
    layers = jax.vmap(lambda v: resample(ab, v))(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(layers[1], 2 * layers[0])
    assert resample(ab, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_other_text_never_retraces(zoo):
    """The report stays on the host: alignments of different texts share one compilation."""
    traces = []
    step = jax.jit(lambda a: (traces.append(1), a.weight.sum())[1])
    for text in ("the fox", "Straße, the lazy dog"):
        step(align(zoo["gemma"], zoo["gpt2"], text))
    assert len(traces) == 1


def test_a_hundred_thousand_tokens_take_well_under_a_second():
    rng = np.random.default_rng(0)

    def planted(mean: float) -> Encoding:
        ends = np.unique(np.append(rng.choice(400_000, int(400_000 / mean), replace=False) + 1, 400_000))
        offsets = np.stack([np.append(0, ends[:-1]), ends], axis=1).astype(np.int32)
        return Encoding(np.zeros(len(ends), np.int32), offsets, characters=400_000)

    source, target = planted(3.9), planted(4.0)
    assert len(target) > 99_000
    for rule in RULES:
        start = time.perf_counter()
        align_encodings([source], [target], rule=rule)
        assert time.perf_counter() - start < 1.0


def test_refusals(zoo):
    gpt2, gemma = zoo["gpt2"], zoo["gemma"]
    with pytest.raises(KvxError, match="'nearest' is not known"):
        align(gpt2, gemma, "x", rule="nearest")
    with pytest.raises(KvxError, match="more than length=2"):
        align(gpt2, gemma, "the quick brown fox", length=2)
    with pytest.raises(KvxError, match="the source .* has no tokenizer"):
        align(object(), gemma, "x")
    with pytest.raises(KvxError, match="at least one"):
        align(gpt2, gemma, [])
    with pytest.raises(KvxError, match="width=0"):
        align(gpt2, gemma, "x", width=0)
    with pytest.raises(KvxError, match="encode the same text"):
        align_encodings([gpt2.encode("ab")], [gemma.encode("a")])
    with pytest.raises(KvxError, match="encode all of them alike"):
        align_encodings([gemma.encode("a"), gemma.encode("a", bos=False)], [gpt2.encode("a")] * 2)
    with pytest.raises(KvxError, match="cannot be composed"):
        compose(align(gpt2, gpt2, "x"), align(gpt2, gpt2, ["x", "y"]))
