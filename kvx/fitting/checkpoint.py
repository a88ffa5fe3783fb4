"""Artefacts on disk: arrays by Orbax, a JSON manifest beside them; loading fails closed."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvx
from kvx.cache.provenance import digest_arrays, digest_files
from kvx.errors import KvxError
from kvx.fitting.codec import decode, encode
from kvx.mappers.base import CacheMap, digest_map

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = "arrays"


def save(path: str | Path, mapper: CacheMap, *, overwrite: bool = False) -> Path:
    """Write a fitted map: a folder with ``arrays/`` (Orbax) and ``manifest.json``.

    The folder appears whole or not at all. The manifest holds the method's settings, geometries, provenance of both
    models, name, shape and dtype of every array, SHA-256 of every array file, and kvx's version.

    Args:
        path: folder to create.
        mapper: the map; its arrays may be sharded.
        overwrite: replace a map that is already there.

    Returns:
        The folder.

    Raises:
        KvxError: the path is taken (and, with ``overwrite``, by something that is no saved map), or cannot be written.

    Example:
        >>> import tempfile, kvx
        >>> from kvx.fitting.synthetic import toy_pairs
        >>> mapper, _ = kvx.fit(kvx.mappers.full_head(layers=1), toy_pairs(), progress=False)
        >>> folder = kvx.save(tempfile.mkdtemp() + "/toy", mapper)
        >>> kvx.load(folder).digest == mapper.digest
        True
    """
    path = Path(path).absolute()
    if path.exists():
        if not overwrite:
            raise KvxError(f"{path} exists already; choose another folder or pass overwrite=True.")
        if not (path / MANIFEST).is_file():
            raise KvxError(f"{path} holds no saved map, so it is not replaced; choose another folder.")
    spec, arrays = encode(mapper)
    _save(path, spec, arrays, digest_map(mapper))
    return path


def load(path: str | Path, *, sharding: jax.sharding.Sharding | None = None) -> CacheMap:
    """Read a map that :func:`save` wrote, on whatever devices there are now.

    Everything is compared before anything is used: format, kvx version, the SHA-256 of every file, no file missing or
    added, dtype and shape of every array, and in the end the digest of the map itself.

    Args:
        path: the folder.
        sharding: of every array; ``None``: on the default device, but not bound to it, so that the map may be used
            beside arrays that are spread over several.

    Returns:
        The map.

    Raises:
        KvxError: naming the first thing that is not as it was saved.
    """
    path = Path(path).absolute()
    manifest = _read_manifest(path)
    _check_files(path / ARRAYS, manifest["files"])
    arrays = _read_arrays(path / ARRAYS, manifest["arrays"], sharding)
    mapper = decode(manifest["map"], arrays)
    if not isinstance(mapper, CacheMap):
        raise KvxError(f"{path} holds a {type(mapper).__name__}, not a fitted map; load it with what saved it.")
    if digest_map(mapper) != manifest["digest"]:
        raise KvxError(f"{path}: the arrays are not those of the map that was saved; fit or copy it again.")
    return mapper


def save_state(path: str | Path, arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
    """Write named arrays of an unfinished run and plain facts about it, in place of what is there.

    Args:
        path: folder to create or replace.
        arrays: by name.
        facts: plain JSON.

    Returns:
        The folder, whole: an interrupted write leaves the one before it.

    Raises:
        KvxError: the path is taken by something else, or cannot be written.
    """
    path = Path(path).absolute()
    if path.exists() and not (path / MANIFEST).is_file():
        raise KvxError(f"{path} holds no saved run, so it is not replaced; choose another folder.")
    spec, leaves = encode({"facts": dict(facts), "state": dict(arrays)})
    _save(path, spec, leaves, digest_arrays(dict(arrays)))
    return path


def load_state(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and facts that :func:`save_state` wrote, every file compared first.

    Raises:
        KvxError: naming the first thing that is not as it was saved.
    """
    path = Path(path).absolute()
    manifest = _read_manifest(path)
    _check_files(path / ARRAYS, manifest["files"])
    found = decode(manifest["map"], _read_arrays(path / ARRAYS, manifest["arrays"], None))
    if not isinstance(found, dict) or set(found) != {"facts", "state"}:
        raise KvxError(f"{path} holds no unfinished run; a finished map is read by kvx.load.")
    return found["state"], found["facts"]


