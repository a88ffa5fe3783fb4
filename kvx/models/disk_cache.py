"""kvx's folder on disk: where it is, folders that appear whole or not at all, and remembered file digests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kvx.errors import KvxError

BLOCK = 8 << 20


def cache_dir() -> Path:
    """Folder for converted and downloaded models: ``$KVX_CACHE``, else ``~/.cache/kvx``.

    Example:
        >>> import os
        >>> from kvx.models.disk_cache import cache_dir
        >>> cache_dir() == __import__("pathlib").Path(os.environ.get("KVX_CACHE") or "~/.cache/kvx").expanduser()
        True
    """
    return Path(os.environ.get("KVX_CACHE") or "~/.cache/kvx").expanduser()


def build_folder(target: Path, fill: Callable[[Path], None]) -> Path:
    """Create ``target`` by filling a temporary folder beside it and renaming it: an interrupted build never counts.

    Args:
        target: the folder to create; left alone when it exists already.
        fill: writes the content into the folder it is given.

    Returns:
        ``target``.

    Raises:
        KvxError: the parent folder cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> from kvx.models.disk_cache import build_folder
        >>> home = pathlib.Path(tempfile.mkdtemp())
        >>> made = build_folder(home / "a", lambda folder: (folder / "x").write_text("1"))
        >>> [p.name for p in made.iterdir()], [p.name for p in home.iterdir()]
        (['x'], ['a'])
    """
    if target.is_dir():
        return target
    with scratch_folder(target.parent, target.name) as scratch:
        try:
            fill(scratch)
            scratch.chmod(0o755)
            scratch.rename(target)
        except OSError as error:
            if not target.is_dir():  # else another process finished first
                why = f"could not write {target} ({error.strerror}); free some space or set KVX_CACHE elsewhere."
                raise KvxError(why) from error
    return target


@contextlib.contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """A temporary folder inside ``parent``, gone afterwards; what killed runs left there over a day ago goes too.

    Args:
        parent: created when it is not there.
        name: a hint for people who look into ``parent`` meanwhile.

    Yields:
        The folder.

    Raises:
        KvxError: ``parent`` cannot be written.
    """
    prefix = f".{name}-"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for old in parent.glob(f"{prefix}*"):
            if time.time() - old.stat().st_mtime > 86400:
                shutil.rmtree(old, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        why = f"cannot write to {parent} ({error.strerror}); set KVX_CACHE to a folder that you may write to."
        raise KvxError(why) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def digest_file(path: str | Path) -> str:
    """SHA-256 of a file, remembered in the cache folder until the file changes.

    The memory is keyed by the file's identity and its change time, which no copy or edit can preserve, so another
    file under the same name is always read again.

    Args:
        path: the file.

    Returns:
        64 hexadecimal digits.

    Example:
        >>> import pathlib, tempfile
        >>> from kvx.models.disk_cache import digest_file
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "x"
        >>> _ = path.write_bytes(b"abc")
        >>> digest_file(path)[:8]
        'ba7816bf'
    """
    path = Path(path).resolve()
    facts = path.stat()
    key = [facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]
    memo = cache_dir() / "digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        known = json.loads(memo.read_text())
        if known["key"] == key:
            return str(known["sha256"])
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(BLOCK):
            digest.update(block)
    if facts.st_size >= BLOCK:
        with contextlib.suppress(OSError):
            memo.parent.mkdir(parents=True, exist_ok=True)
            scratch = memo.with_name(f"{memo.name}.{os.getpid()}")
            scratch.write_text(json.dumps({"key": key, "sha256": digest.hexdigest()}))
            scratch.replace(memo)
    return digest.hexdigest()


def digest_all(paths: Iterable[str | Path]) -> str:
    """One SHA-256 over the contents of several files, whatever they are called, in the order of their digests.

    Example:
        >>> import pathlib, tempfile
        >>> from kvx.models.disk_cache import digest_all
        >>> home = pathlib.Path(tempfile.mkdtemp())
        >>> for name in "ab":
        ...     _ = (home / name).write_text(name)
        >>> digest_all([home / "a", home / "b"]) == digest_all([home / "b", home / "a"])
        True
    """
    return hashlib.sha256("\n".join(sorted(digest_file(path) for path in paths)).encode()).hexdigest()
