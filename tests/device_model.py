"""A model in four kernels, for rounds on the device: it computes what it reads there.

Its target likes ``successor[token]`` best, shifted by what its attention sees in a
cache that `verify_attn` reads, so that a wrong cache row or prefix length changes the
text. Its drafter guesses the same without the shift.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba.kernels.verify_attn import verify_attn

LENGTH, VOCAB, HEADS, D_LATENT, D = 4, 40, 2, 16, 24
SHAPE = {"sm_scale": 0.3, "d_latent": D_LATENT}


@cuda.jit
def draft_kernel(
    prefix_lens,  # [B] i32
    root_tokens,  # [B] i32
    noise,  # [T, L, V] f32
    successor,  # [V] i32
    logits,  # out [B, L, V] f32
):
    b = cuda.blockIdx.x
    token = root_tokens[b]
    for position in range(logits.shape[1]):
        token = successor[token]
        for v in range(cuda.threadIdx.x, logits.shape[2], cuda.blockDim.x):
            x = noise[prefix_lens[b] % noise.shape[0], position, v]
            logits[b, position, v] = x + np.float32(3.0) if v == token else x


@cuda.jit
def embed_kernel(
    tokens,  # [B, N] i32
    depths,  # [B, N] i32
    prefix_lens,  # [B] i32
    embedding,  # [V, D] f32
    kv_cache,  # out [layers, B, S_max, D] f32
    q,  # out [B, N, H, D] f32
):
    b, i = cuda.blockIdx.x, cuda.blockIdx.y
    token = tokens[b, i]
    position = np.float32(prefix_lens[b] + depths[b, i])
    for c in range(cuda.threadIdx.x, embedding.shape[1], cuda.blockDim.x):
        x = embedding[max(token, 0), c]
        for h in range(q.shape[2]):
            q[b, i, h, c] = x if h else -x
        if token >= 0:
            for layer in range(kv_cache.shape[0]):
                row = x * np.float32(layer + 1) + np.float32(0.1) * position
                kv_cache[layer, b, prefix_lens[b] + i, c] = row


@cuda.jit
def head_kernel(
    latents,  # [B, N, H, Dc] f32
    tokens,  # [B, N] i32
    successor,  # [V] i32
    first,  # i32: 1 for the first layer, which sets the logits
    logits,  # in and out [B, N, V] f32
):
    b, i = cuda.blockIdx.x, cuda.blockIdx.y
    token = max(tokens[b, i], 0)
    for v in range(cuda.threadIdx.x, logits.shape[2], cuda.blockDim.x):
        x = latents[b, i, v % latents.shape[2], (v * 7 + token) % latents.shape[3]]
        if first:
            x += np.float32(2.5) if v == successor[token] else np.float32(0.0)
        else:
            x += logits[b, i, v]
        logits[b, i, v] = x


@dataclass
class DeviceModel:
    """The model's constants, its cache, and where its kernels run."""

    at: Any
    noise: Any
    successor: Any
    embedding: Any
    kv_cache: Any

    @classmethod
    def make(cls, at, to_device, batch, room, layers=2, seed=0):
        rng = np.random.default_rng(seed)
        arrays = (
            rng.normal(size=(11, LENGTH, VOCAB)).astype(np.float32),
            rng.permutation(VOCAB).astype(np.int32),
            rng.normal(size=(VOCAB, D)).astype(np.float32),
            rng.normal(size=(layers, batch, room, D)).astype(np.float32),
        )
        return cls(at, *map(to_device, arrays))

    def launch(self, kernel, grid, *arrays):
        inputs = [
            self.at.check(x, "x", dtypes=None) if hasattr(x, "shape") and x.shape else x
            for x in arrays
        ]
        self.at.launch(kernel, grid, 32, *inputs)

    def draft(self, prefix_lens, root_tokens):
        batch = prefix_lens.shape[0]
        logits = self.at.empty((batch, LENGTH, VOCAB), np.float32)
        states = prefix_lens, root_tokens, self.noise, self.successor
        self.launch(draft_kernel, batch, *states, logits)
        return self.at.give(logits)

    def target(self, tree, prefix_lens):
        grid = tuple(tree.token_ids.shape)
        q = self.at.empty((*grid, HEADS, D), np.float32)
        logits = self.at.empty((*grid, VOCAB), np.float32)
        tokens = tree.token_ids
        states = tokens, tree.depths, prefix_lens, self.embedding, self.kv_cache
        self.launch(embed_kernel, grid, *states, q)
        for layer in range(self.kv_cache.shape[0]):
            latents, _ = verify_attn(
                self.at.give(q),
                self.kv_cache[layer],
                prefix_lens,
                tree.visibility,
                executor=self.at.executor,
                **SHAPE,
            )
            first = np.int32(layer == 0)
            weights = latents, tokens, self.successor, first, logits
            self.launch(head_kernel, grid, *weights)
        return self.at.give(logits)
