"""KDTR v1: a small container for named, typed tensors shared by Python and C/C++.

Little-endian throughout::

    header   magic "KDTR" | u32 version = 1 | u32 n_tensors | u32 table_bytes
    table    n_tensors x { u16 name_bytes | name utf-8 | u8 dtype | u8 ndim
                           | u64 dims[ndim] | u64 offset | u64 nbytes | u32 crc32 }
    data     each tensor C-contiguous at `offset` from the file's start, 64-byte
             aligned, in table order, zero padding between
    dtype    1 f32  2 f16  3 bf16  4 f64  5 i8  6 u8  7 i16  8 u16  9 i32  10 u32
             11 i64  12 u64  13 bool

What the table above leaves open, and how this module decides it:

- `crc32` is zlib's, over the tensor's `nbytes` of data (not over its table entry).
- The file ends where the last tensor ends (with no tensors: where the table ends);
  anything after that is an error.
- Padding may be longer than alignment needs (pages, say), never anything but zeros.
- The itemsize times all nonzero dims fits in a signed 64-bit integer, even if another
  dim is zero, so that no reader has to multiply in an order that overflows.
- A bool is one byte, 0 or 1.

`load` and `info` check all that the header and the table say; the data's own errors
(a checksum, nonzero padding, a bool of 2) need a pass over the file: `verify`.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"KDTR"
VERSION = 1
ALIGNMENT = 64

_HEADER = struct.Struct("<4sIII")
_MIN_ENTRY_BYTES = 2 + 1 + 2 + 20  # one-byte name, no dims
_DTYPES = {  # code: (name in the format, how NumPy stores it)
    1: ("f32", "<f4"),
    2: ("f16", "<f2"),
    3: ("bf16", "<u2"),
    4: ("f64", "<f8"),
    5: ("i8", "|i1"),
    6: ("u8", "|u1"),
    7: ("i16", "<i2"),
    8: ("u16", "<u2"),
    9: ("i32", "<i4"),
    10: ("u32", "<u4"),
    11: ("i64", "<i8"),
    12: ("u64", "<u8"),
    13: ("bool", "|b1"),
}
_BF16 = 3
_STORAGE = {name: np.dtype(storage) for name, storage in _DTYPES.values()}
_CODES = {  # kind and size of a NumPy dtype: code
    storage[1:]: code for code, (_, storage) in _DTYPES.items() if code != _BF16
}


class KdtrError(ValueError):
    """A KDTR file that is malformed, or tensors that the format cannot hold.

    Attributes
    ----------
    file : str
    tensor : str or None
        The tensor's name, ``#i`` for entry i if its name cannot be read, or None if
        the file as a whole is at fault.
    reason : str
    """

    def __init__(self, file: str | os.PathLike[str], tensor: str | None, reason: str):
        self.file, self.tensor, self.reason = os.fspath(file), tensor, reason
        super().__init__(self.file, tensor, reason)  # these args let it be pickled

    def __str__(self) -> str:
        where = "" if self.tensor is None else f"tensor {self.tensor!r}: "
        return f"{self.file}: {where}{self.reason}"


@dataclass(frozen=True)
class TensorInfo:
    """One entry of a file's table.

    `dtype` is the format's name for it ("f32", "bf16", ...); `offset` (from the file's
    start) and `nbytes` are in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc32: int


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray],
    *,
    bf16: Collection[str] = (),
) -> None:
    """Write tensors to a KDTR file, all or nothing.

    The bytes go to a temporary file beside `path` that takes its place only when it is
    complete and on disk; after a failure `path` is what it was before.

    Parameters
    ----------
    path : path-like
    tensors : mapping of str to ndarray
        Kept in this order. Strided and big-endian arrays are converted.
    bf16 : collection of str
        Names of the uint16 arrays that hold bfloat16 bits.

    Raises
    ------
    KdtrError
        For a name that is not 1 to 255 bytes of UTF-8, a dtype that the format lacks
        (object, complex, str, ...), or a `bf16` name that is not a uint16 tensor.
    OSError
        If the file cannot be written.
    """
    if unknown := sorted(set(bf16) - tensors.keys()):
        raise KdtrError(path, unknown[0], "bf16: no tensor of this name is given")
    encoded = []
    for name, tensor in tensors.items():
        try:
            array = np.asarray(tensor)
        except ValueError as error:  # rows of different length
            raise KdtrError(path, name, f"no array: {error}") from error
        code, array = _storable(path, name, array, name in bf16)
        encoded.append((_encoded_name(path, name), code, array))

    table_bytes = sum(
        _MIN_ENTRY_BYTES - 1 + len(text) + 8 * array.ndim for text, _, array in encoded
    )
    if table_bytes >= 2**32:
        raise KdtrError(path, None, f"a table of {table_bytes} bytes exceeds 32 bits")
    table, data = [], []
    end = _HEADER.size + table_bytes
    for text, code, array in encoded:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        table.append(
            struct.pack(
                f"<H{len(text)}sBB{array.ndim}QQQI",
                *(len(text), text, code, array.ndim, *array.shape),
                *(offset, array.nbytes, zlib.crc32(array.data)),
            )
        )
        data += [bytes(offset - end), array.data]
        end = offset + array.nbytes
    header = _HEADER.pack(MAGIC, VERSION, len(encoded), table_bytes)
    _write_atomically(Path(path), [header, *table, *data])


