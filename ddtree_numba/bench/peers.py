"""What others run for the same work: adapters of a few lines, for `bench`.

Each makes its inputs from the same host arrays, launches on torch's current stream and
tells its result. A peer that cannot be imported is skipped, and its row says why.

============== ======================================================================
torch          cuBLAS products and a softmax, unfused, with the tree's mask
FlashInfer     ``BatchMLAPagedAttentionWrapper``, fa2 and fa3: causal, it takes no tree
SGLang         Triton's ``extend_attention_fwd`` with the tree's mask
torch + heapq  the tree as the DDTree authors build it: top-k, copy to the host, a heap
============== ======================================================================
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.bench.problems import PAGE, AttentionProblem


class Prepared(NamedTuple):
    """A peer's launch on torch's current stream, and where its result then lies."""

    launch: Callable[[], None]
    out: Callable[[], np.ndarray]  # float32 [B, N, H, Dc]


class Peer(NamedTuple):
    """An attention kernel of others."""

    name: str
    note: str
    takes_trees: bool
    loaded: bool
    """Whether it heats the card enough to be timed under load too."""
    version: Callable[[], str]
    """Its version; raises where it cannot be imported."""
    prepare: Callable[[AttentionProblem], Prepared]
    """For a problem whose trees are chains, if it takes no others."""


def bf16_tensor(bits: np.ndarray) -> Any:
    """bf16 bits as a torch tensor on the GPU; NaN in padding becomes 0.

    A peer may multiply what it masks, and 0 · NaN is NaN.
    """
    import torch

    tensor = torch.from_numpy(bits.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.nan_to_num_(tensor)


# -------------------------------------------------------------------------- attention


def _torch_unfused(problem: AttentionProblem) -> Prepared:
    import torch

    batch, n, heads, d = problem.q.shape
    prefix, d_latent = problem.prefix_len, problem.d_latent
    q = bf16_tensor(problem.q).view(batch, n * heads, d)
    keys = bf16_tensor(problem.kv_cache)
    room = keys.shape[1]  # whole pages: rows that start aligned, as cuBLAS likes them
    scores = torch.empty(batch, n * heads, room, dtype=q.dtype, device="cuda")
    tail = scores.view(batch, n, heads, room)[..., prefix:]
    hidden = np.ones((batch, n, 1, room - prefix), bool)
    hidden[..., :n] = ~problem.sees()[:, :, None]
    hidden = torch.from_numpy(hidden).cuda()
    out = torch.empty(batch, n * heads, d_latent, dtype=q.dtype, device="cuda")

    def launch() -> None:
        scale = problem.sm_scale
        torch.baddbmm(scores, q, keys.mT, beta=0, alpha=scale, out=scores)
        tail.masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        torch.bmm(weights, keys[..., :d_latent], out=out)

    return Prepared(launch, lambda: _on_host(out, problem))


def _flashinfer(backend: str) -> Callable[[AttentionProblem], Prepared]:
    def prepare(problem: AttentionProblem) -> Prepared:
        import torch
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        batch, n, heads, d = problem.q.shape
        d_latent = problem.d_latent
        q = bf16_tensor(problem.q).view(batch * n, heads, d)
        pages = bf16_tensor(problem.kv_cache).view(-1, PAGE, d)
        per_request = problem.kv_cache.shape[1] // PAGE
        steps = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        lengths = torch.full_like(steps[1:], problem.prefix_len + n)
        workspace = torch.empty(2**28, dtype=torch.uint8, device="cuda")
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        wrapper.plan(
            steps * n,
            steps * per_request,
            torch.arange(len(pages), dtype=torch.int32, device="cuda"),
            lengths,
            heads,
            d_latent,
            d - d_latent,
            PAGE,
            True,  # causal
            problem.sm_scale,
            q.dtype,
            q.dtype,
        )
        parts = [x.contiguous() for x in (q[..., :d_latent], q[..., d_latent:])]
        parts += [
            x.contiguous() for x in (pages[..., :d_latent], pages[..., d_latent:])
        ]
        out, lse = torch.empty_like(parts[0]), torch.empty(q.shape[:2], device="cuda")

        def launch() -> None:
            wrapper.run(*parts, out=out, lse=lse, return_lse=True)

        return Prepared(launch, lambda: _on_host(out, problem))

    return prepare


def _sglang(problem: AttentionProblem) -> Prepared:
    import torch
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    batch, n, heads, d = problem.q.shape
    prefix, d_latent = problem.prefix_len, problem.d_latent
    q = bf16_tensor(problem.q).view(batch * n, heads, d)
    cache = bf16_tensor(problem.kv_cache)
    before = cache[:, :prefix].reshape(-1, 1, d)
    tail = cache[:, prefix : prefix + n].reshape(-1, 1, d)
    # int32 throughout: up to a third faster than int64.
    steps = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    slots = torch.arange(batch * prefix, dtype=torch.int32, device="cuda")
    mask = np.ones((batch, n, prefix + n), np.uint8)
    mask[:, :, prefix:] = problem.sees()
    mask = torch.from_numpy(mask.reshape(-1)).cuda()
    out = torch.empty(batch * n, heads, d_latent, dtype=q.dtype, device="cuda")
    lse = torch.empty(batch * n, heads, device="cuda")
    queries = (q, tail, tail[..., :d_latent], out, before, before[..., :d_latent])
    spans = (steps * n, steps * prefix, slots)
    # custom_mask, is_causal, mask_indptr, max_len_extend, k_scale, v_scale
    masks = (mask, True, steps * (n * (prefix + n)), n, 1.0, 1.0)
    scale = problem.sm_scale

    def launch() -> None:
        extend_attention_fwd(*queries, *spans, *masks, sm_scale=scale, lse_extend=lse)

    return Prepared(launch, lambda: _on_host(out, problem))


def _on_host(out: Any, problem: AttentionProblem) -> np.ndarray:
    batch, n, heads, _ = problem.q.shape
    return out.float().cpu().numpy().reshape(batch, n, heads, problem.d_latent)


def _torch_version() -> str:
    import torch

    return f"torch {torch.__version__}"


def _flashinfer_version() -> str:
    import flashinfer.mla

    return f"flashinfer-python {flashinfer.__version__}"


def _sglang_version() -> str:
    import sglang
    import sglang.kernels.ops.attention.extend_attention
    import triton

    return f"sglang {sglang.__version__}, triton {triton.__version__}"


TREE, CAUSAL = "the tree's mask", "causal: takes no tree"
ATTENTION = (
    Peer(
        "torch unfused",
        f"{TREE}; scores rounded to bf16",
        takes_trees=True,
        loaded=False,
        version=_torch_version,
        prepare=_torch_unfused,
    ),
    Peer(
        "SGLang Triton",
        TREE,
        takes_trees=True,
        loaded=False,
        version=_sglang_version,
        prepare=_sglang,
    ),
    Peer(
        "FlashInfer fa2",
        CAUSAL,
        takes_trees=False,
        loaded=False,
        version=_flashinfer_version,
        prepare=_flashinfer("fa2"),
    ),
    Peer(
        "FlashInfer fa3",
        CAUSAL,
        takes_trees=False,
        loaded=True,
        version=_flashinfer_version,
        prepare=_flashinfer("fa3"),
    ),
)


# -------------------------------------------------------------------------------- tree


class HeapTree(NamedTuple):
    """One tree as the heap leaves it; rows in selection order, the root first."""

    token_ids: list[int]
    parents: list[int]
    depths: list[int]
    log_probs: list[float]
    visibility: np.ndarray  # bool [N, N]


def heap_tree(
    log_probs: np.ndarray, token_ids: np.ndarray, n_draft_nodes: int
) -> HeapTree:
    """The most probable prefixes by best-first search on the host.

    A popped prefix opens two others: its last token's next best sibling, and its own
    best child. Ties go to the lower rank path, so the tree is `reference.tree_build`'s.

    Parameters
    ----------
    log_probs, token_ids : [L, K]
        As from `topk`, for one request.
    n_draft_nodes : int
    """
    scores, tokens = log_probs.tolist(), token_ids.tolist()
    tree = HeapTree([-1], [-1], [0], [0.0], np.zeros(0, bool))
    # cost, rank path, parent's row
    heap: list[tuple[float, tuple[int, ...], int]] = [(-scores[0][0], (0,), 0)]
    while heap and len(tree.parents) <= n_draft_nodes:
        cost, ranks, parent = heapq.heappop(heap)
        depth, rank, row = len(ranks), ranks[-1], len(tree.parents)
        tree.token_ids.append(tokens[depth - 1][rank])
        tree.parents.append(parent)
        tree.depths.append(depth)
        tree.log_probs.append(-cost)
        if rank + 1 < len(scores[0]):
            sibling = tree.log_probs[parent] + scores[depth - 1][rank + 1]
            if sibling > -np.inf:
                heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1), parent))
        if depth < len(scores):
            child = scores[depth][0] - cost
            if child > -np.inf:
                heapq.heappush(heap, (-child, (*ranks, 0), row))
    n = len(tree.parents)
    sees = np.zeros((n, n), bool)
    for row, parent in enumerate(tree.parents):
        if row:
            sees[row, :row] = sees[parent, :row]
        sees[row, row] = True
    return tree._replace(visibility=sees)


def heap_trees(logits: Any, n_draft_nodes: int) -> list[HeapTree]:
    """From torch logits [B, L, V] on the GPU to trees whose masks are back there."""
    import torch

    values, token_ids = torch.topk(logits, n_draft_nodes, dim=-1)
    total = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    log_probs, token_ids = (values.float() - total).cpu(), token_ids.cpu()
    trees = []
    for scores, tokens in zip(log_probs.numpy(), token_ids.numpy(), strict=True):
        tree = heap_tree(scores, tokens, n_draft_nodes)
        rows = np.array([tree.token_ids, tree.parents, tree.depths], np.int32)
        torch.from_numpy(rows).cuda()
        torch.from_numpy(tree.visibility).cuda()
        trees.append(tree)
    return trees
