"""The KDTR container: round trips, every malformed kind, and a reader in C.

Byte edits are made to one small good file, `GOOD`, whose fields stand at the places
in `FIELDS`; `test_the_bytes_are_those_of_the_format` pins both to the format's page.
"""

import os
import pickle
import shutil
import stat
import struct
import subprocess
import tracemalloc
import zlib
from pathlib import Path

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_numba import kdtr
from ddtree_numba.kdtr import KdtrError

NAMES = {  # the format's name of each NumPy dtype
    "f4": "f32",
    "f2": "f16",
    "f8": "f64",
    "i1": "i8",
    "u1": "u8",
    "i2": "i16",
    "u2": "u16",
    "i4": "i32",
    "u4": "u32",
    "i8": "i64",
    "u8": "u64",
    "b1": "bool",
}
A = np.array([1.0, -2.0, 0.5], "<f4")
B = np.array([[1, 2], [3, 4]], "<i2")
C = np.array([True, False])
GOOD = b"".join(
    [
        struct.pack("<4sIII", b"KDTR", 1, 3, 107),
        struct.pack("<H1sBBQQQI", 1, b"a", 1, 1, 3, 128, 12, zlib.crc32(A)),
        struct.pack("<H1sBBQQQQI", 1, b"b", 7, 2, 2, 2, 192, 8, zlib.crc32(B)),
        struct.pack("<H1sBBQQQI", 1, b"c", 13, 1, 2, 256, 2, zlib.crc32(C)),
        bytes(128 - 123) + A.tobytes(),
        bytes(192 - 140) + B.tobytes(),
        bytes(256 - 200) + C.tobytes(),
    ]
)
FIELDS = {  # name: (place in GOOD, layout)
    "magic": (0, "4s"),
    "version": (4, "I"),
    "n_tensors": (8, "I"),
    "table_bytes": (12, "I"),
    "a.name_bytes": (16, "H"),
    "a.name": (18, "1s"),
    "a.dtype": (19, "B"),
    "a.ndim": (20, "B"),
    "a.dim0": (21, "Q"),
    "a.offset": (29, "Q"),
    "a.nbytes": (37, "Q"),
    "a.crc32": (45, "I"),
    "b.name": (51, "1s"),
    "b.offset": (70, "Q"),
    "c.name_bytes": (90, "H"),
    "c.ndim": (94, "B"),
    "c.dim0": (95, "Q"),
    "c.offset": (103, "Q"),
    "c.nbytes": (111, "Q"),
    "c.crc32": (119, "I"),
    "padding": (140, "B"),
    "a.data": (128, "B"),
    "c.data": (256, "B"),
}
TABLE_FAULTS = {  # what the file says of itself: (edits, the tensor blamed, reason)
    "magic": ({"magic": b"KDTS"}, None, "magic"),
    "version-0": ({"version": 0}, None, "version 0"),
    "version-2": ({"version": 2}, None, "version 2"),
    "n-tensors-huge": ({"n_tensors": 2**32 - 1}, None, "cannot hold n_tensors"),
    "n-tensors-one-more": ({"n_tensors": 4}, "#3", "runs past table_bytes"),
    "n-tensors-one-less": ({"n_tensors": 2}, None, "entries fill"),
    "n-tensors-zero": ({"n_tensors": 0}, None, "entries fill"),
    "table-bytes-one-more": ({"table_bytes": 108}, None, "entries fill"),
    "table-bytes-one-less": ({"table_bytes": 106}, "#2", "runs past table_bytes"),
    "table-bytes-huge": ({"table_bytes": 2**32 - 1}, None, "truncated: the table"),
    "duplicate-name": ({"b.name": b"a"}, "a", "duplicate name"),
    "name-not-utf8": ({"a.name": b"\xff"}, "#0", "not UTF-8"),
    "name-empty": ({"a.name_bytes": 0}, "#0", "name_bytes is 0"),
    "name-too-long": ({"a.name_bytes": 256}, "#0", "name_bytes is 256"),
    "name-past-table": ({"c.name_bytes": 255}, "#2", "runs past table_bytes"),
    "dims-past-table": ({"c.ndim": 255}, "#2", "runs past table_bytes"),
    "dtype-0": ({"a.dtype": 0}, "a", "unknown dtype code 0"),
    "dtype-14": ({"a.dtype": 14}, "a", "unknown dtype code 14"),
    "nbytes-off-by-one": ({"c.nbytes": 1}, "c", "nbytes is 1, bool (2,) has 2"),
    "dims-too-large": ({"a.dim0": 4}, "a", "nbytes is 12, f32 (4,) has 16"),
    "nbytes-huge": ({"a.nbytes": 2**64 - 1}, "a", "nbytes is"),
    "dims-wrap-to-0": ({"a.dim0": 2**62, "a.nbytes": 0}, "a", "overflow"),
    "dims-wrap-to-12": ({"a.dim0": 2**62 + 3}, "a", "overflow"),
    "dims-of-2**63-bytes": ({"c.dim0": 2**63, "c.nbytes": 2**63}, "c", "overflow"),
    "tensor-of-2**62-bytes": ({"c.dim0": 2**62, "c.nbytes": 2**62}, "c", "truncated"),
    "misaligned-by-one": ({"b.offset": 193}, "b", "misaligned"),
    "misaligned-by-32": ({"b.offset": 160}, "b", "misaligned"),
    "overlaps-header": ({"a.offset": 0}, "a", "overlaps"),
    "overlaps-table": ({"a.offset": 64}, "a", "overlaps"),
    "overlaps-tensor": ({"b.offset": 128}, "b", "overlaps"),
    "out-of-order": ({"a.offset": 192, "b.offset": 128}, "b", "overlaps"),
    "offset-past-the-end": ({"c.offset": 320}, "c", "truncated"),
    "offset-wraps": ({"c.offset": 2**64 - 64}, "c", "truncated"),
}
DATA_FAULTS = {  # what only `verify` sees
    "bad-crc": ({"a.crc32": 0}, "a", "CRC-32"),
    "bad-data": ({"a.data": 1}, "a", "CRC-32"),
    "padding-not-zero": ({"padding": 1}, "b", "padding"),
    "bool-of-2": (
        {"c.data": 2, "c.crc32": zlib.crc32(b"\x02\x00")},
        "c",
        "neither 0 nor 1",
    ),
}
FAULTS = TABLE_FAULTS | DATA_FAULTS


