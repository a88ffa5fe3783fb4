"""GGUF -> a Hugging Face folder in full precision, once; kvx then loads that folder in about two seconds."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvx.errors import KvxError
from kvx.models.config import ModelConfig
from kvx.models.disk_cache import build_folder, cache_dir, digest_file
from kvx.models.gguf_config import gguf_config
from kvx.models.gguf_file import SUPPORTED_TYPES, GgufFile
from kvx.models.hf_config import from_hf_config
from kvx.models.progress import Hook, reporting
from kvx.models.safetensors_folder import Entry, write_safetensors
from kvx.models.weight_table import Row, table
from kvx.models.weights import check_names

FORMAT = 1
MANIFEST = "kvx.json"
EMBED, HEAD = "token_embd.weight", "output.weight"
TIED_COSINE = 0.9
_log = logging.getLogger(__name__)


def converted_folder(digest: str) -> Path:
    """Where the converted form of a GGUF file with this SHA-256 lies in the cache folder."""
    return cache_dir() / "converted" / f"{digest[:24]}-v{FORMAT}"


def convert_gguf(path: str | Path, *, digest: str | None = None, progress: Hook | bool | None = None) -> Path:
    """Convert a GGUF file into the cache folder, unless it is there already.

    Quantised tensors become float32 (exactly the numbers that the file means); plain float16, bfloat16 and float32
    tensors keep their type. Llama files store queries and keys in interleaved RoPE order: they come back in half-split
    order, as in the original checkpoint. Gemma files store norm scales plus one: the one is taken off again. A tied
    model that stores its matrix twice (in two quantisations) is tied to the copy with more bits.

    Args:
        path: the file.
        digest: its SHA-256 when known.
        progress: see :func:`kvx.models.progress.reporting`.

    Returns:
        A folder that :func:`kvx.models.load.load_model` (and transformers) can load: ``config.json``,
        ``model.safetensors``, ``tokenizer.json``, ``tokenizer_config.json``, and ``kvx.json`` with the digest.

    Raises:
        KvxError: unsupported architecture or quantisation (by name); tensors missing or not understood; a cache folder
            that cannot be written. A tokenizer that cannot be built is reported when it is needed.

    Example:
        >>> from kvx.models.gguf import convert_gguf
        >>> convert_gguf("absent.gguf")
        Traceback (most recent call last):
        kvx.errors.KvxError: absent.gguf does not exist; pass the path of a .gguf file.
    """
    path = Path(path)
    if not path.is_file():
        raise KvxError(f"{path} does not exist; pass the path of a .gguf file.")
    digest = digest or digest_file(path)

    def fill(folder: Path) -> None:
        with reporting(progress, f"converting {path.name}") as report:
            write_converted(path, folder, digest=digest, progress=report)

    return build_folder(converted_folder(digest), fill)


def write_converted(path: Path, folder: Path, *, digest: str, progress: Hook | None = None) -> None:
    """Write the converted form of one GGUF file into an existing folder; see :func:`convert_gguf`."""
    file = GgufFile.open(path)
    config, fields, skipped, notes = _settle(file)
    names = [name for name in file.tensors if name not in skipped]
    renamed = {EMBED: HEAD} if EMBED in skipped else {}
    check_names(config, [*names, *renamed], naming="gguf")
    _check_types(file, names)
    entries = _entries(file, config, renamed)
    write_safetensors(folder / "model.safetensors", entries, progress=progress)
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    manifest = {"format": FORMAT, "source": path.name, "sha256": digest, "notes": notes}
    try:
        _write_tokenizer(file, folder)
    except KvxError as error:  # the weights are good, and the caller may bring a tokenizer
        manifest["tokenizer_error"] = str(error)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for note in notes:
        _log.warning("%s: %s", path.name, note)


def _settle(file: GgufFile) -> tuple[ModelConfig, dict[str, Any], set[str], list[str]]:
    """Configuration, tensors to leave out, and remarks for the user."""
    fields, skipped, notes = gguf_config(file), {"rope_freqs.weight"}, []
    if not fields["tie_word_embeddings"] and _same_matrix(file):
        fields["tie_word_embeddings"] = True
        embed, head = file.tensors[EMBED], file.tensors[HEAD]
        worse, better = (embed, head) if head.bits > embed.bits else (head, embed)
        skipped.add(worse.name)
        notes.append(
            f"the embedding matrix is stored twice ({EMBED} as {embed.kind}, {HEAD} as {head.kind}); "
            f"the model is tied to {better.name}, the copy with {better.bits:g} bits a number."
        )
    return from_hf_config(fields), fields, skipped, notes


def _same_matrix(file: GgufFile) -> bool:
    """Whether embedding and head are one matrix in two quantisations: their rows point the same way.

    Rows of a tied pair agree to quantisation noise (cosine above 0.95 even at 4 bits); an untied head is another
    matrix (cosine near 0). 256 rows, spread over the vocabulary, decide.
    """
    embed, head = file.tensors[EMBED], file.tensors[HEAD]
    if embed.shape != head.shape:
        return False
    _check_types(file, [EMBED, HEAD])
    rows = np.unique(np.linspace(0, embed.shape[0] - 1, 256).astype(np.int64))
    a, b = (file.rows(name, rows).astype(np.float64) for name in (EMBED, HEAD))
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    alive = norms > 0
    return bool(alive.any()) and float(np.median((a * b).sum(1)[alive] / norms[alive])) > TIED_COSINE


def _check_types(file: GgufFile, names: list[str]) -> None:
    bad: dict[str, list[str]] = {}
    for name in names:
        if file.tensors[name].kind not in SUPPORTED_TYPES:
            bad.setdefault(file.tensors[name].kind, []).append(name)
    if bad:
        parts = [f"{kind} ({len(found)} tensors, such as {found[0]})" for kind, found in sorted(bad.items())]
        raise KvxError(
            f"{file.path.name} is quantised as {', '.join(parts)}, which kvx does not read; expected "
            f"{', '.join(SUPPORTED_TYPES)}; download the model in one of those (Q4_K_M and Q8_0 files are)."
        )


def _entries(file: GgufFile, config: ModelConfig, renamed: dict[str, str]) -> list[Entry]:
    """What to write: every tensor of the table once, under its transformers name."""
    prefix = "transformer." if config.family == "gpt2" else "model."
    found: dict[str, Entry] = {}
    for row in table(config):
        for i in range(config.num_layers if row.per_layer else 1):
            gguf = renamed.get(row.name("gguf", i), row.name("gguf", i))
            hf = row.name("hf", i)
            name = hf if hf.startswith("lm_head") else prefix + hf
            found[name] = _entry(file, config, row, gguf, name)
    return list(found.values())


def _entry(file: GgufFile, config: ModelConfig, row: Row, gguf: str, name: str) -> Entry:
    info, change = file.tensors[gguf], _change(config, row)
    if change is None:
        return Entry(name, info.shape, info.dtype, lambda: file.chunks(gguf))

    def blocks() -> Iterator[np.ndarray]:
        yield change(file.read(gguf))

    shape = tuple(reversed(info.shape)) if row.kind == "conv1d" else info.shape
    return Entry(name, shape, info.dtype, blocks)


def _change(config: ModelConfig, row: Row) -> Callable[[np.ndarray], np.ndarray] | None:
    """What turns the stored tensor back into the original checkpoint's; ``None`` when nothing does."""
    parameter = row.path[-1]
    if config.family in ("llama", "mistral") and parameter in ("wq", "bq", "wk", "bk"):
        heads = config.heads if parameter.endswith("q") else config.kv_heads
        return lambda array: half_split(array, heads)
    if config.family == "gemma3_text" and parameter == "scale":
        return lambda array: array - np.asarray(1, array.dtype)
    if row.kind == "conv1d":
        return lambda array: array.T
    return None


def half_split(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection from interleaved RoPE order (0,D/2,1,D/2+1,...) back to half-split order.

    Args:
        array: ``[heads * D, ...]`` as llama.cpp's converter wrote it.
        heads: how many heads the rows hold.

    Returns:
        The same rows in the order of the original checkpoint.

    Example:
        >>> import numpy as np
        >>> from kvx.models.gguf import half_split
        >>> half_split(np.array([0, 2, 1, 3]), heads=1).tolist()
        [0, 1, 2, 3]
    """
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    from kvx.models.gguf_tokenizer import build_tokenizer

    if "tokenizer.ggml.tokens" not in file.metadata:
        return
    found = build_tokenizer(file.metadata)
    found.backend.save(str(folder / "tokenizer.json"), pretty=False)
    spelled = {
        "bos_token": None if found.bos_id is None else found.backend.id_to_token(found.bos_id),
        "eos_token": found.backend.id_to_token(found.eos_ids[0]) if found.eos_ids else None,
        "add_bos_token": found.adds_bos,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if found.chat_template:
        spelled["chat_template"] = found.chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(spelled, indent=1))
    generation = {"bos_token_id": found.bos_id, "eos_token_id": list(found.eos_ids)}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))
