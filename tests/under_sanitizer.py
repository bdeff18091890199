"""What compute-sanitizer watches, run as a script.

python under_sanitizer.py TOOL GROUP     a group of `one_round.py`
python under_sanitizer.py TOOL bug       a kernel with a bug that the tool is for
"""

import functools
import sys

import numpy as np
from llvmlite import ir
from numba import cuda, float32, types
from numba.cuda.extending import intrinsic

from ddtree_numba.backend import place
from ddtree_numba.kernels import ptx

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


BUGS = {
    "memcheck": past_the_end_kernel,
    "racecheck": missing_barrier_kernel,
    "initcheck": unwritten_kernel,
    "synccheck": barrier_for_some_kernel,
}


# In attention on tensor cores warps of different trades meet at one barrier, each from
# a place of its own in the code. PTX allows that to ``bar``, if all of a warp come from
# the same place; synccheck wants all of the block to. So it gets ``barrier``, which
# takes 35 instructions more; what it checks besides is the same.


@intrinsic
def barrier_sync(typingctx, barrier, n_threads):
    """`ptx.bar_sync` for threads that come from anywhere."""
    text = "barrier.sync $0, $1;"
    return types.void(barrier, n_threads), ptx._instruction(text, "nn")


@intrinsic
def barrier_or(typingctx, n_threads, flag):
    """`cuda.syncthreads_or` for a block's threads, which come from anywhere."""

    def codegen(context, builder, signature, args):
        text = (
            "{\n.reg .pred mine, any;\nsetp.ne.u32 mine, $1, 0;\n"
            "barrier.red.or.pred any, 1, $2, mine;\nselp.u32 $0, 1, 0, any;\n}"
        )
        given = [
            context.cast(builder, value, kind, types.uint32)
            for value, kind in zip(args[::-1], (flag, n_threads), strict=True)
        ]
        word = ir.IntType(32)
        return ptx._assembly(
            builder, word, text, "=r,r,n", given, memory=True, warp=True
        )

    return types.uint32(n_threads, flag), codegen


def main(tool: str, group: str) -> None:
    if group == "bug":
        at = place("gpu")
        at.launch(BUGS[tool], 1, N, at.empty((N,), np.float32))
        cuda.synchronize()
        return
    # Before any kernel is made: reports then name lines of the source.
    cuda.jit = functools.partial(cuda.jit, lineinfo=True)
    import one_round

    from ddtree_numba.kernels import verify_attn_mma, verify_attn_wgmma

    if tool == "synccheck":
        threads = verify_attn_mma.THREADS
        meet = cuda.jit(device=True)(lambda flag: barrier_or(threads, flag))
        verify_attn_mma.meet = meet
        verify_attn_wgmma.bar_sync = barrier_sync
    one_round.GROUPS[group]("gpu")
    print(f"one round of {group}: every stage agrees with its reference")


if __name__ == "__main__":
    main(*sys.argv[1:])
