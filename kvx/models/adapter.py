"""LoRA adapters (PEFT layout): merged into the weights as they are read, so no second model is ever in memory."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kvx.errors import KvxError
from kvx.models.safetensors_folder import SafetensorsFolder

WEIGHTS = "adapter_model.safetensors"
_PREFIX = re.compile(r"^(?:base_model\.model\.)?(?:(?:model|transformer|language_model)\.)*")
_PART = re.compile(r"^(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight$")
# Options that change what the adapter computes and that kvx does not merge.
_REFUSED = (
    "use_dora",
    "use_qalora",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "lora_bias",
    "alora_invocation_tokens",
)
_OWN_BASE = "pass the base model that the adapter was made for."


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A LoRA adapter.

    For a module with weight W ``[out,in]`` the merged weight is ``W + scale * B A`` with A ``[r,in]``, B ``[out,r]``,
    scale = alpha / r (or alpha / sqrt(r), rank-stabilised).

    Attributes:
        files: what its digest covers.
        pairs: module name (without wrappers) -> (A's name, B's name).
        reader: reads A and B.
        settings: ``adapter_config.json``.
    """

    files: list[Path]
    pairs: dict[str, tuple[str, str]]
    reader: SafetensorsFolder
    settings: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> Adapter:
        """Read an adapter's configuration and the names of its tensors.

        Args:
            folder: holds ``adapter_config.json`` and ``adapter_model.safetensors``.

        Raises:
            KvxError: not there, not LoRA, an option that kvx does not merge, or tensors it does not understand.

        Reference: Hu et al., arXiv 2106.09685; Kalajdzievski, arXiv 2312.03732 (rank-stabilised scale).
        """
        folder = Path(folder).expanduser()
        config, weights = folder / "adapter_config.json", folder / WEIGHTS
        if not config.is_file() or not weights.is_file():
            raise KvxError(f"{folder} is not an adapter; expected adapter_config.json and {WEIGHTS} in it.")
        settings = json.loads(config.read_text(encoding="utf-8"))
        odd = [name for name in _REFUSED if settings.get(name)]
        if settings.get("peft_type") != "LORA" or odd or settings.get("bias", "none") != "none":
            what = ", ".join(odd) or f"peft_type {settings.get('peft_type')!r}, bias {settings.get('bias')!r}"
            raise KvxError(f"the adapter in {folder} uses {what}; kvx merges plain LoRA; merge it with PEFT first.")
        reader = SafetensorsFolder.of([weights])
        return cls([config, weights], _pairs(folder, reader.slots), reader, settings)

    def merge_into(self, read: Callable[[str], np.ndarray], names: Iterable[str]) -> Callable[[str], np.ndarray]:
        """A reader that adds the adapter to the tensors it changes.

        Args:
            read: reads a base tensor by name.
            names: all base tensors.

        Returns:
            ``read`` with the adapter merged in (sums in float32).

        Raises:
            KvxError: the adapter changes modules that the base model does not have.
        """
        targets = {_PREFIX.sub("", name): name for name in names}
        lost = sorted(module for module in self.pairs if f"{module}.weight" not in targets)
        if lost:
            raise KvxError(f"the adapter changes modules that this model does not have: {', '.join(lost)}; {_OWN_BASE}")
        changed = {targets[f"{module}.weight"]: module for module in self.pairs}

        def merged(name: str) -> np.ndarray:
            base = read(name)
            if name not in changed:
                return base
            delta = self._delta(changed[name])
            if delta.shape != base.shape:
                raise KvxError(f"the adapter changes {name} by {delta.shape}, but it is {base.shape}; {_OWN_BASE}")
            return base.astype(np.float32) + delta

        return merged

    def _delta(self, module: str) -> np.ndarray:
        a, b = (self.reader.read(name).astype(np.float32) for name in self.pairs[module])
        rank = a.shape[0]
        alpha = self._pattern("alpha_pattern", module, self.settings.get("lora_alpha", rank))
        scale = alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)
        delta = np.float32(scale) * (b @ a)
        return delta.T if self.settings.get("fan_in_fan_out") else delta

    def _pattern(self, name: str, module: str, default: Any) -> float:
        """Per-module overrides: PEFT takes the first pattern that matches the end of the module's name."""
        for pattern, value in (self.settings.get(name) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return float(value)
        return float(default)


def _pairs(folder: Path, names: Iterable[str]) -> dict[str, tuple[str, str]]:
    sides: dict[str, dict[str, str]] = {}
    odd = []
    for name in names:
        if found := _PART.match(_PREFIX.sub("", name)):
            sides.setdefault(found["module"], {})[found["side"]] = name
        else:
            odd.append(name)
    odd += [next(iter(pair.values())) for pair in sides.values() if len(pair) != 2]
    if odd or not sides:
        what = ", ".join(sorted(odd)) or "nothing"
        raise KvxError(f"{folder / WEIGHTS} holds {what} where LoRA pairs were expected; merge it with PEFT first.")
    return {module: (pair["A"], pair["B"]) for module, pair in sides.items()}
