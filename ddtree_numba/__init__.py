"""DDTree on MLA models, as Numba-CUDA kernels with NumPy twins."""

__version__ = "0.1.0"
