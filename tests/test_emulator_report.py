"""What a traced run reports beside races: memory requests, divergence, counts."""

from collections import defaultdict

import numpy as np
import pytest
import test_emulator_bugs as bugs
from numba import cuda, float32, int32
from test_emulator_bugs import marked_line
from test_emulator_kernels import CASES, histogram, matmul, transpose

from ddtree_numba.emulator import EmulatorError, LaunchError, emulate, trace, traced


def row_of(table, **wanted):
    """The one row of a table with these values."""
    for name, value in wanted.items():
        table = table[table[name] == value]
    assert len(table) == 1, table
    return table.iloc[0]


# -- global memory --------------------------------------------------------------------


@cuda.jit
def read_kernel(x, where, out):
    # x any, where [lanes] i64: the element that each lane reads, out [lanes]
    i = cuda.threadIdx.x
    out[i] = x[where[i]]


def sectors(x, where):
    where = np.asarray(where, np.int64)
    out = np.zeros(len(where), x.dtype)
    report = emulate(read_kernel, 1, len(where), x, where, out, trace=True)
    row = row_of(report.memory, array="x")
    assert (row.space, row.kind, row.requests) == ("global", "read", 1)
    assert row.line == read_kernel.py_func.__code__.co_firstlineno + 4
    assert row.source == "out[i] = x[where[i]]"
    assert np.isnan(row.passes)
    assert row.lanes == len(where)
    return row.sectors, row.sectors_at_best


LANES = np.arange(32)


@pytest.mark.parametrize(
    ("dtype", "where", "expected"),
    [
        pytest.param("f4", LANES, (4, 4), id="neighbours"),
        pytest.param("f4", LANES[::-1], (4, 4), id="backwards"),
        pytest.param("f4", LANES * 2, (8, 4), id="every other"),
        pytest.param("f4", LANES * 8, (32, 4), id="a sector each"),
        pytest.param("f4", LANES + 1, (5, 4), id="one element late"),
        pytest.param("f4", LANES * 0 + 5, (1, 1), id="all the same"),
        pytest.param("f4", LANES[:3], (1, 1), id="three lanes"),
        pytest.param("f8", LANES, (8, 8), id="doubles"),
        pytest.param("i1", LANES, (1, 1), id="bytes"),
        pytest.param("u2", LANES % 16 * 16, (16, 1), id="halves far apart"),
    ],
)
def test_sectors_of_a_request(dtype, where, expected):
    assert sectors(np.zeros(300, dtype), where) == expected


def test_a_view_begins_where_it_begins_in_its_allocation():
    """Allocations start at a multiple of 256 bytes, wherever NumPy has put them."""
    for shift in (0, 4):
        whole = np.frombuffer(bytearray(1100), np.float32, offset=shift)
        assert sectors(whole, LANES) == (4, 4)
        assert sectors(whole[8:], LANES) == (4, 4)
        assert sectors(whole[1:], LANES) == (5, 4)


# -- shared memory --------------------------------------------------------------------


def passes(dtype, stride):
    kind = np.dtype(dtype).type

    @cuda.jit
    def kernel():
        box = cuda.shared.array(1100, kind)
        box[cuda.threadIdx.x * stride] = 1

    (row,) = emulate(kernel, 1, 32, trace=True).memory.itertuples()
    assert (row.space, row.array, row.requests) == ("shared", "box", 1)
    assert np.isnan(row.sectors)
    assert row.conflicts == row.passes - row.passes_at_best
    return row.passes, row.passes_at_best


@pytest.mark.parametrize(
    ("dtype", "stride", "expected"),
    [
        ("f4", 1, (1, 1)),
        ("f4", 2, (2, 1)),
        ("f4", 8, (8, 1)),
        ("f4", 32, (32, 1)),
        ("f4", 33, (1, 1)),
        ("f4", 0, (1, 1)),
        ("f8", 1, (2, 2)),
        ("f8", 2, (4, 2)),
        ("u1", 1, (1, 1)),
        ("u2", 4, (2, 1)),
    ],
)
def test_passes_over_the_banks(dtype, stride, expected):
    assert passes(dtype, stride) == expected


