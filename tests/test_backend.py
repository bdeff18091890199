"""Where kernels run, how arrays get there, and what is said when they cannot."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from numba import cuda, float32, int32, types, uint16

from ddtree_numba import backend, bf16
from ddtree_numba.backend import Place, Workspace, place

NO_GPU = "no NVIDIA GPU with a working driver was found on this machine"


class FakeDeviceArray:
    """Looks like it lies on a GPU; nobody may touch its memory."""

    dtype, shape = np.dtype(np.float32), (2,)

    def __init__(self, read_only: bool = False) -> None:
        self.__cuda_array_interface__ = {
            "shape": self.shape,
            "typestr": "<f4",
            "data": (1 << 20, read_only),
            "version": 3,
        }


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(backend, "gpu_problem", lambda: NO_GPU)


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(backend, "gpu_problem", lambda: None)


# ---------------------------------------------------------------------------- choosing


def test_an_argument_beats_the_environment_beats_the_default(monkeypatch, no_gpu):
    assert backend.choose(default="emulator") == "emulator"
    monkeypatch.setenv("DDTREE_EXECUTOR", "numpy")
    assert backend.choose(default="emulator") == "numpy"
    assert backend.choose("emulator", default="numpy") == "emulator"


def test_an_empty_variable_asks_for_nothing(monkeypatch, no_gpu):
    monkeypatch.setenv("DDTREE_EXECUTOR", "")
    assert backend.choose(default="emulator") == "emulator"


def test_nobody_asks_and_there_is_no_gpu(no_gpu):
    assert backend.choose() == "numpy"


def test_nobody_asks_and_there_is_a_gpu(a_gpu):
    assert backend.choose() == "gpu"
    assert backend.choose("gpu") == "gpu"


def test_an_unknown_name_is_an_error_that_names_its_source(monkeypatch):
    with pytest.raises(ValueError, match="^executor='cpu' is not one of gpu, emulator"):
        backend.choose("cpu")
    monkeypatch.setenv("DDTREE_EXECUTOR", "tpu")
    with pytest.raises(ValueError, match="^DDTREE_EXECUTOR='tpu' is not one of gpu"):
        backend.choose()


def test_asking_for_a_missing_gpu_is_one_clear_sentence(monkeypatch, no_gpu):
    with pytest.raises(RuntimeError) as caught:
        backend.choose("gpu")
    assert str(caught.value) == f"executor='gpu' was asked for, but {NO_GPU}."
    monkeypatch.setenv("DDTREE_EXECUTOR", "gpu")
    with pytest.raises(RuntimeError, match=f"^DDTREE_EXECUTOR='gpu' .* {NO_GPU}"):
        backend.choose("")


@pytest.mark.parametrize(
    "name", ["numpy", "emulator", pytest.param("gpu", marks=[pytest.mark.gpu])]
)
def test_the_banner_is_one_line_with_executor_and_versions(name):
    banner = backend.banner(name)
    assert "\n" not in banner
    assert banner.startswith(f"ddtree_numba on {name} (")
    for version in (f"NumPy {np.__version__}", "Python 3.", "Numba 0.", "numba-cuda "):
        assert version in banner
    assert ("compute capability" in banner) == (name == "gpu")
    assert ("no GPU used" in banner) == (name != "gpu")


# ------------------------------------------------------------------- explaining errors


def test_wheels_newer_than_the_driver_are_explained():
    for text in (
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        "ptxas: Unsupported PTX version",
    ):
        why = backend.explain_gpu_error(RuntimeError(f"[222] Call to ... {text}\nmore"))
        assert "newer than this machine's driver" in why
        assert "gpu12" in why
        assert "\n" not in why


def test_missing_compiler_libraries_are_explained():
    for text in ("libNVVM cannot be found", "no nvrtc here", "nvvm64.dll"):
        why = backend.explain_gpu_error(OSError(text))
        assert 'pip install "ddtree_numba[gpu]"' in why
        assert "\n" not in why


def test_any_other_error_is_cut_to_one_line_with_its_kind():
    why = backend.explain_gpu_error(ValueError("one\n\n  two\n" + "x" * 999))
    assert why.startswith("the GPU could not be used: ValueError: one two x")
    assert "\n" not in why
    assert len(why) < 400


def test_gpu_problem_turns_an_exception_into_a_sentence(monkeypatch):
    def broken() -> bool:
        raise RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    monkeypatch.setattr(backend.cuda, "is_available", broken)
    assert "newer than this" in str(backend.gpu_problem.__wrapped__())


def test_gpu_problem_says_that_the_simulator_is_on(monkeypatch):
    monkeypatch.setattr(backend.config, "ENABLE_CUDASIM", 1)
    assert "simulator is on" in str(backend.gpu_problem.__wrapped__())


# ----------------------------------------------------------------------------- placing


def test_host_arrays_run_where_choose_says(monkeypatch, no_gpu):
    at = place("emulator", q=np.zeros(2), extra=None)
    assert (at.executor, at.on_device) == ("emulator", False)
    assert place(default="numpy", q=[1.0]).executor == "numpy"
    monkeypatch.setenv("DDTREE_EXECUTOR", "emulator")
    assert place(default="numpy", q=[1.0]).executor == "emulator"


def test_device_arrays_run_on_the_gpu_unasked(a_gpu):
    at = place(default="numpy", q=FakeDeviceArray(), extra=None)
    assert (at.executor, at.on_device) == ("gpu", True)


def test_mixing_host_and_device_arrays_names_both_sides():
    with pytest.raises(TypeError) as caught:
        place(q=FakeDeviceArray(), lens=np.zeros(2), kv=FakeDeviceArray(), a=[1])
    assert str(caught.value) == (
        "a, lens on the host, but q, kv on the GPU; expected all arrays on one side"
    )


def test_device_arrays_do_not_go_to_a_cpu_executor(monkeypatch):
    message = "^q on the GPU, but the executor is 'numpy'; copy to the host first"
    with pytest.raises(TypeError, match=message):
        place("numpy", q=FakeDeviceArray())
    monkeypatch.setenv("DDTREE_EXECUTOR", "numpy")
    with pytest.raises(TypeError, match=message):
        place(q=FakeDeviceArray())


def test_values_are_checked_on_the_host_unless_told_otherwise():
    host, device = Place("emulator", "numpy"), Place("gpu", "torch")
    assert [host.checks(check, "q") for check in (None, True, False)] == [1, 1, 0]
    assert [device.checks(check, "q") for check in (None, False)] == [0, 0]
    with pytest.raises(ValueError, match="check is True, but q lie on the GPU"):
        device.checks(True, "q")
    with pytest.raises(TypeError, match="check is 'no'; expected a bool or None"):
        host.checks("no", "q")


def test_a_count_is_an_int_in_its_range():
    for x in (1, 3, np.int64(3)):
        count = backend.whole_number(x, "k", least=1, most=3)
        assert (count, type(count)) == (x, int)
    for x in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match=f"k is {x!r} .*; expected an int, 1 … 3"):
            backend.whole_number(x, "k", least=1, most=3)
    for x in (0, 4):
        with pytest.raises(ValueError, match=f"k is {x}; expected 1 … 3"):
            backend.whole_number(x, "k", least=1, most=3)
    with pytest.raises(ValueError, match="k is -1; expected 0 or more"):
        backend.whole_number(-1, "k")


def test_an_array_that_refuses_to_answer_is_no_device_array():
    class CpuTensor:
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("not on a GPU")

    assert not backend.is_device_array(CpuTensor())
    assert not backend.is_device_array(np.zeros(1))
    assert backend.is_device_array(FakeDeviceArray())


HOST = Place("numpy", "numpy")
F32, BITS, I32 = np.float32, np.uint16, np.int32


def test_take_passes_a_good_array_through_without_a_copy():
    x = np.zeros((2, 3), F32)
    assert HOST.take(x, "q", dtypes=(F32, BITS), shape=(2, None)) is x


TAKEN = {
    "another dtype": (
        dict(x=np.zeros(2), dtypes=(F32, BITS)),
        TypeError("q has dtype float64; expected float32 or uint16 (bf16 bits)"),
    ),
    "another rank": (
        dict(x=np.zeros(2, F32), dtypes=(F32,), ndim=2),
        ValueError("q has shape (2,); expected 2 dimensions"),
    ),
    "another rank than the shape": (
        dict(x=np.zeros(2, F32), dtypes=(F32,), shape=(2, None)),
        ValueError("q has shape (2,); expected 2 dimensions"),
    ),
    "another shape": (
        dict(x=np.zeros((2, 3), F32), dtypes=(F32,), shape=(None, 4)),
        ValueError("q has shape (2, 3); expected (*, 4)"),
    ),
    "fractions": (
        dict(x=[0.5], dtypes=(I32,), convert=True),
        TypeError("q has dtype float64; expected int32"),
    ),
    "too big": (
        dict(x=[2**31], dtypes=(I32,), convert=True),
        ValueError("q holds values outside int32"),
    ),
    "too small": (
        dict(x=[-1], dtypes=(np.uint32,), convert=True),
        ValueError("q holds values outside uint32"),
    ),
    "nothing": (
        dict(x=None, dtypes=None),
        TypeError("q is a NoneType; expected an array"),
    ),
    "rows of different length": (
        dict(x=[[1], [1, 2]], dtypes=(I32,)),
        ValueError("q is no array: setting an array element with a sequence. "),
    ),
}


@pytest.mark.parametrize("what", TAKEN)
def test_take_says_what_was_given_and_what_is_expected(what):
    arguments, error = TAKEN[what]
    with pytest.raises(type(error)) as caught:
        HOST.take(name="q", **arguments)
    assert str(caught.value).startswith(str(error))


def test_take_converts_small_index_lists_where_that_loses_nothing():
    taken = HOST.take([1, 2**31 - 1], "lens", dtypes=(I32,), convert=True)
    assert (taken.dtype, taken.tolist()) == (I32, [1, 2**31 - 1])
    assert HOST.take([], "lens", dtypes=(I32,), convert=True).dtype == I32


def test_take_of_any_dtype():
    x = np.zeros(2, np.complex64)
    assert HOST.take(x, "kv_cache", dtypes=None) is x


def test_reinterpret_and_leading_axis_are_views():
    x = np.arange(6, dtype=F32).reshape(2, 3)[:, ::2]
    words = backend.reinterpret(x, np.uint32)
    assert words.tolist() == x.copy().view(np.uint32).tolist()
    longer = backend.with_leading_axis(x)
    assert longer.shape == (1, 2, 2)
    longer[0, 1, 1] = 9
    assert x[1, 1] == 9


@cuda.jit
def double_kernel(
    x,  # [n] f32, f16 or bf16 bits
    out,  # out [n] f32
):
    i = cuda.grid(1)
    if i < x.shape[0]:
        out[i] = backend.to_float32(x[i]) * float32(2)


def test_an_empty_grid_launches_nothing(kernel_executor):
    at = place(kernel_executor)
    untouched = at.put(np.full(1, 7, F32))
    for grid in (0, (0,), (3, 0, 1)):
        at.launch(double_kernel, grid, 1, untouched, untouched)
    assert at.give(untouched).tolist() == [7]


def test_an_array_is_filled_where_the_kernel_runs(executor):
    at = place(executor)
    for value, dtype in ((-np.inf, F32), (-1, I32), (7, np.uint32)):
        found = at.give(at.full((2, 3, 50), value, dtype))
        np.testing.assert_array_equal(found, np.full((2, 3, 50), value, dtype))
    assert at.give(at.full((2, 0), 1, I32)).shape == (2, 0)


# --------------------------------------------------------------------------- workspace


def test_a_workspace_gives_the_same_arrays_in_the_same_order(kernel_executor):
    at, workspace, rounds = place(kernel_executor), Workspace(), []
    for _ in range(3):
        with workspace:
            arrays = at.empty((2, 3), F32), at.full((4,), 5, I32), at.empty((4,), I32)
        assert at.give(arrays[1]).tolist() == [5] * 4
        at.launch(double_kernel, 1, 32, at.put(np.ones(4, F32)), arrays[1])
        rounds.append([id(x) for x in arrays])
    assert rounds[0] == rounds[1] == rounds[2]
    assert len(set(rounds[0])) == 3
    assert at.empty((2, 3), F32) is not arrays[0], "outside arrays are new"


def test_calls_that_differ_from_the_first_time_are_an_error():
    workspace = Workspace()
    with workspace:
        HOST.empty((2,), F32)
        HOST.empty((3,), F32)
    with pytest.raises(ValueError) as caught, workspace:
        HOST.empty((2,), F32)
        HOST.empty((4,), F32)
    assert str(caught.value) == (
        "allocation 1 of a workspace has shape (4,) and dtype float32; expected the "
        "first time's, (3,) and float32: other calls need a workspace of their own"
    )
    with pytest.raises(ValueError, match="allocation 0 .* dtype int32; .* float32"):
        with workspace:
            HOST.empty((2,), I32)


def test_workspaces_nest_but_not_in_themselves():
    outer, inner = Workspace(), Workspace()
    with outer:
        x = HOST.empty((2,), F32)
        with inner:
            y = HOST.empty((2,), F32)
        z = HOST.empty((2,), F32)
        with pytest.raises(RuntimeError, match="in use already"), outer:
            pass
    assert len({id(x), id(y), id(z)}) == 3
    with outer:
        assert HOST.empty((2,), F32) is x
        assert HOST.empty((2,), F32) is z


def test_what_a_broken_first_time_allocated_is_forgotten():
    workspace = Workspace()
    with pytest.raises(ZeroDivisionError), workspace:
        HOST.empty((9,), F32)
        raise ZeroDivisionError
    with workspace:
        first = HOST.empty((2,), F32)
    with pytest.raises(ZeroDivisionError), workspace:
        raise ZeroDivisionError
    with workspace:
        assert HOST.empty((2,), F32) is first, "what came to its end is kept"


def test_a_thread_has_a_workspace_of_its_own():
    mine, found = Workspace(), []

    def other():
        found.append(HOST.empty((2,), F32))
        with pytest.raises(RuntimeError, match="in use already"), mine:
            pass
        with Workspace():
            found.append(HOST.empty((2,), F32))

    with mine:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        found.append(HOST.empty((2,), F32))
    with mine:
        again = HOST.empty((2,), F32)
    assert [x is again for x in found] == [False, False, True]


@pytest.mark.parametrize("stream", [None, "7", 1.0])
def test_a_stream_is_a_handle(stream):
    with pytest.raises(TypeError, match=f"stream is {stream!r} .*; expected an int"):
        Workspace(stream)


@pytest.mark.gpu
def test_launches_go_to_the_stream_of_the_workspace():
    at, stream = place("gpu"), cuda.stream()
    assert at.stream == 0
    with Workspace(int(stream)):
        assert int(at.stream) == int(stream)


# ------------------------------------------------------------------- float32 in kernels

SAMPLES = np.concatenate(
    [
        np.array([0.0, -0.0, 1.5, -2.75, 6e-8, 65504, np.inf, -np.inf, np.nan], "f4"),
        np.random.default_rng(0).standard_normal(20).astype("f4"),
    ]
)
STORED = {
    "float32": SAMPLES,
    "float16": SAMPLES.astype(np.float16),
    "bf16": bf16.from_float32(SAMPLES),
}


@pytest.mark.parametrize("kind", STORED)
def test_to_float32_reads_every_kind_of_element(kernel_executor, kind):
    stored = STORED[kind]
    at = place(kernel_executor)
    out = at.empty((len(stored),), F32)
    at.launch(double_kernel, 1, 32, at.put(stored), out)
    wide = bf16.to_float32(stored) if kind == "bf16" else stored.astype(F32)
    np.testing.assert_array_equal(at.give(out), wide * 2)


@pytest.mark.gpu
def test_to_float32_of_all_65536_bf16_patterns():
    bits = np.arange(2**16, dtype=np.uint16)
    out = cuda.device_array(2**16, F32)
    double_kernel[256, 256](cuda.to_device(bits), out)
    with np.errstate(over="ignore", invalid="ignore"):  # some are signalling NaNs
        expected = bf16.to_float32(bits) * F32(2)
    np.testing.assert_array_equal(out.copy_to_host(), expected)


@pytest.mark.ptx
@pytest.mark.parametrize("element", [float32, types.float16, uint16], ids=str)
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (12, 0)])
def test_to_float32_needs_no_float64(element, cc):
    signature = (element[::1], float32[::1])
    ptx = backend.compile_ptx(double_kernel, signature, compute_capability=cc)
    assert f".target sm_{cc[0]}{cc[1]}" in ptx
    assert ".f64" not in ptx


# ------------------------------------------------------------------------ NumPy 2.5

WITHOUT_ROW_STACK = """
import numpy as np
if hasattr(np, "row_stack"):
    del np.row_stack
