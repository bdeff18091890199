"""What every stage must compute: plain NumPy in float64, to be read.

Each function has the name of its stage, and its kernels are held to it. The order of a
round is `topk` → `tree_build` → `verify_attn` (in every layer of the target) →
`argmax` or `sample` → `tree_accept` → `kv_compact`.

Nothing here is fast on purpose. Source: Ringel & Romano, "DDTree" (arXiv 2604.12989);
DeepSeek-V2 (arXiv 2405.04434) for multi-head latent attention.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba import bf16
from ddtree_numba.tree import WORD_BITS, DraftTree, n_words

FLOAT32_RANGE = np.finfo(np.float32).min, np.finfo(np.float32).max
ACCEPT_OK, ACCEPT_BACKWARD, ACCEPT_OUT_OF_RANGE = 0, 1, 2


class Accepted(NamedTuple):
    """What `tree_accept` found.

    Attributes
    ----------
    rows : int32 [B, max_depth + 1]
        Accepted rows, root first; -1 padded.
    accept_len : int32 [B]
        Accepted rows including the root, 1 … max_depth + 1.
    bonus : int32 [B]
        The target's token after the last accepted row: the next round's root.
    status : int32 [B]
        0; 1 if a pointer goes backward (a cycle); 2 if it leaves the tree. The path up
        to the fault stands.
    """

    rows: Any
    accept_len: Any
    bonus: Any
    status: Any


# ------------------------------------------------------------------------------- topk


def bad_row(row: np.ndarray) -> str | None:
    """Why a row of logits is no distribution, or None if it is one."""
    if np.isnan(row).any():
        return "holds NaN"
    if np.isposinf(row).any():
        return "holds +inf"
    if np.isneginf(row).all():
        return "is -inf everywhere"
    return None


def topk(
    logits: np.ndarray, k: int, *, check: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and ids of the k most probable tokens of every position.

    Parameters
    ----------
    logits : float32, float16 or uint16 (bf16 bits) [B, L, V]
        -inf is legal (a masked token).
    k : int
        Candidates to keep; ``K = min(k, V)``.
    check : bool
        Raise for a bad row; otherwise its candidates are NaN and -1.

    Returns
    -------
    log_probs : float32 [B, L, K]
        ``logit - logsumexp(row)``, logits falling, ties by lower token id.
    token_ids : int32 [B, L, K]

    Raises
    ------
    ValueError
        If k is negative, or for a row with NaN, +inf or only -inf.
    """
    if k < 0:
        raise ValueError(f"k is {k}; expected 0 or more")
    batch, length, vocab = logits.shape
    kept = min(k, vocab)
    log_probs = np.full((batch, length, kept), np.nan, np.float32)
    token_ids = np.full((batch, length, kept), -1, np.int32)
    if vocab == 0:
        return log_probs, token_ids
    for b in range(batch):
        for position in range(length):
            row = bf16.to_float64(logits[b, position])
            if why := bad_row(row):
                if check:
                    raise ValueError(f"logits, request {b}, row {position} {why}")
                continue
            order = np.argsort(-row, kind="stable")[:kept]  # stable: lower ids first
            token_ids[b, position] = order
            # The difference first: a huge logit would swallow the log.
            from_top = row - row.max()
            kept_log_probs = from_top[order] - np.log(np.exp(from_top).sum())
            with np.errstate(over="ignore"):  # less than float32 holds is -inf
                log_probs[b, position] = kept_log_probs
    return log_probs, token_ids


def logsumexp(row: np.ndarray) -> float:
    """Natural logarithm of the sum of exponentials; -inf for an empty row."""
    if row.size == 0 or (top := row.max()) == -np.inf:
        return -np.inf
    return float(top + np.log(np.exp(row - top).sum()))


# ------------------------------------------------------------------------- tree_build


