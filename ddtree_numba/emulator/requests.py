"""What the lanes of a warp ask of memory together: sectors and bank conflicts.

A GPU executes a load or store for all active lanes of a warp at once. Global memory
comes in sectors of 32 bytes: a request costs as many as it touches. Shared memory has
32 banks of 4 bytes: a request is served in passes, in each of which a bank gives one
word, to any number of lanes; atomics on one word take turns.

In the emulator lanes run one after another, so requests are put together afterwards:
the n-th time that each lane of a warp comes to an instruction, between two block
barriers, counts as one request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .arrays import ATOMIC, Array
from .lanes import WARP

__all__ = ["FIGURES", "Requests", "starts"]

SECTOR = 32  # bytes
BANK = 4  # bytes
ROW = 32 * BANK  # bytes of shared memory that one pass can give

#: What is added up for every site; `fewest_lanes` is a minimum.
FIGURES = (
    "requests", "lanes", "partial", "fewest_lanes", "sectors", "sectors_at_best",
    "passes", "passes_at_best",
)  # fmt: skip

#: Instruction (code, lasti), array and kind.
Site = tuple[int, int, int, int]


def starts(*columns: np.ndarray) -> np.ndarray:
    """Where a new combination begins in sorted columns."""
    return np.flatnonzero(_changes(*columns))


def _changes(*columns: np.ndarray) -> np.ndarray:
    new = np.ones(len(columns[0]), bool)
    new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return new


class Requests:
    """Adds up the warp requests of a run, by instruction, array and kind.

    Attributes
    ----------
    totals : dict
        ``{(code, lasti, array, kind): [FIGURES]}``
    """

    def __init__(self) -> None:
        self.totals: dict[Site, list[int]] = {}

    def add(
        self,
        table: dict[str, np.ndarray],
        arrays: Sequence[Array],
        spaces: np.ndarray,
        n_lanes: int,
    ) -> None:
        """Add the accesses of one block in whole phases.

        Parameters
        ----------
        table
            `trace.COLUMNS`, in the order of execution.
        arrays, spaces
            The array of every number, and the space of every row's.
        n_lanes : int
            Of a block.
        """
        if not len(table["lane"]):
            return
        size, address = _bytes_of(table, arrays)
        nth = _times(table)
        warp = table["lane"] // WARP
        keys = [table[name] for name in ("kind", "array", "lasti", "code")]
        keys = [nth, warp, table["phase"], *keys]
        order = np.lexsort((address, *keys))
        keys = [key[order] for key in keys]
        new = _changes(*keys)
        request = np.cumsum(new) - 1
        size, address = size[order], address[order]
        first = np.flatnonzero(new)
        of_site = _changes(*(key[first] for key in keys[3:]))

        lanes = np.bincount(request)
        # The last warp of a block may be short.
        there = np.minimum(WARP, n_lanes - keys[1][first] * WARP)
        figures = dict.fromkeys(FIGURES, np.zeros(len(first), np.int64))
        figures |= {
            "requests": np.ones(len(first), np.int64),
            "lanes": lanes,
            "partial": (lanes < there).astype(np.int64),
            "fewest_lanes": lanes,
        }
        in_global = spaces[order] == "global"
        if in_global.any():
            figures |= _sectors(request, address, size, in_global, len(first))
        if not in_global.all():
            lane = table["lane"][order] % WARP
            atomic = keys[3] == ATOMIC
            shared = ~in_global
            figures |= _passes(request, address, size, lane, atomic, shared, len(first))
        self._add_up(figures, [key[first] for key in keys[3:]], np.flatnonzero(of_site))

    def _add_up(
        self, figures: dict[str, np.ndarray], keys: list[np.ndarray], sites: np.ndarray
    ) -> None:
        """Add requests to their sites' totals; `sites` is where those begin."""
        sums = [_fold(name).reduceat(figures[name], sites) for name in FIGURES]
        kinds, numbers, lastis, codes = (key[sites].tolist() for key in keys)
        for site, *row in zip(
            zip(codes, lastis, numbers, kinds, strict=True), *sums, strict=True
        ):
            known = self.totals.get(site)
            if known is not None:
                pairs = zip(FIGURES, known, row, strict=True)
                row = [_fold(name)(a, b) for name, a, b in pairs]
            self.totals[site] = [int(n) for n in row]


def _fold(figure: str) -> np.ufunc:
    return np.minimum if figure == "fewest_lanes" else np.add


def _bytes_of(
    table: dict[str, np.ndarray], arrays: Sequence[Array]
) -> tuple[np.ndarray, np.ndarray]:
    """Size and address of every access; global ones as if allocated at zero."""
    numbers, which = np.unique(table["array"], return_inverse=True)
    used = [arrays[n] for n in numbers]
    size = np.array([array.itemsize for array in used])[which]
    start = np.array([array.address - array.allocation for array in used])[which]
    return size, start + table["offset"] * size


def _times(table: dict[str, np.ndarray]) -> np.ndarray:
    """How often a row's lane came to its instruction before, in this phase."""
    keys = [table[name] for name in ("lasti", "code", "lane", "phase")]
    order = np.lexsort(keys)  # stable: the order of execution stays
    new = _changes(*(key[order] for key in keys))
    begins = np.flatnonzero(new)
    nth = np.empty(len(order), np.int64)
    nth[order] = np.arange(len(order)) - np.repeat(
        begins, np.diff(np.append(begins, len(order)))
    )
    return nth


def _sectors(
    request: np.ndarray, address: np.ndarray, size: np.ndarray, rows: np.ndarray, n: int
) -> dict[str, np.ndarray]:
    """32-byte sectors a request, and how few its bytes would fit into."""
    request, address, size = request[rows], address[rows], size[rows]
    sector = address // SECTOR
    sectors = np.bincount(request[_changes(request, sector)], minlength=n)
    distinct = _changes(request, address)
    nbytes = np.bincount(request[distinct], size[distinct], minlength=n).astype(int)
    return {"sectors": sectors, "sectors_at_best": -(-nbytes // SECTOR)}


def _passes(
    request: np.ndarray,
    address: np.ndarray,
    size: np.ndarray,
    lane: np.ndarray,
    atomic: np.ndarray,
    rows: np.ndarray,
    n: int,
) -> dict[str, np.ndarray]:
    """Passes over the banks a request, and how few there would be without conflicts.

    Wide elements go by parts of the warp: 16 lanes for 8 bytes, 8 for 16.
    """
    request, address, size = request[rows], address[rows], size[rows]
    lane, atomic = lane[rows], atomic[rows]
    width = np.maximum(size, BANK)
    banks = ROW // width  # as wide as an element
    part = lane // banks
    unit = address // width
    bank = unit % banks
    order = np.lexsort((unit, bank, part, request))
    keys = [key[order] for key in (request, part, bank)]
    # A word counts once however many lanes want it, unless they change it in turns.
    counts = _changes(*keys, unit[order]) | atomic[order]
    of_bank = starts(*keys)
    depth = np.add.reduceat(counts.astype(np.int64), of_bank)
    request, part = keys[0][of_bank], keys[1][of_bank]
    of_part = starts(request, part)
    deepest = np.maximum.reduceat(depth, of_part)
    return {
        "passes": np.bincount(request[of_part], deepest, minlength=n).astype(int),
        "passes_at_best": np.bincount(request[of_part], minlength=n),
    }
