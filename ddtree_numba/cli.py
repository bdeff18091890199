"""The `ddtree` command: see a round, prove the loop lossless, measure it."""

from __future__ import annotations

import argparse
import codecs
import io
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ddtree_numba import __version__, backend
from ddtree_numba.decode import MAX_SEED, Generation, check_prompts, generate
from ddtree_numba.kernels.tree_build import MAX_DRAFT_NODES
from ddtree_numba.model import load_model
from ddtree_numba.model.text import decode, held_out_prompts
from ddtree_numba.tree import DraftTree, quoted

SHOWN_ROUNDS = 2
SHOWN_NODES = 24
DEFAULT_PROMPT = 15  # of the held-out prompts: glob
DEFAULT_BUDGETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

SLOW = """\
The emulator runs every lane in Python: a round of this model takes minutes, and even a
short --prompt with --max-new-tokens 2 and --n-draft-nodes 4 about ten. It is made for
single kernels; --executor numpy decodes in seconds."""

KEY = """
● accepted  ○ drafted, not accepted  · space  ⏎ new line. A line is a run of bytes with
the probability of the path to its end. The first is the root, the text's last byte so
far; the bonus is the target's own byte after what was accepted."""

ABOUT = """\
Speculative decoding with a draft tree (DDTree) on an MLA model, as Numba-CUDA kernels
with NumPy twins."""

EXAMPLES = """\
examples:
  ddtree demo                               decode held-out code, show the trees
  ddtree demo --prompt "def mean(values):"  your own text
  ddtree demo --json 2>/dev/null            one JSON object, for scripts
  ddtree demo --figure round.png            draw the first round's tree and mask
  ddtree sweep --out data/bench             tokens per round against the tree's size
  ddtree bench --peers                      time every kernel on this GPU
  ddtree bench --left-out                   where the fastest attention's time goes
  ddtree refs                               write the golden cases again

Kernels run on the GPU if there is one, else as NumPy; --executor or DDTREE_EXECUTOR
chooses (gpu, emulator, numpy)."""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        _fail(message, self.prog)


def _fail(message: str, prog: str = "ddtree") -> NoReturn:
    print(f"{prog}: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def _input_errors() -> Iterator[None]:
    """Bad input is one line and exit code 2; an error after it is a fault of ours."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        _fail(str(error))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    0: done. 1: the outputs of tree, chain and plain decoding differ. 2: bad input, or
    a file that cannot be written. 130: interrupted.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: `>&-`
            setattr(sys, name, open(os.devnull, "w"))
    args = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        # A terminal without ● or ⟦ shows a question mark instead of a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:  # what is left to say would fail again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0  # the reader, such as `head`, has seen enough
        _fail(str(error))
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser("ddtree", description=ABOUT, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument(
        "--version", action="version", version=f"ddtree_numba {__version__}"
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{demo,sweep,bench,refs}"
    )
    _add_demo(commands)
    _add_sweep(commands)
    _add_bench(commands)
    _add_refs(commands)
    return parser


def _count(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argument type: a whole number in a range."""
    expected = f"{least} or more" if most is None else f"{least} … {most}"

    def count(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text}; expected {expected}")
        return value

    return count


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}; expected 0 or more")
    return value


def _add_common(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    parser.add_argument(
        "--max-new-tokens",
        type=_count(1),
        default=max_new_tokens,
        metavar="K",
        help="bytes to generate per prompt (default %(default)s)",
    )
    parser.add_argument(
        "--executor",
        choices=backend.EXECUTORS,
        help="where the kernels run (default: gpu if there is one, else numpy)",
    )
    parser.add_argument(
        "--seed",
        type=_count(0, MAX_SEED),
        default=0,
        help="random stream at T > 0 (default 0)",
    )


# ------------------------------------------------------------------------------- demo


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="decode a text with a draft tree and prove that it is lossless",
        description="Decode a text three times: with a draft tree, with a chain (top-1 "
        "at every position), and with the target alone. Show the first rounds' trees, "
        "the text as the rounds committed it, and whether the three texts are "
        "identical (exit code 1 if not).",
    )
    demo.add_argument(
        "--prompt",
        metavar="FILE|TEXT",
        help="a file, a text, or - for standard input (default: held-out code)",
    )
    demo.add_argument(
        "--n-draft-nodes",
        type=_count(0, MAX_DRAFT_NODES),
        default=64,
        metavar="M",
        help="draft nodes of a tree, the root not counted (default %(default)s)",
    )
    demo.add_argument(
        "--temperature",
        type=_temperature,
        default=0.0,
        metavar="T",
        help="0: the target's most probable byte; above: sampled (default 0)",
    )
    demo.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on standard output, the report on standard error",
    )
    demo.add_argument(
        "--figure",
        metavar="FILE",
        type=Path,
        help="draw the first round's tree beside its mask (png, svg or pdf)",
    )
    _add_common(demo, 256)
    demo.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    with _input_errors():
        executor = backend.choose(args.executor)
        if args.figure:
            _check_writable(args.figure)
        prompt = _read_prompt(args.prompt)
        model = load_model()
        check_prompts(model, [prompt], args.max_new_tokens)
    out = sys.stderr if args.json else sys.stdout
    print(backend.banner(executor), file=out)

    def run(mode: str) -> Generation:
        return generate(
            model,
            [prompt],
            args.max_new_tokens,
            args.n_draft_nodes,
            mode=mode,
            temperature=args.temperature,
            seed=args.seed,
            executor=executor,
            progress=sys.stderr.isatty(),
        )

    if executor == "gpu":  # compile the kernels before anything is timed
        generate(model, [prompt], 1, args.n_draft_nodes, executor=executor)
    if executor == "emulator":
        print(SLOW, file=sys.stderr)
    tree = run("tree")
    _print_trees(tree, out)
    _print_text(tree, out)
    runs = {"tree": tree, "chain": run("chain"), "plain": run("plain")}
    lossless = all(other.tokens == tree.tokens for other in runs.values())
    _print_table(runs, lossless, out)
    if args.figure:
        _draw_first_round(tree, args.figure)
        print(f"first round drawn in {args.figure}", file=out)
    if args.json:
        print(json.dumps(_summary(runs, lossless, executor)))
    return 0 if lossless else 1


