"""Search of the window of channels that is worth translating: cheap proxies first, then the best one grows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvx.errors import KvxError
from kvx.fitting.training.data import TrainingData
from kvx.fitting.training.train import train
from kvx.mappers.base import CacheMap
from kvx.models.progress import Hook, reporting
from kvx.translators.channels import Window
from kvx.translators.mixture import Mixture

SHARE = 0.3  # of the shallower model, as published


@dataclasses.dataclass(frozen=True)
class WindowSearch:
    """What a search found.

    Attributes:
        window: ``(start, size)`` of the best window of the size that was asked for.
        loss: its proxy's held-out nats a token.
        tried: this loss of every window that a proxy was trained for, in the order of the search.
    """

    window: Window
    loss: float
    tried: Mapping[Window, float]


def search_window(
    method: Mixture,
    start: CacheMap,
    data: TrainingData,
    held_out: TrainingData,
    *,
    size: int | None = None,
    first: int = 1,
    steps: int = 50,
    progress: bool | Hook | None = True,
    **settings: Any,
) -> WindowSearch:
    """Find the window of channels where experts help most.

    A proxy of every window of ``first`` channels is trained for a few steps and judged on held-out text; the best
    window grows by one channel at a time, on the side where its proxy does better, until it has ``size`` channels.

    Args:
        method: the proxy, such as ``mixture(experts=1, width=16, frozen=True)``; its own window is not used.
        start: the fitted map; data: to train on; held_out: to judge on.
        size: channels of the window; ``None``: 0.3 of the shallower model.
        first: channels of the first proxies.
        steps: of each proxy's training.
        progress: as in :func:`kvx.fit`.
        settings: further ones of :func:`kvx.train`, such as ``batch_size``.

    Returns:
        The best window, and every proxy's loss.

    Raises:
        KvxError: sizes that do not fit the models.

    Example:
        >>> from kvx.fitting.training.window_search import grow_window
        >>> grow_window(lambda window: abs(sum(window) - 4.0), channels=6, size=2, first=1).window
        (2, 2)

    Reference: window search of Mixture-of-Translators, arXiv 2607.28979.
    """
    channels = min(start.source.num_layers, start.target.num_layers)
    wanted = max(1, round(SHARE * channels)) if size is None else size
    total = max(channels - first + 1, 1) + 2 * max(wanted - first, 0)
    with reporting(progress, "searching the window", "proxies") as report:
        done = 0

        def score(window: Window) -> float:
            nonlocal done
            how: dict[str, Any] = {"held_out": held_out, "steps": steps, "evaluate_every": steps, "select": ("loss",)}
            proxy = dataclasses.replace(method, window=window)
            _, told = train(proxy, start, data, progress=False, **{**how, **settings})
            done += 1
            report(f"channels {window[0]}-{sum(window) - 1}", done, total)
            return told.history[-1]["loss"]

        return grow_window(score, channels=channels, size=wanted, first=first)


def grow_window(score: Callable[[Window], float], *, channels: int, size: int, first: int = 1) -> WindowSearch:
    """The search of :func:`search_window` with any score of a window; less is better.

    Args:
        score: of a window ``(start, size)``; asked once for each.
        channels: how many there are.
        size: of the window that is wanted.
        first: size of the windows that are compared at first.

    Raises:
        KvxError: sizes below one, above the number of channels, or a first one above the wanted one.
    """
    if not 1 <= first <= size <= channels:
        raise KvxError(
            f"windows of {first} and then {size} of {channels} channels; expected 1 <= first <= size <= all."
        )
    tried: dict[Window, float] = {}

    def best(windows: list[Window]) -> Window:
        for window in windows:
            tried[window] = score(window)
        return min(windows, key=tried.__getitem__)

    found = best([(start, first) for start in range(channels - first + 1)])
    while found[1] < size:
        start, wide = found[0], found[1] + 1
        found = best([(s, wide) for s in (start - 1, start) if s >= 0 and s + wide <= channels])
    return WindowSearch(found, tried[found], tried)
