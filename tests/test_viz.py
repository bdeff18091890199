"""Pictures show what the arrays hold, with a second cue beside colour, and say it."""

import io
import sys

import numpy as np
import pandas as pd
import pytest
import test_emulator_bugs as bugs
from matplotlib.colors import to_hex
from numba import cuda, float32, uint16
from numpy.testing import assert_array_equal

from ddtree_numba import reference, viz
from ddtree_numba.emulator import emulate
from ddtree_numba.kernels.ptx import (
    cp_async_16,
    cp_async_commit_group,
    cp_async_wait_group,
)
from ddtree_numba.tree import DraftTree
from ddtree_numba.viz import access, style, traces, trees

PARENTS = [-1, 0, 1, 0, 3]
LOG_PROBS = np.log([1, 0.6, 0.48, 0.3, 0.24])
WORDS = ["The", "cat", "sat", "dog", "$4"]


def decode(ids):
    return "".join(WORDS[i] for i in ids)


@pytest.fixture
def tree():
    return DraftTree.from_parents(PARENTS, log_probs=LOG_PROBS)


def big_tree(n_draft_nodes):
    logits = np.random.default_rng(0).normal(size=(1, 15, 256)).astype(np.float32)
    return reference.tree_build(*reference.topk(3 * logits, 256), n_draft_nodes)


def png(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=40)
    return buffer.getvalue()


def test_every_node_carries_its_token(tree):
    figure, _ = viz.tree_figure(tree, decode=decode)
    assert {t.get_text() for t in figure.axes[0].texts} == {*WORDS[:4], r"\$4"}


def test_a_node_without_decoder_carries_its_id(tree):
    figure, _ = viz.tree_figure(tree)
    assert {t.get_text() for t in figure.axes[0].texts} == set("01234")


def test_a_first_child_stands_level_with_its_parent(tree):
    figure, _ = viz.tree_figure(tree)
    level = {t.get_text(): t.xy[1] for t in figure.axes[0].texts}
    assert level["0"] == level["1"] == level["2"]
    assert level["3"] == level["4"] > level["0"]


def test_lines_do_not_share_a_level_and_depth():
    host = big_tree(200)
    places = list(zip(host.depths[0], trees.levels(host.children(0)), strict=True))
    assert len(set(places)) == len(places)


def test_the_accepted_path_is_thick_and_solid_and_others_are_dashed(tree):
    figure, _ = viz.tree_figure(tree, accepted=[0, 3, -1])
    others, accepted = figure.axes[0].collections[:2]
    assert (len(accepted.get_paths()), len(others.get_paths())) == (1, 3)
    assert accepted.get_linewidth()[0] > 2 * others.get_linewidth()[0]
    assert accepted.get_linestyle()[0][1] is None  # solid
    assert others.get_linestyle()[0][1] is not None
    assert to_hex(accepted.get_color()[0]).upper() == style.BLUE


def test_accepted_nodes_are_squares(tree):
    figure, _ = viz.tree_figure(tree, accepted=[0, 3])
    circles, squares = figure.axes[0].collections[2:4]
    assert (len(circles.get_offsets()), len(squares.get_offsets())) == (3, 2)
    assert len(circles.get_paths()[0]) > len(squares.get_paths()[0]) == 5


def test_a_nodes_area_grows_with_its_probability(tree):
    figure, _ = viz.tree_figure(tree)
    sizes = figure.axes[0].collections[2].get_sizes()
    assert_array_equal(np.argsort(-sizes), [0, 1, 2, 3, 4])


def test_the_tree_tells_its_size_and_its_accepted_path(tree):
    _, alt_text = viz.tree_figure(tree, decode=decode, accepted=[0, 3])
    assert "4 draft nodes, 2 deep" in alt_text
    assert "add up to 1.62" in alt_text
    assert "rows 0, 3, tokens The dog" in alt_text


def test_a_request_of_a_batch_is_drawn_without_its_padding():
    parents = [[-1, 0, 1, 0], [-1, 0, -1, -1]]
    figure, alt_text = viz.tree_figure(
        DraftTree.from_parents(parents, n_rows=[4, 2]), b=1
    )
    assert len(figure.axes[0].texts) == 2
    assert "1 draft nodes" in alt_text


@pytest.mark.parametrize("n_draft_nodes", [0, 1, 12, 33, 64, 1024])
def test_any_size_renders(n_draft_nodes):
    host = big_tree(n_draft_nodes)
    figure, alt_text = viz.round_figure(host, prefix_len=300, accepted=[0])
    assert png(figure).startswith(b"\x89PNG")
    assert f"{n_draft_nodes} draft nodes" in alt_text


def test_a_large_tree_labels_the_accepted_path_only():
    host = big_tree(300)
    path = host.paths(0)[200]
    figure, _ = viz.tree_figure(host, accepted=path)
    assert len(figure.axes[0].texts) == len(path)


