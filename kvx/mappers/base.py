"""What every mapper shares: the fitted map as a value, the method's protocol, and entries of a support table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from kvx.alignment import Alignment
from kvx.cache.build import blank_group, concrete, last_filled
from kvx.cache.cache import CacheGroup, KVCache
from kvx.cache.geometry import CacheGeometry
from kvx.cache.ops import concatenate, rotate_keys, unrotate_keys
from kvx.cache.provenance import digest_arrays
from kvx.errors import KvxError
from kvx.mappers.embeddings import reads_embeddings
from kvx.mappers.receiver import context_start, reads_receiver, receiver_rows
from kvx.typing import host, pytree, static

if TYPE_CHECKING:
    from kvx.fitting.moments import Moments
    from kvx.models.model import Model

COMPONENTS = ("keys", "values")
Part = tuple[int, int, int]


@runtime_checkable
class Mapper(Protocol):
    """A closed-form, linear cache map as a frozen, hashable dataclass of settings; arrays live in ``params``."""

    def reach(self, source: CacheGeometry, target: CacheGeometry) -> tuple[tuple[int, ...], ...] | None:
        """For each target layer the source layers that may feed it, so that only their moments are gathered.

        ``None``: any of them.
        """

    def fit(self, moments: Moments, held_out: Moments | None = None) -> Any:
        """Parameters (a pytree) from moments; ``held_out``, of other texts, chooses whatever is to be chosen."""

    def apply(self, params: Any, cache: KVCache, alignment: Alignment) -> KVCache:
        """The target's cache of the context alone: slots and positions of the alignment, zeros in empty slots."""


@pytree
class CacheMap:
    """A fitted map of a directed pair of models: pass it to :func:`kvx.translate`, :func:`kvx.save`, jitted functions.

    Attributes:
        params: arrays of the method.
        prefix: the target's own cache of the tokens that precede every context (one row), or ``None``.
        method: settings.
        source, target: geometry of the caches it reads and writes; no layers: any (the identity).
        rule: alignment rule it was fitted with.
        provenance: host only: ``source`` and ``target`` (:class:`kvx.cache.provenance.Provenance` or ``None``),
            ``digest`` of the map, and what it was fitted on.
    """

    params: Any
    prefix: KVCache | None
    method: Any = static()
    source: CacheGeometry = static(default=CacheGeometry(()))
    target: CacheGeometry = static(default=CacheGeometry(()))
    rule: str = static(default="covering")
    provenance: Mapping[str, Any] | None = host(default=None)

    @property
    def prefix_length(self) -> int:
        """Tokens of the prefix: the position where the context starts."""
        return 0 if self.prefix is None else self.prefix.groups[0].slots

    @property
    def reads_target(self) -> bool:
        """Whether the target has to read the context too: :func:`kvx.translate` then needs ``receiver=``."""
        return reads_receiver(self.method)

    @property
    def reads_embeddings(self) -> bool:
        """Whether it reads the target's embeddings of the tokens: :func:`kvx.align` then needs ``embed=True``."""
        return reads_embeddings(self.params)

    @property
    def digest(self) -> str:
        """SHA-256 of the parameters and the prefix; recorded at fit time, computed anew where that record is lost."""
        recorded = (self.provenance or {}).get("digest")
        return recorded or digest_map(self)

    @property
    def size(self) -> int:
        """Bytes that a translation reads; what only controls need (``covariance`` of linear maps) is left out."""
        return sum(p.stored if hasattr(p, "stored") else p.size * p.dtype.itemsize for p in self._parts)

    @property
    def parameters(self) -> int:
        """Numbers that a translation reads."""
        return sum(p.parameters if hasattr(p, "parameters") else p.size for p in self._parts)

    def flops(self, tokens: int) -> int:
        """Floating-point operations of translating a context of so many tokens, batch 1; products only."""
        return sum(part.flops(tokens) for part in self._parts if hasattr(part, "flops"))

    @property
    def _parts(self) -> list[Any]:
        return jax.tree.leaves(self.params, is_leaf=lambda part: hasattr(part, "stored"))

    def __repr__(self) -> str:
        names = [getattr((self.provenance or {}).get(side), "model", "?") for side in ("source", "target")]
        layers = f"{self.source.num_layers} -> {self.target.num_layers} layers"
        return f"CacheMap({names[0]} -> {names[1]}, {layers}, {self.method}, {self.size / 1e6:,.1f} MB)"


def context_of(
    method: Any,
    params: Any,
    cache: KVCache,
    alignment: Alignment,
    *,
    receiver: KVCache | None = None,
    prefix: KVCache | None = None,
) -> KVCache:
    """The cache that a mapper or a translator makes of a context, without what only training reads."""
    return applied(method, params, cache, alignment, receiver=receiver, prefix=prefix)[0]


