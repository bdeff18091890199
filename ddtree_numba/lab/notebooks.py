"""Run the course's notebooks in a clean kernel, and write them in one normal form.

A notebook is its own source: text, code and tags are written in Jupyter (or by any
other tool); the builder adds the outputs and takes away whatever differs from run to
run, so that a diff shows what an author changed.
"""

from __future__ import annotations

import base64
import io
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError as CellExecutionError
from PIL import Image

from ddtree_numba.lab.exercise import find

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"

MOST_BYTES = 400 * 1024
"""Size of a notebook with its outputs: repository pages show no large ones."""

MOST_LINES = 12
"""Lines of a cell of code: longer ones belong in the package."""

CELL_SECONDS = 120
COVER_WIDTH = 420

EXERCISE, COVER = "exercise", "cover"
"""Tags: the cell that the learner fills in; the cell whose picture is the gallery's."""

METADATA = {
    "kernelspec": {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    },
    "language_info": {"name": "python"},
}

# What differs from machine to machine: paths, addresses, a kernel's temporary files.
_PLACES = re.compile(
    "|".join(
        [
            re.escape(str(FOLDER.parent)),
            re.escape(str(Path.home())) + r"(?=[/\\])",
            r"site-packages",
            r"ipykernel_\d+",
            r"\b0x[0-9a-f]{8,}",
        ]
    )
)

_NO_ALT = re.compile(r"<img(?![^>]*\balt=)")


class NotebookError(Exception):
    """A notebook that cannot be built; the message names it and says why."""


@dataclass
class Run:
    """A notebook that ran.

    Attributes
    ----------
    notebook : nbformat.NotebookNode
        With outputs.
    seconds : list of (int, float)
        Cell and wall time, in the notebook's order, of the cells of code.
    """

    notebook: Any
    seconds: list[tuple[int, float]] = field(default_factory=list)


# --------------------------------------------------------------------------- finding


def paths(which: Sequence[str] = ()) -> list[Path]:
    """The notebooks, or those with one of these numbers, in order.

    Raises
    ------
    NotebookError
        For a number without a notebook, or if there are none: an installed copy of
        the package has none.
    """
    found = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
    if not found:
        raise NotebookError(f"no notebooks in {FOLDER}; expected a checkout's folder")
    if not which:
        return found
    wanted = [str(n).zfill(2) for n in which]
    if missing := set(wanted) - {path.name[:2] for path in found}:
        raise NotebookError(f"no notebook {', '.join(sorted(missing))} in {FOLDER}")
    return [path for path in found if path.name[:2] in wanted]


def read(path: Path) -> Any:
    """A notebook as it is stored."""
    return nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)


# ------------------------------------------------------------------------- normal form


