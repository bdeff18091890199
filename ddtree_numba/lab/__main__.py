"""`python -m ddtree_numba.lab`: build and check the notebooks."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ddtree_numba.lab import notebooks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 if all is well, 1 if a notebook is not."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (notebooks.NotebookError, notebooks.CellExecutionError) as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m ddtree_numba.lab", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, run, text in (
        ("build", _build, "run notebooks in a clean kernel and write their outputs"),
        ("check", _check, "say whose form is not what build writes; runs nothing"),
        ("pictures", _pictures, "write the pictures of their outputs as files"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("numbers", nargs="*", metavar="NN", help="all if omitted")
        command.set_defaults(run=run)
        if name == "build":
            command.add_argument(
                "--solved",
                action="store_true",
                help="with the solutions in: run, print the checks, write nothing",
            )
        if name == "pictures":
            command.add_argument("--out", type=Path, required=True)
    return parser


def _build(args: argparse.Namespace) -> int:
    for path in notebooks.paths(args.numbers):
        start = time.perf_counter()
        if args.solved:
            result = notebooks.run(
                notebooks.solved(notebooks.read(path), path.name[:2])
            )
            print(_printed(result.notebook))
        else:
            result = notebooks.build(path)
        seconds, size = time.perf_counter() - start, path.stat().st_size
        cell, slowest = max(result.seconds, key=lambda pair: pair[1])
        print(
            f"{path.name}: {seconds:.1f} s (cell {cell}: {slowest:.1f} s), "
            f"{size / 1024:.0f} KB"
        )
    return 0 if args.solved else _check(args)


def _printed(notebook: dict) -> str:
    """What the cell with the check printed."""
    texts = []
    for cell in notebook["cells"]:
        if "lab.check(" in cell["source"] and cell["cell_type"] == "code":
            texts += [output.get("text", "") for output in cell["outputs"]]
    return "".join(texts).rstrip()


def _check(args: argparse.Namespace) -> int:
    found = [
        fault
        for path in notebooks.paths(args.numbers)
        for fault in notebooks.faults(path)
    ]
    print("\n".join(found) or "in normal form")
    return 1 if found else 0


def _pictures(args: argparse.Namespace) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    for path in notebooks.paths(args.numbers):
        for name, picture, _ in notebooks.pictures(notebooks.read(path)):
            target = args.out / f"{path.name[:2]}-{name}"
            target.write_bytes(picture)
            print(target)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
