"""Train the small model: one script from text to weights.

    python -m ddtree_numba.model.train --stdlib DIR --out DIR

Stages, each on a step budget and under a common wall-clock limit:

1. *target*: next byte of the standard library's text, dropout 0.1.
2. *continuations*: training excerpts of 64 ... 512 bytes, continued greedily by the
   target itself, half of them after 24 bytes sampled at temperature 1 (which leaves
   memorised text). A drafter that learns from these predicts the target, not Python.
3. *drafter*: blocks of 16 inside the continuations, on the frozen target's features.
   Context lengths are mixed, or the drafter learns "a long context is easy text".

Matrices are optimised by Muon (Jordan et al. 2024), the rest by AdamW. It needs PyTorch
(the extra ``train``) and, at full size, one GPU with 80 GB; with ``--tiny`` it runs
every stage in minutes on a CPU. ``target.kdtr`` is written as soon as it exists.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
except ImportError:
    raise SystemExit('training needs PyTorch: pip install -e ".[train]"') from None

from ddtree_numba import kdtr
from ddtree_numba.model.config import BOS, VOCAB, ModelConfig
from ddtree_numba.model.text import encode, held_out_text, training_text
from ddtree_numba.model.weights import load_weights, save_weights

IGNORE = -100  # cross_entropy's label for "no target here"


@dataclasses.dataclass
class Recipe:
    """Budgets and rates; lengths in bytes, limits in seconds."""

    target_steps: int = 4400
    target_batch: int = 32
    target_len: int = 1024
    target_limit: float = 110.0
    dropout: float = 0.1
    excerpt_lens: tuple[int, ...] = (64, 128, 192, 256, 320, 384, 448, 512)
    per_len: int = 4096
    continuation: int = 256
    sampled: int = 24
    drafter_steps: int = 12_000
    drafter_batch: int = 64
    anchors: int = 32
    drafter_limit: float = 215.0
    position_decay: float = 7.0
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    target_decay: float = 0.05
    drafter_decay: float = 0.02
    held_out_modules: int = 32
    total_limit: float = 520.0

    @property
    def text_len(self) -> int:
        """Tokens of the longest excerpt with its continuation, BOS counted."""
        return 1 + max(self.excerpt_lens) + self.continuation


TINY = Recipe(
    target_steps=60,
    target_batch=4,
    target_len=128,
    excerpt_lens=(16, 40),
    per_len=8,
    continuation=32,
    sampled=4,
    drafter_steps=40,
    drafter_batch=4,
    anchors=4,
    held_out_modules=2,
)
TINY_CONFIG = ModelConfig(n_layers=4, d_model=64, d_ffn=128, draft_layers=2)


# ------------------------------------------------------------------ networks


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in the widest type given."""
    x = x.float() if x.dtype != torch.float64 else x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope_table(width: int, config: ModelConfig) -> Tensor:
    """Cosine and sine of every position's angles, float64 [max_len, width / 2, 2]."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    positions = torch.arange(config.max_len, dtype=torch.float64)
    angles = positions[:, None] * config.rope_base**-exponents
    return torch.stack([angles.cos(), angles.sin()], -1)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary embedding of ``x [..., T, heads, width]``, pairs (0, 1), (2, 3), ...

    ``turns [T, width / 2, 2]`` are the positions' rows of `rope_table`.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = turns.to(dtype)[:, None].unbind(-1)
    even, odd = x[..., 0::2].to(dtype), x[..., 1::2].to(dtype)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return turned.flatten(-2).to(x.dtype)


class Network(nn.Module):
    """Weights by name; matrices of all layers stacked in one parameter."""

    def __init__(
        self, config: ModelConfig, shapes: dict[str, tuple[int, ...]], d_rope: int
    ):
        super().__init__()
        self.config = config
        self.register_buffer("turns", rope_table(d_rope, config), persistent=False)
        for name, shape in shapes.items():
            if name.endswith("norm"):
                value = torch.ones(shape)
            elif name in ("w_o", "w_down"):  # every layer starts as the identity
                value = torch.zeros(shape)
            elif name.startswith("w_"):
                value = torch.randn(shape) * shape[-2] ** -0.5
            else:
                value = torch.randn(shape) * 0.04
            self.register_parameter(name, nn.Parameter(value))

    def layers(self, count: int) -> Iterator[dict[str, Tensor]]:
        """Each layer's own weights, by name."""
        stacked = {
            name: weight.unbind(0)
            for name, weight in self.named_parameters()
            if weight.shape[0] == count and name not in ("embed", "mask", "position")
        }
        for i in range(count):
            yield {name: weights[i] for name, weights in stacked.items()}

    def swiglu(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        """The feed-forward branch of one layer."""
        h = rms_norm(x, w["ffn_norm"], self.config.norm_eps)
        return (F.silu(h @ w["w_gate"]) * (h @ w["w_up"])) @ w["w_down"]


class Target(Network):
    """MLA transformer over bytes, un-absorbed: the form that training wants."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, config.target_shapes(), config.d_rope)

    def forward(
        self, tokens: Tensor, dropout: float = 0.0
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Final hidden states, residuals after each layer, each layer's cache rows.

        ``tokens [B, T]`` stand at positions 0 ... T - 1. Returns [B, T, d_model], and
        lists of [B, T, d_model] and [B, T, d_cache].
        """
        c = self.config
        x = self.embed[tokens]
        residuals, rows = [], []
        for w in self.layers(c.n_layers):
            branch, cache_rows = self.attention(x, w)
            x = x + F.dropout(branch, dropout)
            x = x + F.dropout(self.swiglu(x, w), dropout)
            residuals.append(x)
            rows.append(cache_rows)
        return rms_norm(x, self.final_norm, c.norm_eps), residuals, rows

    def attention(self, x: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Causal MLA of one layer: its branch, and its cache rows."""
        c, (batch, length) = self.config, x.shape[:2]
        turns = self.turns[:length]
        h = rms_norm(x, w["attn_norm"], c.norm_eps)
        q = (h @ w["w_q"]).view(batch, length, c.n_heads, c.d_nope + c.d_rope)
        q_nope, q_rope = q.split([c.d_nope, c.d_rope], -1)
        q_rope = rotate(q_rope, turns)
        latent, k_rope = (h @ w["w_dkv"]).split([c.d_latent, c.d_rope], -1)
        latent = rms_norm(latent, w["latent_norm"], c.norm_eps)
        k_rope = rotate(k_rope[:, :, None], turns)
        k_nope = (latent @ w["w_uk"]).view(batch, length, c.n_heads, c.d_nope)
        v = (latent @ w["w_uv"]).view(batch, length, c.n_heads, c.d_value)
        k = torch.cat([k_nope, k_rope.expand(-1, -1, c.n_heads, -1)], -1)
        q = torch.cat([q_nope, q_rope], -1)
        # Padded values let the fused kernel run, which wants one width for all three.
        v = F.pad(v, (0, c.d_nope + c.d_rope - c.d_value))
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            scale=c.sm_scale,
        )
        out = out.transpose(1, 2)[..., : c.d_value].flatten(2)
        return out @ w["w_o"], torch.cat([latent, k_rope[:, :, 0]], -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Tied head over the 256 bytes."""
        return hidden @ self.embed[:VOCAB].T

    def features(self, residuals: list[Tensor]) -> Tensor:
        """What the drafter reads: [B, T, len(feature_layers) * d_model]."""
        return torch.cat([residuals[i - 1] for i in self.config.feature_layers], -1)


class Drafter(Network):
    """Fills a block's masked positions in one pass, given the target's features."""

    def __init__(self, config: ModelConfig):
        d_head = config.d_model // config.draft_heads
        super().__init__(config, config.drafter_shapes(), d_head)

    def forward(
        self, features: Tensor, bonus: Tensor, anchors: Tensor, embed: Tensor
    ) -> Tensor:
        """Logits [B, A, block - 1, 256] of the blocks at `anchors`.

        ``features [B, S, F]`` are of positions 0 ... S - 1. Block a starts with the
        known token ``bonus[:, a]`` at position ``anchors[a]``; it reads the features
        before that position, and itself in both directions.
        """
        c = self.config
        batch, length = features.shape[:2]
        context = rms_norm(features @ self.w_fuse, self.fuse_norm, c.norm_eps)
        last = context[:, anchors - 1] @ self.w_last
        masks = self.mask.expand(batch, len(anchors), c.block - 1, -1)
        x = torch.cat([embed[bonus][:, :, None], masks], 2)
        x = (x + self.position + last[:, :, None]).flatten(1, 2)
        steps = torch.arange(c.block, device=anchors.device)
        bias = self.bias(anchors, length, features.dtype)
        block_turns = self.turns[(anchors[:, None] + steps).flatten()]
        turns = torch.cat([self.turns[:length], block_turns])
        for w in self.layers(c.draft_layers):
            h = rms_norm(x, w["attn_norm"], c.norm_eps)
            x = x + self.attention(h, context, w, turns, bias)
            x = x + self.swiglu(x, w)
        x = rms_norm(x, self.final_norm, c.norm_eps).unflatten(1, (-1, c.block))
        return x[:, :, 1:] @ embed[:VOCAB].T

    def bias(self, anchors: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """0 where a block's row may look, else -inf: [A * block, S + A * block]."""
        count = len(anchors)
        before = torch.arange(length, device=anchors.device) < anchors[:, None]
        own = torch.eye(count, dtype=torch.bool, device=anchors.device)
        own = own.repeat_interleave(self.config.block, 1)
        sees = torch.cat([before, own], 1).repeat_interleave(self.config.block, 0)
        return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(
            ~sees, -math.inf
        )

    def attention(
        self,
        h: Tensor,
        context: Tensor,
        w: dict[str, Tensor],
        turns: Tensor,
        bias: Tensor,
    ) -> Tensor:
        """One layer's branch: block rows over context and block."""
        c = self.config
        both = torch.cat([context, h], 1)

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (c.draft_heads, -1))

        q = rotate(heads(h @ w["w_q"]), turns[-h.shape[1] :])
        k = rotate(heads(both @ w["w_k"]), turns)
        v = heads(both @ w["w_v"])
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mask = bias.to(q.dtype).expand(len(h), c.draft_heads, -1, -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(2) @ w["w_o"]


# ----------------------------------------------------------------- optimiser


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearest orthogonal matrices, roughly: Newton-Schulz in bf16, [..., in, out]."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Optimiser:
    """Muon for the matrices, AdamW for embedding, norms and positions."""

    def __init__(self, network: Network, recipe: Recipe, decay: float):
        named = list(network.named_parameters())
        self.matrices = [p for name, p in named if name.startswith("w_")]
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        rest = [p for name, p in named if not name.startswith("w_")]
        fused = rest[0].is_cuda
        self.adam = torch.optim.AdamW(
            rest, recipe.adam_lr, betas=(0.9, 0.97), weight_decay=0.0, fused=fused
        )
        self.recipe, self.decay = recipe, decay

    @torch.no_grad()
    def step(self, rate: float, step: int) -> None:
        """One update at `rate` times the base learning rates; clears gradients."""
        beta = 0.85 + 0.10 * min(step / 300, 1.0)
        lr = self.recipe.muon_lr * rate
        for p, momentum in zip(self.matrices, self.momenta, strict=True):
            momentum.lerp_(p.grad, 1 - beta)
            update = orthogonalise(p.grad.lerp(momentum, beta))
            p.mul_(1 - lr * self.decay)
            p.add_(update, alpha=-lr * max(1.0, p.shape[-1] / p.shape[-2]) ** 0.5)
            p.grad = None
        self.adam.param_groups[0]["lr"] = self.recipe.adam_lr * rate
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)


def rate_at(progress: float) -> float:
    """Learning-rate factor: warm-up to 3 %, flat to 35 %, cosine to 0.02."""
    if progress < 0.03:
        return max(progress, 1e-3) / 0.03
    if progress < 0.35:
        return 1.0
    turn = math.pi * (progress - 0.35) / 0.65
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(turn))


# -------------------------------------------------------------------- stages


class Run:
    """One training run: device, seeds, clock, log."""

    def __init__(self, recipe: Recipe, config: ModelConfig, seed: int, out: Path):
        self.recipe, self.config, self.out = recipe, config, out
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.on_gpu = self.device.type == "cuda"
        self.start = time.perf_counter()
        torch.manual_seed(seed)
        self.random = torch.Generator(self.device).manual_seed(seed)
        self.host_random = torch.Generator().manual_seed(seed)
        self.log: dict[str, Any] = {
            "seed": seed,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "device": "CPU",
            "recipe": dataclasses.asdict(recipe),
            "config": dataclasses.asdict(config),
            "stages": {},
        }
        if self.on_gpu:
            # cuDNN's attention plans each shape anew; the fused kernels do not.
            torch.backends.cuda.enable_cudnn_sdp(False)
            torch.backends.cuda.matmul.allow_tf32 = True
            self.log["device"] = torch.cuda.get_device_name()
        out.mkdir(parents=True, exist_ok=True)

    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.start

    def autocast(self) -> torch.autocast:
        """bf16 matrix products on a GPU, float32 on a CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu)

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Time a stage; what the block puts into the dictionary is logged."""
        begin = time.perf_counter()
        entry: dict[str, Any] = {}
        self.log["stages"][name] = entry
        yield entry
        if self.on_gpu:
            torch.cuda.synchronize()
        entry["seconds"] = round(time.perf_counter() - begin, 1)
        short = {k: v for k, v in entry.items() if not isinstance(v, list)}
        print(f"[{self.elapsed():6.1f} s] {name}: {json.dumps(short)}", flush=True)
        self.write_log()

    def write_log(self) -> None:
        """Write the log as it stands."""
        (self.out / "train.json").write_text(json.dumps(self.log, indent=1) + "\n")

    def optimise(
        self,
        network: Network,
        loss_of: Callable[[], Tensor],
        steps: int,
        limit: float,
        decay: float,
        entry: dict[str, Any],
    ) -> None:
        """Take `steps` optimiser steps, or as many as fit in `limit` seconds.

        The schedule follows whichever of the two budgets is further spent, so that it
        ends annealed either way.
        """
        optimiser = Optimiser(network, self.recipe, decay)
        begin = time.perf_counter()
        loss_of().backward()  # compiles, outside the budget
        network.zero_grad(set_to_none=True)
        entry["compile_seconds"] = round(time.perf_counter() - begin, 1)
        limit = min(limit, self.recipe.total_limit - self.elapsed())
        begin, step, losses = time.perf_counter(), 0, []
        while True:
            progress = max(step / steps, (time.perf_counter() - begin) / limit)
            if progress >= 1:
                break
            loss = loss_of()
            loss.backward()
            optimiser.step(rate_at(progress), step)
            if step % 50 == 0:
                losses.append(loss.detach())
                if self.on_gpu and step % 200 == 0:
                    torch.cuda.synchronize()  # keep the clock honest
            step += 1
        entry["steps"] = step
        entry["loss_bits_every_50"] = [round(v.item() / math.log(2), 4) for v in losses]
        entry["last_loss_bits"] = entry["loss_bits_every_50"][-1]
        entry["train_seconds"] = round(time.perf_counter() - begin, 1)


def stream(modules: dict[str, bytes]) -> np.ndarray:
    """All modules as one row of tokens, BOS before each."""
    return np.concatenate([encode(text) for text in modules.values()])


def train_target(run: Run, text: Tensor, entry: dict[str, Any]) -> Target:
    """Stage 1. Every excerpt starts with BOS, wherever it was cut."""
    r = run.recipe
    target = Target(run.config).to(run.device)
    offsets = torch.arange(r.target_len, device=run.device)

    def batch_loss(labels: Tensor) -> Tensor:
        tokens = F.pad(labels[:, :-1], (1, 0), value=BOS)
        with run.autocast():
            logits = target.logits(target(tokens, r.dropout)[0]).float()
        labels = torch.where(labels == BOS, IGNORE, labels)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    fast_loss = torch.compile(batch_loss) if run.on_gpu else batch_loss

    def loss_of() -> Tensor:
        starts = torch.randint(
            len(text) - r.target_len,
            (r.target_batch, 1),
            generator=run.random,
            device=run.device,
        )
        return fast_loss(text[starts + offsets])

    run.optimise(target, loss_of, r.target_steps, r.target_limit, r.target_decay, entry)
    entry["tokens"] = entry["steps"] * r.target_batch * r.target_len
    with torch.no_grad():
        for p in target.parameters():
            p.copy_(p.half())  # what follows sees the weights as they are stored
    return target


@torch.no_grad()
def bits_per_byte(
    run: Run, target: Target, modules: dict[str, bytes], overlap: int = 0
) -> float:
    """Loss over whole modules, in windows of BOS and ``target_len - 1`` bytes.

    A window starts `overlap` bytes before the last one's end and is scored after them,
    so that every byte but a module's first has at least so much context.
    """
    size = run.recipe.target_len - 1
    inputs, labels = [], []
    for text in modules.values():
        for begin in range(0, max(1, len(text) - overlap), size - overlap):
            tokens = torch.from_numpy(encode(text[begin : begin + size])).long()
            inputs.append(tokens[:-1])
            labels.append(tokens[1:].clone())
            labels[-1][: overlap if begin else 0] = IGNORE
    total, count = 0.0, 0
    for part in range(0, len(inputs), 32):
        rows = slice(part, part + 32)
        tokens = nn.utils.rnn.pad_sequence(inputs[rows], batch_first=True)
        wanted = nn.utils.rnn.pad_sequence(labels[rows], True, IGNORE).to(run.device)
        with run.autocast():
            logits = target.logits(target(tokens.to(run.device))[0]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        total += loss.item()
        count += int((wanted != IGNORE).sum())
    return total / count / math.log(2)


@torch.no_grad()
def continue_text(run: Run, target: Target, excerpts: Tensor, sampled: int) -> Tensor:
    """Continue ``excerpts [B, T]`` by the recipe's number of bytes.

    The first `sampled` bytes of the second half of the batch are drawn at temperature
    1, all else is the argmax. Attention is absorbed over a latent cache.
    """
    c, (batch, length) = run.config, excerpts.shape
    total = length + run.recipe.continuation
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    caches = [
        torch.zeros(batch, total, c.d_cache, dtype=dtype, device=run.device)
        for _ in range(c.n_layers)
    ]
    hidden = []
    for part in range(0, batch, 512):
        with run.autocast():
            states, _, rows = target(excerpts[part : part + 512])
        hidden.append(states[:, -1])
        for cache, new in zip(caches, rows, strict=True):
            cache[part : part + 512, :length] = new
    small = {name: p.to(dtype) for name, p in target.named_parameters()}
    logits = torch.cat(hidden) @ target.embed[:VOCAB].T
    tokens = F.pad(excerpts, (0, run.recipe.continuation))
    for position in range(length, total):
        choice = logits.float().argmax(-1)
        if position < length + sampled:
            draw = torch.multinomial(
                logits.float().softmax(-1), 1, generator=run.random
            )
            choice[batch // 2 :] = draw[batch // 2 :, 0]
        tokens[:, position] = choice
        logits = step_target(target, small, choice, position, caches)
    return tokens


def step_target(
    target: Target,
    weights: dict[str, Tensor],
    tokens: Tensor,
    position: int,
    caches: list[Tensor],
) -> Tensor:
    """Logits after one more token of every text; writes its cache rows."""
    c, batch, dtype = target.config, len(tokens), caches[0].dtype
    x = target.embed[tokens]
    turns = target.turns[position : position + 1]

    def norm(y: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(y, weight, c.norm_eps).to(dtype)

    for i, cache in enumerate(caches):
        w = {k: v[i] for k, v in weights.items() if v.shape[0] == c.n_layers}
        h = norm(x, w["attn_norm"])
        q = (h @ w["w_q"]).view(batch, c.n_heads, c.d_nope + c.d_rope)
        q_nope, q_rope = q.split([c.d_nope, c.d_rope], -1)
        latent, k_rope = (h @ w["w_dkv"]).split([c.d_latent, c.d_rope], -1)
        cache[:, position, : c.d_latent] = norm(latent, w["latent_norm"])
        k_rope = rotate(k_rope[:, None, None], turns)
        cache[:, position, c.d_latent :] = k_rope[:, 0, 0]
        w_uk = w["w_uk"].view(c.d_latent, c.n_heads, c.d_nope)
        q_latent = torch.einsum("bhn,lhn->bhl", q_nope, w_uk)
        q_rope = rotate(q_rope[:, None], turns)[:, 0]
        seen = cache[:, : position + 1]
        scores = torch.cat([q_latent, q_rope], -1) @ seen.mT
        shares = (scores.float() * c.sm_scale).softmax(-1).to(dtype)
        out = shares @ seen[..., : c.d_latent]
        w_uv = w["w_uv"].view(c.d_latent, c.n_heads, c.d_value)
        out = torch.einsum("bhl,lhv->bhv", out, w_uv).flatten(1)
        x = x + out @ w["w_o"]
        h = norm(x, w["ffn_norm"])
        x = x + (F.silu(h @ w["w_gate"]) * (h @ w["w_up"])) @ w["w_down"]
    return norm(x, weights["final_norm"]) @ weights["embed"][:VOCAB].T


def make_continuations(run: Run, target: Target, text: Tensor) -> list[Tensor]:
    """Stage 2: for each excerpt length, tokens [per_len, 1 + length + continuation]."""
    r = run.recipe
    groups = []
    for length in r.excerpt_lens:
        starts = torch.randint(
            len(text) - length, (r.per_len, 1), generator=run.random, device=run.device
        )
        excerpts = text[starts + torch.arange(length, device=run.device)]
        # A module's start inside an excerpt becomes a line end: BOS stands first only.
        excerpts = torch.where(excerpts == BOS, ord("\n"), excerpts)
        excerpts = F.pad(excerpts, (1, 0), value=BOS)
        groups.append(continue_text(run, target, excerpts, r.sampled))
    return groups


@torch.no_grad()
def read_features(run: Run, target: Target, tokens: Tensor, length: int) -> Tensor:
    """The target's features of ``tokens [n, T]``: bf16 [n, length, F], zero padded."""
    width = len(run.config.feature_layers) * run.config.d_model
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    out = torch.zeros(len(tokens), length, width, dtype=dtype, device=run.device)
    for part in range(0, len(tokens), 256):
        with run.autocast():
            _, residuals, _ = target(tokens[part : part + 256, :-1])
        out[part : part + 256, : tokens.shape[1] - 1] = target.features(residuals)
    return out


def train_drafter(
    run: Run, target: Target, groups: list[Tensor], entry: dict[str, Any]
) -> Drafter:
    """Stage 3. A step takes one excerpt length; its anchors serve the whole batch."""
    r, block = run.recipe, run.config.block
    features = [read_features(run, target, g, r.text_len - 1) for g in groups]
    drafter = Drafter(run.config).to(run.device)
    embed = target.embed.detach()
    steps = torch.arange(block, device=run.device)
    decay = torch.exp(-steps[: block - 1] / r.position_decay)

    def batch_loss(seen: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        with run.autocast():
            logits = drafter(seen, blocks[:, :, 0], anchors, embed).float()
        loss = F.cross_entropy(
            logits.flatten(0, 2), blocks[:, :, 1:].flatten(), reduction="none"
        )
        return (loss.view(-1, block - 1) @ decay).mean() / decay.sum()

    fast_loss = torch.compile(batch_loss) if run.on_gpu else batch_loss

    def loss_of() -> Tensor:
        group = int(torch.randint(len(groups), (1,), generator=run.host_random))
        tokens, length = groups[group], r.excerpt_lens[group]
        places = r.continuation - block + 1
        anchors = torch.randperm(places, generator=run.random, device=run.device)
        anchors = 1 + length + anchors[: r.anchors]
        rows = torch.randint(
            len(tokens), (r.drafter_batch,), generator=run.random, device=run.device
        )
        blocks = tokens[rows][:, anchors[:, None] + steps]
        return fast_loss(features[group][rows], blocks, anchors)

    run.optimise(
        drafter, loss_of, r.drafter_steps, r.drafter_limit, r.drafter_decay, entry
    )
    entry["blocks"] = entry["steps"] * r.drafter_batch * r.anchors
    return drafter


@torch.no_grad()
def chain_length(
    run: Run, target: Target, drafter: Drafter, modules: dict[str, bytes]
) -> dict[str, Any]:
    """Held-out check of the drafter: top-1 by position, and drafts that match in a row.

    Every module gives one excerpt of the middle length, continued greedily; each
    position of the continuation that leaves room for a block counts once.
    """
    r, block = run.recipe, run.config.block
    length = r.excerpt_lens[len(r.excerpt_lens) // 2]
    excerpts = np.stack([encode(t[1000 : 1000 + length]) for t in modules.values()])
    tokens = torch.from_numpy(excerpts).long().to(run.device)
    tokens = continue_text(run, target, tokens, 0)
    features = read_features(run, target, tokens, tokens.shape[1] - 1)
    steps = torch.arange(block, device=run.device)
    anchors = torch.arange(1 + length, tokens.shape[1] - block + 1, device=run.device)
    right = []
    for part in anchors.split(r.anchors):
        blocks = tokens[:, part[:, None] + steps]
        with run.autocast():
            logits = drafter(features, blocks[:, :, 0], part, target.embed)
        right.append(logits.argmax(-1) == blocks[:, :, 1:])
    hits = torch.cat(right, 1).float()
    top1 = [round(v, 3) for v in hits.mean((0, 1)).tolist()]
    return {"chain_accepted": hits.cumprod(-1).sum(-1).mean().item(), "top1": top1}


# ------------------------------------------------------------------- results


def stored(network: Network) -> dict[str, np.ndarray]:
    """Weights as they are stored: fp16 on the host."""
    return {
        name: p.detach().to("cpu", torch.float16).numpy()
        for name, p in network.named_parameters()
    }


@torch.no_grad()
def golden(target: Target, drafter: Drafter) -> dict[str, np.ndarray]:
    """Logits of both networks, in float64 from the stored weights, for the tests."""
    config = target.config
    target64, drafter64 = Target(config).double(), Drafter(config).double()
    for network, twin in ((target, target64), (drafter, drafter64)):
        for name, weight in stored(network).items():
            getattr(twin, name).copy_(torch.from_numpy(weight))
    tensors = {}
    modules = held_out_text()
    cases = (("heapq", 40), ("json.decoder", 130), ("textwrap", 257))
    for name, length in cases:
        tokens = torch.from_numpy(encode(modules[name][2000 : 2000 + length])).long()
        hidden, residuals, _ = target64(tokens[None])
        anchors = torch.tensor([8, length // 2, length])
        drafts = drafter64(
            target64.features(residuals), tokens[None, anchors], anchors, target64.embed
        )
        logits = target64.logits(hidden)[0]
        tensors[f"{name}.tokens"] = tokens.int().numpy()
        tensors[f"{name}.logits"] = logits.float().numpy()
        tensors[f"{name}.anchors"] = anchors.int().numpy()
        tensors[f"{name}.draft_logits"] = drafts[0].float().numpy()
    return tensors


def restore_target(run: Run, path: str) -> Target:
    """A target from its weight file, to train a drafter alone."""
    config, weights = load_weights(path, "target")
    if config.target_shapes() != run.config.target_shapes():
        raise ValueError(f"--resume-target {path}: made for another configuration")
    target = Target(run.config).to(run.device)
    with torch.no_grad():
        for name, weight in weights.items():
            getattr(target, name).copy_(torch.from_numpy(weight))
    return target


def train(run: Run, stdlib: str, resume_target: str | None = None) -> None:
    """All stages; writes target.kdtr, drafter.kdtr, golden.kdtr and train.json."""
    held_out = dict(list(held_out_text().items())[: run.recipe.held_out_modules])
    modules = training_text(stdlib)
    text = torch.from_numpy(stream(modules)).long().to(run.device)
    run.log["modules"], run.log["bytes"] = len(modules), len(text) - len(modules)
    if resume_target is None:
        with run.stage("target") as entry:
            target = train_target(run, text, entry)
        save_weights(run.out / "target.kdtr", run.config, stored(target))
    else:
        target = restore_target(run, resume_target)
    target.requires_grad_(False)
    with run.stage("held_out") as entry:
        half = run.recipe.target_len // 2
        entry["bits_per_byte"] = bits_per_byte(run, target, held_out, half)
        entry["bits_per_byte_no_overlap"] = bits_per_byte(run, target, held_out)
    with run.stage("continuations") as entry:
        groups = make_continuations(run, target, text)
        entry["texts"] = sum(len(group) for group in groups)
    with run.stage("drafter") as entry:
        drafter = train_drafter(run, target, groups, entry)
    save_weights(run.out / "drafter.kdtr", run.config, stored(drafter))
    kdtr.save(run.out / "golden.kdtr", golden(target, drafter))
    with run.stage("chain") as entry:
        entry.update(chain_length(run, target, drafter, held_out))
    if run.on_gpu:
        run.log["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    run.log["seconds"] = run.elapsed()
    run.write_log()


def main(argv: list[str] | None = None) -> None:
    """Command line of the training script."""
    parser = argparse.ArgumentParser(prog="python -m ddtree_numba.model.train")
    parser.add_argument("--stdlib", required=True, help="a standard library's folder")
    parser.add_argument("--out", required=True, type=Path, help="where weights go")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="every stage, very small")
    parser.add_argument("--resume-target", help="skip stage 1: a target.kdtr")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="change the recipe"
    )
    args = parser.parse_args(argv)
    recipe = TINY if args.tiny else Recipe()
    for item in args.set:
        name, _, value = item.partition("=")
        if not hasattr(recipe, name):
            parser.error(f"--set {name}: the recipe has no such entry")
        recipe = dataclasses.replace(recipe, **{name: json.loads(value)})
    config = TINY_CONFIG if args.tiny else ModelConfig()
    run = Run(recipe, config, args.seed, args.out)
    train(run, args.stdlib, args.resume_target)


if __name__ == "__main__":
    main()
