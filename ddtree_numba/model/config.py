"""Sizes of the small model: an MLA target and its block drafter."""

from __future__ import annotations

import dataclasses
import json

VOCAB = 256
"""Tokens that the model can emit: the bytes."""

BOS = 256
"""Input-only token at position 0 of every text."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Every size that the forward passes need.

    The latent geometry (`d_latent` 512, `d_rope` 64) is that of DeepSeek-V2/V3 and
    Kimi K2, so that the same attention kernels serve this model; the rest is small.

    Attributes
    ----------
    n_layers, d_model, n_heads, d_ffn
        Target: layers, residual width, attention heads, SwiGLU width.
    d_latent, d_rope
        Latent rank and rope width: a cache row is ``c_kv || k_rope``.
    d_nope, d_value
        Width of a head's un-roped query/key part, and of its value.
    n_embeddings
        Rows of the embedding; the head uses the first 256 (the bytes) only.
    max_len
        Longest text (BOS counted) that training saw.
    feature_layers
        The drafter reads the target's residual after these layers (1 = first).
    draft_layers, draft_heads, block
        Drafter: layers, heads of ``d_model / draft_heads``, rows of a block (the
        bonus token and ``block - 1`` masked positions).
    draft_temperature
        The drafter's logits are divided by this: 1 for a calibrated drafter.
    """

    n_layers: int = 4
    d_model: int = 256
    n_heads: int = 8
    d_ffn: int = 768
    d_latent: int = 512
    d_rope: int = 64
    d_nope: int = 32
    d_value: int = 32
    n_embeddings: int = 264
    max_len: int = 1024
    feature_layers: tuple[int, ...] = (1, 3, 4)
    draft_layers: int = 3
    draft_heads: int = 8
    block: int = 16
    draft_temperature: float = 1.0
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6

    @property
    def sm_scale(self) -> float:
        """Softmax scale of the target: the un-absorbed query width to the -1/2."""
        return (self.d_nope + self.d_rope) ** -0.5

    @property
    def d_cache(self) -> int:
        """Width of a cache row, ``d_latent + d_rope``."""
        return self.d_latent + self.d_rope

    def target_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the target's weights; layers stacked first, matrices in x out."""
        layers, d, h = self.n_layers, self.d_model, self.n_heads
        return {
            "embed": (self.n_embeddings, d),
            "attn_norm": (layers, d),
            "w_q": (layers, d, h * (self.d_nope + self.d_rope)),
            "w_dkv": (layers, d, self.d_cache),
            "latent_norm": (layers, self.d_latent),
            "w_uk": (layers, self.d_latent, h * self.d_nope),
            "w_uv": (layers, self.d_latent, h * self.d_value),
            "w_o": (layers, h * self.d_value, d),
            "ffn_norm": (layers, d),
            "w_gate": (layers, d, self.d_ffn),
            "w_up": (layers, d, self.d_ffn),
            "w_down": (layers, self.d_ffn, d),
            "final_norm": (d,),
        }

    def drafter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the drafter's weights; embedding and head are the target's."""
        layers, d = self.draft_layers, self.d_model
        return {
            "w_fuse": (len(self.feature_layers) * d, d),
            "fuse_norm": (d,),
            "w_last": (d, d),
            "mask": (d,),
            "position": (self.block, d),
            "attn_norm": (layers, d),
            "w_q": (layers, d, d),
            "w_k": (layers, d, d),
            "w_v": (layers, d, d),
            "w_o": (layers, d, d),
            "ffn_norm": (layers, d),
            "w_gate": (layers, d, self.d_ffn),
            "w_up": (layers, d, self.d_ffn),
            "w_down": (layers, self.d_ffn, d),
            "final_norm": (d,),
        }

    def to_json(self) -> str:
        """One line of JSON with every field."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """The inverse of `to_json`.

        Raises
        ------
        ValueError
            If the text is not a JSON object, or a field is unknown or of a value that
            no model has.
        """
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not a model configuration: {error}") from error
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or not set(fields) <= known:
            raise ValueError(f"not a model configuration: {text[:80]!r}")
        for name, value in fields.items():
            default = getattr(cls, name)
            counts = value if name == "feature_layers" else [value]
            kinds = (int, float) if isinstance(default, float) else (int,)
            if not isinstance(counts, list) or not all(
                type(x) in kinds and 0 < x < float("inf") for x in counts
            ):
                raise ValueError(
                    f"{name} is {value!r}; expected a value like {default}"
                )
        if "feature_layers" in fields:
            fields["feature_layers"] = tuple(fields["feature_layers"])
        config = cls(**fields)
        if max(config.feature_layers, default=0) > config.n_layers:
            raise ValueError(
                f"feature_layers is {config.feature_layers}; expected layers "
                f"1 … {config.n_layers}"
            )
        if config.d_model % config.draft_heads:
            raise ValueError(
                f"draft_heads is {config.draft_heads}; expected a divisor of d_model, "
                f"{config.d_model}"
            )
        return config
