"""DraftTree: the arrays that describe a batch of draft trees, and ways to look at them.

A row is a node. Row 0 is the root (the bonus token of the last round), the others are
drafted tokens in the order in which best-first search selects them, so that a parent
always stands before its children and a sibling before the less likely one.

Worked example (``cat .6, dog .3`` after "The"; ``sat .8`` after either)::

    row            0 The  1 cat  2 sat  3 dog  4 sat
    parents          -1      0      1      0      3
    depths            0      1      2      1      2
    next_token        1      2     -1      4     -1     first child
    next_sibling     -1      3     -1     -1     -1
    visibility    10000  11000  11100  10010  10011     bit j: j is the row or above it
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

WORD_BITS = 32

# What stands in a root's and in a padding row's fields, whatever the tree.
_ROOT = {"parents": -1, "depths": 0, "next_sibling": -1, "log_probs": 0.0}
_PADDING = {
    "token_ids": -1,
    "parents": -1,
    "depths": -1,
    "next_token": -1,
    "next_sibling": -1,
    "log_probs": -np.inf,
}


def n_words(n_rows: int) -> int:
    """Number of uint32 words that hold a bit for each of `n_rows` rows."""
    return -(-n_rows // WORD_BITS)


@dataclass(frozen=True)
class DraftTree:
    """A batch of B draft trees with N rows each, padded; all arrays on one device.

    Attributes
    ----------
    token_ids : int32 [B, N]
        Token of each row; row 0 is the root; padding -1.
    parents : int32 [B, N]
        Parent row, always lower than the row; root and padding -1.
    depths : int32 [B, N]
        Root 0; padding -1.
    next_token : int32 [B, N]
        First child's row, or -1.
    next_sibling : int32 [B, N]
        Next sibling's row, or -1.
    log_probs : float32 [B, N]
        Log-probability of the path from the root (natural logarithm); root 0; padding
        -inf.
    visibility : uint32 [B, N, ceil(N/32)]
        Bit j of row i: j is i or an ancestor of i. Padding rows 0.
    n_rows : int32 [B]
        Live rows, 1 … N.
    """

    token_ids: Any
    parents: Any
    depths: Any
    next_token: Any
    next_sibling: Any
    log_probs: Any
    visibility: Any
    n_rows: Any

    @classmethod
    def from_parents(
        cls,
        parents: Any,
        token_ids: Any = None,
        log_probs: Any = None,
        n_rows: Any = None,
        *,
        check: bool = True,
    ) -> DraftTree:
        """Complete a tree from parent rows alone, on the host.

        Parameters
        ----------
        parents : int [N] or [B, N]
            Parent rows; -1 for the root and for padding.
        token_ids : int, same shape, optional
            Tokens; the row numbers if omitted.
        log_probs : float, same shape, optional
            Path log-probabilities; 0 if omitted.
        n_rows : int [B], optional
            Live rows; all of them if omitted.
        check : bool
            Validate the result. Parents are looked at in any case.

        Raises
        ------
        TypeError
            For parents, tokens or rows that are no integers.
        ValueError
            If a parent does not stand before its child, shapes do not agree, or the
            result is no valid tree (see `validate`).
        """
        parents = np.atleast_2d(_integers(parents, "parents"))
        if parents.ndim != 2:
            raise ValueError(f"parents has shape {parents.shape}; expected [B, N]")
        batch, n = parents.shape
        live = np.full(batch, n) if n_rows is None else n_rows
        tokens = np.arange(n) if token_ids is None else token_ids
        scores = np.zeros(n) if log_probs is None else np.asarray(log_probs)
        tree = cls(
            token_ids=_spread(_integers(tokens, "token_ids"), "token_ids", (batch, n)),
            parents=parents.copy(),
            depths=np.full((batch, n), -1, np.int32),
            next_token=np.full((batch, n), -1, np.int32),
            next_sibling=np.full((batch, n), -1, np.int32),
            log_probs=_spread(scores, "log_probs", (batch, n)).astype(np.float32),
            visibility=np.zeros((batch, n, n_words(n)), np.uint32),
            n_rows=_spread(_integers(live, "n_rows"), "n_rows", (batch,)),
        )
        for b in range(batch):
            tree._check_n_rows(b)
            tree._complete(b)
        if check:
            tree.validate()
        return tree

    def _complete(self, b: int) -> None:
        """Fill everything that follows from request b's parents."""
        live = self.n_rows[b]
        self.token_ids[b, live:] = -1
        self.parents[b, live:] = -1
        self.log_probs[b, live:] = -np.inf
        last_child = np.full(live, -1)
        for i in range(live):
            parent = self.parents[b, i]
            self.visibility[b, i, i // WORD_BITS] |= np.uint32(1 << i % WORD_BITS)
            if i == 0:
                self.depths[b, 0] = 0
                continue
            if not 0 <= parent < i:
                raise ValueError(
                    f"request {b}, row {i}: parent {parent}; expected 0 … {i - 1}"
                )
            self.depths[b, i] = self.depths[b, parent] + 1
            self.visibility[b, i] |= self.visibility[b, parent]
            before = last_child[parent]
            if before < 0:
                self.next_token[b, parent] = i
            else:
                self.next_sibling[b, before] = i
            last_child[parent] = i

    # ------------------------------------------------------------------ whole batch

    @property
    def batch(self) -> int:
        """B, the number of requests."""
        return self.token_ids.shape[0]

    @property
    def max_rows(self) -> int:
        """N, the rows of each request including the root and padding."""
        return self.token_ids.shape[1]

    def to_host(self) -> DraftTree:
        """The same tree in NumPy arrays (itself if it is there already)."""
        return DraftTree(**{name: _to_numpy(x) for name, x in self._fields()})

    def _fields(self) -> Iterator[tuple[str, Any]]:
        for field in dataclasses.fields(self):
            yield field.name, getattr(self, field.name)

    def positions(self, prefix_lens: Any) -> np.ndarray:
        """Sequence position of each row, ``prefix_lens[b] + depth``.

        Siblings share a position: it is what rotary embeddings need, while the KV cache
        row of row i is ``prefix_lens[b] + i``.

        Returns
        -------
        int32 [B, N]
            Padding rows -1.
        """
        depths = _to_numpy(self.depths)
        prefix = _to_numpy(prefix_lens).astype(np.int32)
        if prefix.shape != (self.batch,):
            raise ValueError(
                f"prefix_lens has shape {prefix.shape}; expected ({self.batch},)"
            )
        return np.where(depths < 0, np.int32(-1), prefix[:, None] + depths)

    def validate(self) -> None:
        """Check every invariant of the contract.

        Raises
        ------
        ValueError, TypeError
            Naming the field, the request and the row that break one.
        """
        host = self.to_host()
        host._validate_arrays()
        for b in range(host.batch):
            host._validate_request(b)

    def _validate_arrays(self) -> None:
        if len(self.token_ids.shape) != 2:
            raise ValueError(
                f"token_ids has shape {self.token_ids.shape}; expected [B, N]"
            )
        batch, n = self.token_ids.shape
        shapes: dict[str, tuple] = {name: (batch, n) for name, _ in self._fields()}
        shapes |= {"visibility": (batch, n, n_words(n)), "n_rows": (batch,)}
        dtypes = {"log_probs": np.float32, "visibility": np.uint32}
        for name, x in self._fields():
            if x.shape != shapes[name]:
                raise ValueError(f"{name} has shape {x.shape}; expected {shapes[name]}")
            dtype = np.dtype(dtypes.get(name, np.int32))
            if x.dtype != dtype:
                raise TypeError(f"{name} has dtype {x.dtype}; expected {dtype}")

    def _validate_request(self, b: int) -> None:
        self._check_n_rows(b)
        for name, value in _ROOT.items():
            self._expect(b, 0, name, value)
        for i in range(1, int(self.n_rows[b])):
            self._validate_node(b, i)
        # With the parents in order, all pointers and bits follow from them.
        for i, children in enumerate(self.children(b)):
            self._validate_links(b, i, children)
        for i in range(int(self.n_rows[b]), self.max_rows):
            self._validate_padding(b, i)

    def _validate_node(self, b: int, i: int) -> None:
        if not self.token_ids[b, i] >= 0:
            raise ValueError(
                f"request {b}, row {i}: token_ids {self.token_ids[b, i]}; "
                "expected 0 or more"
            )
        parent = int(self.parents[b, i])
        if not 0 <= parent < i:
            raise ValueError(
                f"request {b}, row {i}: parents {parent}; expected 0 … {i - 1}"
            )
        self._expect(b, i, "depths", self.depths[b, parent] + 1)
        before, own = self.log_probs[b, i - 1 : i + 1]
        if not -np.inf < own <= before:
            raise ValueError(
                f"request {b}, row {i}: log_probs {own}; expected a finite number "
                f"not above {before} (the row before)"
            )

    def _validate_links(self, b: int, i: int, children: list[int]) -> None:
        bits = np.zeros_like(self.visibility[b, i])
        bits[i // WORD_BITS] = np.uint32(1 << i % WORD_BITS)
        if i:
            bits |= self.visibility[b, self.parents[b, i]]
        if not np.array_equal(self.visibility[b, i], bits):
            raise ValueError(
                f"request {b}, row {i}: visibility is not the row and its ancestors"
            )
        links = [*children, -1]
        self._expect(b, i, "next_token", links[0])
        for left, right in itertools.pairwise(links):
            self._expect(b, left, "next_sibling", right)

    def _validate_padding(self, b: int, i: int) -> None:
        for name, value in _PADDING.items():
            self._expect(b, i, name, value)
        if self.visibility[b, i].any():
            raise ValueError(
                f"request {b}, row {i}: visibility of padding; expected no bit"
            )

    def _check_n_rows(self, b: int) -> None:
        live, n = self.n_rows[b], self.max_rows
        if not 1 <= live <= n:
            raise ValueError(f"request {b}: n_rows {live}; expected 1 … {n}")

    def _expect(self, b: int, i: int, name: str, value: Any) -> None:
        found = getattr(self, name)[b, i]
        if found != value:
            raise ValueError(f"request {b}, row {i}: {name} {found}; expected {value}")

    # ------------------------------------------------------------------ one request

    def mask(self, b: int, prefix_len: int) -> np.ndarray:
        """Dense attention mask of request b over ``[prefix, tail]`` columns.

        Returns
        -------
        bool [N, prefix_len + N]
            True where a row attends; padding rows attend to nothing.
        """
        words = _to_numpy(self.visibility)[b]
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        tail = bits[:, : self.max_rows].astype(bool)
        live = np.arange(self.max_rows) < _to_numpy(self.n_rows)[b]
        prefix = np.repeat(live[:, None], prefix_len, axis=1)
        return np.concatenate([prefix, tail], axis=1)

    def paths(self, b: int) -> list[list[int]]:
        """Rows from the root down to each live row of request b, that row included."""
        parents = _to_numpy(self.parents)[b]
        paths: list[list[int]] = []
        for i in range(int(_to_numpy(self.n_rows)[b])):
            paths.append((paths[parents[i]] if i else []) + [i])
        return paths

    def children(self, b: int) -> list[list[int]]:
        """Child rows of each live row of request b, most probable first."""
        parents = _to_numpy(self.parents)[b]
        live = int(_to_numpy(self.n_rows)[b])
        children: list[list[int]] = [[] for _ in range(live)]
        for i in range(1, live):
            children[parents[i]].append(i)
        return children

    def to_frame(self, b: int = 0) -> pd.DataFrame:
        """Live rows of request b as a table, one row a node."""
        import pandas as pd

        host = self.to_host()
        live = slice(int(host.n_rows[b]))
        names = ("token_ids", "parents", "depths", "next_token", "next_sibling")
        columns = {name: getattr(host, name)[b, live] for name in names}
        columns["log_probs"] = host.log_probs[b, live]
        columns["prob"] = np.exp(host.log_probs[b, live])
        frame = pd.DataFrame(columns)
        frame.index.name = "row"
        return frame

    def to_text(
        self,
        b: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
        accepted: Sequence[int] = (),
    ) -> str:
        """Draw request b's tree, one line a run of tokens that does not branch.

        Parameters
        ----------
        b : int
            Request.
        decode : callable, optional
            Text of a sequence of token ids; the ids themselves if omitted.
        accepted : sequence of int
            Rows of the accepted path, root first; they are marked with ``●`` (others
            ``○``), so that the path can be followed without colour.

        Returns
        -------
        str
            Each line ends with the probability of its last node's path.
        """
        host = self.to_host()
        show = quoted(decode) if decode else lambda ids: " ".join(map(str, ids))
        children, on_path = host.children(b), {int(row) for row in accepted}
        lines: list[str] = []
        # A run's first row; its indent, its elbow, and what stands below the elbow.
        stack = [(0, "", "", "")]
        while stack:
            row, lead, elbow, rest = stack.pop()
            run = [row]
            # The root stands alone; a run goes on while the only child shares its fate.
            while (
                run[-1] != 0
                and len(children[run[-1]]) == 1
                and (children[run[-1]][0] in on_path) == (row in on_path)
            ):
                run.append(children[run[-1]][0])
            mark = "●" if row in on_path else "○"
            text = show(host.token_ids[b, run].tolist())
            prob = np.exp(host.log_probs[b, run[-1]])
            lines.append(f"{lead}{elbow}{mark} {text}  {prob:.3f}".rstrip())
            below = children[run[-1]]
            for k in reversed(range(len(below))):
                last = k == len(below) - 1
                branch = ("└─ ", "   ") if last else ("├─ ", "│  ")
                stack.append((below[k], lead + rest, *branch))
        return "\n".join(lines)


def quoted(decode: Callable[[Sequence[int]], str]) -> Callable[[Sequence[int]], str]:
    """`decode` with its text on one line, what cannot be seen made visible."""
    shown = {"\n": "⏎", "\t": "⇥", " ": "·"}

    def show(ids: Sequence[int]) -> str:
        text = decode(ids)
        return "".join(shown.get(c, c if c.isprintable() else "�") for c in text)

    return show


def _integers(x: Any, name: str) -> np.ndarray:
    x = np.asarray(x)
    if x.dtype.kind not in "iu" and x.size:
        raise TypeError(f"{name} has dtype {x.dtype}; expected int32")
    return x.astype(np.int32)


def _spread(x: np.ndarray, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A copy of x in this shape: one for each request, or the same for all."""
    if x.shape not in (shape, shape[1:]):
        raise ValueError(f"{name} has shape {x.shape}; expected {shape}")
    return np.broadcast_to(x, shape).copy()


def _to_numpy(x: Any) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "copy_to_host"):  # Numba
        return x.copy_to_host()
    if hasattr(x, "cpu"):  # torch
        return x.cpu().numpy()
    if hasattr(x, "get"):  # CuPy
        return x.get()
    return np.asarray(x)
