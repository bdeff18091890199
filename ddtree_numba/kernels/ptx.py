"""PTX instructions that Numba has no name for, as functions that a kernel calls.

Tensor cores and asynchronous copies, each with what it means, which lane holds what,
and what it does in the emulator. All need compute capability 8.0 or later.

=========================  =========================================================
`cp_async_16`              copy 16 bytes from global to shared memory, later
`cp_async_16_zfill`        the same, with the end of the 16 bytes zero
`cp_async_commit_group`    close a group of such copies
`cp_async_wait_group`      wait until all but the newest n groups have arrived
`ldmatrix_x4`, `…_trans`   load four 8x8 matrices of 16-bit elements, by the warp
`mma_m16n8k16_bf16`        multiply 16x16 by 16x8 bfloat16 and add, by the warp
`cvt_rn_bf16x2`            round two float32 to bfloat16, packed in 32 bits
`ex2_approx`               2 to the power of x
=========================  =========================================================

Addresses
---------
Where PTX takes an address, these take ``(array, index)``: an array and the index of an
element in it, an integer or a tuple, as in ``array[index]``. Nothing in a kernel is
then a bare number that points somewhere, so the emulator can say which element of
which array is misaligned, out of bounds or not yet there; and the compiler folds the
address (into 32 bits where it is shared memory) as it does for ``array[index]``.
16 bytes are moved from that element on: they lie in one row of the array (its last
axis is contiguous), and start at a multiple of 16 bytes. A shared array has the
alignment of its element, so declare ``cuda.shared.array(shape, dtype, alignment=16)``.

Registers
---------
A fragment is what one lane holds of a matrix: a tuple of uint32, each with two 16-bit
elements, the one with the lower index in the lower half. Accumulators are four float32
in local memory, which the compiler keeps in registers as long as every index into them
is a constant once loops are unrolled.

In all tables below ``g = lane // 4`` and ``t = lane % 4``.

Source: NVIDIA, PTX ISA, sections "Matrix fragments for mma.m16n8k16",
"ldmatrix", "cp.async".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.errors import RequireLiteralValue, TypingError
from numba.cuda.extending import intrinsic

from ddtree_numba.bf16 import from_float32, to_float32
from ddtree_numba.emulator.intrinsics import Executing, emulation

__all__ = [
    "cp_async_16",
    "cp_async_16_zfill",
    "cp_async_commit_group",
    "cp_async_wait_group",
    "cvt_rn_bf16x2",
    "ex2_approx",
    "ldmatrix_x4",
    "ldmatrix_x4_trans",
    "mma_m16n8k16_bf16",
]

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FRAGMENT = types.UniTuple(types.uint32, 4)
_GLOBAL, _SHARED = 1, 3  # address spaces of LLVM's NVPTX target


# -- how an instruction is written into the kernel ------------------------------------


def _assembly(
    builder: Any,
    result: ir.Type,
    text: str,
    constraints: str,
    operands: list[Any],
    *,
    memory: bool,
    warp: bool = False,
) -> Any:
    """One PTX instruction; `$0 …` are its results, then its operands.

    `memory`: it reads or writes memory, so loads and stores stay on their side of it.
    `warp`: all lanes execute it together, so it may not move into a branch.
    """
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    if memory:
        constraints = f"{constraints},~{{memory}}".lstrip(",")
    asm = ir.InlineAsm(kind, text, constraints, side_effect=memory)
    return builder.call(asm, operands, attrs=("convergent",) if warp else ())


def _fields(builder: Any, struct: Any, count: int) -> list[Any]:
    return [builder.extract_value(struct, n) for n in range(count)]


def _check_index(array: Any, index: Any) -> None:
    """Typing: `index` must name an element of `array`."""
    parts = tuple(index) if isinstance(index, types.BaseTuple) else (index,)
    if not isinstance(array, types.Array):
        raise TypingError(f"expected an array, got {array}")
    if len(parts) != array.ndim or not all(isinstance(p, types.Integer) for p in parts):
        raise TypingError(f"expected the index of an element of {array}, got {index}")


def _address(
    context: Any, builder: Any, kinds: tuple[Any, Any], values: Any, space: int
) -> Any:
    """The address of ``array[index]`` in an address space: i32 shared, i64 global."""
    kind, index_kind = kinds
    array = context.make_array(kind)(context, builder, values[0])
    parts, part_kinds = [values[1]], [index_kind]
    if isinstance(index_kind, types.BaseTuple):
        parts, part_kinds = cgutils.unpack_tuple(builder, values[1]), list(index_kind)
    index = [
        context.cast(builder, part, part_kind, types.intp)
        for part, part_kind in zip(parts, part_kinds, strict=True)
    ]
    element = cgutils.get_item_pointer(context, builder, kind, array, index)
    pointer = builder.addrspacecast(element, ir.IntType(8).as_pointer(space))
    return builder.ptrtoint(pointer, _I32 if space == _SHARED else _I64)


# -- asynchronous copies --------------------------------------------------------------
#
#   cp_async_16(tile, i, x, k)   the lane asks for 16 bytes; the copy runs by itself
#   cp_async_commit_group()      what was asked for since the last commit is a group
#   cp_async_wait_group(1)       the groups but the newest have arrived, for this lane
#   cuda.syncthreads()           … and now for all lanes of the block
#
# Between the first and the third line tile[i] is neither the old data nor the new, and
# x[k] must stay as it is.


@intrinsic
def cp_async_16(typingctx, to, to_index, source, source_index):
    """``cp.async.cg.shared.global``: copy 16 bytes to shared memory, later.

    to, to_index
        A shared array and the element where the 16 bytes go.
    source, source_index
        A global array and the element where they come from.
    """
    _check_index(to, to_index)
    _check_index(source, source_index)
    signature = types.void(to, to_index, source, source_index)

    def codegen(context, builder, signature, args):
        kinds = signature.args
        shared = _address(context, builder, kinds[:2], args[:2], _SHARED)
        origin = _address(context, builder, kinds[2:], args[2:], _GLOBAL)
        text = "cp.async.cg.shared.global [$0], [$1], 16;"
        void = ir.VoidType()
        _assembly(builder, void, text, "r,l", [shared, origin], memory=True)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def cp_async_16_zfill(typingctx, to, to_index, source, source_index, n_bytes):
    """`cp_async_16` of `n_bytes` (0 … 16); the rest of the 16 bytes becomes zero.

    With ``n_bytes = 0`` nothing is read and `source_index` may lie outside the array:
    this is how a tile gets past the edge of a matrix.
    """
    _check_index(to, to_index)
    _check_index(source, source_index)
    if not isinstance(n_bytes, types.Integer):
        raise TypingError(f"n_bytes: expected an integer, got {n_bytes}")
    signature = types.void(to, to_index, source, source_index, n_bytes)

    def codegen(context, builder, signature, args):
        kinds = signature.args
        shared = _address(context, builder, kinds[:2], args[:2], _SHARED)
        origin = _address(context, builder, kinds[2:4], args[2:4], _GLOBAL)
        size = context.cast(builder, args[4], kinds[4], types.uint32)
        text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
        operands = [shared, origin, size]
        _assembly(builder, ir.VoidType(), text, "r,l,r", operands, memory=True)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def cp_async_commit_group(typingctx):
    """``cp.async.commit_group``: this lane's copies since the last commit are a group.

    A group may be empty. That keeps `cp_async_wait_group` counting at the end of a
    loop, where nothing more is fetched.
    """

    def codegen(context, builder, signature, args):
        text = "cp.async.commit_group;"
        _assembly(builder, ir.VoidType(), text, "", [], memory=True)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def cp_async_wait_group(typingctx, n):
    """``cp.async.wait_group n``: wait for all groups but the newest `n` (a constant).

    What has arrived is there for this lane only: a barrier must follow before another
    lane reads it.
    """
    if not isinstance(n, types.IntegerLiteral) or n.literal_value < 0:
        raise RequireLiteralValue(f"n: expected a constant >= 0, got {n}")

    def codegen(context, builder, signature, args):
        text = f"cp.async.wait_group {n.literal_value};"
        _assembly(builder, ir.VoidType(), text, "", [], memory=True)
        return context.get_dummy_value()

    return types.void(n), codegen


@emulation(cp_async_16)
def _(lane: Executing, to: Any, to_index: Any, source: Any, source_index: Any) -> None:
    lane.copy_later("cp.async", to, to_index, source, source_index)


@emulation(cp_async_16_zfill)
def _(
    lane: Executing,
    to: Any,
    to_index: Any,
    source: Any,
    source_index: Any,
    n_bytes: Any,
) -> None:
    lane.copy_later("cp.async", to, to_index, source, source_index, n_bytes)


@emulation(cp_async_commit_group)
def _(lane: Executing) -> None:
    lane.commit_copies()


@emulation(cp_async_wait_group)
def _(lane: Executing, n: int) -> None:
    lane.wait_for_copies(n)


# -- ldmatrix -------------------------------------------------------------------------


@intrinsic
def ldmatrix_x4(typingctx, array, index):
    """``ldmatrix.sync.aligned.m8n8.x4.shared.b16``: four 8x8 matrices of 16 bits.

    array, index
        A shared array and the first of 8 elements. Every lane names one row: lane l
        names row ``l % 8`` of matrix ``l // 8``.

    Returns four uint32; of matrix m, lane (g, t) gets two neighbours in a row::

        result[m] = (row g, columns 2t and 2t + 1)

    All 32 lanes of the warp must come. To load the fragment of a 16x16 tile that
    `mma_m16n8k16_bf16` takes as `a`, lane l names row ``l % 16`` of the tile, from
    column ``8 * (l // 16)`` on.
    """
    return _ldmatrix("ldmatrix.sync.aligned.m8n8.x4.shared.b16", array, index)


@intrinsic
def ldmatrix_x4_trans(typingctx, array, index):
    """`ldmatrix_x4`, every matrix transposed: lane (g, t) gets neighbours in a column::

        result[m] = (rows 2t and 2t + 1, column g)

    From a tile that stores k along its rows' index, as ``tile[k, n]``, it gives the
    fragments that `mma_m16n8k16_bf16` takes as `b`: when lane l names row ``l % 16``
    from column ``8 * (l // 16)`` on, ``result[:2]`` is `b` of the tile's left 8 columns
    and ``result[2:]`` of the right 8.
    """
    return _ldmatrix("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", array, index)


def _ldmatrix(name: str, array: Any, index: Any) -> tuple[Any, Any]:
    _check_index(array, index)

    def codegen(context, builder, signature, args):
        row = _address(context, builder, signature.args, args, _SHARED)
        text = f"{name} {{$0, $1, $2, $3}}, [$4];"
        four = ir.LiteralStructType([_I32] * 4)
        loaded = _assembly(
            builder, four, text, "=r,=r,=r,=r,r", [row], memory=True, warp=True
        )
        return cgutils.pack_array(builder, _fields(builder, loaded, 4))

    return _FRAGMENT(array, index), codegen


@emulation(ldmatrix_x4)
def _(lane: Executing, array: Any, index: Any) -> tuple[int, ...]:
    row = lane.read("ldmatrix", array, index, 16)
    return lane.together("ldmatrix", row, _neighbours_in_rows)


@emulation(ldmatrix_x4_trans)
def _(lane: Executing, array: Any, index: Any) -> tuple[int, ...]:
    row = lane.read("ldmatrix.trans", array, index, 16)
    return lane.together("ldmatrix.trans", row, _neighbours_in_columns)


def _neighbours_in_rows(rows: list[np.ndarray]) -> list[tuple[int, ...]]:
    matrices = np.stack(rows).view(np.uint16).reshape(4, 8, 8)
    return _fragments(matrices)


def _neighbours_in_columns(rows: list[np.ndarray]) -> list[tuple[int, ...]]:
    matrices = np.stack(rows).view(np.uint16).reshape(4, 8, 8)
    return _fragments(matrices.swapaxes(1, 2))


def _fragments(matrices: np.ndarray) -> list[tuple[int, ...]]:
    """Every lane's registers: [matrix, g, 2t and 2t + 1] -> [lane][matrix]."""
    registers = np.ascontiguousarray(matrices).view(np.uint32)  # [matrix, g, t]
    by_lane = registers.transpose(1, 2, 0).reshape(32, 4).tolist()
    return [tuple(registers) for registers in by_lane]


# -- mma ------------------------------------------------------------------------------


@intrinsic
def mma_m16n8k16_bf16(typingctx, acc, a, b):
    """``mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32``: acc += a @ b.

    acc : the 4 float32 of this lane in the 16x8 sums, a row of a local array; changed
    a : the 4 uint32 of this lane in a 16x16 matrix of bfloat16
    b : the 2 uint32 of this lane in a 16x8 matrix of bfloat16

    Which elements these are, with ``g = lane // 4`` and ``t = lane % 4``::

        a            columns 2t, 2t+1   8+2t, 9+2t     b              column g
        row g        a[0]               a[2]           rows 2t, 2t+1  b[0]
        row g + 8    a[1]               a[3]           8+2t, 9+2t     b[1]

        acc          column 2t   column 2t + 1
        row g        acc[0]      acc[1]
        row g + 8    acc[2]      acc[3]

    The products are exact and the sum is float32; in which order it adds and how it
    rounds on the way is not specified, so the emulator (which adds in float64 and
    rounds once) may differ from a GPU in the last bits. All 32 lanes must come.
    """
    if not (isinstance(acc, types.Array) and acc.ndim == 1 and acc.layout == "C"):
        raise TypingError(f"acc: expected 4 contiguous float32, got {acc}")
    if acc.dtype != types.float32:
        raise TypingError(f"acc: expected float32, got {acc.dtype}")
    for name, given, count in (("a", a, 4), ("b", b, 2)):
        if given != types.UniTuple(types.uint32, count):
            raise TypingError(f"{name}: expected {count} uint32, got {given}")

    def codegen(context, builder, signature, args):
        sums = context.make_array(signature.args[0])(context, builder, args[0])
        slots = [builder.gep(sums.data, [_I32(n)]) for n in range(4)]
        operands = cgutils.unpack_tuple(builder, args[1])
        operands += cgutils.unpack_tuple(builder, args[2])
        operands += [builder.load(slot) for slot in slots]
        text = (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, "
            "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
        four = ir.LiteralStructType([_F32] * 4)
        new = _assembly(
            builder, four, text, constraints, operands, memory=False, warp=True
        )
        for value, slot in zip(_fields(builder, new, 4), slots, strict=True):
            builder.store(value, slot)
        return context.get_dummy_value()

    return types.void(acc, a, b), codegen


@emulation(mma_m16n8k16_bf16)
def _(lane: Executing, acc: Any, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    a0, a1, a2, a3 = a
    b0, b1 = b
    given = ((a0, a1, a2, a3), (b0, b1), (acc[0], acc[1], acc[2], acc[3]))
    for n, value in enumerate(lane.together("mma.sync", given, _multiply_add)):
        acc[n] = value


def _multiply_add(lanes: list[tuple[tuple, tuple, tuple]]) -> list[np.ndarray]:
    """The new sums of every lane, float32 [32][4]."""
    in_a, in_b, in_acc = zip(*lanes, strict=True)
    # Axes of the registers: g, t, then which half of the matrix's rows and columns
    # they belong to, then the two elements of one register.
    a = _bf16_pairs(in_a).reshape(8, 4, 2, 2, 2)  # g, t, column half, row half, e
    b = _bf16_pairs(in_b).reshape(8, 4, 2, 2)  # g, t, row half, e
    acc = np.array(in_acc, np.float64).reshape(8, 4, 2, 2)  # g, t, row half, e
    matrix_a = a.transpose(3, 0, 2, 1, 4).reshape(16, 16)
    matrix_b = b.transpose(2, 1, 3, 0).reshape(16, 8)
    sums = acc.transpose(2, 0, 1, 3).reshape(16, 8) + matrix_a @ matrix_b
    new = sums.astype(np.float32).reshape(2, 8, 4, 2)  # row half, g, t, e
    return list(new.transpose(1, 2, 0, 3).reshape(32, 4))


def _bf16_pairs(registers: Any) -> np.ndarray:
    """Two bfloat16 a register, lower half first, as float64."""
    bits = np.array(registers, np.uint32).view(np.uint16)
    return to_float32(bits).astype(np.float64)


# -- one lane's arithmetic ------------------------------------------------------------


@intrinsic
def cvt_rn_bf16x2(typingctx, low, high):
    """``cvt.rn.bf16x2.f32``: two float32 as bfloat16 in one uint32, rounded to nearest.

    Ties go to even; a NaN becomes 0x7FFF. (PTX names the upper half first.)
    """

    def codegen(context, builder, signature, args):
        low, high = args
        text = "cvt.rn.bf16x2.f32 $0, $1, $2;"
        return _assembly(builder, _I32, text, "=r,f,f", [high, low], memory=False)

    return types.uint32(types.float32, types.float32), codegen


@intrinsic
def ex2_approx(typingctx, x):
    """``ex2.approx.ftz.f32``: 2 to the power of x, relative error about 2**-22.

    Subnormal operands and results count as zero.
    """

    def codegen(context, builder, signature, args):
        text = "ex2.approx.ftz.f32 $0, $1;"
        return _assembly(builder, _F32, text, "=f,f", list(args), memory=False)

    return types.float32(types.float32), codegen


@emulation(cvt_rn_bf16x2)
def _(lane: Executing, low: Any, high: Any) -> int:
    pair = np.array([low, high], np.float32)
    bits = np.where(np.isnan(pair), 0x7FFF, from_float32(pair)).astype(np.uint32)
    return int(bits[0] | bits[1] << 16)


@emulation(ex2_approx)
def _(lane: Executing, x: Any) -> np.float32:
    smallest = np.finfo(np.float32).smallest_normal
    y = np.float32(np.exp2(np.float64(x)))
    return y if y >= smallest or y != y else np.float32(0)
