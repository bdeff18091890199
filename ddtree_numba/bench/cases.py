"""What is measured: for each row, inputs, launches and a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ddtree_numba import backend
from ddtree_numba.bench import left_out, peers
from ddtree_numba.bench.problems import (
    DRAFTED,
    VOCAB,
    AcceptProblem,
    WrongResult,
    attention_problem,
    attention_work,
    candidates,
    check_candidates,
    check_tree,
    draft_logits,
)
from ddtree_numba.bench.rows import Work
from ddtree_numba.bench.timing import Recorder
from ddtree_numba.kernels import topk as topk_module
from ddtree_numba.kernels import tree_build as tree_build_module
from ddtree_numba.kernels import verify_attn as verify_attn_module
from ddtree_numba.kernels.argmax import argmax
from ddtree_numba.kernels.kv_compact import kv_compact
from ddtree_numba.kernels.topk import topk
from ddtree_numba.kernels.tree_accept import tree_accept
from ddtree_numba.kernels.tree_build import tree_build
from ddtree_numba.kernels.verify_attn import verify_attn
from ddtree_numba.step import Round
from ddtree_numba.tree import DraftTree

ATTENTION_SHAPES = {  # B, N, H, S
    "full": (
        (8, 33, 64, 8192),
        (32, 65, 16, 4096),
        (1, 257, 64, 4096),
        (1, 33, 64, 2048),
        (1, 33, 64, 8192),
        (1, 1, 64, 32768),
        (1, 33, 8, 8192),  # shares of tensor parallelism
        (1, 33, 16, 8192),
    ),
    "quick": ((1, 33, 64, 2048),),
    "tiny": ((1, 5, 8, 96),),
}
TREE_SHAPES = {  # B, n_draft_nodes
    "full": ((1, 32), (1, 64), (1, 256), (1, 1024), (8, 64)),
    "quick": ((1, 64),),
    "tiny": ((1, 4),),
}
SPLIT_SHAPES = {  # B, N, H, S: few row blocks, so that splits must fill the card
    "full": ((1, 33, 64, 2048), (1, 33, 8, 8192), (1, 1, 64, 32768)),
    "quick": ((1, 33, 64, 2048),),
    "tiny": ((1, 5, 8, 96),),
}
LEFT_OUT_SHAPES = {  # B, N, H, S: those whose row tiles are all cut
    "full": ((1, 33, 64, 2048), (1, 1, 64, 32768), (1, 33, 8, 8192), (1, 33, 16, 8192)),
    "quick": ((1, 33, 64, 2048),),
    "tiny": ((1, 1, 64, 2048),),
}
SPLIT_TILE = 32  # keys of a tile of version "mma" on cards with room for it
SPLITS = (1, 2, 4, 8, 16, 32, 64)
LAYERS = {"full": (1, 61), "quick": (61,), "tiny": (1,)}
ROUNDS = {"full": (61, 8192), "quick": (61, 2048), "tiny": (1, 96)}
"""Layers and prefix length of a whole round."""

LOADED = ("mma", "wgmma")
"""Versions of `verify_attn` that heat the card enough to be timed under load too."""
MEMORY_BOUND = 200.0
"""FLOP a byte, under which memory and not arithmetic sets the time."""
COLD_SETS = 64  # at most


class Ready(NamedTuple):
    """A case that was checked: the same launch on one set of inputs or several."""

    launches: Sequence[Callable[[], Any]]
    error: float = 0.0
    library: str = "numba"
    peer: str = ""


@dataclass(frozen=True)
class Case:
    """A row to measure.

    Attributes
    ----------
    stage, version, shape, memory, note : str
        What the row says of itself.
    work : Work
    prepare : callable
        Makes the inputs, launches, checks. Raises `WrongResult` if the result is wrong,
        and what a wrapper or a missing peer raises.
    loaded : bool
        Whether to time it under load too.
    """

    stage: str
    version: str
    shape: str
    work: Work
    prepare: Callable[[Recorder], Ready]
    memory: str = "warm"
    loaded: bool = False
    note: str = ""


def cases(stages: Sequence[str], shapes: str, with_peers: bool) -> Iterator[Case]:
    """The rows of a run, ceilings first.

    Parameters
    ----------
    stages : sequence of str
        Some of `ddtree_numba.bench.STAGES`.
    shapes : {"full", "quick", "tiny"}
    with_peers : bool
        Whether to measure what others run, too.
    """
    yield from _ceilings(8192 if shapes != "tiny" else 256)
    if "verify_attn" in stages:
        for shape in ATTENTION_SHAPES[shapes]:
            yield from _attention(shape, with_peers)
    if "splits" in stages:
        for shape in SPLIT_SHAPES[shapes]:
            yield from _splits(shape)
    if "logits_to_tree" in stages:
        for batch, n_draft_nodes in TREE_SHAPES[shapes]:
            yield from _logits_to_tree(batch, n_draft_nodes, with_peers)
    if "after_target" in stages:
        for layers in LAYERS[shapes]:
            yield from _after_target(layers)
    if "round" in stages:
        yield from _rounds(*ROUNDS[shapes])
    if "single" in stages:
        for batch, n_draft_nodes in TREE_SHAPES[shapes]:
            yield from _single_tree_stages(batch, n_draft_nodes)
        yield from _single_target_stages(LAYERS[shapes][-1])


def left_out_cases(shapes: str) -> Iterator[Case]:
    """The rows of `ddtree_numba.bench.bench_left_out`: shape by shape, the whole first.

    No work is counted: a kernel that leaves some out has no rate to compare.
    """
    for shape in LEFT_OUT_SHAPES[shapes]:
        for variant in left_out.VARIANTS:
            prepare = partial(_left_out, shape, variant)
            yield Case("left_out", variant, _shape_name(shape), Work(), prepare)


# ---------------------------------------------------------------------------- ceilings


def _ceilings(side: int) -> Iterator[Case]:
    nbytes = 16 * side * side  # 1 GiB: many times the second-level cache
    yield Case(
        *("ceiling", "copy", f"{nbytes >> 20} MiB", Work(nbytes=2 * nbytes)),
        partial(_copy, nbytes),
        memory="cold",
        loaded=True,
        note="bytes read plus bytes written",
    )
    yield Case(
        *("ceiling", "matmul", f"({side},{side},{side}) bf16", Work(2.0 * side**3)),
        partial(_matmul, side),
        loaded=True,
    )


def _copy(nbytes: int, recorder: Recorder) -> Ready:
    from cuda.bindings import driver

    numbers = np.arange(nbytes // 8)
    source = cuda.to_device(numbers)
    target = cuda.device_array_like(source)
    stream = driver.CUstream(int(recorder.stream.handle))
    addresses = [int(x.device_ctypes_pointer.value) for x in (target, source)]

    def launch() -> tuple:
        driver.cuMemcpyDtoDAsync(*addresses, nbytes, stream)
        return target, source  # alive as long as the launch

    launch()
    recorder.stream.synchronize()
    if not np.array_equal(target.copy_to_host(), numbers):
        raise WrongResult("the copy is not equal to its source")
    # In a graph the driver copies blocks of this size at two thirds of the rate.
    return Ready([launch], library="driver")


def _matmul(side: int, recorder: Recorder) -> Ready:
    try:
        import torch
    except ImportError:
        return _matmul_of_cupy(side, recorder)
    a, b = (
        torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    out = torch.empty_like(a)
    launch = partial(torch.mm, a, b, out=out)
    launch()
    want = a[:4].double() @ b.double()
    error = (out[:4].double() - want).abs().max().item()
    if not error <= 0.01 * want.abs().max().item():
        raise WrongResult(f"max absolute error {error:.2e}")
    return Ready([launch], error, "torch", f"torch {torch.__version__}")


def _matmul_of_cupy(side: int, recorder: Recorder) -> Ready:
    """The same in float16, which runs at the same rate; CuPy knows no bf16."""
    import cupy

    a, b = (cupy.random.standard_normal((side, side), np.float32) for _ in range(2))
    a, b = a.astype(np.float16), b.astype(np.float16)
    out = cupy.empty_like(a)
    stream = cupy.cuda.ExternalStream(int(recorder.stream.handle))

    def launch() -> None:
        with stream:
            cupy.matmul(a, b, out=out)

    launch()
    recorder.stream.synchronize()
    want = a[:4].astype(np.float64) @ b.astype(np.float64)
    error = float(abs(out[:4] - want).max())
    if not error <= 0.01 * float(abs(want).max()):
        raise WrongResult(f"max absolute error {error:.2e}")
    return Ready([launch], error, "driver", f"cupy {cupy.__version__}, float16")


# --------------------------------------------------------------------- running wrappers


def _sets(count: int, *arrays: np.ndarray) -> list[list[Any]]:
    """Copies of host arrays on the GPU, at addresses of their own."""
    return [[cuda.to_device(x) for x in arrays] for _ in range(count)]


def cold_sets(nbytes: float) -> int:
    """How many sets in turn make three times what the second-level cache holds."""
    cache = cuda.get_current_device().L2_CACHE_SIZE
    return int(np.clip(np.ceil(3 * cache / nbytes), 1, COLD_SETS))


def _results(
    launch: Callable[[], Sequence[Any]],
    recorder: Recorder,
    restore: Callable[[], None] = lambda: None,
) -> list[np.ndarray]:
    """What a launch writes, on the host.

    It runs twice, on the same arrays: in between they are overwritten, so that what the
    launch leaves out does not look right by chance.
    """
    outputs = launch()
    recorder.stream.synchronize()
    for x in outputs:
        poison = np.nan if x.dtype.kind == "f" else 0x5A5A5A5A
        x.copy_to_device(np.full(x.shape, poison, x.dtype))
    restore()
    launch()
    recorder.stream.synchronize()
    return [x.copy_to_host() for x in outputs]


def _in_workspace(recorder: Recorder, run: Callable, sets: Sequence[Any]) -> list:
    """A launch for each set; they share the arrays that the stages allocate."""
    workspace = recorder.workspace()

    def launch(arrays: Sequence[Any]) -> Any:
        with workspace:
            return run(*arrays)

    return [partial(launch, arrays) for arrays in sets]


# -------------------------------------------------------------------------- verify_attn


def _attention(shape: tuple[int, int, int, int], with_peers: bool) -> Iterator[Case]:
    name, work = _shape_name(shape), attention_work(shape)
    memory_bound = work.flop < MEMORY_BOUND * work.nbytes
    for memory in ("warm", "cold") if memory_bound else ("warm",):
        for label, options in _attention_versions():
            prepare = partial(_own_attention, shape, options, memory)
            loaded = label in LOADED and memory == "warm"
            yield Case("verify_attn", label, name, work, prepare, memory, loaded)
        for peer in peers.ATTENTION if with_peers else ():
            prepare = partial(_peer_attention, shape, peer, memory)
            yield Case(
                *("verify_attn", peer.name, name, work, prepare, memory),
                *(peer.loaded and memory == "warm", peer.note),
            )


def _splits(shape: tuple[int, int, int, int]) -> Iterator[Case]:
    """One version with its keys cut in more and more splits."""
    name = _shape_name(shape)
    tiles = -(-(shape[1] + shape[3]) // SPLIT_TILE)
    for n_splits in (n for n in SPLITS if n <= tiles):
        options = {"version": "mma", "n_splits": n_splits}
        prepare = partial(_own_attention, shape, options, "warm")
        label = f"mma, {n_splits} splits"
        yield Case("splits", label, name, attention_work(shape), prepare)


def _shape_name(shape: tuple[int, int, int, int]) -> str:
    return f"({','.join(map(str, shape))}) bf16"


def _attention_versions() -> list[tuple[str, dict[str, Any]]]:
    """Every version of `verify_attn`, with what its call takes."""
    versions: list[tuple[str, dict[str, Any]]] = [
        (version, {"version": version})
        for version in verify_attn_module.VERSIONS
        if version != "auto"
    ]
    exact = {"version": "wgmma", "exact_max": True}
    return [*versions, ("wgmma, exact max", exact)]


def _own_attention(
    shape: tuple[int, int, int, int],
    options: dict[str, Any],
    memory: str,
    recorder: Recorder,
    *,
    attend: Callable = verify_attn,
    checked: bool = True,
) -> Ready:
    problem = attention_problem(shape)
    lens = np.full(shape[0], problem.prefix_len, np.int32)
    host = (problem.q, problem.kv_cache, lens, problem.visibility)
    count = cold_sets(problem.kv_cache.nbytes) if memory == "cold" else 1
    options = {**options, "sm_scale": problem.sm_scale, "d_latent": problem.d_latent}
    run = partial(attend, **options)
    launches = _in_workspace(recorder, run, _sets(count, *host))
    error = problem.check(*_results(launches[0], recorder)) if checked else np.nan
    return Ready(launches, error)


def _left_out(
    shape: tuple[int, int, int, int], variant: str, recorder: Recorder
) -> Ready:
    def attend(*inputs: Any, **options: Any) -> Any:
        with left_out.in_place(variant):
            return verify_attn(*inputs, **options)

    return _own_attention(
        shape, {"version": "wgmma"}, "warm", recorder, attend=attend,
        checked=variant == left_out.WHOLE,  # others are wrong on purpose
    )  # fmt: skip


def _peer_attention(
    shape: tuple[int, int, int, int], peer: peers.Peer, memory: str, recorder: Recorder
) -> Ready:
    peer_version = peer.version()
    problem = attention_problem(shape)
    if not peer.takes_trees:
        problem = problem.with_chain
    count = cold_sets(problem.kv_cache.nbytes) if memory == "cold" else 1
    prepared = [peer.prepare(problem) for _ in range(count)]
    for one in prepared:
        one.launch()
    error = problem.check(prepared[0].out(), exact=False)
    return Ready([one.launch for one in prepared], error, "torch", peer_version)


# ----------------------------------------------------------------------- logits to tree


def _logits_to_tree(batch: int, n_draft_nodes: int, with_peers: bool) -> Iterator[Case]:
    for dtype in ("bf16", "f32"):
        name = f"({batch},{DRAFTED},{VOCAB}) {dtype}, M={n_draft_nodes}"
        nbytes = batch * DRAFTED * VOCAB * (2 if dtype == "bf16" else 4)
        # As the drafter's product leaves them; and as if they had left the cache since.
        for memory in ("warm", "cold") if dtype == "bf16" else ("warm",):
            prepare = partial(_own_tree, batch, dtype, n_draft_nodes, memory)
            yield Case(
                *("logits_to_tree", "auto", name, Work(nbytes=nbytes), prepare, memory),
                loaded=(dtype, memory) == ("bf16", "warm"),
                note="topk, tree_build",
            )
        if with_peers and dtype == "bf16":
            yield Case(
                *("logits_to_tree", "torch + heapq", name, Work(nbytes=nbytes)),
                partial(_heap_tree, batch, n_draft_nodes),
                note="torch.topk, copy to the host, heapq, mask to the GPU",
            )


def _own_tree(
    batch: int, dtype: str, n_draft_nodes: int, memory: str, recorder: Recorder
) -> Ready:
    logits = draft_logits(batch, dtype)

    def run(logits: Any) -> list[Any]:
        found = topk(logits, n_draft_nodes)
        return [*found, *vars(tree_build(*found, n_draft_nodes)).values()]

    count = cold_sets(logits.nbytes) if memory == "cold" else 1
    launches = _in_workspace(recorder, run, _sets(count, logits))
    log_probs, token_ids, *fields = _results(launches[0], recorder)
    error = check_candidates(batch, dtype, log_probs, token_ids)
    check_tree(DraftTree(*fields), log_probs, token_ids, n_draft_nodes)
    return Ready(launches, error)


def _heap_tree(batch: int, n_draft_nodes: int, recorder: Recorder) -> Ready:
    import torch

    logits = peers.bf16_tensor(draft_logits(batch, "bf16"))

    def run() -> list[peers.HeapTree]:
        trees = peers.heap_trees(logits, n_draft_nodes)
        torch.cuda.synchronize()
        return trees

    found = candidates(batch, "bf16", n_draft_nodes)
    for tree, log_probs, token_ids in zip(run(), *found, strict=True):
        want = peers.heap_tree(log_probs, token_ids, n_draft_nodes).log_probs
        # Which of equal logits torch.topk gives is not said; their scores are the same.
        error = np.abs(np.sort(tree.log_probs) - np.sort(want)).max()
        if not error < 1e-4:
            raise WrongResult(f"max absolute error of the tree's log_probs {error:.2e}")
    return Ready([run], float(error), "host", f"torch {torch.__version__}")


# ------------------------------------------------------------------- after the target


def _accept_arrays(problem: AcceptProblem) -> tuple[DraftTree, Any, Any, Any]:
    """Tree, target tokens, cache and prefix lengths on the GPU."""
    tree = {name: cuda.to_device(x) for name, x in vars(problem.tree).items()}
    rest = (problem.choices, problem.cache, problem.prefix_lens)
    choices, cache, prefix_lens = (cuda.to_device(x) for x in rest)
    return DraftTree(**tree), choices, cache, prefix_lens


def _after_target(layers: int) -> Iterator[Case]:
    n_draft_nodes = 32
    name = f"N={n_draft_nodes + 1}, V={VOCAB}, {layers} layers"
    nbytes = 2.0 * (n_draft_nodes + 1) * VOCAB  # what is moved is little beside it
    for memory in ("warm", "cold"):
        prepare = partial(_own_after_target, n_draft_nodes, layers, memory)
        yield Case(
            *("after_target", "auto", name, Work(nbytes=nbytes), prepare, memory),
            loaded=memory == "warm",
            note="argmax, tree_accept, kv_compact",
        )


def _own_after_target(
    n_draft_nodes: int, layers: int, memory: str, recorder: Recorder
) -> Ready:
    problem = AcceptProblem(1, n_draft_nodes, layers, 2048)
    tree, _, cache, prefix_lens = _accept_arrays(problem)
    logits = problem.logits()

    def run(logits: Any) -> list[Any]:
        tokens = argmax(logits)
        accepted = tree_accept(tree, tokens, max_depth=DRAFTED)
        lens = kv_compact(cache, prefix_lens, accepted.rows, accepted.accept_len)
        return [tokens, *accepted, lens]

    count = cold_sets(logits.nbytes) if memory == "cold" else 1
    launches = _in_workspace(recorder, run, _sets(count, logits))
    restore = partial(cache.copy_to_device, problem.cache)
    tokens, *accepted, lens = _results(launches[0], recorder, restore)
    _expect(tokens, problem.choices, "argmax")
    for name, got in zip(problem.accepted._fields, accepted, strict=True):
        _expect(got, getattr(problem.accepted, name), name)
    _expect(lens, problem.prefix_lens + problem.accepted.accept_len, "prefix_lens")
    _expect(cache.copy_to_host(), problem.compacted(), "the cache")
    return Ready(launches)


def _expect(got: np.ndarray, want: np.ndarray, name: str) -> None:
    if not np.array_equal(got, want):
        raise WrongResult(f"{name} differs from the reference's")


# --------------------------------------------------------------------------- the round


def _rounds(layers: int, prefix: int) -> Iterator[Case]:
    """A whole round without the model's products: what the stages cost together."""
    n, heads = 33, 64
    logits = 2.0 * VOCAB * (DRAFTED + n)
    attention = attention_work((1, n, heads, prefix))
    parts = {
        "without attention": Work(nbytes=logits),
        "with attention": Work(
            layers * attention.flop, logits + layers * attention.nbytes
        ),
    }
    for version, work in parts.items():
        yield Case(
            *("round", version, f"N={n}, H={heads}, S={prefix}, {layers} layers", work),
            partial(_own_round, n, heads, layers, prefix, bool(work.flop)),
            loaded=True,
            note="the logits of drafter and target are given",
        )


