"""DDTree on MLA models, as Numba-CUDA kernels with NumPy twins.

The stages of a round, in order, as functions that take host or device arrays: `topk`,
`tree_build`, `verify_attn`, `argmax`, `tree_accept`, `kv_compact`. `generate` runs the
whole loop on a model (`load_model`), `Round` a round of your own model's, as one CUDA
graph, `emulate` any kernel on a CPU, lane by lane. `banner` says what all runs on.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree_numba.backend import banner as banner
    from ddtree_numba.decode import generate as generate
    from ddtree_numba.emulator import emulate as emulate
    from ddtree_numba.kernels.argmax import argmax as argmax
    from ddtree_numba.kernels.kv_compact import kv_compact as kv_compact
    from ddtree_numba.kernels.topk import topk as topk
    from ddtree_numba.kernels.tree_accept import tree_accept as tree_accept
    from ddtree_numba.kernels.tree_build import tree_build as tree_build
    from ddtree_numba.kernels.verify_attn import verify_attn as verify_attn
    from ddtree_numba.model import load_model as load_model
    from ddtree_numba.step import Round as Round
    from ddtree_numba.tree import DraftTree as DraftTree

__version__ = "0.1.0"

# Imported when they are first asked for: the command line sets up NumPy's threads
# before NumPy is loaded, and `import ddtree_numba` stays instant.
_MODULES = {
    "DraftTree": "tree",
    "Round": "step",
    "argmax": "kernels.argmax",
    "banner": "backend",
    "emulate": "emulator",
    "generate": "decode",
    "kv_compact": "kernels.kv_compact",
    "load_model": "model",
    "topk": "kernels.topk",
    "tree_accept": "kernels.tree_accept",
    "tree_build": "kernels.tree_build",
    "verify_attn": "kernels.verify_attn",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
