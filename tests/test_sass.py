"""Registers and SASS of the fast kernels as they are launched.

Every stage is called with a `Place.launch` that only notes the kernel and its
arguments, so that what is assembled here is what runs. The assembler is nvJitLink's,
which the `gpu` extra brings; neither a GPU nor the CUDA toolkit is needed.
"""

import os
import re
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numba
import numpy as np
import pytest
from numba import cuda, int32

from ddtree_numba.backend import Place
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
    "tree_build-small": lambda: run_tree_build("small"),
    "tree_build-parallel": lambda: run_tree_build("parallel"),
    "tree_accept": run_tree_accept,
    "kv_compact": run_kv_compact,
    "verify_attn-mma": lambda: run_verify_attn("mma"),
    "verify_attn-wgmma": lambda: run_verify_attn("wgmma"),
}
IN_THE_GATE = pytest.mark.skipif(
    not os.environ.get("DDTREE_REQUIRE_PTX"),
    reason="half a minute; runs where DDTREE_REQUIRE_PTX is set",
)


@dataclass(frozen=True)
class Assembled:
    """A kernel of one launch, assembled."""

    name: str
    threads: int
    registers: int
    stack: int  # bytes a thread
    spilled: int  # bytes a thread, stored
    said: str  # by the assembler
    opcodes: Counter  # of the SASS


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
        int(registers[1]), int(frame[1]), int(frame[2]), said, opcodes_of(cubin),
    )  # fmt: skip


def opcodes_of(cubin: bytearray) -> Counter:
    """How often each opcode is in a kernel's code: 9 bits of every 16 bytes."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    count, names_at = struct.unpack_from("<HH", cubin, 0x3C)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, table + 64 * n) for n in range(count)
    ]
    names = sections[names_at][4]
    for name, _, _, _, start, size, *_ in sections:
        if cubin[names + name :].startswith(b".text."):
            words = struct.iter_unpack("<QQ", cubin[start : start + size])
            return Counter(low & 0x1FF for low, _ in words)
    raise AssertionError("no code")


# Opcodes of local memory and of tensor cores, sm_80 to sm_90.
LDL, STL, HMMA, HGMMA = 0x183, 0x187, 0x03C, 0x1F0
PRODUCTS = {"mma_kernel": HMMA, "wgmma_kernel": HGMMA}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=IN_THE_GATE if "wgmma" in name else ()) for name in RUNS],
)
def test_kernels_stay_in_registers(name):
    card = (9, 0, "a") if "wgmma" in name else (9, 0)
    for launch in launches_of(RUNS[name]):
        kernel = assembled(*launch, card)
        assert kernel.spilled == kernel.stack == 0, kernel.said
        assert kernel.opcodes[LDL] == kernel.opcodes[STL] == 0
        assert kernel.registers * kernel.threads <= REGISTERS, kernel.said
        # As where `wgmma` is serialised, or `setmaxnreg` ignored.
        assert "Performance Loss" not in kernel.said, kernel.said
        if kernel.name in PRODUCTS:
            assert kernel.opcodes[PRODUCTS[kernel.name]] >= 32


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
    assert kernel.opcodes[LDL] > 0 and kernel.opcodes[STL] > 0
    assert kernel.opcodes[HMMA] == kernel.opcodes[HGMMA] == 0
