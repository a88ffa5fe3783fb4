"""``kvx fit``: fit a mapper for a directed pair of models on a text, and save it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvx.commands.common import Common, Outcome, Output, UsageError, load, prepare_jax, require
from kvx.errors import KvxError

if TYPE_CHECKING:
    from kvx.fitting.pairs import Pairs
    from kvx.mappers.base import Mapper
    from kvx.models.model import Model


_SHARED = ("layers", "inputs", "choice", "ridge", "sensitivity", "select")  # settings that both mappers have


@dataclasses.dataclass(frozen=True)
class FitSettings(Common):
    """How a mapper is fitted; also part of the settings of ``kvx demo``."""

    method: Literal["full_head", "head_matched", "low_rank"] = "full_head"
    """Which mapper: all heads of the source layers feed each target head, or one head of each, or a shared state."""
    layers: int | Literal["all"] = 7
    """Source layers that feed each target layer; of low_rank: that feed the state, evenly spread (0: none)."""
    rank: int = 1024
    """Numbers in the state of a token; low_rank only."""
    embeddings: int = 0
    """Tokens, the aligned one and those before it, whose embeddings in the target are read; low_rank only. Try 3."""
    inputs: Literal["both", "same"] = "both"
    """Whether keys and values both feed each output, or only their own kind."""
    choice: Literal["nearest", "best"] = "nearest"
    """Source layers by depth, or by their score on held-out moments."""
    heads: Literal["learned", "index"] = "learned"
    """Source heads by their score on held-out moments, or by index; head_matched only."""
    budget: int | None = None
    """Size of the map in bytes, at most: fewer source layers, wider support only within it; head_matched only."""
    history: int = 0
    """Source tokens before the aligned one that are read too; full_head only. Copying heads need them: try 4."""
    history_layers: int = 1
    """Lowest source layers that --history reads."""
    ridge: float | None = 1e-3
    """Ridge on the scaled Gram (no unit); None: chosen by held-out explained variance, which shrinks more."""
    sensitivity: Literal["probes", "all"] | None = None
    """Weigh tokens by how strongly later queries (32 probes, or all of them) read them; None: all the same."""
    select: Literal["r2", "attention"] = "r2"
    """What chooses the ridge (with --ridge None): held-out R^2, or the held-out error weighted by sensitivity."""
    held_out: float = 0.1
    """Share of the fitted sequences that only chooses the ridge and layers (0 to 1)."""
    rule: Literal["covering", "causal", "overlap"] = "covering"
    """How target tokens find their source tokens; causal is extension-safe."""
    max_tokens: int = 20_000
    """Target tokens to fit on, at most."""
    max_length: int = 512
    """Tokens in one sequence, at most."""
    batch_size: int = 4
    """Sequences in one step."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations."""


@dataclasses.dataclass(frozen=True)
class TextSettings(Common):
    """How a text is cut into passages, and which of them are never fitted."""

    context_tokens: int = 320
    """Target tokens handed over in each passage."""
    continuation_tokens: int = 64
    """Target tokens that follow, whose loss is measured."""
    test_share: float = 0.5
    """Share of the passages that is never fitted (0 to 1); split by a hash of their text."""

    @property
    def cut(self) -> dict[str, Any]:
        """The same as arguments of :func:`kvx.evaluation.items.load_passages`."""
        return {
            "context_tokens": self.context_tokens,
            "continuation_tokens": self.continuation_tokens,
            "held_out": self.test_share,
        }


@dataclasses.dataclass(frozen=True)
class Fit(FitSettings, TextSettings):
    """Settings of ``kvx fit``."""

    source: str | None = None
    """Source model: hub id, local folder or .gguf file. Required."""
    target: str | None = None
    """Target model: hub id, local folder or .gguf file. Required."""
    text: Path | None = None
    """Text to fit on: a UTF-8 file, paragraphs separated by blank lines, or demo:passages. Required."""
    out: Path | None = None
    """Folder to save the mapper in. Required."""
    overwrite: bool = False
    """Replace a mapper that is already saved there."""


def run(settings: Fit, out: Output) -> Outcome:
    """Load both models, fit, save, and say how well the held-out moments are predicted.

    Raises:
        KvxError: a model or the text cannot be read, or the output folder is taken.
    """
    require(settings, "source", "target", "text", "out")
    folder = Path(str(settings.out))
    if folder.exists() and not settings.overwrite:
        raise KvxError(f"{folder} exists already; choose another --out, or pass --overwrite to replace it.")
    prepare_jax()
    import kvx
    from kvx.evaluation.items import load_passages

    started = time.perf_counter()
    source, target = (
        load(str(name), settings.dtype, out.watch(f"loading {name}")) for name in (settings.source, settings.target)
    )
    split = load_passages(Path(str(settings.text)), target, **settings.cut)
    texts = [item.text for item in split.fit]
    pairs = pairs_of(settings, source, target, texts)
    mapper, report = kvx.fit(mapper_of(settings), pairs, held_out=settings.held_out, progress=out.watch("fitting"))
    kvx.save(folder, mapper, overwrite=settings.overwrite)
    out.console.print(report)
    out.console.print(
        f"saved to {folder}; measure it with: kvx eval --mapper {folder} --text {settings.text}", markup=False
    )
    seconds = time.perf_counter() - started
    hashes = {**split.hashes, "mapper": mapper.digest}
    return Outcome({"mapper": str(folder), "report": report.to_json(), "hashes": hashes, "seconds": seconds})


def mapper_of(settings: FitSettings) -> Mapper:
    """The method that the settings name.

    Raises:
        UsageError: settings that the method does not have.
    """
    from kvx.mappers import full_head, head_matched

    if settings.select == "attention" and settings.ridge is not None:
        raise UsageError(f"--select attention chooses among ridges, but --ridge is {settings.ridge}; add --ridge None.")
    if settings.method == "low_rank":
        return _low_rank(settings)
    if settings.embeddings:
        raise UsageError("--embeddings is a setting of low_rank; add --method low_rank, or leave it.")
    shared = {name: getattr(settings, name) for name in _SHARED}
    if settings.method == "head_matched":
        if settings.history:
            raise UsageError("--history is a setting of full_head; add --method full_head, or leave it.")
        return head_matched(heads=settings.heads, budget=settings.budget, **shared)
    if settings.budget is not None or settings.heads != "learned":
        raise UsageError("--heads and --budget are settings of head_matched; add --method head_matched, or leave them.")
    return full_head(history=settings.history, history_layers=settings.history_layers, **shared)


def _low_rank(settings: FitSettings) -> Mapper:
    """The low-rank map, which has none of the settings of support tables.

    Raises:
        UsageError: settings that it does not have.
    """
    from kvx.mappers import low_rank

    defaults = FitSettings()
    others = ("inputs", "choice", "heads", "budget", "history", "sensitivity", "select")
    if odd := [name for name in others if getattr(settings, name) != getattr(defaults, name)]:
        raise UsageError(f"low_rank has no setting --{odd[0].replace('_', '-')}; leave it, or choose another --method.")
    return low_rank(settings.rank, settings.layers, settings.embeddings, settings.ridge)


def pairs_of(settings: FitSettings, source: Model, target: Model, texts: Sequence[str]) -> Pairs:
    """The streamed pairs that the settings describe."""
    import kvx

    return kvx.pairs(
        source,
        target,
        texts,
        max_length=settings.max_length,
        batch_size=settings.batch_size,
        rule=settings.rule,
        max_tokens=settings.max_tokens,
        join=False,
    )