def applied(
    method: Any,
    params: Any,
    cache: KVCache,
    alignment: Alignment,
    *,
    receiver: KVCache | None = None,
    prefix: KVCache | None = None,
    **training: Any,
) -> tuple[KVCache, dict[str, jax.Array]]:
    """A method's ``apply`` with what it needs, in the form it needs it, and its penalties.

    Args:
        method: mapper or translator; params: its parameters.
        cache: of the source, keys rotated or not.
        alignment: of the context.
        receiver: the target's own cache of the context, with or without its prefix, keys rotated or not.
        prefix: what comes before the context, which says where the receiver's tokens stand.
        training: ``rng`` (noise) and ``step`` (int32, steps done), passed on where the method asks for them.

    Returns:
        The target's cache of the context alone, keys un-rotated, positions from zero; and penalties by name.
    """
    more = {name: value for name, value in training.items() if name in getattr(method, "needs", ()) or name == "rng"}
    turn = rotate_keys if getattr(method, "rotated", False) else unrotate_keys
    if not reads_receiver(method):
        made = method.apply(params, turn(cache), alignment, **more)
        return made if isinstance(made, tuple) else (made, {})
    if receiver is None:
        raise KvxError(f"{method} reads the target's own cache of the context, and none was given; pass receiver=.")
    own = turn(receiver_rows(receiver, alignment, context_start(prefix)))
    made, penalties = method.apply(params, turn(cache), alignment, receiver=own, **more)
    return (_from_rotated(made, own) if made.rotated else made), penalties


def _from_rotated(made: KVCache, own: KVCache) -> KVCache:
    """A context whose keys are rotated for the receiver's positions, un-rotated."""
    placed = tuple(dataclasses.replace(g, pos=own.groups[0].pos) for g in made.groups)
    back = unrotate_keys(dataclasses.replace(made, groups=placed))
    groups = tuple(dataclasses.replace(g, pos=old.pos) for g, old in zip(back.groups, made.groups, strict=True))
    return dataclasses.replace(back, groups=groups)


def after_prefix(prefix: KVCache | None, context: KVCache) -> KVCache:
    """The target's prefix (one row, or one a row of the context), then the context at the positions after it."""
    if prefix is None:
        return context
    prefix = unrotate_keys(prefix) if prefix.rotated else prefix
    dtype, start = prefix.groups[0].k.dtype, prefix.next_position()[None, :, None, None]
    groups = tuple(
        dataclasses.replace(g, k=g.k.astype(dtype), v=g.v.astype(dtype), pos=jnp.where(g.pos >= 0, g.pos + start, -1))
        for g in context.groups
    )
    return concatenate(prefix, dataclasses.replace(context, groups=groups))


def digest_map(mapper: CacheMap) -> str:
    """SHA-256 of a map's arrays, with their names, dtypes and shapes."""
    return digest_arrays((mapper.params, mapper.prefix))


def check_models(mapper: CacheMap, source: Model, target: Model) -> None:
    """Refuse a map that was fitted for other weights or another tokenizer, whatever the models are called.

    Models or maps that carry no provenance are compared by shape only.

    Raises:
        KvxError: naming the model that differs.
    """
    for side, model in (("source", source), ("target", target)):
        wanted: CacheGeometry = getattr(mapper, side)
        if wanted.layers and shapes(wanted) != shapes(model.config.geometry):
            raise KvxError(
                f"this map's {side} has {describe(wanted)}, the given {side} model {describe(model.config.geometry)}; "
                "fit a map for this pair, or load the models it was fitted for."
            )
        fitted = (mapper.provenance or {}).get(side)
        if fitted is not None and model.provenance is not None and not fitted.same_model(model.provenance):
            raise KvxError(
                f"this map was fitted for {side} {fitted.model} (weights {fitted.weights[:12]}), but the given {side} "
                f"{model.provenance.model} has other weights or another tokenizer ({model.provenance.weights[:12]}); "
                "fit a map for this pair."
            )


def shapes(geometry: CacheGeometry) -> list[tuple[int, int, int]]:
    """``(K, D, Dv)`` of every layer."""
    return [layer.shapes for layer in geometry.layers]


def describe(geometry: CacheGeometry) -> str:
    """Layers, heads and widths in a few words."""
    kinds = sorted(set(shapes(geometry)))
    return f"{geometry.num_layers} layers of kv heads x key x value " + " or ".join(
        "x".join(map(str, k)) for k in kinds
    )


def check_alignment(cache: KVCache, alignment: Alignment) -> None:
    """Refuse an alignment that does not belong to a source cache; contents are examined only when concrete.

    Raises:
        KvxError: another batch size, or source slots that hold no token.
    """
    batch = alignment.index.shape[0]
    if batch != cache.batch:
        raise KvxError(f"the alignment has {batch} rows and the cache {cache.batch}; align the same batch of texts.")
    index, weight, pos = concrete(alignment.index), concrete(alignment.weight), concrete(cache.groups[0].pos)
    if index is None or weight is None or pos is None:
        return
    filled = np.asarray((pos >= 0).all(axis=(0, 2)))
    read = np.where(weight > 0, index, -1)
    bad = (read >= filled.shape[1]) | (read < -1)
    inside = np.clip(read, 0, max(filled.shape[1] - 1, 0))
    rows = np.arange(batch).reshape(-1, 1, 1)
    bad |= (read >= 0) & ~filled[rows, inside] if filled.shape[1] else read >= 0
    if bad.any():
        row, token, _ = np.argwhere(bad)[0]
        raise KvxError(
            f"row {row}: target token {token} reads source slot {read[row, token].max()}, but the source cache holds "
            f"{int(filled[row].sum())} tokens there; align the text that was prefilled, with the same BOS, and prefill "
            "the source with keep='all'."
        )


