"""The benchmark refuses what is wrong or no GPU, counts right, and loses no row."""

from functools import partial
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from ddtree_numba import backend, bench, cli, reference, vectorised
from ddtree_numba.bench import cases, peers, problems, timing
from ddtree_numba.bench.problems import WrongResult
from ddtree_numba.bench.rows import COLUMNS, Ceilings, Row, RowFile, Work
from ddtree_numba.kernels import verify_attn
from ddtree_numba.step import Round
from ddtree_numba.viz.reads import times_figure
from ddtree_numba.viz.roofline import ladder_figure, roofline_figure

PLAN = list(cases.cases(bench.STAGES, "full", True))


class FakeClock:
    """A clock that replays move on, by scripted microseconds each."""

    def __init__(self, *microseconds):
        self.now, self.replays = 0.0, 0
        self._microseconds = microseconds

    def replay(self):
        at = min(self.replays, len(self._microseconds) - 1)
        self.now += self._microseconds[at]
        self.replays += 1

    def mark(self):
        return self.now

    def between(self, start, end):
        return end - start


def case(prepare=None, **changes):
    told = {"stage": "verify_attn", "version": "mma", "shape": "(1,1,1,1)"}
    return cases.Case(**{**told, "work": Work(1e6, 1e3), "prepare": prepare, **changes})


# ----------------------------------------------------------------------------- refusal


@pytest.mark.parametrize("executor", ["numpy", "emulator"])
def test_only_a_gpu_is_timed(tmp_path, executor, monkeypatch):
    with pytest.raises(RuntimeError, match=f"only the executor 'gpu'.*'{executor}'"):
        bench.bench(tmp_path, executor=executor)
    monkeypatch.setenv("DDTREE_EXECUTOR", executor)
    with pytest.raises(RuntimeError, match="not how fast"):
        bench.bench(tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_the_command_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(backend, "gpu_problem", lambda: "there is none")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("how", [{"stages": ["mma"]}, {"shapes": "all"}])
def test_unknown_stages_and_shapes_are_named(tmp_path, monkeypatch, how):
    monkeypatch.setattr(backend, "gpu_problem", lambda: None)
    with pytest.raises(ValueError, match="'mma'|'all'"):
        bench.bench(tmp_path, **how)


# ------------------------------------------------------------------------------ timing


def test_samples_leave_out_the_replay_that_goes_ahead():
    clock = FakeClock(1000, 3, 5, 4)
    assert timing.sample(clock.replay, clock, 3) == [3, 5, 4]


def test_a_burst_is_sampled_after_a_few_replays(monkeypatch):
    monkeypatch.setattr(timing, "REST_SECONDS", 0)
    clock = FakeClock(900, 500, 400, 300, 200, 150, 7)
    # Four of them and one ahead, then one ahead of the samples.
    assert timing.burst(clock.replay, clock, 4) == [7] * 4


def test_sustained_samples_come_after_the_load():
    clock = FakeClock(*[100] * 50, 150)
    samples = timing.sustained(clock.replay, clock, 10, seconds=0.005)
    assert samples == [150] * 10
    assert clock.now - sum(samples) >= 5000


def test_the_median_and_its_spread():
    found = timing.summarise([*range(1, 11), 1000])
    assert found == (6, 2, 10, 11)


@pytest.mark.parametrize("us, rounds", [(0.5, 64), (10, 40), (399, 2), (1e5, 1)])
def test_short_work_is_recorded_several_times(us, rounds):
    assert timing.rounds_for(us) == rounds


# -------------------------------------------------------------------------------- rows


def test_a_rate_is_compared_with_the_nearer_ceiling():
    ceilings = Ceilings()
    copy = Row("ceiling", "copy", "", us=1000)
    ceilings.apply(copy, Work(nbytes=4e9))
    assert (copy.gbs, copy.ceiling, copy.percent) == (4000, "copy", 100)
    product = Row("ceiling", "matmul", "", us=1000)
    ceilings.apply(product, Work(flop=8e11))
    assert (product.tflops, product.ceiling) == (800, "matmul")
    row = Row("verify_attn", "mma", "", us=10)
    ceilings.apply(row, Work(flop=4e9, nbytes=1e7))  # 5 µs and 2.5 µs at the ceilings
    assert (row.tflops, row.gbs) == (400, 1000)
    assert (row.ceiling, row.floor_us, row.percent) == ("matmul", 5, 50)
    loaded = Row("verify_attn", "mma", "", "sustained", us=10)
    ceilings.apply(loaded, Work(flop=4e9))
    assert np.isnan(loaded.percent), "a regime whose ceiling is not known"


def test_rows_are_in_the_file_at_once_and_come_back(tmp_path):
    path = tmp_path / "rows.csv"
    file = RowFile(path)
    told = {"stage": "topk", "version": "split", "shape": "(1,9) bf16"}
    known = {**told, "commit": "0012345"}
    file.write(Row(**known, us=12.5, us_low=12, us_high=13))
    file.write(Row(**known, status="skipped", note="a, b"))
    frame = bench.load(path)
    file.close()
    assert tuple(frame.columns) == COLUMNS
    assert frame["us"].tolist()[0] == 12.5 and np.isnan(frame["us"][1])
    assert frame["note"].tolist() == ["", "a, b"]
    assert frame["commit"].tolist() == ["0012345"] * 2
    assert "nan" not in path.read_text()
    text = bench.table(frame)
    assert "12.5" in text and "skipped: a, b" in text and "nan" not in text


def test_text_that_no_row_has_is_text(tmp_path):
    path = tmp_path / "rows.csv"
    file = RowFile(path)
    file.write(Row("topk", "split", "(1,9)", us=1, us_low=1, us_high=1, numpy="2.40"))
    file.close()
    frame = bench.load(path)
    assert frame.loc[0, ["note", "peer", "numpy"]].tolist() == ["", "", "2.40"]
    assert "nan" not in bench.table(frame).lower()


@pytest.mark.parametrize(
    "text", ["", "<html>", "\0", "stage,version\na,b\n", "a,b\n1,2,3\n1,2,3,4\n"]
)
def test_a_file_that_is_no_record_is_named(tmp_path, text):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match="rows.csv is no record of .*; expected CSV"):
        bench.load(path)


