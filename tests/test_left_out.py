"""Variants of the wgmma kernel leave out what they say, and are timed like the rest."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda
from test_verify_attn import SCALE, dense
from test_verify_attn_bf16 import bf16_case
from test_verify_attn_wgmma import UNWRITTEN, _ptx

from ddtree_numba import backend, bench, cli, lab
from ddtree_numba.bench import cases, left_out
from ddtree_numba.bench.rows import Row, RowFile
from ddtree_numba.emulator import emulate
from ddtree_numba.emulator.bulk import Box, Bulk
from ddtree_numba.kernels import verify_attn as verify_attn_module
from ddtree_numba.kernels import verify_attn_wgmma
from ddtree_numba.kernels.verify_attn import verify_attn
from ddtree_numba.lab import recorded
from ddtree_numba.viz import left_out_figure

# -------------------------------------------------------------------------------- edits


@pytest.mark.parametrize("variant", left_out.VARIANTS)
def test_every_edit_fits_the_kernel_once(variant):
    changed = left_out.edited(variant) != left_out.edited("whole")
    assert changed == (variant != "whole")
    assert left_out.kernel(variant).py_func.__name__ == "wgmma_kernel"


@pytest.mark.parametrize(
    ("old", "count"), [("not_there(", 0), ("bar_sync(PLANNED, THREADS)", 2)]
)
def test_an_edit_that_no_longer_fits_is_named(monkeypatch, old, count):
    monkeypatch.setitem(left_out.VARIANTS, "no merge", ((old, ""),))
    why = rf"variant 'no merge': '{re.escape(old)}' stands {count} times in .*wgmma"
    with pytest.raises(ValueError, match=why):
        left_out.edited("no merge")


def test_the_kernel_is_itself_again_whatever_happens():
    whole = verify_attn_wgmma.wgmma_kernel
    with pytest.raises(KeyError), left_out.in_place("no merge"):
        assert verify_attn_wgmma.wgmma_kernel is left_out.kernel("no merge")
        raise KeyError
    assert verify_attn_wgmma.wgmma_kernel is whole


# ------------------------------------------------------------------------- what is done

KEPT = bf16_case(2, 2, 2, [140]), 3  # parts: few enough for blocks to keep their own
MANY = bf16_case(2, 2, 2, [300]), 5


def done_by(variant, case, n_splits):
    """Run a variant in the emulator; its results, and what was done for them.

    queries, keys, fetches : copies in bulk; posted : elements
    counts : by how much each block's counter was raised
    """
    done = {"queries": 0, "keys": 0, "fetches": 0}
    request = Bulk.request

    def noted(bulk, name, lane, to, read, barrier):
        source = getattr(read, "__self__", None)
        if not isinstance(source, Box):
            done["fetches"] += 1
        elif source.tensor.tensor.shape[1] == case[1].shape[1]:
            done["keys"] += 1
        else:
            done["queries"] += 1
        request(bulk, name, lane, to, read, barrier)

    def launch(at, *given, dynamic_shared, cooperative):
        out, lse, posted, _, counters = given[-5:]
        out[:], lse[:], posted[:] = np.nan, np.nan, UNWRITTEN
        emulate(*given, dynamic_shared=dynamic_shared)
        done["posted"] = int((posted != UNWRITTEN).sum())
        done["counts"] = counters.tolist()

    options = {"n_splits": n_splits, "sm_scale": SCALE, "d_latent": 512}
    with pytest.MonkeyPatch.context() as patch, left_out.in_place(variant):
        # Enough blocks to cut a row tile; the emulator's one cuts nothing.
        patch.setattr(verify_attn_module, "_multiprocessors", lambda at: 6)
        patch.setattr(Bulk, "request", noted)
        patch.setattr(backend.Place, "launch", launch)
        found = verify_attn(*case, version="wgmma", executor="emulator", **options)
    return found, done


@pytest.mark.parametrize(("case", "blocks"), [KEPT, MANY], ids=["kept", "many"])
def test_each_variant_does_less_than_the_one_before(case, blocks):
    found, whole = done_by("whole", case, blocks)
    expected = dense(*case, d_latent=512)
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=0.02)
    assert whole["counts"] == [1] * blocks
    assert all(whole[what] > 0 for what in ("queries", "keys", "fetches", "posted"))
    less = dict(whole)
    for variant, changed in [
        ("no sums", {}),
        ("no merge", {"fetches": 0}),
        ("no post", {"posted": 0, "counts": [0] * blocks}),
        ("plan only", {"queries": 0, "keys": 0}),
    ]:
        less |= changed
        (out, _), done = done_by(variant, case, blocks)
        assert (variant, done) == (variant, less)
        assert np.isnan(out).all(), variant


def test_without_queries_they_are_zero():
    (q, *rest), blocks = KEPT
    whole = done_by("whole", (q, *rest), blocks)[1]
    (out, lse), done = done_by("no queries", (q, *rest), blocks)
    assert done == whole | {"queries": 0}
    expected = dense(np.zeros_like(q), *rest, d_latent=512)
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=2e-3)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-6)


@pytest.mark.ptx
def test_what_is_left_out_remains_in_the_kernel():
    # For the variants whose edits are more than a condition.
    what = ("wgmma.mma_async", "st.global", "ld.shared", "cp.async.bulk", "shfl")
    counts = {}
    for variant in ("whole", "no sums", "no queries"):
        with left_out.in_place(variant):
            ptx = _ptx()
        assert ".local" not in ptx and ".f64" not in ptx
        counts[variant] = [ptx.count(name) for name in what]
    assert counts["no sums"] == counts["no queries"] == counts["whole"]


# -------------------------------------------------------------------------------- times

TIMES = {  # made up, in µs
    "whole": 20,
    "no sums": 17,
    "no merge": 15,
    "no post": 12.5,
    "plan only": 2,
    "no queries": 19,
}


def rows(shapes=("(1,2,3,40) bf16", "(1,1,1,5) bf16"), **changes):
    return [
        Row("left_out", variant, shape, us=us, us_low=us, us_high=us, **changes)
        for shape in shapes
        for variant, us in TIMES.items()
    ]


def read_back(folder, rows):
    file = RowFile(folder / "rows.csv")
    for row in rows:
        file.write(row)
    file.close()
    return bench.load(folder / "rows.csv")


def test_the_parts_add_up_to_the_whole(tmp_path):
    frame = read_back(tmp_path, rows())
    parts = left_out.parts(frame)
    assert parts.index.tolist() == ["(1,2,3,40)", "(1,1,1,5)"]  # as they were timed
    expected = {
        "launch and plan": 2,
        "load and multiply": 10.5,
        "post": 2.5,
        "wait and fetch": 2,
        "sum and write": 3,
    }
    assert parts.iloc[0].to_dict() == expected
    last = left_out.table(frame).splitlines()[-1]
    assert last.split() == "(1,1,1,5) 2.0 10.5 2.5 2.0 3.0 20.0 1.0".split()


def test_a_shape_without_all_variants_has_no_parts(tmp_path):
    frame = read_back(tmp_path, rows()[1:])
    assert left_out.parts(frame).index.tolist() == ["(1,1,1,5)"]
    with pytest.raises(ValueError, match="no shape with all variants"):
        left_out.parts(frame.iloc[:3])


def test_rows_without_a_time_and_of_other_stages_are_no_variants(tmp_path):
    told = {"version": "whole", "shape": "(1,2,3,40) bf16"}
    others = [Row("left_out", **told, status="wrong"), Row("splits", **told, us=1)]
    frame = read_back(tmp_path, [*others, *rows()])
    assert left_out.parts(frame).sum(axis=1).tolist() == [20, 20]


def test_a_shape_timed_twice_is_refused_by_name(tmp_path):
    frame = read_back(tmp_path, [*rows(), *rows()])
    with pytest.raises(ValueError, match=r"'whole' at \(1,2,3,40\) bf16 twice"):
        left_out.parts(frame)


def test_the_picture_wants_a_bar_and_all_parts(tmp_path):
    parts = left_out.parts(read_back(tmp_path, rows()))
    for bad in (parts.iloc[:0], parts.iloc[:, 1:], parts.assign(more=0)):
        message = re.escape(
            f"shape {bad.shape}; expected a line or more, and 5 columns"
        )
        with pytest.raises(ValueError, match=message):
            left_out_figure(bad)


def test_the_picture_has_a_bar_a_shape_and_a_label_a_part(tmp_path):
    parts = left_out.parts(read_back(tmp_path, rows()))
    figure, alt_text = left_out_figure(parts)
    (ax,) = figure.axes
    assert [bar.get_width() for bar in ax.patches] == [2, 10.5, 2.5, 2, 3] * 2
    texts = [text.get_text().strip() for text in ax.texts]
    assert texts == ["2.0", "10.5", "2.5", "2.0", "3.0", "20.0 µs"] * 2
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == list(left_out.PARTS)
    assert "(1,2,3,40) 20.0 µs: launch and plan 2.0, load and multiply 10.5" in alt_text


def test_the_lab_says_whose_times_they_are(tmp_path, monkeypatch, capsys):
    read_back(tmp_path, rows(card="a card"))
    monkeypatch.setattr(recorded, "data_path", lambda path: tmp_path / "rows.csv")
    parts = lab.left_out_parts()
    assert parts.sum(axis=1).tolist() == [20, 20]
    assert "recorded in data/bench/left_out.csv: one a card" in capsys.readouterr().out


# ----------------------------------------------------------------------------- command


def test_the_whole_comes_first_and_alone_is_checked(monkeypatch):
    plan = list(cases.left_out_cases("full"))
    assert [c.version for c in plan] == [*left_out.VARIANTS] * 4
    assert plan[0].version == "whole"

    def prepared(*given, attend, checked):
        return checked

    monkeypatch.setattr(cases, "_own_attention", prepared)
    assert {c.version for c in plan if c.prepare(None)} == {"whole"}


@pytest.mark.parametrize(
    ("problem", "capability", "why"),
    [("there is none", None, "there is none"), (None, (8, 0), "capability 8.0")],
)
def test_without_a_hopper_gpu_the_command_says_so_in_one_line(
    tmp_path, monkeypatch, capsys, problem, capability, why
):
    monkeypatch.setattr(backend, "gpu_problem", lambda: problem)
    device = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(cuda, "get_current_device", lambda: device)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "--left-out", "--out", str(tmp_path / "new")])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (["--stages", "verify_attn"], "not allowed with argument"),
        (["--peers"], "--left-out has no --peers"),
    ],
)
def test_left_out_takes_no_stages_and_no_peers(others, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "--left-out", *others])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def _timed_rows(monkeypatch):
    """Have the command find a card, and measure what `rows` gives."""
    monkeypatch.setattr(bench, "require_hopper", lambda: None)
    monkeypatch.setattr(backend, "banner", lambda executor: "a card")
    monkeypatch.setattr(bench, "measured", lambda todo, progress: rows())


@pytest.mark.usefixtures("_timed_rows")
def test_the_command_writes_rows_and_a_picture_and_prints_parts(tmp_path, capsys):
    assert cli.main(["bench", "--left-out", "--out", str(tmp_path)]) == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"left_out.csv", "left_out.png"}
    assert bench.load(tmp_path / "left_out.csv")["us"].tolist() == [*TIMES.values()] * 2
    assert "10.5" in capsys.readouterr().out


@pytest.mark.usefixtures("_timed_rows")
def test_a_wrong_whole_has_no_parts(tmp_path, capsys, monkeypatch):
    wrong = Row("left_out", "whole", "(1,2,3,40) bf16", status="wrong", note="by 1")
    monkeypatch.setattr(bench, "measured", lambda todo, progress: [wrong, *rows()[1:]])
    assert cli.main(["bench", "--left-out", "--out", str(tmp_path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["left_out.csv"]
    assert "wrong: by 1" in capsys.readouterr().out


# --------------------------------------------------------------------------------- gpu


@pytest.mark.gpu
@pytest.mark.parametrize("variant", left_out.VARIANTS)
def test_every_variant_runs_and_the_whole_is_right(variant):
    if why := verify_attn_wgmma.card_problem():
        pytest.skip(why)
    plan = [case for case in cases.left_out_cases("tiny") if case.version == variant]
    (row,) = bench.measured(plan, progress=False)
    assert row.status == "ok", row
    if variant == left_out.WHOLE:
        assert row.error < 0.1  # checked against the reference, too
    else:
        assert np.isnan(row.error)
