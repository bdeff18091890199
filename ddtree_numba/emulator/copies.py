"""Copies that arrive later: between the request and the wait nothing is certain.

A lane asks for a copy, closes a group of them, and waits until all but the newest n
groups have arrived (PTX: `cp.async`, `commit_group`, `wait_group`). A GPU moves the
bytes at any time in between. Here they arrive at the wait, the latest that is
possible, and until then

- reading or copying to where they will go is an error,
- having written there, or where they come from, is one too, found at the wait,
- and the trace holds two writes of the lane, one at the request and one at the wait, so
  that a missing barrier on either side shows as a race.
"""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING

import numpy as np

from .arrays import IN_FLIGHT, READ, WRITE
from .errors import InFlightError, source_line
from .spans import Span

if TYPE_CHECKING:
    from .lanes import Lane

__all__ = ["Copies"]


class Copy:
    """One copy on its way; as text, who asked for it, where, and how far it is."""

    __slots__ = ("committed", "lane", "name", "new", "source", "to", "where")

    def __init__(
        self, name: str, lane: Lane, frame: FrameType, to: Span, source: Span | None
    ) -> None:
        self.name, self.lane, self.to, self.source = name, lane, to, source
        self.where = frame.f_code.co_filename, frame.f_lineno
        self.committed = False
        self.new = np.zeros(len(to.bytes), np.uint8)
        if source is not None:
            self.new[: len(source.bytes)] = source.bytes

    def __str__(self) -> str:
        state = "not waited for" if self.committed else "not even committed"
        who = f"the {self.name} of lane {self.lane.index}"
        return f"{who} ({source_line(*self.where)}, {state})"


class Copies:
    """The copies of one lane that have not arrived."""

    __slots__ = ("groups", "pending")

    def __init__(self) -> None:
        self.pending: list[Copy] = []  # since the last commit
        self.groups: list[list[Copy]] = []  # oldest first

    def request(
        self, name: str, lane: Lane, frame: FrameType, to: Span, source: Span | None
    ) -> None:
        """Put a copy on its way."""
        to.check_at_rest(f"{name} to it")
        if source is not None:
            source.log(READ, frame)
        to.log(WRITE, frame)
        copy = Copy(name, lane, frame, to, source)
        self.pending.append(copy)
        assert to.written is not None
        to.written[:] = bytes([IN_FLIGHT]) * len(to.written)
        to.written.obj.in_flight[to.address // 16] = copy  # type: ignore

    def commit(self) -> None:
        for copy in self.pending:
            copy.committed = True
        self.groups.append(self.pending)
        self.pending = []

    def wait(self, n: int, frame: FrameType) -> None:
        """Let all groups arrive but the newest `n`."""
        arriving = self.groups[: max(0, len(self.groups) - n)]
        del self.groups[: len(arriving)]
        for group in arriving:
            for copy in group:
                self._arrive(copy, frame)

    def _arrive(self, copy: Copy, frame: FrameType) -> None:
        to, source = copy.to, copy.source
        assert to.written is not None
        if to.written != bytes([IN_FLIGHT]) * len(to.written):
            raise InFlightError(
                f"{to.name}: written {to.writer()} while {copy} was on its way there"
            )
        if source is not None and (source.bytes != copy.new[: len(source.bytes)]).any():
            raise InFlightError(
                f"{source.name}: written {source.writer()} while {copy} was reading it"
            )
        del to.written.obj.in_flight[to.address // 16]  # type: ignore
        to.write(copy.new, frame)