def groups_of(geometry: CacheGeometry) -> list[tuple[int, ...]]:
    """Layers that a cache keeping every token stacks: those that share ``(K, D, Dv)``.

    Example:
        >>> from kvx.cache.geometry import CacheGeometry, LayerGeometry
        >>> from kvx.mappers.base import groups_of
        >>> narrow, wide = LayerGeometry(1, 4, 4), LayerGeometry(2, 4, 4)
        >>> groups_of(CacheGeometry((narrow, wide, narrow)))
        [(0, 2), (1,)]
    """
    members: dict[tuple[int, int, int], list[int]] = {}
    for i, layer in enumerate(geometry.layers):
        members.setdefault(layer.shapes, []).append(i)
    return [tuple(layers) for layers in members.values()]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of a support table: a block of target outputs and the source features that feed it.

    Attributes:
        target: target layer.
        component: 0 keys, 1 values.
        heads: first target head of the block and the one after its last; channels: of each head.
        parts: ``(source layer, first, stop)``: ranges of that layer's features, keys ``[K,D]`` then values ``[K,Dv]``.
        blocks: ``(source layer, head)`` of each block it reads, in the order of the parts; empty: whole layers.
    """

    target: int
    component: int
    heads: tuple[int, int]
    channels: int
    parts: tuple[Part, ...]
    blocks: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        """For errors: layer, heads and component."""
        first, stop = self.heads
        heads = f"head {first}" if stop == first + 1 else f"heads {first}-{stop - 1}"
        return f"target layer {self.target}, {heads}, {COMPONENTS[self.component]}"

    @property
    def columns(self) -> slice:
        """Where the block stands among its layer's keys or values, ``[K,D]`` flattened."""
        return slice(self.heads[0] * self.channels, self.heads[1] * self.channels)

    @property
    def source_layers(self) -> tuple[int, ...]:
        """Source layers, ascending."""
        return tuple(sorted({part[0] for part in self.parts}))


@dataclasses.dataclass(frozen=True)
class EntryReport:
    """How one entry was fitted.

    Attributes:
        target, component, heads, source_layers: which entry.
        ridge: chosen or given, on the scaled Gram.
        r2_fit: explained variance of the fitted rows, mean over heads; r2_held_out: of the held-out rows by the fit
            without them, per head (a diagnostic, never a gate), empty without held-out moments.
        condition: estimate of the solved system; residual: relative; escalations: times the ridge was raised.
        features: width P of its input.
        source_heads: ``(source layer, head)`` blocks it reads; empty: all heads of its source layers.
        alpha: share of the sensitivities in the rows' weights, 0 for uniform ones, ``None`` where none were gathered;
            effective_rows: Kish's sample size under these weights.
        attention_held_out: explained variance of held-out attention output with the chosen keys and values, per head;
            empty unless that chose the ridge.
    """

    target: int
    component: str
    heads: tuple[int, int]
    source_layers: tuple[int, ...]
    ridge: float
    r2_fit: float
    r2_held_out: tuple[float, ...]
    condition: float
    residual: float
    escalations: int
    features: int = 0
    source_heads: tuple[tuple[int, int], ...] = ()
    alpha: float | None = None
    effective_rows: float | None = None
    attention_held_out: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """A solved entry: ``y = mean + (x - center) W``.

    Attributes:
        coefficients: float64 ``[P,q]``, q = heads times channels.
        center: float64 ``[P]``; mean: float64 ``[q]``.
        covariance: float64 ``[heads,D,D]`` of the fitted outputs on the fitted rows.
        report: how it went.
    """

    coefficients: np.ndarray
    center: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray
    report: EntryReport


@dataclasses.dataclass(frozen=True, eq=False)
class Support:
    """A chosen support table, ready to be solved with any weights.

    Methods that can be fitted with sensitivities give one by ``support(moments, held_out)``, and name ``ridges``,
    ``sensitivity`` (a mode or ``None``) and ``select`` (``"r2"`` or ``"attention"``) among their settings.

    Attributes:
        entries: what is to be solved.
        finish: makes the method's parameters of the solved entries, in their order.
    """

    entries: Sequence[Entry]
    finish: Callable[[Sequence[Fitted]], Any]


def context_cache(
    keys: list[jax.Array], values: list[jax.Array], alignment: Alignment, geometry: CacheGeometry
) -> KVCache:
    """Cache of a context from the outputs of each group of :func:`groups_of`, ``[L,B,K,T,D]``, empty slots zeroed."""
    pos = alignment.pos.astype(jnp.int32)[None, :, None, :]
    filled = last_filled(pos)
    groups = [
        blank_group(CacheGroup(k, v, pos, filled, layers))
        for k, v, layers in zip(keys, values, groups_of(geometry), strict=True)
    ]
    return KVCache(tuple(groups), False, geometry)
