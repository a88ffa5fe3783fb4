"""Safetensors, tensor by tensor: a reader over one or many files and a writer that never holds the whole model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvx.errors import KvxError

_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
FLOATS = ("F32", "F16", "BF16", "F64")


@dataclasses.dataclass(frozen=True)
class SafetensorsFolder:
    """The tensors of a checkpoint folder, by name.

    Attributes:
        files: tensor name -> file that holds it.
    """

    files: dict[str, Path]

    @classmethod
    def open(cls, folder: str | Path) -> SafetensorsFolder:
        """List the tensors of ``model.safetensors``, or of the shards that ``model.safetensors.index.json`` names.

        Args:
            folder: a checkpoint folder in the Hugging Face layout.

        Returns:
            The reader; nothing but headers has been read.

        Raises:
            KvxError: no safetensors, a shard missing or damaged, or tensors that the index names but no shard holds.

        Example:
            >>> import pathlib, tempfile, numpy as np
            >>> from safetensors.numpy import save_file
            >>> from kvx.models.safetensors_folder import SafetensorsFolder
            >>> folder = pathlib.Path(tempfile.mkdtemp())
            >>> save_file({"a": np.ones(2, np.float32)}, folder / "model.safetensors")
            >>> SafetensorsFolder.open(folder).read("a")
            array([1., 1.], dtype=float32)
        """
        folder = Path(folder)
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if single.is_file():
            names: dict[str, Path] = {}
            paths = [single]
        elif index.is_file():
            names = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
            paths = sorted(set(names.values()))
        else:
            names, paths = {}, sorted(folder.glob("*.safetensors"))
        paths = [path for path in paths if not path.name.startswith("adapter_")]
        if not paths:
            raise KvxError(_no_weights(folder))
        absent = [path.name for path in paths if not path.is_file()]
        if absent:
            raise KvxError(f"{folder} lacks shards: {', '.join(absent)}; download it again.")
        found = {name: path for path in paths for name in tensor_names(path)}
        lost = sorted(set(names) - set(found))
        if lost:
            raise KvxError(f"{folder}: no shard holds {', '.join(lost)}, which the index names; download it again.")
        return cls(found)

    @property
    def paths(self) -> list[Path]:
        """The files, each once."""
        return sorted(set(self.files.values()))

    def read(self, name: str) -> np.ndarray:
        """One tensor (bfloat16 as ``ml_dtypes.bfloat16``).

        The file is mapped for this one tensor only: a mapping kept open would count its pages as this process's
        memory until the whole file had been read.

        Raises:
            KvxError: stored as integers or in an 8-bit float (a quantised checkpoint), which a cast would turn into
                other numbers.
        """
        import ml_dtypes  # noqa: F401  (numpy's bfloat16)
        from safetensors import safe_open

        with safe_open(self.files[name], framework="np") as f:
            code = f.get_slice(name).get_dtype()
            if code not in FLOATS:
                raise KvxError(
                    f"{self.files[name].name}: tensor {name!r} is stored as {code}; expected one of "
                    f"{', '.join(FLOATS)}; pass an unquantised checkpoint or a GGUF file."
                )
            return f.get_tensor(name)


def tensor_names(path: Path) -> list[str]:
    """Names of the tensors of one safetensors file.

    Raises:
        KvxError: the file is damaged or cut short.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, framework="np") as f:
            return list(f.keys())
    except Exception as error:  # safetensors raises its own type, OSError or ValueError, all for a damaged file
        raise KvxError(f"{path} is damaged or cut short ({error}); download it again.") from error


def _no_weights(folder: Path) -> str:
    other = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
    if not other:
        return f"{folder} holds no *.safetensors; expected a Hugging Face checkpoint folder; pass one, or a .gguf file."
    what = f"{folder} holds {', '.join(other[:3])} but no *.safetensors; "
    if other[0].endswith(".gguf"):
        return what + f"pass the file itself: {folder / other[0]}."
    return what + "kvx does not unpickle torch files; save the model with safetensors (save_pretrained does)."


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor to write.

    Attributes:
        name: its name; shape, dtype: what the blocks add up to.
        blocks: yields consecutive blocks of rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    blocks: Callable[[], Iterator[np.ndarray]]


def write_safetensors(
    path: str | Path, entries: Iterable[Entry], *, progress: Callable[[str, int, int], Any] | None = None
) -> None:
    """Write a safetensors file, block by block.

    Args:
        path: the file.
        entries: tensors, written in this order.
        progress: called with (tensor name, bytes written, bytes in all) after every tensor.

    Raises:
        KvxError: a tensor's blocks do not add up to its shape.

    Example:
        >>> import tempfile, numpy as np
        >>> from safetensors.numpy import load_file
        >>> from kvx.models.safetensors_folder import Entry, write_safetensors
        >>> x = np.arange(6, dtype=np.float32).reshape(3, 2)
        >>> path = tempfile.mkdtemp() + "/x.safetensors"
        >>> write_safetensors(path, [Entry("x", x.shape, x.dtype, lambda: iter([x[:2], x[2:]]))])
        >>> load_file(path)["x"].tolist()
        [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    """
    entries = list(entries)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        size = math.prod(entry.shape) * entry.dtype.itemsize
        facts = {"dtype": _CODES[entry.dtype.name], "shape": list(entry.shape), "data_offsets": [at, at + size]}
        header[entry.name] = facts
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with Path(path).open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            end = header[entry.name]["data_offsets"][1]
            for block in entry.blocks():
                f.write(np.ascontiguousarray(block, entry.dtype).reshape(-1).view(np.uint8).data)
            if f.tell() - 8 - len(text) != end:
                raise KvxError(f"tensor {entry.name!r} does not fill its shape {entry.shape}; the input is damaged.")
            if progress is not None:
                progress(entry.name, end, at)
