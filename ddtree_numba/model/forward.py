"""The small model in NumPy: the target, with a latent KV cache, and the block drafter.

The target keeps MLA's absorbed form. Head h scores a key by::

    q_nope . (W_UK,h c) + q_rope . k_rope = (W_UK,h^T q_nope || q_rope) . (c || k_rope)

so the cache holds one row ``c || k_rope`` a token for all heads, the left factor is the
query that `verify_attn` takes, and ``W_UV,h`` is applied to what it returns, a mean of
latents. `Model.unabsorbed` is the same network written out, for tests and readers.

A round is ``draft``, ``verify``, ``commit``; between rounds a `Cache` holds the settled
tokens but the last, whose row is the root of the next tree.

Matrix products run in float64; only queries, cache rows and logits are rounded, to
float32. A sum's order depends on the shape of a matrix product, so in float32 the same
text could get other logits as a tree's row than as a batch of one, and a near tie could
turn: the loop would not be lossless. In float64 what differs is far below the rounding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree_numba import backend, vectorised
from ddtree_numba._data import data_path
from ddtree_numba.kernels.kv_compact import kv_compact
from ddtree_numba.kernels.verify_attn import verify_attn
from ddtree_numba.model.config import VOCAB, ModelConfig
from ddtree_numba.model.weights import Weights, load_weights
from ddtree_numba.tree import DraftTree, n_words

if TYPE_CHECKING:
    from ddtree_numba.model.device import DeviceModel

Floats = NDArray[np.float64]
Attend = Callable[..., tuple[Any, Any]]

PREFILL_ROWS = 128


@dataclasses.dataclass
class Cache:
    """What the model keeps of the settled tokens of B requests.

    Request b's rows ``0 ... prefix_lens[b] - 1`` count; lowering `prefix_lens` takes
    the request back to an earlier place of the same text.

    Attributes
    ----------
    kv : float32 [n_layers, B, capacity, d_latent + d_rope]
        The target's rows ``c || k_rope``; tree row i lies at ``prefix_lens[b] + i``.
    prefix_lens : int32 [B]
        Settled tokens.
    context : float32 [B, capacity, d_model]
        The drafter's view of each settled token, from the target's residuals.
    keys, values : float32 [draft_layers, B, capacity, d_model]
        The drafter's own, from `context`; keys are roped.
    features : float64 [B, N, len(feature_layers) * d_model]
        The target's residuals of the rows that ran last; `Model.commit` reads them.
    """

    kv: NDArray[np.float32]
    prefix_lens: NDArray[np.int32]
    context: NDArray[np.float32]
    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    features: Floats

    @property
    def capacity(self) -> int:
        """Rows of each request, settled and tree together."""
        return self.kv.shape[2]


def load_model(folder: str | Path | None = None) -> Model:
    """The trained model.

    Parameters
    ----------
    folder
        Holds ``target.kdtr`` and ``drafter.kdtr``; the package's own by default.

    Raises
    ------
    KdtrError, ValueError
        If a file is missing, damaged, or of another network; the message names it.
    """
    root = data_path("model") if folder is None else Path(folder)
    config, target = load_weights(root / "target.kdtr", "target")
    # The drafter's file rules: a temperature is calibrated after the target is made.
    draft_config, drafter = load_weights(root / "drafter.kdtr", "drafter")
    if config.target_shapes() != draft_config.target_shapes():
        raise ValueError(f"{root}: target.kdtr and drafter.kdtr are of two models")
    return Model(draft_config, target, drafter)


class Model:
    """Target and drafter.

    Parameters
    ----------
    config
    target, drafter
        Weights by name, shaped as `ModelConfig.target_shapes` and `drafter_shapes`.

    Attributes
    ----------
    target_layers, drafter_layers : list of dict
        Each layer's own; with ``up_k`` [H, d_nope, d_latent] and ``up_v``
        [H, d_latent, d_value], the target's ``w_uk`` and ``w_uv`` by head.
    """

    def __init__(self, config: ModelConfig, target: Weights, drafter: Weights):
        self.config, self.target, self.drafter = config, target, drafter
        self.target_layers = _layers(target, config.n_layers)
        self.drafter_layers = _layers(drafter, config.draft_layers)
        for w in self.target_layers:
            heads = (config.d_latent, config.n_heads, -1)
            # By head, and contiguous, without which NumPy multiplies outside BLAS.
            w["up_k"] = w["w_uk"].reshape(heads).transpose(1, 2, 0).copy()
            w["up_v"] = w["w_uv"].reshape(heads).transpose(1, 0, 2).copy()

    @classmethod
    def random(cls, seed: int = 0, config: ModelConfig | None = None) -> Model:
        """A model with random weights, whose logits are far from flat."""
        config = config or ModelConfig()
        rng = np.random.default_rng(seed)

        def draw(shapes: dict[str, tuple[int, ...]]) -> Weights:
            weights = {}
            for name, shape in shapes.items():
                scale = 1.5 * shape[-2] ** -0.5 if name.startswith("w_") else 0.5
                weights[name] = rng.normal(size=shape) * scale
                if name.endswith("norm"):
                    weights[name] += 1
            return weights

        return cls(config, draw(config.target_shapes()), draw(config.drafter_shapes()))

    @functools.cached_property
    def on_gpu(self) -> DeviceModel:
        """The same network as kernels, its weights on the GPU."""
        from ddtree_numba.model.device import DeviceModel

        return DeviceModel(self)

    # ------------------------------------------------------------------ rounds

    def prefill(
        self, prompts: Sequence[Sequence[int]], capacity: int | None = None
    ) -> Cache:
        """A cache that holds these prompts.

        Parameters
        ----------
        prompts : B lists of token ids
            BOS first; may differ in length.
        capacity
            Rows for each request: its prompt, what will follow, and one tree. The
            longest prompt's length by default.
        """
        c, batch = self.config, len(prompts)
        lengths = np.array([len(prompt) for prompt in prompts])
        longest = int(lengths.max(initial=0))
        size = longest if capacity is None else capacity
        if size < longest:
            raise ValueError(f"capacity is {size}; the longest prompt has {longest}")
        draft_shape = (c.draft_layers, batch, size, c.d_model)
        cache = Cache(
            kv=np.zeros((c.n_layers, batch, size, c.d_cache), np.float32),
            prefix_lens=np.zeros(batch, np.int32),
            context=np.zeros(draft_shape[1:], np.float32),
            keys=np.zeros(draft_shape, np.float32),
            values=np.zeros(draft_shape, np.float32),
            features=np.zeros((batch, 0, len(c.feature_layers) * c.d_model)),
        )
        for start in range(0, longest, PREFILL_ROWS):
            count = min(PREFILL_ROWS, longest - start)
            tokens = np.full((batch, count), -1, np.int32)
            for row, prompt in zip(tokens, prompts, strict=True):
                part = prompt[start : start + count]
                row[: len(part)] = part
            live = np.clip(lengths - start, 0, count).astype(np.int32)
            depths = np.broadcast_to(np.arange(count, dtype=np.int32), tokens.shape)
            words = np.repeat(chain_visibility(count)[None], batch, 0)
            self._run(cache, tokens, depths, words, live, vectorised.verify_attn)
            self._extend_context(cache, depths, live)
            cache.prefix_lens += live
        return cache

    def draft(self, cache: Cache, roots: ArrayLike) -> NDArray[np.float32]:
        """The drafter's logits for the block that starts with each request's root.

        Parameters
        ----------
        cache
            At least one settled token a request.
        roots : int [B]
            The token at position ``prefix_lens[b]``, whose row is not in the cache.

        Returns
        -------
        float32 [B, block - 1, 256]
            Position k's logits speak of the token k + 1 places after the root. They
            are not yet divided by ``config.draft_temperature``.
        """
        c, w = self.config, self.drafter
        roots, starts = np.asarray(roots), cache.prefix_lens
        batch = len(starts)
        if (starts < 1).any():
            raise ValueError(
                f"prefix_lens is {starts.tolist()}; the drafter needs a settled token"
            )
        x = np.repeat(w["mask"][None, None], c.block, 1).repeat(batch, 0)
        x[:, 0] = self.target["embed"][roots]
        last = cache.context[np.arange(batch), starts - 1].astype(np.float64)
        x += w["position"] + (last @ w["w_last"])[:, None]
        x = x.reshape(batch * c.block, c.d_model)
        positions = (starts[:, None] + np.arange(c.block)).ravel()
        for i, layer in enumerate(self.drafter_layers):
            h = _rms_norm(x, layer["attn_norm"], c.norm_eps)
            q = self._rope_heads(h @ layer["w_q"], positions, c.draft_heads)
            k = self._rope_heads(h @ layer["w_k"], positions, c.draft_heads)
            v = h @ layer["w_v"]
            out = np.empty_like(x)
            for b, start in enumerate(starts):
                rows = slice(b * c.block, (b + 1) * c.block)
                keys = np.concatenate([cache.keys[i, b, :start], k[rows]])
                values = np.concatenate([cache.values[i, b, :start], v[rows]])
                out[rows] = _attention(q[rows], keys, values, c.draft_heads)
            x = x + out @ layer["w_o"]
            x = x + _swiglu(x, layer, c.norm_eps)
        x = _rms_norm(x, w["final_norm"], c.norm_eps).reshape(batch, c.block, -1)
        return (x[:, 1:] @ self.target["embed"][:VOCAB].T).astype(np.float32)

    def verify(
        self, cache: Cache, tree: DraftTree, *, executor: str | None = None
    ) -> NDArray[np.float32]:
        """The target's logits after every row of a tree.

        Writes each live row's key into the tail of the cache; `prefix_lens` stays.

        Parameters
        ----------
        cache
        tree : DraftTree of NumPy arrays
            Row 0 holds the root's token.
        executor : {"gpu", "emulator", "numpy"}, optional
            Where attention runs.

        Returns
        -------
        float32 [B, N, 256]
            NaN at padding rows.

        Raises
        ------
        ValueError
            If a tree does not fit behind its prefix.
        """
        over = cache.prefix_lens + tree.n_rows > cache.capacity
        if over.any():
            b = int(np.argmax(over))
            raise ValueError(
                f"tree, request {b} has {tree.n_rows[b]} rows after a prefix of "
                f"{cache.prefix_lens[b]}; the cache has {cache.capacity}"
            )
        return self._run(
            cache,
            tree.token_ids,
            tree.depths,
            tree.visibility,
            tree.n_rows,
            _attend(executor),
        )

    def commit(
        self,
        cache: Cache,
        rows: NDArray[np.int32],
        accept_len: NDArray[np.int32],
        *,
        executor: str | None = None,
    ) -> None:
        """Settle the accepted rows of the tree that `verify` ran last.

        Parameters
        ----------
        cache
            Changed in place: ``prefix_lens[b]`` grows by ``accept_len[b]``.
        rows : int32 [B, W]
            Accepted rows, ascending, root first.
        accept_len : int32 [B]
            How many of them count; 0 leaves a request as it is.
        executor
            Where the rows are moved.
        """
        before = cache.prefix_lens
        after = kv_compact(cache.kv, before, rows, accept_len, executor=executor)
        self._extend_context(cache, rows, accept_len)
        cache.prefix_lens = after

    # ---------------------------------------------------------------- networks

    def _run(
        self,
        cache: Cache,
        tokens: NDArray[np.int32],
        depths: NDArray[np.int32],
        visibility: NDArray[np.uint32],
        n_rows: NDArray[np.int32],
        attend: Attend,
    ) -> NDArray[np.float32]:
        """The target over rows of trees, all live rows of the batch side by side."""
        c = self.config
        live = np.arange(tokens.shape[1]) < n_rows[:, None]
        request, row = np.nonzero(live)
        positions = cache.prefix_lens[request] + depths[live]
        places = cache.prefix_lens[request] + row
        x = self.target["embed"][tokens[live]]
        query = np.zeros((*tokens.shape, c.n_heads, c.d_cache), np.float32)
        features = []
        for i, w in enumerate(self.target_layers):
            h = _rms_norm(x, w["attn_norm"], c.norm_eps)
            cache.kv[i, request, places] = self._cache_rows(h, w, positions)
            query[live] = self._queries(h, w, positions)
            latents, _ = attend(
                query,
                cache.kv[i],
                cache.prefix_lens,
                visibility,
                sm_scale=c.sm_scale,
                d_latent=c.d_latent,
            )
            heads = _by_head(latents[live].astype(np.float64)) @ w["up_v"]
            x = x + _by_head(heads).reshape(len(x), -1) @ w["w_o"]
            x = x + _swiglu(x, w, c.norm_eps)
            if i + 1 in c.feature_layers:
                features.append(x)
        cache.features = np.zeros((*tokens.shape, cache.features.shape[2]))
        cache.features[live] = np.concatenate(features, axis=1)
        logits = np.full((*tokens.shape, VOCAB), np.nan, np.float32)
        x = _rms_norm(x, self.target["final_norm"], c.norm_eps)
        logits[live] = x @ self.target["embed"][:VOCAB].T
        return logits

    def _cache_rows(self, h: Floats, w: Weights, positions: NDArray) -> Floats:
        """``c || k_rope`` of rows: [R, d_latent + d_rope]."""
        c = self.config
        latent, k_rope = np.split(h @ w["w_dkv"], [c.d_latent], axis=1)
        latent = _rms_norm(latent, w["latent_norm"], c.norm_eps)
        return np.concatenate([latent, _rotate(k_rope, positions, c.rope_base)], axis=1)

    def _queries(self, h: Floats, w: Weights, positions: NDArray) -> Floats:
        """Absorbed queries of rows: [R, H, d_latent + d_rope]."""
        c = self.config
        q = (h @ w["w_q"]).reshape(len(h), c.n_heads, c.d_nope + c.d_rope)
        absorbed = _by_head(q[:, :, : c.d_nope]) @ w["up_k"]
        roped = _rotate(q[:, :, c.d_nope :], positions[:, None], c.rope_base)
        return np.concatenate([_by_head(absorbed), roped], axis=2)

    def unabsorbed(self, tokens: Sequence[int]) -> tuple[Floats, Floats]:
        """The target over one whole text, with every head's keys and values spelt out.

        Parameters
        ----------
        tokens
            T token ids, at positions 0 ... T - 1.

        Returns
        -------
        logits : float64 [T, 256]
        features : float64 [T, len(feature_layers) * d_model]
        """
        c, length = self.config, len(tokens)
        positions = np.arange(length)
        hidden = np.triu(np.full((length, length), -np.inf), 1)
        x = self.target["embed"][np.asarray(tokens)]
        features = []
        for i, w in enumerate(self.target_layers):
            h = _rms_norm(x, w["attn_norm"], c.norm_eps)
            rows = self._cache_rows(h, w, positions)
            latent, k_rope = np.split(rows, [c.d_latent], axis=1)
            q = (h @ w["w_q"]).reshape(length, c.n_heads, -1)
            q_rope = _rotate(q[:, :, c.d_nope :], positions[:, None], c.rope_base)
            k_nope = (latent @ w["w_uk"]).reshape(length, c.n_heads, c.d_nope)
            v = (latent @ w["w_uv"]).reshape(length, c.n_heads, c.d_value)
            scores = _by_head(q[:, :, : c.d_nope]) @ np.swapaxes(_by_head(k_nope), 1, 2)
            scores += _by_head(q_rope) @ k_rope.T
            shares = _softmax(scores * c.sm_scale + hidden)
            out = _by_head(shares @ _by_head(v)).reshape(length, -1)
            x = x + out @ w["w_o"]
            x = x + _swiglu(x, w, c.norm_eps)
            if i + 1 in c.feature_layers:
                features.append(x)
        x = _rms_norm(x, self.target["final_norm"], c.norm_eps)
        return x @ self.target["embed"][:VOCAB].T, np.concatenate(features, axis=1)

    def _extend_context(self, cache: Cache, rows: NDArray, counts: NDArray) -> None:
        """Let the drafter see the first ``counts[b]`` of ``rows[b]``, just settled."""
        c, w = self.config, self.drafter
        request, place = np.nonzero(np.arange(rows.shape[1]) < counts[:, None])
        features = cache.features[request, rows[request, place]]
        positions = cache.prefix_lens[request] + place
        context = _rms_norm(features @ w["w_fuse"], w["fuse_norm"], c.norm_eps)
        cache.context[request, positions] = context
        for i, layer in enumerate(self.drafter_layers):
            cache.keys[i, request, positions] = self._rope_heads(
                context @ layer["w_k"], positions, c.draft_heads
            )
            cache.values[i, request, positions] = context @ layer["w_v"]

    def _rope_heads(self, x: Floats, positions: NDArray, heads: int) -> Floats:
        """Rope every head of ``x [R, heads * width]`` on its own."""
        split = x.reshape(len(x), heads, x.shape[1] // heads)
        roped = _rotate(split, positions[:, None], self.config.rope_base)
        return roped.reshape(x.shape)


def _attend(executor: str | None) -> Attend:
    """Tree-masked attention on an executor, the default being the GPU or NumPy."""
    executor = backend.choose(executor)
    if executor == "numpy":  # the reference's loops are for reading
        return vectorised.verify_attn
    return functools.partial(verify_attn, executor=executor)


def _layers(weights: Weights, count: int) -> list[Weights]:
    """Each layer's own weights: matrices [in, out] and norms, by name."""
    stacked = {
        name: w
        for name, w in weights.items()
        if w.ndim == 3 or name in ("attn_norm", "ffn_norm", "latent_norm")
    }
    return [{name: w[i] for name, w in stacked.items()} for i in range(count)]