def _own_round(
    n: int, heads: int, layers: int, prefix: int, attends: bool, recorder: Recorder
) -> Ready:
    problem = AcceptProblem(1, n - 1, layers, prefix)
    _, _, cache, prefix_lens = _accept_arrays(problem)
    queries = attention_problem((1, n, heads, prefix))
    host_arrays = (draft_logits(1, "bf16"), problem.logits(), queries.q)
    drafted, scored, q = (cuda.to_device(x) for x in host_arrays)
    attend = partial(verify_attn, sm_scale=queries.sm_scale, d_latent=queries.d_latent)

    def draft(prefix_lens: Any, root_tokens: Any) -> Any:
        # Every round starts where the first did, or the cache would fill up.
        at, start = backend.place(prefix_lens=prefix_lens), np.int32(prefix)
        at.launch(backend.fill_kernel, 1, backend.FILL_THREADS, start, prefix_lens)
        return drafted

    attended: dict[int, Any] = {}  # by layer; every round writes the same arrays

    def target(tree: DraftTree, prefix_lens: Any) -> Any:
        for layer in range(layers if attends else 0):
            attended[layer] = attend(q, cache[layer], prefix_lens, tree.visibility)
        return scored

    first_root = np.full(1, -1, np.int32)
    roots, stream = cuda.to_device(first_root), int(recorder.stream.handle)
    step = Round(draft, target, cache, prefix_lens, roots, n - 1, stream=stream)
    # Not every layer: a reference in float64 takes most of a second.
    checked = {0, layers - 1} if attends else set()

    def launch() -> list[Any]:
        arrays = step.run().arrays()
        return [*arrays, *(x for layer in checked for x in attended[layer])]

    def restore() -> None:
        roots.copy_to_device(first_root)
        cache.copy_to_device(problem.cache)

    _results(launch, recorder, restore)
    _check_round(step.result, cache, problem)
    error = 0.0
    for layer in checked:
        got = (x.copy_to_host() for x in attended[layer])
        error = max(error, problem.attention(queries, layer).check(*got))
    return Ready([step.run], error)