def test_the_masks_cells_are_the_trees_mask(tree):
    figure, _ = viz.mask_figure(tree, prefix_len=3)
    pixels = figure.axes[0].images[0].get_array()
    assert_array_equal((pixels != 255).any(axis=-1), tree.mask(0, 0))


def test_cells_of_accepted_rows_have_another_marker_too(tree):
    figure, _ = viz.mask_figure(tree, accepted=[0, 3])
    dots, squares = figure.axes[0].collections[:2]
    assert {int(row) for _, row in squares.get_offsets()} == {0, 3}
    assert {int(row) for _, row in dots.get_offsets()} == {1, 2, 4}


def test_cells_of_accepted_rows_are_orange(tree):
    figure, _ = viz.mask_figure(tree, accepted=[0, 3])
    pixels = figure.axes[0].images[0].get_array()
    assert to_hex(pixels[3, 0] / 255).upper() == style.ORANGE
    assert to_hex(pixels[4, 0] / 255).upper() == style.SKY


def test_the_prefix_is_one_band_that_says_its_length(tree):
    figure, alt_text = viz.mask_figure(tree, prefix_len=777)
    (text,) = figure.axes[0].texts
    assert "777" in text.get_text()
    assert figure.axes[0].patches[0].get_hatch()
    assert "prefix of 777 rows" in alt_text
    assert "11 of the 15 cells" in alt_text


def test_without_a_prefix_there_is_no_band(tree):
    figure, _ = viz.mask_figure(tree)
    assert not figure.axes[0].patches


SWEEP = pd.DataFrame(
    [
        ("tree", 1, 0.0, 1.9, 0.9, 0.95),
        ("tree", 64, 0.0, 9.3, 8.3, 8.6),
        ("chain", 15, 0.0, 7.25, 6.25, 6.2),
        ("tree", 1, 0.7, 1.8, 0.8, 0.95),
        ("tree", 64, 0.7, 5.8, 4.8, 6.2),
        ("chain", 15, 0.7, 4.5, 3.5, 5.0),
    ],
    columns=[
        "mode",
        "n_draft_nodes",
        "temperature",
        "tokens_per_round",
        "accepted",
        "expected_accepted",
    ],
)


def test_the_sweep_draws_the_chain_as_a_dashed_reference():
    figure, alt_text = viz.sweep_figure(SWEEP)
    left, right = figure.axes
    lines = {line.get_label(): line for line in left.lines}
    assert_array_equal(lines["tree, T = 0"].get_ydata(), [1.9, 9.3])
    assert_array_equal(lines["chain of 15, T = 0.7"].get_ydata(), 4.5)
    assert lines["chain of 15, T = 0"].get_linestyle() == "--"
    markers = {line.get_marker() for line in right.lines}
    assert len(markers) == 2, "each temperature has its own marker"
    assert "9.30 with 64; the chain commits 7.25" in alt_text


# -- what lanes do --------------------------------------------------------------------


@cuda.jit
def add_neighbours_kernel(x, out):
    box = cuda.shared.array(8, float32)
    i = cuda.threadIdx.x
    box[i] = x[cuda.blockIdx.x, i]
    cuda.syncthreads()
    if i < 7:
        cuda.atomic.add(out, cuda.blockIdx.x, box[i] + box[i + 1])


def neighbours():
    x, out = np.zeros((2, 8), np.float32), np.zeros(2, np.float32)
    return emulate(add_neighbours_kernel, 2, 8, x, out, trace=True)


def missing_barrier():
    kernel = bugs.missing_barrier_in_a_loop_kernel
    x, out = np.ones((3, 32), np.float32), np.zeros(32, np.float32)
    return emulate(kernel, 1, 32, x, out, trace=True)


def drawn(ax):
    """The offsets of every scattered kind of mark, by its label."""
    return {c.get_label(): c.get_offsets() for c in ax.collections}


def test_lanes_are_drawn_with_a_column_an_access_and_a_dashed_line_a_barrier():
    figure, alt_text = viz.lanes_figure(neighbours())
    (ax,) = figure.axes
    marks = drawn(ax)
    assert_array_equal(marks["read"][:8], [[1, lane] for lane in range(8)])
    assert_array_equal(marks["write"], [[2, lane] for lane in range(8)])
    assert_array_equal(marks["atomic"], [[6, lane] for lane in range(7)])
    assert len(marks["read"]) == 8 + 7 + 7
    assert [t.get_text() for t in ax.texts] == ["x", "box", "box", "box", "out"]
    assert [line.get_xdata()[0] for line in ax.lines] == [3]
    line = add_neighbours_kernel.py_func.__code__.co_firstlineno + 5
    assert f"barriers, line {line}" in ax.get_xlabel()
    assert "8 lanes" in alt_text and "2 phases" in alt_text
    assert "22 reads, 8 writes, 7 atomics; none of them race" in alt_text


