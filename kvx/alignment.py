"""Alignment: which source tokens, with which weights, feed each target token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvx.errors import KvxError
from kvx.models.buckets import bucket_length
from kvx.models.embeddings import token_embeddings
from kvx.models.tokenizer import Encoding, Tokenizer
from kvx.typing import host, pytree, static, typed

if TYPE_CHECKING:
    from kvx.models.model import Model

RULES = ("covering", "causal", "overlap")
Rows = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class AlignmentReport:
    """What an alignment covers, over all its texts.

    Attributes:
        rule: ``"covering"``, ``"causal"`` or ``"overlap"``.
        texts: number of texts.
        characters: their length.
        source_tokens: source tokens of the texts, BOS not counted.
        target_tokens: target tokens of the contexts, BOS not counted.
        covered: target tokens that are fed by a source token; the others are left out of the translated cache.
        shared_ends: target tokens that end exactly where a source token ends.
        source_bos: whether the source's cache starts with its BOS (then slot 0 is never read).
        target_bos: whether the target's model expects a BOS, which is prefix and no part of the context.
    """

    rule: str
    texts: int
    characters: int
    source_tokens: int
    target_tokens: int
    covered: int
    shared_ends: int
    source_bos: bool
    target_bos: bool

    @property
    def coverage(self) -> float:
        """Fraction of target tokens fed by a source token; 1.0 where there is nothing to feed."""
        return self.covered / self.target_tokens if self.target_tokens else 1.0

    @property
    def source_tokens_per_character(self) -> float:
        """Source tokens per character of text."""
        return self.source_tokens / max(self.characters, 1)

    @property
    def target_tokens_per_character(self) -> float:
        """Target tokens per character of text."""
        return self.target_tokens / max(self.characters, 1)

    def __str__(self) -> str:
        shared = self.shared_ends / max(self.target_tokens, 1)
        bos = {True: "with BOS", False: "no BOS"}
        return (
            f"{self.rule}: {self.covered} of {self.target_tokens} target tokens fed ({self.coverage:.1%}) by "
            f"{self.source_tokens} source tokens; {shared:.1%} end where a source token ends; tokens per character "
            f"{self.source_tokens_per_character:.3f} source ({bos[self.source_bos]}), "
            f"{self.target_tokens_per_character:.3f} target ({bos[self.target_bos]})"
        )


@pytree
class Alignment:
    """Padded, batched alignment of a target context onto a source cache.

    A target token that no source token feeds (``causal``: it ends before the first source token does) has weight zero
    and position -1, like padding: it is left out of the translated cache, and the tokens after it keep their places.

    Attributes:
        index: int32 ``[B,T,R]``: for each of T target tokens, R slots of the source cache (the source's token order,
            its own BOS counted when it encodes one); 0 where the weight is 0.
        weight: float32 ``[B,T,R]``: their weights; rows of fed tokens sum to 1, all other rows are zero.
        pos: int32 ``[B,T]``: place of each target token in the context (0, 1, 2, ...; ``translate`` adds the length of
            the prefix); -1 for padding and for tokens that are not fed.
        embeddings: ``[B,T,M]`` the target's input embedding of each of its tokens, brought to unit root mean square,
            for maps that read them (see :mod:`kvx.mappers.embeddings`); zero at padding; ``None``: not looked up.
        source_prefix: slots of the source cache that come before its first context token: 1 for its BOS, else 0.
        report: host only: coverage, token counts and BOS facts; ``None`` after JAX has taken the alignment apart.
    """

    index: Array
    weight: Array
    pos: Array
    embeddings: Array | None = None
    source_prefix: int = static(default=0)
    report: AlignmentReport | None = host(default=None)

    def __repr__(self) -> str:
        facts = f": {self.report}" if self.report is not None else ""
        return f"Alignment({list(getattr(self.index, 'shape', ()))}, source_prefix={self.source_prefix}{facts})"


def align(
    source: Model | Tokenizer,
    target: Model | Tokenizer,
    texts: str | Iterable[str],
    *,
    rule: str = "covering",
    length: int | None = None,
    width: int | None = None,
    source_bos: bool | None = None,
    embed: bool = False,
) -> Alignment:
    """Align the target's tokens of one or more texts to the source's, by where they stand in the text.

    With ``e_s`` and ``e_t`` the ends of tokens in the text (inside a character they are ordered by bytes):

    * ``covering``: the source token that holds the target token's last character, ``min {s: e_s >= e_t}``; it may
      reach beyond the target token, so it looks ahead inside a token. Text that the source drops at the end of a text
      goes to its last token.
    * ``causal``: the last source token that ends at or before the target token's last character does; it never looks
      ahead, so a context may be extended. Target tokens before the first such token are not fed.
    * ``overlap``: all source tokens that share text with the target token, weighted by how much of it
      (Mixture-of-Translators' row-normalised overlap matrix); looks ahead like ``covering``.

    Args:
        source: model or tokenizer whose cache is handed over.
        target: model or tokenizer that decodes; its BOS is prefix, so it is no row of the alignment.
        texts: one text or B texts.
        rule: see above.
        length: T, target tokens after padding; ``None``: the bucket of the longest text.
        width: R; ``None``: 1, or for ``overlap`` the power of two that holds all. Smaller: the largest overlaps.
        source_bos: whether the source's cache starts with its BOS; ``None``: as its model expects, which is what
            ``encode_batch`` does.
        embed: also look up the target's input embeddings of its tokens, for maps that read them
            (``mapper.reads_embeddings``); the target must then be a model.

    Returns:
        Alignment with arrays ``[B,T,R]``; its ``report`` says what is covered.

    Raises:
        KvxError: unknown rule, a model without tokenizer, no text, a text longer than ``length``, or embeddings asked
            of a tokenizer.

    Example:
        >>> from tokenizers import Tokenizer as Backend, models, pre_tokenizers
        >>> words = Backend(models.WordLevel({"hand": 0, "over": 1, "?": 2}, unk_token="?"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> letters = Backend(models.BPE({c: i for i, c in enumerate("hand over")}, []))
        >>> source, target = Tokenizer.from_tokenizers(words), Tokenizer.from_tokenizers(letters)
        >>> align(source, target, "hand over", length=10).index[0, :, 0].tolist()
        [0, 0, 0, 0, 1, 1, 1, 1, 1, 0]
        >>> causal = align(source, target, "hand over", rule="causal", length=10)
        >>> causal.index[0, :, 0].tolist(), causal.pos[0].tolist()
        ([0, 0, 0, 0, 0, 0, 0, 0, 1, 0], [-1, -1, -1, 3, 4, 5, 6, 7, 8, -1])
        >>> round(causal.report.coverage, 3)
        0.667

    Reference:
        Overlap: Mixture-of-Translators, arXiv 2607.28979.
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    first, second = _tokenizer(source, "source"), _tokenizer(target, "target")
    ours, theirs = first.encodings(texts, source_bos), second.encodings(texts)
    made = align_encodings(ours, theirs, rule=rule, length=length, width=width)
    return _embedded(made, target, theirs) if embed else made


def _embedded(alignment: Alignment, target: Any, encodings: Sequence[Encoding]) -> Alignment:
    """The alignment with the target's embeddings of its tokens."""
    if isinstance(target, Tokenizer):
        raise KvxError("a tokenizer has no embeddings; align to the target model, or leave embed out.")
    tokens = np.full(alignment.pos.shape, -1, np.int32)
    for row, encoding in zip(tokens, encodings, strict=True):
        ids = encoding.ids[encoding.prefix :]
        row[: len(ids)] = ids
    return dataclasses.replace(alignment, embeddings=token_embeddings(target, jnp.asarray(tokens)))


def align_encodings(
    source: Sequence[Encoding],
    target: Sequence[Encoding],
    *,
    rule: str = "covering",
    length: int | None = None,
    width: int | None = None,
) -> Alignment:
    """Align texts that are encoded already; arguments and result as in :func:`align`.

    Args:
        source: B encodings, with or without BOS as the source's cache has it.
        target: B encodings of the same texts; a BOS is left out.
        rule: as in :func:`align`.
        length: as in :func:`align`.
        width: as in :func:`align`.

    Raises:
        KvxError: as :func:`align`; also encodings of different texts, or a BOS in some rows only.
    """
    _check(source, target, rule, length, width)
    rows = [_rows(s, t, rule) for s, t in zip(source, target, strict=True)]
    longest = max(len(index) for index, _ in rows)
    length = bucket_length(longest) if length is None else length
    widest = max(index.shape[1] for index, _ in rows)
    width = 1 << (widest - 1).bit_length() if width is None else width
    prefix = source[0].prefix
    index, weight = np.zeros((len(rows), length, width), np.int32), np.zeros((len(rows), length, width), np.float32)
    for b, row in enumerate(rows):
        at, mass = _fit_width(*row, width)
        index[b, : len(at), : at.shape[1]] = np.where(mass > 0, at + prefix, 0)
        weight[b, : len(at), : at.shape[1]] = mass
    fed = weight.sum(axis=2) > 0
    pos = np.where(fed, np.arange(length, dtype=np.int32), np.int32(-1))
    report = _report(source, target, rule, int(fed.sum()))
    return Alignment(jnp.asarray(index), jnp.asarray(weight), jnp.asarray(pos), source_prefix=prefix, report=report)


@typed
def compose(first: Alignment, second: Alignment) -> Alignment:
    """Alignment of the last target onto the first source: ``first`` feeds the tokens that ``second`` reads.

    Weights multiply and ``R = R1 R2``: ``w[t, (r2, r1)] = w2[t, r2] w1[i2[t, r2], r1]``. Rows that lose a part of their
    mass, because ``first`` does not feed a token, are scaled back to 1; rows that lose all are not fed. Pure and
    jittable; :func:`resample` through ``compose(a, b)`` equals resampling through ``a``, then ``b``.

    Args:
        first: source -> middle.
        second: middle -> target.

    Returns:
        Alignment ``[B,T2,R1*R2]``, without report.

    Raises:
        KvxError: different batch sizes.

    Example:
        >>> import jax.numpy as jnp
        >>> a = Alignment(jnp.array([[[2], [5]]]), jnp.ones((1, 2, 1)), jnp.array([[0, 1]]))
        >>> b = Alignment(jnp.array([[[1], [1], [0]]]), jnp.ones((1, 3, 1)), jnp.array([[0, 1, 2]]))
        >>> compose(a, b).index[0, :, 0].tolist()
        [5, 5, 2]
    """
    if first.index.shape[0] != second.index.shape[0]:
        raise KvxError(
            f"alignments of {first.index.shape[0]} and {second.index.shape[0]} texts cannot be composed; "
            "align the same batch of texts twice."
        )
    middle = second.index - second.source_prefix
    inside = (middle >= 0) & (middle < first.index.shape[1])
    take = jax.vmap(lambda rows, at: rows[at])
    at = jnp.where(inside, middle, 0)
    weight = take(first.weight, at) * jnp.where(inside, second.weight, 0)[..., None]
    flat = (*second.index.shape[:2], first.index.shape[2] * second.index.shape[2])
    index, weight = take(first.index, at).reshape(flat), weight.reshape(flat)
    total = weight.sum(axis=2, keepdims=True)
    weight = weight / jnp.where(total > 0, total, 1)
    pos = jnp.where(total[..., 0] > 0, second.pos, -1)
    index = jnp.where(weight > 0, index, 0)
    return Alignment(index, weight, pos, second.embeddings, source_prefix=first.source_prefix)


@typed
def resample(alignment: Alignment, x: Float[Array, "B *heads S D"]) -> Float[Array, "B *heads T D"]:
    """Carry source vectors onto the target's tokens: ``y[b,..,t] = sum_r weight[b,t,r] x[b,..,index[b,t,r]]``.

    Sums in fp32. Rows with weight zero are never read (``where`` before the product), so NaN in them stays there.

    Args:
        alignment: ``[B,T,R]``.
        x: ``[B,...,S,D]`` vectors in the source's slots, for example un-rotated keys of one layer.

    Returns:
        ``[B,...,T,D]`` in the dtype of ``x``; zeros where nothing feeds a token.

    Example:
        >>> import jax.numpy as jnp
        >>> a = Alignment(jnp.array([[[1, 0], [0, 0]]]), jnp.array([[[0.75, 0.25], [0.0, 0.0]]]), jnp.array([[0, -1]]))
        >>> resample(a, jnp.array([[[4.0], [8.0]]])).tolist()
        [[[7.0], [0.0]]]
    """

    def one(index: Array, weight: Array, vectors: Array) -> Array:
        total = jnp.zeros((*vectors.shape[:-2], index.shape[0], vectors.shape[-1]), jnp.float32)
        for r in range(index.shape[1]):
            w = weight[:, r, None].reshape((1,) * (vectors.ndim - 2) + (-1, 1))
            rows = jnp.where(w > 0, jnp.take(vectors, index[:, r], axis=-2).astype(jnp.float32), 0)
            total = total + w * rows
        return total.astype(vectors.dtype)

    return jax.vmap(one)(alignment.index, alignment.weight, x)


def _tokenizer(owner: Any, role: str) -> Tokenizer:
    """The tokenizer of a model, or the tokenizer itself."""
    found = owner if isinstance(owner, Tokenizer) else getattr(owner, "tokenizer", None)
    if not isinstance(found, Tokenizer):
        raise KvxError(
            f"the {role} ({type(owner).__name__}) has no tokenizer; pass the model that load_model returned (a jitted "
            "or tree-mapped one loses it) or a kvx Tokenizer."
        )
    return found


def _check(
    source: Sequence[Encoding], target: Sequence[Encoding], rule: str, length: int | None, width: int | None
) -> None:
    """Refuse what cannot be aligned."""
    if rule not in RULES:
        raise KvxError(f"alignment rule {rule!r} is not known; expected one of {', '.join(RULES)}.")
    if not source or len(source) != len(target):
        raise KvxError(f"{len(source)} source and {len(target)} target texts; expected the same texts, at least one.")
    if width is not None and width < 1:
        raise KvxError(f"width={width}; expected at least one source token for each target token.")
    for i, (s, t) in enumerate(zip(source, target, strict=True)):
        if s.characters != t.characters:
            raise KvxError(
                f"text {i} has {s.characters} characters for the source and {t.characters} for the target; "
                "encode the same text with both tokenizers."
            )
        if s.prefix != source[0].prefix:
            raise KvxError("some source texts start with BOS and some do not; encode all of them alike.")
        if length is not None and len(t) - t.prefix > length:
            raise KvxError(f"text {i} has {len(t) - t.prefix} target tokens, more than length={length}; shorten it.")


def _rows(source: Encoding, target: Encoding, rule: str) -> Rows:
    """Index among the source's context tokens and weight, both ``[T,R]``, of one text."""
    ends, at = source.ends[source.prefix :], target.ends[target.prefix :]
    if not len(ends):
        return np.zeros((len(at), 1), np.int64), np.zeros((len(at), 1))
    holder = np.searchsorted(ends, at)
    if rule == "overlap":
        return _overlaps(source, target, np.minimum(holder, len(ends) - 1))
    if rule == "causal":
        stops = target.offsets[target.prefix :, 1]
        done = ends[np.minimum(holder, len(ends) - 1)] <= stops
        holder = np.where(done & (holder < len(ends)), holder, holder - 1)
    index = np.clip(holder, 0, len(ends) - 1)[:, None]
    return index, (holder >= 0)[:, None].astype(np.float64)


def _overlaps(source: Encoding, target: Encoding, holder: np.ndarray) -> Rows:
    """All source tokens that share text with each target token; a token that shares none falls back to its holder."""
    (s_start, s_end), (t_start, t_end) = _spans(source), _spans(target)
    low = np.searchsorted(s_end, t_start, side="right")
    high = np.searchsorted(s_start, t_end, side="left")
    count = high - low
    alone = count <= 0
    low, count = np.where(alone, holder, low), np.where(alone, 1, count)
    index = low[:, None] + np.arange(count.max(initial=1))
    real = index < (low + count)[:, None]
    index = np.where(real, index, 0)
    shared = np.minimum(t_end[:, None], s_end[index]) - np.maximum(t_start[:, None], s_start[index])
    weight = np.where(alone[:, None], 1.0, shared) * real
    return index, weight / weight.sum(axis=1, keepdims=True)


def _spans(encoding: Encoding) -> tuple[np.ndarray, np.ndarray]:
    """Disjoint spans of the context's tokens, in characters: each starts no earlier than the one before it ends."""
    ends, first = encoding.ends[encoding.prefix :], np.maximum.accumulate(encoding.offsets[encoding.prefix :, 0])
    before = np.concatenate([np.full(1, -np.inf), ends])[:-1]
    return np.maximum(first, before), ends


def _fit_width(index: np.ndarray, weight: np.ndarray, width: int) -> Rows:
    """Keep the ``width`` heaviest columns of each row and scale rows back to 1."""
    if index.shape[1] <= width:
        return index, weight
    best = np.sort(np.argsort(-weight, axis=1, kind="stable")[:, :width], axis=1)
    kept = np.take_along_axis(weight, best, axis=1)
    return np.take_along_axis(index, best, axis=1), kept / kept.sum(axis=1, keepdims=True)


def _report(source: Sequence[Encoding], target: Sequence[Encoding], rule: str, covered: int) -> AlignmentReport:
    """Counts over all texts."""
    shared = [np.isin(t.ends[t.prefix :], s.ends[s.prefix :]).sum() for s, t in zip(source, target, strict=True)]
    return AlignmentReport(
        rule=rule,
        texts=len(source),
        characters=sum(s.characters for s in source),
        source_tokens=sum(len(s) - s.prefix for s in source),
        target_tokens=sum(len(t) - t.prefix for t in target),
        covered=covered,
        shared_ends=int(sum(shared)),
        source_bos=source[0].prefix > 0,
        target_bos=any(t.prefix > 0 for t in target),
    )
