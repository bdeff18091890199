"""Pictures of the accept walk: what they draw, read back from the figure."""

import numpy as np

from ddtree_numba import DraftTree, viz

TREE = DraftTree.from_parents([-1, 0, 1, 0, 3], [0, 1, 2, 3, 2])
TARGET = np.array([[3, 2, 4, 2, 4]], np.int32)


def _texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_every_row_but_the_last_accepted_says_what_the_target_wants():
    figure, alt_text = viz.accept_figure(TREE, TARGET, [0, 3, 4])
    assert [t for t in _texts(figure) if t.startswith("→")] == ["→3", "→2", "→4", "→2"]
    assert "wants 4 after row 4" in alt_text


def test_in_a_large_tree_only_the_path_says_what_it_wants():
    tree = DraftTree.from_parents([-1, *range(99)])
    target = np.full((1, 100), 7, np.int32)
    figure, _ = viz.accept_figure(tree, target, [0, 1, 2, -1])
    assert sum(t.startswith("→") for t in _texts(figure)) == 2


def test_compaction_draws_where_each_kept_row_goes():
    before = ["p", "The", "cat", "sat", "dog", "sat"]
    after = ["p", "The", "dog", "sat", "dog", "sat"]
    figure, alt_text = viz.compact_figure(before, after, [0, 3, 4], 1)
    ends = [
        (text.xyann[0], text.xy[0])
        for text in figure.axes[0].texts
        if getattr(text, "arrow_patch", None)
    ]
    assert ends == [(1, 1), (4, 2), (5, 3)]
    assert "1 to 1, 4 to 2, 5 to 3" in alt_text and "4 rows" in alt_text
