"""The speculative loop: draft, verify, accept, commit, until the text is long enough.

One loop serves three modes, since each is a tree:

====== ============================================== =========================
mode   its tree                                       what it is
====== ============================================== =========================
tree   the `n_draft_nodes` most probable prefixes     DDTree
chain  top-1 at each of the block's L positions       DFlash, plain block draft
plain  the root alone                                 the target on its own
====== ============================================== =========================

All three write the same text, at T = 0 and, with one seed, at T > 0: a draft is
accepted only where it is what the target chose anyway.

How tokens are counted
----------------------
A round's root is the last token whose place in the text is settled: in the first round
the prompt's last token, later the bonus. So every token that is generated comes out of
some round: its accepted drafts, then its bonus, and
``tokens per round = tokens / rounds`` is exactly 1 in plain mode. A last round that
accepts more than `max_new_tokens` leaves room for, or that meets a stop token, commits
only what is kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
from tqdm import tqdm

from ddtree_numba import backend, reference
from ddtree_numba.backend import whole_number
from ddtree_numba.kernels.argmax import argmax
from ddtree_numba.kernels.topk import topk
from ddtree_numba.kernels.tree_accept import tree_accept
from ddtree_numba.kernels.tree_build import MAX_DRAFT_NODES, tree_build
from ddtree_numba.model import Cache, Model
from ddtree_numba.model.device import DeviceCache, DeviceModel, draw_coins
from ddtree_numba.model.text import decode, encode
from ddtree_numba.step import Round
from ddtree_numba.tree import DraftTree

MODES = ("tree", "chain", "plain")
MAX_SEED = 2**128 - 1  # a key of the random generator


@dataclass(frozen=True)
class RoundTrace:
    """What happened in one round of a batch.

    Attributes
    ----------
    active : bool [B]
        Requests that were not finished when the round began. The others ride along as
        a root alone and commit nothing.
    prefix_lens : int32 [B]
        Cache rows before the round: every token of the text but the root.
    tree : DraftTree
    target_tokens : int32 [B, N]
        The target's choice after every row.
    accepted : Accepted
        Rows, accept_len and bonus as `tree_accept` found them.
    committed : list of list of int
        New tokens of each request: accepted drafts, then the bonus, cut at a stop
        token and at the end of the request.
    seconds : dict
        Wall time by stage: draft, topk, tree_build, verify, choose, accept, compact; or
        of the whole "round", where the model runs on the GPU too.
    """

    active: np.ndarray
    prefix_lens: np.ndarray
    tree: DraftTree
    target_tokens: np.ndarray
    accepted: reference.Accepted
    committed: list[list[int]]
    seconds: dict[str, float]

    def path(self, b: int) -> list[int]:
        """Accepted rows of request b, root first; none if it took no part."""
        length = int(self.accepted.accept_len[b]) if self.active[b] else 0
        return self.accepted.rows[b, :length].tolist()


@dataclass
class Generation:
    """What `generate` wrote, and how.

    Attributes
    ----------
    mode, executor : str
    n_draft_nodes : int
        Draft nodes a round: the budget of a tree, L of a chain, 0 when plain.
    prompts, tokens : list of list of int
        Token ids of each request: what was given, and what was generated.
    rounds : list of RoundTrace
    seconds : float
        Wall time of everything, the prompts' prefill (`prefill_seconds`) included.
    """

    mode: str
    executor: str
    n_draft_nodes: int
    prompts: list[list[int]]
    tokens: list[list[int]]
    rounds: list[RoundTrace] = field(default_factory=list)
    prefill_seconds: float = 0.0
    seconds: float = 0.0

    def text(self, i: int = 0) -> str:
        """Generated text of request i, its tokens being bytes."""
        return decode(self.tokens[i])

    @property
    def n_tokens(self) -> int:
        """Generated tokens of all requests together."""
        return sum(map(len, self.tokens))

    @property
    def n_rounds(self) -> int:
        """Rounds of all requests together; each counts the rounds it took part in."""
        return sum(int(trace.active.sum()) for trace in self.rounds)

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens (accepted drafts and bonus) a round, over all requests."""
        return self.n_tokens / self.n_rounds if self.rounds else 0.0

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Wall time by stage, over all rounds."""
        total: dict[str, float] = {}
        for trace in self.rounds:
            for stage, seconds in trace.seconds.items():
                total[stage] = total.get(stage, 0.0) + seconds
        return total


def generate(
    model: Model,
    prompts: Any,
    max_new_tokens: int,
    n_draft_nodes: int = 64,
    *,
    mode: str = "tree",
    temperature: float = 0.0,
    seed: int = 0,
    stop_tokens: Sequence[int] = (),
    executor: str | None = None,
    progress: bool = False,
) -> Generation:
    """Continue a prompt, or a batch of prompts of different length.

    Parameters
    ----------
    model : Model
        Target and drafter (`ddtree_numba.model.Model`).
    prompts : str, bytes, tokens, or a list of them
        At least one byte of text, which gets BOS in front, or two tokens: the drafter
        needs one before the root.
    max_new_tokens : int
        Tokens that each request generates, unless it meets a stop token.
    n_draft_nodes : int
        Budget of the tree, the root not counted; mode "tree" only.
    mode : {"tree", "chain", "plain"}
        See the module's text.
    temperature : float
        0 takes the target's most probable token. Above 0 the target's token is sampled
        at every row, with a random number that belongs to (seed, place of the request
        in the batch, position): the text does not depend on the drafts.
    seed : int
    stop_tokens : sequence of int
        A request ends after the first of them, which it keeps.
    executor : {"gpu", "emulator", "numpy"}, optional
        Where the stages run; the GPU if there is one, else NumPy. On a GPU the small
        model runs too, and every round but the first is one CUDA graph's replay.
    progress : bool
        Show a progress bar on standard error.

    Returns
    -------
    Generation

    Raises
    ------
    TypeError
        For a prompt that is neither text nor a list of tokens, something that is no
        model, or a count that is no int.
    ValueError
        For an empty prompt, one too long for the model, a count outside its range, an
        unknown mode or executor, or (from a round) logits that are no distribution.
    RuntimeError
        If a GPU is asked for and there is none.
    """
    started = time.perf_counter()
    if not hasattr(model, "config"):
        raise TypeError(
            f"model is a {type(model).__name__}; expected one as from load_model"
        )
    _check_counts(max_new_tokens, n_draft_nodes, mode, temperature, seed)
    stops = _stop_tokens(stop_tokens)
    texts = check_prompts(model, prompts, max_new_tokens)
    n = {"tree": n_draft_nodes, "chain": model.config.block - 1, "plain": 0}[mode]
    run = Generation(
        mode, backend.choose(executor), n, texts, tokens=[[] for _ in texts]
    )
    # Behind a text that is nearly done a round still writes a whole tree.
    capacity = max(map(len, texts)) + max_new_tokens + n
    settled = [text[:-1] for text in texts]
    roots = np.array([text[-1] for text in texts], np.int32)
    left = np.full(len(texts), max_new_tokens)
    loop: _Loop | _DeviceLoop
    if run.executor == "gpu" and hasattr(model, "on_gpu"):
        gpu_cache = model.on_gpu.prefill(settled, capacity)
        loop = _DeviceLoop(model.on_gpu, gpu_cache, run, temperature, seed, roots, left)
    else:
        cache = model.prefill(settled, capacity)
        loop = _Loop(model, cache, run, temperature, seed)
    run.prefill_seconds = time.perf_counter() - started
    with tqdm(total=left.sum(), unit="token", desc=mode, disable=not progress) as bar:
        while (left > 0).any():
            trace = loop.round(roots, left)
            for b, path in enumerate(trace.committed):
                trace.committed[b] = tokens = _until_stop(path[: left[b]], stops)
                run.tokens[b] += tokens
                stopped = tokens and tokens[-1] in stops
                left[b] = 0 if stopped else left[b] - len(tokens)
                bar.update(len(tokens))
            run.rounds.append(trace)
            roots = trace.accepted.bonus
    run.seconds = time.perf_counter() - started
    return run


def _paths(tree: DraftTree, accepted: reference.Accepted) -> list[list[int]]:
    """Accepted drafts and the bonus of every request."""
    paths = []
    for b, rows in enumerate(accepted.rows):
        drafts = tree.token_ids[b, rows[1 : accepted.accept_len[b]]].tolist()
        paths.append([*drafts, int(accepted.bonus[b])])
    return paths


@dataclass(frozen=True)
class _Loop:
    """Rounds of a model in NumPy, the stages where `run.executor` says.

    It holds what stays the same from round to round, but for the cache's contents.
    """

    model: Model
    cache: Cache
    run: Generation
    temperature: float
    seed: int

    def round(self, roots: np.ndarray, left: np.ndarray) -> RoundTrace:
        """One round: every stage in order.

        Parameters
        ----------
        roots : int32 [B]
            Last settled token of each request.
        left : int [B]
            Tokens that each request may still commit; 0 once it is finished.
        """
        executor, clock, active = self.run.executor, _Clock(), left > 0
        prefix_lens = self.cache.prefix_lens.copy()
        tree = self._draft_tree(roots, active, clock)
        with clock("verify"):
            logits = self.model.verify(self.cache, tree, executor=executor)
        with clock("choose"):
            chosen = self._choose(logits, tree, prefix_lens)
        with clock("accept"):
            # No row is deeper than the block.
            longest = self.model.config.block - 1 if self.run.n_draft_nodes else 0
            accepted = tree_accept(tree, chosen, max_depth=longest, executor=executor)
        with clock("compact"):
            # Who is finished stays where it is and cannot outgrow the cache.
            kept = np.where(active, accepted.accept_len, 0).astype(np.int32)
            self.model.commit(self.cache, accepted.rows, kept, executor=executor)
        paths = _paths(tree, accepted)
        return RoundTrace(
            active, prefix_lens, tree, chosen, accepted, paths, clock.seconds
        )

    def _draft_tree(
        self, roots: np.ndarray, active: np.ndarray, clock: _Clock
    ) -> DraftTree:
        n, executor = self.run.n_draft_nodes, self.run.executor
        # Nothing is drafted for a tree that has no room for it.
        logits = np.zeros((len(roots), 0, 1), np.float32)
        with clock("draft"):
            if n:
                logits = draft_logits(self.model, self.cache, roots)
        with clock("topk"):
            k = 1 if self.run.mode == "chain" else n
            log_probs, token_ids = topk(logits, k, executor=executor)
        with clock("tree_build"):
            return tree_build(
                log_probs,
                token_ids,
                np.where(active, n, 0).astype(np.int32),
                root_tokens=roots,
                max_draft_nodes=n,
                executor=executor,
            )

    def _choose(
        self, logits: np.ndarray, tree: DraftTree, prefix_lens: np.ndarray
    ) -> np.ndarray:
        """The target's token after every row: the best, or a sample."""
        if self.temperature == 0:
            return argmax(logits, tree.n_rows, executor=self.run.executor)
        positions = tree.positions(prefix_lens)
        return reference.sample(
            logits, self.temperature, positions, self.seed, tree.n_rows
        )


