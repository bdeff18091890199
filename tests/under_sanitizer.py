"""What compute-sanitizer watches, run as a script.

python under_sanitizer.py TOOL GROUP     a group of `one_round.py`
python under_sanitizer.py TOOL bug       a kernel with a bug that the tool is for
python under_sanitizer.py TOOL relay     a right kernel, which racecheck accuses
"""

import functools
import sys

import numpy as np
from numba import cuda, float32, types
from numba.cuda.extending import intrinsic

from ddtree_numba.backend import place
from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.ptx import bar_arrive, bar_sync

N = 64


@cuda.jit
def past_the_end_kernel(out):
    out[cuda.threadIdx.x + 1] = 1  # the last lane's place is not there


@cuda.jit
def missing_barrier_kernel(out):
    shared = cuda.shared.array(N, float32)
    t = cuda.threadIdx.x
    shared[t] = t
    out[t] = shared[N - 1 - t]  # another warp's


@cuda.jit
def unwritten_kernel(out):
    out[cuda.threadIdx.x] += 1


@cuda.jit
def barrier_for_some_kernel(out):
    if cuda.threadIdx.x < N // 2 - 1:  # not even a whole warp
        cuda.syncthreads()
    out[cuda.threadIdx.x] = 1


@cuda.jit
def relay_kernel(rounds, out):
    """Two groups of 128 threads hand numbers to and fro; each sums what it gets.

    At each barrier one group waits, and the other only arrives. What is written before
    an arrival is read behind the wait, and written again behind a wait for its reader.
    """
    there = cuda.shared.array(128, float32)
    back = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    mine = t & 127
    total = float32(0)
    for n in range(rounds):
        if t < 128:
            there[mine] = n
            bar_arrive(1, 256)
            bar_sync(2, 256)
            total += back[127 - mine]
        else:
            bar_sync(1, 256)
            total += there[127 - mine]
            back[mine] = n
            bar_arrive(2, 256)
    out[t] = total


BUGS = {
    "memcheck": past_the_end_kernel,
    "racecheck": missing_barrier_kernel,
    "initcheck": unwritten_kernel,
    "synccheck": barrier_for_some_kernel,
}


@intrinsic
def barrier_sync(typingctx, barrier, n_threads):
    """`ptx.bar_sync` for synccheck, which takes ``bar`` to be for threads in one place.

    The warps of a trade of wgmma attention meet from several places in the code, which
    PTX allows, and ``barrier`` says so: with it, no barrier there is accused.
    """
    text = "barrier.sync $0, $1;"
    return types.void(barrier, n_threads), ptx._instruction(text, "nn")


def main(tool: str, group: str) -> None:
    if group == "bug":
        at = place("gpu")
        at.launch(BUGS[tool], 1, N, at.empty((N,), np.float32))
        cuda.synchronize()
        return
    if group == "relay":
        out = place("gpu").empty((256,), np.float32)
        place("gpu").launch(relay_kernel, 1, 256, 8, out)
        assert (out.copy_to_host() == sum(range(8))).all()
        print("the relay's sums are right")
        return
    # Before any kernel but `BUGS` is made: reports then name lines of the source.
    cuda.jit = functools.partial(cuda.jit, lineinfo=True)
    import one_round

    from ddtree_numba.kernels import verify_attn_wgmma

    if tool == "synccheck":
        verify_attn_wgmma.bar_sync = barrier_sync
    one_round.GROUPS[group]("gpu")
    print(f"one round of {group}: every stage agrees with its reference")


if __name__ == "__main__":
    main(*sys.argv[1:])
