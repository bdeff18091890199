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
from numbers import Real
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba.backend import (
    Place,
    Workspace,
    check_writeable,
    place,
    whole_number,
)
from ddtree_numba.kernels.argmax import argmax
from ddtree_numba.kernels.kv_compact import kv_compact
from ddtree_numba.kernels.topk import topk
from ddtree_numba.kernels.tree_accept import tree_accept
from ddtree_numba.kernels.tree_build import MAX_DRAFT_NODES, tree_build
from ddtree_numba.reference import Accepted
from ddtree_numba.tree import DraftTree

THREADS = 32
LOGITS = (np.float32, np.float16, np.uint16)  # the last: bf16 bits


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

    def arrays(self) -> list[Any]:
        """All of its arrays, in the order of the fields."""
        return [*vars(self.tree).values(), self.target_tokens, *self.accepted]


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
        As `kv_compact` takes them. A tree needs room: ``prefix_lens[b] + n_rows[b]`` up
        to S_max.
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
        For arrays of the wrong dtype, shape or side, or read-only ones; for counts
        outside their range, or a missing `max_draft_nodes`; for something that is not
        callable. From `run`, for logits of another shape, dtype or side, and (host
        arrays) a tree that the caches have no room for.

    Notes
    -----
    A round that ends with an error leaves prefix lengths and root tokens as they were:
    mend what was wrong, and run it again.

    Device arrays are not looked at. There the caller ends before the caches are full:
    `kv_compact` stops at the last row.

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
    _copies: RoundResult | None = field(default=None, init=False, repr=False)
    _replay: Callable[[], None] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("target", "choose", "settle"):
            x = getattr(self, name)
            if not callable(x) and (x is not None or name == "target"):
                raise TypeError(f"{name} is a {type(x).__name__}; expected a callable")
        budgets = self._check_counts()
        if isinstance(self.kv_cache, list | tuple):
            caches = {f"kv_cache[{i}]": x for i, x in enumerate(self.kv_cache)}
        else:
            caches = {"kv_cache": self.kv_cache}
        if not caches:
            raise ValueError("kv_cache is empty; expected an array of every layer")
        states = {"prefix_lens": self.prefix_lens, "root_tokens": self.root_tokens}
        inputs = {"active": self.active, "n_draft_nodes": budgets}
        at = self._at = self._place(**caches, **states, **inputs)
        self._workspace = Workspace(self.stream)

        i32 = (np.int32,)
        (batch,) = at.check(self.prefix_lens, "prefix_lens", dtypes=i32, ndim=1).shape
        if batch == 0:
            raise ValueError("prefix_lens is empty; expected a request or more")
        for name, x in (states | inputs).items():
            if x is not None:
                at.check(x, name, dtypes=i32, shape=(batch,))
        for name, x in (states | caches).items():
            check_writeable(x, name)
        self._room = min(self._rows(name, x, batch) for name, x in caches.items())
        self.kv_cache = list(caches.values())

    def _place(self, **arrays: Any) -> Place:
        """Where the rounds run: where the arrays lie."""
        at = place(self.executor, default="numpy", **arrays)
        if at.executor == "gpu" and not at.on_device:
            raise ValueError(
                "executor is 'gpu', but the round's arrays are on the host; expected "
                "GPU arrays"
            )
        if self.stream and at.library in ("torch", "cupy"):
            raise ValueError(
                f"stream is {self.stream}, but the arrays are {at.library}'s; expected "
                "0, and the stream to be the library's current one"
            )
        return at

    def _check_counts(self) -> Any:
        """Check the counts, set those omitted, and return budgets if an array."""
        budgets = self.n_draft_nodes
        if budgets is None or isinstance(budgets, Real | str):
            most = whole_number(budgets, "n_draft_nodes", most=MAX_DRAFT_NODES)
            budgets = None
        elif self.max_draft_nodes is None:
            raise ValueError(
                "max_draft_nodes is None, but n_draft_nodes is an array; expected an "
                "int"
            )
        else:
            most = 0
        if self.max_draft_nodes is None:
            self.max_draft_nodes = most
        whole_number(
            self.max_draft_nodes, "max_draft_nodes", least=most, most=MAX_DRAFT_NODES
        )
        self.k = self.max_draft_nodes if self.k is None else whole_number(self.k, "k")
        return budgets

    def _rows(self, name: str, cache: Any, batch: int) -> int:
        """Rows that a cache has for each request of the batch."""
        shape = self._at.check(cache, name, dtypes=None).shape
        if len(shape) not in (3, 4) or shape[-3] != batch:
            raise ValueError(
                f"{name} has shape {shape}; expected ({batch}, S_max, D) or (layers, "
                f"{batch}, S_max, D), as prefix_lens says"
            )
        return shape[-2]

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
        found = self._copies if self._at.on_device else self.result
        if found is None:
            raise RuntimeError("read before a round with read_back; expected one")
        if self._at.on_device:
            with self._workspace:
                stream = self._at.stream
            stream.synchronize() if stream else cuda.synchronize()
        return found.map(np.copy)

    # ----------------------------------------------------------------- stages

    def _stages(self) -> RoundResult:
        prefix_lens, executor = self.prefix_lens, self._at.executor
        logits = self.draft
        if callable(logits):
            logits = logits(prefix_lens, self.root_tokens)
        self._check_logits(logits, "draft", None)
        assert self.k is not None
        log_probs, token_ids = topk(logits, self.k, executor=executor)
        tree = tree_build(
            log_probs,
            token_ids,
            self.n_draft_nodes,
            root_tokens=self.root_tokens,
            max_draft_nodes=self.max_draft_nodes,
            executor=executor,
        )
        self._check_room(tree)
        logits = self.target(tree, prefix_lens)
        if self.choose is None:
            self._check_logits(logits, "target", tree.token_ids.shape[1])
            target_tokens = argmax(logits, tree.n_rows, executor=executor)
        else:
            target_tokens = self.choose(logits, tree, prefix_lens)
        depth = log_probs.shape[1]
        accepted = tree_accept(tree, target_tokens, max_depth=depth, executor=executor)
        kept = self._kept(accepted.accept_len)
        if self.settle is not None:
            self.settle(accepted.rows, kept, prefix_lens)
        for cache in self.kv_cache:
            new_prefix_lens = kv_compact(
                cache, prefix_lens, accepted.rows, kept, executor=executor
            )
        self._advance(new_prefix_lens, accepted.bonus)
        result = RoundResult(tree, target_tokens, accepted)
        if self.read_back and self._at.on_device:
            self._copy_to_host(result)
        return result

    def _check_logits(self, logits: Any, whose: str, rows: int | None) -> None:
        """Raise, naming whose they are, unless the stages take these logits."""
        name, batch = f"{whose}'s logits", self.prefix_lens.shape[0]
        place(self.executor, **{name: logits, "prefix_lens": self.prefix_lens})
        self._at.check(logits, name, dtypes=LOGITS, shape=(batch, rows, None))

    def _check_room(self, tree: DraftTree) -> None:
        """Raise if a tree's rows would not lie in the caches."""
        if self._at.on_device:
            return
        left = self._room - self.prefix_lens
        bad = (self.prefix_lens < 0) | (left < tree.n_rows)
        if bad.any():
            b = int(np.argmax(bad))
            raise ValueError(
                f"prefix_lens, request {b} is {self.prefix_lens[b]} and its tree has "
                f"{tree.n_rows[b]} rows; expected 0 or more, and together up to "
                f"{self._room}, the cache's rows"
            )

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
        placed = result.map(lambda x: cuda.as_cuda_array(x, sync=False))
        if self._copies is None:
            self._copies = placed.map(lambda x: cuda.pinned_array(x.shape, x.dtype))
        for x, copy in zip(placed.arrays(), self._copies.arrays(), strict=True):
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
