"""Identity is a digest (CASE 17), and a translated cache never takes an exact key (CASE 18)."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvx.cache import Provenance, digest_arrays, digest_files, exact_key, translated_key
from kvx.errors import KvxError

TOKENS = [5, 6, 7]


def test_a_perturbed_copy_under_the_same_name_is_another_model() -> None:
    """CASE 17: the name is the same, one weight differs in its last bit."""
    weights = {"w": np.ones((3, 4), np.float32), "b": jnp.zeros(4, jnp.bfloat16)}
    other = {**weights, "w": weights["w"].copy()}
    other["w"][2, 3] = np.nextafter(np.float32(1.0), np.float32(2.0))
    a, b = (Provenance("served/model", digest_arrays(w), "tok") for w in (weights, other))
    assert not a.same_model(b)
    assert exact_key(a, TOKENS) != exact_key(b, TOKENS)
    renamed = Provenance("elsewhere/copy", digest_arrays(dict(reversed(weights.items()))), "tok")
    assert a.same_model(renamed) and exact_key(a, TOKENS) == exact_key(renamed, TOKENS)


def test_tokenizer_and_adapters_are_part_of_identity() -> None:
    base = Provenance("m", "aa", "tok")
    assert not base.same_model(Provenance("m", "aa", "other"))
    assert exact_key(base, TOKENS) != exact_key(Provenance("m", "aa", "other"), TOKENS)
    tuned = base.with_adapters("11", "22")
    assert not base.same_model(tuned) and base.with_adapters() == base
    assert tuned != base.with_adapters("22", "11") and tuned != base.with_adapters("1122")


def test_translated_caches_never_take_an_exact_key() -> None:
    """CASE 18."""
    native = Provenance("m", "aa", "tok")
    moved = native.translated("77")
    assert moved.same_model(native) and not moved.exact
    with pytest.raises(KvxError, match="lossy"):
        exact_key(moved, TOKENS)
    for forged in (Provenance("m", "aa", "tok", exact=True, mapper="77"), Provenance("m", "aa", "tok", exact=False)):
        with pytest.raises(KvxError, match="lossy"):
            exact_key(forged, TOKENS)
    assert translated_key(moved, TOKENS) != exact_key(native, TOKENS)
    assert translated_key(moved, TOKENS) != translated_key(moved.translated("78"), TOKENS)
    with pytest.raises(KvxError, match="model's own"):
        translated_key(native, TOKENS)
    with pytest.raises(KvxError, match="digest of its map"):
        native.translated("")


def test_keys_need_digest_and_ids() -> None:
    with pytest.raises(KvxError, match="no weight digest"):
        exact_key(Provenance("m", ""), TOKENS)
    with pytest.raises(KvxError, match="integer ids"):
        exact_key(Provenance("m", "aa"), [0.5])  # type: ignore[list-item]
    with pytest.raises(KvxError, match="one row"):
        exact_key(Provenance("m", "aa"), np.zeros((1, 3), np.int32))


@given(st.lists(st.integers(0, 2**31 - 1), max_size=6), st.lists(st.integers(0, 2**31 - 1), max_size=6))
def test_keys_are_equal_exactly_when_tokens_are(a: list[int], b: list[int]) -> None:
    base = Provenance("m", "aa")
    assert (exact_key(base, a) == exact_key(base, b)) == (a == b)
    assert exact_key(base, [*a, -1, -1]) == exact_key(base, np.asarray(a, np.int64))


def test_digest_arrays_sees_dtype_shape_and_path() -> None:
    zeros = np.zeros(4, np.float32)
    seen = {
        digest_arrays({"a": zeros}),
        digest_arrays({"b": zeros}),
        digest_arrays({"a": zeros.reshape(2, 2)}),
        digest_arrays({"a": zeros.astype(np.int32)}),
        digest_arrays({"a": zeros.astype(np.float64)}),
        digest_arrays({"a": zeros, "b": zeros}),
        digest_arrays({"a": np.float32(0.0)}),
        digest_arrays({}),
    }
    assert len(seen) == 8
    strided = np.arange(8, dtype=np.float32)[::2]
    assert digest_arrays([strided]) == digest_arrays([jnp.asarray(strided)])


def test_digest_files_reads_contents_only(tmp_path: Path) -> None:
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    one.write_bytes(b"a" * 10_000)
    two.write_bytes(b"b")
    assert digest_files([one, two]) == digest_files((str(two), one))
    assert digest_files(one, block=7) == digest_files([one])
    before = digest_files([one, two])
    two.rename(tmp_path / "renamed")
    assert digest_files([one, tmp_path / "renamed"]) == before
    (tmp_path / "renamed").write_bytes(b"c")
    assert digest_files([one, tmp_path / "renamed"]) != before
    with pytest.raises(KvxError, match="cannot read"):
        digest_files(tmp_path / "absent")
    with pytest.raises(KvxError, match="no files"):
        digest_files([])
