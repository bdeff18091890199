"""bfloat16 as bits: NumPy has no such dtype, so the package holds it as uint16.

A bfloat16 is the upper half of a float32: 1 sign, 8 exponent and 7 fraction bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def from_float32(x: ArrayLike) -> NDArray[np.uint16]:
    """Round float32 to bfloat16, nearest with ties to even.

    Parameters
    ----------
    x : array_like of float32, any shape
        Dtypes that cast to float32 without loss (float16, int16, ...) are taken too.

    Returns
    -------
    ndarray of uint16, shape of `x`
        bfloat16 bits. Beyond the largest finite value: infinity. A NaN keeps its
        sign and the upper bits of its payload and becomes quiet (IEEE 754, 6.2).

    Raises
    ------
    TypeError
        For a dtype that float32 cannot hold (float64 would be rounded twice).
    """
    x = np.asarray(x)
    if not np.can_cast(x.dtype, np.float32):
        raise TypeError(
            f"x: expected float32 or a dtype that fits in it, got {x.dtype}"
        )
    x = x.astype(np.float32, copy=False)
    bits = x.view(np.uint32)
    # Quieted and cut first, a NaN is a fixed point of the rounding below. Rounded as
    # it stands it could carry into infinity, or wrap around to zero.
    bits = np.where(np.isnan(x), bits & 0xFFFF0000 | 0x00400000, bits)
    # Just under half a step, plus one if the kept part is odd: ties go to even.
    rounded = bits + (0x7FFF + (bits >> 16 & 1))
    return np.asarray(rounded >> 16, dtype=np.uint16)


def to_float32(bits: ArrayLike) -> NDArray[np.float32]:
    """Widen bfloat16 bits to float32, exactly.

    Parameters
    ----------
    bits : array_like of uint16, any shape

    Returns
    -------
    ndarray of float32, shape of `bits`

    Raises
    ------
    TypeError
        If `bits` is not uint16.
    """
    bits = np.asarray(bits)
    if bits.dtype.newbyteorder("=") != np.uint16:
        raise TypeError(f"bits: expected uint16 (bfloat16 bits), got {bits.dtype}")
    wide = np.asarray(bits.astype(np.uint32) << 16)
    return wide.view(np.float32)


def to_float64(x: ArrayLike) -> NDArray[np.float64]:
    """Widen what the kernels take to float64, exactly.

    Parameters
    ----------
    x : array_like of float, or of uint16 (bfloat16 bits), any shape

    Returns
    -------
    ndarray of float64, shape of `x`
    """
    x = np.asarray(x)
    is_bits = x.dtype.newbyteorder("=") == np.uint16
    return (to_float32(x) if is_bits else x).astype(np.float64)
