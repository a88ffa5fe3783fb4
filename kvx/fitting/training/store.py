"""Rows of pytrees on the host: written once, batch by batch, and read back in any order, from disk or from memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvx.errors import KvxError
from kvx.fitting.codec import decode, encode

INDEX = "index.json"


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """``count`` rows of one pytree; :meth:`create` makes an empty one, :func:`open_tables` finds those on disk.

    Arrays with four or more axes have their rows on the second (``[L,B,K,T,D]``), all others on the first; they are
    kept rows first, and bfloat16 as its bits.

    Attributes:
        spec: structure of the pytree; columns: its arrays; dtypes: of the arrays; axes: of their rows.
    """

    spec: Any
    columns: dict[str, np.ndarray]
    dtypes: dict[str, str]
    axes: dict[str, int]

    @classmethod
    def create(cls, folder: Path | None, name: str, value: Any, count: int) -> Table:
        """Room for ``count`` rows like those of ``value``, in files of ``folder`` or in memory.

        Example:
            >>> import numpy as np
            >>> from kvx.fitting.training.store import Table
            >>> table = Table.create(None, "pairs", (np.zeros((2, 3)), np.zeros(2)), count=5)
            >>> table.write(3, (np.ones((2, 3)), np.arange(2.0)))
            >>> [x.tolist() for x in table.read([4, 0])]
            [[[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], [1.0, 0.0]]
        """
        spec, arrays = encode(value)
        columns, axes = {}, {}
        for key, array in arrays.items():
            axes[key] = int(array.ndim >= 4)
            shape = (count, *np.delete(array.shape, axes[key]).tolist())
            columns[key] = _room(folder, f"{name}.{key}.npy", shape, _stored(array.dtype))
        return cls(spec, columns, {key: np.dtype(array.dtype).name for key, array in arrays.items()}, axes)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values())))

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(column.nbytes for column in self.columns.values())

    def write(self, first: int, value: Any, count: int | None = None) -> None:
        """Put the first ``count`` rows of ``value`` (``None``: all) at row ``first`` and after it."""
        spec, arrays = encode(value)
        if spec != self.spec:
            raise KvxError("these rows have another structure than the table; write what it was created for.")
        for key, array in arrays.items():
            rows = np.moveaxis(np.asarray(array), self.axes[key], 0)[:count]
            self.columns[key][first : first + len(rows)] = rows.view(_stored(rows.dtype))

    def read(self, rows: Sequence[int] | np.ndarray) -> Any:
        """The given rows as the pytree, arrays on the default device."""
        index = np.asarray(rows, np.int64)
        arrays = {}
        for key, column in self.columns.items():
            found = np.ascontiguousarray(column[index]).view(jnp.dtype(self.dtypes[key]))
            arrays[key] = jnp.asarray(np.moveaxis(found, 0, self.axes[key]))
        return decode(self.spec, arrays)


def _stored(dtype: Any) -> Any:
    """Type on disk: numpy's files know nothing of bfloat16."""
    return np.dtype(np.uint16) if jnp.dtype(dtype) == jnp.bfloat16 else np.dtype(dtype)


def _room(folder: Path | None, file: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if folder is None:
        return np.zeros(shape, dtype)
    return np.lib.format.open_memmap(folder / file, mode="w+", dtype=dtype, shape=shape)


def save_index(folder: Path, tables: dict[str, Table], facts: dict[str, Any]) -> None:
    """Write what makes the files of a folder readable again; without it they count as unfinished."""
    for table in tables.values():
        for column in table.columns.values():
            if isinstance(column, np.memmap):
                column.flush()
    known = {name: {"spec": t.spec, "dtypes": t.dtypes, "axes": t.axes} for name, t in tables.items()}
    scratch = folder / f".{INDEX}"
    scratch.write_text(json.dumps({"facts": facts, "tables": known}), encoding="utf-8")
    scratch.replace(folder / INDEX)


def open_tables(folder: Path) -> tuple[dict[str, Table], dict[str, Any]] | None:
    """Tables of a folder and the facts saved with them, ``None`` when there is no finished set.

    Raises:
        KvxError: an index whose files are missing or damaged.
    """
    if not (folder / INDEX).is_file():
        return None
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        tables = {}
        for name, known in index["tables"].items():
            columns = {key: np.load(folder / f"{name}.{key}.npy", mmap_mode="r") for key in known["axes"]}
            tables[name] = Table(known["spec"], columns, known["dtypes"], known["axes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KvxError(f"{folder} holds a damaged dump ({error}); delete the folder and dump anew.") from None
    return tables, index["facts"]