def normalise(notebook: Any) -> Any:
    """The notebook in the form that is stored.

    Cells are numbered, tags are all that is kept of their metadata, neither runs nor
    kernels leave numbers, and neighbouring pieces of printed text are one.
    """
    cells = []
    for i, cell in enumerate(notebook.cells):
        metadata = {"tags": sorted(cell.metadata.tags)} if _tags(cell) else {}
        kept: dict[str, Any] = {
            "id": f"cell-{i:02d}",
            "cell_type": cell.cell_type,
            "metadata": metadata,
            "source": "\n".join(line.rstrip() for line in cell.source.split("\n")),
        }
        if cell.cell_type == "code":
            kept |= {"execution_count": None, "outputs": _outputs(cell.outputs)}
        cells.append(kept)
    return nbformat.from_dict(
        {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    )


def _tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", ()))


def _outputs(outputs: Sequence[Any]) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for output in outputs:
        clean = {k: v for k, v in output.items() if k != "transient"}
        if "execution_count" in clean:
            clean["execution_count"] = None
        before = kept[-1] if kept else {}
        if "name" in clean and before.get("name") == clean["name"]:
            before["text"] += clean["text"]
        else:
            kept.append(clean)
    return kept


def as_text(notebook: Any) -> str:
    """The normalised notebook as the text of its file."""
    return nbformat.writes(normalise(notebook), version=4).rstrip("\n") + "\n"


def faults(path: Path) -> Iterator[str]:
    """What keeps a stored notebook from being what the builder writes."""
    text = path.read_text(encoding="utf-8")
    notebook = read(path)
    name = path.name
    if as_text(notebook) != text:
        yield f"{name} is not in normal form: python -m ddtree_numba.lab build"
    if len(text.encode()) > MOST_BYTES:
        yield f"{name} has {len(text.encode())} bytes; at most {MOST_BYTES}"
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            yield from (f"{name}, cell {i}: {fault}" for fault in _cell_faults(cell))


def _cell_faults(cell: Any) -> Iterator[str]:
    if (n := len(cell.source.split("\n"))) > MOST_LINES:
        yield f"{n} lines; at most {MOST_LINES}"
    for output in cell.outputs:
        if output.output_type == "error" or output.get("name") == "stderr":
            yield f"its output holds an error or a warning: {str(output)[:200]}"
        for mime, data in output.get("data", {"": output.get("text", "")}).items():
            if mime == "image/png":
                if not output.metadata.get(mime, {}).get("alt"):
                    yield "a picture without alt text; viz.show gives it one"
            elif _NO_ALT.search(str(data)):
                yield "a picture without alt text"
            elif match := _PLACES.search(str(data)):
                yield f"its output names a place of this machine: {match.group()}"


# ----------------------------------------------------------------------------- running


def solved(notebook: Any, number: str) -> Any:
    """A copy with the solution in the place of the exercise's stub."""
    copy = nbformat.from_dict(notebook)
    stubs = [cell for cell in copy.cells if EXERCISE in _tags(cell)]
    if len(stubs) != 1:
        raise NotebookError(
            f"notebook {number} has {len(stubs)} cells with the tag {EXERCISE!r}; "
            "expected one"
        )
    stubs[0].source = find(number).source()
    return copy


def run(notebook: Any) -> Run:
    """Run all cells in a new kernel, with the notebooks' folder as its own.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        If a cell raises.
    """
    result = Run(nbformat.from_dict(notebook))
    began: dict[int, float] = {}

    def start(cell: Any, cell_index: int, **_: Any) -> None:
        began[cell_index] = time.perf_counter()

    def end(cell: Any, cell_index: int, **_: Any) -> None:
        elapsed = time.perf_counter() - began[cell_index]
        result.seconds.append((cell_index, elapsed))

    client = NotebookClient(
        result.notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        on_cell_execute=start,
        on_cell_executed=end,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    with tempfile.TemporaryDirectory() as clean:
        client.execute(env=_environment(clean))
    return result


def _environment(folder: str) -> dict[str, str]:
    """This process's environment, without the user's own IPython and its history."""
    here = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    return {
        "OPENBLAS_NUM_THREADS": "1",  # as the command does
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, here)),
        "IPYTHONDIR": folder,
    }


# ---------------------------------------------------------------------------- building


def build(path: Path) -> Run:
    """Run a notebook and write it with its outputs, and the gallery's picture."""
    result = run(normalise(read(path)))
    text = as_text(result.notebook)
    temporary = path.with_suffix(".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    for _, picture, cell in pictures(result.notebook):
        if COVER in _tags(cell):
            _write_cover(picture, path.parent / "pictures" / f"{path.name[:2]}.png")
    return result


def pictures(notebook: Any) -> Iterator[tuple[str, bytes, Any]]:
    """PNGs among the outputs: a name, the bytes, and the cell."""
    for i, cell in enumerate(notebook.cells):
        for j, output in enumerate(cell.get("outputs", ())):
            if data := output.get("data", {}).get("image/png"):
                yield f"cell-{i:02d}-{j}.png", base64.b64decode(data), cell


def _write_cover(picture: bytes, path: Path) -> None:
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    height = round(image.height * COVER_WIDTH / image.width)
    small = image.resize((COVER_WIDTH, height), Image.Resampling.LANCZOS)
    path.parent.mkdir(exist_ok=True)
    # Small areas of a colour keep it: it means something.
    few = small.quantize(96, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
