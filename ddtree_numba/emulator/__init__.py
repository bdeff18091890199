"""Run an unmodified `cuda.jit` kernel on the CPU, lane by lane, and see what it did.

    from ddtree_numba.emulator import emulate

    emulate(kernel, grid, block, *args)                       # arrays change in place
    report = emulate(kernel, grid, block, *args, trace=True)
    report.races, report.memory, report.divergence, report.accesses
    with traced() as reports:                                 # launches of a wrapper
        tree_build(..., executor="emulator")

The kernel's Python function (`py_func`) runs once a lane, each lane a greenlet. A hub
lets one lane run until it waits at a barrier or a warp collective, then the next; when
all of them wait it checks that they wait for the same thing and lets them go on. No
environment variable and no import order: the kernel object is the one that a GPU in the
same process compiles, and neither it nor its module is changed.

What is emulated
----------------
- Indices; static, dynamic (typed views of one buffer), local and const arrays; block
  barriers with count, and, or; `syncwarp`, shuffles, votes, match and `activemask` with
  their masks; atomics; bit functions, `fma`, loads and stores with cache hints, fences,
  `nanosleep`; vector types; device functions, closures, plain functions that have a
  numba `overload`; the scalar functions of `math` and NumPy and the common ones of
  `cuda.libdevice` and `cuda.fp16`. Any other name (`cuda.cg`, `cuda.bf16`, random
  numbers) and arrays of records raise `UnsupportedError`.
- Arithmetic: float32 is rounded after every operation, overflows to inf and divides by
  zero without a warning; `max` and `min` of two floats pass over NaN. Integers are
  Python ints between two stores and wrap when they are stored or cast: numba computes
  them in 64 bits, NumPy would wrap at 32. Floats become integers as PTX converts them:
  saturated. Ballots and matches are int32, as numba types them. A shuffle from a lane
  that takes no part gives NaN, or 2147319805: undefined, and easy to see.
- A kernel's own intrinsics, by the `emulation` that they bring: tensor cores, copies
  that arrive later (`ddtree_numba.kernels.ptx`). A copy arrives at the wait and not
  before; it counts as one read and as two writes, at the request and at the wait.
- What works beside the lanes on Hopper (`hopper`): named barriers, mbarriers, copies in
  bulk (TMA), of boxes by a tensor map (128-byte swizzle or none) or of neighbouring
  bytes, warpgroup products (`wgmma`, bfloat16, 128-byte swizzle). A copy arrives when
  no lane can go on without it, sums when a lane waits for them: as late as is allowed.
  `hopper.tensor_map` makes the maps.
- Blocks one after another; but while a block waits for a counter in global memory
  (`hopper.wait_for_at_least`), the others run.

What is reported
----------------
Always: an index outside its array (negative too), shared or local memory read before it
is written, a block barrier that some lanes miss (or left before), a warp collective
whose mask names lanes that do not come or not its caller, lanes that spin for ever, an
impossible launch; memory that is used while a copy from or to it is on its way, wide
accesses to misaligned addresses; an integer divided by zero (on a GPU silently 0, or
inf for ``/``), and a literal float by one, as a ``s = 0.0`` that nothing was added to.
Of what works beside the lanes: a phase of an mbarrier that is never over (with its
count and missing bytes), a named barrier that warps miss; sums and operands of `wgmma`
that are touched before the wait; stores that no proxy fence made visible to it or, from
another block, to a copy in bulk; registers that no `wgmma.fence` did; lanes of a
warpgroup at different products; a block that ends before all this is done. Each names
kernel, source line, block and lane.

With ``trace=True`` (about 3 times slower), of global and shared memory:

- `races`. Two accesses to a common byte race when at least one writes, they are not
  both atomic, and neither a block barrier nor a chain of `syncwarp`, named barriers,
  mbarriers and waits for products lies between them; shuffles and votes order nothing
  (as the CUDA guide says). Between blocks nothing does but a counter: a fence for
  other blocks, then an atomic that raises it, and `wait_for_at_least` in the other
  block, each for its whole block. What copies in bulk write and products read are
  accesses too. Races are found from this order, not from the values, so one run in
  any lane order shows them, as far as the input makes the kernel take that path.
- `memory`: by source line and array the requests of warps, the 32-byte sectors that one
  costs in global memory, the bank conflicts in shared memory. Lanes run one after
  another here; their n-th times at an instruction, between two block barriers, are
  taken for one request.
- `divergence`: lines where a part of a warp was active, as far as accesses and warp
  collectives show it.
- `counts` and `score()`: accesses of the busiest lane, as GPU-Puzzles scores them.
- `accesses` and `barriers`, as tables. `ddtree_numba.viz` draws them: `lanes_figure`,
  `access_figure`, `memory_figure`.

The trace holds at most a million accesses at a time (40 MB; some 300 MB while it looks
at them, before it lets them go). It keeps the first million for `accesses`, and
`Report.dropped` says how many more there were.

What a clean run does not establish
-----------------------------------
- Types: whether numba can compile the kernel, and where it widens to float64. A literal
  0.5 times a float32 is float64 on the GPU and float32 here. Unsigned differences below
  zero stay negative until they are stored or cast.
- Last bits: `math` and libdevice functions are rounded correctly or nearly so here; the
  GPU's, and above all the `fast_` ones, are not. The compiler fuses ``a * b + c``.
  Float atomics add in one fixed order.
- The width of small integers: `clz` and `brev` of an int64 below 2**32 need a cast.
- Integers beyond 64 bits: the GPU wraps after every operation. A hash that multiplies
  and then shifts right or compares needs ``h = int64(h * prime)``.
- Speed, register use, caches. `memory` counts what the source asks for: the compiler
  keeps values in registers and may join loads.
- Proxy fences: one by any lane makes all stores so far visible to `wgmma` and copies.
  A trace does not hold what copies in bulk read, nor who may change a tensor meanwhile.
- Memory ordering: writes are visible at once. Other patterns that order blocks or lanes
  by fences and flags run, but a trace calls them races. A loop that waits for another
  lane must let it run: by `cas`, `compare_and_swap` or `exch`, or `nanosleep`. A loop
  that only reads a flag runs for ever here (and perhaps there: a load may be hoisted).
- Other inputs: only what ran was seen.

Beside other tools
------------------
Numba's own simulator (`NUMBA_ENABLE_CUDASIM=1`) must be chosen before the first
import and cannot stand beside a GPU. It has no warp operations and one thread a lane,
sees neither races nor missed barriers nor unwritten memory, lets negative indices wrap,
and shares one array between two `shared.array` on a line. compute-sanitizer (memcheck,
racecheck, initcheck, synccheck) watches the compiled kernel on a real GPU, so it also
sees what the compiler did, at full size; its racecheck covers shared memory only, its
reports name addresses, and it needs the GPU. Use this first, that before trusting a
kernel.
"""

from .errors import (
    BarrierDivergenceError,
    BarrierUseError,
    DeadlockError,
    EmulatorError,
    InFlightError,
    KernelError,
    LaunchError,
    MaskError,
    MisalignedError,
    OutOfBoundsError,
    StuckError,
    UnfencedError,
    UninitialisedReadError,
    UnsupportedError,
    WarpgroupError,
)
from .intrinsics import emulation
from .launch import emulate, traced
from .report import Report
from .trace import Race

__all__ = [
    "BarrierDivergenceError",
    "BarrierUseError",
    "DeadlockError",
    "EmulatorError",
    "InFlightError",
    "KernelError",
    "LaunchError",
    "MaskError",
    "MisalignedError",
    "OutOfBoundsError",
    "Race",
    "Report",
    "StuckError",
    "UnfencedError",
    "UninitialisedReadError",
    "UnsupportedError",
    "WarpgroupError",
    "emulate",
    "emulation",
    "traced",
]
