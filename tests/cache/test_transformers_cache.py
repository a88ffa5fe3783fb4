"""transformers' DynamicCache in and out: true starts (CASES 11, 35), a copy (CASE 12), moving names (CASE 36).

The last tests run whole tiny models: a cache made by one side continues on the other with the same tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, StaticCache

from kvx.cache import KVCache, append, empty, from_transformers, rotate_keys, shift_positions, to_transformers
from kvx.cache.layouts import attention_mask, cache_argument, crop_transformers, output_cache
from kvx.errors import KvxError
from kvx.models.generate import generate
from kvx.models.prefill import prefill
from kvx.models.weights import from_transformers as load_transformers
from tests.cache.helpers import assert_clean, chunk, filled, geometry, triples

SIZE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZE, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 256}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


SLIDING, FULL = "sliding_attention", "full_attention"


def gemma(kinds: tuple[str, ...] = (SLIDING,) * 5 + (FULL,), window: int = 8) -> transformers.Gemma3TextConfig:
    return transformers.Gemma3TextConfig(
        **{**WIDE, "num_hidden_layers": len(kinds)},
        layer_types=list(kinds),
        head_dim=16,
        sliding_window=window,
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,
    )


CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**WIDE, rope_parameters=ROPE),
    "mistral": lambda: transformers.MistralConfig(**WIDE, sliding_window=8, rope_parameters=ROPE),
    "gemma3_text": lambda: gemma((SLIDING, FULL, SLIDING)),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=256),
}


def tiny(family: str | transformers.PretrainedConfig) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[family]() if isinstance(family, str) else family
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # sharper than the default initialisation: greedy tokens differ
            parameter.normal_(0.0, 0.3) if parameter.ndim > 1 else None
    return model.eval()


def run(model: Any, tokens: np.ndarray, cache: Any = None, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """Logits and cache of a transformers model, whatever the cache argument is called."""
    given = {} if cache is None else {cache_argument(model): cache}
    with torch.no_grad():
        out = model(input_ids=torch.tensor(tokens).long(), use_cache=True, **given, **kwargs)
    return out.logits, output_cache(out)


def greedy(model: Any, tokens: np.ndarray, steps: int, cache: Any = None, **kwargs: Any) -> np.ndarray:
    """Greedy continuation with a cache, in transformers."""
    out = []
    for _ in range(steps):
        logits, cache = run(model, tokens, cache, **kwargs)
        tokens = logits[:, -1].argmax(-1, keepdim=True).numpy()
        out.append(tokens)
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = torch.cat([kwargs["attention_mask"], torch.ones(len(tokens), 1).long()], dim=1)
            kwargs["position_ids"] = kwargs["position_ids"][:, -1:] + 1
    return np.concatenate(out, axis=1)


def text(seed: int, tokens: int, batch: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 97, (batch, tokens)).astype(np.int32)


def test_sliding_layers_start_where_their_window_does() -> None:
    """CASE 11: window 8, 20 tokens, five sliding layers and one global."""
    model = tiny(gemma())
    _, theirs = run(model, text(0, 20))
    assert [layer.keys.shape[2] for layer in theirs.layers] == [7, 7, 7, 7, 7, 20]
    assert {layer.get_seq_length() for layer in theirs.layers} == {20}
    cache = from_transformers(theirs, load_transformers(model).config.geometry)
    starts = [int(cache.layer(i).pos.min()) for i in range(6)]
    assert starts == [13, 13, 13, 13, 13, 0]
    assert [int(cache.layer(i).pos.max()) for i in range(6)] == [19] * 6
    assert cache.next_position().tolist() == [20] and not cache.rotated


def test_windows_of_512_hold_511_keys_after_700_tokens() -> None:
    """CASE 35, on numbers instead of a model: 15 sliding layers and 3 global ones, in Gemma 3's order."""
    where = geometry(((512,) * 5 + (None,)) * 3, heads=1)
    theirs = DynamicCache(config=gemma(((SLIDING,) * 5 + (FULL,)) * 3, window=512))
    x = torch.ones(1, 1, 700, 4)
    for i in range(18):
        theirs.update(x, x, i)
    held, starts = ([511] * 5 + [700]) * 3, ([189] * 5 + [0]) * 3
    assert [layer.keys.shape[2] for layer in theirs.layers] == held and theirs.get_seq_length() == 700
    cache = from_transformers(theirs, where)
    assert [int(cache.layer(i).pos.min()) for i in range(18)] == starts
    assert cache.next_position().tolist() == [700]
    back = to_transformers(cache)
    assert [layer.keys.shape[2] for layer in back.layers] == held
    assert {layer.get_seq_length() for layer in back.layers} == {700}