def edited(**edits):
    """GOOD with other values in some fields."""
    content = bytearray(GOOD)
    for field, value in edits.items():
        place, layout = FIELDS[field]
        struct.pack_into("<" + layout, content, place, value)
    assert bytes(content) != GOOD
    return bytes(content)


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.kdtr"
    path.write_bytes(GOOD)
    return path


def same(loaded, saved):
    """Equal in dtype, shape and every bit (so NaN equals itself)."""
    little = np.asarray(saved).astype(saved.dtype.newbyteorder("<"))
    return (loaded.dtype, loaded.shape, loaded.tobytes()) == (
        little.dtype,
        saved.shape,
        little.tobytes(),
    )


# ---------------------------------------------------------------- what is written


def test_the_bytes_are_those_of_the_format(tmp_path):
    path = tmp_path / "x.kdtr"
    kdtr.save(path, {"a": A, "b": B, "c": C})
    assert path.read_bytes() == GOOD


def test_info_says_what_the_table_says(good):
    assert list(kdtr.info(good).values()) == [
        kdtr.TensorInfo("a", "f32", (3,), 128, 12, zlib.crc32(A)),
        kdtr.TensorInfo("b", "i16", (2, 2), 192, 8, zlib.crc32(B)),
        kdtr.TensorInfo("c", "bool", (2,), 256, 2, zlib.crc32(C)),
    ]


def test_bf16_is_marked_in_the_file_and_loads_as_uint16(tmp_path):
    path, bits = tmp_path / "x.kdtr", np.array([0x3F80, 0x7FC0], np.uint16)
    kdtr.save(path, {"w": bits, "ids": bits}, bf16=["w"])
    assert {k: v.dtype for k, v in kdtr.info(path).items()} == {
        "w": "bf16",
        "ids": "u16",
    }
    assert same(kdtr.load(path)["w"], bits)


def test_a_file_without_tensors_is_a_header(tmp_path):
    path = tmp_path / "x.kdtr"
    kdtr.save(path, {})
    kdtr.verify(path)
    assert (kdtr.load(path), path.stat().st_size) == ({}, 16)


names = st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=63
)  # at most 4 bytes each: 252
arrays = st.sampled_from([end + kind for kind in NAMES for end in "<>"]).flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4)
    )
)
layouts = st.sampled_from(
    [lambda x: x, lambda x: x.T, lambda x: x[..., ::-1] if x.ndim else x]
)