def _check_round(result: Any, cache: Any, problem: AcceptProblem) -> None:
    """Raise WrongResult unless a round ended as the reference's does."""
    result = result.map(lambda x: x.copy_to_host())
    for name, want in vars(problem.tree).items():
        if name != "log_probs":  # float32, near the reference's
            _expect(getattr(result.tree, name), want, name)
    for name, got in result.accepted._asdict().items():
        _expect(got, getattr(problem.accepted, name), name)
    _expect(cache.copy_to_host(), problem.compacted(), "the cache")


# ------------------------------------------------------------------------ single stages


def _single_tree_stages(batch: int, n_draft_nodes: int) -> Iterator[Case]:
    for version in topk_module.VERSIONS[1:]:
        name = f"({batch},{DRAFTED},{VOCAB}) bf16, k={n_draft_nodes}"
        work = Work(nbytes=2.0 * batch * DRAFTED * VOCAB)
        yield Case(
            "topk",
            version,
            name,
            work,
            partial(_own_topk, batch, n_draft_nodes, version),
        )
    for version in tree_build_module.VERSIONS[1:]:
        if version == "small" and n_draft_nodes > tree_build_module.SMALL:
            continue
        yield Case(
            "tree_build",
            version,
            f"B={batch}, M={n_draft_nodes}",
            Work(),
            partial(_own_tree_build, batch, n_draft_nodes, version),
        )
    yield Case(
        "tree_accept",
        "auto",
        f"B={batch}, M={n_draft_nodes}",
        Work(),
        partial(_own_accept, batch, n_draft_nodes),
    )


