"""Where lanes meet: at one place in the source, wherever its bytecode stands.

Python compiles the end of a ``try`` once for each way out of it, and from 3.12 on what
follows a conditional expression behind ``return`` once for each branch.
"""

import ast
import dis

import numpy as np
import pytest
from numba import cuda, int32, uint32

from ddtree_numba.emulator import BarrierDivergenceError, emulate
from ddtree_numba.emulator.sites import Instructions
from ddtree_numba.kernels.wide import redux_min

LANES = np.arange(32)


@cuda.jit(device=True)
def two_ways_out(i, x, out):
    # Half of the lanes come to the last line by the return, half by the end.
    try:
        if i % 2:
            return
        out[i, 0] = 5
    finally:
        out[i, 1] = redux_min(uint32(i + 3)) + x[i]


@cuda.jit(device=True)
def barrier_at_both(i, out):
    try:
        if i % 2:
            return
    finally:
        out[i, 0] = cuda.syncthreads_count(i < 7)
        tile = cuda.shared.array(32, int32)
        tile[i] = i
        cuda.syncthreads()
        out[i, 1] = tile[31 - i]


@cuda.jit
def two_ways_kernel(x, out):
    two_ways_out(cuda.threadIdx.x, x, out)


@cuda.jit
def barrier_at_both_kernel(out):
    barrier_at_both(cuda.threadIdx.x, out)


@cuda.jit(device=True)
def count_behind_a_condition(i, odd, even):
    return cuda.syncthreads_count(odd if i % 2 else even)


@cuda.jit(device=True)
def lowest_behind_a_condition(i, n):
    return i, redux_min(n if i % 2 else uint32(99))


@cuda.jit
def behind_a_condition_kernel(out):
    i = cuda.threadIdx.x
    out[i, 0] = count_behind_a_condition(i, True, i < 4)
    out[i, 1] = lowest_behind_a_condition(i, uint32(i))[1]


@cuda.jit
def two_on_a_line_kernel(out):
    cuda.syncthreads() if cuda.threadIdx.x % 2 else cuda.syncthreads()


def new_out():
    return np.zeros((32, 2), np.int64)


def test_lanes_meet_at_a_collective_that_they_reach_in_two_ways():
    out = new_out()
    report = emulate(two_ways_kernel, 1, 32, LANES.copy(), out, trace=True)
    assert out[:, 1].tolist() == (LANES + 3).tolist()
    assert report.races == []


def test_a_load_that_lanes_reach_in_two_ways_is_one_request():
    report = emulate(two_ways_kernel, 1, 32, LANES.copy(), new_out(), trace=True)
    reads = report.memory[report.memory["array"] == "x"]
    assert reads[["requests", "lanes"]].to_numpy().tolist() == [[1, 32]]
    assert report.divergence["source"].tolist() == ["out[i, 0] = 5"]


def test_lanes_meet_at_a_barrier_and_share_an_array_that_they_reach_in_two_ways():
    out = new_out()
    report = emulate(barrier_at_both_kernel, 1, 32, out, trace=True)
    assert out.tolist() == [[7, 31 - i] for i in range(32)]
    assert report.barriers["name"].tolist() == ["syncthreads_count", "syncthreads"]


def test_lanes_meet_at_a_call_behind_a_conditional_expression():
    out = new_out()
    emulate(behind_a_condition_kernel, 1, 32, out)
    assert out.tolist() == [[16 + 2, 1]] * 32


def test_two_barriers_on_one_line_are_two_places():
    with pytest.raises(BarrierDivergenceError):
        emulate(two_on_a_line_kernel, 1, 32, new_out())


def calls(code):
    """Offset of every call, and of the first at the same place."""
    instructions = Instructions.of(code)
    each = zip(dis.get_instructions(code), instructions.first, strict=True)
    return [(i.offset, int(first)) for i, first in each if i.opname == "CALL"]


def test_calls_of_one_position_in_the_source_are_one_place():
    code = two_ways_out.py_func.__code__
    offsets, firsts = zip(*calls(code), strict=True)
    assert len(set(offsets)) >= 6 and len(set(firsts)) == 2  # uint32, redux_min
    assert set(firsts) == set(offsets[:2])


def test_without_positions_every_instruction_is_a_place_of_its_own():
    code = two_ways_out.py_func.__code__.replace(co_linetable=b"")
    assert calls(code) and all(offset == first for offset, first in calls(code))


def test_generated_code_with_one_position_everywhere_has_places_of_its_own():
    tree = ast.parse("def f(x):\n    x(1)\n    x(2)")
    for node in ast.walk(tree):
        for edge in ("lineno", "end_lineno", "col_offset", "end_col_offset"):
            if hasattr(node, edge):
                setattr(node, edge, int("line" in edge))
    space = {}
    exec(compile(tree, "generated", "exec"), space)
    found = calls(space["f"].__code__)
    assert len(found) == 2 and all(offset == first for offset, first in found)


def test_an_inline_cache_belongs_to_its_instruction():
    instructions = Instructions.of(two_ways_out.py_func.__code__)
    begins, ends = instructions.offsets, [*instructions.offsets[1:], None]
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        for offset in range(begin, end or begin + 2, 2):
            assert instructions.at(offset) == number


def test_a_read_and_a_write_of_one_element_are_two_places():
    def add(x, i):
        x[i] += 1

    code = add.__code__
    each = zip(dis.get_instructions(code), Instructions.of(code).first, strict=True)
    stores = [(i.offset, first) for i, first in each if i.opname == "STORE_SUBSCR"]
    assert len(stores) == 1 and stores[0][0] == stores[0][1]
