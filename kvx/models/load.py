"""Load a model from wherever it is: folder, hub id, GGUF file, demo package or an in-memory transformers model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvx.cache.provenance import Provenance
from kvx.errors import KvxError
from kvx.models.disk_cache import digest_all
from kvx.models.gguf import MANIFEST, convert_gguf
from kvx.models.hf_config import from_hf_config
from kvx.models.hub import download, is_hub_id
from kvx.models.model import Model
from kvx.models.progress import Hook
from kvx.models.safetensors_folder import SafetensorsFolder
from kvx.models.weights import assemble, resolve_tied

if TYPE_CHECKING:
    from kvx.models.tokenizer import Tokenizer

DTYPES = ("float32", "bfloat16", "float16")
ADAPTER = "adapter_config.json"
Place = Callable[[tuple[str, ...], np.ndarray], jax.Array]
_log = logging.getLogger(__name__)


def load_model(
    name_or_path: Any,
    *,
    dtype: Any = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
    sharding: Any = None,
    stacked: bool | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    adapter: str | Path | None = None,
    revision: str | None = None,
    progress: Hook | bool | None = None,
) -> Model:
    """Load a model, tensor by tensor, each straight into its place.

    Args:
        name_or_path: one of
            a Hugging Face folder (``config.json`` and ``*.safetensors``, single or sharded);
            a hub id such as ``"HuggingFaceTB/SmolLM2-135M-Instruct"`` (or ``"owner/repo/file.gguf"``);
            a ``.gguf`` file (converted once into the cache folder, see :func:`kvx.models.gguf.convert_gguf`);
            ``"demo:smollm2"`` or ``"demo:gemma3"`` (see :mod:`kvx.models.demo_weights`);
            a transformers model in memory.
        dtype: dtype of the weights and of all activations: float32, bfloat16 or float16.
        mesh: device mesh; weights are laid out over it by :data:`kvx.sharding.RULES`.
        sharding: instead of ``mesh``: one ``Sharding`` or device for all weights, or ``(path, shape) -> Sharding``.
        stacked: layers stacked and scanned (compiles fast), or one by one (decodes faster on CPUs); ``None``: one by
            one on CPUs, else stacked.
        tokenizer: a tokenizer, or a folder that holds one, instead of the model's own.
        adapter: folder or hub id of a LoRA adapter (PEFT layout) to merge into the weights.
        revision: hub branch, tag or commit.
        progress: a hook ``(what, done, total)`` for conversions and downloads; ``None``: a bar where somebody can see
            it; ``False``: silence.

    Returns:
        The model, with tokenizer (``None`` where the source has none) and provenance.

    Raises:
        KvxError: nothing there, offline, an unsupported family or quantisation, tensors missing or not understood (all
            listed in one error).

    Example:
        >>> import json, pathlib, tempfile
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from kvx.models.load import load_model
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> config = {"model_type": "gpt2", "vocab_size": 8, "n_embd": 4, "n_layer": 0, "n_head": 2, "n_positions": 6}
        >>> _ = (folder / "config.json").write_text(json.dumps(config))
        >>> save_file({"wte.weight": np.ones((8, 4), np.float32), "wpe.weight": np.ones((6, 4), np.float32),
        ...            "ln_f.weight": np.ones(4, np.float32), "ln_f.bias": np.zeros(4, np.float32)},
        ...           folder / "model.safetensors")
        >>> load_model(folder).params["embed"].shape
        (8, 4)
    """
    dtype = _dtype(dtype)
    place = _placement(dtype, mesh, sharding)
    if stacked is None:
        stacked = _platform(mesh, sharding) != "cpu"
    if hasattr(name_or_path, "state_dict"):
        return _in_memory(name_or_path, dtype, place, stacked, _as_tokenizer(tokenizer), adapter)
    name = os.fspath(name_or_path)
    folder = _folder(name, revision, progress)
    if adapter is not None:
        adapter = _folder(os.fspath(adapter), None, progress)
    elif (folder / ADAPTER).is_file():
        adapter = folder
        folder = folder if (folder / "config.json").is_file() else _folder(_base_of(folder), None, progress)
    return _read_folder(folder, name, dtype, place, stacked, tokenizer, adapter)


def _dtype(dtype: Any) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise KvxError(f"dtype={dtype!r} is not supported; expected one of {', '.join(DTYPES)}.")
    return found


def _platform(mesh: jax.sharding.Mesh | None, sharding: Any) -> str:
    if mesh is not None:
        return str(mesh.devices.flat[0].platform)
    if isinstance(sharding, jax.sharding.Sharding):
        return str(getattr(next(iter(sharding.device_set)), "platform"))  # noqa: B009  (absent from jax's type stubs)
    return str(getattr(sharding, "platform", jax.default_backend()))


def _placement(dtype: np.dtype, mesh: jax.sharding.Mesh | None, sharding: Any) -> Place:
    """How a host array becomes a device array."""
    if mesh is not None and sharding is not None:
        raise KvxError("both mesh= and sharding= were given; pass one of them.")
    if mesh is not None:
        from kvx.sharding import parameter_sharding

        sharding = lambda path, shape: parameter_sharding(mesh, path, shape)  # noqa: E731

    last: list[jax.Array] = []

    def place(path: tuple[str, ...], array: np.ndarray) -> jax.Array:
        where = sharding(path, array.shape) if callable(sharding) else sharding
        array = array.astype(dtype, copy=False)
        jax.block_until_ready(last)  # one transfer in flight at most: host copies would pile up behind a slow device
        if isinstance(where, jax.sharding.Sharding):
            last[:] = [jax.make_array_from_callback(array.shape, where, lambda index: array[index])]
        else:
            last[:] = [jax.device_put(array, where)]
        return last[0]

    return place


def _folder(name: str, revision: str | None, progress: Hook | bool | None) -> Path:
    """The Hugging Face folder behind a name: as it is, converted, or downloaded."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.startswith("demo:"):
        from kvx.models.demo_weights import demo_folder

        return demo_folder(name.removeprefix("demo:"), progress=progress)
    if path.is_file() and path.suffix == ".gguf":
        return convert_gguf(path, progress=progress)
    if path.is_file():
        raise KvxError(f"{path} is a file, but not a .gguf; pass the folder that holds it, with its config.json.")
    if is_hub_id(name):
        return download(name, revision=revision, progress=progress)
    raise KvxError(
        f"{name!r} is neither a folder, a .gguf file nor a hub id (which looks like owner/name); check the spelling."
    )