def tree_build(
    log_probs: np.ndarray,
    token_ids: np.ndarray,
    n_draft_nodes: int | np.ndarray,
    *,
    root_tokens: Any = None,
    max_draft_nodes: int | None = None,
    check: bool = True,
) -> DraftTree:
    """Build the tree of the most probable prefixes, best first, with a heap.

    A prefix is a rank path ``(r1 … rd)``: the r1-th candidate of position 1, and so on.
    Its score is the float64 sum of its candidates' log-probabilities, left to right.
    Taking a prefix off the heap offers two others, its next sibling (last rank + 1) and
    its first child (a further 0); neither can score higher, so prefixes come off in
    falling order and none that was left out beats one that was taken.

    Parameters
    ----------
    log_probs : float32 [B, L, K]
        As from `topk`: falling along K. -inf is never a node; a request with NaN
        anywhere gets the root alone.
    token_ids : int32 [B, L, K]
    n_draft_nodes : int or int [B]
        M, nodes beside the root; 0 … 1024 and more.
    root_tokens : int [B], optional
        Token of row 0; -1 if omitted.
    max_draft_nodes : int, optional
        Rows to allocate, less one; the largest of `n_draft_nodes` if omitted.
    check : bool
        Raise for what `topk` cannot have given (see `check_candidates`).

    Returns
    -------
    DraftTree
        Rows in selection order: score falling, ties by rank path, lexicographic.

    Raises
    ------
    ValueError
        For a negative budget, one above `max_draft_nodes`, or (checked) bad log_probs.
    """
    batch, length, kept = log_probs.shape
    budgets = np.broadcast_to(np.asarray(n_draft_nodes), (batch,))
    most = int(budgets.max(initial=0)) if max_draft_nodes is None else max_draft_nodes
    if budgets.min(initial=0) < 0 or budgets.max(initial=0) > most:
        raise ValueError(f"n_draft_nodes is {n_draft_nodes}; expected 0 … {most}")
    roots = np.full(batch, -1) if root_tokens is None else np.asarray(root_tokens)
    if check:
        check_candidates(log_probs, token_ids)

    n = most + 1
    parents = np.full((batch, n), -1, np.int32)
    tokens = np.full((batch, n), -1, np.int32)
    scores = np.zeros((batch, n))
    n_rows = np.ones(batch, np.int32)
    tokens[:, 0] = roots
    for b in range(batch):
        if np.isnan(log_probs[b]).any():
            continue
        table = log_probs[b].astype(np.float64)
        # Entries: (-score, rank path, parent row). Tuples compare in just that order.
        heap: list[tuple[float, tuple[int, ...], int]] = []

        offer: list[tuple[tuple[int, ...], int]] = [((0,), 0)]
        while True:
            for path, parent in offer:
                depth, rank = len(path), path[-1]
                if depth <= length and rank < kept:
                    score = scores[b, parent] + table[depth - 1, rank]
                    if score > -np.inf:
                        heapq.heappush(heap, (-score, path, parent))
            if not heap or n_rows[b] > budgets[b]:
                break
            negative, path, parent = heapq.heappop(heap)
            row = int(n_rows[b])
            n_rows[b] += 1
            parents[b, row] = parent
            tokens[b, row] = token_ids[b, len(path) - 1, path[-1]]
            scores[b, row] = -negative
            next_sibling = ((*path[:-1], path[-1] + 1), parent)
            first_child = ((*path, 0), row)
            offer = [next_sibling, first_child]
    # A live row stays finite, even if it is less probable than float32 can say.
    scores = np.clip(scores, *FLOAT32_RANGE)
    return DraftTree.from_parents(parents, tokens, scores, n_rows, check=check)