@cuda.jit
def count_in_one_place_kernel(out):
    box = cuda.shared.array(32, int32)
    i = cuda.threadIdx.x
    box[i] = 0
    cuda.syncthreads()
    cuda.atomic.add(box, i // 8, 1)
    cuda.syncthreads()
    out[i] = box[i]


def test_atomics_on_one_word_take_turns():
    report = emulate(count_in_one_place_kernel, 1, 32, np.zeros(32), trace=True)
    row = row_of(report.memory, array="box", kind="atomic")
    assert (row.passes, row.passes_at_best, row.conflicts) == (8, 1, 7)
    assert row_of(report.memory, array="box", kind="read").conflicts == 0


# -- requests -------------------------------------------------------------------------


@cuda.jit
def uneven_kernel(x, out):
    i = cuda.grid(1)
    total = float32(0)
    for j in range(i % 3):
        total += x[j, i]  # <-
    out[i] = total


def test_the_nth_access_of_each_lane_makes_the_nth_request():
    x, out = np.zeros((3, 80), np.float32), np.zeros(80, np.float32)
    report = emulate(uneven_kernel, 2, 40, x, out, trace=True)
    row = row_of(report.memory, array="x")
    assert row.line == marked_line(uneven_kernel)
    # 4 warps, two of 8 lanes; a third of the lanes reads twice, a third once.
    n_reads = sum(i % 3 for i in range(80))
    assert row.requests == 4 * 2
    assert row.lanes == n_reads / 8
    assert row_of(report.memory, array="out").lanes == 80 / 4
    # Of the last warp's lanes 72 … 79 only 74 and 77 read twice.
    assert row_of(report.divergence, what="read x").fewest_lanes == 2


def test_requests_do_not_depend_on_the_order_of_lanes():
    tables = []
    for order in ("forward", "reverse", "shuffled"):
        reports = []

        def launch(*args, order=order, reports=reports):
            reports.append(emulate(*args, trace=True, order=order))

        matmul(launch)
        tables.append(reports[0].memory)
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[2])


def test_two_reads_on_a_line_are_two_requests():
    @cuda.jit
    def kernel(x):
        i = cuda.threadIdx.x
        for _ in range(50):  # long enough for the interpreter to specialise itself
            x[i] = x[i] + x[i]

    report = emulate(kernel, 1, 64, np.zeros(64, np.float32), trace=True)
    assert row_of(report.memory, kind="read").requests == 2 * 50 * 2
    assert row_of(report.memory, kind="read").lanes == 32


# -- divergence -----------------------------------------------------------------------


@cuda.jit
def halves_kernel(x):
    i = cuda.threadIdx.x
    x[i] = 1
    if i % 32 < 16:
        x[i] = cuda.shfl_down_sync(0xFFFF, x[i], 1)  # <-
    cuda.syncwarp()


def test_divergence_names_the_lines_where_a_part_of_a_warp_was_active():
    report = emulate(halves_kernel, 1, 70, np.zeros(70, np.int32), trace=True)
    table = report.divergence
    assert set(table.line) == {marked_line(halves_kernel)}
    assert set(table.what) == {"read x", "write x", "shfl_down_sync"}
    row = row_of(table, what="shfl_down_sync")
    # The last warp has 6 lanes, and all of them take part.
    assert (row.executed, row.partial, row.fewest_lanes) == (3, 2, 6)
    assert row.lanes == (16 + 16 + 6) / 3
    assert row_of(table, what="read x").partial == 2


def test_a_kernel_whose_warps_stay_together_has_no_divergence():
    def launch(*args):
        assert emulate(*args, trace=True).divergence.empty

    @cuda.jit
    def kernel(x):
        i = cuda.threadIdx.x
        for _ in range(3):
            x[i] = cuda.shfl_xor_sync(-1, x[i], 1)
            cuda.syncthreads()

    launch(kernel, 2, 40, np.zeros(40, np.int32))
    with pytest.raises(AssertionError):
        histogram(launch)


# -- counts ---------------------------------------------------------------------------


def test_the_score_is_that_of_the_busiest_lane():
    @cuda.jit
    def kernel(x):
        box = cuda.shared.array(8, float32)
        i = cuda.threadIdx.x
        box[i] = x[i]
        if i == cuda.blockIdx.x:
            box[i] += x[i] + x[0]
        cuda.atomic.add(x, i, box[i])

    report = emulate(kernel, 2, 8, np.zeros(8, np.float32), trace=True)
    assert report.counts == {
        "global atomic": 1, "global read": 3, "shared read": 2, "shared write": 2,
    }  # fmt: skip
    assert report.score().splitlines() == [
        "Score (Max Per Thread):",
        "|  Global Reads | Global Writes |  Shared Reads | Shared Writes "
        "| Global Atomics |",
        "|             3 |             0 |             2 |             2 "
        "|             1 |",
    ]


def test_barriers_are_listed_with_the_phase_that_they_end():
    @cuda.jit
    def kernel(x):
        cuda.syncthreads()
        for _ in range(2):
            if cuda.syncthreads_or(1):  # <-
                x[0] = 1

    table = emulate(kernel, 2, 1, np.zeros(1), trace=True).barriers
    assert table["phase"].tolist() == [0, 1, 2] * 2
    assert table["block"].tolist() == [(0, 0, 0)] * 3 + [(1, 0, 0)] * 3
    assert set(table["line"][1:3]) == {marked_line(kernel)}
    assert table["name"].tolist() == ["syncthreads", *["syncthreads_or"] * 2] * 2


