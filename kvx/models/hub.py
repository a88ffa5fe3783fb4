"""Models on the Hugging Face hub, through huggingface_hub."""

from __future__ import annotations

import re
from pathlib import Path

from kvx.errors import KvxError
from kvx.models.gguf import convert_gguf
from kvx.models.progress import Hook

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+(/[\w./-]+\.gguf)?$")
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
HUB_UNUSED = ("*/*", "consolidated*")  # other formats in subfolders, a second copy of the weights


def is_hub_id(name: str) -> bool:
    """Whether a name looks like ``owner/repo`` or ``owner/repo/file.gguf``.

    Example:
        >>> from kvx.models.hub import is_hub_id
        >>> is_hub_id("google/gemma-3-270m"), is_hub_id("./folder"), is_hub_id("gemma")
        (True, False, False)
    """
    return HUB_ID.match(name) is not None


def download(name: str, *, revision: str | None = None, progress: Hook | bool | None = None) -> Path:
    """Fetch a hub repository (weights as safetensors, configuration, tokenizer), or one GGUF file and convert it.

    Args:
        name: ``owner/repo`` or ``owner/repo/file.gguf``.
        revision: branch, tag or commit.
        progress: see :func:`kvx.models.progress.reporting`; huggingface_hub shows its own bars for downloads.

    Returns:
        The local folder, in huggingface_hub's own cache (or kvx's, converted).

    Raises:
        KvxError: not there, gated, offline, or a repository without ``config.json``.
    """
    from huggingface_hub import hf_hub_download

    owner, repo, *file = name.split("/", 2)
    try:
        if file:
            return convert_gguf(hf_hub_download(f"{owner}/{repo}", file[0], revision=revision), progress=progress)
        folder = Path(_snapshot(name, revision))
    except KvxError:
        raise
    except Exception as error:  # huggingface_hub and its transports raise a dozen unrelated types
        raise KvxError(_hub_failure(name, error)) from error
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise KvxError(
            f"{name} holds no config.json; if it is a GGUF repository, name the file too: {name}/<file>.gguf."
        )
    return folder


def _snapshot(name: str, revision: str | None) -> str:
    from huggingface_hub import snapshot_download

    allow, ignore = list(HUB_FILES), list(HUB_UNUSED)
    return snapshot_download(name, revision=revision, allow_patterns=allow, ignore_patterns=ignore)


def _hub_failure(name: str, error: Exception) -> str:
    kind = type(error).__name__
    if kind in ("RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError", "RemoteEntryNotFoundError"):
        return (
            f"{name} does not exist on the hub (or is private: set HF_TOKEN); check the name, "
            "or pass a local folder or .gguf file."
        )
    if kind == "GatedRepoError":
        return f"{name} is gated: accept its licence on the hub and set HF_TOKEN, or pass a local copy."
    return (
        f"could not fetch {name} from the hub ({kind}): no network, or the hub is unreachable; "
        "pass a local Hugging Face folder or a .gguf file instead."
    )
