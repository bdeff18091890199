"""Small pieces for the notebooks about attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddtree_numba.emulator import traced
from ddtree_numba.kernels.verify_attn import VERSIONS, verify_attn
from ddtree_numba.lab.recorded import measurements
from ddtree_numba.viz import element_reads

if TYPE_CHECKING:
    import pandas as pd

SHAPE = "(1,33,64,2048) bf16"
"""Requests, tree rows, heads and prefix of `attention_times`."""


def weigh(score: Any, top: Any) -> Any:
    """2^(score - top); 0 for an unseen key (score -inf), also where top is -inf.

    As the kernels' `weigh`, for numbers and arrays.
    """
    seen = np.greater(score, -np.inf)
    return np.where(seen, np.exp2(np.where(seen, score, 0.0) - top), 0.0)


class Counted(NamedTuple):
    """What a version of verify_attn gave, and what it asked of the cache.

    Attributes
    ----------
    out : float32 [1, N, H, Dc]
    reads : int64 [S_max, Dc]
        Reads of every latent element, by all lanes of all blocks.
    fetched : float
        Bytes in the 32-byte sectors that these reads touch, request by request, for
        each byte of the cache: what they would move if nothing were cached.
    """

    out: np.ndarray
    reads: np.ndarray
    fetched: float


def count_reads(
    version: str, inputs: tuple, *, sm_scale: float, d_latent: int
) -> Counted:
    """Run a version of verify_attn in the emulator and count its reads of the cache.

    Parameters
    ----------
    version : str
    inputs : tuple
        q, kv_cache, prefix_lens and visibility of one request.
    sm_scale, d_latent
        As for `ddtree_numba.verify_attn`.
    """
    with traced() as reports:
        out, _ = verify_attn(
            *inputs,
            sm_scale=sm_scale,
            d_latent=d_latent,
            version=version,
            executor="emulator",
        )
    kv_cache = inputs[1]
    reads = element_reads(reports[0], "kv_cache", kv_cache.shape[1:])
    memory = reports[0].memory
    rows = memory[(memory["array"] == "kv_cache") & (memory["kind"] == "read")]
    sectors = (rows["requests"] * rows["sectors"]).sum()
    return Counted(out, reads[:, :d_latent], 32 * sectors / kv_cache.nbytes)


def attention_times(where: str) -> pd.DataFrame | None:
    """Times of every version of verify_attn at `SHAPE`; prints whose they are.

    Parameters
    ----------
    where : {"gpu", "emulator"}
        As for `ddtree_numba.lab.measurements`.

    Returns
    -------
    pandas.DataFrame or None
        A row a version, with the columns of `ddtree_numba.bench.bench`; None if no such
        row was recorded.
    """
    try:
        rows = measurements(where, ["verify_attn"])
    except FileNotFoundError:
        print("No GPU here, and no recorded run in data/bench.")
        return None
    burst = (rows["regime"] == "burst") & (rows["memory"] == "warm")
    timed = (rows["status"] == "ok") & (rows["shape"] == SHAPE)
    rows = rows[rows["version"].isin(VERSIONS) & burst & timed]
    if rows.empty:
        print(f"There is no row of {SHAPE} in that run.")
        return None
    return rows