def test_an_untraced_report_says_how_to_get_one():
    report = emulate(uneven_kernel, 1, 1, np.zeros((1, 1)), np.zeros(1))
    for name in ("memory", "divergence", "barriers"):
        with pytest.raises(EmulatorError, match="trace=True"):
            getattr(report, name)
    with pytest.raises(EmulatorError, match="trace=True"):
        report.score()


def test_traced_reports_the_launches_within_it_and_no_others():
    arguments = uneven_kernel, 1, 1, np.zeros((1, 1)), np.zeros(1)
    with traced() as reports:
        emulate(*arguments)
        emulate(*arguments)
    emulate(*arguments)
    assert [report.traced for report in reports] == [True, True]


# -- what the trace holds -------------------------------------------------------------


@pytest.fixture
def small_trace(monkeypatch):
    """A trace that holds next to nothing; the list of how much it looked at."""
    monkeypatch.setattr(trace, "PACK_AT", 7)
    monkeypatch.setattr(trace, "HOLD", 40)
    monkeypatch.setattr(trace, "KEEP", 100)
    looked = []
    look = trace.Recorder._look

    def noted(recorder, phase):
        looked.append(sum(len(t["lane"]) for t in recorder._now.held))
        look(recorder, phase)

    monkeypatch.setattr(trace.Recorder, "_look", noted)
    return looked


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_correct_kernel_has_no_race_in_a_small_trace(case, small_trace):
    races = []

    def launch(*args, **options):
        races.extend(emulate(*args, trace=True, **options).races)

    case(launch)
    assert races == []
    assert max(small_trace) <= 40 + 7


def both_ways(monkeypatch, run):
    """A report of a usual trace and one of a small one."""
    first = run()
    with monkeypatch.context() as patched:
        patched.setattr(trace, "PACK_AT", 7)
        patched.setattr(trace, "HOLD", 40)
        patched.setattr(trace, "KEEP", 100)
        return first, run()