@settings(deadline=None)  # it waits for the disk
@given(
    st.dictionaries(names, st.builds(lambda f, x: f(x), layouts, arrays), max_size=4)
)
def test_every_dtype_shape_layout_and_name_survives(tmp_path_factory, tensors):
    path = tmp_path_factory.getbasetemp() / "roundtrip.kdtr"
    kdtr.save(path, tensors)
    kdtr.verify(path)
    loaded, entries = kdtr.load(path), kdtr.info(path)
    assert list(loaded) == list(entries) == list(tensors)
    for name, saved in tensors.items():
        assert same(loaded[name], saved)
        assert entries[name].dtype == NAMES[saved.dtype.str[1:]]
        assert entries[name].shape == saved.shape
        assert entries[name].offset % 64 == 0
        assert entries[name].crc32 == zlib.crc32(loaded[name].tobytes())


def test_as_many_dimensions_as_numpy_has(tmp_path):
    path, deep = tmp_path / "x.kdtr", np.ones((1,) * 64, np.int8)
    kdtr.save(path, {"deep": deep})
    assert same(kdtr.load(path)["deep"], deep)


def test_a_bool_array_over_other_bytes_is_written_as_0_and_1(tmp_path):
    path = tmp_path / "x.kdtr"
    kdtr.save(path, {"mask": np.array([0, 1, 2, 255], np.uint8).view(bool)})
    kdtr.verify(path)
    assert kdtr.load(path)["mask"].view(np.uint8).tolist() == [0, 1, 1, 1]


# ------------------------------------------------------------------ how it loads


def test_loaded_tensors_are_views_of_one_mapping(good):
    a, b, c = kdtr.load(good).values()
    at = [x.ctypes.data for x in (a, b, c)]
    assert [at[1] - at[0], at[2] - at[0]] == [192 - 128, 256 - 128]
    assert at[0] % 64 == 0
    assert not any(x.flags.owndata for x in (a, b, c))


def test_loaded_tensors_cannot_be_written_nor_made_writable(good):
    a = kdtr.load(good)["a"]
    with pytest.raises(ValueError, match="read-only"):
        a[0] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        a.flags.writeable = True


def test_a_loaded_file_can_be_saved_over_itself(good):
    before = kdtr.load(good)
    kdtr.save(good, {"b": before["b"], "sum": before["a"].sum()})
    assert before["a"].tolist() == A.tolist()  # the old mapping lives on
    assert kdtr.load(good)["b"].tolist() == B.tolist()
    assert kdtr.load(good)["sum"] == A.sum()


# ------------------------------------------------------------ what save refuses


@pytest.mark.parametrize(
    ("name", "array", "reason"),
    [
        pytest.param("x", np.array([None]), "dtype object", id="object"),
        pytest.param("x", np.ones(2, complex), "dtype complex128", id="complex"),
        pytest.param("x", np.array(["a"]), "dtype <U1", id="str"),
        pytest.param("x", np.array([b"a"]), "dtype |S1", id="bytes"),
        pytest.param("x", np.zeros(1, "M8[s]"), "dtype datetime64", id="datetime"),
        pytest.param("x", np.zeros(1, "i4,f4"), "dtype [(", id="structured"),
        pytest.param("x", [[1], [1, 2]], "no array: setting an", id="ragged"),
        pytest.param("", A, "this one 0", id="name-empty"),
        pytest.param("é" * 128, A, "this one 256", id="name-of-256-bytes"),
        pytest.param("\ud800", A, "not UTF-8", id="name-surrogate"),
        pytest.param(7, A, "not UTF-8", id="name-int"),
    ],
)
def test_save_refuses_what_the_format_cannot_hold(good, name, array, reason):
    with pytest.raises(KdtrError) as caught:
        kdtr.save(good, {"fine": A, name: array})
    assert reason in caught.value.reason
    assert good.read_bytes() == GOOD


@pytest.mark.parametrize(
    ("bf16", "reason"),
    [
        pytest.param(["y"], "no tensor of this name", id="unknown"),
        pytest.param(["a"], "expected the bits as uint16, got float32", id="float32"),
    ],
)
def test_save_refuses_bf16_that_is_not_bits(tmp_path, bf16, reason):
    with pytest.raises(KdtrError) as caught:
        kdtr.save(tmp_path / "x.kdtr", {"a": A}, bf16=bf16)
    assert caught.value.tensor == bf16[0]
    assert reason in caught.value.reason
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_save_that_fails_keeps_the_old_file_and_leaves_no_other(
    good, monkeypatch, step
):
    def disk_full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, disk_full)
    with pytest.raises(OSError, match="No space left"):
        kdtr.save(good, {"new": np.zeros(1000)})
    assert good.read_bytes() == GOOD
    assert list(good.parent.iterdir()) == [good]


