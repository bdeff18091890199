"""Small pieces for the notebooks about attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.emulator import traced
from ddtree_numba.kernels.verify_attn import verify_attn
from ddtree_numba.viz import element_reads


def weigh(score: Any, top: Any) -> Any:
    """2^(score - top); 0 for an unseen key (score -inf), also where top is -inf.

    As the kernels' `weigh`, for numbers and arrays.
    """
    seen = np.greater(score, -np.inf)
    return np.where(seen, np.exp2(np.where(seen, score, 0.0) - top), 0.0)


def count_reads(
    version: str, inputs: tuple, *, sm_scale: float, d_latent: int
) -> tuple[np.ndarray, np.ndarray]:
    """Run a version of verify_attn in the emulator and count its reads of the cache.

    Parameters
    ----------
    version : str
    inputs : tuple
        q, kv_cache, prefix_lens and visibility of one request.
    sm_scale, d_latent
        As for `ddtree_numba.verify_attn`.

    Returns
    -------
    out : float32 [1, N, H, Dc]
    reads : int64 [S_max, Dc]
        Reads of every latent element, by all lanes of all blocks.
    """
    with traced() as reports:
        out, _ = verify_attn(
            *inputs,
            sm_scale=sm_scale,
            d_latent=d_latent,
            version=version,
            executor="emulator",
        )
    reads = element_reads(reports[0], "kv_cache", inputs[1].shape[1:])
    return out, reads[:, :d_latent]


def attention_times(where: str) -> None:
    print("No GPU here, and data/bench holds no recorded run yet.")
