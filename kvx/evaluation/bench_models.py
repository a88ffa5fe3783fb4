"""Speed of kvx against transformers + torch: the same weights, the same tokens, in turns, on the same threads."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvx.errors import KvxError
from kvx.models.export import hf_tensors, to_hf_config
from kvx.models.generate import generate
from kvx.models.model import Model
from kvx.models.prefill import prefill


def bench_models(
    models: Sequence[str | Model],
    tokens: int = 512,
    threads: int = 2,
    *,
    new_tokens: int = 32,
    repeats: int = 10,
    seed: int = 0,
) -> dict[str, Any]:
    """Time prefill and greedy decoding of each model, kvx and transformers + torch by turns.

    Both sides run the same fp32 weights on the same random tokens. Neither computes logits of the prompt beyond the
    last token. torch decodes in the leanest loop there is (no ``generate`` around it). The best of all repeats counts
    on both sides, which is what a quiet machine would show.

    Args:
        models: models, or names that :func:`kvx.models.load.load_model` takes.
        tokens: length of the prompt.
        threads: CPU threads of each side.
        new_tokens: tokens to decode, greedily.
        repeats: how often each side runs.
        seed: of the prompt.

    Returns:
        ``{model: figures}``; ``prefill_ratio_vs_torch`` and ``decode_ratio_vs_torch`` above 1 mean that kvx is faster;
        rates in tokens/s, decoding in ms/token, compile times in s.

    Raises:
        KvxError: torch or transformers is absent, or a model cannot be loaded.

    Example:
        >>> from kvx.models.random_model import random_model
        >>> figures = bench_models([random_model()], tokens=16, new_tokens=4, repeats=1)
        >>> figures["llama-2x32"]["same_tokens"]
        True
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise KvxError(
            f"bench models compares with {error.name}, which is absent: pip install torch transformers."
        ) from None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    figures: dict[str, Any] = {}
    try:
        with _on_cpus(threads):
            for given in models:
                name, model = _named(given)
                figures[name] = _bench(model, tokens, new_tokens, repeats, seed) | {"threads": threads}
                gc.collect()
    finally:
        torch.set_num_threads(before)
    versions = {"jax": jax.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return figures | {"versions": versions}


def _named(given: str | Model) -> tuple[str, Model]:
    if isinstance(given, Model):
        name = (
            given.provenance.model
            if given.provenance
            else f"{given.config.family}-{given.config.num_layers}x{given.config.dim}"
        )
        return name, given
    from kvx.models.load import load_model

    return given, load_model(given, dtype=jnp.float32)


@contextlib.contextmanager
def _on_cpus(threads: int) -> Iterator[None]:
    """Keep every thread of this process on that many CPUs (where the system can), so that both sides have as many."""
    tasks = Path("/proc/self/task")
    if not hasattr(os, "sched_setaffinity") or not tasks.exists() or threads >= len(os.sched_getaffinity(0)):
        yield
        return
    allowed = os.sched_getaffinity(0)
    chosen = set(sorted(allowed)[:threads])

    def keep(cpus: set[int]) -> None:
        for task in tasks.iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                os.sched_setaffinity(int(task.name), cpus)

    keep(chosen)
    try:
        yield
    finally:
        keep(allowed)


def _bench(model: Model, tokens: int, new_tokens: int, repeats: int, seed: int) -> dict[str, Any]:
    prompt = np.random.default_rng(seed).integers(0, model.config.vocab_size, (1, tokens)).astype(np.int32)
    sides = {"kvx": _kvx_side(model, prompt, new_tokens), "torch": _torch_side(model, prompt, new_tokens)}
    first = {name: side() for name, side in sides.items()}  # compiles, and warms up
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            runs[name].append(side())
    best = {name: (min(r.prefill for r in done), min(r.decode for r in done)) for name, done in runs.items()}
    return {
        "tokens": tokens,
        "new_tokens": new_tokens,
        "prefill_ratio_vs_torch": best["torch"][0] / best["kvx"][0],
        "decode_ratio_vs_torch": best["torch"][1] / best["kvx"][1],
        "prefill_tokens_per_s": tokens / best["kvx"][0],
        "torch_prefill_tokens_per_s": tokens / best["torch"][0],
        "decode_ms_per_token": 1e3 * best["kvx"][1] / new_tokens,
        "torch_decode_ms_per_token": 1e3 * best["torch"][1] / new_tokens,
        "compile_prefill_s": first["kvx"].prefill - best["kvx"][0],
        "compile_decode_s": first["kvx"].decode - best["kvx"][1],
        "same_tokens": first["kvx"].tokens == first["torch"].tokens,
        "repeats": repeats,
    }


class Run(NamedTuple):
    """Seconds of one run and the tokens it gave."""

    prefill: float
    decode: float
    tokens: list[int]


Side = Callable[[], Run]


def _kvx_side(model: Model, prompt: np.ndarray, new_tokens: int) -> Side:
    """Read the prompt, then its last token once more, as the boundary, and go on from there."""

    def run() -> Run:
        start = time.perf_counter()
        cache = jax.block_until_ready(prefill(model, prompt))
        read = time.perf_counter()
        out = jax.block_until_ready(generate(model, prompt[:, -1:], cache, max_new_tokens=new_tokens))
        return Run(read - start, time.perf_counter() - read, out.tokens[0].tolist())

    return run


def _torch_side(model: Model, prompt: np.ndarray, new_tokens: int) -> Side:
    """The same in torch: one forward over the prompt, one over its last token once more, then one per token."""
    import inspect

    import torch

    oracle = torch_model(model)
    cache_name = "cache" if "cache" in inspect.signature(type(oracle).forward).parameters else "past_key_values"
    ids = torch.tensor(prompt, dtype=torch.long)

    def run() -> Run:
        with torch.inference_mode():
            start = time.perf_counter()
            out = oracle(ids, use_cache=True, logits_to_keep=1)
            read = time.perf_counter()
            token, tokens = ids[:, -1:], []
            for _ in range(new_tokens):
                out = oracle(token, use_cache=True, logits_to_keep=1, **{cache_name: _cache(out)})
                token = out.logits[:, -1].argmax(-1, keepdim=True)
                tokens.append(int(token))
            return Run(read - start, time.perf_counter() - read, tokens)

    return run


def _cache(out: Any) -> Any:
    found = getattr(out, "cache", None)
    return out.past_key_values if found is None else found


def torch_model(model: Model) -> Any:
    """The transformers (torch) twin of a kvx model, in fp32.

    Args:
        model: a model of any family.

    Returns:
        A ``PreTrainedModel`` in evaluation mode.

    Raises:
        KvxError: a tensor that the twin does not have, or lacks.
    """
    import torch
    import transformers

    fields = to_hf_config(model.config)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    twin = transformers.AutoModelForCausalLM.from_config(config)
    state = {name: torch.from_numpy(array.astype(np.float32)) for name, array in hf_tensors(model)}
    missing, unknown = twin.load_state_dict(state, strict=False)
    twin.tie_weights()
    missing = [name for name in missing if not (model.config.tied and name.startswith("lm_head"))]
    if missing or unknown:
        raise KvxError(f"the transformers twin differs: it lacks {unknown} and was not given {missing}.")
    return twin.eval()