def _read_prompt(given: str | None) -> bytes:
    """The prompt's bytes: of a file, of standard input, or the text itself."""
    if given is None:
        return held_out_prompts()[DEFAULT_PROMPT]
    if given == "-":
        if sys.stdin is None:
            raise ValueError("--prompt -: standard input is closed")
        prompt = sys.stdin.buffer.read()
    elif os.path.isdir(given):
        raise IsADirectoryError(f"--prompt {given}: a folder; expected a file, or text")
    elif os.path.exists(given):
        prompt = Path(given).read_bytes()
    elif _looks_like_a_path(given):
        raise FileNotFoundError(
            f"--prompt {given}: no such file (- for standard input)"
        )
    else:
        # An argument's bytes that are no UTF-8 come as surrogates; give them back.
        prompt = given.encode(errors="surrogateescape")
    if not prompt:
        raise ValueError("--prompt is empty; expected at least one byte")
    return prompt


def _looks_like_a_path(text: str) -> bool:
    one_word = text.split() == [text]
    return one_word and (os.sep in text or text.endswith((".txt", ".py", ".md")))


def _check_writable(path: Path) -> None:
    """Raise before the work, not after it, if a figure cannot be written."""
    from matplotlib.figure import Figure

    endings = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in endings:
        raise ValueError(f"--figure {path}: expected a name ending in png, svg or pdf")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--figure {path}: no such folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"--figure {path}: cannot be written")


@contextmanager
def _whole_file(path: Path) -> Iterator[Path]:
    """A name to write to; it becomes `path` when all is written, or goes away."""
    if path.exists() and not path.is_file():  # a device, say: nothing to replace
        yield path
        return
    unfinished = path.with_name(f".{secrets.token_hex(4)}-{path.name}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _save(figure: Any, path: Path) -> None:
    with _whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=150)


def _print_trees(run: Generation, out: TextIO) -> None:
    print(KEY, file=out)
    for number, trace in enumerate(run.rounds[:SHOWN_ROUNDS], 1):
        tree, path = _head(trace.tree, trace.path(0), SHOWN_NODES)
        n_drafted = int(trace.tree.n_rows[0]) - 1
        print(
            f"\nround {number}: {n_drafted} draft nodes, "
            f"{len(path) - 1} accepted (● below the root), "
            f"then the bonus {quoted(decode)([trace.accepted.bonus[0]])}",
            file=out,
        )
        print(tree.to_text(0, decode, path), file=out)
        if (hidden := n_drafted + 1 - tree.max_rows) > 0:
            print(f"… and {hidden} less probable nodes", file=out)


def _head(tree: DraftTree, path: list[int], most: int) -> tuple[DraftTree, list[int]]:
    """The first rows of a tree and its accepted path, as a tree; the path in it."""
    live = int(tree.n_rows[0])
    kept = sorted({*range(min(live, most + 1)), *path})
    row_of = {row: i for i, row in enumerate(kept)}
    parents = [row_of.get(int(tree.parents[0, row]), -1) for row in kept]
    head = DraftTree.from_parents(
        parents, tree.token_ids[0, kept], tree.log_probs[0, kept]
    )
    return head, [row_of[row] for row in path]


