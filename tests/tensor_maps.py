"""Tensor maps for the tests of copies in bulk, on a GPU and in the emulator."""

from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba.emulator.hopper import tensor_map


def tensor_map_on(executor: str, tensor: Any, box: tuple[int, int, int]) -> Any:
    """A swizzled map of a uint16 tensor with three axes, for a kernel's argument."""
    if executor == "emulator":
        return tensor_map(tensor, box)
    from cuda.bindings import driver

    code, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        3,
        tensor.device_ctypes_pointer.value,
        [driver.cuuint64_t(n) for n in tensor.shape[::-1]],
        [driver.cuuint64_t(n) for n in tensor.strides[-2::-1]],
        [driver.cuuint32_t(n) for n in box[::-1]],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    assert code == driver.CUresult.CUDA_SUCCESS, code
    words = [int(word) for word in encoded.opaque]
    return cuda.to_device(np.array(words, np.uint64))
