"""step: a whole round on the device, as plain calls or as one CUDA graph.

====== ================================================== =============
stage  what it does                                       whose
====== ================================================== =============
draft  logits of the next L tokens                        the model's
topk   candidates for every position
build  the draft tree
target logits after every row; writes the tree's KV rows  the model's
choose the target's token after every row                 argmax's
accept the longest path that the target agrees with
settle what else the model keeps of the accepted rows     the model's
keep   accepted KV rows to the front of the tail;
       prefix lengths and root tokens of the next round
====== ================================================== =============

Nothing comes to the host in between. Prefix lengths, root tokens, budgets and who is
still active are read from device memory, and the tree has room for the largest budget:
so one captured graph serves every round, whatever it drafts. A launch costs the host
some 50 µs, a kernel within a replayed graph about 1.

With NumPy arrays the same calls run in the emulator, or as their NumPy twins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba.backend import Place, Workspace, place, whole_number
from ddtree_numba.kernels.argmax import argmax
from ddtree_numba.kernels.kv_compact import kv_compact
from ddtree_numba.kernels.topk import topk
from ddtree_numba.kernels.tree_accept import tree_accept
from ddtree_numba.kernels.tree_build import tree_build
from ddtree_numba.reference import Accepted
from ddtree_numba.tree import DraftTree

THREADS = 32


@cuda.jit
def keep_kernel(
    accept_len,  # [B] i32
    active,  # [B] i32: 0 for a request that is finished
    kept,  # out [B] i32: accepted rows that stay
):
    b = cuda.grid(1)
    if b < kept.size:
        kept[b] = accept_len[b] if active[b] else 0


@cuda.jit
def advance_kernel(
    new_prefix_lens,  # [B] i32
    bonus,  # [B] i32
    prefix_lens,  # out [B] i32
    root_tokens,  # out [B] i32
):
    b = cuda.grid(1)
    if b < prefix_lens.size:
        prefix_lens[b] = new_prefix_lens[b]
        root_tokens[b] = bonus[b]


@dataclass(frozen=True)
class RoundResult:
    """What a round drafted, and what became of it.

    Attributes
    ----------
    tree : DraftTree
    target_tokens : int32 [B, N]
        The target's choice after every row.
    accepted : Accepted
        As `tree_accept` found it; of a finished request nothing was kept.
    """

    tree: DraftTree
    target_tokens: Any
    accepted: Accepted

    def map(self, function: Callable[[Any], Any]) -> RoundResult:
        """The result with `function` applied to every array."""
        return RoundResult(
            DraftTree(**{name: function(x) for name, x in vars(self.tree).items()}),
            function(self.target_tokens),
            Accepted(*map(function, self.accepted)),
        )


@dataclass(eq=False)
class Round:
    """A round of a batch, to be run again and again.

    Parameters
    ----------
    draft : callable or array
        ``draft(prefix_lens, root_tokens) -> logits [B, L, V]``, as `topk` takes them;
        or the array to which the caller writes them before every round.
    target : callable
        ``target(tree, prefix_lens) -> logits [B, N, V]``, as `argmax` takes them. It
        writes the KV row of tree row i to cache row ``prefix_lens[b] + i`` and calls
        `verify_attn` in every layer.
    kv_cache : array [B, S_max, D] or [layers, B, S_max, D], or a list of them
        As `kv_compact` takes them.
    prefix_lens, root_tokens : int32 [B]
        Where the next round starts. Every round changes them in place.
    n_draft_nodes : int or int32 [B]
        Budgets, as `tree_build` takes them. An array is read anew by every round.
    max_draft_nodes : int, optional
        The tree's room, required if `n_draft_nodes` is an array.
    k : int, optional
        Candidates of a position; the tree's room if omitted.
    active : int32 [B], optional
        0 for a finished request: nothing of it is kept. Read anew by every round.
    choose : callable, optional
        ``choose(logits, tree, prefix_lens) -> tokens [B, N]`` in place of `argmax`.
    settle : callable, optional
        ``settle(rows, kept, prefix_lens)``: the first ``kept[b]`` of ``rows[b]`` stay.
        Called before they move.
    read_back : bool
        Copy each result to the host as the round's last step, for `read`.
    stream : int
        Handle of the stream that rounds of Numba arrays go to; 0 is CUDA's default.
        Those of torch and CuPy arrays go to their library's current stream.
    executor : {"gpu", "emulator", "numpy"}, optional
        If omitted: ``DDTREE_EXECUTOR``, else NumPy for host arrays, the GPU for device
        arrays.

    Attributes
    ----------
    result : RoundResult
        Of the last round; the next one overwrites it, in the same arrays.

    Raises
    ------
    TypeError, ValueError
        For arrays of the wrong dtype, shape or side, or a missing `max_draft_nodes`.

    Notes
    -----
    What is allocated by the stages and by `Place.empty` belongs to the round's
    `Workspace`. A callable that is to be captured does not wait for the device. It
    launches by `Place.launch`, or on its library's current stream (Numba: on
    `Place.stream`), and allocates by `Place.empty`, or by torch.

    Examples
    --------
    >>> step = Round(draft, target, kv_cache, lens, roots, 64)   # doctest: +SKIP
    >>> step.run()                                               # doctest: +SKIP
    >>> step.capture()                                           # doctest: +SKIP
    >>> for _ in range(100):                                     # doctest: +SKIP
    ...     step.replay()
    """

    draft: Any
    target: Callable[..., Any]
    kv_cache: Any
    prefix_lens: Any
    root_tokens: Any
    n_draft_nodes: Any
    _: KW_ONLY
    max_draft_nodes: int | None = None
    k: int | None = None
    active: Any = None
    choose: Callable[..., Any] | None = None
    settle: Callable[..., Any] | None = None
    read_back: bool = False
    stream: int = 0
    executor: str | None = None

    result: RoundResult | None = field(default=None, init=False)
    _copies: list[np.ndarray] = field(default_factory=list, init=False, repr=False)
    _replay: Callable[[], None] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.kv_cache, list | tuple):
            self.kv_cache = [self.kv_cache]
        if not self.kv_cache:
            raise ValueError("kv_cache is empty; expected an array of every layer")
        self._at = place(
            self.executor,
            default="numpy",
            kv_cache=self.kv_cache[0],
            prefix_lens=self.prefix_lens,
            root_tokens=self.root_tokens,
            active=self.active,
        )
        if self._at.executor == "gpu" and not self._at.on_device:
            raise ValueError(
                "executor is 'gpu', but the round's arrays are on the host"
            )
        if self.max_draft_nodes is None:
            self.max_draft_nodes = self.n_draft_nodes
        whole_number(self.max_draft_nodes, "max_draft_nodes")
        shape: tuple[int | None, ...] = (None,)
        for name in ("prefix_lens", "root_tokens", "active"):
            x = getattr(self, name)
            if x is not None:
                shape = self._check_state(x, name, shape)
        self._workspace = Workspace(self.stream)

    def _check_state(self, x: Any, name: str, shape: tuple) -> tuple[int, ...]:
        """Raise unless x is an array that rounds can read anew, or change."""
        checked = self._at.check(x, name, dtypes=(np.int32,), shape=shape)
        if checked is not x and not self._at.on_device:
            raise TypeError(f"{name} is a {type(x).__name__}; expected an array")
        return checked.shape

    # ---------------------------------------------------------------- running

    def run(self) -> RoundResult:
        """One round by plain calls; the first one allocates and compiles."""
        with self._workspace:
            self.result = self._stages()
        return self.result

    def capture(self) -> None:
        """Capture the round as a CUDA graph, without running it.

        Raises
        ------
        ValueError
            For host arrays.
        RuntimeError
            Before the first `run`, which allocates and compiles, or if a callable does
            what a graph cannot hold.
        """
        if not self._at.on_device:
            raise ValueError("the round's arrays are host arrays; expected GPU arrays")
        if self.result is None:
            raise RuntimeError("capture before the first run(); expected a round first")

        with cuda.defer_cleanup():  # freeing memory is no part of a graph
            self._replay = _capture(self.run, self._at, self._workspace)

    @property
    def captured(self) -> bool:
        """Whether there is a graph to replay."""
        return self._replay is not None

    def replay(self) -> RoundResult:
        """One round by replaying the captured graph; returns before it is done."""
        if self._replay is None:
            raise RuntimeError("replay before capture(); expected a captured round")
        self._replay()
        assert self.result is not None
        return self.result

    def read(self) -> RoundResult:
        """The last result as NumPy arrays of the caller's own; waits for the round.

        Raises
        ------
        RuntimeError
            Before the first round, or for device arrays without `read_back`.
        """
        if self.result is None or (self._at.on_device and not self._copies):
            raise RuntimeError("read before a round with read_back; expected one")
        if not self._at.on_device:
            return self.result.map(np.copy)
        with self._workspace:
            stream = self._at.stream
        stream.synchronize() if stream else cuda.synchronize()
        copies = iter(self._copies)
        return self.result.map(lambda _: next(copies).copy())

    # ----------------------------------------------------------------- stages

    def _stages(self) -> RoundResult:
        prefix_lens, most = self.prefix_lens, self.max_draft_nodes
        assert most is not None
        at = self._at.executor
        logits = self.draft
        if callable(logits):
            logits = logits(prefix_lens, self.root_tokens)
        k = most if self.k is None else self.k
        log_probs, token_ids = topk(logits, k, executor=at)
        tree = tree_build(
            log_probs,
            token_ids,
            self.n_draft_nodes,
            root_tokens=self.root_tokens,
            max_draft_nodes=most,
            executor=at,
        )
        logits = self.target(tree, prefix_lens)
        if self.choose is None:
            target_tokens = argmax(logits, tree.n_rows, executor=at)
        else:
            target_tokens = self.choose(logits, tree, prefix_lens)
        max_depth = log_probs.shape[1]
        accepted = tree_accept(tree, target_tokens, max_depth=max_depth, executor=at)
        kept = self._kept(accepted.accept_len)
        if self.settle is not None:
            self.settle(accepted.rows, kept, prefix_lens)
        for cache in self.kv_cache:
            new_prefix_lens = kv_compact(
                cache, prefix_lens, accepted.rows, kept, executor=at
            )
        self._advance(new_prefix_lens, accepted.bonus)
        result = RoundResult(tree, target_tokens, accepted)
        if self.read_back and self._at.on_device:
            self._copy_to_host(result)
        return result

    def _kept(self, accept_len: Any) -> Any:
        """Accepted rows that stay: none of a finished request."""
        if self.active is None:
            return accept_len
        at, i32 = self._at, (np.int32,)
        if at.executor == "numpy":
            return np.where(self.active, accept_len, 0).astype(np.int32)
        inputs = (
            at.take(x, name, dtypes=i32)
            for x, name in ((accept_len, "accept_len"), (self.active, "active"))
        )
        kept = at.empty(accept_len.shape, np.int32)
        at.launch(keep_kernel, -(-kept.size // THREADS), THREADS, *inputs, kept)
        return at.give(kept)

    def _advance(self, new_prefix_lens: Any, bonus: Any) -> None:
        """Set the next round's prefix lengths and root tokens, in place."""
        at = self._at
        if at.executor == "numpy":
            self.prefix_lens[:], self.root_tokens[:] = new_prefix_lens, bonus
            return
        states = {
            "new_prefix_lens": new_prefix_lens,
            "bonus": bonus,
            "prefix_lens": self.prefix_lens,
            "root_tokens": self.root_tokens,
        }
        arrays = [at.check(x, name, dtypes=(np.int32,)) for name, x in states.items()]
        grid = -(-arrays[0].size // THREADS)
        at.launch(advance_kernel, grid, THREADS, *arrays)

    def _copy_to_host(self, result: RoundResult) -> None:
        """Queue a copy of every array to page-locked memory."""
        arrays: list[Any] = []
        result.map(lambda x: arrays.append(cuda.as_cuda_array(x, sync=False)))
        if not self._copies:
            self._copies = [cuda.pinned_array(x.shape, x.dtype) for x in arrays]
        for x, copy in zip(arrays, self._copies, strict=True):
            x.copy_to_host(copy, stream=self._at.stream)


def _capture(
    work: Callable[[], Any], at: Place, workspace: Workspace
) -> Callable[[], None]:
    """Capture what `work` queues, and return what queues all of it again."""
    if at.library == "torch":  # its own capture also sets memory aside for the graph
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        return graph.replay

    before = workspace.stream
    try:
        # On a stream of its own: CUDA's default one cannot be captured.
        with _new_stream(at.library) as workspace.stream:
            executable = capture_stream(work, workspace.stream)
    finally:
        workspace.stream = before

    def replay() -> None:
        from cuda.bindings import driver

        with workspace:
            handle = int(at.stream)
        _check(*driver.cuGraphLaunch(executable, handle))

    weakref.finalize(replay, _destroy, executable)
    return replay


@contextmanager
def _new_stream(library: str) -> Iterator[int]:
    """Handle of a new stream, which is the library's current one meanwhile."""
    if library == "cupy":
        import cupy

        with cupy.cuda.Stream() as stream:
            yield stream.ptr
    else:
        numba_stream = cuda.stream()
        yield int(numba_stream)


def capture_stream(work: Callable[[], Any], handle: int) -> Any:
    """Capture what `work` queues on a stream as an executable graph of the driver."""
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    _check(*driver.cuStreamBeginCapture(handle, mode))
    try:
        work()
    except BaseException:
        driver.cuStreamEndCapture(handle)  # the capture is void, the stream is not
        raise
    graph = _check(*driver.cuStreamEndCapture(handle))
    try:
        return _check(*driver.cuGraphInstantiate(graph, 0))
    finally:
        driver.cuGraphDestroy(graph)


def _destroy(executable: Any) -> None:
    from cuda.bindings import driver

    driver.cuGraphExecDestroy(executable)


def _check(status: Any, *results: Any) -> Any:
    """A driver call's result, or its error as an exception."""
    if int(status) != 0:
        raise RuntimeError(
            f"the round could not be captured or replayed: {status.name}; its "
            "callables must neither wait for the device nor use another stream"
        )
    return results[0] if results else None
