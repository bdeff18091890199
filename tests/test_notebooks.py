"""Every notebook runs, as shipped and solved, and is stored as it was built."""

import re
import time

import pytest
from PIL import Image

from ddtree_numba.lab import notebooks
from ddtree_numba.lab.__main__ import main
from ddtree_numba.lab.exercise import find

PATHS = notebooks.paths()
COURSE = notebooks.FOLDER / "README.md"
SECONDS = 60
COMPILING_SECONDS = 180  # for a card: tensor-core kernels take half a minute each

each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def printed(result, what):
    """What cells whose source contains `what` printed."""
    return "".join(
        output.get("text", "")
        for cell in result.notebook.cells
        if cell.cell_type == "code" and what in cell.source
        for output in cell.outputs
    )


@pytest.fixture
def run(path, record_property):
    """Run the notebook; pytest's summary lists its cells among all, slowest first."""

    def run(notebook, limit=SECONDS):
        start = time.perf_counter()
        result = notebooks.run(notebook)
        assert time.perf_counter() - start < limit
        for cell, seconds in result.seconds:
            first = result.notebook.cells[cell].source.split("\n")[0]
            record_property("cell", (seconds, f"{path.stem}, cell {cell}: {first}"))
        return result

    return run


@each_notebook
def test_runs_as_shipped(path, run):
    result = run(notebooks.read(path))
    banner = printed(result, "lab.start()")
    assert "ddtree_numba on " in banner
    assert " cases pass. lab.hint(" in printed(result, "lab.check(")
    shown = list(notebooks.pictures(result.notebook))
    assert shown, "a notebook without a picture"


@each_notebook
def test_runs_with_the_solution_in(path, run):
    number = path.name[:2]
    result = run(notebooks.solved(notebooks.read(path), number))
    count = len(find(number).cases)
    assert f"All {count} cases pass." in printed(result, "lab.check(")


@pytest.mark.gpu
@each_notebook
def test_runs_on_the_gpu_and_says_so(path, run, monkeypatch):
    monkeypatch.setenv("DDTREE_EXECUTOR", "gpu")
    number = path.name[:2]
    solved = notebooks.solved(notebooks.read(path), number)
    result = run(solved, limit=COMPILING_SECONDS)
    assert "ddtree_numba on gpu" in printed(result, "lab.start()")
    assert "cases pass." in printed(result, "lab.check(")


@each_notebook
def test_is_stored_as_the_builder_writes_it(path):
    assert list(notebooks.faults(path)) == []


