"""Time work on a GPU: CUDA-graph replays between events, at once and under load.

A graph takes the host out of what is measured: everything is launched once, recorded,
and replayed. Short work is recorded several times over, so that a replay lasts longer
than the host needs to queue the next one.

========== ==================================================================
burst      after a rest and a few replays: the card at its highest clocks
sustained  after a second of the same work: the card at its power limit
========== ==================================================================
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numba import cuda

from ddtree_numba.backend import Workspace
from ddtree_numba.step import capture_stream

SAMPLES = 20
REPLAY_US = 400.0
"""Shortest replay: queueing one takes the host some ten microseconds."""
MOST_ROUNDS = 64
SLOW_US = 20_000.0
"""Work that takes longer is timed three times, as it comes."""
REST_SECONDS = 0.1
LOAD_SECONDS = 1.0


class Timing(NamedTuple):
    """Microseconds of one launch: the median of some samples and their spread."""

    median_us: float
    low_us: float  # 10th percentile
    high_us: float  # 90th percentile
    samples: int


class Clock(Protocol):
    """What `sample` needs to know of time; tests have one without a GPU."""

    def mark(self) -> Any:
        """A point in the stream's order, reached when the work before it is done."""

    def between(self, start: Any, end: Any) -> float:
        """Microseconds from one mark to a later one, once that is reached."""


class StreamClock:
    """CUDA events on one stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def mark(self) -> Any:
        event = cuda.event(timing=True)
        event.record(self.stream)
        return event

    def between(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) * 1e3


def summarise(samples: Sequence[float]) -> Timing:
    """Median and spread of samples in microseconds."""
    low, median, high = np.percentile(samples, [10, 50, 90])
    return Timing(float(median), float(low), float(high), len(samples))


def sample(replay: Callable[[], None], clock: Clock, count: int) -> list[float]:
    """Microseconds of `count` replays, each between two marks.

    All are queued before the first is waited for. One more goes ahead: while it runs,
    the host gets in front, and no sample waits for it.
    """
    replay()
    marks = [clock.mark()]
    for _ in range(count):
        replay()
        marks.append(clock.mark())
    return [clock.between(start, end) for start, end in pairwise(marks)]


def burst(replay: Callable[[], None], clock: Clock, count: int) -> list[float]:
    """Samples after a rest: what came before has not heated the card."""
    time.sleep(REST_SECONDS)
    sample(replay, clock, min(count, 5))  # clocks rise, code and data settle
    return sample(replay, clock, count)


def sustained(
    replay: Callable[[], None],
    clock: Clock,
    count: int,
    *,
    seconds: float = LOAD_SECONDS,
) -> list[float]:
    """Samples after `seconds` of replays without a pause."""
    start = before = clock.mark()
    while True:
        for _ in range(count):
            replay()
        # One batch of replays is always queued while the one before is waited for.
        now = clock.mark()
        if clock.between(start, before) >= seconds * 1e6:
            break
        before = now
    return sample(replay, clock, count)


class Recorder:
    """Records launches on a stream of its own, as graphs to replay.

    Attributes
    ----------
    stream : numba stream
    clock : StreamClock
    """

    def __init__(self) -> None:
        self.stream = cuda.stream()
        self.clock = StreamClock(self.stream)

    def workspace(self) -> Workspace:
        """Room for a stage's arrays, whose launches go to this stream."""
        return Workspace(int(self.stream.handle))

    def record(
        self, launches: Sequence[Callable[[], Any]], library: str
    ) -> Callable[[], None]:
        """A function that replays `launches`, in turn, as one graph.

        They run while the stream records, so they must have run before: nothing may
        be compiled, or waited for.
        """
        if library == "torch":
            return self._record_with_torch(launches)

        def in_turn() -> None:
            for launch in launches:
                launch()

        if library == "driver":
            return in_turn
        from cuda.bindings import driver

        handle = int(self.stream.handle)
        with cuda.defer_cleanup():  # freeing memory is no part of a graph
            graph = capture_stream(in_turn, handle)

        def replay() -> None:
            (status,) = driver.cuGraphLaunch(graph, handle)
            if int(status) != 0:
                raise RuntimeError(f"the graph could not be replayed: {status.name}")

        weakref.finalize(replay, driver.cuGraphExecDestroy, graph)
        return replay

    def _record_with_torch(
        self, launches: Sequence[Callable[[], Any]]
    ) -> Callable[[], None]:
        import torch

        stream = torch.cuda.ExternalStream(int(self.stream.handle))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()

        def replay() -> None:
            with torch.cuda.stream(stream):
                graph.replay()

        return replay


def measure(
    launches: Sequence[Callable[[], Any]],
    recorder: Recorder,
    library: str,
    *,
    loaded: bool,
) -> dict[str, Timing]:
    """Time a launch, given on several sets of inputs, by regime.

    Parameters
    ----------
    launches : sequence of callables
        The same work on one set of inputs each.
    library : {"numba", "torch", "driver", "host"}
        Whose stream they are launched on. "driver": calls of the CUDA driver that cost
        the host nothing to speak of, queued without a graph. "host": the host takes
        part, so its own clock times them, one by one.
    loaded : bool
        Whether to time under load too.
    """
    if library == "host":
        return {"burst": summarise(host_samples(launches[0], SAMPLES))}
    for launch in launches:  # what it makes once for an array is made now
        launch()
    clock, sets = recorder.clock, len(launches)
    replay = recorder.record(launches, library)
    pilot = sample(replay, clock, 3)
    if (once_us := min(pilot) / sets) >= SLOW_US:
        return {"burst": summarise([us / sets for us in pilot])}
    rounds = rounds_for(once_us * sets)
    if rounds > 1:
        replay = recorder.record([*launches] * rounds, library)
    samples = {"burst": burst(replay, clock, SAMPLES)}
    if loaded:
        samples["sustained"] = sustained(replay, clock, SAMPLES)
    per_launch = sets * rounds
    return {
        regime: summarise([us / per_launch for us in many])
        for regime, many in samples.items()
    }


def rounds_for(round_us: float) -> int:
    """How often a graph goes round the sets, so that a replay is long enough."""
    return int(np.clip(np.ceil(REPLAY_US / round_us), 1, MOST_ROUNDS))


def host_samples(work: Callable[[], Any], count: int) -> list[float]:
    """Microseconds by the host's clock of work that ends on the host."""
    for _ in range(3):
        work()
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        samples.append((time.perf_counter() - start) * 1e6)
    return samples
