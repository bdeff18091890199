"""The tree beside its mask: what is drawn is what the arrays say."""

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import ConnectionPatch, Rectangle

from ddtree_numba.tree import DraftTree
from ddtree_numba.viz import link_figure
from ddtree_numba.viz.style import ORANGE, SKY

WORKED = DraftTree.from_parents([[-1, 0, 1, 0, 3]])


def cells(ax, colour):
    """Row and column of the mask's cells of a colour."""
    return {
        (round(patch.get_y() + 0.5), round(patch.get_x() + 0.5))
        for patch in ax.patches
        if isinstance(patch, Rectangle)
        and patch.get_facecolor() == to_rgba(colour)
        and patch.get_width() == 1
    }


def test_the_cells_are_the_mask_and_the_followed_row_has_its_own_colour():
    figure, alt_text = link_figure(WORKED, 4, prefix_len=3)
    right = figure.axes[1]
    assert cells(right, ORANGE) == {(4, 0), (4, 3), (4, 4)}
    assert cells(right, ORANGE) | cells(right, SKY) == set(
        zip(*map(np.ndarray.tolist, np.nonzero(WORKED.mask(0, 0))), strict=True)
    )
    assert "rows 0, 3, 4" in alt_text and "prefix of 3 rows" in alt_text


def test_each_ancestor_is_carried_to_its_cell_on_the_diagonal():
    figure, _ = link_figure(WORKED, 4)
    ends = {a.xy2 for a in figure.artists if isinstance(a, ConnectionPatch)}
    assert ends == {(0, 0), (3, 3), (4, 4)}


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_that_is_not_there_is_an_error(row):
    with pytest.raises(ValueError, match="row is .*; expected 0 … 4"):
        link_figure(WORKED, row)


def test_a_tree_of_a_thousand_rows_fits_the_page():
    tree = DraftTree.from_parents([[-1, *(i // 3 for i in range(1024))]])
    figure, _ = link_figure(tree, 1000, prefix_len=7)
    assert max(figure.get_size_inches()) <= 10
    assert len(figure.axes[0].get_yticklabels()) < 30
