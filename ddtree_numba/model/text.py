"""Text for the small model: bytes as tokens, training corpus, held-out modules.

The text is Python's standard library. Thirty-two whole modules are held out of
training; they stand in ``data/prompts`` and are the only text that figures are
measured on.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree_numba._data import data_path
from ddtree_numba.model.config import BOS

HELD_OUT = (
    "argparse",
    "asyncio.queues",
    "base64",
    "bisect",
    "calendar",
    "cmd",
    "concurrent.futures.thread",
    "configparser",
    "contextlib",
    "csv",
    "dataclasses",
    "fnmatch",
    "fractions",
    "functools",
    "getopt",
    "glob",
    "graphlib",
    "heapq",
    "html.parser",
    "http.cookies",
    "json.decoder",
    "json.encoder",
    "logging.handlers",
    "queue",
    "random",
    "sched",
    "shlex",
    "statistics",
    "tempfile",
    "textwrap",
    "timeit",
    "urllib.parse",
)
"""Modules that training never saw."""

EXCLUDED_FOLDERS = frozenset(
    "__pycache__ encodings idle_test pydoc_data site-packages test tests".split()
)


def encode(text: str | bytes) -> NDArray[np.int32]:
    """Tokens of a text: BOS, then its UTF-8 bytes; int32 [1 + n_bytes]."""
    data = text.encode() if isinstance(text, str) else text
    return np.concatenate([[BOS], np.frombuffer(data, np.uint8)]).astype(np.int32)


def decode(tokens: ArrayLike) -> str:
    """Text of tokens; BOS and padding are dropped, bad UTF-8 is replaced."""
    tokens = np.asarray(tokens)
    data = tokens[(tokens >= 0) & (tokens < BOS)].astype(np.uint8).tobytes()
    return data.decode(errors="replace")


def training_text(stdlib: str | Path) -> dict[str, bytes]:
    """Modules that the model trains on, by dotted name.

    Parameters
    ----------
    stdlib
        A standard library's folder (Python 3.11's made the stored weights). Tests,
        codec tables, pydoc's topics, the build's settings and the held-out modules
        are left out.

    Raises
    ------
    ValueError
        If the folder holds no Python modules.
    """
    root = Path(stdlib)
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts)
        build_settings = parts[0].startswith(("_sysconfigdata", "config-"))
        skip = build_settings or EXCLUDED_FOLDERS & set(parts)
        if not skip and name not in HELD_OUT:
            modules[name] = path.read_bytes()
    if not modules:
        raise ValueError(f"stdlib: no Python modules under {root}")
    return modules


def held_out_text() -> dict[str, bytes]:
    """The held-out modules, by dotted name, as stored in ``data/prompts``."""
    return {name: data_path("prompts", f"{name}.txt").read_bytes() for name in HELD_OUT}


def held_out_prompts(
    n_prompts: int = 30,
    lengths: tuple[int, ...] = (256, 384, 512),
    *,
    seed: int = 0,
) -> list[bytes]:
    """Prompts cut from the held-out modules, each from the start of a line.

    Prompt i is ``lengths[i % len(lengths)]`` bytes of module i (in turn), from a line
    that a generator seeded with `seed` picks among those with twice the prompt's
    bytes after them; modules too short for that start at their first line.

    Returns
    -------
    list of bytes
        `n_prompts` prompts, without BOS.
    """
    rng = np.random.default_rng(seed)
    modules = list(held_out_text().values())
    prompts = []
    for i in range(n_prompts):
        text, length = modules[i % len(modules)], lengths[i % len(lengths)]
        ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")) + 1
        starts = np.concatenate([[0], ends[ends < len(text) - 2 * length]])
        start = int(rng.choice(starts))
        prompts.append(text[start : start + length])
    return prompts
