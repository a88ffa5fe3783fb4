"""``kvx fit``: fit a mapper for a directed pair of models on a text, and save it."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvx.commands.common import Common, Outcome, Output, require
from kvx.errors import KvxError

if TYPE_CHECKING:
    from kvx.mappers.base import Mapper


@dataclasses.dataclass(frozen=True)
class FitSettings(Common):
    """How a mapper is fitted; also part of ``kvx demo``'s settings."""

    method: Literal["full_head"] = "full_head"
    """Which mapper."""
    layers: int | Literal["all"] = 7
    """Source layers that feed each target layer."""
    inputs: Literal["both", "same"] = "both"
    """Whether keys and values both feed each output, or only their own kind."""
    choice: Literal["nearest", "best"] = "nearest"
    """Source layers by depth, or by their score on held-out moments."""
    ridge: float | None = None
    """Ridge on the scaled Gram (no unit); None: chosen on held-out moments."""
    rule: Literal["covering", "causal"] = "covering"
    """How target tokens find their source tokens; causal is extension-safe."""
    max_tokens: int = 20_000
    """Target tokens to fit on, at most."""
    max_length: int = 512
    """Tokens in one sequence, at most."""
    batch_size: int = 4
    """Sequences in one step."""


@dataclasses.dataclass(frozen=True)
class Fit(FitSettings):
    """Settings of ``kvx fit``."""

    source: str | None = None
    """Source model: hub id, local folder or .gguf file. Required."""
    target: str | None = None
    """Target model: hub id, local folder or .gguf file. Required."""
    text: Path | None = None
    """Text to fit on: a UTF-8 file, paragraphs separated by blank lines. Required."""
    out: Path | None = None
    """Folder to save the mapper in. Required."""
    held_out: float = 0.1
    """Share of the tokens that is never fitted and chooses layers and ridge."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations."""
    overwrite: bool = False
    """Replace a mapper that is already saved there."""


def run(settings: Fit, out: Output) -> Outcome:
    """Load both models, fit, save, and say how well the held-out moments are predicted.

    Raises:
        KvxError: a model, the text or the output folder is missing, or the folder is taken.
    """
    import kvx

    require(settings, "source", "target", "text", "out")
    if settings.out.exists() and not settings.overwrite:
        raise KvxError(f"{settings.out} exists already; choose another --out, or pass --overwrite to replace it.")
    started = time.perf_counter()
    source, target = (kvx.load_model(name, dtype=settings.dtype) for name in (settings.source, settings.target))
    texts = paragraphs(settings.text.read_text(encoding="utf-8"))
    mapper, report = kvx.fit(mapper_of(settings), pairs_of(settings, source, target, texts), held_out=settings.held_out)
    kvx.save(settings.out, mapper, overwrite=settings.overwrite)
    out.console.print(report)
    out.console.print(f"saved to {settings.out}; measure it with: kvx eval --mapper {settings.out}", markup=False)
    return Outcome({"mapper": str(settings.out), "report": report, "seconds": time.perf_counter() - started})


def mapper_of(settings: FitSettings) -> Mapper:
    """The method that the settings name."""
    from kvx.mappers import full_head

    return full_head(layers=settings.layers, inputs=settings.inputs, choice=settings.choice, ridge=settings.ridge)


def pairs_of(settings: FitSettings, source: Any, target: Any, texts: list[str]) -> Any:
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
    )


def paragraphs(text: str) -> list[str]:
    """Paragraphs of a text: what blank lines separate, stripped, empty ones dropped.

    Example:
        >>> paragraphs("one\\ntwo\\n\\n\\n three ")
        ['one\\ntwo', 'three']
    """
    return [part for part in (p.strip() for p in text.replace("\r\n", "\n").split("\n\n")) if part]
