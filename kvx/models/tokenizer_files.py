"""Tokenizer files of a Hugging Face model folder: read and write, without transformers where tokenizer.json exists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from kvx.errors import KvxError
from kvx.models.tokenizer import Tokenizer


def read_folder(folder: Path) -> Tokenizer:
    """Tokenizer of a model folder.

    Reads ``tokenizer.json`` (else, through transformers, whatever older files there are), ``tokenizer_config.json``,
    ``special_tokens_map.json``, ``generation_config.json`` and ``config.json`` (BOS and EOS ids) and
    ``chat_template.jinja``. An explicit ``add_bos_token`` decides whether BOS is added, else ``tokenizer.json`` does.

    Args:
        folder: local folder.

    Raises:
        KvxError: no such folder, no tokenizer files, or files that contradict each other.
    """
    if not folder.is_dir():
        raise KvxError(f"{folder} is not a folder; expected a model folder with tokenizer.json in it.")
    config = _json(folder / "tokenizer_config.json")
    names = {**_named(_json(folder / "special_tokens_map.json")), **_named(config)}
    backend = _backend(folder)
    _add_declared(backend, config.get("added_tokens_decoder", {}))
    generation, model = _json(folder / "generation_config.json"), _json(folder / "config.json")
    bos = _known(backend, [names.get("bos_token"), generation.get("bos_token_id"), model.get("bos_token_id")])
    eos = _known(backend, [names.get("eos_token"), generation.get("eos_token_id")])
    declared = config.get("add_bos_token")
    return Tokenizer.from_tokenizers(
        backend,
        bos=bos[0] if "bos_token" in names and bos else _template_or(backend, bos),
        eos=eos or _known(backend, [model.get("eos_token_id")]),
        adds_bos=declared and bool(bos) if isinstance(declared, bool) else None,
        chat_template=_chat_template(folder, config),
        specials=names,
        copy=False,
    )


def write_folder(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json``, ``generation_config.json`` and ``chat_template.jinja``.

    A ``generation_config.json`` that is already there keeps its other entries.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend.save(str(folder / "tokenizer.json"), pretty=False)
    config = {**tokenizer.specials, "add_bos_token": tokenizer.adds_bos, "tokenizer_class": "PreTrainedTokenizerFast"}
    generation = _json(folder / "generation_config.json")
    generation |= {} if tokenizer.bos_id is None else {"bos_token_id": tokenizer.bos_id}
    generation |= {"eos_token_id": list(tokenizer.eos_ids)} if tokenizer.eos_ids else {}
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def _json(path: Path) -> dict[str, Any]:
    """Content of a JSON file; empty when there is none."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise KvxError(f"{path} is not valid JSON ({error}); fetch the file again.") from None
    return content if isinstance(content, dict) else {}


def _named(config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by name: plain strings, or ``{"content": ...}`` records."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _backend(folder: Path) -> tokenizers.Tokenizer:
    """The ``tokenizers.Tokenizer`` of the folder."""
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise KvxError(f"{path} cannot be read by tokenizers {tokenizers.__version__}: {error}.") from None
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise KvxError(
            f"{folder} has no tokenizer.json, and older tokenizer files need transformers; install it, or add the file."
        ) from None
    try:
        backend = getattr(AutoTokenizer.from_pretrained(str(folder)), "backend_tokenizer", None)
    except Exception as error:  # transformers raises many types here
        reason = str(error).splitlines()[0]
        raise KvxError(
            f"{folder} has no tokenizer.json and transformers cannot read a tokenizer in it: {reason}"
        ) from None
    if backend is None:
        raise KvxError(f"{folder} has a tokenizer written in Python only; convert it to tokenizer.json first.")
    return backend


def _add_declared(backend: tokenizers.Tokenizer, declared: dict[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json declares, and check their ids."""
    for key, record in sorted(declared.items(), key=lambda item: int(item[0])):
        content = record["content"]
        if backend.token_to_id(content) is None:
            options = {k: bool(record.get(k, False)) for k in ("single_word", "lstrip", "rstrip", "special")}
            normalized = bool(record.get("normalized", not options["special"]))
            backend.add_tokens([tokenizers.AddedToken(content, normalized=normalized, **options)])
        if backend.token_to_id(content) != int(key):
            raise KvxError(
                f"tokenizer_config.json gives {content!r} the id {key} but tokenizer.json makes it "
                f"{backend.token_to_id(content)}; the files belong to different models: fetch them again."
            )


def _known(backend: tokenizers.Tokenizer, candidates: list[Any]) -> list[int]:
    """Ids, in order and once each, of the candidates (texts, ids or lists) that the vocabulary holds."""
    flat = [c for item in candidates for c in (item if isinstance(item, list) else [item]) if c is not None]
    ids = [backend.token_to_id(c) if isinstance(c, str) else int(c) for c in flat]
    return list(dict.fromkeys(i for i in ids if i is not None and backend.id_to_token(i) is not None))


def _template_or(backend: tokenizers.Tokenizer, bos: list[int]) -> int | None:
    """With no named BOS: ``None`` where the post-processor says it, else the id that the model's config gives."""
    adds = backend.num_special_tokens_to_add(False) > 0
    return None if adds or not bos else bos[0]


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Chat template: the file wins over tokenizer_config.json; of several named ones, ``default``."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        template = {t["name"]: t["template"] for t in template}.get("default")
    return template