def test_the_data_is_on_disk_before_the_name_changes(good, monkeypatch):
    steps = []
    for step in ("fsync", "replace"):
        real = getattr(os, step)
        monkeypatch.setattr(
            os, step, lambda *a, step=step, real=real: (steps.append(step), real(*a))
        )
    kdtr.save(good, {})
    assert steps == ["fsync", "replace"]


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_a_saved_file_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "other").touch()
    kdtr.save(tmp_path / "x.kdtr", {"a": A})
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


# ----------------------------------------------------------------- malformed files


def refusal(call, path):
    with pytest.raises(KdtrError) as caught:
        call(path)
    assert caught.value.file == str(path)
    assert str(path) in str(caught.value) and caught.value.reason in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("edits", "tensor", "reason"), TABLE_FAULTS.values(), ids=TABLE_FAULTS
)
def test_a_malformed_table_is_refused_before_any_large_allocation(
    good, edits, tensor, reason
):
    good.write_bytes(edited(**edits))
    tracemalloc.start()
    try:
        for call in (kdtr.load, kdtr.info, kdtr.verify):
            error = refusal(call, good)
            assert (error.tensor, reason in error.reason) == (tensor, True), error
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("edits", "tensor", "reason"), DATA_FAULTS.values(), ids=DATA_FAULTS
)
def test_malformed_data_is_found_by_verify_alone(good, edits, tensor, reason):
    kdtr.verify(good)
    good.write_bytes(edited(**edits))
    assert list(kdtr.load(good)) == list(kdtr.info(good)) == ["a", "b", "c"]
    error = refusal(kdtr.verify, good)
    assert (error.tensor, reason in error.reason) == (tensor, True), error


def test_a_file_cut_at_any_byte_is_refused(good):
    for length in range(len(GOOD)):
        good.write_bytes(GOOD[:length])
        assert "truncated" in refusal(kdtr.load, good).reason


def test_a_byte_after_the_last_tensor_is_refused(good):
    good.write_bytes(GOOD + b"\0")
    assert "1 bytes follow" in refusal(kdtr.load, good).reason


def test_more_padding_than_needed_is_legal(tmp_path):
    path = tmp_path / "x.kdtr"
    content = edited(**{"c.offset": 320})
    path.write_bytes(content[:256] + bytes(64) + content[256:])
    kdtr.verify(path)
    assert kdtr.load(path)["c"].tolist() == C.tolist()


def test_more_dimensions_than_numpy_has_are_listed_but_not_loaded(tmp_path):
    path = tmp_path / "x.kdtr"
    table = struct.pack("<H1sBB65QQQI", 1, b"x", 6, 65, *[1] * 65, 576, 1, 0)
    content = struct.pack("<4sIII", b"KDTR", 1, 1, len(table)) + table
    path.write_bytes(content.ljust(576, b"\0") + b"\0")
    assert kdtr.info(path)["x"].shape == (1,) * 65
    assert refusal(kdtr.load, path).tensor == "x"


@pytest.mark.parametrize("call", [kdtr.load, kdtr.info, kdtr.verify])
def test_a_path_that_cannot_be_read_is_named(tmp_path, call):
    assert "No such file" in refusal(call, tmp_path / "missing.kdtr").reason
    assert "cannot be read" in refusal(call, tmp_path).reason


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(KdtrError, match="pipe: cannot be read: not a regular file"):
        kdtr.load(tmp_path / "pipe")


def test_an_error_survives_pickling(good):
    good.write_bytes(GOOD[:-1])
    error = refusal(kdtr.load, good)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (KdtrError, str(error))


def corrupted(rng):
    """GOOD with one to three random bytes changed, more often in the table."""
    content = bytearray(GOOD)
    for _ in range(rng.integers(1, 4)):
        place = rng.integers(rng.choice([123, len(GOOD)]))
        content[place] ^= rng.integers(1, 256)
    return bytes(content)


def test_random_damage_is_refused_or_leaves_every_tensors_bytes_intact(good):
    # "Bytes", as no checksum covers the table: another name is another good file.
    rng, refused = np.random.default_rng(1), 0
    for _ in range(3000):
        content = corrupted(rng)
        good.write_bytes(content)
        try:
            kdtr.verify(good)
        except KdtrError:
            refused += 1
        else:
            loaded = [tensor.tobytes() for tensor in kdtr.load(good).values()]
            assert loaded == [x.tobytes() for x in (A, B, C)], content
    assert 2000 < refused < 3000  # both happen


# ----------------------------------------------------------------- the reader in C


