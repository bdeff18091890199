"""A model made of two functions, so that a test decides what it writes and drafts.

It speaks the small model's interface. Its cache rows hold tokens and nothing else, and
what it computes it reads from there: a row that compaction lost, or that a mask shows
wrongly, changes the text.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from ddtree_numba.kernels.kv_compact import kv_compact

VOCAB = 12


@dataclass
class FakeCache:
    kv: np.ndarray  # [B, S_max, 1]: the token of a row; NaN where none was written
    prefix_lens: np.ndarray  # [B]

    def tokens(self, b):
        return [int(t) for t in self.kv[b, : self.prefix_lens[b], 0]]


class FakeModel:
    """``target(tokens) -> logits [V]`` and ``drafter(tokens) -> logits [L, V]``."""

    def __init__(self, target, drafter, *, block=8, max_len=400, draft_temperature=1.0):
        self.target, self.drafter = target, drafter
        self.config = SimpleNamespace(
            block=block,
            max_len=max_len,
            n_embeddings=VOCAB,
            draft_temperature=draft_temperature,
        )

    def prefill(self, prompts, capacity=None):
        longest = max(map(len, prompts))
        kv = np.full((len(prompts), capacity or longest, 1), np.nan)
        for row, prompt in zip(kv, prompts, strict=True):
            row[: len(prompt), 0] = prompt
        return FakeCache(kv, np.array([len(p) for p in prompts], np.int32))

    def draft(self, cache, roots):
        texts = [[*cache.tokens(b), int(root)] for b, root in enumerate(roots)]
        return np.stack([self.drafter(text) for text in texts]).astype(np.float32)

    def verify(self, cache, tree, *, executor=None):
        logits = np.full((*tree.token_ids.shape, VOCAB), np.nan, np.float32)
        for b, prefix_len in enumerate(cache.prefix_lens):
            live = int(tree.n_rows[b])
            cache.kv[b, prefix_len : prefix_len + live, 0] = tree.token_ids[b, :live]
            for i, seen in enumerate(tree.mask(b, prefix_len)[:live]):
                text = cache.kv[b, np.flatnonzero(seen), 0]
                logits[b, i] = self.target([int(token) for token in text])
        return logits

    def commit(self, cache, rows, accept_len, *, executor=None):
        cache.prefix_lens = kv_compact(
            cache.kv, cache.prefix_lens, rows, accept_len, executor=executor
        )


def random_model(seed=0, *, skill=2.0, block=8, **config):
    """A target that looks at its last two tokens, and a drafter that half knows it."""
    table = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB, VOCAB)) * 2

    def target(tokens):
        return table[tokens[-2], tokens[-1]]

    def drafter(tokens):
        noise = np.random.default_rng([seed, len(tokens), *tokens[-2:]])
        text, rows = list(tokens), []
        for _ in range(block - 1):
            rows.append(target(text) * skill / 2 + noise.normal(size=VOCAB))
            text.append(int(np.argmax(target(text))))
        return np.stack(rows)

    return FakeModel(target, drafter, block=block, **config)


def scripted_model(script, drafts, *, block=4, **config):
    """A target that writes `script`, and a drafter that follows it for a while.

    Parameters
    ----------
    script : list of int
        The text by position, the prompt included.
    drafts : callable
        Right drafts of the block whose root stands at a position; wrong ones follow.
    """

    def one_hot(token):
        return np.where(np.arange(VOCAB) == token, 0.0, -9.0)

    def target(tokens):
        return one_hot(script[len(tokens)])

    def drafter(tokens):
        ahead = script[len(tokens) : len(tokens) + block - 1]
        right = drafts(len(tokens) - 1)
        drafted = [t if i < right else (t + 1) % VOCAB for i, t in enumerate(ahead)]
        drafted += [0] * (block - 1 - len(drafted))
        return np.stack([one_hot(token) for token in drafted])

    return FakeModel(target, drafter, block=block, **config)
