"""Registers of the fast kernels as they are launched: what the assembler says.

Every stage is called with a `Place.launch` that only notes the kernel and its
arguments, so that what is assembled here is what runs. The assembler is nvJitLink's,
which the `gpu` extra brings; no GPU is needed. SASS is looked at where the CUDA toolkit
is installed.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numba
import numpy as np
import pytest
from numba import cuda, int32

from ddtree_numba.backend import Place, compile_ptx
from ddtree_numba.kernels.argmax import argmax
from ddtree_numba.kernels.kv_compact import kv_compact
from ddtree_numba.kernels.topk import topk
from ddtree_numba.kernels.tree_accept import tree_accept
from ddtree_numba.kernels.tree_build import tree_build
from ddtree_numba.kernels.verify_attn import verify_attn
from ddtree_numba.tree import DraftTree

pytestmark = pytest.mark.ptx

REGISTERS = 65536  # of a multiprocessor, so the most that a block can have
ON_EMULATOR = {"executor": "emulator"}


def run_topk():
    logits = np.zeros((1, 2, 40000), np.uint16)
    topk(logits, 64, check=False, version="chunks", **ON_EMULATOR)


def run_argmax():
    argmax(np.zeros((1, 2, 40000), np.uint16), [1], check=False, **ON_EMULATOR)


def run_tree_build(version):
    table = np.zeros((1, 15, 64), np.float32)
    ids = np.zeros(table.shape, np.int32)
    tree_build(table, ids, 64, version=version, **ON_EMULATOR)


def run_tree_accept():
    tree = DraftTree.from_parents([[-1, 0, 1]])
    tree_accept(tree, np.zeros((1, 3), np.int32), **ON_EMULATOR)


def run_kv_compact():
    kv_compact(np.zeros((1, 9, 576), np.uint16), [3], [[0, 1]], [2], **ON_EMULATOR)


def run_verify_attn(version):
    q, cache = np.zeros((1, 3, 4, 576), np.uint16), np.zeros((1, 300, 576), np.uint16)
    visibility = DraftTree.from_parents([[-1, 0, 1]]).visibility
    form = {"sm_scale": 0.1, "d_latent": 512, "version": version}
    verify_attn(q, cache, [200], visibility, n_splits=2, **form, **ON_EMULATOR)


RUNS = {
    "topk": run_topk,
    "argmax": run_argmax,
    "tree_build-simple": lambda: run_tree_build("simple"),
    "tree_build-parallel": lambda: run_tree_build("parallel"),
    "tree_accept": run_tree_accept,
    "kv_compact": run_kv_compact,
    "verify_attn-split": lambda: run_verify_attn("split"),
    "verify_attn-mma": lambda: run_verify_attn("mma"),
    "verify_attn-wgmma": lambda: run_verify_attn("wgmma"),
}


@dataclass(frozen=True)
class Assembled:
    """A kernel of one launch, assembled."""

    name: str
    threads: int
    registers: int
    stack: int  # bytes a thread
    spilled: int  # bytes a thread, stored
    said: str  # by the assembler
    cubin: bytes


def launches_of(run: Any) -> list[tuple]:
    """Kernel, threads and signature of every launch of a run, which does nothing."""
    launches = []

    def note(place, kernel, grid, block, *args, **options):
        launches.append((kernel, block, tuple(numba.typeof(x) for x in args)))

    with mock.patch.object(Place, "launch", note):
        run()
    assert launches
    return launches


def assembled(
    kernel: Any, threads: int, signature: tuple, card: tuple[Any, ...]
) -> Assembled:
    """Compile a kernel for a card, as Numba does to launch it: linked as a whole."""
    from cuda.bindings import nvjitlink
    from numba.cuda import dispatcher

    class Device:
        compute_capability = card[:2]

    with mock.patch.object(dispatcher, "get_current_device", Device):
        code, _ = cuda.compile(
            kernel.py_func, signature, cc=card, device=False, abi="numba",
            output="ltoir", launch_bounds=kernel.targetoptions.get("launch_bounds"),
        )  # fmt: skip
    options = [f"-arch=sm_{''.join(map(str, card))}", "-lto", "-verbose"]
    link = nvjitlink.create(len(options), options)
    nvjitlink.add_data(link, nvjitlink.InputType.LTOIR, code, len(code), "kernel")
    nvjitlink.complete(link)
    log = bytearray(nvjitlink.get_info_log_size(link))
    nvjitlink.get_info_log(link, log)
    cubin = bytearray(nvjitlink.get_linked_cubin_size(link))
    nvjitlink.get_linked_cubin(link, cubin)
    nvjitlink.destroy(link)
    said = log.decode()
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", said)
    registers = re.search(r"Used (\d+) registers", said)
    assert frame and registers
    return Assembled(
        kernel.py_func.__name__, threads,
        int(registers[1]), int(frame[1]), int(frame[2]), said, bytes(cubin),
    )  # fmt: skip


# What is known to need more than registers, in bytes a thread: `split_kernel` parks its
# sums in local memory, on purpose, and is left with a few spills.
STACK = {"split_kernel": 640}
SPILLED = {"split_kernel": 320}


@pytest.mark.parametrize("name", RUNS)
def test_kernels_stay_in_registers(name):
    card = (9, 0, "a") if "wgmma" in name else (9, 0)
    for launch in launches_of(RUNS[name]):
        kernel = assembled(*launch, card)
        assert kernel.spilled <= SPILLED.get(kernel.name, 0), kernel.said
        assert kernel.stack <= STACK.get(kernel.name, 0), kernel.said
        assert kernel.registers * kernel.threads <= REGISTERS, kernel.said
        # As where `wgmma` is serialised, or `setmaxnreg` ignored.
        assert "Performance Loss" not in kernel.said, kernel.said


@cuda.jit
def stack_kernel(x, out):
    # x [n] i32, out [1] i32; a place that is not known is no register
    box = cuda.local.array(64, int32)
    for n in range(64):
        box[n] = 0
    for n in range(x.size):
        box[x[n] & 63] += box[x[n] >> 6 & 63] + 1
    out[0] = box[out[0] & 63]


def test_a_stack_is_seen():
    kernel = assembled(stack_kernel, 1, (int32[::1], int32[::1]), (9, 0))
    assert kernel.stack >= 256 and kernel.spilled == 0 and kernel.registers > 4


@pytest.mark.skipif(not shutil.which("nvdisasm"), reason="needs the CUDA toolkit")
@pytest.mark.parametrize(
    ("name", "product", "in_ptx", "card"),
    [
        ("verify_attn-mma", "HMMA.16816.F32.BF16", "mma.sync.aligned", (9, 0)),
        ("verify_attn-wgmma", "HGMMA.64x", "wgmma.mma_async", (9, 0, "a")),
    ],
)
def test_every_product_is_one_tensor_core_instruction(
    tmp_path, name, product, in_ptx, card
):
    kernel, threads, signature = launches_of(RUNS[name])[0]
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(assembled(kernel, threads, signature, card).cubin)
    shown = subprocess.run(
        ["nvdisasm", "-c", cubin], capture_output=True, text=True, check=True
    ).stdout
    ptx = compile_ptx(kernel, signature, compute_capability=card)
    # The assembler may unroll a loop further, and repeats its body then.
    assert shown.count(product) >= ptx.count(in_ptx) > 0
    assert " LDL" not in shown and " STL" not in shown