def _own_topk(batch: int, k: int, version: str, recorder: Recorder) -> Ready:
    sets = _sets(1, draft_logits(batch, "bf16"))
    launches = _in_workspace(recorder, partial(topk, k=k, version=version), sets)
    error = check_candidates(batch, "bf16", *_results(launches[0], recorder))
    return Ready(launches, error)


def _own_tree_build(batch: int, m: int, version: str, recorder: Recorder) -> Ready:
    found = candidates(batch, "bf16", m)

    def run(log_probs: Any, token_ids: Any) -> list[Any]:
        return list(vars(tree_build(log_probs, token_ids, m, version=version)).values())

    launches = _in_workspace(recorder, run, _sets(1, *found))
    check_tree(DraftTree(*_results(launches[0], recorder)), *found, m)
    return Ready(launches)


def _own_accept(batch: int, n_draft_nodes: int, recorder: Recorder) -> Ready:
    problem = AcceptProblem(batch, n_draft_nodes, 1, 0)
    tree, choices, *_ = _accept_arrays(problem)
    run = partial(tree_accept, tree, choices, max_depth=DRAFTED)
    launches = _in_workspace(recorder, run, [()])
    for got, want in zip(
        _results(launches[0], recorder), problem.accepted, strict=True
    ):
        _expect(got, want, "what is accepted")
    return Ready(launches)