def test_kinds_of_access_differ_in_their_marker_and_not_in_colour_alone():
    markers = [style["marker"] for style in traces.KIND_STYLES.values()]
    assert len(set(markers)) == 3


def test_lanes_that_skip_an_access_leave_a_gap():
    @cuda.jit
    def kernel(x, out):
        i = cuda.threadIdx.x
        value = x[i] if i % 2 else 0
        out[i] = value

    report = emulate(kernel, 1, 4, np.zeros(4), np.zeros(4), trace=True)
    marks = drawn(viz.lanes_figure(report)[0].axes[0])
    assert_array_equal(marks["read"], [[1, 1], [1, 3]])
    assert_array_equal(marks["write"], [[2, 0], [2, 1], [2, 2], [2, 3]])


def test_another_block_can_be_drawn():
    figure, alt_text = viz.lanes_figure(neighbours(), block=(1, 0, 0))
    assert "block (1, 0, 0)" in alt_text
    assert len(drawn(figure.axes[0])["write"]) == 8


def test_racing_accesses_are_ringed():
    figure, alt_text = viz.lanes_figure(missing_barrier())
    marks = drawn(figure.axes[0])
    # In phases 1 and 2 all lanes read all 32 elements while others write them.
    assert len(marks["race"]) == 2 * (32 * 32 + 32)
    assert "2112 of them race" in alt_text
    assert "race" not in drawn(viz.lanes_figure(neighbours())[0].axes[0])


def test_many_accesses_are_counted():
    @cuda.jit
    def kernel(x):
        i = cuda.threadIdx.x
        for j in range(40):
            x[i] = x[i] + j
            x[i] = x[i] + j
            if j % 10 == 9:
                cuda.syncthreads()

    figure, alt_text = viz.lanes_figure(emulate(kernel, 1, 3, np.zeros(3), trace=True))
    reads, writes = (ax.images[0].get_array() for ax in figure.axes[:2])
    assert_array_equal(reads, [[20, 20, 20, 20]] * 3)
    assert_array_equal(writes, reads)
    assert "240 reads, 240 writes" in alt_text


def test_the_map_of_one_dimension_has_a_row_a_phase_and_names_lanes():
    figure, alt_text = viz.access_figure(neighbours(), "box")
    reads, writes = figure.axes[:2]
    assert (reads.get_title(), writes.get_title()) == ("reads", "writes")
    first = reads.images[0].get_array()
    assert first.mask[0].all()  # nothing is read in phase 0
    assert_array_equal(first[1], [0, 0, 1, 2, 3, 4, 5, 6])
    assert [t.get_text() for t in reads.texts] == ["0", *["2×"] * 6, "6"]
    assert_array_equal(writes.images[0].get_array()[0], range(8))
    assert "14 reads and 8 writes of 8 elements in 2 phases; no elements" in alt_text