@pytest.fixture(scope="module")
def c_reader(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc) on this machine")
    program = tmp_path_factory.mktemp("c") / "kdtr_reader"
    source = Path(__file__).with_name("kdtr_reader.c")
    flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-O1"]
    subprocess.run([compiler, *flags, source, "-o", program], check=True)
    return lambda path: subprocess.run([program, path], capture_output=True)


def test_the_c_reader_sees_what_python_saved(tmp_path, c_reader):
    path, rng = tmp_path / "x.kdtr", np.random.default_rng(3)
    tensors = {
        f"layer.{kind}.é": rng.integers(0, 2, (2, 3, i)).astype(kind)
        for i, kind in enumerate(NAMES)
    }
    tensors |= {"scalar": np.float64(0.1), "strided": rng.normal(size=(5, 4)).T}
    tensors |= {"big": np.arange(4, dtype=">i4"), "w": np.arange(9, dtype=np.uint16)}
    kdtr.save(path, tensors, bf16={"w"})
    lines = []
    for name, x in tensors.items():
        dtype = "bf16" if name == "w" else NAMES[x.dtype.str[1:]]
        crc = zlib.crc32(x.astype(x.dtype.newbyteorder("<")).tobytes())
        lines.append(f"{name}\t{dtype}\t{','.join(map(str, x.shape))}\t{crc:08x}\n")
    seen = c_reader(path)
    assert (seen.stdout.decode(), seen.stderr, seen.returncode) == (
        "".join(lines),
        b"",
        0,
    )


def same_verdict(path, c_reader):
    """Ask both readers; they blame the same tensor for the same fault, or none."""
    seen = c_reader(path)
    try:
        kdtr.verify(path)
    except KdtrError as error:
        number, fault = seen.stderr.decode().strip().split(": ")
        assert seen.returncode == 1
        assert fault in error.reason
        if error.tensor is None:
            assert number == "tensor 0"
        elif error.tensor.startswith("#"):
            assert number == f"tensor {int(error.tensor[1:]) + 1}"
        return False
    assert (seen.returncode, seen.stderr) == (0, b"")
    return True


@pytest.mark.parametrize("edits", [fault[0] for fault in FAULTS.values()], ids=FAULTS)
def test_the_c_reader_refuses_every_fault_for_the_same_reason(good, c_reader, edits):
    assert same_verdict(good, c_reader)
    good.write_bytes(edited(**edits))
    assert not same_verdict(good, c_reader)


@pytest.mark.parametrize("length", [0, 3, 15, 16, 50, 122, 130, 257, 259])
def test_the_c_reader_refuses_a_file_of_another_length(good, c_reader, length):
    good.write_bytes((GOOD + b"\0")[:length])
    assert not same_verdict(good, c_reader)


def test_both_readers_agree_on_random_damage(good, c_reader):
    rng, accepted = np.random.default_rng(2), 0
    for _ in range(300):
        content = corrupted(rng)
        good.write_bytes(content)
        verified = True
        try:
            kdtr.verify(good)
        except KdtrError:
            verified = False
        assert (c_reader(good).returncode == 0) == verified, content
        accepted += verified
    assert 0 < accepted < 300


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, id=name.hex())
        for name in [
            b"\xc3\xa9",
            b"\xc1\xa9",  # overlong, 2 bytes
            b"\xe0\x80\x80",  # overlong, 3 bytes
            b"\xed\x9f\xbf",
            b"\xed\xa0\x80",  # surrogate
            b"\xf0\x9f\x8c\xb2",
            b"\xf4\x90\x80\x80",  # past U+10FFFF
            b"\xf8\x88\x80\x80",
            b"\xe2\x82",  # cut short
            b"a\x80",
            b"\xc3(",
        ]
    ],
)
def test_both_readers_agree_on_what_is_utf8(tmp_path, c_reader, name):
    try:
        name.decode()
        dtype = 6
    except UnicodeDecodeError:
        dtype = 0x82  # looks like the name's next byte, to a reader that runs past it
    path = tmp_path / "x.kdtr"
    n = len(name)
    table = struct.pack(f"<H{n}sBBQQQI", n, name, dtype, 1, 0, 64, 0, 0)
    header = struct.pack("<4sIII", b"KDTR", 1, 1, len(table))
    path.write_bytes((header + table).ljust(64, b"\0"))
    assert same_verdict(path, c_reader) == (dtype == 6)
    if dtype == 6:
        assert c_reader(path).stdout == name + b"\tu8\t0\t00000000\n"
    else:
        assert "UTF-8" in refusal(kdtr.verify, path).reason
