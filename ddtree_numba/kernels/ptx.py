"""PTX instructions that Numba has no name for, as functions that a kernel calls.

Tensor cores and asynchronous copies, each with what it means, which lane holds what,
and what it does in the emulator.

===========================  =======================================================
Compute capability 8.0 or later
------------------------------------------------------------------------------------
`cp_async_16`                copy 16 bytes from global to shared memory, later
`cp_async_16_zfill`          the same, with the end of the 16 bytes zero
`cp_async_commit_group`      close a group of such copies
`cp_async_wait_group`        wait until all but the newest n groups have arrived
`ldmatrix_x4`, `…_trans`     load four 8x8 matrices of 16-bit elements, by the warp
`mma_m16n8k16_bf16`          multiply 16x16 by 16x8 bfloat16 and add, by the warp
`cvt_rn_bf16x2`              round two float32 to bfloat16, packed in 32 bits
`cvt_rn_f16x2`               … to float16
`cvt_f32_f16x2`              two float16 as float32
`max_bf16x2`, `min_bf16x2`   the larger, the smaller of two bfloat16 each
`ex2_approx`                 2 to the power of x
`bar_sync`, `bar_arrive`     come to a named barrier and wait, or only come
`bar_red_or`                 … and wait, and learn whether anyone brought a nonzero
`st_global_v2_f32`           store two neighbouring float32
`st_shared_v2_f32`           … in shared memory
`fence_acq_rel_gpu`          order: accesses before and after, as other blocks see them
`has_reached`                look whether a counter is there that other blocks add to
`div_u32`                    divide two counts
`uncounted`                  an integer that the compiler takes to be any
Compute capability 9.0
------------------------------------------------------------------------------------
`mbarrier_init`              make a barrier that counts arrivals and bytes of copies
`mbarrier_arrive`            arrive at it
`mbarrier_arrive_expect_tx`  arrive, and announce bytes that copies will bring
`mbarrier_wait`              wait until a phase of it is complete
`cp_async_bulk`              copy a run of bytes to shared memory, later
`cp_async_bulk_tensor_3d`    copy a box of a tensor to shared memory, later
`stmatrix_x4`                store four 8x8 matrices of 16-bit elements, by the warp
`fence_mbarrier_init`        order: new mbarriers, before copies
`fence_proxy_async`          order: plain stores, before tensor cores and copies
`fence_proxy_async_global`   … in global memory
`fence_proxy_tensormap`      order: a tensor map, before copies by it
Target sm_90a alone
------------------------------------------------------------------------------------
`setmaxnreg_inc`, `…_dec`    move registers from one warpgroup to another
`wgmma_descriptor`           name a matrix in shared memory
`wgmma_m64n64k16_bf16`       multiply 64x16 by 16x64 and add, by the warpgroup, later
`wgmma_m64n256k16_bf16`      … 16x256, all from shared memory
`…_from_registers`           … with the 64x16 matrix from registers
`wgmma_4_…_from_registers`   … four times, along k
`wgmma_fence`                order: registers, before products
`wgmma_commit_group`         close a group of products
`wgmma_wait_group`           wait until all but the newest n groups are done
===========================  =======================================================

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
"ldmatrix", "cp.async", "mbarrier", "Asynchronous warpgroup level matrix instructions",
"Tensor data movement".
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
from ddtree_numba.emulator import hopper
from ddtree_numba.emulator.intrinsics import Executing, emulation

__all__ = [
    "bar_arrive",
    "bar_red_or",
    "bar_sync",
    "cp_async_16",
    "cp_async_16_zfill",
    "cp_async_bulk",
    "cp_async_bulk_tensor_3d",
    "cp_async_commit_group",
    "cp_async_wait_group",
    "cvt_f32_f16x2",
    "cvt_rn_bf16x2",
    "cvt_rn_f16x2",
    "div_u32",
    "ex2_approx",
    "fence_acq_rel_gpu",
    "fence_mbarrier_init",
    "fence_proxy_async",
    "fence_proxy_async_global",
    "fence_proxy_tensormap",
    "has_reached",
    "ldmatrix_x4",
    "ldmatrix_x4_trans",
    "max_bf16x2",
    "mbarrier_arrive",
    "mbarrier_arrive_expect_tx",
    "mbarrier_init",
    "mbarrier_wait",
    "min_bf16x2",
    "mma_m16n8k16_bf16",
    "setmaxnreg_dec",
    "setmaxnreg_inc",
    "st_global_v2_f32",
    "st_shared_v2_f32",
    "stmatrix_x4",
    "uncounted",
    "wgmma_4_m64n256k16_bf16_from_registers",
    "wgmma_commit_group",
    "wgmma_descriptor",
    "wgmma_fence",
    "wgmma_m64n256k16_bf16",
    "wgmma_m64n256k16_bf16_from_registers",
    "wgmma_m64n64k16_bf16",
    "wgmma_wait_group",
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
    return _rounded_pair("bf16x2")


@intrinsic
def cvt_rn_f16x2(typingctx, low, high):
    """``cvt.rn.f16x2.f32``: as `cvt_rn_bf16x2`, to float16; 65520 and more is inf."""
    return _rounded_pair("f16x2")


def _rounded_pair(kind: str) -> Any:
    """An instruction that rounds two float32 and packs them."""

    def codegen(context, builder, signature, args):
        low, high = args
        text = f"cvt.rn.{kind}.f32 $0, $1, $2;"
        return _assembly(builder, _I32, text, "=r,f,f", [high, low], memory=False)

    return types.uint32(types.float32, types.float32), codegen


@intrinsic
def cvt_f32_f16x2(typingctx, pair):
    """``cvt.f32.f16``: the two float16 of a uint32 as float32, (lower, upper)."""

    def codegen(context, builder, signature, args):
        text = (
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
            "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
        )
        both = ir.LiteralStructType([_F32] * 2)
        pair = _assembly(builder, both, text, "=f,=f,r", list(args), memory=False)
        return cgutils.pack_array(builder, _fields(builder, pair, 2))

    return types.UniTuple(types.float32, 2)(types.uint32), codegen


def _of_pairs(name: str) -> Any:
    """An instruction of two pairs of bfloat16, each in a uint32."""

    def codegen(context, builder, signature, args):
        text = f"{name}.bf16x2 $0, $1, $2;"
        return _assembly(builder, _I32, text, "=r,r,r", list(args), memory=False)

    return types.uint32(types.uint32, types.uint32), codegen


@intrinsic
def max_bf16x2(typingctx, x, y):
    """``max.bf16x2``: the larger of two bfloat16 each; the other one if one is NaN."""
    return _of_pairs("max")


@intrinsic
def min_bf16x2(typingctx, x, y):
    """``min.bf16x2``: the smaller of two bfloat16 each; the other one if one is NaN."""
    return _of_pairs("min")


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


@emulation(cvt_rn_f16x2)
def _(lane: Executing, low: Any, high: Any) -> int:
    with np.errstate(over="ignore"):
        pair = np.array([low, high], np.float32).astype(np.float16)
    bits = np.where(np.isnan(pair), 0x7FFF, pair.view(np.uint16)).astype(np.uint32)
    return int(bits[0] | bits[1] << 16)


@emulation(cvt_f32_f16x2)
def _(lane: Executing, pair: Any) -> tuple[np.float32, np.float32]:
    low, high = np.array([pair], np.uint32).view(np.float16).astype(np.float32)
    return low, high


def _half_by_half(function: np.ufunc, x: Any, y: Any) -> int:
    """A function of float32 on each two bfloat16 of two uint32."""
    pairs = np.array([[pair & 0xFFFF, pair >> 16] for pair in (x, y)], np.uint16)
    low, high = from_float32(function(*to_float32(pairs)))
    return int(low) | int(high) << 16


emulation(max_bf16x2)(lambda lane, x, y: _half_by_half(np.fmax, x, y))
emulation(min_bf16x2)(lambda lane, x, y: _half_by_half(np.fmin, x, y))


@emulation(ex2_approx)
def _(lane: Executing, x: Any) -> np.float32:
    smallest = np.finfo(np.float32).smallest_normal
    y = np.float32(np.exp2(np.float64(x)))
    return y if y >= smallest or y != y else np.float32(0)


# -- how Hopper's instructions are written into the kernel ----------------------------


def _check_integer(name: str, kind: Any) -> None:
    if not isinstance(kind, types.Integer):
        raise TypingError(f"{name}: expected an integer, got {kind}")


def _check_registers(name: str, kind: Any, dtype: Any) -> None:
    """Typing: a local array that the compiler keeps in registers."""
    if not (isinstance(kind, types.Array) and (kind.ndim, kind.layout) == (1, "C")):
        raise TypingError(f"{name}: expected a contiguous local array, got {kind}")
    if kind.dtype != dtype:
        raise TypingError(f"{name}: expected {dtype} elements, got {kind.dtype}")


def _registers(context: Any, builder: Any, kind: Any, value: Any, count: int) -> list:
    """Where the first `count` elements of a local array are."""
    data = context.make_array(kind)(context, builder, value).data
    return [builder.gep(data, [_I32(n)]) for n in range(count)]


def _instruction(text: str, operands: str = "", *, warp: bool = True) -> Any:
    """The codegen of an instruction that takes integers and returns nothing.

    `operands`: n for each, a constant, which it must be by the time the compiler has
    put device functions into their callers.
    """

    def codegen(context, builder, signature, args):
        given = [
            context.cast(builder, value, kind, types.uint32)
            for value, kind in zip(args, signature.args, strict=True)
        ]
        constraints = ",".join(operands)
        void = ir.VoidType()
        _assembly(builder, void, text, constraints, given, memory=True, warp=warp)
        return context.get_dummy_value()

    return codegen


def _tied(
    context: Any,
    builder: Any,
    text: Any,
    sums: tuple[Any, Any, int],
    operands: list[Any],
    constraints: str = "",
) -> None:
    """Instructions that change a local float32 array, which stays in registers.

    sums : the array's type, its value, and how many elements it has
    text : what the names of its registers and of the operands make into PTX

    Every register is a result and an operand that is tied to it, so that nothing that
    uses the array moves from one side of the instructions to the other.
    """
    kind, value, count = sums
    slots = _registers(context, builder, kind, value, count)
    names = [f"${n}" for n in range(count)]
    more = [f"${n}" for n in range(2 * count, 2 * count + len(operands))]
    letters = ["=f"] * count + [str(n) for n in range(count)]
    letters += [constraints] if constraints else []
    new = _assembly(
        builder,
        ir.LiteralStructType([_F32] * count),
        text("{" + ", ".join(names) + "}", more),
        ",".join(letters),
        [builder.load(slot) for slot in slots] + operands,
        memory=True,
        warp=True,
    )
    for place, slot in zip(_fields(builder, new, count), slots, strict=True):
        builder.store(place, slot)


# -- mbarrier (sm_90) -----------------------------------------------------------------
#
# An mbarrier is a uint64 in shared memory that counts. A phase of it is complete when
# `count` arrivals have come and the bytes of all copies that were announced have
# arrived; then the next phase begins by itself. Who waits names a phase by its parity:
# 0 for the first, third, … and 1 for the second, fourth, …
#
#   mbarrier_init(bars, 0, 1)                     one thread, once
#   mbarrier_arrive_expect_tx(bars, 0, 8192)      the thread that asks for the copies
#   cp_async_bulk_tensor_3d(…, bars, 0)
#   mbarrier_wait(bars, 0, 0)                     everyone who reads what they bring
#
# A wait for parity 1 of a new mbarrier returns at once: the phase "before the first"
# counts as complete.


@intrinsic
def mbarrier_init(typingctx, barriers, index, count):
    """``mbarrier.init``: ``barriers[index]`` waits for `count` arrivals a phase.

    One thread does it; `fence_mbarrier_init` and a barrier of the block must follow
    before anyone uses it. barriers : a shared array of uint64.
    """
    _check_index(barriers, index)
    _check_integer("count", count)

    def codegen(context, builder, signature, args):
        kinds = signature.args
        at = _address(context, builder, kinds[:2], args[:2], _SHARED)
        count = context.cast(builder, args[2], kinds[2], types.uint32)
        text = "mbarrier.init.shared::cta.b64 [$0], $1;"
        _assembly(builder, ir.VoidType(), text, "r,r", [at, count], memory=True)
        return context.get_dummy_value()

    return types.void(barriers, index, count), codegen


@intrinsic
def fence_mbarrier_init(typingctx):
    """``fence.mbarrier_init``: the copy engine sees the mbarriers that were made."""
    text = "fence.mbarrier_init.release.cluster;"
    return types.void(), _instruction(text, warp=False)


@intrinsic
def mbarrier_arrive(typingctx, barriers, index):
    """``mbarrier.arrive``: one arrival at ``barriers[index]``.

    What this thread read and wrote before is done for whoever waits for the phase.
    """
    _check_index(barriers, index)

    def codegen(context, builder, signature, args):
        at = _address(context, builder, signature.args, args, _SHARED)
        text = "mbarrier.arrive.shared::cta.b64 _, [$0];"
        _assembly(builder, ir.VoidType(), text, "r", [at], memory=True)
        return context.get_dummy_value()

    return types.void(barriers, index), codegen


@intrinsic
def mbarrier_arrive_expect_tx(typingctx, barriers, index, n_bytes):
    """``mbarrier.arrive.expect_tx``: one arrival, and `n_bytes` bytes are to come.

    The phase is complete only once copies have brought these bytes too.
    """
    _check_index(barriers, index)
    _check_integer("n_bytes", n_bytes)

    def codegen(context, builder, signature, args):
        kinds = signature.args
        at = _address(context, builder, kinds[:2], args[:2], _SHARED)
        size = context.cast(builder, args[2], kinds[2], types.uint32)
        text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
        _assembly(builder, ir.VoidType(), text, "r,r", [at, size], memory=True)
        return context.get_dummy_value()

    return types.void(barriers, index, n_bytes), codegen


@intrinsic
def mbarrier_wait(typingctx, barriers, index, parity):
    """``mbarrier.try_wait.parity`` until it says yes: the phase of `parity` is over.

    What arrived in that phase (copies, and what others did before they arrived) is
    then there for this thread. The one instruction here that is a loop: a try gives up
    after a time that the hardware chooses.
    """
    _check_index(barriers, index)
    _check_integer("parity", parity)

    def codegen(context, builder, signature, args):
        kinds = signature.args
        at = _address(context, builder, kinds[:2], args[:2], _SHARED)
        parity = context.cast(builder, args[2], kinds[2], types.uint32)
        text = (
            "{\n.reg .pred done;\nagain:\n"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n"
            "@!done bra again;\n}"
        )
        _assembly(builder, ir.VoidType(), text, "r,r", [at, parity], memory=True)
        return context.get_dummy_value()

    return types.void(barriers, index, parity), codegen


# -- named barriers (sm_80), registers of a warpgroup, order of memory (sm_90) --------


@intrinsic
def bar_sync(typingctx, barrier, n_threads):
    """``bar.sync``: wait at a named barrier until `n_threads` threads have come.

    barrier : 0 … 15, a constant; 0 is that of `cuda.syncthreads`
    n_threads : a constant, a multiple of 32; those of `bar_arrive` count too

    Orders memory among the threads that wait, and what arriving threads did before.
    Whole warps come together.
    """
    _check_integer("barrier", barrier)
    _check_integer("n_threads", n_threads)
    return types.void(barrier, n_threads), _instruction("bar.sync $0, $1;", "nn")


@intrinsic
def bar_arrive(typingctx, barrier, n_threads):
    """``bar.arrive``: count as one who came to a named barrier, without waiting.

    barrier, n_threads : as for `bar_sync`
    """
    _check_integer("barrier", barrier)
    _check_integer("n_threads", n_threads)
    return types.void(barrier, n_threads), _instruction("bar.arrive $0, $1;", "nn")


@intrinsic
def bar_red_or(typingctx, barrier, n_threads, predicate):
    """``bar.red.or``: `bar_sync`, and whether any of the threads brought a nonzero.

    predicate : an integer; returns uint32 1 or 0, the same for all
    """
    for name, kind in (("barrier", barrier), ("n_threads", n_threads)):
        _check_integer(name, kind)
    _check_integer("predicate", predicate)

    def codegen(context, builder, signature, args):
        given = [
            context.cast(builder, value, kind, types.uint32)
            for value, kind in zip(args, signature.args, strict=True)
        ]
        text = (
            "{\n.reg .pred mine, any;\nsetp.ne.u32 mine, $3, 0;\n"
            "bar.red.or.pred any, $1, $2, mine;\nselp.u32 $0, 1, 0, any;\n}"
        )
        return _assembly(builder, _I32, text, "=r,n,n,r", given, memory=True, warp=True)

    return types.uint32(barrier, n_threads, predicate), codegen


@intrinsic
def setmaxnreg_inc(typingctx, n):
    """``setmaxnreg.inc``: this warpgroup has `n` registers a thread from here on.

    Waits until others have given enough back. n : a constant, a multiple of 8 from 24
    to 256. All 128 threads of the warpgroup come.
    """
    _check_integer("n", n)
    text = "setmaxnreg.inc.sync.aligned.u32 $0;"
    return types.void(n), _instruction(text, "n")


@intrinsic
def setmaxnreg_dec(typingctx, n):
    """``setmaxnreg.dec``: this warpgroup gives all but `n` registers a thread back."""
    _check_integer("n", n)
    text = "setmaxnreg.dec.sync.aligned.u32 $0;"
    return types.void(n), _instruction(text, "n")


@intrinsic
def fence_proxy_async(typingctx):
    """``fence.proxy.async.shared::cta``: plain stores before, tensor cores after.

    `wgmma` and bulk copies reach shared memory by another way ("proxy") than loads and
    stores do. Each thread that stored needs this fence, then a barrier, before a
    `wgmma` or copy of anyone uses the place.
    """
    text = "fence.proxy.async.shared::cta;"
    return types.void(), _instruction(text, warp=False)


@intrinsic
def fence_proxy_async_global(typingctx):
    """``fence.proxy.async.global``: as `fence_proxy_async`, of global memory.

    Who copies in bulk what other blocks stored needs it between waiting for them
    (`has_reached`) and the copy.
    """
    return types.void(), _instruction("fence.proxy.async.global;", warp=False)


# -- copies in bulk (sm_90) -----------------------------------------------------------


@intrinsic
def cp_async_bulk(
    typingctx, to, to_index, source, source_index, n_bytes, barriers, barrier_index
):
    """``cp.async.bulk``: copy neighbouring bytes to shared memory, later.

    to, to_index
        A shared array and the element where they go.
    source, source_index
        A global array and the element where they come from.
    n_bytes
        A multiple of 16 above 0; so are both addresses.
    barriers, barrier_index
        The mbarrier that counts the bytes when they arrive.

    One thread asks for all of them.
    """
    _check_index(to, to_index)
    _check_index(source, source_index)
    _check_integer("n_bytes", n_bytes)
    _check_index(barriers, barrier_index)
    signature = types.void(
        to, to_index, source, source_index, n_bytes, barriers, barrier_index
    )

    def codegen(context, builder, signature, args):
        kinds = signature.args
        target = _address(context, builder, kinds[:2], args[:2], _SHARED)
        origin = _address(context, builder, kinds[2:4], args[2:4], _GLOBAL)
        size = context.cast(builder, args[4], kinds[4], types.uint32)
        barrier = _address(context, builder, kinds[5:], args[5:], _SHARED)
        text = (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[$0], [$1], $2, [$3];"
        )
        operands = [target, origin, size, barrier]
        void = ir.VoidType()
        # `warp`: so that the compiler makes no copies of it.
        _assembly(builder, void, text, "r,l,r,r", operands, memory=True, warp=True)
        return context.get_dummy_value()

    return signature, codegen


# -- copies by tensor map (sm_90) -----------------------------------------------------
#
# A tensor map is 128 bytes that the host makes (`cuTensorMapEncodeTiled`): where a
# tensor lies, its shape and strides, the box that one copy takes, and the swizzle. With
# the 128-byte swizzle a box's row is 64 elements of 16 bits, and 16-byte chunk c of row
# r lands at chunk ``c ^ (r & 7)`` of that row; the box starts at a multiple of 1024
# bytes. What lies outside the tensor arrives as zeros.


@intrinsic
def fence_proxy_tensormap(typingctx, maps, index):
    """``fence.proxy.tensormap``: the map at ``maps[index]`` may be used from here on.

    For a map that the host wrote into global memory; once a thread that copies by it.
    """
    _check_index(maps, index)

    def codegen(context, builder, signature, args):
        at = _address(context, builder, signature.args, args, _GLOBAL)
        text = "fence.proxy.tensormap::generic.acquire.sys [$0], 128;"
        _assembly(builder, ir.VoidType(), text, "l", [at], memory=True)
        return context.get_dummy_value()

    return types.void(maps, index), codegen


@intrinsic
def cp_async_bulk_tensor_3d(
    typingctx, to, to_index, maps, map_index, x, y, z, barriers, barrier_index
):
    """``cp.async.bulk.tensor.3d``: copy a box of a tensor to shared memory, later.

    to, to_index
        A shared array and the element where the box goes.
    maps, map_index
        A global array of uint64 and the first of the 16 of the tensor map.
    x, y, z
        The box's first element: of the innermost axis first (column, row, request).
    barriers, barrier_index
        The mbarrier that counts the box's bytes when they arrive.

    One thread asks for the whole box.
    """
    _check_index(to, to_index)
    _check_index(maps, map_index)
    _check_index(barriers, barrier_index)
    for name, kind in (("x", x), ("y", y), ("z", z)):
        _check_integer(name, kind)
    signature = types.void(
        to, to_index, maps, map_index, x, y, z, barriers, barrier_index
    )

    def codegen(context, builder, signature, args):
        kinds = signature.args
        target = _address(context, builder, kinds[:2], args[:2], _SHARED)
        tensor = _address(context, builder, kinds[2:4], args[2:4], _GLOBAL)
        barrier = _address(context, builder, kinds[7:], args[7:], _SHARED)
        corner = [
            context.cast(builder, value, kind, types.int32)
            for value, kind in zip(args[4:7], kinds[4:7], strict=True)
        ]
        text = (
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile"
            ".mbarrier::complete_tx::bytes [$0], [$1, {$2, $3, $4}], [$5];"
        )
        operands = [target, tensor, *corner, barrier]
        void = ir.VoidType()
        _assembly(builder, void, text, "r,l,r,r,r,r", operands, memory=True)
        return context.get_dummy_value()

    return signature, codegen


# -- stmatrix and wide stores (sm_90; sm_80) ------------------------------------------


@intrinsic
def stmatrix_x4(typingctx, array, index, r0, r1, r2, r3):
    """``stmatrix.sync.aligned.m8n8.x4.shared.b16``: `ldmatrix_x4` backwards.

    array, index
        A shared array and the first of 8 elements: lane l names row ``l % 8`` of matrix
        ``l // 8``.
    r0, r1, r2, r3
        uint32 of matrix 0 … 3: lane (g, t) gives row g, columns 2t and 2t + 1.

    All 32 lanes of the warp must come.
    """
    _check_index(array, index)
    signature = types.void(array, index, *(types.uint32,) * 4)

    def codegen(context, builder, signature, args):
        row = _address(context, builder, signature.args[:2], args[:2], _SHARED)
        text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
        operands = [row, *args[2:]]
        void = ir.VoidType()
        _assembly(builder, void, text, "r,r,r,r,r", operands, memory=True, warp=True)
        return context.get_dummy_value()

    return signature, codegen


def _store_pair(array: Any, index: Any, space: str, number: int, letter: str) -> Any:
    """A store of two float32; letter : the register of an address in that space."""
    _check_index(array, index)
    signature = types.void(array, index, types.float32, types.float32)

    def codegen(context, builder, signature, args):
        at = _address(context, builder, signature.args[:2], args[:2], number)
        text = f"st.{space}.v2.f32 [$0], {{$1, $2}};"
        operands, kinds = [at, *args[2:]], f"{letter},f,f"
        _assembly(builder, ir.VoidType(), text, kinds, operands, memory=True)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def st_global_v2_f32(typingctx, array, index, first, second):
    """``st.global.v2.f32``: two neighbouring float32 by one store.

    array, index : a global array and the first element, at a multiple of 8 bytes
    """
    return _store_pair(array, index, "global", _GLOBAL, "l")


@intrinsic
def st_shared_v2_f32(typingctx, array, index, first, second):
    """``st.shared.v2.f32``: as `st_global_v2_f32`, in a shared array."""
    return _store_pair(array, index, "shared", _SHARED, "r")


# -- blocks that wait for one another (sm_70) -----------------------------------------


@intrinsic
def fence_acq_rel_gpu(typingctx):
    """``fence.acq_rel.gpu``: what came before is before what comes next, for others.

    What this thread did, or learned of at a barrier, comes before what it does next, as
    other blocks see it. `cuda.threadfence` (``fence.sc``) also puts all threads' fences
    in one order, and takes longer.
    """
    return types.void(), _instruction("fence.acq_rel.gpu;", warp=False)


@intrinsic
def has_reached(typingctx, counters, index, n):
    """``ld.acquire.gpu.global``: whether ``counters[index]`` is `n` or more; int32.

    For a loop, in which the lanes of a warp may wait for different counters. Who counts
    writes first, then passes `fence_acq_rel_gpu`, then adds by `cuda.atomic.add`: then
    what it wrote is there, for this thread and for those that it meets at a barrier
    afterwards. Only for blocks that run at the same time: a cooperative launch.

    counters : a global int32 array
    n : less than 2^31 from the counter, which may go round

    In the emulator other blocks run meanwhile, and the answer is always 1.
    """
    _check_index(counters, index)
    _check_integer("n", n)

    def codegen(context, builder, signature, args):
        kinds = signature.args
        at = _address(context, builder, kinds[:2], args[:2], _GLOBAL)
        count = context.cast(builder, args[2], kinds[2], types.int32)
        text = (
            "{\n.reg .pred there;\n.reg .s32 found;\n"
            "ld.acquire.gpu.global.s32 found, [$1];\nsub.s32 found, found, $2;\n"
            "setp.ge.s32 there, found, 0;\nselp.s32 $0, 1, 0, there;\n}"
        )
        given = [at, count]
        # `warp`: so that the compiler makes no copies of it.
        return _assembly(builder, _I32, text, "=r,l,r", given, memory=True, warp=True)

    return types.int32(counters, index, n), codegen


# -- wgmma: matrix products by a warpgroup (sm_90a) -----------------------------------
#
# The 128 threads of a warpgroup (four warps; the first one's number is a multiple of 4)
# multiply a matrix of 64 rows. They do not wait for the result:
#
#   wgmma_fence(acc)              registers and shared memory are ready
#   wgmma_m64n64k16_bf16(acc, …)  one or many: they run in this order, later
#   wgmma_commit_group()          what was issued since the last commit is a group
#   wgmma_wait_group(0, acc)      all groups but the newest 0 are done
#
# Between the second and the last line nobody may touch acc, nor write the operands.
#
# acc is a local array of float32. With warp w of the warpgroup, g = lane // 4 and
# t = lane % 4, thread (w, g, t) holds two neighbours in two rows of every 8 columns::
#
#   acc[4j], acc[4j + 1]        row 16w + g,      columns 8j + 2t, 8j + 2t + 1
#   acc[4j + 2], acc[4j + 3]    row 16w + g + 8,  the same columns
#
# so 32 float32 for 64 columns and 128 for 256. Of a 16-column slice of A in registers,
# the thread holds 4 uint32, each with two bfloat16, the lower column in the lower half:
# (row 16w + g; + 8; and both rows again) × (columns 2t, 2t + 1, twice; then 8 + 2t …):
# the very elements of acc, so a product's result serves as the next one's A.
#
# Operands in shared memory are made of *pieces*: 64 rows of 128 bytes, swizzled as by a
# tensor map (chunk c of row r at ``c ^ (r & 7)``), 8192 bytes from a multiple of 1024
# on. A descriptor says where one begins:
#
#   K-major   a piece's rows are the matrix's rows (A) or columns (B), 64 of k in each.
#             16 of k are 32 bytes: 2 in a descriptor's units.
#   MN-major  a piece's rows are k, with 64 of B's columns in each; further columns are
#             in the pieces that follow. 16 of k are 16 rows, 2048 bytes: 128 units.

_DESCRIPTOR_HIGH = 0x40000040  # 128-byte swizzle; groups of 8 rows are 1024 bytes apart


@intrinsic
def wgmma_descriptor(typingctx, array, index):
    """The descriptor of the pieces from ``array[index]`` on, for `wgmma_…` alone.

    array, index : a shared array and an element at a multiple of 16 bytes

    It is the lower half: address / 16 in bits 0 … 13, and from bit 16 on the distance
    between pieces / 16 (512), which K-major operands ignore. The upper half is always
    the same, so this half alone is in a register.
    """
    _check_index(array, index)

    def codegen(context, builder, signature, args):
        at = _address(context, builder, signature.args, args, _SHARED)
        return builder.or_(builder.lshr(at, _I32(4)), _I32(512 << 16))

    return types.uint32(array, index), codegen


def _descriptor(name: str, low: str, offset: str) -> str:
    """PTX for a 64-bit descriptor from its lower half and an offset in 16 bytes."""
    return (
        f".reg .b32 {name}_low;\nadd.u32 {name}_low, {low}, {offset};\n"
        f".reg .b64 {name};\nmov.b64 {name}, {{{name}_low, {_DESCRIPTOR_HIGH}}};\n"
    )


def _adds(accumulate: str) -> str:
    """PTX for the predicate `adds`: whether a product is added to what was there."""
    return f".reg .pred adds;\nsetp.ne.u32 adds, {accumulate}, 0;\n"


@intrinsic
def wgmma_fence(typingctx, acc, count):
    """``wgmma.fence``: what was done to registers and shared memory comes before.

    acc, count
        The local array that the next `wgmma_…` adds to, and its length, 32 or 128, as
        a constant.

    Needed before the first `wgmma_…`, and whenever the thread has touched acc or the
    registers of A.
    """
    return _over_sums("wgmma.fence.sync.aligned;", (acc, count), ())


@intrinsic
def wgmma_commit_group(typingctx):
    """``wgmma.commit_group``: what was issued since the last commit is a group."""
    return types.void(), _instruction("wgmma.commit_group.sync.aligned;")


@intrinsic
def wgmma_wait_group(typingctx, n, acc, count):
    """``wgmma.wait_group n``: all groups but the newest `n` are done.

    n
        A constant.
    acc, count
        The local array that these groups added to, and its length, 32 or 128, as a
        constant: it may be used from here on.
    """
    waiting = f"wgmma.wait_group.sync.aligned {_literal('n', n)};"
    return _over_sums(waiting, (acc, count), (n,))


def _literal(name: str, kind: Any) -> int:
    if not isinstance(kind, types.IntegerLiteral) or kind.literal_value < 0:
        raise RequireLiteralValue(f"{name}: expected a constant >= 0, got {kind}")
    return kind.literal_value


def _over_sums(text: str, sums: tuple[Any, Any], before: tuple) -> tuple[Any, Any]:
    """An instruction that other uses of a local float32 array do not move across."""
    acc, count = sums
    _check_registers("acc", acc, types.float32)
    length = _literal("count", count)

    def codegen(context, builder, signature, args):
        sums = acc, args[len(before)], length
        _tied(context, builder, lambda *_: text, sums, [])
        return context.get_dummy_value()

    return types.void(*before, acc, count), codegen


@intrinsic
def wgmma_m64n64k16_bf16(typingctx, acc, a, a_offset, b, b_offset, accumulate):
    """``wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16``: acc += a @ b.

    acc : 32 float32; changed
    a : descriptor of a 64x16 matrix, K-major in shared memory
    b : descriptor of a 16x64 matrix, K-major in shared memory
    a_offset, b_offset : constants that are added to the descriptors, in 16 bytes
    accumulate : an integer; 0 for ``acc = a @ b``
    """
    _check_registers("acc", acc, types.float32)
    signature = types.void(
        acc, types.uint32, a_offset, types.uint32, b_offset, accumulate
    )

    def codegen(context, builder, signature, args):
        operands = _as_uint32(context, builder, signature.args[1:], args[1:])

        def text(d, given):
            a, a_offset, b, b_offset, accumulate = given
            return (
                "{\n"
                + _descriptor("a", a, a_offset)
                + _descriptor("b", b, b_offset)
                + _adds(accumulate)
                + "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                f"{d}, a, b, adds, 1, 1, 0, 0;\n}}"
            )

        _tied(context, builder, text, (acc, args[0], 32), operands, "r,n,r,n,r")
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def wgmma_m64n256k16_bf16(typingctx, acc, a, a_offset, b, b_offset, accumulate):
    """``wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16``: acc += a @ b.

    acc : 128 float32; changed
    a : descriptor of a 64x16 matrix, K-major in shared memory
    b : descriptor of a 16x256 matrix, MN-major in shared memory (4 pieces)
    a_offset, b_offset : constants that are added to the descriptors, in 16 bytes
    accumulate : an integer; 0 for ``acc = a @ b``
    """
    _check_registers("acc", acc, types.float32)
    signature = types.void(
        acc, types.uint32, a_offset, types.uint32, b_offset, accumulate
    )

    def codegen(context, builder, signature, args):
        operands = _as_uint32(context, builder, signature.args[1:], args[1:])

        def text(d, given):
            a, a_offset, b, b_offset, accumulate = given
            return (
                "{\n"
                + _descriptor("a", a, a_offset)
                + _descriptor("b", b, b_offset)
                + _adds(accumulate)
                + "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
                f"{d}, a, b, adds, 1, 1, 0, 1;\n}}"
            )

        _tied(context, builder, text, (acc, args[0], 128), operands, "r,n,r,n,r")
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def wgmma_m64n256k16_bf16_from_registers(
    typingctx, acc, a, first, b, b_offset, accumulate
):
    """The same `wgmma` with A in registers: acc += a @ b.

    acc : 128 float32; changed
    a, first : a local array of uint32, and the first of the 4 that are a 64x16 matrix
    b : descriptor of a 16x256 matrix, MN-major in shared memory (4 pieces)
    b_offset : a constant that is added to the descriptor, in 16 bytes
    accumulate : an integer; 0 for ``acc = a @ b``
    """
    _check_registers("acc", acc, types.float32)
    _check_registers("a", a, types.uint32)
    signature = types.void(acc, a, first, types.uint32, b_offset, accumulate)

    def codegen(context, builder, signature, args):
        data = context.make_array(a)(context, builder, args[1]).data
        start = context.cast(builder, args[2], first, types.int32)
        operands = [
            builder.load(builder.gep(data, [builder.add(start, _I32(n))]))
            for n in range(4)
        ]
        operands += _as_uint32(context, builder, signature.args[3:], args[3:])

        def text(d, given):
            *a, b, b_offset, accumulate = given
            return _product_from_registers(d, a, b, b_offset, accumulate)

        constraints = "r,r,r,r,r,n,r"
        _tied(context, builder, text, (acc, args[0], 128), operands, constraints)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def wgmma_4_m64n256k16_bf16_from_registers(typingctx, acc, a, b):
    """``wgmma.fence``, and four such `wgmma` in a row, for 64 of k.

    acc : 128 float32; changed
    a : a local array of 16 uint32, 4 for each `wgmma`
    b : descriptor of a 64x256 matrix, MN-major in shared memory (4 pieces)

    In one text, because the assembler puts a fence (and a group's end) before each of
    them if it finds copies of A's registers in between.
    """
    _check_registers("acc", acc, types.float32)
    _check_registers("a", a, types.uint32)

    def codegen(context, builder, signature, args):
        slots = _registers(context, builder, a, args[1], 16)
        operands = [builder.load(slot) for slot in slots]
        operands += [args[2]]

        def text(d, given):
            *registers, b = given
            products = [
                _product_from_registers(
                    d, registers[4 * n : 4 * n + 4], b, 128 * n, "1"
                )
                for n in range(4)
            ]
            return "wgmma.fence.sync.aligned;\n" + "\n".join(products)

        constraints = "r," * 16 + "r"
        _tied(context, builder, text, (acc, args[0], 128), operands, constraints)
        return context.get_dummy_value()

    return types.void(acc, a, types.uint32), codegen


def _product_from_registers(
    d: str, a: list[str], b: str, b_offset: Any, accumulate: str
) -> str:
    """PTX of one `wgmma` with A in registers."""
    return (
        "{\n"
        + _descriptor("b", b, b_offset)
        + _adds(accumulate)
        + "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        f"{d}, {{{', '.join(a)}}}, b, adds, 1, 1, 1;\n}}"
    )


def _as_uint32(context: Any, builder: Any, kinds: Any, values: Any) -> list[Any]:
    return [
        context.cast(builder, value, kind, types.uint32)
        for value, kind in zip(values, kinds, strict=True)
    ]


# -- whole numbers --------------------------------------------------------------------


@intrinsic
def div_u32(typingctx, x, y):
    """``div.u32``: the quotient of two counts, `y` above 0, as an int32.

    ``x // y`` also asks whether `y` is 0, which is a branch for each.
    """
    _check_integer("x", x)
    _check_integer("y", y)

    def codegen(context, builder, signature, args):
        values = _as_uint32(context, builder, signature.args, args)
        text = "div.u32 $0, $1, $2;"
        return _assembly(builder, _I32, text, "=r,r,r", values, memory=False)

    return types.int32(x, y), codegen


# -- what a compiler may know ---------------------------------------------------------


@intrinsic
def uncounted(typingctx, x):
    """`x`, an int32, as if the compiler could not know what it is.

    For what a loop counts: it is then written once. Copies of a loop that waits anyway
    save nothing, and each comes from memory when it is first run.
    """
    _check_integer("x", x)

    def codegen(context, builder, signature, args):
        value = context.cast(builder, args[0], signature.args[0], types.int32)
        return _assembly(builder, _I32, "mov.b32 $0, $1;", "=r,r", [value], memory=True)

    return types.int32(x), codegen


# -- Hopper's instructions in the emulator --------------------------------------------

emulation(bar_sync)(hopper.barrier_sync)
emulation(bar_arrive)(hopper.barrier_arrive)
emulation(bar_red_or)(hopper.barrier_or)
emulation(mbarrier_init)(hopper.mbarrier_init)
emulation(mbarrier_arrive)(hopper.mbarrier_arrive)
emulation(mbarrier_arrive_expect_tx)(hopper.mbarrier_arrive)
emulation(mbarrier_wait)(hopper.mbarrier_wait)
emulation(fence_mbarrier_init)(hopper.fence_mbarriers)
emulation(fence_proxy_async)(hopper.fence_proxy)
emulation(fence_proxy_async_global)(hopper.fence_proxy_global)
emulation(cp_async_bulk)(hopper.bulk_copy)
emulation(fence_proxy_tensormap)(lambda lane, maps, index: None)  # the host is done
emulation(setmaxnreg_inc)(hopper.set_max_registers)
emulation(setmaxnreg_dec)(hopper.set_max_registers)
emulation(wgmma_fence)(lambda lane, acc, count: hopper.fence_products(lane))
emulation(wgmma_commit_group)(hopper.commit_products)
emulation(wgmma_wait_group)(lambda lane, n, *acc: hopper.wait_for_products(lane, n))


@emulation(cp_async_bulk_tensor_3d)
def _(lane, to, to_index, maps, map_index, x, y, z, barriers, barrier_index):
    hopper.bulk_load(
        lane, to, to_index, maps, map_index, (x, y, z), barriers, barrier_index
    )


@emulation(stmatrix_x4)
def _(lane: Executing, array: Any, index: Any, *registers: Any) -> None:
    row = lane.together("stmatrix", registers, _rows_of_fragments)
    lane.write("stmatrix", array, index, row)


def _rows_of_fragments(lanes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Every lane's row, uint16 [8]: lane l has row ``l % 8`` of matrix ``l // 8``."""
    registers = np.array(lanes, np.uint32).reshape(8, 4, 4)  # g, t, matrix
    rows = np.ascontiguousarray(registers.transpose(2, 0, 1))
    return list(rows.view(np.uint16).reshape(32, 8))


@emulation(st_global_v2_f32)
def _(lane: Executing, array: Any, index: Any, *values: Any) -> None:
    pair = np.array(values, np.float32)
    lane.write("st.global.v2", array, index, pair, "global")


@emulation(st_shared_v2_f32)
def _(lane: Executing, array: Any, index: Any, *values: Any) -> None:
    lane.write("st.shared.v2", array, index, np.array(values, np.float32))


@emulation(wgmma_descriptor)
def _(lane: Executing, array: Any, index: Any) -> int:
    return hopper.shared_address(lane, array, index, 16) >> 4 | 512 << 16


def _whole(low: int, offset: int) -> int:
    """A descriptor's 64 bits."""
    return _DESCRIPTOR_HIGH << 32 | int(low) + int(offset)


def _four(array: Any, first: int) -> tuple[int, ...]:
    """The four registers of a 64x16 matrix."""
    return array[first], array[first + 1], array[first + 2], array[first + 3]


@emulation(wgmma_m64n64k16_bf16)
def _(lane, acc, a, a_offset, b, b_offset, accumulate):
    a, b = _whole(a, a_offset), _whole(b, b_offset)
    hopper.multiply(lane, acc, a, b, n=64, accumulate=accumulate)


@emulation(wgmma_m64n256k16_bf16)
def _(lane, acc, a, a_offset, b, b_offset, accumulate):
    a, b = _whole(a, a_offset), _whole(b, b_offset)
    hopper.multiply(lane, acc, a, b, n=256, accumulate=accumulate, b_rows=True)


@emulation(wgmma_m64n256k16_bf16_from_registers)
def _(lane, acc, a, first, b, b_offset, accumulate):
    a, b = _four(a, first), _whole(b, b_offset)
    hopper.multiply(lane, acc, a, b, n=256, accumulate=accumulate, b_rows=True)


@emulation(wgmma_4_m64n256k16_bf16_from_registers)
def _(lane, acc, a, b):
    hopper.fence_products(lane)
    for n in range(4):
        b_there = _whole(b, 128 * n)
        hopper.multiply(lane, acc, _four(a, 4 * n), b_there, n=256, b_rows=True)


emulation(uncounted)(lambda lane, x: x)
emulation(div_u32)(lambda lane, x, y: np.int32(np.uint32(x) // np.uint32(y)))
emulation(fence_acq_rel_gpu)(lambda lane: lane.hub.fence())


@emulation(has_reached)
def _(lane: Executing, counters: Any, index: Any, n: Any) -> np.int32:
    hopper.wait_for_at_least(lane, counters, index, n)
    return np.int32(1)
