"""What compute-sanitizer watches, run as a script.

python under_sanitizer.py TOOL GROUP               a group of `one_round.py`
python under_sanitizer.py racecheck wgmma BARRIER  … whose kernel leaves out a barrier
python under_sanitizer.py TOOL bug                 a kernel with a bug for the tool
python under_sanitizer.py TOOL relay               a right one, which racecheck accuses
"""

import functools
import sys

import numpy as np
from llvmlite import ir
from numba import cuda, float32, types
from numba.cuda.extending import intrinsic

from ddtree_numba.backend import place
from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.ptx import (
    bar_arrive,
    bar_sync,
    mbarrier_arrive,
    mbarrier_init,
)

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


@intrinsic
def meet(typingctx, barriers, index):
    """Arrive at an mbarrier, and wait until all others of this phase have."""

    def codegen(context, builder, signature, args):
        at = ptx._address(context, builder, signature.args, args, ptx._SHARED)
        text = (
            "{\n.reg .pred done;\n.reg .b64 phase;\n"
            "mbarrier.arrive.shared::cta.b64 phase, [$0];\nagain:\n"
            "mbarrier.try_wait.shared::cta.b64 done, [$0], phase;\n"
            "@!done bra again;\n}"
        )
        ptx._assembly(builder, ir.VoidType(), text, "r", [at], memory=True, warp=True)
        return context.get_dummy_value()

    return types.void(barriers, index), codegen


def hand_over_by_mbarriers(wgmma, without: str | None = None) -> None:
    """For racecheck: both warpgroups that compute come together at mbarriers.

    racecheck passes over ``bar.arrive``, so it accuses what is handed over by it, as in
    `relay_kernel`. Arrivals at mbarriers it knows. So each named barrier of the two
    groups becomes one: who comes and who waits, where and in which order, stays as it
    is, and nobody waits for more.

    wgmma : the module; without : name of a barrier to leave out
    """
    dropped = getattr(wgmma, without) if without else 0
    first = (wgmma.DYNAMIC_SHARED + 7) // 8  # behind all else
    wgmma.DYNAMIC_SHARED = 8 * (first + 16)
    both_groups, block = wgmma.CONSUMERS, wgmma.THREADS

    @wgmma.device
    def sync(barrier, n_threads):
        barriers = cuda.shared.array(0, np.uint64, alignment=1024)
        if n_threads == both_groups:
            if barrier != dropped:
                meet(barriers, first + barrier)
        else:
            if n_threads == block and cuda.threadIdx.x < 16:
                mbarrier_init(barriers, first + cuda.threadIdx.x, both_groups)
            bar_sync(barrier, n_threads)

    @wgmma.device
    def arrive(barrier, n_threads):
        barriers = cuda.shared.array(0, np.uint64, alignment=1024)
        if barrier != dropped:
            mbarrier_arrive(barriers, first + barrier)

    wgmma.bar_sync, wgmma.bar_arrive = sync, arrive


def main(tool: str, group: str, without: str | None = None) -> None:
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
    if tool == "racecheck":
        hand_over_by_mbarriers(verify_attn_wgmma, without)
    one_round.GROUPS[group]("gpu")
    print(f"one round of {group}: every stage agrees with its reference")


if __name__ == "__main__":
    main(*sys.argv[1:])
