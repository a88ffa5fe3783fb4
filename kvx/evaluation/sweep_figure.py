"""The figure of an injection sweep: both shifts above, the loss below, against the first injected layer."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvx.errors import KvxError
from kvx.evaluation.sweep_report import BASELINES

FORMATS = (".png", ".svg")
INSTALL = "drawing needs matplotlib, which is missing: install it with pip install 'matplotlib>=3.8'."
_STYLES = {"native": "--", "translated": "-.", "none": ":"}


def drawable() -> bool:
    """Whether matplotlib, an optional extra, is installed.

    Example:
        >>> from kvx.evaluation.sweep_figure import drawable
        >>> drawable() in (True, False)
        True
    """
    return importlib.util.find_spec("matplotlib") is not None


def check_format(path: Path) -> None:
    """Refuse files that cannot be drawn, before anything is measured.

    Raises:
        KvxError: a file name that ends neither in ``.png`` nor in ``.svg``.
    """
    if path.suffix.lower() not in FORMATS:
        raise KvxError(f"the figure {path.name!r} has no known format; end its name in {' or '.join(FORMATS)}.")


def draw(figures: Mapping[str, Any], path: Path) -> Path:
    """Draw a sweep into a file; bands are 95 % intervals over items.

    Args:
        figures: of :meth:`kvx.evaluation.sweep_report.Sweep.to_json`, or the same read from its file.
        path: a PNG or SVG file; its folder is made where it is missing.

    Returns:
        ``path``.

    Raises:
        KvxError: another format, or matplotlib is missing.

    Example:
        >>> import tempfile, kvx
        >>> from pathlib import Path
        >>> from kvx.evaluation.items import Item
        >>> from kvx.evaluation.sweep import sweep_injection
        >>> from kvx.evaluation.sweep_figure import draw, drawable
        >>> from kvx.models.random_model import byte_model
        >>> model, items = byte_model(), [Item("Bob is in Oslo.", " He sings."), Item("Eva is in Bonn.", " She reads.")]
        >>> found = sweep_injection(model, model, kvx.identity(), items, progress=False)
        >>> path = Path(tempfile.mkdtemp()) / "sweep.svg"
        >>> drawn = draw(found.to_json(), path) if drawable() else None
        >>> path.exists() == drawable()
        True
    """
    check_format(path)
    if not drawable():
        raise KvxError(INSTALL)
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.0, 6.4), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    rows = figures["injections"]
    _band(upper, rows, "propagated_shift", "propagated shift (context, layers from the start up)", "C0")
    _band(upper, rows, "last_state_shift", "last-state shift (continuation)", "C1")
    upper.set(ylabel="relative shift", title=f"{figures['pair']}, {figures['items']} passages")
    _band(lower, rows, "loss", "replayed", "C2")
    for arm, label in BASELINES.items():
        lower.axhline(figures["baselines"][arm]["loss"], color="0.4", linestyle=_STYLES[arm], label=label)
    lower.set(xlabel=_axis_label(figures), ylabel="loss (nats per token)")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _band(axes: Any, rows: Sequence[Mapping[str, Any]], name: str, label: str, color: str) -> None:
    """One figure against the start, with its interval."""
    starts = [row["start"] for row in rows]
    axes.plot(starts, [row[name] for row in rows], marker="o", markersize=4, color=color, label=label)
    ends = ([row[f"{name}{end}"] for row in rows] for end in ("_low", "_high"))
    axes.fill_between(starts, *ends, color=color, alpha=0.2, linewidth=0)


def _axis_label(figures: Mapping[str, Any]) -> str:
    """What the starts mean."""
    sizes = {row["stop"] - row["start"] for row in figures["injections"] if row["stop"] > row["start"]}
    tops = {row["stop"] for row in figures["injections"]}
    window = f"windows of {min(sizes)} layers" if len(sizes) == 1 and len(tops) > 1 else "windows up to the top"
    return f"first injected layer of {figures['layers']} ({window})"
