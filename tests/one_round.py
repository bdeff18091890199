"""One small round through every kernel on the GPU, each stage held to its reference.

A script of its own, so that compute-sanitizer can watch it (`test_sanitizer.py`).
"""

import numpy as np

from ddtree_numba import bf16, reference
from ddtree_numba.kernels.argmax import argmax
from ddtree_numba.kernels.kv_compact import kv_compact
from ddtree_numba.kernels.topk import topk
from ddtree_numba.kernels.tree_accept import tree_accept
from ddtree_numba.kernels.tree_build import tree_build
from ddtree_numba.kernels.verify_attn import verify_attn
from ddtree_numba.tree import DraftTree

B, L, V, H, DC, DR, S_MAX = 2, 5, 300, 3, 48, 16, 160
PREFIX = np.array([70, 0], np.int32)
BUDGETS = np.array([37, 20], np.int32)


def same(name: str, found: object, expected: object, tolerance: float = 0.0) -> None:
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0, err_msg=name)


def main() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((B, L, V), np.float32) * 2
    for draft in (logits, bf16.from_float32(logits)):
        log_probs, tokens = topk(draft, 38, executor="gpu")
        want = reference.topk(draft, 38)
        same("topk log_probs", log_probs, want[0], 2e-6)
        same("topk token_ids", tokens, want[1])
    tree = tree_build(log_probs, tokens, BUDGETS, executor="gpu")
    built = reference.tree_build(log_probs, tokens, BUDGETS)
    for name in vars(built):
        same(f"tree {name}", getattr(tree, name), getattr(built, name))

    n = tree.max_rows
    q = rng.standard_normal((B, n, H, DC + DR), np.float32)
    cache = rng.standard_normal((B, S_MAX, DC + DR), np.float32)
    for b in range(B):
        cache[b, PREFIX[b] + tree.n_rows[b] :] = np.nan
    form = {"sm_scale": 0.1, "d_latent": DC}
    for version in ("simple", "split"):
        for cast in (lambda x: x, bf16.from_float32):
            inputs = (cast(q), cast(cache), PREFIX, tree.visibility)
            found = verify_attn(*inputs, version=version, executor="gpu", **form)
            want = reference.verify_attn(*inputs, **form)
            same(f"{version} out", found[0], want[0], 2e-6)
            same(f"{version} lse", found[1], want[1], 2e-6)

    small = DraftTree.from_parents([[-1, 0, 1, 0, 3]] * B, n_rows=[5, 3])
    q = bf16.from_float32(rng.standard_normal((B, 5, H, 576), np.float32))
    rows = rng.standard_normal((B, S_MAX, 576), np.float32)
    rows[:, PREFIX[0] + 5 :] = np.nan
    inputs = (q, bf16.from_float32(rows), PREFIX, small.visibility)
    form = {"sm_scale": 192**-0.5, "d_latent": 512}
    found = verify_attn(*inputs, version="mma", executor="gpu", n_splits=3, **form)
    want = reference.verify_attn(*inputs, **form)
    same("mma out", found[0], want[0], 2e-2)  # weights are bf16, values up to 4
    same("mma lse", found[1], want[1], 3e-5)

    target = rng.standard_normal((B, n, V), np.float32)
    children = [tree.children(b) for b in range(B)]
    for b in range(B):  # the target agrees with the draft along one path
        for row, below in enumerate(children[b]):
            if below:
                target[b, row, tree.token_ids[b, below[-1]]] = 50
    choices = argmax(target, tree.n_rows, executor="gpu")
    same("argmax", choices, reference.argmax(target, tree.n_rows))
    accepted = tree_accept(tree, choices, executor="gpu")
    for name, found, want in zip(
        accepted._fields, accepted, reference.tree_accept(tree, choices), strict=True
    ):
        same(f"tree_accept {name}", found, want)
    assert accepted.accept_len.max() > 1

    layers = np.stack([cache, -cache])
    moved = layers.copy()
    lens = kv_compact(layers, PREFIX, accepted.rows, accepted.accept_len)
    kv_compact(moved, PREFIX, accepted.rows, accepted.accept_len, executor="gpu")
    same("kv_compact", moved, layers)
    same("prefix_lens", lens, PREFIX + accepted.accept_len)
    print("one round: every stage agrees with its reference")


if __name__ == "__main__":
    main()
