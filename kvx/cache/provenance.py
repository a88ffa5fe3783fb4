"""Who made a cache: host-side facts kept beside arrays, never inside jitted pytrees.

Names say nothing: a fine-tuned copy served under the same name makes other keys and values. Identity is a digest of
weights (adapters included) and tokenizer, and a translated cache never passes for the model's own.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvx.errors import KvxError


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Identity of the weights and the tokenizer behind a cache or an artefact.

    Attributes:
        model: the name or path the user gave (for people; never compared).
        weights: SHA-256 of the weights, adapters included.
        tokenizer: SHA-256 of the tokenizer, empty when the model has none.
        exact: whether the cache is the model's own; translated caches are lossy and say ``False``.
        mapper: digest of the map that made a translated cache, ``None`` for native ones.

    Example:
        >>> mine = Provenance("base", weights="ab12")
        >>> mine.same_model(Provenance("base", weights="cd34")), mine.same_model(Provenance("copy", weights="ab12"))
        (False, True)
    """

    model: str
    weights: str
    tokenizer: str = ""
    exact: bool = True
    mapper: str | None = None

    def same_model(self, other: Provenance) -> bool:
        """Whether both come from the same weights and tokenizer, whatever they are called."""
        return (self.weights, self.tokenizer) == (other.weights, other.tokenizer)

    def translated(self, mapper: str) -> Provenance:
        """Provenance of a cache for this model that the map with digest ``mapper`` made: lossy, for good.

        Raises:
            KvxError: an empty digest.

        Example:
            >>> Provenance("base", weights="ab12").translated("77").exact
            False
        """
        if not mapper:
            raise KvxError("a translated cache needs the digest of its map; expected a SHA-256, got an empty string.")
        chain = mapper if self.mapper is None else _sha(self.mapper, mapper)
        return dataclasses.replace(self, exact=False, mapper=chain)

    def with_adapters(self, *adapters: str) -> Provenance:
        """Provenance of the model with adapters (their digests, in order of application) added to its weights.

        Example:
            >>> base = Provenance("base", weights="ab12")
            >>> base.same_model(base.with_adapters("0f"))
            False
        """
        return dataclasses.replace(self, weights=_sha(self.weights, *adapters)) if adapters else self


def _sha(*parts: str) -> str:
    """SHA-256 of a list of strings, unambiguous about where each ends."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def digest_arrays(tree: Any) -> str:
    """SHA-256 of every array of a pytree: path, dtype, shape and bytes.

    Args:
        tree: any pytree of arrays; dictionaries count in key order, so their insertion order does not matter.

    Returns:
        64 hexadecimal digits.

    Example:
        >>> a = digest_arrays({"w": np.zeros(2, np.float32)})
        >>> a == digest_arrays({"w": np.zeros(2, np.float32)}), a == digest_arrays({"w": np.zeros(2, np.int32)})
        (True, False)
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.ascontiguousarray(leaf)
        facts = f"{jax.tree_util.keystr(path)} {array.dtype.name} {np.shape(leaf)}".encode()
        digest.update(len(facts).to_bytes(8, "little") + facts)
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def digest_files(paths: str | Path | Iterable[str | Path], *, block: int = 1 << 22) -> str:
    """SHA-256 of one file, or of the contents of several, whatever their names and in whichever order they are given.

    Args:
        paths: the files (weight shards, adapters).
        block: bytes read at a time.

    Returns:
        64 hexadecimal digits; for a single file the usual SHA-256 of its bytes.

    Raises:
        KvxError: no file, or one that cannot be read.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     digest_files(file.name)[:8]
        'e3b0c442'
    """
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not paths:
        raise KvxError("no files to digest; expected the weight files of a model.")
    digests = sorted(_digest_file(Path(path), block) for path in paths)
    return digests[0] if len(digests) == 1 else _sha(*digests)


def _digest_file(path: Path, block: int) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while data := file.read(block):
                digest.update(data)
    except OSError as error:
        raise KvxError(f"cannot read {path} to identify its model ({error.strerror}); check the path.") from None
    return digest.hexdigest()


def exact_key(provenance: Provenance, tokens: Sequence[int] | np.ndarray) -> str:
    """Key under which a native cache of ``tokens`` may be stored for exact look-ups.

    Args:
        provenance: of the cache, with weight digest.
        tokens: token ids of the cached prefix, padding (-1) left out.

    Returns:
        64 hexadecimal digits that depend on weights, tokenizer and tokens, never on the model's name.

    Raises:
        KvxError: the cache is translated (lossy): whoever looks the prefix up later would take it for the model's own.

    Example:
        >>> base = Provenance("base", weights="ab12")
        >>> exact_key(base, [1, 2, 3]) == exact_key(Provenance("copy", weights="ab12"), [1, 2, 3, -1])
        True
        >>> exact_key(base.translated("77"), [1, 2, 3])
        Traceback (most recent call last):
            ...
        kvx.errors.KvxError: this cache is translated (map 77), ... use translated_key.
    """
    if not provenance.exact or provenance.mapper is not None:
        raise KvxError(
            f"this cache is translated (map {str(provenance.mapper)[:12]}), so it is lossy and must not be stored "
            "under the exact key of its tokens; use translated_key."
        )
    return _key("exact", provenance, tokens)


def translated_key(provenance: Provenance, tokens: Sequence[int] | np.ndarray) -> str:
    """Key for storing a translated cache; it names the map and never equals any :func:`exact_key`.

    Raises:
        KvxError: the cache is native.

    Example:
        >>> base = Provenance("base", weights="ab12")
        >>> translated_key(base.translated("77"), [1]) == translated_key(base.translated("78"), [1])
        False
    """
    if provenance.exact or provenance.mapper is None:
        raise KvxError("this cache is the model's own; store it under exact_key.")
    return _key("translated", provenance, tokens)


def _key(kind: str, provenance: Provenance, tokens: Sequence[int] | np.ndarray) -> str:
    if not provenance.weights:
        raise KvxError(f"model {provenance.model!r} has no weight digest, so its caches have no key; load it with one.")
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not (np.issubdtype(ids.dtype, np.integer) or ids.size == 0):
        raise KvxError(f"tokens are {ids.dtype}{ids.shape}; expected one row of integer ids.")
    row = ids[ids >= 0].astype("<i8").tobytes().hex()
    return _sha("kvx", kind, provenance.weights, provenance.tokenizer, provenance.mapper or "", row)