def _base_of(folder: Path) -> str:
    """The model that an adapter folder was made for."""
    name = json.loads((folder / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name:
        raise KvxError(f"the adapter in {folder} does not name its base model; load that and pass adapter=.")
    return str(name)


def _as_tokenizer(tokenizer: Tokenizer | str | Path | None) -> Tokenizer | None:
    if isinstance(tokenizer, str | os.PathLike):
        from kvx.models.tokenizer import Tokenizer

        return Tokenizer.from_folder(Path(tokenizer).expanduser())
    return tokenizer


def _own_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer; ``None`` where it holds no tokenizer files at all.

    Raises:
        KvxError: the tokenizer of a GGUF file could not be built.
    """
    manifest = folder / MANIFEST
    if manifest.is_file() and (reason := json.loads(manifest.read_text()).get("tokenizer_error")):
        raise KvxError(reason)
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
    if not any((folder / file).is_file() for file in files):
        return None
    return _as_tokenizer(folder)


def _read_folder(
    folder: Path,
    name: str,
    dtype: np.dtype,
    place: Place,
    stacked: bool,
    tokenizer: Tokenizer | str | Path | None,
    adapter: str | Path | None,
) -> Model:
    """Weights, tokenizer and digest of a Hugging Face folder, read side by side."""
    fields = _config_fields(folder)
    reader = SafetensorsFolder.open(folder)
    config = resolve_tied(from_hf_config(fields), reader.slots, reader.read)
    read: Callable[[str], np.ndarray] = reader.read
    extra: list[Path] = []
    if adapter is not None:
        from kvx.models.adapter import Adapter

        lora = Adapter.open(adapter)
        read, extra = lora.merge_into(reader.read, reader.slots), lora.files
    with ThreadPoolExecutor(2) as pool:
        digest = pool.submit(_weight_digest, folder, reader, extra)
        own = pool.submit(_own_tokenizer, folder) if tokenizer is None else pool.submit(_as_tokenizer, tokenizer)
        params = assemble(config, read, reader.slots, dtype=dtype, stacked=stacked, put=place, owned=True)
        found = own.result()
        provenance = Provenance(name, digest.result(), found.digest if found else "")
    return Model(params, config, found, provenance)


def _config_fields(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise KvxError(f"{folder} holds no config.json; pass a Hugging Face checkpoint folder or a .gguf file.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise KvxError(f"{path} is not valid JSON ({error}); download it again.") from error


def _weight_digest(folder: Path, reader: SafetensorsFolder, adapter_files: list[Path]) -> str:
    """Identity of the weights: of a converted file, the GGUF's own SHA-256; else one over all weight files."""
    manifest = folder / MANIFEST
    base = json.loads(manifest.read_text())["sha256"] if manifest.is_file() else digest_all(reader.paths)
    if not adapter_files:
        return str(base)
    return hashlib.sha256(f"{base}+{digest_all(adapter_files)}".encode()).hexdigest()


def _in_memory(
    torch_model: Any,
    dtype: np.dtype,
    place: Place,
    stacked: bool,
    tokenizer: Tokenizer | None,
    adapter: str | Path | None,
) -> Model:
    from kvx.models.weights import from_transformers

    if adapter is not None:
        raise KvxError("adapter= applies to folders; merge it into the in-memory model first (merge_and_unload).")
    model = from_transformers(torch_model, dtype=dtype, tokenizer=tokenizer)
    params = jax.tree_util.tree_map_with_path(lambda path, x: place(_names(path), x), model.params)
    model = dataclasses.replace(model, params=params)
    return model.stack() if stacked else model


def _names(path: Any) -> tuple[str, ...]:
    return tuple(str(step.key) for step in path if hasattr(step, "key"))
