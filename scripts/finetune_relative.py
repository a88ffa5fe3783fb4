"""Fine-tune a model on a question-and-answer file, to have a relative whose cache is no longer its own.

    python scripts/finetune_relative.py --out runs/relative --questions FILE.jsonl

Writes a Hugging Face folder (bf16 safetensors, config, tokenizer) that kvx.load_model reads.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import tyro
from safetensors.numpy import save_file

import kvx
from kvx.evaluation.items import Question, load_questions
from kvx.models.export import hf_tensors, to_hf_config
from kvx.models.model import Model
from kvx.models.progress import reporting
from kvx.models.tokenizer_files import write_folder


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to train."""

    questions: Path
    """JSON lines with question, answers and context."""
    out: Path
    """Folder to write."""
    model: str = "demo:smollm2"
    """Model to start from."""
    skip: int = 500
    """Questions at the start of the file that are left for measuring."""
    steps: int = 80
    """Updates."""
    batch: int = 4
    """Sequences an update."""
    length: int = 256
    """Tokens a sequence."""
    rate: float = 1e-4
    """Peak learning rate (AdamW, warm-up of a tenth, cosine)."""


def main(settings: Settings) -> None:
    """Train and save."""
    model = kvx.load_model(settings.model).stack()
    rows = token_rows(model, load_questions(settings.questions)[settings.skip :], settings)
    trained, losses = train(model, rows, settings)
    print(f"loss of the first 10 updates {np.mean(losses[:10]):.3f}, of the last 10 {np.mean(losses[-10:]):.3f}")
    settings.out.mkdir(parents=True)
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in hf_tensors(trained)}
    save_file(tensors, settings.out / "model.safetensors", metadata={"format": "pt"})
    (settings.out / "config.json").write_text(json.dumps(to_hf_config(model.config), indent=1), encoding="utf-8")
    if model.tokenizer is not None:
        write_folder(model.tokenizer, settings.out)


def token_rows(model: Model, questions: list[Question], settings: Settings) -> np.ndarray:
    """int32 ``[steps,batch,length]``: context, question and answer, one a row, padded with -1."""
    if model.tokenizer is None:
        raise SystemExit("this model has no tokenizer.")
    rows = np.full((settings.steps * settings.batch, settings.length), -1, np.int32)
    for row, out in enumerate(rows):
        q = questions[row % len(questions)]
        text = f"{q.context}\n\nQuestion: {q.question}\nAnswer: {q.answers[0]}\n"
        ids = model.tokenizer.encode(text).ids[-settings.length :]
        out[: len(ids)] = ids
    return rows.reshape(settings.steps, settings.batch, settings.length)


def train(model: Model, rows: np.ndarray, settings: Settings) -> tuple[Model, list[float]]:
    """AdamW on next-token cross-entropy over all weights."""
    warm = max(1, settings.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, settings.rate, warm, settings.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        scores = kvx.token_logprobs(dataclasses.replace(model, params=params), tokens)
        return -scores.sum() / (tokens[:, 1:] >= 0).sum()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, value

    params, losses = jax.tree.map(jnp.copy, model.params), []
    state = optimizer.init(params)
    with reporting(True, "fine-tuning", "updates") as report:
        for step, tokens in enumerate(rows):
            params, state, value = update(params, state, jnp.asarray(tokens))
            losses.append(float(value))
            report(f"loss {losses[-1]:.3f}", step + 1, len(rows))
    return dataclasses.replace(model, params=params), losses


if __name__ == "__main__":
    main(tyro.cli(Settings))
