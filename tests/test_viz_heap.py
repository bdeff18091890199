"""Best-first search as panels and as a film: each step shows its tree and its heap."""

import base64
import re

import numpy as np
import pytest
from test_viz import png

from ddtree_numba import viz
from ddtree_numba.lab.best_first import best_first, brute_force

WORDS = [["the", "a", "my"], ["cat", "dog", "old"], ["sat", "ran", "is"]]
PROBS = [[0.5, 0.3, 0.2], [0.7, 0.2, 0.1], [0.8, 0.15, 0.05]]
STEPS = best_first(np.log(PROBS), 8)


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_every_step_has_a_tree_and_a_heap():
    figure, _ = viz.heap_figure(STEPS, WORDS)
    trees, heaps = figure.axes[::2], figure.axes[1::2]
    assert len(trees) == len(heaps) == 8
    for n, (tree, heap) in enumerate(zip(trees, heaps, strict=True), 1):
        turns = [int(text) for text in texts(tree) if text.isdigit()]
        assert sorted(turns) == list(range(1, n + 1))
        assert len(heap.patches) == len(STEPS[n - 1].heap)
    assert trees[3].get_title(loc="left") == "4. takes “the cat sat”, 0.28"


def test_entries_stand_best_first_and_new_ones_are_hatched_and_say_so():
    figure, _ = viz.heap_figure(STEPS, WORDS)
    third = figure.axes[5]
    assert texts(third) == [
        "the cat sat  0.28", "a cat  0.21  new", "my  0.2  new", "the dog  0.1",
    ]  # fmt: skip
    assert [bool(bar.get_hatch()) for bar in third.patches] == [0, 1, 1, 0]
    widths = [bar.get_width() for bar in third.patches]
    assert np.allclose(widths, [0.28, 0.21, 0.2, 0.1])


def test_the_panels_are_told_in_words():
    _, alt_text = viz.heap_figure(STEPS, WORDS)
    assert "2. “the cat” (0.35); 3. “a” (0.3); 4. “the cat sat” (0.28)" in alt_text
    assert alt_text.endswith("“my dog”, “a cat ran”.")


def test_a_long_search_is_cut():
    rng = np.random.default_rng(0)
    table = np.sort(np.log(rng.dirichlet(np.ones(64), 15)), axis=1)[:, ::-1]
    words = [[str(rank) for rank in range(64)]] * 15
    figure, alt_text = viz.heap_figure(best_first(table, 1024), words, columns=4)
    assert len(figure.axes[::2]) == viz.heap.MOST_PANELS
    assert "The first 16 steps" in alt_text
    assert any("more" in ax.get_xlabel() for ax in figure.axes[1::2])


def test_the_film_needs_no_network_and_is_the_same_each_time():
    film = viz.heap_animation(STEPS[:4], WORDS)
    assert film == viz.heap_animation(STEPS[:4], WORDS)
    assert "http" not in film and "fa-" not in film
    frames = re.findall(r'frames\[\d+\] = "data:image/png;base64,([^"]*)"', film)
    assert len(frames) == 4
    assert all(base64.b64decode(frame).startswith(b"\x89PNG") for frame in frames)
    assert len(set(frames)) == 4
    (still,) = re.findall(
        r'<img alt="The first 4 steps[^"]*" src="[^,]*,([^"]*)"', film
    )
    assert still == frames[-1]
    assert len(film) < 60_000


@pytest.mark.parametrize("m", [1, 2, 12])
def test_panels_render(m):
    figure, _ = viz.heap_figure(best_first(np.log(PROBS), m), WORDS)
    assert png(figure).startswith(b"\x89PNG")


def test_the_search_is_the_specifications(m=30):
    from ddtree_numba import reference

    table = np.log(np.array(PROBS, np.float32))
    ids = np.tile(np.arange(3, dtype=np.int32), (1, 3, 1))
    tree = reference.tree_build(table[None], ids, m)
    steps = best_first(table, m)
    assert [step.taken for step in steps] == brute_force(table, m)
    tokens = tree.token_ids[0]  # ranks here
    rows = [tuple(tokens[path[1:]]) for path in tree.paths(0)[1:]]
    assert [step.taken for step in steps] == rows