class _DeviceLoop:
    """Rounds of a model on the GPU: the first by plain calls, then one CUDA graph.

    The host reads every round's result back once, and tells the device only who is
    finished. (In the emulator all rounds are plain calls.)
    """

    def __init__(
        self,
        model: DeviceModel,
        cache: DeviceCache,
        run: Generation,
        temperature: float,
        seed: int,
        roots: np.ndarray,
        left: np.ndarray,
    ) -> None:
        put, n = model.at.put, run.n_draft_nodes
        self.run, self.at = run, model.at
        self.prefix_lens = np.array([len(text) - 1 for text in run.prompts], np.int32)
        self.active = left > 0
        no_logits = model.at.empty((len(roots), 0, 1), np.float32)
        choose = None
        if temperature > 0:
            ahead = int(left.max()) + model.config.block
            coins = put(draw_coins([len(text) for text in run.prompts], ahead, seed))
            choose = partial(model.sample, temperature=temperature, coins=coins)

        self.step = Round(
            lambda prefix_lens, roots: model.draft(cache, roots) if n else no_logits,
            lambda tree, prefix_lens: model.verify(cache, tree),
            cache.kv,
            cache.prefix_lens,
            put(roots.copy()),
            put(np.where(self.active, n, 0).astype(np.int32)),
            max_draft_nodes=n,
            k=1 if run.mode == "chain" else n,
            active=put(self.active.astype(np.int32)),
            choose=choose,
            settle=lambda rows, kept, prefix_lens: model.settle(cache, rows, kept),
            read_back=True,
            executor=model.at.executor,
        )

    def round(self, roots: np.ndarray, left: np.ndarray) -> RoundTrace:
        """One round; the arguments are what the last one's trace says."""
        clock, n, prefix_lens = _Clock(), self.run.n_draft_nodes, self.prefix_lens
        with clock("round"):
            if (self.active != (left > 0)).any():
                self.active = left > 0
                self.at.write(self.step.active, self.active.astype(np.int32))
                budgets = np.where(self.active, n, 0).astype(np.int32)
                self.at.write(self.step.n_draft_nodes, budgets)
            if not (self.run.rounds and self.at.on_device):
                self.step.run()
            else:
                if not self.step.captured:
                    self.step.capture()
                self.step.replay()
            result = self.step.read()
        tree, accepted = result.tree, result.accepted
        bad = self.active & (accepted.bonus < 0)  # the host did not see the logits
        if bad.any():
            b = int(np.argmax(bad))
            row = accepted.rows[b, accepted.accept_len[b] - 1]
            raise ValueError(
                f"logits, request {b}, row {row} holds NaN, +inf or only -inf"
            )
        kept = np.where(self.active, accepted.accept_len, 0).astype(np.int32)
        self.prefix_lens = prefix_lens + kept
        return RoundTrace(
            self.active,
            prefix_lens,
            tree,
            result.target_tokens,
            accepted,
            _paths(tree, accepted),
            clock.seconds,
        )


