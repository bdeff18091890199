"""Registers of the kernels as they are launched: what the assembler makes of them.

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


def run_topk(version):
    logits = np.zeros((1, 2, 40000), np.uint16)
    topk(logits, 64, check=False, version=version, **ON_EMULATOR)


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
    splits = None if version == "simple" else 2
    verify_attn(q, cache, [200], visibility, n_splits=splits, **form, **ON_EMULATOR)


RUNS = {
    "topk-simple": lambda: run_topk("simple"),
    "topk-chunks": lambda: run_topk("chunks"),
    "argmax": run_argmax,
    "tree_build-simple": lambda: run_tree_build("simple"),
    "tree_build-parallel": lambda: run_tree_build("parallel"),
    "tree_accept": run_tree_accept,
    "kv_compact": run_kv_compact,
    "verify_attn-simple": lambda: run_verify_attn("simple"),
    "verify_attn-split": lambda: run_verify_attn("split"),
    "verify_attn-mma": lambda: run_verify_attn("mma"),
}


@dataclass(frozen=True)
class Assembled:
    """A kernel of one launch, assembled."""

    name: str
    threads: int
    ptx: str
    registers: int
    stack: int  # bytes a thread
    spilled: int  # bytes a thread, stored
    cubin: bytes


@pytest.fixture
def launched(monkeypatch):
    """``(run, card) -> [Assembled]`` of every kernel that a run launches."""

    def of(run: Any, card: tuple[int, ...]) -> list[Assembled]:
        launches = []

        def note(place, kernel, grid, block, *args, dynamic_shared=0):
            launches.append((kernel, block, tuple(numba.typeof(x) for x in args)))

        with monkeypatch.context() as patched:
            patched.setattr(Place, "launch", note)
            run()
        assert launches
        return [assembled(*launch, card) for launch in launches]

    return of


def assembled(
    kernel: Any, threads: int, signature: tuple, card: tuple[int, ...]
) -> Assembled:
    """Compile a kernel for a card."""
    from cuda.bindings import nvjitlink

    ptx = compile_ptx(kernel, signature, compute_capability=card)
    options = [f"-arch=sm_{''.join(map(str, card))}", "-verbose"]
    link = nvjitlink.create(len(options), options)
    code = ptx.encode()
    nvjitlink.add_data(link, nvjitlink.InputType.PTX, code, len(code), "kernel")
    nvjitlink.complete(link)
    log = bytearray(nvjitlink.get_info_log_size(link))
    nvjitlink.get_info_log(link, log)
    cubin = bytearray(nvjitlink.get_linked_cubin_size(link))
    nvjitlink.get_linked_cubin(link, cubin)
    nvjitlink.destroy(link)
    said = log.decode()
    (stack, spilled), *_ = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores", said
    )
    registers = re.search(r"Used (\d+) registers", said)
    assert registers
    return Assembled(
        kernel.py_func.__name__, threads, ptx,
        int(registers[1]), int(stack), int(spilled), bytes(cubin),
    )  # fmt: skip


# What is known to need more than registers, in bytes a thread: `split_kernel` parks its
# sums in local memory, on purpose, and is left with a few spills.
STACK = {"split_kernel": 640}
SPILLED = {"split_kernel": 320}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_kernels_stay_in_registers(launched, run):
    for kernel in launched(run, (9, 0)):
        assert kernel.spilled <= SPILLED.get(kernel.name, 0), kernel.name
        assert kernel.stack <= STACK.get(kernel.name, 0), kernel.name
        assert kernel.registers * kernel.threads <= REGISTERS, kernel.name


@cuda.jit
def stack_kernel(x, out):
    # x [64] i32, out [1] i32; a place that is not known is no register
    box = cuda.local.array(64, int32)
    for n in range(64):
        box[n] = x[n]
    out[0] = box[x[0]]


def test_a_stack_is_seen():
    kernel = assembled(stack_kernel, 1, (int32[::1], int32[::1]), (9, 0))
    assert kernel.stack >= 256 and kernel.spilled == 0 and kernel.registers > 4


@pytest.mark.skipif(not shutil.which("nvdisasm"), reason="needs the CUDA toolkit")
def test_every_product_of_the_mma_version_is_one_tensor_core_instruction(
    launched, tmp_path
):
    (kernel, *_) = launched(RUNS["verify_attn-mma"], (9, 0))
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.cubin)
    shown = subprocess.run(
        ["nvdisasm", "-c", cubin], capture_output=True, text=True, check=True
    )
    products = kernel.ptx.count("mma.sync.aligned.m16n8k16")
    # The assembler may unroll a loop further, and repeats its body then.
    assert shown.stdout.count("HMMA.16816.F32.BF16") >= products > 0
    assert " LDL" not in shown.stdout and " STL" not in shown.stdout