def test_the_map_of_two_dimensions_has_a_panel_a_phase():
    @cuda.jit
    def kernel(x):
        i = cuda.threadIdx.x
        x[1, i + 2] = 0
        cuda.syncthreads()
        x[i + 1, 3] += 1

    figure, alt_text = viz.access_figure(
        emulate(kernel, 1, 3, np.zeros((5, 9)), trace=True), "x"
    )
    titles = [ax.get_title() for ax in figure.axes[:4]]
    assert titles[0] == "phase 0: no reads"
    assert titles[1:] == ["phase 0: writes", "phase 1: reads", "phase 1: writes"]
    ax = figure.axes[3]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["2", "3", "4"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["1", "2", "3"]
    assert_array_equal(ax.images[0].get_array()[:, 1], [0, 1, 2])
    assert "3 reads and 6 writes of 5 elements" in alt_text


def test_raced_elements_are_ringed_once_each():
    figure, alt_text = viz.access_figure(missing_barrier(), "box")
    reads, writes = (drawn(ax)["race"] for ax in figure.axes[:2])
    expected = {(column, row) for column in range(32) for row in (1, 2)}
    assert {tuple(at) for at in reads} == {tuple(at) for at in writes} == expected
    assert len(reads) == 64
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["race"]
    assert "32 elements are raced for" in alt_text


def test_a_map_without_races_has_no_legend_for_them():
    figure, _ = viz.access_figure(neighbours(), "box")
    assert figure.legends == []


@cuda.jit
def copy_rows_kernel(x):
    # x [lanes, 8] u16
    tile = cuda.shared.array((4, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    cp_async_16(tile, (i, 0), x, (i, 0))
    cp_async_commit_group()
    cp_async_wait_group(0)


def test_a_wide_access_covers_all_its_elements():
    report = emulate(copy_rows_kernel, 1, 4, np.zeros((4, 8), np.uint16), trace=True)
    assert set(report.accesses["elements"]) == {8}
    figure, alt_text = viz.access_figure(report, "x")
    lanes = figure.axes[0].images[0].get_array()
    assert_array_equal(lanes, np.repeat(np.arange(4)[:, None], 8, axis=1))
    assert "4 reads and 0 writes of 32 elements" in alt_text


def test_races_between_blocks_are_ringed():
    kernel = bugs.block_to_block_kernel
    report = emulate(kernel, 3, 4, np.zeros((3, 4)), trace=True)
    figure, _ = viz.access_figure(report, "x", block=(1, 0, 0))
    assert sum(len(drawn(ax)["race"]) for ax in figure.axes[:-1]) > 0


def test_a_map_that_is_cut_says_so():
    @cuda.jit
    def kernel(x):
        for j in range(3):
            x[j, cuda.threadIdx.x] = 0

    report = emulate(kernel, 1, 96, np.zeros((3, 96)), trace=True)
    figure, alt_text = viz.access_figure(report, "x")
    assert figure.axes[0].images[0].get_array().shape == (3, access.MOST_COLUMNS)
    assert "96 accesses of an element lie outside" in alt_text
    assert "a part" in figure.get_suptitle()


def test_an_array_without_access_is_refused():
    report = neighbours()
    with pytest.raises(ValueError, match="'y'; expected one .*: box, out, x"):
        viz.access_figure(report, "y")
    with pytest.raises(ValueError, match=r"block is \(7, 0, 0\)"):
        viz.access_figure(report, "x", block=(7, 0, 0))


@cuda.jit
def column_kernel(x, out):
    box = cuda.shared.array((32, 32), float32)
    i = cuda.threadIdx.x
    box[i, 0] = x[i, 0]
    cuda.syncwarp()
    out[i] = box[i, 0]


def test_costs_stand_beside_their_source_lines():
    x, out = np.zeros((32, 32), np.float32), np.zeros(32, np.float32)
    report = emulate(column_kernel, 1, 32, x, out, trace=True)
    figure, alt_text = viz.memory_figure(report, column_kernel)
    text, sectors, passes = figure.axes
    shown = [t.get_text() for t in text.texts]
    first = column_kernel.py_func.__code__.co_firstlineno
    assert shown[0] == f"{first:4d}  @cuda.jit"
    assert shown[4] == f"{first + 4:4d}      box[i, 0] = x[i, 0]"
    y = text.texts[4].get_position()[1]
    assert [t.get_text() for t in sectors.texts] == [
        "1 × read x: 32 (4 would do)", "1 × write out: 4",
    ]  # fmt: skip
    assert sectors.texts[0].xy == (32, y)
    assert passes.texts[0].get_text() == "1 × write box: 32 (1 would do)"
    assert passes.texts[0].xy == (32, y)
    hatched = [p for p in sectors.patches if p.get_hatch() and p.get_width()]
    assert [(p.get_x(), p.get_width()) for p in hatched] == [(4, 28)]
    assert f"line {first + 4}, read of x: 32 sectors a request, 4 would do" in alt_text
    assert "32 passes a request, 1 would do" in alt_text


@cuda.jit(device=True)
def first_of(x):
    return x[0]


@cuda.jit
def calling_kernel(x, out):
    out[0] = first_of(x)


def test_a_device_function_has_a_picture_of_its_own():
    report = emulate(calling_kernel, 1, 1, np.zeros(1), np.zeros(1), trace=True)
    figure, alt_text = viz.memory_figure(report, calling_kernel)
    assert len(figure.axes) == 2, "no shared memory, no axes for it"
    assert [t.get_text() for t in figure.axes[1].texts] == ["1 × write out: 1"]
    assert "1 requests come from other functions" in alt_text
    assert "1 more in other functions" in figure.get_suptitle()
    assert "No sectors could be saved" in alt_text
    figure, _ = viz.memory_figure(report, first_of)
    assert [t.get_text() for t in figure.axes[1].texts] == ["1 × read x: 1"]


@pytest.mark.parametrize("draw", ["lanes", "access", "memory"])
def test_pictures_of_lanes_render(draw):
    report = missing_barrier()
    figure, _ = {
        "lanes": lambda: viz.lanes_figure(report),
        "access": lambda: viz.access_figure(report, "box"),
        "memory": lambda: viz.memory_figure(
            report, bugs.missing_barrier_in_a_loop_kernel
        ),
    }[draw]()
    assert png(figure).startswith(b"\x89PNG")


def test_pictures_leave_no_pyplot_state(tree):
    png(viz.round_figure(tree)[0])
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
