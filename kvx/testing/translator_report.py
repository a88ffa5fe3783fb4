"""Tables and the figure of :mod:`kvx.testing.translator_bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvx.errors import KvxError
from kvx.evaluation.report import READS, SOURCE_ALONE
from kvx.evaluation.sweep_figure import INSTALL, check_format, drawable

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("", "accuracy", "F1", "of native", "content", "difference", "mismatched", "params", "MFLOP", "train s")
FIGURES = (("native_fraction", "accuracy, share of native"), ("content", "content carried"))


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What ``kvx bench translators --json`` prints.

    Args:
        records: of directions, from :func:`kvx.testing.translator_bench.run_direction`.

    Returns:
        ``native_fraction_mean``, ``content_mean``, ``accuracy_mean``, ``f1_mean``: method -> mean over directions;
        ``first_is_best``: for each direction, :func:`within`; ``directions``: the records.
    """
    names = list(records[0]["rows"]) if records else []
    means = {
        f"{key}_mean": {name: float(np.mean([record["rows"][name][key] for record in records])) for name in names}
        for key in ("native_fraction", "content", "accuracy", "f1")
    }
    return {**means, "first_is_best": [within(record) for record in records], "directions": list(records)}


def within(record: Mapping[str, Any]) -> bool:
    """Whether no row carries more content than the first one beyond its paired interval.

    Rows whose target reads the context are left out. With several seeds a row carries more when its mean is higher and
    the interval of every seed lies above zero.
    """
    first, *others = record["rows"]
    mine = record["rows"][first]["content"]
    for name in others:
        row = record["rows"][name]
        if row["target_reads_context"] or row["content"] <= mine:
            continue
        if all(seed["content_difference"][1] > 0 for seed in row["seeds"]):
            return False
    return True


def table(record: Mapping[str, Any]) -> Table:
    """One direction: arms that no map has a part in, then the methods, last those whose target reads the context."""
    from rich import box
    from rich.table import Table

    made = Table(title=_title(record), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in COLUMNS:
        made.add_column(column, justify="left" if not column else "right")
    native = record["arms"]["native"]["accuracy"]
    for arm, scores in record["arms"].items():
        name = "source alone" if arm == SOURCE_ALONE else arm
        share = f"{scores['accuracy'] / native:.2f}" if native else "-"
        made.add_row(name, f"{scores['accuracy']:.2f}", f"{scores['f1']:.2f}", share, *["-"] * (len(COLUMNS) - 4))
    for reads in (False, True):
        rows = {name: row for name, row in record["rows"].items() if row["target_reads_context"] == reads}
        if rows:
            made.add_section()
        if rows and reads:
            made.add_row(f"{READS}:", *[""] * (len(COLUMNS) - 1))
        for name, row in rows.items():
            made.add_row(name, *_cells(row))
    return made


def _title(record: Mapping[str, Any]) -> str:
    source, _, target = str(record["direction"]).partition(">")
    return f"{source} -> {target}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    seeds = row["seeds"]
    low, high = (float(np.mean([seed[f"content_{end}"] for seed in seeds])) for end in ("low", "high"))
    gaps = [seed["content_difference"] for seed in seeds if seed["content_difference"] is not None]
    gap = "-" if not gaps else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*np.mean(gaps, axis=0))
    return [
        _spread(seeds, "accuracy"),
        _spread(seeds, "f1"),
        f"{row['native_fraction']:.3f}",
        f"{row['content']:.3f} [{low:.3f}, {high:.3f}]",
        gap,
        f"{row['mismatched_accuracy']:.2f}",
        f"{row['parameters']:,}",
        f"{row['flops'] / 1e6:,.1f}",
        f"{row['train_seconds']:.1f}",
    ]


def _spread(seeds: Sequence[Mapping[str, Any]], key: str) -> str:
    """Mean over seeds, with the standard deviation where there are several."""
    values = [seed[key] for seed in seeds]
    return f"{np.mean(values):.2f}" + (f" ±{np.std(values, ddof=1):.2f}" if len(values) > 1 else "")


def overview(found: Mapping[str, Any]) -> Table:
    """Means over all directions, one row a method."""
    from rich import box
    from rich.table import Table

    count = len(found["directions"])
    made = Table(
        title=f"means over {count} direction{'s' if count > 1 else ''}",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
    )
    for column in ("", "accuracy", "F1", "of native", "content"):
        made.add_column(column, justify="left" if not column else "right")
    rows = found["directions"][0]["rows"]
    for name in rows:
        mark = " (target reads)" if rows[name]["target_reads_context"] else ""
        cells = (found[f"{key}_mean"][name] for key in ("accuracy", "f1", "native_fraction", "content"))
        made.add_row(name + mark, *(f"{value:.3f}" for value in cells))
    return made


def draw(found: Mapping[str, Any], path: Path) -> Path:
    """Draw share of native accuracy and content of every method, means over directions, a dot for each direction.

    Args:
        found: of :func:`summary`; path: a PNG or SVG file; its folder is made where it is missing.

    Returns:
        ``path``.

    Raises:
        KvxError: another format, or matplotlib is missing.
    """
    check_format(path)
    if not drawable():
        raise KvxError(INSTALL)
    from matplotlib.figure import Figure

    names = list(found["directions"][0]["rows"])
    figure = Figure(figsize=(9.0, 1.2 + 0.34 * len(names)), layout="constrained")
    for axes, (key, label) in zip(figure.subplots(1, len(FIGURES), sharey=True), FIGURES, strict=True):
        at = np.arange(len(names))[::-1]
        axes.barh(at, [found[f"{key}_mean"][name] for name in names], color="C0", alpha=0.5)
        for record in found["directions"]:
            axes.plot([record["rows"][name][key] for name in names], at, "k.", markersize=4)
        axes.axvline(1.0, color="0.4", linestyle="--", linewidth=1)
        axes.set(yticks=at, yticklabels=names, xlabel=label)
        axes.grid(axis="x", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
