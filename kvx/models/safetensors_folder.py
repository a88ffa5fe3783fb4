"""Safetensors, tensor by tensor: a reader over one or many files and a writer that never holds the whole model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvx.errors import KvxError
from kvx.models.host_buffer import aligned_empty

FLOATS = {
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype("float64"),
}
_CODES = {dtype: code for code, dtype in FLOATS.items()}


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where one tensor lies.

    Attributes:
        path: the file; code: safetensors' dtype; shape; offset, nbytes: bytes from the start of the file.
    """

    path: Path
    code: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class SafetensorsFolder:
    """The tensors of a checkpoint, by name.

    Attributes:
        slots: tensor name -> where it lies.
    """

    slots: dict[str, Slot]

    @classmethod
    def of(cls, paths: Iterable[Path]) -> SafetensorsFolder:
        """The tensors of some files.

        Raises:
            KvxError: a file is damaged or cut short.
        """
        return cls({name: slot for path in paths for name, slot in _slots(path).items()})

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
        found = cls.of(paths)
        lost = sorted(set(names) - set(found.slots))
        if lost:
            raise KvxError(f"{folder}: no shard holds {', '.join(lost)}, which the index names; download it again.")
        return found

    @property
    def paths(self) -> list[Path]:
        """The files, each once."""
        return sorted({slot.path for slot in self.slots.values()})

    def read(self, name: str) -> np.ndarray:
        """One tensor, in memory of its own (bfloat16 as ``ml_dtypes.bfloat16``).

        Read, not mapped: pages of a mapping count as this process's memory beside the copy made of them.

        Raises:
            KvxError: stored as integers or in an 8-bit float (a quantised checkpoint), which a cast would turn into
                other numbers.
        """
        slot = self.slots[name]
        if slot.code not in FLOATS:
            raise KvxError(
                f"{slot.path.name}: tensor {name!r} is stored as {slot.code}; expected one of "
                f"{', '.join(FLOATS)}; pass an unquantised checkpoint or a GGUF file."
            )
        out = aligned_empty(slot.shape, FLOATS[slot.code])
        with slot.path.open("rb") as f:
            f.seek(slot.offset)
            if f.readinto(out.reshape(-1).view(np.uint8).data) != slot.nbytes:
                raise KvxError(f"{slot.path} ended inside {name!r}; download it again.")
        return out


def _slots(path: Path) -> dict[str, Slot]:
    """The header of one file, checked by the safetensors library (sizes, overlaps, names) and then read."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="np"):
            pass
        with path.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(size))
    except Exception as error:  # safetensors raises its own type, OSError or ValueError, all for a damaged file
        raise KvxError(f"{path} is damaged or cut short ({error}); download it again.") from error
    slots = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            slots[name] = Slot(path, entry["dtype"], tuple(entry["shape"]), 8 + size + start, end - start)
    return slots


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
        facts = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, at + size]}
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
