"""The small model where the kernels run: `forward`, kernel by kernel.

What `Model` computes in NumPy, `DeviceModel` queues on the GPU: nothing waits for the
host, and what a pass reads (tokens, trees, prefix lengths) it reads from device memory.
So a `Round` of it can be captured as one CUDA graph. In the emulator the same calls run
lane by lane, for tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_numba import reference
from ddtree_numba.backend import Place, choose
from ddtree_numba.kernels import model_ops as ops
from ddtree_numba.kernels.verify_attn import verify_attn
from ddtree_numba.kernels.wide import WARP
from ddtree_numba.model.config import VOCAB, ModelConfig
from ddtree_numba.model.forward import PREFILL_ROWS, Model, chain_visibility, rope_turns
from ddtree_numba.tree import DraftTree


@dataclasses.dataclass
class DeviceCache:
    """What `Cache` holds, where the kernels run.

    Attributes
    ----------
    kv : float32 [n_layers, B, capacity, d_latent + d_rope]
    prefix_lens : int32 [B]
    context : float32 [B, capacity, d_model]
    keys, values : float32 [draft_layers, B, capacity, draft_heads, width]
    turns, draft_turns : float64 [P, width/2, 2]
        Cosine and sine of the rotary angles at every position, of target and drafter.
    features : list of float64 [B, N, d_model]
        The target's residuals of the rows that ran last, one for each feature layer.
    """

    kv: Any
    prefix_lens: Any
    context: Any
    keys: Any
    values: Any
    turns: Any
    draft_turns: Any
    features: list[Any] = dataclasses.field(default_factory=list)


class DeviceModel:
    """Target and drafter on a GPU, or in the emulator.

    Parameters
    ----------
    model : Model
        Whose weights are taken.
    executor : {"gpu", "emulator"}

    Raises
    ------
    ValueError
        For another executor, or drafter heads wider than a block of threads.
    RuntimeError
        If a GPU is asked for and there is none.
    """

    def __init__(self, model: Model, executor: str = "gpu"):
        if choose(executor) == "numpy":
            raise ValueError(
                "executor is 'numpy', where `Model` itself runs; expected 'gpu' or "
                "'emulator'"
            )
        c = model.config
        self.config: ModelConfig = c
        self.at = Place(executor, "numba" if executor == "gpu" else "numpy")
        self.width = c.d_model // c.draft_heads
        if self.width > ops.THREADS:
            raise ValueError(
                f"the drafter's heads are {self.width} wide; expected up to "
                f"{ops.THREADS}"
            )
        target, drafter = model.target, model.drafter
        head = target["embed"][:VOCAB].T
        self.target = self._put(target, ["embed", "final_norm"]) | {
            "head": self._narrow(head[None])
        }
        names = ["mask", "position", "w_last", "w_fuse", "fuse_norm", "final_norm"]
        self.drafter = self._put(drafter, names) | {
            "head": self._narrow(head[None] / c.draft_temperature),
            "w_kv": self._side_by_side(
                drafter[name][layer]
                for layer in range(c.draft_layers)
                for name in ("w_k", "w_v")
            ),
        }
        self.target_layers = [
            self._put(w, ["attn_norm", "w_q", "w_dkv", "latent_norm", "w_o"])
            | self._put(w, ["up_k", "up_v", "ffn_norm", "w_down"])
            | {"w_gate_up": self._side_by_side((w["w_gate"], w["w_up"]))}
            for w in model.target_layers
        ]
        self.drafter_layers = [
            self._put(w, ["attn_norm", "w_o", "ffn_norm", "w_down"])
            | {"w_qkv": self._side_by_side((w["w_q"], w["w_k"], w["w_v"]))}
            | {"w_gate_up": self._side_by_side((w["w_gate"], w["w_up"]))}
            for w in model.drafter_layers
        ]

    def _put(self, weights: dict[str, NDArray], names: list[str]) -> dict[str, Any]:
        """Weights where the kernels run; matrices [in, out] as [1, in, out]."""
        placed = {}
        for name in names:
            w = weights[name]
            is_matrix = name.startswith("w_")
            placed[name] = self._narrow(w[None] if is_matrix else w)
        return placed

    def _side_by_side(self, matrices: Any) -> Any:
        return self._narrow(np.concatenate(list(matrices), axis=1)[None])

    def _narrow(self, w: NDArray) -> Any:
        """As float32 if that says the same (trained weights are fp16)."""
        narrow = w.astype(np.float32)
        return self.at.put(np.ascontiguousarray(narrow if (narrow == w).all() else w))

    # ------------------------------------------------------------------ rounds

    def prefill(
        self, prompts: Sequence[Sequence[int]], capacity: int | None = None
    ) -> DeviceCache:
        """A cache that holds these prompts; arguments as for `Model.prefill`."""
        c, at, batch = self.config, self.at, len(prompts)
        lengths = np.array([len(prompt) for prompt in prompts])
        longest = int(lengths.max(initial=0))
        size = longest if capacity is None else capacity
        if size < longest:
            raise ValueError(f"capacity is {size}; the longest prompt has {longest}")
        draft_shape = (c.draft_layers, batch, size, c.draft_heads, self.width)
        # A block or a chunk of the prompt may stand behind the last row.
        positions = np.arange(size + max(c.block, PREFILL_ROWS))
        cache = DeviceCache(
            kv=at.full((c.n_layers, batch, size, c.d_cache), 0, np.float32),
            prefix_lens=at.full((batch,), 0, np.int32),
            context=at.full((batch, size, c.d_model), 0, np.float32),
            keys=at.full(draft_shape, 0, np.float32),
            values=at.full(draft_shape, 0, np.float32),
            turns=at.put(rope_turns(positions, c.d_rope, c.rope_base)),
            draft_turns=at.put(rope_turns(positions, self.width, c.rope_base)),
        )
        for start in range(0, longest, PREFILL_ROWS):
            count = min(PREFILL_ROWS, longest - start)
            cache.prefix_lens = at.put(np.minimum(lengths, start).astype(np.int32))
            tokens = np.full((batch, count), -1, np.int32)
            for row, prompt in zip(tokens, prompts, strict=True):
                part = prompt[start : start + count]
                row[: len(part)] = part
            rows = np.tile(np.arange(count, dtype=np.int32), (batch, 1))
            words = np.repeat(chain_visibility(count)[None], batch, 0)
            live = at.put(np.clip(lengths - start, 0, count).astype(np.int32))
            depths = at.put(rows)
            self._run(cache, at.put(tokens), depths, at.put(words), live)
            self.settle(cache, depths, live)
        cache.prefix_lens = at.put(lengths.astype(np.int32))
        return cache

    def draft(self, cache: DeviceCache, root_tokens: Any) -> Any:
        """The drafter's logits [B, block - 1, 256], divided by its temperature.

        Every request needs a settled token.
        """
        c, w, at = self.config, self.drafter, self.at
        batch = cache.prefix_lens.shape[0]
        rows, d, heads = batch * c.block, c.d_model, c.draft_heads
        last, before = at.empty((batch, d), np.float64), cache.prefix_lens
        at.launch(
            *(ops.gather_kernel, batch, ops.THREADS),
            *(cache.context, before.reshape(batch, 1), np.int32(-1), np.int32(0), last),
        )
        last = self._matmul(last, w["w_last"])
        x, positions = at.empty((rows, d), np.float64), at.empty((rows,), np.int32)
        at.launch(
            *(ops.embed_block_kernel, rows, ops.THREADS, root_tokens, before),
            *(self.target["embed"], w["mask"], w["position"], last, x, positions),
        )
        for i, layer in enumerate(self.drafter_layers):
            h = self._rms_norm(x, layer["attn_norm"])
            qkv = self._matmul(h, layer["w_qkv"]).reshape(rows, 3 * heads, self.width)
            # Queries and keys, in place; values stay.
            self._rope((rows, 2 * heads), qkv, 0, positions, cache.draft_turns, qkv, 0)
            out = at.empty((rows, heads, self.width), np.float64)
            qkv = qkv.reshape(batch, c.block, 3, heads, self.width)
            at.launch(
                *(ops.draft_attention_kernel, (rows, heads), ops.THREADS),
                *(qkv, cache.keys[i], cache.values[i], before),
                *(np.float64(self.width**-0.5), out),
                dynamic_shared=8 * (cache.context.shape[1] + c.block),
            )
            x = self._matmul(out.reshape(rows, d), layer["w_o"], add=x)
            x = self._swiglu(x, layer)
        x = self._rms_norm(x, w["final_norm"])
        logits = self._matmul(x, w["head"], np.float32)
        return logits.reshape(batch, c.block, VOCAB)[:, 1:]

    def verify(self, cache: DeviceCache, tree: DraftTree) -> Any:
        """The target's logits [B, N, 256]; those of padding rows mean nothing."""
        batch, n = tree.token_ids.shape
        x = self._run(cache, tree.token_ids, tree.depths, tree.visibility, tree.n_rows)
        x = self._rms_norm(x, self.target["final_norm"])
        logits = self._matmul(x, self.target["head"], np.float32)
        return logits.reshape(batch, n, VOCAB)

    def settle(self, cache: DeviceCache, rows: Any, counts: Any) -> None:
        """Let the drafter see the first ``counts[b]`` of the rows that ran last."""
        c, w, at = self.config, self.drafter, self.at
        total = rows.shape[0] * rows.shape[1]
        features = at.empty((total, len(cache.features) * c.d_model), np.float64)
        for j, x in enumerate(cache.features):
            first = np.int32(j * c.d_model)
            at.launch(
                *(ops.gather_kernel, total, ops.THREADS),
                *(x, rows, np.int32(0), first, features),
            )
        context = self._rms_norm(self._matmul(features, w["w_fuse"]), w["fuse_norm"])
        keys_values = self._matmul(context, w["w_kv"])
        shape = (total, c.draft_layers, 2, c.draft_heads, self.width)
        at.launch(
            *(ops.draft_row_kernel, (total, c.draft_layers), WARP),
            *(context, keys_values.reshape(shape), cache.draft_turns),
            *(cache.prefix_lens, counts, cache.context, cache.keys, cache.values),
        )

    def sample(
        self,
        logits: Any,
        tree: DraftTree,
        prefix_lens: Any,
        *,
        temperature: float,
        coins: Any,
    ) -> Any:
        """`reference.sample` with its random numbers given: coins [B, P].

        A row with NaN, +inf or only -inf answers -1, as padding rows do.
        """
        tokens = self.at.empty(tree.token_ids.shape, np.int32)
        self.at.launch(
            *(ops.sample_kernel, tokens.size, ops.THREADS),
            *(logits, tree.n_rows, tree.depths, prefix_lens, coins),
            *(np.float64(temperature), tokens),
            dynamic_shared=8 * logits.shape[2],
        )
        return tokens

    # ---------------------------------------------------------------- networks

    def _run(
        self, cache: DeviceCache, tokens: Any, depths: Any, visibility: Any, n_rows: Any
    ) -> Any:
        """The target over rows of trees: their residuals [B*N, d_model]."""
        c, at = self.config, self.at
        batch, n = tokens.shape
        rows, heads = batch * n, c.n_heads
        x = at.empty((rows, c.d_model), np.float64)
        positions = at.empty((rows,), np.int32)
        at.launch(
            *(ops.embed_kernel, rows, ops.THREADS, tokens, depths, cache.prefix_lens),
            *(self.target["embed"], x, positions),
        )
        query = at.empty((rows, heads, c.d_cache), np.float32)
        cache.features = []
        for i, w in enumerate(self.target_layers):
            h = self._rms_norm(x, w["attn_norm"])
            latent_rows = self._matmul(h, w["w_dkv"])
            at.launch(
                *(ops.latent_row_kernel, rows, WARP, latent_rows, w["latent_norm"]),
                *(np.float64(c.norm_eps), positions, cache.turns),
                *(cache.prefix_lens, n_rows, cache.kv[i]),
            )
            q = self._matmul(h, w["w_q"]).reshape(rows, heads, c.d_nope + c.d_rope)
            self._matmul_into(query, q, w["up_k"])
            self._rope(
                (rows, heads), q, c.d_nope, positions, cache.turns, query, c.d_latent
            )
            latents, _ = verify_attn(
                query.reshape(batch, n, heads, c.d_cache),
                cache.kv[i],
                cache.prefix_lens,
                visibility,
                sm_scale=c.sm_scale,
                d_latent=c.d_latent,
                executor=at.executor,
            )
            out = at.empty((rows, heads, c.d_value), np.float64)
            latents = latents.reshape(rows, heads, c.d_latent)
            self._matmul_into(out, latents, w["up_v"])
            x = self._matmul(out.reshape(rows, heads * c.d_value), w["w_o"], add=x)
            x = self._swiglu(x, w)
            if i + 1 in c.feature_layers:
                cache.features.append(x.reshape(batch, n, c.d_model))
        return x

    def _swiglu(self, x: Any, w: dict[str, Any]) -> Any:
        """x and what its feed-forward network adds."""
        rows, width = x.shape[0], self.config.d_ffn
        gates = self._matmul(self._rms_norm(x, w["ffn_norm"]), w["w_gate_up"])
        h = self.at.empty((rows, width), np.float64)
        grid = (rows, -(-width // ops.THREADS))
        self.at.launch(ops.swiglu_kernel, grid, ops.THREADS, gates, h)
        return self._matmul(h, w["w_down"], add=x)

    def _rms_norm(self, x: Any, weight: Any) -> Any:
        out = self.at.empty(x.shape, np.float64)
        eps = np.float64(self.config.norm_eps)
        self.at.launch(ops.rms_norm_kernel, x.shape[0], WARP, x, weight, eps, out)
        return out

    def _rope(
        self,
        grid: tuple[int, int],
        x: Any,
        first: int,
        positions: Any,
        turns: Any,
        out: Any,
        out_first: int,
    ) -> None:
        """Rotate x's columns from `first` on, into out's from `out_first` on."""
        self.at.launch(
            *(ops.rope_kernel, grid, WARP, x, np.int32(first)),
            *(positions, turns, out, np.int32(out_first)),
        )

    def _matmul(
        self, x: Any, w: Any, dtype: Any = np.float64, *, add: Any = None
    ) -> Any:
        """x @ w for x [R, K] and w [1, K, C], and `add` [R, C] on top."""
        rows, k = x.shape
        out = self.at.empty((rows, w.shape[2]), dtype)
        as_groups = out.reshape(rows, 1, w.shape[2])
        base = None if add is None else add.reshape(as_groups.shape)
        self._matmul_into(as_groups, x.reshape(rows, 1, k), w, base)
        return out

    def _matmul_into(self, out: Any, x: Any, w: Any, base: Any = None) -> None:
        """Write x @ w, group by group, into out's first columns; adds `base`."""
        groups, _, columns = w.shape
        tiles = (-(-x.shape[0] // ops.TILE), -(-columns // ops.TILE), groups)
        adds = np.int32(base is not None)
        self.at.launch(
            *(ops.matmul_kernel, tiles, ops.MATMUL_THREADS),
            *(x, w, x if base is None else base, adds, out),
        )


def draw_coins(lengths: Sequence[int], count: int, seed: int) -> NDArray[np.float64]:
    """The random numbers of `reference.sample` at each request's next positions.

    Parameters
    ----------
    lengths : sequence of int
        Tokens of each request's text; its last one is the first root.
    count : int
        Positions from there on that may be sampled.
    seed : int

    Returns
    -------
    float64 [B, P]
        0 at positions that nobody asks for.
    """
    table = np.zeros((len(lengths), max(lengths, default=0) + count))
    for b, length in enumerate(lengths):
        for position in range(length - 1, length - 1 + count):
            table[b, position] = reference.coin(seed, b, position)
    return table