@each_notebook
def test_has_the_parts_that_every_notebook_has(path):
    cells = notebooks.read(path).cells
    number = path.name[:2]
    first, *_, last = cells
    assert first.source.startswith(f"# {number} · ")
    assert first.source.count("*") >= 8 and "**After this you can**" in first.source
    assert re.search(r"About \d+ minutes", first.source)
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert "lab.start()" in code[0]
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    for part in ("**Predict", "## Exercise", "## What this does not show"):
        assert part in text
    assert f"lab.check({int(number)}, {find(number).name})" in "\n".join(code)
    folded = next(source for source in code if "lab.hint(" in source)
    assert all(line.startswith("# lab.") for line in folded.split("\n"))
    assert "](README.md)" in last.source
    notebooks.solved(notebooks.read(path), number)  # one exercise


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("path", [*PATHS, COURSE], ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    if path.suffix == ".md":
        text = path.read_text(encoding="utf-8")
    else:
        cells = notebooks.read(path).cells
        text = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    for link in links(text):
        if not link.startswith(("http", "#")):
            assert (path.parent / link.partition("#")[0]).exists(), link


def test_neighbours_are_linked_and_the_course_lists_all_with_a_picture():
    last = {path: notebooks.read(path).cells[-1].source for path in PATHS}
    for left, right in zip(PATHS, PATHS[1:], strict=False):
        assert f"({right.name})" in last[left]
        assert f"({left.name})" in last[right]
    assert [path.name[:2] for path in PATHS] == [f"{n:02d}" for n in range(11)]
    course = COURSE.read_text(encoding="utf-8")
    for path in PATHS:
        assert f"({path.name})" in course
        assert re.search(rf"!\[[^\]]{{10,}}\]\(pictures/{path.name[:2]}\.png\)", course)


# -- the builder ----------------------------------------------------------------------


def cell(kind="code", source="1", **extra):
    more = {"outputs": [], "execution_count": 7} if kind == "code" else {}
    return {
        "cell_type": kind, "id": "x", "metadata": {}, "source": source, **more, **extra,
    }  # fmt: skip


def notebook(*cells):
    return notebooks.nbformat.from_dict(
        {"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    )


def stream(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def shown(**data):
    return {"output_type": "display_data", "metadata": {}, "data": data}


def stored(tmp_path, *cells):
    path = tmp_path / "00_x.ipynb"
    path.write_text(notebooks.as_text(notebook(*cells)), encoding="utf-8")
    return path


def test_the_normal_form_drops_what_differs_from_run_to_run(tmp_path):
    messy = notebook(
        cell("markdown", "a  \nb"),
        cell(
            source="1",
            metadata={"tags": ["exercise"], "collapsed": True, "execution": {"t": 1}},
            outputs=[stream("a"), stream("b"), stream("c", "stderr")],
        ),
    )
    clean = notebooks.normalise(messy)
    assert [c.id for c in clean.cells] == ["cell-00", "cell-01"]
    assert clean.cells[0].source == "a\nb"
    assert clean.cells[1].metadata == {"tags": ["exercise"]}
    assert clean.cells[1].execution_count is None
    assert [o.text for o in clean.cells[1].outputs] == ["ab", "c"]
    text = notebooks.as_text(messy)
    assert text == notebooks.as_text(notebooks.nbformat.reads(text, 4))
    assert list(notebooks.faults(stored(tmp_path, cell()))) == []


def test_a_change_by_hand_is_found(tmp_path):
    path = stored(tmp_path, cell())
    path.write_text(path.read_text().replace("cell-00", "cell-09"))
    assert ["normal form" in fault for fault in notebooks.faults(path)] == [True]


@pytest.mark.parametrize(
    "broken, says",
    [
        (cell(source="\n" * 12), "13 lines; at most 12"),
        (cell(outputs=[stream("x", "stderr")]), "an error or a warning"),
        (cell(outputs=[shown(**{"image/png": "aGk="})]), "without alt text"),
        (cell(outputs=[shown(**{"text/html": '<img src="x">'})]), "without alt text"),
        (cell(outputs=[stream("<f at 0x7f0011223344>")]), "0x7f0011223344"),
        (cell(outputs=[shown(**{"text/html": str(notebooks.FOLDER)})]), "a place"),
        (cell("markdown", "x" * notebooks.MOST_BYTES), "bytes; at most"),
    ],
    ids=["long", "stderr", "alt", "html-alt", "address", "path", "size"],
)
def test_a_fault_is_named(broken, says, tmp_path):
    (fault,) = notebooks.faults(stored(tmp_path, broken))
    assert says in fault


def test_a_cell_that_raises_stops_the_run():
    with pytest.raises(notebooks.CellExecutionError, match="ZeroDivisionError"):
        notebooks.run(notebook(cell(source="1 / 0")))


def test_an_unknown_number_is_refused():
    with pytest.raises(notebooks.NotebookError, match="no notebook 77"):
        notebooks.paths(["77"])
    with pytest.raises(notebooks.NotebookError, match="0 cells with the tag"):
        notebooks.solved(notebook(cell()), "02")


def test_an_installed_copy_without_notebooks_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path)
    with pytest.raises(notebooks.NotebookError, match="expected a checkout"):
        notebooks.paths()


def test_the_command_checks_builds_solved_and_writes_pictures(tmp_path, capsys):
    assert main(["check", "02"]) == 0
    assert capsys.readouterr().out == "in normal form\n"
    assert main(["pictures", "2", "--out", str(tmp_path / "pictures")]) == 0
    written = sorted((tmp_path / "pictures").iterdir())
    assert capsys.readouterr().out.split() == [str(path) for path in written]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert main(["check", "77"]) == 1
    assert "no notebook 77" in capsys.readouterr().err


def test_build_writes_outputs_and_a_cover(tmp_path):
    source = """
from ddtree_numba import viz
from ddtree_numba.tree import DraftTree
viz.show(viz.tree_figure(DraftTree.from_parents([-1, 0])))"""
    path = stored(tmp_path, cell(source=source, metadata={"tags": ["cover"]}))
    notebooks.build(path)
    assert list(notebooks.faults(path)) == []
    assert len(list(notebooks.pictures(notebooks.read(path)))) == 1
    with Image.open(tmp_path / "pictures" / "00.png") as cover:
        assert cover.width == notebooks.COVER_WIDTH
    before = path.read_bytes()
    notebooks.build(path)
    assert path.read_bytes() == before, "a second build changes nothing"
