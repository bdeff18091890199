"""Logits of every kind that kernels take, and rows that are no distribution."""

import numpy as np
import pytest

from ddtree_numba import bf16

CASTS = {
    "f32": lambda x: np.asarray(x, np.float32),
    "f16": lambda x: np.asarray(x, np.float16),
    "bf16": lambda x: bf16.from_float32(np.asarray(x, np.float32)),
}
EVERY_DTYPE = pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)

BAD_ROWS = pytest.mark.parametrize(
    ("row", "why"),
    [
        ([0, np.nan, 1], "holds NaN"),
        ([0, np.inf, 1], r"holds \+inf"),
        ([np.inf, np.inf, np.nan], "holds NaN"),
        ([-np.inf] * 3, "is -inf everywhere"),
    ],
)