def check_candidates(log_probs: np.ndarray, token_ids: np.ndarray) -> None:
    """Raise ValueError for candidates that `topk` cannot have given.

    NaN, log-probs above 0 or rising along K, and a negative token that could be a node.
    """
    bad = np.isnan(log_probs).any(axis=-1)
    if bad.any():
        b, position = np.argwhere(bad)[0]
        raise ValueError(f"log_probs, request {b}, row {position} holds NaN")
    rises = (log_probs[..., 1:] > log_probs[..., :-1]).any(axis=-1)
    if rises.any():
        b, position = np.argwhere(rises)[0]
        raise ValueError(
            f"log_probs, request {b}, row {position} rises; expected topk's order"
        )
    for name, x, bad in (
        ("log_probs", log_probs, log_probs > 0),
        ("token_ids", token_ids, (token_ids < 0) & (log_probs > -np.inf)),
    ):
        if bad.any():
            b, position, rank = np.argwhere(bad)[0]
            expected = "0 or less" if name == "log_probs" else "0 or more"
            raise ValueError(
                f"{name}, request {b}, row {position} holds {x[b, position, rank]}; "
                f"expected {expected}"
            )


def visibility(parents: np.ndarray, n_rows: np.ndarray) -> np.ndarray:
    """Visibility words of trees from their parent rows.

    Parameters
    ----------
    parents : int32 [B, N]
    n_rows : int32 [B]

    Returns
    -------
    uint32 [B, N, ceil(N/32)]
        Bit j of row i is set if j is i or an ancestor of i; padding rows 0.
    """
    batch, n = parents.shape
    words = np.zeros((batch, n, n_words(n)), np.uint32)
    for b in range(batch):
        for i in range(n_rows[b]):
            j = i
            while j >= 0:
                words[b, i, j // WORD_BITS] |= np.uint32(1 << j % WORD_BITS)
                j = parents[b, j]
    return words


# ------------------------------------------------------------------------ verify_attn


def visible_keys(words: np.ndarray, prefix_len: int) -> np.ndarray:
    """Cache rows that a tree row attends to: the prefix, and its bits in the tail."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    bits = np.unpackbits(octets, bitorder="little")
    # A padding row has no bit at all, not even its own: it sees nothing.
    prefix = np.arange(prefix_len if bits.any() else 0)
    return np.concatenate([prefix, prefix_len + np.flatnonzero(bits)])


def attend(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, sm_scale: float
) -> tuple[np.ndarray, float]:
    """Softmax attention of one query over its visible keys: output and lse."""
    scores = keys @ query * sm_scale
    weighs = scores != -np.inf  # else not even an infinite value counts; NaN does
    if not weighs.any():
        return np.zeros(values.shape[1]), -np.inf
    lse = logsumexp(scores)
    return np.exp(scores[weighs] - lse) @ values[weighs], lse


def verify_attn(
    q: np.ndarray,
    kv_cache: np.ndarray,
    prefix_lens: np.ndarray,
    visibility: np.ndarray,
    *,
    sm_scale: float,
    d_latent: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Tree-masked MLA attention in absorbed form.

    Tree row i attends to the whole prefix and to the tail rows that its visibility bits
    name. Every head reads the same cache row ``c_kv ‖ k_rope``: all of it is the key,
    its first `d_latent` columns are the value.

    Parameters
    ----------
    q : float32 or uint16 (bf16 bits) [B, N, H, D]
        Absorbed queries: ``W_UKᵀ q_nope ‖ q_rope``.
    kv_cache : same dtype [B, S_max, D]
        Tree row i's own cache row is ``prefix_lens[b] + i``. Rows that nobody sees are
        never read and may hold NaN.
    prefix_lens : int32 [B]
    visibility : uint32 [B, N, ceil(N/32)]
        A row without any bit is padding and sees nothing, not even the prefix.
    sm_scale : float
        The model's softmax scale; not ``D ** -0.5``.
    d_latent : int
        Dc.

    Returns
    -------
    out : float32 [B, N, H, Dc]
    lse : float32 [B, N, H]
        Natural logarithm. Rows that see nothing: out 0, lse -inf.
    """
    batch, n, heads, _ = q.shape
    out = np.zeros((batch, n, heads, d_latent), np.float32)
    lse = np.full((batch, n, heads), -np.inf, np.float32)
    for b in range(batch):
        for i in range(n):
            seen = visible_keys(visibility[b, i], int(prefix_lens[b]))
            keys = bf16.to_float64(kv_cache[b, seen])
            for h in range(heads):
                query = bf16.to_float64(q[b, i, h])
                out[b, i, h], lse[b, i, h] = attend(
                    query, keys, keys[:, :d_latent], sm_scale
                )
    return out, lse


def absorb_query(
    q_nope: np.ndarray, q_rope: np.ndarray, w_uk: np.ndarray
) -> np.ndarray:
    """Move W_UK to the query's side: ``W_UKᵀ q_nope ‖ q_rope``.

    ``q_nope · (W_UK c) = (W_UKᵀ q_nope) · c``, so keys need not be expanded.

    Parameters
    ----------
    q_nope : [B, N, H, Dn]
    q_rope : [B, N, H, Dr]
    w_uk : [H, Dn, Dc]

    Returns
    -------
    [B, N, H, Dc + Dr]
    """
    return np.concatenate([np.einsum("bnhe,hec->bnhc", q_nope, w_uk), q_rope], axis=-1)


def verify_attn_unabsorbed(
    q_nope: np.ndarray,
    q_rope: np.ndarray,
    kv_cache: np.ndarray,
    prefix_lens: np.ndarray,
    visibility: np.ndarray,
    w_uk: np.ndarray,
    w_uv: np.ndarray,
    *,
    sm_scale: float,
) -> np.ndarray:
    """The same attention as the MLA papers write it: keys and values expanded per head.

    Equal to ``W_UV`` applied to `verify_attn`'s output for absorbed queries, at many
    times the bytes: S·H·(Dn + Dv) expanded elements instead of S·Dc.

    Parameters
    ----------
    q_nope, q_rope, kv_cache, prefix_lens, visibility
        As for `absorb_query` and `verify_attn`.
    w_uk : [H, Dn, Dc]
    w_uv : [H, Dv, Dc]

    Returns
    -------
    float32 [B, N, H, Dv]
    """
    batch, n, heads, _ = q_nope.shape
    d_latent = w_uk.shape[2]
    out = np.zeros((batch, n, heads, w_uv.shape[1]), np.float32)
    for b in range(batch):
        for i in range(n):
            seen = visible_keys(visibility[b, i], int(prefix_lens[b]))
            rows = bf16.to_float64(kv_cache[b, seen])
            latent, k_rope = rows[:, :d_latent], rows[:, d_latent:]
            for h in range(heads):
                keys = np.concatenate([latent @ w_uk[h].T, k_rope], axis=1)
                query = np.concatenate([q_nope[b, i, h], q_rope[b, i, h]])
                out[b, i, h], _ = attend(query, keys, latent @ w_uv[h].T, sm_scale)
    return out


def merge_partials(outs: np.ndarray, lses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge attention over disjoint sets of keys by their lse.

    Parameters
    ----------
    outs : float [P, ..., Dc]
        Softmax-weighted averages, each over its own keys.
    lses : float [P, ...]
        Natural logarithms; -inf where a set was empty (its out is ignored).

    Returns
    -------
    out : float32 [..., Dc]
    lse : float32 [...]
    """
    lses = lses.astype(np.float64)
    top = lses.max(axis=0)
    seen = top > -np.inf
    weights = np.where(lses > -np.inf, np.exp(lses - np.where(seen, top, 0.0)), 0.0)
    total = weights.sum(axis=0)
    # An empty set's out may be anything, NaN too: select, do not multiply by 0.
    parts = np.where(weights[..., None] > 0, outs.astype(np.float64), 0.0)
    out = (weights[..., None] * parts).sum(axis=0) / np.where(seen, total, 1)[..., None]
    lse = np.where(seen, top + np.log(np.where(seen, total, 1.0)), -np.inf)
    return out.astype(np.float32), lse.astype(np.float32)


# ----------------------------------------------------------- the target's own choices


def argmax(
    logits: np.ndarray, n_rows: np.ndarray | None = None, *, check: bool = True
) -> np.ndarray:
    """The target's choice after every row: highest logit, lowest id on a tie.

    Parameters
    ----------
    logits : float32, float16 or uint16 (bf16 bits) [B, N, V]
    n_rows : int32 [B], optional
        Live rows; padding rows are not looked at and answer -1.
    check : bool
        Raise for a bad row (NaN, +inf, or only -inf); otherwise it answers -1.

    Returns
    -------
    int32 [B, N]
    """
    batch, n, _ = logits.shape
    tokens = np.full((batch, n), -1, np.int32)
    for b in range(batch):
        for i in range(n if n_rows is None else n_rows[b]):
            row = bf16.to_float64(logits[b, i])
            if why := bad_row(row):
                if check:
                    raise ValueError(f"logits, request {b}, row {i} {why}")
                continue
            tokens[b, i] = np.argmax(row)
    return tokens


def sample(
    logits: np.ndarray,
    temperature: float,
    positions: np.ndarray,
    seed: int,
    n_rows: np.ndarray | None = None,
) -> np.ndarray:
    """Draw the target's token after every row, independently of the tree.

    Walking along such tokens is lossless for any fixed tree: a node is accepted if it
    is what the target drew anyway. The random number belongs to (seed, place of the
    request in the batch, position), so the same seed writes the same text whatever tree
    was drafted.

    Parameters
    ----------
    logits : float32, float16 or uint16 (bf16 bits) [B, N, V]
    temperature : float
        0 is `argmax`.
    positions : int32 [B, N]
        Sequence position of each row.
    seed : int
    n_rows : int32 [B], optional
        Live rows; padding rows answer -1.

    Returns
    -------
    int32 [B, N]

    Raises
    ------
    ValueError
        For a negative temperature, or a bad row as in `argmax`.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature}; expected 0 or more")
    best = argmax(logits, n_rows)
    if temperature == 0:
        return best
    tokens = np.full_like(best, -1)
    for b, i in np.argwhere(best >= 0):
        row = bf16.to_float64(logits[b, i])
        # The difference first: a low temperature must not overflow to inf - inf.
        with np.errstate(over="ignore"):  # beyond float64 a token's share is 0
            cumulative = np.cumsum(np.exp((row - row.max()) / temperature))
        at = coin(seed, b, positions[b, i]) * cumulative[-1]
        tokens[b, i] = np.searchsorted(cumulative, at, side="right")
    return tokens


def coin(seed: int, request: int, position: int) -> float:
    """The random number, 0 … 1, that `sample` uses at a position of a request."""
    key = np.random.Philox(key=seed, counter=[0, 0, request, position])
    return np.random.Generator(key).random()


# ------------------------------------------------------------------------ tree_accept


def tree_accept(
    tree: DraftTree, target_tokens: np.ndarray, *, max_depth: int | None = None
) -> Accepted:
    """Walk from the root along the target's own tokens.

    Parameters
    ----------
    tree : DraftTree
        Need not be valid: a bad pointer ends the walk with a status, never a hang.
    target_tokens : int32 [B, N]
        The target's choice after each row, from `argmax` or `sample`.
    max_depth : int, optional
        Deepest row there can be (the block's L); N - 1 if omitted.

    Returns
    -------
    Accepted

    Raises
    ------
    ValueError
        For a negative `max_depth`.
    """
    batch, n = tree.token_ids.shape
    width = accept_width(n, max_depth)
    rows = np.full((batch, width), -1, np.int32)
    accept_len = np.ones(batch, np.int32)
    bonus = np.empty(batch, np.int32)
    status = np.zeros(batch, np.int32)
    rows[:, 0] = 0
    for b in range(batch):
        row, length = 0, 1
        while length < width:
            child, status[b] = _matching_child(tree, b, row, target_tokens[b, row])
            if child < 0:
                break
            rows[b, length] = row = child
            length += 1
        accept_len[b] = length
        bonus[b] = target_tokens[b, row]
    return Accepted(rows, accept_len, bonus, status)


def accept_width(n_rows: int, max_depth: int | None) -> int:
    """Columns of `Accepted.rows` for trees of N rows: the longest path there can be."""
    if max_depth is None:
        return n_rows
    if max_depth < 0:
        raise ValueError(f"max_depth is {max_depth}; expected 0 or more")
    return max_depth + 1


def _matching_child(tree: DraftTree, b: int, row: int, token: int) -> tuple[int, int]:
    """First child of `row` that carries `token`, or -1; and a status.

    Rows only grow along pointers, which is also why a walk ends after N steps.
    """
    live = min(int(tree.n_rows[b]), tree.token_ids.shape[1])
    at, child = row, int(tree.next_token[b, row])
    while child != -1:
        if not 0 <= child < live:
            return -1, ACCEPT_OUT_OF_RANGE
        if child <= at:
            return -1, ACCEPT_BACKWARD
        if token >= 0 and tree.token_ids[b, child] == token:
            return child, ACCEPT_OK
        at, child = child, int(tree.next_sibling[b, child])
    return -1, ACCEPT_OK


# ------------------------------------------------------------------------- kv_compact


def kv_compact(
    kv_cache: np.ndarray,
    prefix_lens: np.ndarray,
    rows: np.ndarray,
    accept_len: np.ndarray,
) -> np.ndarray:
    """Move the accepted tail rows to the front of the tail, in place.

    Parameters
    ----------
    kv_cache : any dtype [B, S_max, D] or [layers, B, S_max, D]
        Changed in place.
    prefix_lens : int32 [B]
        Prefix lengths of the round that ends: tree row i lies at ``prefix_lens[b]+i``.
    rows : int32 [B, W]
        Accepted rows, ascending, from `tree_accept`.
    accept_len : int32 [B]
        Accepted rows, 0 … W.

    Returns
    -------
    int32 [B]
        The new prefix lengths, ``prefix_lens + accept_len``.

    Raises
    ------
    ValueError
        For rows that do not ascend or lie outside the cache; nothing is moved then.
    """
    check_compaction(kv_cache, prefix_lens, rows, accept_len)
    for b, (start, length) in enumerate(zip(prefix_lens, accept_len, strict=True)):
        # Fancy indexing copies before it writes, so no row is lost.
        kept = kv_cache[..., b, start + rows[b, :length], :]
        kv_cache[..., b, start : start + length, :] = kept
    return (prefix_lens + accept_len).astype(np.int32)


def check_compaction(
    kv_cache: np.ndarray,
    prefix_lens: np.ndarray,
    rows: np.ndarray,
    accept_len: np.ndarray,
) -> None:
    """Raise ValueError unless every accepted row can move to the front of its tail."""
    s_max, width = kv_cache.shape[-2], rows.shape[1]
    for b, (start, length) in enumerate(zip(prefix_lens, accept_len, strict=True)):
        if not 0 <= start <= s_max:
            raise ValueError(
                f"prefix_lens, request {b} is {start}; expected 0 … {s_max}"
            )
        if not 0 <= length <= width:
            raise ValueError(
                f"accept_len, request {b} is {length}; expected 0 … {width}"
            )
        accepted = rows[b, :length]
        if (np.diff(accepted, prepend=-1) <= 0).any():
            raise ValueError(
                f"rows, request {b} is {accepted.tolist()}; expected rows that ascend "
                "from 0 or more"
            )
        last = int(start) + int(accepted[-1]) if length else 0  # beyond int32 perhaps
        if length and last >= s_max:
            raise ValueError(
                f"rows, request {b} reaches cache row {last}; expected less than "
                f"{s_max}"
            )
