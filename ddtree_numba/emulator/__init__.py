"""Run an unmodified `cuda.jit` kernel on the CPU, lane by lane."""

from .errors import (
    BarrierDivergenceError,
    DeadlockError,
    EmulatorError,
    KernelError,
    LaunchError,
    MaskError,
    OutOfBoundsError,
    StuckError,
    UninitialisedReadError,
    UnsupportedError,
)
from .launch import emulate
from .report import Report
from .trace import Race

__all__ = [
    "BarrierDivergenceError",
    "DeadlockError",
    "EmulatorError",
    "KernelError",
    "LaunchError",
    "MaskError",
    "OutOfBoundsError",
    "Race",
    "Report",
    "StuckError",
    "UninitialisedReadError",
    "UnsupportedError",
    "emulate",
]