@pytest.mark.parametrize("family", CONFIGS)
def test_import_gives_the_keys_of_kvx(family: str) -> None:
    """Un-rotated keys and values equal those of kvx's own prefill."""
    model, tokens = tiny(family), text(1, 20)
    ours = load_transformers(model)
    theirs = from_transformers(run(model, tokens)[1], ours.config.geometry)
    native = prefill(ours, jnp.asarray(tokens))
    for i in range(theirs.num_layers):
        view, own = theirs.layer(i), native.layer(i)
        at = view.pos[0, 0]
        np.testing.assert_allclose(view.k, own.k[:, :, at], atol=2e-4)
        np.testing.assert_allclose(view.v, own.v[:, :, at], atol=2e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_export_and_import_round_trip(dtype: Any) -> None:
    cache = filled(np.tile(np.arange(20), (2, 1)), (8, None))
    cache = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, cache)
    theirs = to_transformers(rotate_keys(cache))
    assert str(theirs.layers[0].keys.dtype) == f"torch.{np.dtype(dtype).name}"
    back = from_transformers(theirs, cache.geometry)
    assert back.keys(0).dtype == dtype
    tolerance = {"float32": 1e-6, "bfloat16": 4e-2, "float16": 4e-3}[np.dtype(dtype).name]
    for i in range(2):
        at = back.layer(i).pos[0, 0]
        np.testing.assert_array_equal(back.values(i), cache.values(i)[:, :, at])
        got, want = (x.astype(jnp.float32) for x in (back.keys(i), cache.keys(i)[:, :, at]))
        np.testing.assert_allclose(got, want, atol=tolerance)
    assert [back.layer(i).pos.shape[-1] for i in range(2)] == [7, 20]