def check_prompts(model: Model, prompts: Any, max_new_tokens: int) -> list[list[int]]:
    """Tokens of a prompt or of a batch of them, as `generate` takes them.

    Raises
    ------
    TypeError, ValueError
        For something that is no prompt, an empty one, or one too long for the model.
    """
    is_batch = isinstance(prompts, Sequence | np.ndarray)
    if not is_batch or getattr(prompts, "ndim", 1) == 0:
        raise TypeError(
            f"prompts is a {type(prompts).__name__}; expected text, bytes, token ids, "
            "or a list of them"
        )
    if not isinstance(prompts, str | bytes) and len(prompts):
        single = isinstance(prompts[0], int | np.integer)
    else:
        single = True
    batch = [prompts] if single else prompts
    texts = [_tokens(prompt, f"prompt {i}") for i, prompt in enumerate(batch)]
    longest = model.config.max_len - max_new_tokens
    for i, text in enumerate(texts):
        # The first token may be BOS: a prompt is what comes after it.
        if len(text) < 2:
            raise ValueError(
                f"prompt {i} is empty; expected at least one byte, or two tokens"
            )
        if len(text) > longest:
            raise ValueError(
                f"prompt {i} has {len(text)} tokens and {max_new_tokens} are to come; "
                f"the model's limit is {model.config.max_len} together"
            )
        if not 0 <= min(text) <= max(text) < model.config.n_embeddings:
            raise ValueError(
                f"prompt {i} holds tokens {min(text)} … {max(text)}; expected "
                f"0 … {model.config.n_embeddings - 1}"
            )
    return texts