def _print_text(run: Generation, out: TextIO) -> None:
    """The text with the rounds told apart: by colour, or by brackets in a pipe."""
    prompt = decode(run.prompts[0])
    colour = out.isatty() and not os.environ.get("NO_COLOR")
    cyan, yellow, plain = "\x1b[36m", "\x1b[33m", "\x1b[0m"
    marks = [(cyan, plain), (yellow, plain)] if colour else [("⟦", "⟧")]
    # A character of several bytes belongs to the round that completes it.
    characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    cue = "rounds in turn cyan and yellow" if colour else "a round in ⟦ ⟧"
    print(f"\nthe text, {cue}:\n", file=out)
    print("".join(prompt.splitlines(keepends=True)[-3:]), end="", file=out)
    for number, trace in enumerate(run.rounds):
        opens, closes = marks[number % len(marks)]
        text = characters.decode(bytes(trace.committed[0]))
        print(f"{opens}{text}{closes}", end="", file=out)
    print(file=out)


def _print_table(runs: dict[str, Generation], lossless: bool, out: TextIO) -> None:
    print(
        f"\n{'':12} {'tokens':>7} {'rounds':>7} {'tokens/round':>13} {'seconds':>8}",
        file=out,
    )
    for mode, run in runs.items():
        name = f"{mode} ({run.n_draft_nodes})" if run.n_draft_nodes else mode
        print(
            f"{name:12} {run.n_tokens:7} {run.n_rounds:7} "
            f"{run.tokens_per_round:13.2f} {run.seconds:8.2f}",
            file=out,
        )
    verdict = "identical" if lossless else "DIFFERENT: the loop is not lossless"
    print(f"outputs of tree, chain and plain: {verdict}", file=out)


def _draw_first_round(run: Generation, path: Path) -> None:
    from ddtree_numba.viz import round_figure

    trace = run.rounds[0]
    prefix_len = int(trace.prefix_lens[0])
    figure, _ = round_figure(trace.tree, 0, prefix_len, decode, trace.path(0))
    _save(figure, path)


def _summary(
    runs: dict[str, Generation], lossless: bool, executor: str
) -> dict[str, Any]:
    tree, chain, plain = runs["tree"], runs["chain"], runs["plain"]
    return {
        "executor": executor,
        "lossless": lossless,
        "tokens": tree.n_tokens,
        "rounds": tree.n_rounds,
        "tokens_per_round": tree.tokens_per_round,
        "chain_tokens_per_round": chain.tokens_per_round,
        "plain_tokens_per_round": plain.tokens_per_round,
        "n_draft_nodes": tree.n_draft_nodes,
        "chain_draft_nodes": chain.n_draft_nodes,
        "seconds": tree.seconds,
        "chain_seconds": chain.seconds,
        "plain_seconds": plain.seconds,
        "stage_seconds": tree.stage_seconds,
        "text": tree.text(),
    }


# ------------------------------------------------------------------------------ sweep


def _add_sweep(commands: Any) -> None:
    sweep = commands.add_parser(
        "sweep",
        help="measure tokens per round against n_draft_nodes",
        description="Measure tokens per round against n_draft_nodes over held-out "
        "prompts, greedily and at T = 0.7, beside the chain's; write sweep.csv and "
        "sweep.png.",
    )
    sweep.add_argument(
        "--out",
        type=Path,
        default=Path("data/bench"),
        metavar="DIR",
        help="folder for the results (default %(default)s)",
    )
    sweep.add_argument(
        "--prompts",
        type=_count(1, 1000),
        default=30,
        metavar="N",
        help="held-out prompts (default %(default)s)",
    )
    sweep.add_argument(
        "--n-draft-nodes",
        type=_count(1, MAX_DRAFT_NODES),
        nargs="+",
        default=DEFAULT_BUDGETS,
        metavar="M",
        help="budgets to measure (default 1 2 4 … 1024)",
    )
    sweep.add_argument(
        "--temperature",
        type=_temperature,
        nargs="+",
        default=(0.0, 0.7),
        metavar="T",
        help="temperatures to measure (default 0 0.7)",
    )
    _add_common(sweep, 256)
    sweep.set_defaults(run=_sweep)


def _sweep(args: argparse.Namespace) -> int:
    from ddtree_numba.sweep import sweep
    from ddtree_numba.viz import sweep_figure

    with _input_errors():
        executor = backend.choose(args.executor)
        _make_folder(args.out)
        prompts = held_out_prompts(args.prompts)
        model = load_model()
        # The last round may look a block ahead.
        check_prompts(model, prompts, args.max_new_tokens + model.config.block - 1)
    print(backend.banner(executor), file=sys.stderr)
    frame = sweep(
        model,
        prompts,
        args.max_new_tokens,
        args.n_draft_nodes,
        temperatures=args.temperature,
        seed=args.seed,
        executor=executor,
        progress=sys.stderr.isatty(),
    )
    print(frame.to_string(index=False))
    with _whole_file(args.out / "sweep.csv") as unfinished:
        with open(unfinished, "w") as file:
            print(f"# {backend.banner(executor)}", file=file)
            frame.to_csv(file, index=False, float_format="%.4f")
    _save(sweep_figure(frame)[0], args.out / "sweep.png")
    print(f"sweep.csv and sweep.png written to {args.out}", file=sys.stderr)
    return 0


