"""Reading weights by the table: tensor by tensor, every misfit reported at once."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvx.errors import KvxError
from kvx.models.config import ModelConfig
from kvx.models.hf_config import from_hf_config
from kvx.models.host_buffer import aligned_empty
from kvx.models.model import Model
from kvx.models.weight_table import Path, Row, table

if TYPE_CHECKING:
    from kvx.models.tokenizer import Tokenizer

Reader = Callable[[str], Any]

# Wrappers that files put around the same names, and entries that are no weights of the text decoder.
_PREFIXES = re.compile(r"^(?:(?:model|transformer|language_model)\.)+")
_IGNORED = re.compile(
    r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|rope_freqs\.weight)$|^(vision_tower|multi_modal_projector)\."
)


def resolve_tied(
    config: ModelConfig, names: Iterable[str], get_tensor: Reader | None = None, *, naming: str = "hf"
) -> ModelConfig:
    """Settle whether the head is the embedding matrix, by what the file really holds.

    No head: tied, whatever the flag says (a warning when it said otherwise). A head beside a tied flag: tied when both
    matrices are equal, else untied with a warning (transformers decides the same way).

    Args:
        config: static facts as the configuration file states them.
        names: tensor names in the file.
        get_tensor: reads a tensor, to compare the two matrices; without it a redundant head is ignored.
        naming: ``"hf"`` or ``"gguf"``.

    Returns:
        ``config`` with ``tied`` as it is.

    Example:
        >>> import dataclasses
        >>> from kvx.models.config import tiny_config
        >>> from kvx.models.weights import resolve_tied
        >>> flagged = dataclasses.replace(tiny_config(), tied=True)
        >>> resolve_tied(flagged, ["model.embed_tokens.weight"]).tied
        True
    """
    known = _canonical(names, naming)
    outer = {row.path: row.name(naming) for row in table(dataclasses.replace(config, tied=False)) if not row.per_layer}
    embed, head = outer[("embed",)], outer[("head",)]
    if head not in known:
        if not config.tied:
            _warn(f"the configuration says that embeddings are not tied, but the file has no {head}: tied.")
        return dataclasses.replace(config, tied=True)
    if config.tied and get_tensor is not None and embed in known:
        same = np.array_equal(_numpy(get_tensor(known[head])), _numpy(get_tensor(known[embed])))
        if not same:
            _warn(f"the configuration says that embeddings are tied, but {head} differs from {embed}: not tied.")
            return dataclasses.replace(config, tied=False)
    return config


def _warn(sentence: str) -> None:
    warnings.warn(sentence, UserWarning, stacklevel=3)


def assemble(
    config: ModelConfig,
    get_tensor: Reader,
    names: Iterable[str],
    *,
    dtype: Any = jnp.float32,
    stacked: bool = False,
    put: Callable[[Path, np.ndarray], jax.Array] | None = None,
    naming: str = "hf",
    owned: bool = False,
) -> dict[str, Any]:
    """Read all parameters, tensor by tensor.

    Args:
        config: static facts; ``tied`` as :func:`resolve_tied` settled it.
        get_tensor: reads one tensor by its name in the file, as numpy array (or anything ``np.asarray`` takes).
        names: all tensor names in the file.
        dtype: dtype of the parameters.
        stacked: stack layers ``[L,...]`` (scanned decoder) instead of one dict per layer.
        put: ``(path, host array) -> device array``; places each parameter, for instance into a sharding.
        naming: ``"hf"`` or ``"gguf"``.
        owned: nobody else holds the arrays that ``get_tensor`` returns, so that parameters may stand on their memory.

    Returns:
        The ``params`` of :class:`kvx.models.model.Model`.

    Raises:
        KvxError: tensors missing, not understood, or of another shape; one error lists them all.

    Example:
        >>> import numpy as np
        >>> from kvx.models.config import tiny_config
        >>> from kvx.models.weights import assemble
        >>> names = ["model.embed_tokens.weight", "rogue.weight"]
        >>> assemble(tiny_config(), lambda name: np.zeros(1), names)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        kvx.errors.KvxError: weights do not fit this llama model: missing ...; not understood rogue.weight; check ...
    """
    names = list(names)
    check_names(config, names, naming=naming)
    known, rows = _canonical(names, naming), table(config)
    place = put or (lambda path, array: jnp.asarray(array))
    layers: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
    params: dict[str, Any] = {"layers": {} if stacked else tuple(layers)}
    bad: list[str] = []
    for row in rows:
        repeats = config.num_layers if row.per_layer else 1
        stack = aligned_empty((repeats, *row.shape), dtype) if row.per_layer and stacked else None
        for i in range(repeats):
            name = row.name(naming, i)
            array = _convert(row, get_tensor(known[name]), naming, dtype, owned and stack is None)
            if array.shape != row.shape:
                bad.append(f"{name} gives {row.path[-1]} {array.shape} instead of {row.shape}")
            elif stack is not None:
                stack[i] = array
            elif row.per_layer:
                _set(layers[i], row.path[1:], place(row.path, array))
            else:
                _set(params, row.path, place(row.path, array))
        if stack is not None and not bad:
            _set(params, row.path, place(row.path, stack))
    if bad:
        raise KvxError(f"weights do not fit this {config.family} model: {'; '.join(bad)}; check the configuration.")
    return params


def _canonical(names: Iterable[str], naming: str) -> dict[str, str]:
    """Name without wrappers -> name in the file, for every entry that may be a weight of the text decoder."""
    strip = (lambda name: name) if naming == "gguf" else (lambda name: _PREFIXES.sub("", name))
    return {strip(name): name for name in names if not _IGNORED.search(strip(name))}


def check_names(config: ModelConfig, names: Iterable[str], *, naming: str = "hf") -> None:
    """Check that every parameter has its tensor and every tensor its parameter.

    Args:
        config: static facts.
        names: all tensor names in the file.
        naming: ``"hf"`` or ``"gguf"``.

    Raises:
        KvxError: one error that lists all tensors which are missing or not understood.
    """
    rows, known = table(config), _canonical(names, naming)
    expected = {row.name(naming, i) for row in rows for i in range(config.num_layers if row.per_layer else 1)}
    redundant = {"output.weight" if naming == "gguf" else "lm_head.weight"} if config.tied else set()
    missing, unknown = sorted(expected - set(known)), sorted(set(known) - expected - redundant)
    groups = (("missing", missing), ("not understood", unknown))
    parts = [f"{what} {', '.join(found)}" for what, found in groups if found]
    if parts:
        raise KvxError(
            f"weights do not fit this {config.family} model: {'; '.join(parts)}; "
            "check that configuration and weights belong together and that no shard is absent."
        )


def _numpy(tensor: Any) -> np.ndarray:
    """Host array of a numpy, JAX or torch tensor; torch's bfloat16 has no numpy twin and goes through its bits."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            import torch

            return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
        return tensor.numpy()
    return np.asarray(tensor)