def test_an_interrupted_run_keeps_its_rows(tmp_path, monkeypatch):
    def interrupted(todo, progress):
        yield Row(todo[0].stage, todo[0].version, todo[0].shape, us=1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(backend, "gpu_problem", lambda: None)
    monkeypatch.setattr(bench, "measured", interrupted)
    (tmp_path / bench.FINISHED).write_text("an earlier run")
    with pytest.raises(KeyboardInterrupt):
        bench.bench(tmp_path)
    assert bench.load(tmp_path / bench.UNFINISHED)["us"].tolist() == [1.0]
    assert (tmp_path / bench.FINISHED).read_text() == "an earlier run"


def test_a_finished_run_replaces_the_earlier_one(tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "gpu_problem", lambda: None)
    monkeypatch.setattr(bench, "measured", lambda todo, _: [Row("a", "b", "c", us=2.0)])
    (tmp_path / bench.FINISHED).write_text("an earlier run")
    frame = bench.bench(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [bench.FINISHED]
    assert bench.load(tmp_path / bench.FINISHED)["us"].tolist() == [2.0]
    assert frame["us"].tolist() == [2.0]


@pytest.mark.parametrize(
    "error, status",
    [
        (WrongResult("max absolute error 1"), "wrong"),
        (ImportError("no module named flashinfer"), "skipped"),
        (RuntimeError("this GPU does not give a block 200000 bytes"), "skipped"),
    ],
)
def test_what_is_wrong_or_missing_is_not_timed(error, status):
    def prepare(recorder):
        raise error

    recorder = None  # whoever timed something would need one
    (row,) = bench.rows_of(case(prepare), recorder, Ceilings())
    assert row.status == status
    assert str(error) in row.note
    assert np.isnan(row.us) and row.samples == 0


# --------------------------------------------------------------------------- the plan


def test_every_version_and_every_shape_is_in_the_plan():
    attention = {c.version for c in PLAN if c.stage == "verify_attn"}
    assert attention > set(verify_attn.VERSIONS) - {"auto"}
    assert attention > {peer.name for peer in peers.ATTENTION}
    shapes = {c.shape for c in PLAN if c.stage == "verify_attn"}
    assert len(shapes) == 8 and "(8,33,64,8192) bf16" in shapes
    trees = {c.shape for c in PLAN if c.stage == "logits_to_tree"}
    assert {f"(1,15,163840) bf16, M={m}" for m in (32, 64, 256, 1024)} < trees
    assert {"(8,15,163840) bf16, M=64", "(8,15,163840) f32, M=64"} < trees
    names = [(c.stage, c.version, c.shape, c.memory) for c in PLAN]
    assert len(set(names)) == len(names)


def test_ceilings_come_first_because_rows_are_compared_with_them():
    assert [c.stage for c in PLAN[:2]] == ["ceiling"] * 2


def test_attention_that_memory_bounds_is_timed_cold_too():
    cold = {c.shape for c in PLAN if c.stage == "verify_attn" and c.memory == "cold"}
    assert cold == {"(1,1,64,32768) bf16"}


# ------------------------------------------------------------------------------ checks


@pytest.fixture(scope="module")
def attention():
    """A small problem and its right answer."""
    problem = problems.attention_problem((2, 7, 4, 50))
    lens = np.full(2, problem.prefix_len, np.int32)
    out, lse = vectorised.verify_attn(
        *(problem.q, problem.kv_cache, lens, problem.visibility),
        sm_scale=problem.sm_scale,
        d_latent=problem.d_latent,
    )
    return problem, out, lse


def test_right_attention_passes(attention):
    problem, out, lse = attention
    assert problem.check(out, lse) < 1e-6
    assert np.isnan(backend.to_float32(problem.kv_cache[0, -1, 0])), "poisoned padding"


FAULTS = ["a mask bit", "a column", "not written", "one element", "a scale", "lse"]


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_attention_is_found(attention, fault):
    problem, out, lse = attention[0], attention[1].copy(), attention[2].copy()
    if fault == "a mask bit":
        assert not np.array_equal(problem.with_chain.visibility, problem.visibility)
        problem = problem.with_chain
    elif fault == "a column":
        out[..., 511] = out[..., 510]
    elif fault == "not written":
        out[1, 6, 3, 0] = np.nan  # in whatever row: none need be sampled
    elif fault == "one element":
        row = problem._expected[0][0]
        out.reshape(2, 28, -1)[0, row, 7] += 0.1
    elif fault == "a scale":
        out *= 1.01
    else:
        lse += 0.01
    with pytest.raises(WrongResult):
        problem.check(out, lse)


def test_sampled_rows_touch_every_tile():
    problem = problems.attention_problem((1, 9, 16, 8))
    rows = problem._expected[0]
    assert set(rows // problems.EVERY) == set(range(9 * 16 // problems.EVERY))


def test_wrong_candidates_and_trees_are_found():
    found = problems.candidates(1, "bf16", 5)
    assert problems.check_candidates(1, "bf16", *found) == 0
    ids = found[1].copy()
    ids[0, 3, [1, 2]] = ids[0, 3, [2, 1]]
    with pytest.raises(WrongResult, match="2 of 75"):
        problems.check_candidates(1, "bf16", found[0], ids)
    with pytest.raises(WrongResult, match="log_probs"):
        problems.check_candidates(1, "bf16", found[0] + 1e-4, found[1])
    tree = reference.tree_build(*found, 6)
    problems.check_tree(tree, *found, 6)
    tree.visibility[0, 4] ^= 1
    with pytest.raises(WrongResult, match="visibility"):
        problems.check_tree(tree, *found, 6)


def test_the_target_accepts_a_path_whose_rows_move():
    problem = problems.AcceptProblem(1, 32, 1, 10)
    rows = problem.accepted.rows[0, : problem.accepted.accept_len[0]]
    assert len(rows) > 3 and (rows != np.arange(len(rows))).any()
    assert not np.array_equal(problem.compacted(), problem.cache)


def test_a_rounds_attention_is_that_of_its_layer_and_tree():
    problem = problems.AcceptProblem(1, 6, 2, 50)
    queries = problems.attention_problem((1, 7, 4, 50))

    def attended(layer, visibility):
        return vectorised.verify_attn(
            *(queries.q, problem.cache[layer], problem.prefix_lens, visibility),
            sm_scale=queries.sm_scale,
            d_latent=queries.d_latent,
        )

    expected = problem.attention(queries, 1)
    assert expected.check(*attended(1, problem.tree.visibility)) < 1e-6
    for wrong in ((0, problem.tree.visibility), (1, queries.visibility)):
        with pytest.raises(WrongResult):
            expected.check(*attended(*wrong))


class Device(np.ndarray):
    """A host array where one of a GPU is expected."""

    def copy_to_host(self):
        return np.array(self)

    def copy_to_device(self, x):
        self[...] = x


def to_device(x):
    return np.array(x).view(Device)


def own_round(
    monkeypatch,
    attends=True,
    off=(0, 0, 0),
    spoil=lambda result, cache: 0,
    writes_once=False,
):
    """Have a round of three layers checked, on the host.

    off : what each layer's attention is off by
    spoil : called with the round's result and cache
    writes_once : whether only the first round writes its attention
    """
    off, attended = cycle(off), []

    def attend(*given, **options):
        out, lse = vectorised.verify_attn(*given, **options)
        attended.append((to_device(out + np.float32(next(off))), to_device(lse)))
        return attended[(len(attended) - 1) % 3 if writes_once else -1]

    class HostRound(Round):
        def run(self):
            self.result = super().run().map(to_device)
            spoil(self.result, self.kv_cache[0])
            return self.result

    monkeypatch.setenv("DDTREE_EXECUTOR", "numpy")
    monkeypatch.setattr(cases, "cuda", SimpleNamespace(to_device=to_device))
    monkeypatch.setattr(cases, "verify_attn", attend)
    monkeypatch.setattr(cases, "Round", HostRound)
    stream = SimpleNamespace(handle=0, synchronize=lambda: None)
    # Two accepted rows of 13 move, the second to where the first one was: a cache is
    # another one after each round.
    return cases._own_round(13, 4, 3, 50, attends, SimpleNamespace(stream=stream))


def test_a_right_round_passes_and_tells_its_attentions_error(monkeypatch):
    assert 0 < own_round(monkeypatch).error < 1e-6
    assert own_round(monkeypatch, attends=False).error == 0
    for off in ((1e-4, 0, 0), (0, 0, 1e-4)):
        assert own_round(monkeypatch, off=off).error == pytest.approx(1e-4, rel=0.01)


@pytest.mark.parametrize("off", [(0.1, 0, 0), (0, 0, 0.1)], ids=["first", "last"])
def test_a_round_whose_first_or_last_layer_is_wrong_is_found(monkeypatch, off):
    with pytest.raises(WrongResult, match="relative error"):
        own_round(monkeypatch, off=off)


def test_what_only_the_first_round_writes_is_found(monkeypatch):
    with pytest.raises(WrongResult, match="not finite"):
        own_round(monkeypatch, writes_once=True)
    rounds = []

    def spoil(result, cache):
        rounds.append(result)
        result.tree.parents[:] = rounds[0].tree.parents

    with pytest.raises(WrongResult, match="parents differs"):
        own_round(monkeypatch, spoil=spoil)


@pytest.mark.parametrize("fault", ["parents", "bonus", "the cache"])
def test_a_wrong_round_is_found_by_name(monkeypatch, fault):
    def spoil(result, cache):
        changed = {
            "parents": result.tree.parents,
            "bonus": result.accepted.bonus,
            "the cache": cache,
        }
        changed[fault].flat[-1] += 1

    with pytest.raises(WrongResult, match=f"{fault} differs"):
        own_round(monkeypatch, spoil=spoil)


# ------------------------------------------------------------------------------- peers


@pytest.mark.parametrize("digits", [None, 1, 0], ids=["distinct", "ties", "many-ties"])
@pytest.mark.parametrize("m", [0, 1, 7, 64, 200])
def test_the_heap_builds_the_references_tree(m, digits):
    rng = np.random.default_rng(m)
    scores = -np.sort(rng.exponential(2, (1, 5, 16)), axis=-1)
    scores = (scores if digits is None else np.round(scores, digits)).astype(np.float32)
    scores[0, 2, 9:] = -np.inf
    tokens = rng.integers(99, size=scores.shape).astype(np.int32)
    want = reference.tree_build(scores, tokens, m)
    got = peers.heap_tree(scores[0], tokens[0], m)
    assert got.parents == want.parents[0].tolist()
    assert got.token_ids == want.token_ids[0].tolist()
    assert got.depths == want.depths[0].tolist()
    assert np.float32(got.log_probs).tolist() == want.log_probs[0].tolist()
    bits = np.unpackbits(want.visibility[0].view(np.uint8), axis=1, bitorder="little")
    assert np.array_equal(got.visibility, bits[:, : m + 1])


def test_the_heap_takes_no_impossible_prefix():
    scores = np.array([[-0.1, -3, -np.inf], [-np.inf] * 3], np.float32)
    tree = peers.heap_tree(scores, np.array([[4, 5, 6], [7, 8, 9]]), 10)
    assert tree.token_ids == [-1, 4, 5]


def test_a_peer_that_cannot_be_imported_is_skipped_with_its_reason(monkeypatch):
    def missing():
        raise ModuleNotFoundError("No module named 'flashinfer'")

    peer = peers.ATTENTION[-1]._replace(version=missing)
    prepare = partial(cases._peer_attention, (1, 5, 8, 96), peer, "warm")
    (row,) = bench.rows_of(case(prepare), None, Ceilings())
    assert (row.status, "flashinfer" in row.note) == ("skipped", True)


# ------------------------------------------------------------------------------ figures


@pytest.fixture(scope="module")
def frame(tmp_path_factory):
    """Rows as a run writes them, at rates that are made up."""
    path, ceilings = tmp_path_factory.mktemp("bench") / "rows.csv", Ceilings()
    file = RowFile(path)
    rates = {"mma": 300e6, "wgmma": 700e6, "torch + heapq": 5e3, "copy": 4e6}
    for number, planned in enumerate(PLAN):
        regimes = ("burst", "sustained") if planned.loaded else ("burst",)
        for regime in regimes:
            work = planned.work
            us = (work.flop or work.nbytes) / rates.get(planned.version, 100e6) + number
            us *= 1.1 if regime == "sustained" else 1
            row = Row(planned.stage, planned.version, planned.shape, regime)
            row.memory, row.us, row.us_low, row.us_high = planned.memory, us, us, us
            ceilings.apply(row, work)
            file.write(row)
    file.close()
    return bench.load(path)


def test_the_roofline_names_every_shape_and_both_roofs(frame):
    figure, alt_text = roofline_figure(frame)
    rate = products(frame)["burst"]
    assert f"TB/s of a copy, {rate:.0f} TFLOP/s of a bf16 product" in alt_text
    written = " ".join(text.get_text() for text in figure.axes[0].texts)
    for shape in {c.shape for c in PLAN if c.stage == "verify_attn"}:
        assert shape.removesuffix(" bf16") in alt_text
        assert shape.removesuffix(" bf16") in written
    labels = {text.get_text() for text in figure.axes[0].get_legend().get_texts()}
    assert labels == {c.version for c in PLAN if c.stage == "verify_attn"}


def test_the_ladder_draws_attention_and_trees(frame):
    figure, alt_text = ladder_figure(frame)
    left, right = figure.axes
    assert len(left.get_yticklabels()) == 8
    assert "logits to a tree of 32 nodes" in alt_text and "1024" in alt_text
    heap = next(line for line in right.lines if line.get_label() == "torch + heapq")
    assert heap.get_xdata().tolist() == [32, 64, 256, 1024]
    rates = products(frame)
    dashed = {line.get_linestyle(): line for line in left.lines}
    for regime, dashes in (("burst", "--"), ("sustained", ":")):
        rate = rates[regime]
        assert list(dashed[dashes].get_xdata()) == [rate, rate]
        assert f"A bf16 product has {rate:.0f} TFLOP/s, {regime}." in alt_text
    # Named inside the picture, but not between the first shape and the last.
    (_, over), (_, under) = (text.xy for text in left.texts)
    bottom, top = left.get_ylim()
    assert bottom < under < -7 and 0 < over < top
    assert {text.get_text(): text.xy[0] for text in left.texts} == {
        f"bf16 product,\n{regime}": rate for regime, rate in rates.items()
    }


def products(frame):
    """The rate of a bf16 product by regime."""
    rows = frame[(frame["stage"] == "ceiling") & (frame["version"] == "matmul")]
    return rows.set_index("regime")["tflops"].to_dict()


def test_without_ceilings_no_share_of_a_roof_is_told(frame):
    rows = frame[frame["stage"] == "verify_attn"].assign(percent=np.nan)
    alt_text = roofline_figure(rows)[1]
    assert "wgmma reaches" in alt_text and "nan" not in alt_text and "%" not in alt_text
    assert "bf16 product" not in ladder_figure(rows)[1]


def test_a_ceiling_that_was_not_measured_is_not_drawn(frame):
    rows = frame.copy()
    missing = (rows["stage"] == "ceiling") & (rows["version"] == "matmul")
    rows.loc[missing, ["us", "tflops"]] = np.nan
    rows.loc[missing, "status"] = "skipped"
    for draw in (roofline_figure, ladder_figure):
        alt_text = draw(rows)[1]
        assert "bf16 product" not in alt_text and "nan" not in alt_text


def test_times_leave_out_what_was_not_timed(frame):
    rows = frame[frame["stage"] == "verify_attn"].iloc[:3].copy()
    rows.loc[rows.index[0], "us"] = np.nan
    assert len(times_figure(rows)[0].axes[0].patches) == 2
    with pytest.raises(ValueError, match="rows has no timed row"):
        times_figure(rows.iloc[:1])


@pytest.mark.parametrize("draw", [roofline_figure, ladder_figure])
def test_two_runs_in_one_frame_are_refused_by_name(frame, draw):
    runs = pd.concat([frame, frame], ignore_index=True)
    with pytest.raises(ValueError, match=r"'simple' at \(8,33,64,8192\) bf16 twice"):
        draw(runs)


def test_figures_need_attention_rows(frame):
    with pytest.raises(ValueError, match="no timed row of verify_attn"):
        roofline_figure(frame[frame["stage"] != "verify_attn"])


# --------------------------------------------------------------------------------- gpu


@pytest.mark.gpu
def test_a_tiny_row_of_every_stage():
    first = {}  # versions are checked elsewhere; here a stage is enough
    for planned in cases.cases(bench.STAGES, "tiny", False):
        if planned.version != "without attention":  # the other round does all of it too
            first.setdefault(planned.stage, planned)
    del first["ceiling"]
    rows = list(bench.measured(list(first.values()), progress=False))
    assert [row.stage for row in rows if row.regime == "burst"] == list(first)
    for row in rows:
        assert row.status == "ok", row
        assert 0 < row.us_low <= row.us <= row.us_high
        assert row.card and row.numba
