"""Notebook 09: write one round of the loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ddtree_numba.decode import draft_logits, generate
from ddtree_numba.kernels.argmax import argmax
from ddtree_numba.kernels.topk import topk
from ddtree_numba.kernels.tree_accept import tree_accept
from ddtree_numba.kernels.tree_build import tree_build
from ddtree_numba.lab import compare
from ddtree_numba.lab.exercise import Case, Exercise, Wrong
from ddtree_numba.model import Model, load_model
from ddtree_numba.model.text import encode


def one_round(model, cache, root, n_draft_nodes):
    roots = np.array([root], np.int32)
    drafted = topk(draft_logits(model, cache, roots), n_draft_nodes)
    tree = tree_build(*drafted, n_draft_nodes, root_tokens=roots)
    target_tokens = argmax(model.verify(cache, tree), tree.n_rows)
    accepted = tree_accept(tree, target_tokens)
    model.commit(cache, accepted.rows, accepted.accept_len)
    path = accepted.rows[0, 1 : accepted.accept_len[0]]
    return [*tree.token_ids[0, path].tolist(), int(accepted.bonus[0])]


# ----------------------------------------------------------------------- wrong rounds


def no_bonus(model, cache, root, n_draft_nodes):
    return one_round(model, cache, root, n_draft_nodes)[:-1] or [root]


def with_root(model, cache, root, n_draft_nodes):
    return [root, *one_round(model, cache, root, n_draft_nodes)]


def never_committed(model, cache, root, n_draft_nodes):
    before = cache.prefix_lens.copy()
    tokens = one_round(model, cache, root, n_draft_nodes)
    cache.prefix_lens = before
    return tokens


def committed_without_root(model, cache, root, n_draft_nodes):
    tokens = one_round(model, cache, root, n_draft_nodes)
    cache.prefix_lens = cache.prefix_lens - 1
    return tokens


def unverified(model, cache, root, n_draft_nodes):
    roots = np.array([root], np.int32)
    drafted = topk(draft_logits(model, cache, roots), n_draft_nodes)
    tree = tree_build(*drafted, n_draft_nodes, root_tokens=roots)
    path = max(tree.paths(0), key=len)
    target_tokens = argmax(model.verify(cache, tree), tree.n_rows)
    rows = np.array([path], np.int32)
    model.commit(cache, rows, np.array([len(path)], np.int32))
    bonus = int(target_tokens[0, path[-1]])
    return [*tree.token_ids[0, path[1:]].tolist(), bonus]


def plain_round(model, cache, root, n_draft_nodes):
    return one_round(model, cache, root, 0)


# ------------------------------------------------------------------------------ cases

PROMPTS = ("def heappush(heap, item):\n", "import os\nimport ", "    return self._")
LENGTH = 12


@functools.cache
def _model() -> Model:
    return load_model()


@functools.cache
def _wanted(prompt: str) -> list[int]:
    run = generate(_model(), prompt, LENGTH, mode="plain", executor="numpy")
    return run.tokens[0]


def _text(prompt: str, n_draft_nodes: int) -> Callable[[Any], str | None]:
    """A case that writes one text with the learner's round."""

    def run(answer: Any) -> str | None:
        model, (*settled, root) = _model(), encode(prompt).tolist()
        cache = model.prefill([settled], len(settled) + 2 * LENGTH + n_draft_nodes + 16)
        tokens: list[int] = []
        for number in range(LENGTH):
            before = int(cache.prefix_lens[0])
            got = answer(model, cache, root, n_draft_nodes)
            if says := _look_at(got, int(cache.prefix_lens[0]) - before, root):
                return f"Round {number + 1}: {says}"
            tokens += [int(token) for token in got]
            root = tokens[-1]
            want = _wanted(prompt)
            n = min(len(tokens), LENGTH)
            if problem := compare.value(tokens[:n], want[:n], "the text so far"):
                return f"Round {number + 1}: {problem} Plain greedy writes that."
            if n == LENGTH:
                break
        if n_draft_nodes and number + 1 == LENGTH:
            return f"{LENGTH} tokens took {LENGTH} rounds: where are the drafts?"
        return None

    return run


def _look_at(got: Any, grown: int, root: int) -> str | None:
    """What is wrong with one round's tokens and the cache it left."""
    if not isinstance(got, list | np.ndarray) or len(got) == 0:
        return f"one_round returned {got!r:.50}; expected a list of tokens."
    if grown == 0:
        return "the cache did not grow. The round ends with model.commit."
    if grown == len(got):
        return None
    if grown == len(got) - 1 and int(got[0]) == root:
        return (
            f"it begins with the root, {root}, which was settled a round ago. "
            f"Drafts, then the bonus."
        )
    return (
        f"{len(got)} tokens, but the cache grew by {grown} rows. It gains the root and "
        "the accepted drafts; the text gains the accepted drafts and the bonus."
    )


EXERCISE = Exercise(
    notebook="09",
    title="write one round",
    name="one_round",
    hints=(
        "Seven lines, one a stage: draft_logits and topk, tree_build with "
        "root_tokens=roots, model.verify, argmax, tree_accept, model.commit.",
        "The new tokens are those of rows accepted.rows[0, 1:accept_len[0]], then "
        "accepted.bonus[0].",
    ),
    solution=one_round,
    cases=(
        Case("12 bytes, no drafts: 12 rounds", _text(PROMPTS[0], 0)),
        Case("the same text with 8 draft nodes", _text(PROMPTS[0], 8)),
        Case("… and with 16", _text(PROMPTS[0], 16)),
        Case("another text, 8 draft nodes", _text(PROMPTS[1], 8)),
        Case("a third", _text(PROMPTS[2], 8)),
    ),
    wrong=(
        Wrong("no bonus", no_bonus, "the text gains"),
        Wrong("the root again", with_root, "begins with the root"),
        Wrong("the cache forgotten", never_committed, "did not grow"),
        Wrong("the root not committed", committed_without_root, "gains the root"),
        Wrong("drafts nobody verified", unverified, "Plain greedy writes that"),
        Wrong("no drafts", plain_round, "where are the drafts"),
    ),
)
