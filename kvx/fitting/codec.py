"""Immutable kvx values as JSON plus named arrays, and back: no registry, no pickles, nothing but kvx's own classes."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from kvx.errors import KvxError

_PLAIN = (str, int, float, bool)


def encode(value: Any) -> tuple[Any, dict[str, Any]]:
    """Describe a value made of kvx dataclasses, tuples, lists, dictionaries, plain values and arrays.

    Args:
        value: the value.

    Returns:
        A JSON structure, and the arrays it refers to by name.

    Raises:
        KvxError: something in it is none of these.

    Example:
        >>> import numpy as np
        >>> from kvx.cache.geometry import LayerGeometry
        >>> from kvx.fitting.codec import decode, encode
        >>> spec, arrays = encode((LayerGeometry(1, 2, 3), np.arange(2)))
        >>> list(arrays), decode(spec, arrays)[0].value_dim
        (['1'], 3)
    """
    arrays: dict[str, Any] = {}
    return _encode(value, (), arrays), arrays


def decode(spec: Any, arrays: Mapping[str, Any]) -> Any:
    """Rebuild what :func:`encode` described; every array must be used.

    Raises:
        KvxError: an unknown class or field, or arrays that are missing or left over.
    """
    used: set[str] = set()
    value = _decode(spec, arrays, used)
    if used != set(arrays):
        raise KvxError(f"arrays {sorted(set(arrays) - used)} belong to nothing in the manifest; copy or fit it again.")
    return value


def _encode(value: Any, path: tuple[str, ...], arrays: dict[str, Any]) -> Any:
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, jax.Array | np.ndarray):
        name = ".".join(path)
        arrays[name] = value
        return {"array": name}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode(v, (*path, str(i)), arrays) for i, v in enumerate(value)]}
    if isinstance(value, Mapping):
        return {"dict": [[str(k), _encode(v, (*path, str(k)), arrays)] for k, v in value.items()]}
    cls = type(value)
    if dataclasses.is_dataclass(value) and cls.__module__.split(".")[0] == "kvx":
        fields = {f.name: _encode(getattr(value, f.name), (*path, f.name), arrays) for f in dataclasses.fields(value)}
        return {"class": f"{cls.__module__}:{cls.__qualname__}", "fields": fields}
    raise KvxError(
        f"{'.'.join(path) or 'the value'} is a {cls.__module__}.{cls.__qualname__}, which cannot be saved; expected "
        "kvx dataclasses, tuples, lists, dictionaries, plain values and arrays."
    )


def _decode(spec: Any, arrays: Mapping[str, Any], used: set[str]) -> Any:
    if spec is None or isinstance(spec, _PLAIN):
        return spec
    kind = next(iter(spec)) if isinstance(spec, dict) and spec else None
    if kind == "array":
        name = spec["array"]
        if name not in arrays:
            raise KvxError(f"array {name} is missing; copy or fit the map again.")
        used.add(name)
        return arrays[name]
    if kind in ("tuple", "list"):
        items = [_decode(v, arrays, used) for v in spec[kind]]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {k: _decode(v, arrays, used) for k, v in spec["dict"]}
    if kind == "class":
        fields = {k: _decode(v, arrays, used) for k, v in spec["fields"].items()}
        return _build(spec["class"], fields)
    raise KvxError(f"the manifest holds {spec!r}, which this kvx does not understand; copy or fit the map again.")


def _build(name: str, fields: dict[str, Any]) -> Any:
    """An instance of one of kvx's own dataclasses, with exactly its fields."""
    module, _, qualname = str(name).partition(":")
    if module.split(".")[0] != "kvx" or "." in qualname or qualname.startswith("_"):
        raise KvxError(f"the manifest names the class {name!r}; only kvx's own are loaded.")
    try:
        cls = getattr(importlib.import_module(module), qualname)
    except (ImportError, AttributeError):
        raise KvxError(f"this kvx has no {name}; use the kvx that saved it, or fit anew.") from None
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise KvxError(f"the manifest names {name!r}, which is no kvx dataclass; copy or fit the map again.")
    wanted = {field.name for field in dataclasses.fields(cls)}
    if set(fields) != wanted:
        odd = sorted(set(fields) ^ wanted)
        raise KvxError(f"{name} differs from this kvx's in {', '.join(odd)}; use the kvx that saved it, or fit anew.")
    return cls(**fields)
