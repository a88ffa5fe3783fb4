"""kvx hands one language model's KV cache to another: the target answers from a context only the source has read.

Everything below is imported on first use, so ``import kvx`` costs almost nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvx import mappers as mappers
    from kvx import translators as translators
    from kvx.alignment import Alignment as Alignment
    from kvx.alignment import align as align
    from kvx.cache.cache import KVCache as KVCache
    from kvx.cache.layouts import from_transformers as from_transformers
    from kvx.cache.layouts import to_transformers as to_transformers
    from kvx.cache.ops import from_arrays as from_arrays
    from kvx.errors import KvxError as KvxError
    from kvx.evaluation.comparison import evaluate_maps as evaluate_maps
    from kvx.evaluation.evaluate import evaluate as evaluate
    from kvx.evaluation.examples import cloze_from_passages as cloze_from_passages
    from kvx.evaluation.examples import examples_from_passages as examples_from_passages
    from kvx.evaluation.examples import examples_from_questions as examples_from_questions
    from kvx.fitting.checkpoint import load as load
    from kvx.fitting.checkpoint import save as save
    from kvx.fitting.fit import fit as fit
    from kvx.fitting.pairs import pairs as pairs
    from kvx.fitting.training.dump import training_data as training_data
    from kvx.fitting.training.loss import TrainingLoss as TrainingLoss
    from kvx.fitting.training.train import train as train
    from kvx.fitting.training.window_search import search_window as search_window
    from kvx.mappers.base import CacheMap as CacheMap
    from kvx.mappers.chain import chain as chain
    from kvx.mappers.identity import identity as identity
    from kvx.models.generate import generate as generate
    from kvx.models.generate import stream as stream
    from kvx.models.load import load_model as load_model
    from kvx.models.model import Model as Model
    from kvx.models.prefill import next_token_logits as next_token_logits
    from kvx.models.prefill import prefill as prefill
    from kvx.models.prefill import token_logprobs as token_logprobs
    from kvx.models.replay import ReplayPlan as ReplayPlan
    from kvx.models.replay import replay as replay
    from kvx.pipeline import handoff as handoff
    from kvx.pipeline import translate as translate

# Where each public name lives; the block above says the same to type checkers (a test compares the two).
_HOMES = {
    "Alignment": "kvx.alignment",
    "CacheMap": "kvx.mappers.base",
    "KVCache": "kvx.cache.cache",
    "KvxError": "kvx.errors",
    "Model": "kvx.models.model",
    "ReplayPlan": "kvx.models.replay",
    "TrainingLoss": "kvx.fitting.training.loss",
    "align": "kvx.alignment",
    "chain": "kvx.mappers.chain",
    "cloze_from_passages": "kvx.evaluation.examples",
    "evaluate": "kvx.evaluation.evaluate",
    "evaluate_maps": "kvx.evaluation.comparison",
    "examples_from_passages": "kvx.evaluation.examples",
    "examples_from_questions": "kvx.evaluation.examples",
    "fit": "kvx.fitting.fit",
    "from_arrays": "kvx.cache.ops",
    "from_transformers": "kvx.cache.layouts",
    "generate": "kvx.models.generate",
    "handoff": "kvx.pipeline",
    "identity": "kvx.mappers.identity",
    "load": "kvx.fitting.checkpoint",
    "load_model": "kvx.models.load",
    "mappers": "kvx.mappers",
    "next_token_logits": "kvx.models.prefill",
    "pairs": "kvx.fitting.pairs",
    "prefill": "kvx.models.prefill",
    "replay": "kvx.models.replay",
    "save": "kvx.fitting.checkpoint",
    "search_window": "kvx.fitting.training.window_search",
    "stream": "kvx.models.generate",
    "to_transformers": "kvx.cache.layouts",
    "token_logprobs": "kvx.models.prefill",
    "train": "kvx.fitting.training.train",
    "training_data": "kvx.fitting.training.dump",
    "translate": "kvx.pipeline",
    "translators": "kvx.translators",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvx' has no attribute {name!r}; its public names are {', '.join(__all__[1:])}.")
    module = importlib.import_module(_HOMES[name])
    value = module if _HOMES[name] == f"kvx.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