@pytest.mark.parametrize(
    ("kernel", "grid", "block", "shapes"),
    [
        (bugs.missing_barrier_in_a_loop_kernel, 1, 32, [(3, 32), 32]),
        (bugs.non_atomic_sum_kernel, 1, 64, [64, 1]),
        (bugs.atomic_and_plain_kernel, 1, 64, [2, 64]),
        (bugs.same_place_kernel, 1, 64, [(1, 3)]),
        (bugs.block_to_block_kernel, 9, 32, [(9, 32)]),
        (bugs.late_write_kernel, 2, 128, [1, 128]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_small_trace_finds_the_same_races(monkeypatch, kernel, grid, block, shapes):
    def run():
        arrays = [np.ones(shape, np.float32) for shape in shapes]
        return emulate(kernel, grid, block, *arrays, trace=True)

    whole, small = both_ways(monkeypatch, run)

    def arrays(report):
        return {(race.array, race.between_blocks) for race in report.races}

    def lines(report):
        return {line for race in report.races for line in race.linenos}

    assert arrays(small) == arrays(whole) != set()
    assert lines(small) == lines(whole)
    assert small.counts == whole.counts


@cuda.jit
def program_kernel(program, x):
    # program [blocks, lanes, steps, 2] i32: what to do, and to which element; x [16]
    box = cuda.shared.array(16, int32)
    b, i = cuda.blockIdx.x, cuda.threadIdx.x
    if i == 0:
        for at in range(16):
            box[at] = 0
    cuda.syncthreads()
    for step in range(program.shape[2]):
        what, at = program[b, i, step, 0], program[b, i, step, 1]
        if what == 0:
            box[at]
        if what == 1:
            box[at] = 1
        if what == 2:
            cuda.atomic.add(box, at, 1)
        if what == 3:
            x[at]
        if what == 4:
            x[at] = 1
        if what == 5:
            cuda.atomic.add(x, at, 1)
        if what == 6:
            cuda.syncthreads()
        if what == 7:  # lanes take turns here, and nothing is ordered
            cuda.any_sync(0xFFFFFFFF, True)


def racing_arrays(program):
    """Which arrays race inside a block, and whether x does between blocks: by pairs."""
    inside, between = defaultdict(set), defaultdict(set)
    for b, lanes in enumerate(program.tolist()):
        for i, steps in enumerate(lanes):
            phase = 0
            for what, at in steps:
                phase += what == 6
                array = "box" if what < 3 else "x"
                if what < 6:
                    inside[array, b, phase, at].add((i, what % 3))
                if what in (3, 4, 5):
                    between[at].add((b, what % 3))

    def race(accesses):
        return any(
            one != other and (1 in kinds or kinds == {0, 2})
            for one, first in accesses
            for other, second in accesses
            for kinds in [{first, second}]
        )

    arrays = {array for (array, *_), accesses in inside.items() if race(accesses)}
    return arrays, any(map(race, between.values()))


@pytest.mark.parametrize("small", [False, True])
def test_random_programs_race_as_every_pair_of_accesses_says(small, monkeypatch):
    rng = np.random.default_rng(2)
    outcomes = []
    for n in range(60):
        if small:
            monkeypatch.setattr(trace, "PACK_AT", int(rng.integers(2, 9)))
            monkeypatch.setattr(trace, "HOLD", int(rng.integers(5, 30)))
        program = rng.integers(0, 16, (3, 4, 6, 2), np.int32)
        writes = rng.random() ** 3 / 3
        odds = [0.4 - writes, writes, 0.1, 0.4 - writes, writes, 0.1]
        program[..., 0] = rng.choice(6, (3, 4, 6), p=odds)
        program[:, :, rng.random(6) < 0.3, 0] = 6
        program[:, :, rng.random(6) < 0.4, 0] = 7
        order = ("forward", "reverse", "shuffled")[n % 3]
        races = emulate(
            *(program_kernel, 3, 4, program, np.zeros(16, np.int32)),
            trace=True, order=order, seed=n,
        ).races  # fmt: skip
        inside = {race.array for race in races if not race.between_blocks}
        between = any(race.between_blocks for race in races)
        assert (inside, between) == racing_arrays(program)
        outcomes.append((bool(inside), between))
    assert len(set(outcomes)) >= 3  # the programs differ enough


def test_accesses_beyond_the_cap_are_counted_as_dropped(monkeypatch):
    def run():
        reports = []
        transpose(lambda *args: reports.append(emulate(*args, trace=True)))
        return reports[0]

    whole, small = both_ways(monkeypatch, run)
    n = len(whole.accesses)
    assert whole.dropped == 0
    assert small.dropped == n - 100
    assert small.accesses.equals(whole.accesses[:100])
    assert f"{n - 100} accesses not kept" in repr(small)
    assert "not kept" not in repr(whole)


def test_phases_that_fit_into_the_trace_are_not_cut():
    """Memory is exact if only blocks, and not their phases, are larger than HOLD."""
    run_whole, run_small = [], []

    @cuda.jit
    def kernel(x):
        i = cuda.threadIdx.x
        for j in range(20):
            x[i] += x[i + j]
            cuda.syncthreads()

    def run(reports):
        x = np.zeros(60, np.float32)
        reports.append(emulate(kernel, 1, 32, x, trace=True))

    run(run_whole)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trace, "HOLD", 300)
        patched.setattr(trace, "PACK_AT", 7)
        run(run_small)
    assert run_small[0].memory.equals(run_whole[0].memory)
    assert run_small[0].divergence.equals(run_whole[0].divergence)


def test_memory_that_many_blocks_use_is_numbered_once():
    @cuda.jit
    def kernel(x):
        box = cuda.shared.array(4, np.uint8)
        for n in range(4):
            box[n] = n
        for _ in range(3):
            x[0] = box.view(np.int32)[0]

    report = emulate(kernel, 50, 1, np.zeros(1, np.int32), trace=True)
    assert len(report._recorder.arrays) == 3  # x, box, and box as int32


def test_shared_memory_is_fresh_in_every_block():
    @cuda.jit
    def kernel(out):
        box = cuda.shared.array(1, int32)
        buffer = cuda.shared.array(0, int32)
        if cuda.blockIdx.x == 0:
            box[0] = 1
            buffer[0] = 1
        out[0] = box[0] if cuda.blockDim.x == 2 else buffer[0]

    for threads, name in ((2, "box"), (1, "buffer")):
        with pytest.raises(EmulatorError, match=rf"{name}\[0\].*before anything"):
            emulate(kernel, 2, threads, np.zeros(1), dynamic_shared=4)


def test_more_dynamic_shared_memory_than_any_card_has_is_refused():
    with pytest.raises(
        LaunchError, match="uneven_kernel, dynamic_shared: 232449 bytes"
    ):
        emulate(uneven_kernel, 1, 1, 0, 0, dynamic_shared=232449)


def test_a_race_names_its_kernel():
    report = emulate(bugs.same_place_kernel, 1, 3, np.zeros((1, 3)), trace=True)
    assert str(report.races[0]).startswith(
        "race in same_place_kernel on global x[0, 2]"
    )