from ddtree_numba import backend
assert np.row_stack is np.vstack
"""


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_name_that_numpy_2_5_dropped_is_given_back():
    run_python(WITHOUT_ROW_STACK)


@pytest.mark.ptx
def test_a_kernel_compiles_where_numpy_has_no_row_stack():
    compile_one = """
from numba import cuda, int32
@cuda.jit
def kernel(out):
    out[0] = 1
assert ".entry" in backend.compile_ptx(kernel, (int32[::1],))
"""
    run_python(WITHOUT_ROW_STACK + compile_one)


# -------------------------------------------------------------- arrays of each library


def to_torch(x):
    return pytest.importorskip("torch").as_tensor(x, device="cuda")


def to_cupy(x):
    return pytest.importorskip("cupy").asarray(x)


def pointer(x) -> int:
    return x.__cuda_array_interface__["data"][0]


LIBRARIES = pytest.mark.parametrize(
    "to_device", [to_torch, to_cupy, cuda.to_device], ids=["torch", "cupy", "numba"]
)


@pytest.mark.gpu
@LIBRARIES
def test_device_arrays_come_back_in_kind_without_a_copy(to_device):
    x = to_device(np.arange(4, dtype=F32))
    at = place(x=x)
    assert (at.executor, at.on_device) == ("gpu", True)
    taken = at.take(x, "x", dtypes=(F32,), shape=(4,))
    assert pointer(taken) == pointer(x)
    out = at.empty((4,), F32)
    at.launch(double_kernel, 1, 32, taken, out)
    given = at.give(out)
    assert type(given) is type(x)
    assert pointer(given) == pointer(out)
    as_numba = cuda.as_cuda_array(given)
    assert as_numba.copy_to_host().tolist() == [0, 2, 4, 6]


@pytest.mark.gpu
@LIBRARIES
def test_strided_device_arrays_are_taken_as_they_are(to_device):
    x = to_device(np.arange(12, dtype=F32).reshape(3, 4))[1:, :2]
    taken = place(x=x).take(x, "x", dtypes=(F32,), shape=(2, 2))
    assert taken.strides == (16, 4)
    assert taken.copy_to_host().tolist() == [[4, 5], [8, 9]]
    longer = backend.with_leading_axis(taken)
    assert longer.shape == (1, 2, 2)
    words = backend.reinterpret(longer, np.uint32).copy_to_host()
    assert words.view(F32).tolist() == [[[4, 5], [8, 9]]]


@pytest.mark.gpu
def test_torch_bfloat16_is_taken_as_its_bits():
    torch = pytest.importorskip("torch")
    x = torch.tensor([1.0, -2.5, float("inf")], dtype=torch.bfloat16, device="cuda")
    taken = place(x=x).take(x, "x", dtypes=(F32, BITS), shape=(3,))
    assert taken.dtype == np.uint16
    assert pointer(taken) == x.data_ptr()
    assert bf16.to_float32(taken.copy_to_host()).tolist() == [1.0, -2.5, np.inf]


@pytest.mark.gpu
def test_a_launch_follows_what_torch_has_queued_on_its_stream():
    torch = pytest.importorskip("torch")
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
        x.fill_(3)
        at = place(x=x)
        out = at.empty((4,), F32)
        at.launch(double_kernel, 1, 32, at.take(x, "x", dtypes=(F32,)), out)
        found = at.give(out).tolist()
    assert found == [6, 6, 6, 6]


@pytest.mark.gpu
def test_more_than_48_kb_of_dynamic_shared_memory_can_be_asked_for():
    at = place("gpu")
    out = at.put(np.zeros(1, I32))
    at.launch(last_word_kernel, 1, 32, out, dynamic_shared=96 * 1024)
    assert at.give(out).tolist() == [5]


@cuda.jit
def last_word_kernel(
    out,  # out [1] i32
):
    words = cuda.shared.array(0, int32)
    if cuda.threadIdx.x == 0:
        words[96 * 256 - 1] = 5
        out[0] = words[96 * 256 - 1]


def test_launching_again_does_not_ask_for_shared_memory_twice():
    class Kernel:
        """Like Numba's: the same arguments give the same configuration again."""

        pre_launch_callbacks: list = []

        def __getitem__(self, arguments):
            assert arguments == (1, 32, 0, 96 * 1024)
            return self

        def __call__(self):
            assert len(self.pre_launch_callbacks) == 1

    for _ in range(3):
        Place("gpu", "numpy").launch(Kernel(), 1, 32, dynamic_shared=96 * 1024)


@pytest.mark.gpu
def test_more_shared_memory_than_a_card_has_is_an_error():
    at = place("gpu")
    out = at.put(np.zeros(1, I32))
    with pytest.raises(RuntimeError, match="does not give a block 1048576 bytes"):
        at.launch(last_word_kernel, 1, 32, out, dynamic_shared=1 << 20)


@pytest.mark.gpu
def test_a_host_array_that_ran_on_the_gpu_comes_back_as_numpy():
    at = place("gpu", x=np.zeros(4, F32))
    assert (at.executor, at.on_device) == ("gpu", False)
    given = at.give(at.take(np.arange(4, dtype=F32), "x", dtypes=(F32,)))
    assert isinstance(given, np.ndarray)
    assert given.tolist() == [0, 1, 2, 3]


def test_a_read_only_device_cache_is_an_error(a_gpu):
    from ddtree_numba.kernels.kv_compact import kv_compact

    small = FakeDeviceArray()
    with pytest.raises(ValueError, match="kv_cache is read-only"):
        kv_compact(FakeDeviceArray(read_only=True), small, small, small)