# ------------------------------------------------------------------------------ bench


def _add_bench(commands: Any) -> None:
    from ddtree_numba.bench import SHAPES, STAGES

    bench = commands.add_parser(
        "bench",
        help="time every kernel on a GPU",
        description="Check and time every stage and version on this machine's GPU, as "
        "medians of CUDA-graph replays, at once and after a second of load, beside the "
        "card's measured ceilings; write bench.csv, roofline.png and ladder.png.",
    )
    what = bench.add_mutually_exclusive_group()
    what.add_argument(
        "--stages",
        nargs="+",
        choices=STAGES,
        default=STAGES,
        metavar="STAGE",
        help=f"what to measure, of {', '.join(STAGES)} (default: all)",
    )
    what.add_argument(
        "--left-out",
        action="store_true",
        help="instead of stages: where the time of verify_attn's wgmma "
        "version goes, from its kernel with parts left out, on a Hopper GPU; write "
        "left_out.csv and left_out.png",
    )
    bench.add_argument(
        "--shapes",
        choices=SHAPES,
        default="full",
        help="full: minutes; quick: one of a kind; tiny: only to run (default full)",
    )
    bench.add_argument(
        "--peers",
        action="store_true",
        help="measure torch, FlashInfer and SGLang beside, where they are installed",
    )
    bench.add_argument(
        "--out",
        type=Path,
        default=Path("data/bench"),
        metavar="DIR",
        help="folder for the results (default %(default)s)",
    )
    bench.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    if args.left_out:
        return _bench_left_out(args)
    from ddtree_numba import bench
    from ddtree_numba.viz.roofline import ladder_figure, roofline_figure

    with _input_errors():
        bench.require_gpu()
        _make_folder(args.out)
    print(backend.banner("gpu"), file=sys.stderr)
    with _interrupted(args.out / bench.UNFINISHED):
        frame = bench.bench(
            args.out,
            stages=args.stages,
            shapes=args.shapes,
            with_peers=args.peers,
            progress=sys.stderr.isatty(),
        )
    print(bench.table(frame))
    written = ["bench.csv"]
    if ((frame["stage"] == "verify_attn") & (frame["status"] == "ok")).any():
        figures = {"roofline.png": roofline_figure, "ladder.png": ladder_figure}
        for name, draw in figures.items():
            _save(draw(frame)[0], args.out / name)
        written += figures
    print(f"{', '.join(written)} written to {args.out}", file=sys.stderr)
    return int((frame["status"] == "wrong").any())


def _bench_left_out(args: argparse.Namespace) -> int:
    from ddtree_numba import bench
    from ddtree_numba.bench import left_out
    from ddtree_numba.viz import left_out_figure

    with _input_errors():
        if args.peers:
            raise ValueError("--left-out has no --peers; expected one of the two")
        bench.require_hopper()
        _make_folder(args.out)
    print(backend.banner("gpu"), file=sys.stderr)
    with _interrupted(args.out / bench.LEFT_OUT_UNFINISHED):
        frame = bench.bench_left_out(
            args.out, shapes=args.shapes, progress=sys.stderr.isatty()
        )
    if (frame["status"] != "ok").any():
        print(bench.table(frame))
        return 1
    print(left_out.table(frame))
    _save(left_out_figure(left_out.parts(frame))[0], args.out / "left_out.png")
    print(f"left_out.csv and left_out.png written to {args.out}", file=sys.stderr)
    return 0


@contextmanager
def _interrupted(unfinished: Path) -> Iterator[None]:
    """Say where the rows of a run are that is stopped."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped; rows so far: {unfinished}", file=sys.stderr)
        raise


# ------------------------------------------------------------------------------- refs


def _make_folder(path: Path) -> None:
    """Make a folder for results; raise before the work if it cannot hold them."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"--out {path}: is a file; expected a folder")
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise PermissionError(f"--out {path}: cannot be written")


def _add_refs(commands: Any) -> None:
    refs = commands.add_parser(
        "refs",
        help="write the golden cases (data/refs) again",
        description="Write the golden inputs and outputs of every stage as KDTR files.",
    )
    refs.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the files (default: the package's data/refs)",
    )
    refs.set_defaults(run=_refs)


def _refs(args: argparse.Namespace) -> int:
    from ddtree_numba._data import data_path
    from ddtree_numba.refs import write_refs

    out = args.out or data_path("refs")
    with _input_errors():
        _make_folder(out)
    paths = write_refs(out)
    print(f"{len(paths)} golden cases written to {out}")
    return 0
