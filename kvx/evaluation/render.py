"""An evaluation as JSON and as tables for the terminal and notebooks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvx.evaluation.report import ARMS, READS, SOURCE_ALONE, Evaluation

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from kvx.evaluation.metrics import Estimate


def as_json(result: Evaluation, per_item: bool) -> dict[str, Any]:
    """See :meth:`Evaluation.to_json`."""
    loss, answer = result.loss, result.answer
    figures: dict[str, Any] = {}
    for name in ("retained", "content", "answers"):
        estimate: Estimate = getattr(result, name)
        figures |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        if not estimate.defined:
            figures[f"{name}_undefined"] = estimate.reason
    per_byte = loss.nats_per_byte if loss else {}
    answering = (*ARMS, SOURCE_ALONE)
    out: dict[str, Any] = {
        "pair": result.pair,
        **figures,
        "items": len(loss.tokens) if loss else 0,
        "contexts": loss.contexts if loss else 0,
        "tokens_scored": int(loss.tokens.sum()) if loss else 0,
        "questions": len(answer.f1["native"]) if answer else 0,
        "loss": {
            **{arm: _value(result.loss_estimates.get(arm)) for arm in ARMS},
            "source_alone_nats_per_byte": per_byte.get(SOURCE_ALONE),
            "native_nats_per_byte": per_byte.get("native"),
        },
        "loss_intervals": {arm: _ends(e) for arm, e in result.loss_estimates.items()},
        "f1": {arm: _value(result.f1_estimates.get(arm)) for arm in answering},
        "f1_intervals": {arm: _ends(e) for arm, e in result.f1_estimates.items()},
        "exact": {
            arm: float(answer.exact[arm].mean()) if answer and arm in answer.exact else None for arm in answering
        },
        "target_reads_context": result.target_reads_context,
        "cost": result.cost.to_json() if result.cost else None,
        "verdict": result.verdict.decision,
        "reasons": list(result.verdict.reasons),
        "attention_cosine": result.cosine.to_json() if result.cosine else None,
        "latency": result.latency.to_json() if result.latency else None,
        "hashes": dict(result.hashes),
        "settings": dict(result.settings),
        "thresholds": dataclasses.asdict(result.thresholds),
        "bootstrap": dataclasses.asdict(result.bootstrap),
        "seconds": result.seconds,
        "phases": dict(result.phases),
    }
    if per_item:
        out["per_item"] = _per_item(result)
    return out


def _per_item(result: Evaluation) -> dict[str, Any]:
    """Every item's figures, in the order the items were given."""
    rows: dict[str, Any] = {}
    if result.loss:
        rows["loss"] = {arm: nats.tolist() for arm, nats in result.loss.nats.items()}
        rows["tokens"] = result.loss.tokens.tolist()
    if result.answer:
        rows["answers"] = {arm: list(texts) for arm, texts in result.answer.texts.items()}
        rows["f1"] = {arm: f1.tolist() for arm, f1 in result.answer.f1.items()}
    return rows


def _value(estimate: Estimate | None) -> float | None:
    return estimate.value if estimate else None


def _ends(estimate: Estimate) -> list[float | None]:
    return [estimate.low, estimate.high]