def _save(path: Path, spec: Any, arrays: dict[str, Any], digest: str) -> None:
    """A folder that appears whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise KvxError(f"cannot write to {path.parent} ({error.strerror}); choose another folder.") from error
    try:
        _write(scratch, spec, arrays, digest)
        _replace(scratch, path)
    except OSError as error:
        raise KvxError(f"could not write {path} ({error}); free some space or choose another folder.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write(folder: Path, spec: Any, arrays: dict[str, Any], digest: str) -> None:
    """Arrays first, then the manifest that vouches for them."""
    import orbax.checkpoint as ocp

    if arrays:  # Orbax refuses an empty tree, and the identity has no parameters
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / ARRAYS, arrays)
            checkpointer.wait_until_finished()
    manifest = {
        "format": FORMAT,
        "kvx": kvx.__version__,
        "digest": digest,
        "map": spec,
        "arrays": {name: _facts(array) for name, array in arrays.items()},
        "files": {str(file.relative_to(folder / ARRAYS)): digest_files(file) for file in _files(folder / ARRAYS)},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    folder.chmod(0o755)


def _replace(scratch: Path, path: Path) -> None:
    """Rename the new folder into place; an old one is put back if that fails."""
    if not path.exists():
        scratch.rename(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}-old-", dir=path.parent)) / path.name
    path.rename(old)
    try:
        scratch.rename(path)
    except OSError:
        old.rename(path)
        raise
    finally:
        shutil.rmtree(old.parent, ignore_errors=True)


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise KvxError(f"{path} is no saved map: cannot read {MANIFEST} ({error.strerror}).") from None
    except ValueError as error:
        raise KvxError(f"{file} is not valid JSON ({error}); fit or copy the map again.") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise KvxError(
            f"{path} has format {found!r}; this kvx reads format {FORMAT}: use the kvx that saved it, or fit anew."
        )
    missing = {"kvx", "digest", "map", "arrays", "files"} - set(manifest)
    if missing:
        raise KvxError(f"{file} lacks {', '.join(sorted(missing))}; fit or copy the map again.")
    if _version(manifest["kvx"]) > _version(kvx.__version__):
        raise KvxError(f"{path} was saved by kvx {manifest['kvx']}, newer than this {kvx.__version__}; update kvx.")
    return manifest


def _version(text: Any) -> tuple[int, int]:
    """Major and minor number."""
    try:
        major, minor = str(text).split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        raise KvxError(f"{text!r} is not a version of kvx; fit or copy the map again.") from None


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _check_files(folder: Path, wanted: dict[str, str]) -> None:
    found = {str(file.relative_to(folder)): file for file in _files(folder)}
    for kind, names in (("missing", set(wanted) - set(found)), ("not part of it", set(found) - set(wanted))):
        if names:
            raise KvxError(f"{folder}: files {kind}: {', '.join(sorted(names))}; copy the whole folder again.")
    for name, digest in wanted.items():
        if digest_files(found[name]) != digest:
            raise KvxError(
                f"{folder / name} was changed after it was saved (other SHA-256); copy or fit the map again."
            )


def _read_arrays(folder: Path, wanted: dict[str, Any], sharding: jax.sharding.Sharding | None) -> dict[str, jax.Array]:
    """Restore exactly the arrays of the manifest, with its dtypes and shapes, onto present devices."""
    import orbax.checkpoint as ocp

    if not wanted:
        return {}
    place = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.StandardCheckpointer() as checkpointer:
        stored = _stored(checkpointer, folder)
        if stored != wanted:
            names = sorted(n for n in {*stored, *wanted} if stored.get(n) != wanted.get(n))
            first = names[0]
            raise KvxError(
                f"{folder}: array {first} is {stored.get(first)} in the files and {wanted.get(first)} in the manifest; "
                "copy or fit the map again."
            )
        target = {
            name: jax.ShapeDtypeStruct(tuple(facts["shape"]), jax.numpy.dtype(facts["dtype"]), sharding=place)
            for name, facts in wanted.items()
        }
        restored: dict[str, jax.Array] = checkpointer.restore(folder, target)
    for name, array in restored.items():
        if _facts(array) != wanted[name]:
            raise KvxError(f"{folder}: array {name} came back as {_facts(array)}, expected {wanted[name]}.")
    if sharding is not None:
        return restored
    return {name: jax.numpy.asarray(np.asarray(array)) for name, array in restored.items()}  # bound to no device


def _stored(checkpointer: Any, folder: Path) -> dict[str, dict[str, Any]]:
    """Shape and dtype of every array that the files hold."""
    metadata = checkpointer.metadata(folder)
    tree = getattr(metadata, "item_metadata", metadata)
    tree = getattr(tree, "tree", tree)
    return {name: {"shape": list(leaf.shape), "dtype": np.dtype(leaf.dtype).name} for name, leaf in dict(tree).items()}


def _facts(array: Any) -> dict[str, Any]:
    return {"shape": list(array.shape), "dtype": np.dtype(array.dtype).name}
