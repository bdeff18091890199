"""Exercises accept the solution, reject likely mistakes kindly, and never raise."""

import numpy as np
import pytest
from numba import cuda

from ddtree_numba import lab
from ddtree_numba.lab import compare, exercise, grading
from ddtree_numba.lab.exercise import find

NUMBERS = exercise.numbers()
EXERCISES = {number: find(number) for number in NUMBERS}
WRONG = [
    pytest.param(number, wrong, id=f"{number}-{wrong.name.replace(' ', '-')}")
    for number, each in EXERCISES.items()
    for wrong in each.wrong
]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_solution_passes(number, capsys):
    lab.check(number, EXERCISES[number].solution)
    assert f"All {len(EXERCISES[number].cases)} cases pass." in capsys.readouterr().out


@pytest.mark.parametrize("number, wrong", WRONG)
def test_a_plausible_mistake_is_rejected_with_a_line_that_helps(number, wrong):
    results = lab.grade(number, wrong.answer)
    failed = [result for result in results if result.status != grading.PASSED]
    assert any(wrong.says in result.says for result in failed), failed
    for result in failed:
        assert "\n" not in result.says and len(result.says) <= 400, result.says


@pytest.mark.parametrize("number", NUMBERS)
def test_an_exercise_has_three_mistakes_two_hints_and_names_its_notebook(number):
    each = EXERCISES[number]
    assert each.notebook == number
    assert len(each.wrong) >= 3 and len(each.hints) >= 2
    assert len({case.name for case in each.cases}) == len(each.cases)
    # What reveal prints sets the name that the learner's cell sets.
    source = each.source()
    assert f"def {each.name}(" in source or source.startswith(f"{each.name} = ")


class Odd:
    def __call__(self, *args, **kwargs):
        return self

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    def __repr__(self):
        raise RuntimeError("no text")


def unwritten(*args, **kwargs):
    raise NotImplementedError("TODO: something")


def broken(*args, **kwargs):
    return [][0]


