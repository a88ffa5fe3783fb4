"""Several maps of one pair on the same items: quality beside bytes and time, and paired differences."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvx.alignment import Alignment
from kvx.cache.build import empty
from kvx.cache.cache import KVCache
from kvx.cache.geometry import CacheGeometry
from kvx.errors import KvxError
from kvx.evaluation.evaluate import measure
from kvx.evaluation.flops import map_cost
from kvx.evaluation.items import Item, Question
from kvx.evaluation.metrics import Estimate
from kvx.evaluation.report import READS, Evaluation
from kvx.models.model import Model
from kvx.models.replay import ReplayPlan

if TYPE_CHECKING:
    from rich.table import Table

    from kvx.mappers.base import CacheMap

APPLY_TOKENS = 1024
REPEATS = 5


@dataclasses.dataclass(frozen=True)
class MapFacts:
    """What a map costs.

    Attributes:
        method: settings, as text.
        bytes: that a translation reads.
        apply_ms: median time of one translation of ``tokens`` tokens, batch 1, compiled; ``None`` for a map without
            coefficients.
        tokens: of that context.
        r2_held_out: mean held-out explained variance of the fit; ``None`` where it is not recorded.
        build_s: seconds of the fit's sums and solves; ``None`` where they are not known.
        parameters, flops: numbers that a translation of ``tokens`` tokens reads, and operations of the hand-off after
            the source's reading: the target's own reading included where the map needs it.
        target_reads_context: whether it does.
    """

    method: str
    bytes: int
    apply_ms: float | None
    tokens: int
    r2_held_out: float | None
    build_s: float | None = None
    parameters: int = 0
    flops: int = 0
    target_reads_context: bool = False


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Maps of one pair, measured on the same items.

    Attributes:
        results: name -> evaluation; the first map in all arms, the others in translated and mismatched.
        facts: name -> what the map costs.
    """

    results: Mapping[str, Evaluation]
    facts: Mapping[str, MapFacts]

    @property
    def reference(self) -> str:
        """The map that the others are compared with: the first."""
        return next(iter(self.results))

    def difference(self, name: str, than: str | None = None) -> dict[str, Estimate]:
        """How much more a map carries than another one, paired item by item.

        Args:
            name: of the map; than: of the other, ``None``: the reference.

        Returns:
            ``content`` and ``retained`` as differences of these shares, ``f1`` of translated F1; only what was
            measured.
        """
        a, b = self.results[name], self.results[than or self.reference]
        found: dict[str, Estimate] = {}
        if a.loss and b.loss:
            ours, theirs = a.loss.nats, b.loss.nats
            effect = theirs["native_mismatched"] - theirs["native"]
            carried = [nats["mismatched"] - nats["translated"] for nats in (ours, theirs)]
            found["content"] = a.bootstrap.ratio(carried[0] - carried[1], effect)
            gain = theirs["translated"] - ours["translated"]
            found["retained"] = a.bootstrap.ratio(gain, theirs["none"] - theirs["native"])
        if a.answer and b.answer:
            found["f1"] = a.bootstrap.difference(a.answer.f1["translated"], b.answer.f1["translated"])
        return found

    def to_json(self) -> dict[str, Any]:
        """Every evaluation, the maps' facts and the differences from the reference, as plain JSON types."""
        rows = {}
        for name, result in self.results.items():
            differences = {} if name == self.reference else self.difference(name)
            rows[name] = {
                **dataclasses.asdict(self.facts[name]),
                "evaluation": result.to_json(per_item=True),
                "difference": {key: dataclasses.asdict(value) for key, value in differences.items()},
            }
        return {"reference": self.reference, "maps": rows}

    @property
    def parts(self) -> list[tuple[str, list[str]]]:
        """Titles and maps: first those whose target never reads the context, then those whose target does."""
        reading = [name for name, fact in self.facts.items() if fact.target_reads_context]
        others = [name for name in self.facts if name not in reading]
        return [(title, names) for title, names in (("", others), (f"{READS}:", reading)) if names]

    def table(self) -> Table:
        """One row a map; those whose target also reads the context in a part of their own."""
        from rich import box
        from rich.table import Table

        first = self.results[self.reference]
        items = len(first.loss.tokens) if first.loss else 0
        questions = len(first.answer.f1["native"]) if first.answer else 0
        title = f"{first.pair}: {items} passages, {questions} questions; differences from {self.reference}"
        table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == COLUMNS[0] else "right")
        for title, names in self.parts:
            if title:
                table.add_section()
                table.add_row(title, *[""] * (len(COLUMNS) - 1))
            for name in names:
                table.add_row(*self.row(name))
        return table

    def row(self, name: str) -> list[str]:
        """Cells of one map, in the order of ``COLUMNS``."""
        result, facts = self.results[name], self.facts[name]
        differences = {} if name == self.reference else self.difference(name)
        cosine = result.cosine.mean() if result.cosine else None
        f1 = result.answer.f1["translated"].mean() if result.answer else None
        return [
            name,
            _number(f1, 2),
            str(result.content),
            str(differences.get("content", "-")),
            str(result.retained),
            _number(cosine, 3),
            _number(facts.r2_held_out, 3),
            f"{facts.bytes / 1e6:.1f}",
            _number(facts.build_s, 1),
            _number(facts.apply_ms, 1),
            _number(facts.flops / 1e9, 3),
        ]

    def _repr_html_(self) -> str:
        rows: list[tuple[str, Sequence[str]]] = [("th", COLUMNS)]
        for title, names in self.parts:
            rows += [("th", [title])] if title else []
            rows += [("td", self.row(name)) for name in names]
        body = "".join(f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>" for tag, cells in rows)
        return f"<table>{body}</table>"

    def __repr__(self) -> str:
        lines = [
            f"{name}: content {self.results[name].content}, {fact.bytes:,} bytes" for name, fact in self.facts.items()
        ]
        return "\n".join(lines)


COLUMNS = ("map", "F1", "content", "difference", "retained", "cosine", "R2", "MB", "build s", "apply ms", "GFLOP")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or np.isnan(value) else f"{value:.{digits}f}"


def evaluate_maps(
    source: Model,
    target: Model,
    maps: Mapping[str, CacheMap],
    items: Sequence[Item | Question],
    *,
    build_s: Mapping[str, float] | None = None,
    replays: Mapping[str, ReplayPlan] | None = None,
    apply_tokens: int = APPLY_TOKENS,
    **settings: Any,
) -> Comparison:
    """Measure several maps of one pair on the same items, side by side, with paired differences from the first.

    The first map is measured in all arms; the others in the arms that depend on them (translated, mismatched), beside
    the same native, native mismatched, none and source alone. Latency arms are left to :func:`kvx.evaluate`.

    Args:
        source, target: the pair, with tokenizers.
        maps: name -> fitted map, at least two, of the same prefix and alignment rule.
        items: passages and questions, none of which was fitted on.
        build_s: name -> seconds of the fit's sums and solves (``FitReport.seconds``), to be shown beside.
        replays: name -> what of each context the target reads again over that map's cache; others are not replayed.
        apply_tokens: context length at which a translation is timed.
        settings: as for :func:`kvx.evaluate`, except ``latency``.

    Returns:
        The comparison; print its :meth:`Comparison.table`.

    Raises:
        KvxError: fewer than two maps, maps of another pair, replays of other names, or whatever :func:`kvx.evaluate`
            refuses.

    Example:
        >>> import kvx
        >>> from kvx.evaluation.comparison import evaluate_maps
        >>> from kvx.evaluation.items import Item
        >>> from kvx.models.random_model import byte_model
        >>> source, target = byte_model(), byte_model(3, seed=1)
        >>> pairs = kvx.pairs(source, target, "Ann lives in Rome. " * 20, max_length=64)
        >>> fits = {k: kvx.mappers.full_head(layers=k, ridge=0.1) for k in (1, 2)}
        >>> maps = {f"k={k}": kvx.fit(m, pairs, held_out=0, progress=False)[0] for k, m in fits.items()}
        >>> items = [Item("Bob lives in Oslo.", " He likes snow."), Item("Eva lives in Bonn.", " She likes rain.")]
        >>> found = evaluate_maps(source, target, maps, items, progress=False, apply_tokens=64)
        >>> found.reference, sorted(found.difference("k=2"))
        ('k=1', ['content', 'retained'])
    """
    if len(maps) < 2:
        raise KvxError(f"got {len(maps)} map(s); comparing needs at least two, use kvx.evaluate for one.")
    if odd := sorted(set(replays or ()) - set(maps)):
        raise KvxError(f"replays names {', '.join(odd)}, which are no maps; expected some of {', '.join(maps)}.")
    plans = [(replays or {}).get(name) for name in maps]
    found = measure(source, target, list(maps.values()), items, replays=plans, latency=False, **settings)
    facts = {}
    for (name, mapper), plan in zip(maps.items(), plans, strict=True):
        held = [np.mean(e.r2_held_out) for e in getattr(mapper.params, "report", None) or () if e.r2_held_out]
        r2 = float(np.mean(held)) if held else None
        seconds = (build_s or {}).get(name)
        apply_ms = 1e3 * apply_seconds(mapper, apply_tokens) if mapper.source.layers else None
        cost = map_cost(mapper, target, apply_tokens, plan)
        facts[name] = MapFacts(
            str(mapper.method),
            mapper.size,
            apply_ms,
            apply_tokens,
            r2,
            seconds,
            cost.parameters,
            cost.flops,
            cost.target_reads_context,
        )
    return Comparison(dict(zip(maps, found, strict=True)), facts)


def apply_seconds(mapper: CacheMap, tokens: int, repeats: int = REPEATS) -> float:
    """Median wall seconds of translating a context of that many tokens (the same for both models), batch 1, compiled.

    Raises:
        KvxError: a map that does not say which caches it reads.
    """
    from kvx.pipeline import translate

    if not mapper.source.layers:
        raise KvxError("this map reads caches of any shape, so it cannot be timed; give a fitted one.")
    cache, alignment = straight_context(mapper.source, tokens)
    if mapper.reads_embeddings:
        last = mapper.params[-1] if type(mapper.params) is tuple else mapper.params
        alignment = dataclasses.replace(alignment, embeddings=jnp.ones((1, tokens, last.reads.dim)))
    own = straight_context(mapper.target, tokens, mapper.prefix_length)[0] if mapper.reads_target else None
    jitted = jax.jit(lambda m, c, a, r: translate(m, c, a, receiver=r))
    run = functools.partial(jitted, mapper, cache, alignment, own)
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def straight_context(geometry: CacheGeometry, tokens: int, first: int = 0) -> tuple[KVCache, Alignment]:
    """A full cache of ones ``[L,1,K,T,D]`` and the alignment that feeds each of its tokens to the same one: for timing.

    Its first token stands at position ``first``.

    Example:
        >>> from kvx.evaluation.comparison import straight_context
        >>> from kvx.fitting.synthetic import SOURCE
        >>> cache, alignment = straight_context(SOURCE, 5)
        >>> cache.next_position().tolist(), alignment.index[0, :, 0].tolist()
        ([5], [0, 1, 2, 3, 4])
    """
    slots = jnp.arange(tokens, dtype=jnp.int32)[None]
    cache = empty(geometry, 1, tokens)
    groups = [
        dataclasses.replace(
            g,
            k=jnp.ones_like(g.k),
            v=jnp.ones_like(g.v),
            pos=jnp.broadcast_to(slots[:, None, None] + jnp.int32(first), g.pos.shape),
            next=jnp.full_like(g.next, tokens),
        )
        for g in cache.groups
    ]
    alignment = Alignment(slots[..., None], jnp.ones((1, tokens, 1)), slots)
    return dataclasses.replace(cache, groups=tuple(groups)), alignment
