"""Support tables: which source layers and heads feed which outputs, and their solution as one linear map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvx.cache.geometry import CacheGeometry
from kvx.errors import KvxError
from kvx.mappers.base import Entry, Support
from kvx.mappers.history import NONE, History
from kvx.mappers.linear import assemble, part_of

RIDGES = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
RANKING_RIDGE = 1e-2


def layer_entry(
    source: CacheGeometry, target: CacheGeometry, layer: int, component: int, layers: Sequence[int], inputs: str
) -> Entry:
    """All heads of a target layer's keys (0) or values (1), fed by all heads of some source layers.

    Example:
        >>> from kvx.fitting.synthetic import SOURCE, TARGET
        >>> from kvx.mappers.support import layer_entry
        >>> layer_entry(SOURCE, TARGET, 1, 0, (0, 2), "both").parts
        ((0, 0, 8), (0, 8, 16), (2, 0, 8), (2, 8, 16))
    """
    shape = target.layers[layer]
    parts = tuple(part_of(source.layers[i], i, kind) for i in layers for kind in kinds(inputs, component))
    return Entry(layer, component, (0, shape.kv_heads), (shape.key_dim, shape.value_dim)[component], parts)


def head_entry(
    source: CacheGeometry,
    target: CacheGeometry,
    layer: int,
    component: int,
    heads: tuple[int, int],
    blocks: Sequence[tuple[int, int]],
    inputs: str,
) -> Entry:
    """Some heads (first and the one after the last) of a target layer, fed by single heads ``(source layer, head)``.

    Example:
        >>> from kvx.fitting.synthetic import SOURCE, TARGET
        >>> from kvx.mappers.support import head_entry
        >>> head_entry(SOURCE, TARGET, 1, 0, (0, 1), [(0, 1), (2, 0)], "both").parts
        ((0, 4, 8), (0, 12, 16), (2, 0, 4), (2, 8, 12))
    """
    shape = target.layers[layer]
    parts = tuple(part_of(source.layers[i], i, kind, head) for i, head in blocks for kind in kinds(inputs, component))
    channels = (shape.key_dim, shape.value_dim)[component]
    return Entry(layer, component, heads, channels, parts, tuple((int(i), int(head)) for i, head in blocks))


def kinds(inputs: str, component: int) -> tuple[int, ...]:
    """Components of a source block that feed keys (0) or values (1)."""
    return (0, 1) if inputs == "both" else (component,)


def support_of(
    entries: Sequence[Entry],
    source: CacheGeometry,
    target: CacheGeometry,
    *,
    inputs: str = "both",
    by_head: bool = False,
    history: History = NONE,
) -> Support:
    """A support table whose solved entries become one linear map.

    Args:
        entries: the table: for each target layer keys then values, each in the order of the heads.
        source, target: geometries, the source's with the layers of the history.
        inputs, by_head, history: as in :class:`kvx.mappers.linear.LinearParams`.

    Returns:
        The support; its parameters tell how each entry went (``report``).
    """
    settings: dict[str, Any] = {"inputs": inputs, "by_head": by_head, "history": history}
    return Support(entries, lambda fitted: assemble(entries, fitted, source, target, **settings))


def check_settings(layers: Any, inputs: str, choice: str, ridge: float | tuple[float, ...] | None) -> tuple[float, ...]:
    """Candidates of the ridge, after the settings that maps with a support table share have been checked.

    Raises:
        KvxError: naming the setting that is out of range.
    """
    if layers != "all" and not (isinstance(layers, int) and layers >= 1):
        raise KvxError(f"layers is {layers!r}; expected a number of source layers of at least 1, or 'all'.")
    check_choice("inputs", inputs, ("both", "same"))
    check_choice("choice", choice, ("nearest", "best"))
    ridges = RIDGES if ridge is None else ridge if isinstance(ridge, tuple) else (float(ridge),)
    if not ridges or not all(0 <= r < float("inf") for r in ridges):
        raise KvxError(f"ridge is {ridge!r}; expected a number of at least 0, a tuple of them, or None to choose one.")
    return tuple(float(r) for r in ridges)


def check_weighing(sensitivity: bool | str | None, select: str, ridges: Sequence[float]) -> str | None:
    """Mode of the sensitivities, ``None`` for uniform weights (``True`` means ``"probes"``).

    Raises:
        KvxError: naming the setting that is out of range, or nothing to select.
    """
    mode = "probes" if sensitivity is True else sensitivity or None
    if mode not in (None, "probes", "all"):
        raise KvxError(f"sensitivity is {sensitivity!r}; expected False, 'probes' (or True) or 'all'.")
    check_choice("select", select, ("r2", "attention"))
    if select == "attention" and len(ridges) < 2:
        raise KvxError(
            f"select='attention' chooses among ridges, but ridge is {ridges[0]}; give ridge=None or a tuple."
        )
    return mode


def check_choice(name: str, value: str, allowed: tuple[str, str]) -> None:
    """Refuse a setting that is neither of two words.

    Raises:
        KvxError: naming both.
    """
    if value not in allowed:
        raise KvxError(f"{name} is {value!r}; expected {allowed[0]!r} or {allowed[1]!r}.")


def nearest_layers(source_layers: int, target_layers: int, count: int) -> tuple[tuple[int, ...], ...]:
    """For each target layer the ``count`` consecutive source layers around the one at the same relative depth.

    Example:
        >>> from kvx.mappers.support import nearest_layers
        >>> nearest_layers(5, 3, 2)
        ((0, 1), (2, 3), (3, 4))
    """
    count = min(count, source_layers)
    found = []
    for layer in range(target_layers):
        depth = layer * (source_layers - 1) / max(target_layers - 1, 1)
        first = int(np.clip(np.floor(depth - (count - 1) / 2 + 0.5), 0, source_layers - count))
        found.append(tuple(range(first, first + count)))
    return tuple(found)


def reach_of(source: CacheGeometry, target: CacheGeometry, count: int, history: History) -> tuple[tuple[int, ...], ...]:
    """For each target layer its nearest source layers, and those of the history.

    Args:
        source: geometry with the layers of the history; target: of the target.
        count: nearest layers of the source's own.
        history: what is read of earlier tokens.

    Example:
        >>> from kvx.fitting.synthetic import SOURCE, TARGET
        >>> from kvx.mappers.history import History, with_history_layers
        >>> from kvx.mappers.support import reach_of
        >>> longer = with_history_layers(SOURCE, History(lags=2, layers=1))
        >>> reach_of(longer, TARGET, 1, History(lags=2, layers=1))
        ((0, 3, 4), (0, 2, 3, 4))
    """
    near = nearest_layers(source.num_layers - history.count, target.num_layers, count)
    return tuple(with_low(layers, source, history) for layers in near)


def with_low(layers: Sequence[int], source: CacheGeometry, history: History) -> tuple[int, ...]:
    """Source layers with what a history adds: the low layers at the aligned token and at the earlier ones."""
    return tuple(sorted({*layers, *history.low, *history.extra(source.num_layers)}))
