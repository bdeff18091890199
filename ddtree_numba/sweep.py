"""Tokens per round against the tree's size, measured by replay.

The loop is lossless: whatever is drafted, the text is the target's own. So the target
writes each continuation once, alone, the drafter drafts at each of its positions once,
and the rounds of every budget are replayed along them with the real `tree_build` and
`tree_accept`. A test shows that replayed rounds are the rounds that `generate` runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from ddtree_numba._data import data_path
from ddtree_numba.decode import draft_logits, generate
from ddtree_numba.kernels.topk import topk
from ddtree_numba.kernels.tree_accept import tree_accept
from ddtree_numba.kernels.tree_build import tree_build
from ddtree_numba.model import Model


def sweep(
    model: Model,
    prompts: Sequence[Any],
    max_new_tokens: int,
    n_draft_nodes: Sequence[int],
    *,
    temperatures: Sequence[float] = (0.0,),
    seed: int = 0,
    executor: str | None = None,
    progress: bool = False,
) -> pd.DataFrame:
    """Measure rounds of every budget, and of the chain, over a set of prompts.

    Parameters
    ----------
    model, prompts, seed, executor, progress
        As for `ddtree_numba.decode.generate`.
    max_new_tokens : int
        A request ends with the first round that reaches as many new tokens. That round
        counts in full: cutting it short would count a round, but not its tokens.
    n_draft_nodes : sequence of int
        Budgets of the tree.
    temperatures : sequence of float

    Returns
    -------
    pandas.DataFrame
        A row for each temperature and budget, and one for the chain:

        ==================== =======================================================
        mode, n_draft_nodes  "tree" or "chain", and the draft nodes of a round
        temperature
        prompts, tokens      requests, and tokens that their rounds committed
        rounds
        tokens_per_round     ``tokens / rounds``: accepted drafts + bonus
        accepted             accepted drafts a round, ``tokens_per_round - 1``
        expected_accepted    what the drafter expected: path probabilities of a
                             round's draft nodes added up, mean over rounds
        ==================== =======================================================
    """
    block = model.config.block
    records = []
    for temperature in temperatures:
        # The last round may start at the last token and look a block ahead.
        run = generate(
            model,
            prompts,
            max_new_tokens + block - 1,
            mode="plain",
            temperature=temperature,
            seed=seed,
            executor=executor,
            progress=progress,
        )
        replay = _Replay(model, run.prompts, run.tokens, max_new_tokens, progress)
        plans = [("tree", m, m) for m in n_draft_nodes] + [("chain", 1, block - 1)]
        for mode, k, m in tqdm(plans, desc="replay", disable=not progress):
            record = replay.measure(k, m, run.executor)
            records.append(
                {
                    "mode": mode,
                    "n_draft_nodes": m,
                    "temperature": temperature,
                    "prompts": len(run.tokens),
                    **record,
                }
            )
    return pd.DataFrame(records)


def recorded() -> pd.DataFrame:
    """The stored sweep over 30 held-out prompts, as `ddtree sweep` wrote it."""
    return pd.read_csv(data_path("bench", "sweep.csv"), comment="#")


class _Replay:
    """Texts, and the drafter's logits at each position where a round may start."""

    def __init__(
        self,
        model: Model,
        prompts: list[list[int]],
        tokens: list[list[int]],
        max_new_tokens: int,
        progress: bool,
    ) -> None:
        self.max_new_tokens = max_new_tokens
        # Column j is the j-th new token; column 0, the first root, ends the prompt.
        self.text = np.array(
            [[p[-1], *new] for p, new in zip(prompts, tokens, strict=True)], np.int32
        )
        cache = model.prefill(
            [p + new for p, new in zip(prompts, tokens, strict=True)],
        )
        first = np.array([len(p) - 1 for p in prompts], np.int32)
        steps = tqdm(range(max_new_tokens), desc="draft", disable=not progress)
        drafts = []
        for step in steps:
            # A cache cut back to a prefix is the cache of that prefix.
            cache.prefix_lens[:] = first + step
            drafts.append(draft_logits(model, cache, self.text[:, step]))
        self.logits = np.stack(drafts, axis=1).astype(np.float32)  # [B, steps, L, V]

    def measure(self, k: int, m: int, executor: str) -> dict[str, Any]:
        """Rounds with k candidates a position and m draft nodes, of all requests."""
        at = np.zeros(len(self.text), int)
        rounds, tokens, expected = 0, 0, 0.0
        while (running := np.flatnonzero(at < self.max_new_tokens)).size:
            start = at[running]
            log_probs, token_ids = topk(
                self.logits[running, start], k, executor=executor
            )
            tree = tree_build(log_probs, token_ids, m, executor=executor)
            # After a row of the path at depth d the target wrote token d + 1 from
            # here; rows off the path are never reached, whatever stands there.
            ahead = start[:, None] + 1 + np.maximum(tree.depths, 0)
            chosen = self.text[running[:, None], ahead]
            accept_len = tree_accept(tree, chosen, executor=executor).accept_len
            at[running] += accept_len
            rounds += running.size
            tokens += int(accept_len.sum())
            expected += float(np.exp(tree.log_probs[:, 1:]).sum())
        return {
            "tokens": tokens,
            "rounds": rounds,
            "tokens_per_round": tokens / rounds,
            "accepted": tokens / rounds - 1,
            "expected_accepted": expected / rounds,
        }