GARBAGE = {
    "nothing": None,
    "an-ellipsis": ...,
    "a-string": "x",
    "not-a-number": float("nan"),
    "an-array": np.zeros((2, 3)),
    "a-broken-function": broken,
    "an-unwritten-function": unwritten,
    "a-function-without-arguments": lambda: None,
    "a-function-that-returns-nothing": lambda *args, **kwargs: None,
    "a-function-that-returns-text": lambda *args, **kwargs: "x",
    "a-function-that-returns-inf": lambda *args, **kwargs: np.inf,
    "a-function-that-leaves": lambda *args, **kwargs: exit(),
    "an-object-that-cannot-be-compared": Odd(),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("number", NUMBERS)
def test_no_answer_makes_the_check_raise(number, garbage, capsys):
    lab.check(number, garbage)
    assert f"0 of {len(EXERCISES[number].cases)} cases pass" in capsys.readouterr().out


def test_an_answer_that_is_not_written_yet_is_no_failure():
    for answer in (None, unwritten):
        (status,) = {result.status for result in lab.grade(2, answer)}
        assert status == grading.UNWRITTEN


def test_an_error_is_told_with_the_line_of_the_answer_that_raised_it():
    says = lab.grade(2, broken)[0].says
    assert "IndexError: list index out of range" in says
    assert "return [][0])" in says


@cuda.jit
def unwritten_kernel(log_probs, probs):
    raise NotImplementedError("TODO: the kernel")


@cuda.jit
def divergent_kernel(log_probs, probs):
    if cuda.threadIdx.x < 3:
        cuda.syncthreads()


@cuda.jit
def misspelt_kernel(log_probs, probs):
    probs[0] = log_prob[0]  # noqa: F821


def test_faults_in_kernels_are_told_without_their_files_folder():
    result = lab.grade(0, unwritten_kernel)[0]
    assert (result.status, result.says) == (
        grading.UNWRITTEN, "Not written yet. TODO: the kernel",
    )  # fmt: skip
    says = lab.grade(0, misspelt_kernel)[0].says
    assert "'log_prob' is not defined (block 0, lane 0, line" in says
    says = lab.grade(0, divergent_kernel)[0].says
    assert "not every lane of the block comes to" in says
    assert ", test_lab.py:" in says


def test_an_endless_answer_is_stopped_even_if_it_catches_everything(monkeypatch):
    monkeypatch.setattr(grading, "SECONDS_A_CASE", 0.05)
    caught = []

    def endless(*args):
        while True:
            try:
                while True:
                    pass
            except:  # noqa: E722
                caught.append(1)
                if len(caught) % 2 == 0:
                    raise

    first, *others = lab.grade(2, endless)
    assert "did not come back within 0.05" in first.says
    assert {other.status for other in others} == {grading.UNWRITTEN}, "20 s for each"


def test_one_reason_is_printed_once(capsys):
    lab.check(2, broken)
    assert capsys.readouterr().out.count("IndexError") == 1


def test_hints_come_one_after_the_other_and_start_again(capsys):
    count = len(EXERCISES["02"].hints)
    for _ in range(count + 1):
        lab.hint(2)
    heads = [f"Hint {i} of {count}" for i in (*range(1, count + 1), 1)]
    text = capsys.readouterr().out
    assert [text.count(head) for head in heads] == [2, *[1] * (count - 1), 2]
    assert "lab.reveal(2)" in text


def test_revealed_text_is_the_solution(capsys):
    lab.reveal("02_best_first_by_hand")
    names: dict = {}
    exec(capsys.readouterr().out, names)
    assert {r.status for r in lab.grade(2, names["pushes"])} == {grading.PASSED}


def test_an_unknown_exercise_is_refused_by_its_number():
    with pytest.raises(ValueError, match=r"n is 99; expected one of .*02"):
        lab.check(99, None)


def test_kernels_are_asked_for_as_kernels(monkeypatch):
    from ddtree_numba.kernels.tree_accept import tree_accept_kernel

    each = exercise.Exercise("02", "", "k", (), tree_accept_kernel, (), ())
    assert "is @cuda.jit above it?" in grading._no_answer(each, broken)
    assert grading._no_answer(each, tree_accept_kernel) is None


@pytest.mark.parametrize(
    "got, says",
    [
        (None, "x is None; expected an array of (2,)"),
        ("ab", "x has dtype <U2"),
        ([1, 2, 3], "x has shape (3,); expected (2,)"),
        ([1.0, 2.0], "x has dtype float64; expected int64"),
        ([1, 5], "x[1] is 5; expected 2 (1 of 2 elements differ)"),
        ([[1], [2, 3]], "x is a list; expected an array"),
    ],
)
def test_arrays_are_compared_in_one_line(got, says):
    assert says in compare.arrays(got, np.array([1, 2]), "x")


def test_nan_never_matches_a_number():
    assert "x[0] is nan" in compare.arrays([np.nan], [1.0], "x", atol=1e9)
    assert compare.number(np.nan, 1.0, "x") == "x is nan; expected 1."
    assert compare.arrays([1.0, 2.0], [1, 2.00001], "x", rtol=1e-4) is None


def test_values_are_compared_as_pythons_own():
    assert compare.value([np.int32(1), (2,)], (1, (2,)), "x") is None
    assert compare.value(np.array([1, 2]), (1, 2), "x") is None
    assert compare.value(3, 4, "x") == "x is 3; expected 4."
    assert "of type" not in compare.value(Odd(), 4, "x")


@pytest.mark.parametrize("asked, where", [("numpy", "emulator"), ("emulator",) * 2])
def test_start_says_where_kernels_run(asked, where, monkeypatch, capsys):
    monkeypatch.setenv("DDTREE_EXECUTOR", asked)
    assert lab.start() == where
    text = capsys.readouterr().out
    assert f"ddtree_numba on {asked}" in text and "in the emulator" in text


@pytest.mark.gpu
def test_start_says_that_kernels_run_on_the_gpu(capsys):
    assert lab.start() == "gpu"
    assert "ddtree_numba on gpu" in capsys.readouterr().out
