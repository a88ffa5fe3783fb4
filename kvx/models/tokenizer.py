"""Tokenizers: text to tokens with character offsets of the whole text, and back."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from tokenizers.processors import TemplateProcessing

from kvx.errors import KvxError
from kvx.models.chat import render_chat
from kvx.models.offsets import code_points, fill_gaps, strict_ends, utf8_starts


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Encoding:
    """Tokens of one text and where they stand in it.

    Attributes:
        ids: int32 ``[T]`` token ids.
        offsets: int32 ``[T,2]`` first character of each token and the one after its last, counted in the whole text.
            Tokens that split one character share it; a BOS or an inserted space, which holds no text, has (0, 0).
        ends: float64 ``[T]`` where each token ends, in characters: ``offsets[:, 1]``, but fractional for a token that
            stops inside a character; strictly increasing over the tokens of the text; -inf for BOS.
        prefix: number of leading tokens that are not text: 1 when a BOS was asked for, else 0.
        characters: length of the text.
    """

    ids: np.ndarray
    offsets: np.ndarray
    ends: np.ndarray = None  # type: ignore[assignment]
    prefix: int = 0
    characters: int = 0

    def __post_init__(self) -> None:
        if self.ends is None:
            object.__setattr__(self, "ends", self.offsets[:, 1].astype(np.float64))

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Encoding({len(self)} tokens, {self.prefix} of them BOS, of {self.characters} characters)"

    @property
    def tokens(self) -> jax.Array:
        """The ids as a batch of one: int32 ``[1,T]``."""
        return jax.device_put(np.array(self.ids[None]))  # jnp.asarray would compile a copy for every length


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tokenizer:
    """A model's tokenizer: an immutable value around a ``tokenizers.Tokenizer``; lives on the host.

    Build one with :meth:`from_folder` or :meth:`from_tokenizers`. BOS is kvx's business, never the backend's, so
    it is neither added twice nor forgotten; an EOS is never added, since a context is there to be continued.

    Attributes:
        backend: the ``tokenizers.Tokenizer`` (treat as read-only).
        bos_id: id of the beginning-of-sequence token, ``None`` when the model has none.
        eos_ids: ids that end a generation, the tokenizer's own first.
        adds_bos: whether the model expects BOS at the start of a text.
        chat_template: Jinja source, ``None`` for models without one.
        specials: names templates may read: ``{"bos_token": "<s>", ...}``.

    Example:
        >>> from tokenizers import Tokenizer as Backend, models, pre_tokenizers
        >>> backend = Backend(models.WordLevel({"<s>": 0, "?": 1, "hello": 2, "world": 3}, unk_token="?"))
        >>> backend.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = Tokenizer.from_tokenizers(backend, bos="<s>", adds_bos=True)
        >>> encoding = tokenizer.encode("hello world")
        >>> encoding.ids.tolist(), encoding.offsets.tolist()
        ([0, 2, 3], [[0, 0], [0, 5], [6, 11]])
        >>> tokenizer.decode(encoding.tokens)
        'hello world'
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    adds_bos: bool = False
    chat_template: str | None = None
    specials: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_tokenizers(
        cls,
        backend: tokenizers.Tokenizer,
        *,
        bos: str | int | None = None,
        eos: str | int | Sequence[str | int] = (),
        adds_bos: bool | None = None,
        chat_template: str | None = None,
        specials: Mapping[str, str] | None = None,
        copy: bool = True,
    ) -> Tokenizer:
        """Wrap a ``tokenizers.Tokenizer``.

        Args:
            backend: any tokenizer; its truncation, padding and post-processor are switched off in the wrapped one.
            bos: beginning-of-sequence token (text or id); ``None``: the one its post-processor adds, if any.
            eos: token or tokens that end a generation.
            adds_bos: ``None``: whether its post-processor adds one.
            chat_template: Jinja source.
            specials: further named special tokens for the template.
            copy: leave ``backend`` untouched; ``False`` saves about a second for vocabularies of 260k.

        Raises:
            KvxError: a token that is not in the vocabulary, ``adds_bos`` without BOS, or a post-processor that
                contradicts ``bos``.
        """
        backend = tokenizers.Tokenizer.from_str(backend.to_str()) if copy else backend
        backend.no_truncation()
        backend.no_padding()
        found = _template_bos(backend)
        bos_id = found if bos is None else _resolve(backend, bos)
        if adds_bos is None:
            adds_bos = found is not None
            if found not in (None, bos_id):
                raise KvxError(
                    f"this tokenizer starts texts with {backend.id_to_token(found)!r} but bos is {bos!r}; "
                    "pass adds_bos=True or False to say whether bos starts a text."
                )
        if adds_bos and bos_id is None:
            raise KvxError("adds_bos=True needs a BOS token and this tokenizer has none; pass bos= or adds_bos=False.")
        eos_ids = tuple(dict.fromkeys(_resolve(backend, e) for e in ([eos] if isinstance(eos, str | int) else eos)))
        if bos_id is not None and not _is_special(backend, bos_id):
            backend.add_special_tokens([str(backend.id_to_token(bos_id))])
        backend.post_processor = _bos_template(backend, bos_id if adds_bos else None)
        named = {"bos_token": bos_id, "eos_token": eos_ids[0] if eos_ids else None}
        names = {name: str(backend.id_to_token(i)) for name, i in named.items() if i is not None}
        return cls(backend, bos_id, eos_ids, adds_bos, chat_template, {**names, **(specials or {})})

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Tokenizer of a Hugging Face model folder; see :func:`kvx.models.tokenizer_files.read_folder`."""
        from kvx.models.tokenizer_files import read_folder

        return read_folder(Path(folder))

    def save(self, folder: str | Path) -> None:
        """Write the files :meth:`from_folder` reads; transformers' ``AutoTokenizer`` reads them too."""
        from kvx.models.tokenizer_files import write_folder

        write_folder(self, Path(folder))

    def __repr__(self) -> str:
        token = self.backend.id_to_token
        bos = "none" if self.bos_id is None else f"{token(self.bos_id)!r} ({'added' if self.adds_bos else 'not added'})"
        eos = ", ".join(repr(token(i)) for i in self.eos_ids) or "none"
        chat = "chat template" if self.chat_template else "no chat template"
        return f"Tokenizer({self.vocab_size} tokens, BOS {bos}, EOS {eos}, {chat}, {self.digest[:8]})"

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Tokens a target prefills itself before a translated context: ``(BOS,)``, or ``(EOS,)`` without one."""
        return (self.bos_id,) if self.bos_id is not None else self.eos_ids[:1]

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decides which tokens a text becomes (the chat template does not)."""
        facts = json.dumps([self.bos_id, list(self.eos_ids), self.adds_bos])
        return hashlib.sha256((self.backend.to_str() + facts).encode()).hexdigest()

    def token_id(self, token: str) -> int | None:
        """Id of a vocabulary entry, or ``None``."""
        return self.backend.token_to_id(token)

    def encode(self, text: str, bos: bool | None = None) -> Encoding:
        """Tokens of one text with character offsets.

        Args:
            text: any Unicode text; special tokens written in it (``<|im_end|>``) are read as such.
            bos: start with BOS: ``None`` as the model expects. A text that already begins with it gets no second one;
                with ``False`` it loses its own, where the model expects one: it stands at the start already.

        Raises:
            KvxError: not a str, a lone surrogate, or ``bos=True`` without a BOS token.
        """
        if not isinstance(text, str):
            raise KvxError(f"encode takes one str, got {type(text).__name__}; use encode_batch for several texts.")
        points, lead = code_points(text), self._lead(bos)
        return self._encoding(self.backend.encode(text, add_special_tokens=False), points, lead)

    def encodings(self, texts: Iterable[str], bos: bool | None = None) -> list[Encoding]:
        """One :class:`Encoding` per text; see :meth:`encode`."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        return [self.encode(text, bos) for text in texts]

    def encode_batch(self, texts: Iterable[str], bos: bool | None = None, length: int | None = None) -> jax.Array:
        """Tokens of several texts, padded on the right with -1.

        Args:
            texts: B texts.
            bos: as in :meth:`encode`.
            length: pad to this many tokens; ``None``: to the longest.

        Returns:
            int32 ``[B,T]``.

        Raises:
            KvxError: a text has more than ``length`` tokens.

        Example:
            >>> from tokenizers import Tokenizer as Backend, models, pre_tokenizers
            >>> backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
            >>> backend.pre_tokenizer = pre_tokenizers.Whitespace()
            >>> Tokenizer.from_tokenizers(backend).encode_batch(["a b a", "b"]).tolist()
            [[0, 1, 0], [1, -1, -1]]
        """
        rows = [encoding.ids for encoding in self.encodings(texts, bos)]
        longest = max((len(row) for row in rows), default=0)
        length = longest if length is None else length
        if longest > length:
            raise KvxError(
                f"the longest text has {longest} tokens, more than length={length}; shorten it or raise length."
            )
        tokens = np.full((len(rows), length), -1, np.int32)
        for row, out in zip(rows, tokens, strict=True):
            out[: len(row)] = row
        return jax.device_put(tokens)  # jnp.asarray would compile a copy for every length

    def decode(self, tokens: Sequence[int] | np.ndarray | jax.Array, *, skip_special: bool = True) -> str:
        """Text of one row of token ids (``[T]`` or ``[1,T]``); negative ids (padding) are dropped.

        Args:
            tokens: integer ids.
            skip_special: leave out special tokens (BOS, EOS, turn markers).

        Raises:
            KvxError: several rows, or ids that are not integers.
        """
        row = np.asarray(tokens)
        row = row[0] if row.ndim == 2 and row.shape[0] == 1 else row
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise KvxError(
                f"decode takes one row of integer ids, got {row.dtype} {list(row.shape)}; decode row by row."
            )
        return self.backend.decode([int(i) for i in row if i >= 0], skip_special_tokens=skip_special)

    def decode_stream(self, ids: Iterable[int], *, skip_special: bool = True) -> Iterator[str]:
        """Text of tokens as they arrive, in pieces that never cut a character; joined, they are ``decode(ids)``.

        (Except where a byte-fallback token makes no character with the ones before it: they are text already.)

        Args:
            ids: token ids, for example from a streaming generator.
            skip_special: leave out special tokens.
        """
        done, seen = 0, 0
        row: list[int] = []
        for token in ids:
            row.append(int(token))
            before = self.decode(row[done:seen], skip_special=skip_special)
            text = self.decode(row[done:], skip_special=skip_special)
            if len(text) > len(before) and not text.endswith("\ufffd"):
                yield text[len(before) :]
                done, seen = seen, len(row)
        before = self.decode(row[done:seen], skip_special=skip_special)
        rest = self.decode(row[done:], skip_special=skip_special)[len(before) :]
        if rest:
            yield rest

    def piece(self, token: int) -> bytes:
        """UTF-8 bytes that a token contributes to a text, possibly part of a character; ``▁`` and ``Ġ`` are spaces.

        Example:
            >>> from tokenizers import Tokenizer as Backend, decoders, models
            >>> backend = Backend(models.BPE({"Ġ": 0, "Ã": 1}, []))
            >>> backend.decoder = decoders.ByteLevel()
            >>> tokenizer = Tokenizer.from_tokenizers(backend)
            >>> tokenizer.piece(0), tokenizer.piece(1)
            (b' ', b'\\xc3')
        """
        text = self.backend.id_to_token(token)
        if text is None:
            raise KvxError(f"token {token} is not in this vocabulary of {self.vocab_size}.")
        if token in self._added:
            return text.encode()
        if self._byte_level:
            table = _byte_level_bytes()
            return b"".join(bytes([table[c]]) if c in table else c.encode() for c in text)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return text.replace("▁", " ").encode()

    def apply_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Conversation as the text the model was trained on; see :func:`kvx.models.chat.render_chat`.

        Raises:
            KvxError: no chat template, malformed messages, or the template rejects them.
        """
        if self.chat_template is None:
            raise KvxError("this tokenizer has no chat template; pass plain text, or give it one (chat_template=).")
        names = {**self.specials, **variables}
        return render_chat(self.chat_template, messages, add_generation_prompt=add_generation_prompt, **names)

    def _lead(self, bos: bool | None) -> bool:
        """Whether a text is to start with BOS."""
        if bos and self.bos_id is None:
            raise KvxError("bos=True, but this tokenizer has no BOS token; pass bos=None or False.")
        return self.adds_bos if bos is None else bos

    def _encoding(self, raw: Any, points: np.ndarray, lead: bool) -> Encoding:
        """Arrays of one backend encoding, offsets made total and ordered, BOS in front if wanted and missing."""
        ids = np.array(raw.ids, np.int32)
        offsets = np.array(raw.offsets, np.int64).reshape(-1, 2)
        ends = offsets[:, 1].astype(np.float64)
        if len(ids):
            offsets = fill_gaps(offsets, points)
            ends, offsets = strict_ends(offsets, ids, utf8_starts(points), lambda token: len(self.piece(token)))
        if lead and not (len(ids) and ids[0] == self.bos_id):
            ids = np.concatenate([np.array([self.bos_id], np.int32), ids])
            offsets = np.concatenate([np.zeros((1, 2), np.int64), offsets])
            ends = np.concatenate([np.array([-np.inf]), ends])
        elif not lead and self.adds_bos and len(ids) and ids[0] == self.bos_id:
            ids, offsets, ends = ids[1:], offsets[1:], ends[1:]
        return Encoding(ids, offsets.astype(np.int32), ends, int(lead), len(points))

    @functools.cached_property
    def _added(self) -> frozenset[int]:
        """Ids of added tokens, whose text is literal."""
        return frozenset(self.backend.get_added_tokens_decoder())

    @functools.cached_property
    def _byte_level(self) -> bool:
        """Whether pieces spell bytes in the GPT-2 alphabet."""
        parts = (self.backend.decoder, self.backend.pre_tokenizer)
        return any(b'"ByteLevel"' in part.__getstate__() for part in parts if part is not None)


