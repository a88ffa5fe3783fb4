"""``kvx handoff``: one answer of the target from a context that only the source has read."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvx.commands.common import OK, REPREFILL, Common, Outcome, Output, prepare_jax, require
from kvx.commands.eval import models_of, recorded_verdict
from kvx.errors import KvxError

if TYPE_CHECKING:
    from kvx.evaluation.answers import Template
    from kvx.mappers.base import CacheMap
    from kvx.models.model import Model
    from kvx.pipeline import Handoff as Answer


@dataclasses.dataclass(frozen=True)
class Handoff(Common):
    """Settings of ``kvx handoff``."""

    mapper: Path | None = None
    """Folder of the saved mapper. Required."""
    context: str | None = None
    """File with the context, or - for standard input. Required."""
    question: str | None = None
    """What the target is asked. Required."""
    source: str | None = None
    """Source model; None: where the mapper was fitted."""
    target: str | None = None
    """Target model; None: where the mapper was fitted."""
    template: str = "two_examples"
    """How the question is put: a name, a JSON file, or none (the question is the boundary as it stands)."""
    max_new_tokens: int = 64
    """Tokens of the answer, at most."""
    temperature: float = 0.0
    """Of sampling; 0 is greedy."""
    seed: int = 0
    """Of sampling."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations."""


def run(settings: Handoff, out: Output) -> Outcome:
    """Stream the answer; code 3 when ``kvx eval`` has found that this mapper should not be used.

    Raises:
        KvxError: the mapper, a model or the context cannot be read, or the models are not the mapper's.
    """
    require(settings, "mapper", "context", "question")
    prepare_jax()
    import kvx

    folder = Path(str(settings.mapper))
    context = read_context(str(settings.context))
    mapper = kvx.load(folder)
    source, target = models_of(mapper, settings.source, settings.target, settings.dtype)
    answer = ask(source, target, mapper, context, str(settings.question), settings, out)
    known = recorded_verdict(folder, mapper)
    verdict = known and known["verdict"]
    if known is None:
        out.say(f"This mapper has not been measured yet: kvx eval --mapper {folder}")
    elif verdict != "use":
        out.say(f"verdict {verdict or 'none'}: {known['reasons'][0]}.")
    figures = {
        "text": answer.text.strip(),
        "tokens": answer.tokens,
        "verdict": verdict,
        "coverage": answer.alignment and answer.alignment.coverage,
        "seconds": answer.seconds,
        "hashes": {"mapper": mapper.digest},
    }
    return Outcome(figures, REPREFILL if verdict == "reprefill" else OK)


def ask(
    source: Model, target: Model, mapper: CacheMap, context: str, question: str, settings: Handoff, out: Output
) -> Answer:
    """Hand the context over and stream the answer to the question."""
    import jax

    import kvx

    template, stop = boundary_of(settings.template, question)
    sampling: dict[str, Any] = (
        {"temperature": settings.temperature, "rng": jax.random.key(settings.seed)} if settings.temperature else {}
    )
    answer = kvx.handoff(
        source,
        target,
        mapper,
        context,
        template,
        max_new_tokens=settings.max_new_tokens,
        stop=stop,
        on_text=out.piece,
        **sampling,
    )
    out.piece("\n")
    return answer


def boundary_of(name: str, question: str) -> tuple[str, tuple[str, ...]]:
    """Text of the boundary and what ends the answer; a template's answers are one line."""
    from kvx.evaluation.answers import load_template

    if name == "none":
        return question, ()
    template: Template = load_template(name)
    return template.boundary(question), ("\n",)


def read_context(where: str) -> str:
    """Text of a file, or of standard input for ``-``.

    Raises:
        KvxError: it is empty or no UTF-8.
    """
    try:
        text = sys.stdin.read() if where == "-" else Path(where).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise KvxError(
            f"{where} is not UTF-8 text ({error.reason} at byte {error.start}); convert it first."
        ) from error
    if not text.strip():
        raise KvxError(f"the context in {where} is empty; give the text that the source shall read.")
    return text.strip("\n")