def load(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Map a KDTR file's tensors into memory: read-only, without a copy.

    Data is read when it is touched, and its checksums are not looked at (`verify`).

    Parameters
    ----------
    path : path-like

    Returns
    -------
    dict of str to ndarray
        In the file's order, little-endian; bf16 comes as its uint16 bits.

    Raises
    ------
    KdtrError
        If the file cannot be opened or is malformed, or a shape has more dimensions
        than NumPy can hold.
    """
    data = _map(path)
    tensors = {}
    for name, entry in _read_table(path, data).items():
        try:
            tensors[name] = np.ndarray(
                entry.shape, _STORAGE[entry.dtype], data, entry.offset
            )
        except ValueError as error:
            raise KdtrError(path, name, f"not a NumPy shape: {error}") from error
    return tensors


def info(path: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    """Read what a KDTR file's table says of each tensor, in the file's order.

    Raises
    ------
    KdtrError
        If the file cannot be opened or is malformed.
    """
    return _read_table(path, _map(path))


def verify(path: str | os.PathLike[str]) -> None:
    """Read a whole KDTR file and check its data: checksums, padding and bools.

    Raises
    ------
    KdtrError
        If the file cannot be opened or is malformed, a tensor's CRC-32 differs, a
        padding byte is not zero, or a bool is neither 0 nor 1.
    """
    data = _map(path)
    entries = _read_table(path, data)
    octets = np.frombuffer(data, np.uint8)
    end = _HEADER.size + _HEADER.unpack_from(data)[3]
    for name, entry in entries.items():
        if octets[end : entry.offset].any():
            raise KdtrError(path, name, "the padding before it is not zero")
        end = entry.offset + entry.nbytes
        content = octets[entry.offset : end]
        if (crc32 := zlib.crc32(content.data)) != entry.crc32:
            raise KdtrError(
                path, name, f"CRC-32 is {crc32:08x}, the table says {entry.crc32:08x}"
            )
        if entry.dtype == "bool" and content.max(initial=0) > 1:
            raise KdtrError(path, name, "a bool is neither 0 nor 1")


def _encoded_name(path: str | os.PathLike[str], name: str) -> bytes:
    """Return a tensor's name as UTF-8, or say why it cannot be one."""
    try:
        encoded = name.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise KdtrError(path, repr(name), "the name is not UTF-8 text") from error
    if not 1 <= len(encoded) <= 255:
        reason = f"a name has 1 to 255 UTF-8 bytes, this one {len(encoded)}"
        raise KdtrError(path, name, reason)
    return encoded


def _storable(
    path: str | os.PathLike[str], name: str, array: np.ndarray, is_bf16: bool
) -> tuple[int, np.ndarray]:
    """Return the dtype code and the array as the file holds it."""
    code = _CODES.get(array.dtype.str[1:])
    if code is None:
        known = ", ".join(np.dtype(kind).name for kind in _CODES)
        raise KdtrError(path, name, f"dtype {array.dtype} is not one of {known}")
    if is_bf16:
        if array.dtype.str[1:] != "u2":
            reason = f"bf16: expected the bits as uint16, got {array.dtype}"
            raise KdtrError(path, name, reason)
        code = _BF16
    # not ascontiguousarray, which turns 0-d into 1-d
    array = np.asarray(array, dtype=_DTYPES[code][1], order="C")
    if array.dtype == np.bool_:
        array = np.asarray(array.view(np.uint8) != 0)  # a view can hold other bytes
    return code, array


def _write_atomically(path: Path, chunks: list[Any]) -> None:
    """Write bytes-like chunks to `path`: all of them, or leave it untouched."""
    # tempfile would create it with mode 0600, whatever the umask
    temporary = path.with_name(f".kdtr-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _map(path: str | os.PathLike[str]) -> mmap.mmap:
    """Map a file that is at least as long as a header, read-only."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait
            raise KdtrError(path, None, "cannot be read: not a regular file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _HEADER.size:  # and an empty file cannot be mapped
                reason = f"truncated: {size} bytes, the header has {_HEADER.size}"
                raise KdtrError(path, None, reason)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise KdtrError(path, None, f"cannot be read: {error.strerror}") from error


def _read_table(path: str | os.PathLike[str], data: mmap.mmap) -> dict[str, TensorInfo]:
    """Check header and table against each other and the file's size."""
    magic, version, n_tensors, table_bytes = _HEADER.unpack_from(data)
    position, end = _HEADER.size, _HEADER.size + table_bytes
    if magic != MAGIC:
        raise KdtrError(path, None, f"magic is {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise KdtrError(path, None, f"version {version}, this reader knows {VERSION}")
    if end > len(data):
        reason = f"truncated: the table ends at byte {end} of {len(data)}"
        raise KdtrError(path, None, reason)
    if n_tensors * _MIN_ENTRY_BYTES > table_bytes:
        reason = f"table_bytes {table_bytes} cannot hold n_tensors {n_tensors}"
        raise KdtrError(path, None, reason)

    table = memoryview(data)[:end]
    entries: dict[str, TensorInfo] = {}
    for index in range(n_tensors):
        try:
            entry, position = _read_entry(path, f"#{index}", table, position)
        except struct.error as error:
            reason = f"its entry runs past table_bytes {table_bytes}"
            raise KdtrError(path, f"#{index}", reason) from error
        if entry.name in entries:
            raise KdtrError(path, entry.name, "duplicate name")
        _check_place(path, entry, end, len(data))
        end = entry.offset + entry.nbytes
        entries[entry.name] = entry
    if position != len(table):
        used = position - _HEADER.size
        reason = f"table_bytes {table_bytes}, but its entries fill {used}"
        raise KdtrError(path, None, reason)
    if end != len(data):
        reason = f"{len(data) - end} bytes follow the last tensor"
        raise KdtrError(path, None, reason)
    return entries


def _read_entry(
    path: str | os.PathLike[str], label: str, table: memoryview, position: int
) -> tuple[TensorInfo, int]:
    """Read the entry at `position`; return it and the next entry's position."""

    def take(layout: str) -> tuple[Any, ...]:
        nonlocal position
        values = struct.unpack_from("<" + layout, table, position)
        position += struct.calcsize("<" + layout)
        return values

    (name_bytes,) = take("H")
    if not 1 <= name_bytes <= 255:
        raise KdtrError(path, label, f"name_bytes is {name_bytes}, not 1 to 255")
    try:
        name = take(f"{name_bytes}s")[0].decode()
    except UnicodeDecodeError as error:
        raise KdtrError(path, label, f"the name is not UTF-8: {error}") from error
    code, ndim = take("BB")
    if code not in _DTYPES:
        raise KdtrError(path, name, f"unknown dtype code {code}")
    shape = take(f"{ndim}Q")
    entry = TensorInfo(name, _DTYPES[code][0], shape, *take("QQI"))
    itemsize = _STORAGE[entry.dtype].itemsize
    if math.prod(dim for dim in shape if dim) * itemsize >= 2**63:
        raise KdtrError(path, name, f"dims {shape} overflow a 64-bit byte count")
    if (expected := math.prod(shape) * itemsize) != entry.nbytes:
        reason = f"nbytes is {entry.nbytes}, {entry.dtype} {shape} has {expected}"
        raise KdtrError(path, name, reason)
    return entry, position


def _check_place(
    path: str | os.PathLike[str], entry: TensorInfo, previous_end: int, size: int
) -> None:
    """Check that a tensor's data is aligned, after what precedes it, in the file."""
    if entry.offset % ALIGNMENT:
        reason = f"misaligned: offset {entry.offset} is no multiple of {ALIGNMENT}"
        raise KdtrError(path, entry.name, reason)
    if entry.offset < previous_end:
        reason = f"offset {entry.offset} overlaps what ends at {previous_end}"
        raise KdtrError(path, entry.name, reason)
    if entry.offset + entry.nbytes > size:
        reason = f"truncated: ends at {entry.offset + entry.nbytes} of {size} bytes"
        raise KdtrError(path, entry.name, reason)