def as_tables(result: Evaluation) -> Group:
    """See :meth:`Evaluation.table`."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [_arms(result), _figures(result)]
    if result.cosine:
        parts.append(_cosine(result))
    if result.latency:
        parts.append(_latency(result))
    colour = {"use": "bold green", "reprefill": "bold red"}.get(str(result.verdict.decision), "bold yellow")
    parts.append(Text.assemble("verdict: ", (result.verdict.decision or "none: too little was measured", colour)))
    parts += [Text(f"  - {reason}") for reason in result.verdict.reasons]
    parts.append(Text("  ".join(f"{name} {value[:12]}" for name, value in result.hashes.items() if value), style="dim"))
    parts.append(Text(f"{result.seconds:.0f} s", style="dim"))
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at == 0 else "right", no_wrap=at == 0)
    return table


def _counts(result: Evaluation) -> str:
    """What the arms were measured on."""
    found = []
    if result.loss:
        found.append(f"{len(result.loss.tokens)} passages, {int(result.loss.tokens.sum())} scored tokens")
    if result.answer:
        found.append(f"{len(result.answer.f1['native'])} questions")
    return "; ".join(found) or "nothing"


def _part(result: Evaluation) -> str:
    """What a map costs whose target also reads the context."""
    cost = result.cost
    if cost is None or not cost.target_reads_context:
        return ""
    return (
        f"; {READS}: {cost.flops / 1e9:,.3f} GFLOP at {cost.tokens} tokens, {cost.target / 1e9:,.3f} of them its own "
        f"reading; {cost.parameters / 1e6:,.1f} M parameters"
    )


def _arms(result: Evaluation) -> Table:
    """One row an arm: loss, F1, exact match."""
    title = f"{result.pair}: {_counts(result)}{_part(result)}"
    table = _table(title, "arm", "what is seen before the boundary", "loss (nats/token)", "F1", "EM")
    for arm, sees in result.sees.items():
        style = "bold" if arm == "translated" else None
        table.add_row(arm.replace("_", " "), sees, *_cells(result, arm), style=style)
    loss, f1, exact = _cells(result, SOURCE_ALONE)
    if result.loss:
        rates = result.loss.nats_per_byte
        loss = f"{rates[SOURCE_ALONE]:.3f}/byte (native {rates['native']:.3f}/byte)"
    table.add_row("source alone", "the source model by itself", loss, f1, exact)
    return table


def _cells(result: Evaluation, arm: str) -> tuple[str, str, str]:
    """Loss, F1 and exact match of one arm, with intervals; a dash where not measured."""
    loss, f1 = result.loss_estimates.get(arm), result.f1_estimates.get(arm)
    exact = f"{result.answer.exact[arm].mean():.2f}" if result.answer and arm in result.answer.exact else "-"
    return (
        f"{loss.value:.3f} [{loss.low:.3f}, {loss.high:.3f}]" if loss and loss.defined else "-",
        f"{f1.value:.2f} [{f1.low:.2f}, {f1.high:.2f}]" if f1 and f1.defined else "-",
        exact,
    )


def _figures(result: Evaluation) -> Table:
    """Content carried first; context benefit is never shown without it."""
    table = _table("figures (95 % paired bootstrap over items)", "figure", "estimate", "definition")
    table.columns[2].justify = "left"
    table.add_row(
        "answers carried", str(result.answers), "F1: (translated - mismatched) / (native - native mismatched)"
    )
    table.add_row(
        "content carried", str(result.content), "loss: (mismatched - translated) / (native mismatched - native)"
    )
    table.add_row("context benefit retained", str(result.retained), "loss: (none - translated) / (none - native)")
    return table


def _cosine(result: Evaluation) -> Table:
    """Mean and worst layer and head, with the anchors that give the number its scale."""
    cosine = result.cosine
    table = _table(
        "attention outputs over the context: cosine with native", "cache", "mean", "worst layer", "worst head"
    )
    if cosine is None:
        return table
    for arm in cosine.arms:
        layer, head = cosine.worst_layer(arm), cosine.worst_head(arm)
        table.add_row(
            arm.replace("_", " "),
            f"{cosine.mean(arm):.3f}",
            f"{layer[1]:.3f} (layer {layer[0]})",
            f"{head[2]:.3f} (layer {head[0]}, head {head[1]})",
        )
    return table


def _latency(result: Evaluation) -> Table:
    """Warm and cold hand-off against the native prefill."""
    latency = result.latency
    columns = ("context tokens", "warm", "cold", "native", "warm speed-up", "cold speed-up")
    table = _table("time to the first answer token, batch 1, medians", *columns)
    for row in latency.rows if latency else ():
        times = (f"{1e3 * t:.0f} ms" for t in (row.warm, row.cold, row.native))
        table.add_row(str(row.context_tokens), *times, f"{row.warm_speedup:.2f}x", f"{row.cold_speedup:.2f}x")
    return table
