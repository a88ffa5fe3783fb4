"""Read a GGUF file: its metadata at once (about 0.3 s for 262,144 tokens), its tensors one by one.

The header is parsed here with ``struct``: the ``gguf`` package's own reader makes a NumPy object of every string and
takes 15-50 s on a large vocabulary. Dequantisation is the ``gguf`` package's.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvx.errors import KvxError

SUPPORTED_TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
CHUNK_BYTES = 32 << 20
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies in the file.

    Attributes:
        name: GGUF name, such as ``blk.0.attn_q.weight``.
        shape: row-major shape (GGUF lists the fastest axis first; here it is last, as everywhere in kvx).
        kind: storage type, such as ``"Q4_K"``.
        offset: bytes from the start of the file.
        nbytes: stored size.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Stored bits per number."""
        return 8.0 * self.nbytes / max(math.prod(self.shape), 1)

    @property
    def dtype(self) -> np.dtype:
        """Dtype that :meth:`GgufFile.read` returns: the stored one for plain floats, float32 for quantised types."""
        import ml_dtypes

        return np.dtype({"F16": np.float16, "BF16": ml_dtypes.bfloat16}.get(self.kind, np.float32))


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """An open GGUF file: metadata in memory, tensors on disk.

    Attributes:
        path: the file.
        metadata: every key of the header; arrays as lists.
        tensors: by GGUF name, in file order.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Parse the header.

        Args:
            path: a ``.gguf`` file, version 2 or 3, little-endian, in one piece.

        Returns:
            The open file.

        Raises:
            KvxError: not a GGUF file, cut short, split over several files, or of an unknown version.

        Example:
            >>> import tempfile, gguf, numpy as np
            >>> from kvx.models.gguf_file import GgufFile
            >>> path = tempfile.mkdtemp() + "/tiny.gguf"
            >>> writer = gguf.GGUFWriter(path, "llama")
            >>> writer.add_tensor("token_embd.weight", np.ones((4, 2), np.float32))
            >>> writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file()
            >>> writer.close()
            >>> file = GgufFile.open(path)
            >>> file.metadata["general.architecture"], file.tensors["token_embd.weight"].shape
            ('llama', (4, 2))
            >>> float(file.read("token_embd.weight").sum())
            8.0

        Reference: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
        """
        path = Path(path)
        with path.open("rb") as f:
            size = path.stat().st_size
            if size < 24:
                raise KvxError(f"{path} is not a GGUF file: it holds only {size} bytes; download it again.")
            with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
                try:
                    metadata, tensors = _Header(data, path).parse()
                except (struct.error, IndexError, UnicodeDecodeError) as error:
                    raise KvxError(f"{path} is damaged inside its header ({error}); download it again.") from error
        _check(path, size, metadata, tensors)
        return cls(path, metadata, tensors)

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """Rows of one tensor (its first axis) in blocks of about 32 MiB, dequantised; vectors come in one piece."""
        info = self.tensors[name]
        _check_type(info, self.path)
        rows = info.shape[0] if len(info.shape) > 1 else 1
        row_shape = info.shape[1:] if len(info.shape) > 1 else info.shape
        row_bytes = info.nbytes // max(rows, 1)
        step = max(1, CHUNK_BYTES // max(4 * math.prod(row_shape), 1))
        with self.path.open("rb") as f:
            f.seek(info.offset)
            for start in range(0, rows, step):
                count = min(step, rows - start)
                block = np.frombuffer(f.read(count * row_bytes), np.uint8)
                shape = (count, *row_shape) if len(info.shape) > 1 else info.shape
                yield _dequantise(block, info, shape)

    def rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Some rows of a matrix, dequantised.

        Args:
            name: a matrix of the file.
            rows: integer ``[N]`` row numbers.

        Returns:
            ``[N, columns]``.
        """
        info = self.tensors[name]
        _check_type(info, self.path)
        stored = np.memmap(self.path, np.uint8, "r", info.offset, (info.shape[0], info.nbytes // info.shape[0]))
        return _dequantise(np.ascontiguousarray(stored[rows]).reshape(-1), info, (len(rows), *info.shape[1:]))

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """One whole tensor, dequantised, in ``dtype`` (default: see :attr:`TensorInfo.dtype`).

        Raises:
            KvxError: the tensor's quantisation is not one of ``SUPPORTED_TYPES``.
        """
        info = self.tensors[name]
        out = np.empty(info.shape, dtype or info.dtype)
        if out.ndim < 2:
            out[...] = next(self.chunks(name)).astype(out.dtype)
            return out
        start = 0
        for block in self.chunks(name):
            out[start : start + len(block)] = block.astype(out.dtype, copy=False)
            start += len(block)
        return out


def _dequantise(block: np.ndarray, info: TensorInfo, shape: tuple[int, ...]) -> np.ndarray:
    """Stored bytes -> numbers of ``info.dtype``."""
    if info.kind in ("F32", "F16", "BF16"):
        return block.view(info.dtype).reshape(shape)
    import gguf

    kind = gguf.GGMLQuantizationType[info.kind]
    return gguf.quants.dequantize(block.reshape(math.prod(shape[:-1]), -1), kind).reshape(shape)


def _check_type(info: TensorInfo, path: Path) -> None:
    if info.kind not in SUPPORTED_TYPES:
        raise KvxError(
            f"{path.name}: tensor {info.name!r} is stored as {info.kind}, which kvx does not read; expected one of "
            f"{', '.join(SUPPORTED_TYPES)}; download the model in one of those types (such as Q4_K_M or Q8_0)."
        )


def _check(path: Path, size: int, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    if int(metadata.get("split.count", 1) or 1) > 1:
        raise KvxError(
            f"{path.name} is one of {metadata['split.count']} pieces of a split GGUF; expected one file; "
            "join them first with `llama-gguf-split --merge`."
        )
    if "general.architecture" not in metadata:
        raise KvxError(f"{path.name} names no general.architecture, so it is no language model; pass another file.")
    end = max((t.offset + t.nbytes for t in tensors.values()), default=0)
    if end > size:
        raise KvxError(f"{path} is cut short: {size} bytes, but its tensors end at byte {end}; download it again.")


class _Header:
    """Cursor over the header bytes."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.at = data, path, 0

    def parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        magic, version, tensor_count, key_count = self.take("<4sIQQ")
        if magic != b"GGUF":
            raise KvxError(f"{self.path} is not a GGUF file (it starts with {magic!r}); pass one made by llama.cpp.")
        if version not in (2, 3):
            hint = "big-endian" if version > 1 << 16 else f"version {version}"
            raise KvxError(f"{self.path} is a {hint} GGUF; expected little-endian version 2 or 3; convert it again.")
        metadata = {}
        for _ in range(key_count):
            key = self.string()
            metadata[key] = self.value(self.take("<I")[0])
        entries = [self.tensor() for _ in range(tensor_count)]
        align = int(metadata.get("general.alignment", 32))
        start = -(-self.at // align) * align
        tensors = {t.name: dataclasses.replace(t, offset=start + t.offset) for t in entries}
        if len(tensors) != len(entries):
            raise KvxError(f"{self.path} lists a tensor name twice; the file is damaged; convert it again.")
        return metadata, tensors

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (length,) = self.take("<Q")
        if self.at + length > len(self.data):
            raise IndexError("a string runs past the end")
        raw = self.data[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.take("<" + _SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise KvxError(f"{self.path} holds a metadata value of unknown type {kind}; it is damaged or too new.")
        inner, count = self.take("<IQ")
        if inner in _SCALARS:
            return list(self.take(f"<{count}{_SCALARS[inner]}"))
        return [self.value(inner) for _ in range(count)]

    def tensor(self) -> TensorInfo:
        import gguf

        name = self.string()
        (rank,) = self.take("<I")
        shape = tuple(reversed(self.take(f"<{rank}Q")))
        code, offset = self.take("<IQ")
        try:
            kind = gguf.GGMLQuantizationType(code)
        except ValueError:
            return TensorInfo(name, shape, f"type {code}", offset, 0)
        block, width = gguf.GGML_QUANT_SIZES[kind]
        return TensorInfo(name, shape, kind.name, offset, math.prod(shape) // block * width)
