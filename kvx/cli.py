"""The command line: parse, call one function, print. Exit codes: 0 ok, 1 failure, 2 usage, 3 verdict reprefill."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvx
from kvx.commands.common import FAILED, OK, USAGE, Common, Output, UsageError
from kvx.errors import KvxError

# Command -> (class of its settings in kvx.commands.<command>, what it does).
COMMANDS = {
    "doctor": ("Doctor", "check this machine: versions, devices, memory, disk, and what to do next"),
    "demo": ("Demo", "hand a real context from SmolLM2 to Gemma 3, with the table that proves it"),
    "fit": ("Fit", "fit a mapper for a pair of models on a text, and save it"),
    "train": ("Train", "train a translator from a saved mapper, on texts and questions"),
    "eval": ("Eval", "measure a saved mapper on held-out text and questions: all arms and the verdict"),
    "handoff": ("Handoff", "answer one question from a context that only the source has read"),
    "inspect": ("Inspect", "say what an artefact, a model folder or a GGUF file holds"),
    "bench": ("Bench", "time kvx against transformers and torch on this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvx`` and return its exit code; the console script passes it to ``sys.exit``."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        sys.stdout.write(overview())
        return OK if args else USAGE
    if args[0] == "--version":
        sys.stdout.write(f"kvx {kvx.__version__}\n")
        return OK
    try:
        return execute(args[0], parse(args[0], args[1:]))
    except UsageError as error:
        sys.stderr.write(f"kvx: {error}\n")
        return USAGE


def overview() -> str:
    """Help of ``kvx`` itself."""
    lines = [f"usage: kvx COMMAND [--help] [--config FILE.yaml] [--json] ...\n\n{kvx.__doc__.splitlines()[0]}\n\n"]  # type: ignore[union-attr]
    lines += [f"  {name:<9}{text}\n" for name, (_, text) in COMMANDS.items()]
    lines.append(
        "\nStart with `kvx demo`. Exit codes: 0 ok, 1 failure, 2 usage; `eval` and `handoff`: 3 when the verdict is "
        "reprefill.\nKVX_CACHE (default ~/.cache/kvx) holds downloads, converted models and finished fits.\n"
    )
    return "".join(lines)


def parse(command: str, args: Sequence[str]) -> Common:
    """Settings of a command: its defaults, then ``--config FILE.yaml``, then the flags.

    Raises:
        UsageError: unknown command, unreadable config file, or a key that the command does not have. Unknown or
            malformed flags leave through ``SystemExit(2)``, ``--help`` through ``SystemExit(0)``.
    """
    import tyro

    if command not in COMMANDS:
        raise UsageError(f"there is no command {command!r}; the commands are {', '.join(COMMANDS)}.")
    cls, description = COMMANDS[command]
    kind = getattr(importlib.import_module(f"kvx.commands.{command}"), cls)
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    path = finder.parse_known_args([a for a in args if a not in ("-h", "--help")])[0].config
    default = kind() if path is None else from_yaml(kind, path)
    return tyro.cli(  # type: ignore[no-any-return]
        kind,
        prog=f"kvx {command}",
        description=description[0].upper() + description[1:] + ".",
        args=list(args),
        default=default,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def from_yaml(kind: type[Common], path: Path) -> Common:
    """Settings from a YAML mapping of field names (dashes allowed) to values."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read the config file {path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds a {type(values).__name__}; a config file is a mapping of settings to values.")
    values = {str(key).replace("-", "_"): value for key, value in values.items()}
    fields = [field.name for field in dataclasses.fields(kind) if field.name != "config"]
    if unknown := sorted(set(values) - set(fields)):
        raise UsageError(f"{path} sets {', '.join(unknown)}, which is unknown here; known: {', '.join(fields)}.")
    return kind(config=path, **{key: _typed(kind, key, value, path) for key, value in values.items()})


def _typed(kind: type[Common], key: str, value: Any, path: Path) -> Any:
    """The YAML value as the field's own type, read by the same parser as the flag."""
    import typing

    import tyro

    hint = typing.get_type_hints(kind, include_extras=True)[key]
    if isinstance(value, bool) or value is None:
        words = [str(value)]
    else:
        words = [str(v) for v in value] if isinstance(value, list) else [str(value)]
    try:
        return tyro.cli(tyro.conf.Positional[hint], args=words, console_outputs=False)  # type: ignore[valid-type, misc]
    except SystemExit as error:
        raise UsageError(f"{path} sets {key} to {value!r}, which is not a {hint}.") from error


def execute(command: str, settings: Common) -> int:
    """Run a parsed command; failures become one sentence on stderr (and ``{"error": ...}`` with ``--json``)."""
    out = Output(settings.json)
    try:
        outcome = importlib.import_module(f"kvx.commands.{command}").run(settings, out)
        out.finish(outcome.figures)
        return int(outcome.code)
    except UsageError:
        raise
    except KeyboardInterrupt:
        return _fail(out, "interrupted.", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (KvxError, OSError, MemoryError) as error:
        return _fail(out, _sentence(error), FAILED)
    except Exception as error:
        if os.environ.get("KVX_DEBUG"):
            raise
        kind = type(error).__name__
        return _fail(out, f"{kind}: {_sentence(error)} This is a defect of kvx; KVX_DEBUG=1 shows where.", FAILED)


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _fail(out: Output, sentence: str, code: int) -> int:
    sys.stderr.write(f"kvx: {sentence}\n")
    if out.as_json:
        sys.stdout.write(json.dumps({"error": sentence}) + "\n")
    return code