def test_rings_export_like_full_caches() -> None:
    where = geometry((4, None))
    ring, full = (empty(where, 2, 16, keep=keep) for keep in ("window", "all"))  # type: ignore[arg-type]
    k, v = chunk(full, 9, 0)
    pos = jnp.array([[0, 1, 2, -1, 3, 4, 5, 6, -1], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    full = append(full, k, v, pos)
    ring = append(ring, [k[0][i : i + 1] for i in range(2)], [v[0][i : i + 1] for i in range(2)], pos)
    for a, b in zip(to_transformers(ring).layers, to_transformers(full).layers, strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        assert a.get_seq_length() == b.get_seq_length() == 9
    assert attention_mask(full).tolist() == [[0, 0] + [1] * 7, [1] * 9]


def test_left_padded_batches_come_in_with_their_positions() -> None:
    cache = filled([[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]], (3, None))
    theirs = to_transformers(cache)
    mask = attention_mask(cache)
    pos = np.where(mask > 0, np.cumsum(mask, axis=1) - 1, -1)
    assert pos.tolist() == [[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]]
    back = from_transformers(theirs, cache.geometry, pos)
    assert back.layer(0).pos[:, 0].tolist() == [[3, 4], [1, 2]]
    assert back.layer(1).pos[:, 0].tolist() == pos.tolist()
    for i in range(2):
        for b in range(2):
            for p in (x for x in back.layer(i).pos[b, 0].tolist() if x >= 0):
                got, want = triples(rotate_keys(back))[i][b][p], triples(rotate_keys(cache))[i][b][p]
                np.testing.assert_allclose(*(np.frombuffer(x[0], np.float32) for x in (got, want)), atol=1e-6)
                assert got[1] == want[1]
    assert_clean(back)


def test_an_imported_cache_is_a_copy() -> None:
    """CASE 12: what transformers does to its mutable cache later does not reach ours, and the reverse."""
    model = tiny("llama")
    _, theirs = run(model, text(2, 6))
    cache = from_transformers(theirs, load_transformers(model).config.geometry)
    before = np.array(cache.values(0))
    out = to_transformers(cache)
    theirs.layers[0].values.zero_()
    run(model, text(3, 2), out)
    out.layers[0].values.fill_(7.0)
    np.testing.assert_array_equal(cache.values(0), before)
    assert cache.next_position().tolist() == [6]


def test_refusals() -> None:
    cache = filled([[0, 1, 2, 3]], (3, None))
    theirs = to_transformers(cache)
    with pytest.raises(KvxError, match="3 layers"):
        from_transformers(theirs, geometry((3, None, None)))
    with pytest.raises(KvxError, match="window of 3 tokens in the DynamicCache and 5"):
        from_transformers(theirs, geometry((5, None)))
    with pytest.raises(KvxError, match="all tokens seen"):
        from_transformers(theirs, cache.geometry, [[0, 1, 2]])
    with pytest.raises(KvxError, match="static"):
        from_transformers(StaticCache(config=gemma((SLIDING, FULL), 3), max_cache_len=9), cache.geometry)
    with pytest.raises(KvxError, match="DynamicCache with 2 layers"):
        from_transformers(object(), cache.geometry)
    with pytest.raises(KvxError, match="run the model on some tokens first"):
        from_transformers(DynamicCache(config=gemma((SLIDING, FULL), 3)), cache.geometry)
    with pytest.raises(KvxError, match="counts tokens from 0"):
        to_transformers(shift_positions(cache, 2))
    with pytest.raises(KvxError, match="lacks position 1 of row 0"):
        to_transformers(filled([[0, 2, 3]]))
    with pytest.raises(KvxError, match="6 layers but the cache 2"):
        to_transformers(cache, gemma(window=3))
    with pytest.raises(KvxError, match="outside jit"):
        jax.jit(to_transformers)(cache)


def test_names_that_are_on_the_move() -> None:
    """CASE 36: ``cache=`` or ``past_key_values=``, found by signature; ``crop`` counts what to remove, negated."""
    model = tiny("llama")
    assert cache_argument(model) == "cache"
    assert cache_argument(lambda input_ids, past_key_values=None: None) == "past_key_values"
    with pytest.raises(KvxError, match="neither"):
        cache_argument(lambda input_ids: None)
    _, theirs = run(model, text(4, 9))
    assert output_cache({"cache": None, "past_key_values": theirs}) is theirs
    with pytest.raises(KvxError, match="use_cache"):
        output_cache({})
    with pytest.raises(ValueError, match="positive value"):
        theirs.crop(5)
    crop_transformers(theirs, 5)
    assert theirs.get_seq_length() == 5
    crop_transformers(theirs, 5)
    assert theirs.get_seq_length() == 5
    with pytest.raises(KvxError, match="cannot keep 6"):
        crop_transformers(theirs, 6)


def contexts(family: str) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """Model, a context past the window, a boundary, and 16 greedy tokens by transformers alone."""
    model, context, boundary = tiny(family), text(5, 20), text(6, 3)
    want = greedy(model, np.concatenate([context, boundary], axis=1), 16)
    other = greedy(model, np.concatenate([text(9, 20), boundary], axis=1), 16)
    assert len(set(want[0].tolist())) > 3 and want.tolist() != other.tolist()  # the context shows in the tokens
    return model, context, boundary, want


@pytest.mark.parametrize("family", CONFIGS)
def test_an_exported_cache_continues_in_transformers(family: str) -> None:
    model, context, boundary, want = contexts(family)
    ours = load_transformers(model)
    for keep in ("all", "window"):
        cache = prefill(ours, jnp.asarray(context), keep=keep)
        for config in (None, model.config):
            assert greedy(model, boundary, 16, to_transformers(cache, config)).tolist() == want.tolist()


@pytest.mark.parametrize("family", CONFIGS)
def test_an_imported_cache_continues_in_kvx(family: str) -> None:
    model, context, boundary, want = contexts(family)
    ours = load_transformers(model)
    cache = from_transformers(run(model, context)[1], ours.config.geometry)
    got = generate(ours, jnp.asarray(boundary), cache, max_new_tokens=16)
    assert np.asarray(got.tokens).tolist() == want.tolist()


def test_a_ragged_batch_continues_in_transformers() -> None:
    model = tiny("gemma3_text")
    ours, context, boundary = load_transformers(model), text(7, 18, batch=2), text(8, 2, batch=2)
    context[1, 11:] = -1
    rows = [np.concatenate([context[b][context[b] >= 0], boundary[b]])[None] for b in range(2)]
    want = [greedy(model, row, 12)[0].tolist() for row in rows]
    cache: KVCache = prefill(ours, jnp.asarray(context), keep="window")
    mask = np.concatenate([attention_mask(cache), np.ones((2, 2), np.int64)], axis=1)
    start = np.asarray(cache.next_position())[:, None] + np.arange(2)[None]
    got = greedy(
        model,
        boundary,
        12,
        to_transformers(cache),
        attention_mask=torch.tensor(mask),
        position_ids=torch.tensor(start).long(),
    )
    assert got.tolist() == want
