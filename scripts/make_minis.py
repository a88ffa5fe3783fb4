"""Train the minis (kvx/testing/minis.py) from random weights, say how well they read, and write their folders.

    python scripts/make_minis.py                              # all six; stop and run it again to go on
    python scripts/make_minis.py --names opt-small --stop-after 400

With --names several can be trained side by side, one core each. No run has been taken to its end yet.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro

from kvx.models.progress import reporting
from kvx.testing.minis import MINIS, RECIPE, native_scores, tokenizer, write_mini
from kvx.testing.pretrain import pretrain


@dataclasses.dataclass(frozen=True)
class Settings:
    """Which minis are trained, and where to."""

    names: tuple[str, ...] = tuple(MINIS)
    """Minis to train."""
    out: Path = Path(__file__).resolve().parents[1] / "kvx/testing/weights"
    """Folder that gets a folder of each."""
    runs: Path = Path("runs/minis")
    """Folder of checkpoints."""
    stop_after: int | None = None
    """End each run at this step, to go on another time; nothing is written to --out then."""
    questions: int = 200
    """Questions of each kind to measure on."""


def main(settings: Settings) -> None:
    for name in settings.names:
        mini = MINIS[name]
        words = tokenizer(mini.vocabulary)
        with reporting(True, name, "steps") as report:
            model, run = pretrain(
                mini.config,
                words,
                RECIPE,
                seed=mini.seed,
                folder=settings.runs / name,
                resume=True,
                stop_after=settings.stop_after,
                progress=report,
            )
        model = dataclasses.replace(model, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params))
        wide = dataclasses.replace(model, params=jax.tree.map(lambda x: x.astype(jnp.float32), model.params))
        started = time.monotonic()
        scores = native_scores(wide, settings.questions)
        parameters = sum(x.size for x in jax.tree.leaves(model.params))
        facts = {
            "parameters": parameters,
            "steps": run.steps,
            "train_seconds": round(run.seconds, 1),
            **{key: round(value, 4) for key, value in scores.items()},
        }
        print(f"{name}: {json.dumps(facts)} (measured in {time.monotonic() - started:.0f} s)", flush=True)
        if run.steps == RECIPE.steps:
            write_mini(model, settings.out / name, facts)


if __name__ == "__main__":
    main(tyro.cli(Settings))