def _convert(row: Row, tensor: Any, naming: str, dtype: Any, owned: bool) -> np.ndarray:
    """One tensor as parameter: turned to ``[out, in]``, split, cast and shaped; a misfit comes back as it is."""
    array = _numpy(tensor)
    if array.ndim == 2 and row.kind == "conv1d" and naming == "hf":
        array = array.T
    if row.part is not None and array.shape[0] % row.part[1] == 0:
        array = np.split(array, row.part[1])[row.part[0]]
    if array.shape not in (row.shape, row.matrix):
        return array
    if owned and array.dtype == dtype and array.flags.c_contiguous:
        return array.reshape(row.shape)
    out = aligned_empty(row.shape, dtype)
    out[...] = array.reshape(row.shape)
    return out


def _set(tree: dict[str, Any], path: Path, value: Any) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value


def from_transformers(torch_model: Any, *, dtype: Any = None, tokenizer: Tokenizer | None = None) -> Model:
    """A transformers (torch) causal language model as kvx :class:`Model`; the torch model is only read.

    Args:
        torch_model: a ``PreTrainedModel`` of a supported family.
        dtype: dtype of the weights; ``None``: as the torch model has them.
        tokenizer: rides along for ``encode`` and ``decode``.

    Returns:
        The model with one dict of weights per layer.

    Raises:
        KvxError: unknown family or option, or tensors that do not fit.

    Example:
        ``from_transformers(AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M"))``
    """
    from kvx.cache.provenance import Provenance, digest_arrays

    state = torch_model.state_dict()
    config = from_hf_config(torch_model.config)
    names = [name for name in state if not (config.tied and name == "lm_head.weight")]
    if dtype is None:
        dtype = jnp.dtype(str(next(iter(state.values())).dtype).removeprefix("torch."))
    params = assemble(config, state.__getitem__, names, dtype=dtype)
    name = str(getattr(torch_model, "name_or_path", "") or type(torch_model).__name__)
    digest = tokenizer.digest if tokenizer is not None else ""
    return Model(params, config, tokenizer, Provenance(name, digest_arrays(params), digest))