def _rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope_turns(positions: NDArray, width: int, base: float) -> Floats:
    """Cosine and sine of each pair's angle: [..., width/2, 2]."""
    angles = positions[..., None] * base ** -(np.arange(0, width, 2) / width)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def _rotate(x: Floats, positions: NDArray, base: float) -> Floats:
    """Rotary embedding of the last axis, pairs (0, 1), (2, 3), ...

    ``positions`` has x's leading axes, or 1 in their place.
    """
    turns = rope_turns(positions, x.shape[-1], base)
    cos, sin = turns[..., 0], turns[..., 1]
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape)


def _swiglu(x: Floats, w: Weights, eps: float) -> Floats:
    h = _rms_norm(x, w["ffn_norm"], eps)
    gate = h @ w["w_gate"]
    return (gate / (1 + np.exp(-gate)) * (h @ w["w_up"])) @ w["w_down"]


def _softmax(scores: Floats) -> Floats:
    exps = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exps / exps.sum(axis=-1, keepdims=True)


def _attention(q: Floats, keys: Floats, values: Floats, heads: int) -> Floats:
    """Every query over every key, head by head; all [rows, heads * width]."""
    q, keys, values = (
        _by_head(x.reshape(len(x), heads, -1)) for x in (q, keys, values)
    )
    shares = _softmax(q @ np.swapaxes(keys, 1, 2) * q.shape[2] ** -0.5)
    return _by_head(shares @ values).reshape(q.shape[1], -1)


def _by_head(x: Floats) -> Floats:
    """The first two axes exchanged, in memory too: BLAS wants it so."""
    return np.ascontiguousarray(np.swapaxes(x, 0, 1))


def chain_visibility(n: int) -> NDArray[np.uint32]:
    """Visibility words of a chain of n rows: each sees itself and all before it."""
    bits = np.zeros((n, 32 * n_words(n)), np.uint8)
    bits[:, :n] = np.tri(n, dtype=np.uint8)
    return np.packbits(bits, axis=1, bitorder="little").view("<u4")
