"""Where the time of `verify_attn` goes: its wgmma kernel, with parts left out.

A kernel cannot be timed from inside without changing it. Instead its own text is
edited, so that it ends sooner and sooner, and each variant is timed as a kernel. A
*part* of the kernel, not of a row tile, is what a variant does beyond the one above it:

========= ====================================================== =================
variant   its blocks                                             the part
========= ====================================================== =================
plan only start, and find out which tiles they have              launch and plan
no post   … load these, weigh, multiply: sums are in registers   load and multiply
no merge  … post the sums of row tiles that were cut, count that post
no sums   … wait for their share of those, and fetch it          wait and fetch
whole     … sum it, and write the result                         sum and write
========= ====================================================== =================

Differences of neighbours add up to the whole. They say how much sooner the kernel ends
without a part, not how long that part is busy: what runs beside something longer costs
nothing here.

Besides, "no queries" is the whole but loads none; zeros stand in their place. Leftovers
would not do: their scores may rise from tile to tile, and references be moved all the
time.

**Results of all but "whole" are wrong, on purpose.**

What is left out remains in the kernel, behind a condition that never holds but that the
compiler cannot know of: registers and the order of instructions stay comparable.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ddtree_numba.bench.rows import of_one_run
from ddtree_numba.kernels import verify_attn_wgmma

if TYPE_CHECKING:
    import pandas as pd

WHOLE, NO_QUERIES = "whole", "no queries"

PARTS = {
    "launch and plan": "plan only",
    "load and multiply": "no post",
    "post": "no merge",
    "wait and fetch": "no sums",
    "sum and write": WHOLE,
}
"""Parts in the order of the kernel, each with the variant that ends with it."""

Edits = tuple[tuple[str, str], ...]

VARIANTS: dict[str, Edits] = {
    WHOLE: (),
    "no sums": (
        (  # Every mbarrier of a share gets its arrival, even for 0 bytes …
            "    if n_bytes > 0:\n",
            "    n_bytes = np.int32(max(n_bytes, 0))\n    if n_bytes >= 0:\n",
        ),
        (  # … so all can be waited for: no copy may be on its way when a block ends.
            "    if share.kept >= 0:\n        merge_units(",
            "    for n in range(ARRIVALS):\n"
            "        mbarrier_wait(memory.barriers, barrier + n, 0)\n"
            "    if share.chunks >= 0:\n"
            "        pass\n"
            "    elif share.kept >= 0:\n        merge_units(",
        ),
    ),
    "no merge": (("    merge(memory, ", "    if share.chunks < 0: merge(memory, "),),
    "no post": (
        ("    post(memory, ", "    if room < 0: post(memory, "),
        ("    merge_parts(memory, ", "    if room < 0: merge_parts(memory, "),
    ),
    "plan only": (
        (  # those that compute …
            "\n    bar_sync(PLANNED, THREADS)",
            "\n    bar_sync(PLANNED, THREADS)\n    if room >= 0: return",
        ),
        (  # … and those that load
            "\n        bar_sync(PLANNED, THREADS)",
            "\n        bar_sync(PLANNED, THREADS)\n        if room >= 0: return",
        ),
    ),
    NO_QUERIES: (
        (
            "    load_piece(memory, QUERIES, QUERIES_ARRIVED, piece, query_map, ",
            "    mbarrier_arrive(memory.barriers, QUERIES_ARRIVED + piece)\n"
            "    if row < 0: load_piece(memory, QUERIES, QUERIES_ARRIVED, piece, "
            "query_map, ",
        ),
        (  # while the plan is made
            "\n    bar_sync(PLANNED, THREADS)",
            "\n    at, zero = np.int32(QUERIES // 2 + 4 * number), np.uint32(0)\n"
            "    while at < (QUERIES + TILE) // 2:\n"
            "        store4(memory.words, at, zero, zero, zero, zero)\n"
            "        at = uncounted(at + 4 * CONSUMERS)\n"
            "    fence_proxy_async()\n"
            "    bar_sync(PLANNED, THREADS)",
        ),
    ),
}
"""By name: edits of the kernel's text, each (what stands there once, what to put)."""


def edited(variant: str) -> str:
    """The text of `verify_attn_wgmma.py` for a variant.

    Raises
    ------
    ValueError
        If what an edit replaces does not stand there exactly once: the kernel has
        changed, and the edit has to follow.
    """
    text = inspect.getsource(verify_attn_wgmma)
    for old, new in VARIANTS[variant]:
        if (count := text.count(old)) != 1:
            raise ValueError(
                f"variant {variant!r}: {old!r} stands {count} times in "
                f"{verify_attn_wgmma.__name__}; expected once. Its edit in "
                f"{__name__} has to follow the kernel"
            )
        text = text.replace(old, new)
    return text


@functools.cache
def kernel(variant: str) -> Any:
    """The kernel of a variant, from a module of its own; compiled when it is launched.

    "whole" is the kernel itself.
    """
    if variant == WHOLE:
        return verify_attn_wgmma.wgmma_kernel
    module = ModuleType(f"{verify_attn_wgmma.__name__}, {variant}")
    code = compile(edited(variant), f"<{module.__name__}>", "exec", dont_inherit=True)
    exec(code, vars(module))
    return module.wgmma_kernel


@contextmanager
def in_place(variant: str) -> Iterator[None]:
    """Have `verify_attn` launch a variant for its version "wgmma" in this context."""
    whole = verify_attn_wgmma.wgmma_kernel
    verify_attn_wgmma.wgmma_kernel = kernel(variant)
    try:
        yield
    finally:
        verify_attn_wgmma.wgmma_kernel = whole


def parts(frame: pd.DataFrame) -> pd.DataFrame:
    """What each part of the kernel adds to its time.

    Parameters
    ----------
    frame : pandas.DataFrame
        As `ddtree_numba.bench.bench_left_out` makes it.

    Returns
    -------
    pandas.DataFrame
        Microseconds: a line a shape, a column each of `PARTS`. They add up to the
        time of the whole kernel.

    Raises
    ------
    ValueError
        If there is no shape of which all variants were timed, or a variant was timed
        twice at one.
    """
    return _differences(_times(frame))


def table(frame: pd.DataFrame) -> str:
    """`parts` as text, with their sum, and how much of it loading the queries adds."""
    times = _times(frame)
    shown = _differences(times)
    shown[WHOLE] = times[WHOLE]
    shown["queries"] = times[WHOLE] - times[NO_QUERIES]
    heading = "µs that each part adds; the whole, and what the queries add to it"
    return f"{heading}\n{shown.to_string(float_format='{:.1f}'.format)}"


def _times(frame: pd.DataFrame) -> pd.DataFrame:
    """Medians in microseconds: a line a shape, a column a variant."""
    rows = of_one_run(frame[(frame["stage"] == "left_out") & (frame["us"] > 0)])
    times = rows.pivot(index="shape", columns="version", values="us")
    order = list(dict.fromkeys(rows["shape"]))
    times = times.reindex(index=order, columns=list(VARIANTS)).dropna()
    if times.empty:
        raise ValueError("frame has no shape with all variants of stage left_out")
    times.index = times.index.str.removesuffix(" bf16")
    return times.rename_axis(index=None, columns=None)


def _differences(times: pd.DataFrame) -> pd.DataFrame:
    """What each of `PARTS` adds to the variant before it; the first has none before."""
    ends = times[list(PARTS.values())]
    ends.columns = list(PARTS)
    return ends.diff(axis=1).fillna(ends)