def _single_target_stages(layers: int) -> Iterator[Case]:
    n = 33
    yield Case(
        "argmax",
        "auto",
        f"(1,{n},{VOCAB}) bf16",
        Work(nbytes=2.0 * n * VOCAB),
        partial(_own_argmax, n),
    )
    yield Case(
        "kv_compact",
        "auto",
        f"N={n}, {layers} layers, bf16",
        Work(),
        partial(_own_compact, n, layers),
    )


def _own_argmax(n: int, recorder: Recorder) -> Ready:
    problem = AcceptProblem(1, n - 1, 1, 0)
    launches = _in_workspace(
        recorder, lambda x: [argmax(x)], _sets(1, problem.logits())
    )
    _expect(_results(launches[0], recorder)[0], problem.choices, "argmax")
    return Ready(launches)


def _own_compact(n: int, layers: int, recorder: Recorder) -> Ready:
    problem = AcceptProblem(1, n - 1, layers, 2048)
    _, _, cache, prefix_lens = _accept_arrays(problem)
    found = [cuda.to_device(x) for x in problem.accepted[:2]]
    launches = _in_workspace(
        recorder, lambda: [kv_compact(cache, prefix_lens, *found)], [()]
    )
    _results(launches[0], recorder, partial(cache.copy_to_device, problem.cache))
    _expect(cache.copy_to_host(), problem.compacted(), "the cache")
    return Ready(launches)