@functools.cache
def _byte_level_bytes() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _resolve(backend: tokenizers.Tokenizer, token: str | int) -> int:
    """Id of a token given as text or id."""
    found = backend.token_to_id(token) if isinstance(token, str) else token
    if found is None or backend.id_to_token(found) is None:
        raise KvxError(f"token {token!r} is not in this tokenizer's vocabulary; pass one that is, or none.")
    return found


def _is_special(backend: tokenizers.Tokenizer, token: int) -> bool:
    """Whether the backend knows the token as special, so that it is never split and decoding can leave it out."""
    added = backend.get_added_tokens_decoder().get(token)
    return added is not None and added.special


def _template_bos(backend: tokenizers.Tokenizer) -> int | None:
    """Id of the token that the backend's post-processor puts before a text."""
    full = backend.encode("a", add_special_tokens=True)
    lead = full.special_tokens_mask.index(0) if 0 in full.special_tokens_mask else len(full.ids)
    bare = backend.encode("a", add_special_tokens=False)
    lead = lead if bare.ids else min(lead, 1)
    if lead > 1:
        raise KvxError(f"this tokenizer starts every text with {lead} special tokens; kvx handles one BOS.")
    return full.ids[0] if lead else None


def _bos_template(backend: tokenizers.Tokenizer, bos_id: int | None) -> TemplateProcessing:
    """Post-processor that other programs need to see in the saved file; kvx encodes without it."""
    if bos_id is None:
        return TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    token = backend.id_to_token(bos_id)
    pieces = [(token, bos_id)]
    return TemplateProcessing(single=[token, "$A"], pair=[token, "$A", token, "$B:1"], special_tokens=pieces)