def _tokens(prompt: Any, name: str) -> list[int]:
    if isinstance(prompt, str | bytes):
        try:
            return encode(prompt).tolist()
        except UnicodeEncodeError as error:  # a lone surrogate
            raise ValueError(f"{name} is no text: {error}") from error
    expected = "expected text, bytes or a list of token ids"
    try:
        tokens = np.asarray(prompt)
    except ValueError as error:
        raise TypeError(f"{name} holds lists beside numbers; {expected}") from error
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise TypeError(
            f"{name} is a {type(prompt).__name__} of {tokens.dtype}, shape "
            f"{tokens.shape}; {expected}"
        )
    return tokens.tolist()


def _check_counts(
    max_new_tokens: int, n_draft_nodes: int, mode: str, temperature: float, seed: int
) -> None:
    whole_number(max_new_tokens, "max_new_tokens")
    whole_number(n_draft_nodes, "n_draft_nodes", most=MAX_DRAFT_NODES)
    whole_number(seed, "seed", most=MAX_SEED)
    if isinstance(temperature, bool) or not isinstance(temperature, Real):
        raise TypeError(f"temperature is {temperature!r}; expected a number")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; expected 0 or more")
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; expected one of {', '.join(MODES)}")


def _stop_tokens(given: Any) -> frozenset[int]:
    """Stop tokens as a set: a loop looks at them in every round."""
    try:
        tokens: list[Any] = list(given)
    except TypeError:
        tokens = [None]
    if not all(isinstance(token, int | np.integer) for token in tokens):
        raise TypeError(f"stop_tokens is {given!r}; expected a sequence of token ids")
    return frozenset(map(int, tokens))


def draft_logits(model: Model, cache: Cache, roots: np.ndarray) -> np.ndarray:
    """The drafter's logits [B, L, V] after these roots, at its own temperature."""
    return model.draft(cache, roots) / model.config.draft_temperature


def _until_stop(tokens: list[int], stop_tokens: frozenset[int]) -> list[int]:
    """Tokens up to and including the first stop token."""
    for i, token in enumerate(tokens):
        if token in stop_tokens:
            return tokens[: i + 1]
    return tokens


class _Clock:
    """Wall time of named stages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - started
