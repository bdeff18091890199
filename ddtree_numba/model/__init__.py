"""A small, really trained MLA target and block drafter, and their NumPy forward."""

from ddtree_numba.model.config import BOS, VOCAB, ModelConfig
from ddtree_numba.model.forward import Cache, Model, load_model

__all__ = ["BOS", "VOCAB", "Cache", "Model", "ModelConfig", "load_model"]
