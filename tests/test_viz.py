"""Pictures show what the arrays hold, with a second cue beside colour, and say it."""

import io
import sys

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from numpy.testing import assert_array_equal

from ddtree_numba import reference, viz
from ddtree_numba.tree import DraftTree

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
    places = list(zip(host.depths[0], viz._levels(host.children(0)), strict=True))
    assert len(set(places)) == len(places)


def test_the_accepted_path_is_thick_and_solid_and_others_are_dashed(tree):
    figure, _ = viz.tree_figure(tree, accepted=[0, 3, -1])
    others, accepted = figure.axes[0].collections[:2]
    assert (len(accepted.get_paths()), len(others.get_paths())) == (1, 3)
    assert accepted.get_linewidth()[0] > 2 * others.get_linewidth()[0]
    assert accepted.get_linestyle()[0][1] is None  # solid
    assert others.get_linestyle()[0][1] is not None
    assert to_hex(accepted.get_color()[0]).upper() == viz.BLUE


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
    assert to_hex(pixels[3, 0] / 255).upper() == viz.ORANGE
    assert to_hex(pixels[4, 0] / 255).upper() == viz.SKY


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


def test_pictures_leave_no_pyplot_state(tree):
    png(viz.round_figure(tree)[0])
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
