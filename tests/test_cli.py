"""The command proves losslessness, speaks JSON, and meets bad input with one line."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import ddtree_numba
from ddtree_numba import cli, kdtr
from ddtree_numba.model import text

PROMPT = "def mean(values):\n    return "
SHORT = ["--prompt", PROMPT, "--max-new-tokens", "12", "--executor", "numpy"]


def demo(*arguments):
    return cli.main(["demo", *SHORT, *arguments])


# --------------------------------------------------------------------------- demo


def test_demo_shows_trees_text_and_a_table(capsys):
    assert demo("--n-draft-nodes", "40") == 0
    out, err = capsys.readouterr()
    assert out.startswith("ddtree_numba on numpy (CPU, no GPU used) | Python")
    assert err == ""
    assert "round 1: 40 draft nodes" in out
    assert "● " in out and "○ " in out
    assert "… and " in out, "of 40 nodes the most probable are shown"
    assert re.search(r"tree \(40\) +12 ", out)
    assert re.search(r"chain \(15\) +12 ", out)
    assert re.search(r"plain +12 +12 +1\.00 ", out)
    assert out.rstrip().endswith("outputs of tree, chain and plain: identical")


def test_demo_brackets_the_text_of_each_round(capsys):
    demo("--json")
    out, err = capsys.readouterr()
    after_prompt = err.split(PROMPT)[-1]
    rounds = re.findall(r"⟦(.*?)⟧", after_prompt, flags=re.DOTALL)
    assert len(rounds) == json.loads(out)["rounds"]
    assert "".join(rounds) == json.loads(out)["text"]


def test_colour_is_for_terminals_and_may_be_switched_off(capsys, monkeypatch):
    demo()
    assert "\x1b[" not in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    demo()
    in_colour = capsys.readouterr().out
    assert "\x1b[36m" in in_colour and "⟦" not in in_colour
    monkeypatch.setenv("NO_COLOR", "1")
    demo()
    assert "\x1b[" not in capsys.readouterr().out


def test_json_is_one_object_with_the_promised_fields(capsys):
    assert demo("--json", "--n-draft-nodes", "9") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["executor"], answer["lossless"]) == ("numpy", True)
    assert (answer["tokens"], answer["n_draft_nodes"]) == (12, 9)
    assert answer["tokens_per_round"] == 12 / answer["rounds"]
    assert 1 <= answer["chain_tokens_per_round"] <= 12
    assert answer["plain_tokens_per_round"] == 1
    assert answer["seconds"] > 0
    assert len(answer["text"].encode()) >= 12


def test_the_module_is_the_command_and_json_stands_alone_on_stdout():
    command = [sys.executable, "-m", "ddtree_numba", "demo", *SHORT, "--json"]
    done = subprocess.run(command, capture_output=True, check=True, encoding="utf-8")
    assert json.loads(done.stdout)["lossless"] is True
    assert "ddtree_numba on numpy" in done.stderr


def test_a_terminal_that_cannot_show_the_marks_shows_the_rest():
    command = [sys.executable, "-m", "ddtree_numba", "demo", *SHORT]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=ascii_only)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"outputs of tree, chain and plain: identical" in done.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_early_is_no_error(unbuffered):
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "ddtree_numba", "demo", *SHORT]
    shell = " ".join(map(shlex.quote, command)) + " | true"
    done = subprocess.run(shell, shell=True, capture_output=True, env=env)
    assert (done.stdout, done.stderr) == (b"", b"")


def test_demo_samples_the_same_text_in_all_modes(capsys):
    assert demo("--temperature", "0.7", "--seed", "3", "--json") == 0
    sampled = json.loads(capsys.readouterr().out)
    assert sampled["lossless"] is True
    demo("--json")
    assert sampled["text"] != json.loads(capsys.readouterr().out)["text"]


def test_demo_fails_if_the_outputs_differ(capsys, monkeypatch):
    generate = cli.generate

    def broken(*arguments, mode, **how):
        run = generate(*arguments, mode=mode, **how)
        if mode == "chain":
            run.tokens[0][-1] ^= 1
        return run

    monkeypatch.setattr(cli, "generate", broken)
    assert demo("--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["lossless"] is False
    assert "DIFFERENT" in err


def test_demo_draws_the_first_round(tmp_path, capsys):
    path = tmp_path / "round.png"
    assert demo("--figure", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out


def test_the_default_prompt_is_held_out_text():
    prompt = cli._read_prompt(None)
    assert any(prompt in module for module in text.held_out_text().values())


def test_a_prompt_is_a_file_a_text_or_standard_input(tmp_path, monkeypatch):
    path = tmp_path / "prompt.py"
    path.write_bytes(b"import os\n")
    assert cli._read_prompt(str(path)) == b"import os\n"
    assert cli._read_prompt("x = a/b") == b"x = a/b"
    with open(path) as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert cli._read_prompt("-") == b"import os\n"


def test_the_shown_part_of_a_tree_keeps_the_accepted_path():
    parents = [-1, 0, 0, 0, 1, 3, 5]
    tree = ddtree_numba.tree.DraftTree.from_parents(parents)
    head, path = cli._head(tree, [0, 3, 5, 6], 1)
    assert head.token_ids[0].tolist() == [0, 1, 3, 5, 6]
    assert head.parents[0].tolist() == [-1, 0, 0, 2, 3]
    assert path == [0, 2, 3, 4]


# ---------------------------------------------------------------------- bad input


def fails(capsys, *arguments):
    """The command's one line of complaint; exit code 2, nothing on stdout."""
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1), err
    return err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "the following arguments are required"),
        (["paint"], "invalid choice: 'paint'"),
        (["demo", "--prompt", "no/such.txt"], "--prompt no/such.txt: no such file"),
        (["demo", "--prompt", "."], "--prompt .: a folder; expected a file, or text"),
        (["demo", "--prompt", ""], "--prompt is empty"),
        (["demo", "--prompt", "x" * 1000], "1001 tokens and 256 are to come"),
        (["demo", "--n-draft-nodes", "-1"], "--n-draft-nodes: -1; expected 0 … 1024"),
        (["demo", "--n-draft-nodes", "1025"], "1025; expected 0 … 1024"),
        (["demo", "--n-draft-nodes", "many"], "many; expected 0 … 1024"),
        (["demo", "--max-new-tokens", "0"], "0; expected 1 or more"),
        (["demo", "--temperature", "-1"], "-1; expected 0 or more"),
        (["demo", "--temperature", "nan"], "nan; expected 0 or more"),
        (["demo", "--temperature", "warm"], "warm; expected 0 or more"),
        (["demo", "--executor", "tpu"], "invalid choice: 'tpu'"),
        (["demo", "--figure", "no/such/dir.png"], "no such folder no/such"),
        (["demo", "--figure", "round.xyz"], "expected a name ending in png"),
        (["demo", "--seed", str(2**128)], "expected 0 … 3402823669"),
        (["sweep", "--max-new-tokens", "800"], "815 are to come; the model's limit"),
        (["sweep", "--out", __file__], "is a file; expected a folder"),
        (["refs", "--out", __file__], "is a file; expected a folder"),
        (["sweep", "--n-draft-nodes", "0"], "0; expected 1 … 1024"),
    ],
    ids=lambda x: " ".join(x)[:40] if isinstance(x, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, complaint, capsys):
    assert complaint in fails(capsys, *arguments)


def test_a_missing_gpu_is_said_before_the_work(capsys, monkeypatch):
    monkeypatch.setattr(cli.backend, "gpu_problem", lambda: "there is no GPU")
    message = fails(capsys, "demo", "--executor", "gpu")
    assert "executor='gpu' was asked for, but there is no GPU." in message
    monkeypatch.setenv("DDTREE_EXECUTOR", "gpu")
    assert "DDTREE_EXECUTOR='gpu' was asked for" in fails(capsys, "demo")


def test_a_figure_that_is_a_folder_is_refused(tmp_path, capsys):
    (tmp_path / "round.png").mkdir()
    message = fails(capsys, "demo", "--figure", str(tmp_path / "round.png"))
    assert "cannot be written" in message


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(cli.os, "access", lambda *_: False)
    for command in ("sweep", "refs"):
        message = fails(capsys, command, "--out", str(tmp_path))
        assert f"--out {tmp_path}: cannot be written" in message


@pytest.mark.parametrize("error", [OSError("No space left"), KeyboardInterrupt()])
def test_a_figure_is_written_whole_or_not_at_all(tmp_path, capsys, monkeypatch, error):
    from matplotlib.figure import Figure

    def half(self, path, **how):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(Figure, "savefig", half)
    path = tmp_path / "round.png"
    path.write_bytes(b"old")
    if isinstance(error, OSError):
        with pytest.raises(SystemExit, match="2"):
            demo("--figure", str(path))
        assert capsys.readouterr().err == "ddtree: error: No space left\n"
    else:
        assert demo("--figure", str(path)) == 130
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"]


def run_in_a_shell(how, *arguments):
    command = [sys.executable, "-m", "ddtree_numba", "demo", *arguments]
    shell = " ".join(map(shlex.quote, command)) + how
    done = subprocess.run(shell, shell=True, capture_output=True, encoding="utf-8")
    return done.returncode, done.stdout, done.stderr


def test_closed_streams_are_no_fault():
    assert run_in_a_shell(" >&-", *SHORT) == (0, "", "")
    code, out, _ = run_in_a_shell(" 2>&-", *SHORT, "--json")
    assert (code, json.loads(out)["lossless"]) == (0, True)
    code, out, err = run_in_a_shell(" <&-", "--prompt", "-")
    assert (code, out) == (2, "")
    assert err == "ddtree: error: --prompt -: standard input is closed\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full device")
def test_a_full_disk_is_one_line():
    code, _, err = run_in_a_shell(" >/dev/full", *SHORT)
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith("ddtree: error: ") and "space" in err


def test_an_argument_keeps_bytes_that_are_no_utf_8():
    assert cli._read_prompt(os.fsdecode(b"a\xff b")) == b"a\xff b"


@pytest.fixture
def interruptible():
    """Background jobs of a shell ignore interrupts, and so does what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_the_demo_is_quiet():
    command = [sys.executable, "-m", "ddtree_numba", "demo", "--max-new-tokens", "500"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=env, **how) as process:
        assert process.stdout.readline().startswith(b"ddtree_numba on")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert (process.returncode, err) == (130, b"")


def test_an_interrupt_while_the_command_is_loaded_is_quiet():
    code = (
        "import sys, types, ddtree_numba.__main__ as command\n"
        "def find_spec(name, *_):\n"
        "    if name == 'ddtree_numba.cli':\n"
        "        raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, types.SimpleNamespace(find_spec=find_spec))\n"
        "sys.exit(command.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A folder that the command takes the weights from."""
    from ddtree_numba.model import forward

    monkeypatch.setattr(forward, "data_path", lambda *_: tmp_path)
    return tmp_path


def test_missing_weights_are_named(weights, capsys):
    assert f"{weights / 'target.kdtr'}: no such weight file" in fails(capsys, "demo")


def test_damaged_weights_are_named(weights, capsys):
    path = weights / "target.kdtr"
    kdtr.save(path, {"config": np.zeros(80, np.uint8)})
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert "target.kdtr" in fails(capsys, "demo")


# ------------------------------------------------------------- the other commands


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_the_command_multiplies_in_one_thread():
    env = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    code = (
        "import os, ddtree_numba.__main__, numpy as np; x = np.ones((500, 500)); x @ x;"
        "print(len(os.listdir('/proc/self/task')))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, check=True)
    assert int(done.stdout) == 1


def test_the_number_of_threads_may_be_told_otherwise():
    code = "import os, ddtree_numba.__main__; print(os.environ['OMP_NUM_THREADS'])"
    env = {**os.environ, "OMP_NUM_THREADS": "3"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, check=True)
    assert int(done.stdout) == 3


def test_version_and_help(capsys):
    for arguments, expected in (
        (["--version"], f"ddtree_numba {ddtree_numba.__version__}"),
        (["--help"], "ddtree demo --json"),
        (["demo", "--help"], "exit code 1 if not"),
        (["sweep", "--help"], "tokens per round"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 0
        assert expected in " ".join(capsys.readouterr().out.split())


def test_sweep_writes_a_csv_and_a_figure(tmp_path, capsys):
    how = ["--prompts", "2", "--max-new-tokens", "6", "--n-draft-nodes", "1", "8"]
    out = tmp_path / "new" / "bench"
    code = cli.main(["sweep", *how, "--executor", "numpy", "--out", str(out)])
    assert code == 0
    assert (out / "sweep.csv").read_text().startswith("# ddtree_numba on numpy")
    frame = pd.read_csv(out / "sweep.csv", comment="#")
    assert frame["n_draft_nodes"].tolist() == [1, 8, 15] * 2
    assert frame["temperature"].tolist() == [0.0] * 3 + [0.7] * 3
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "tokens_per_round" in capsys.readouterr().out


def test_refs_writes_the_golden_cases_where_it_is_told(tmp_path, capsys, monkeypatch):
    from ddtree_numba import refs

    monkeypatch.setattr(refs, "RECIPES", dict(list(refs.RECIPES.items())[:2]))
    assert cli.main(["refs", "--out", str(tmp_path / "new")]) == 0
    assert len(list((tmp_path / "new").glob("*.kdtr"))) == 2
    assert f"2 golden cases written to {tmp_path}" in capsys.readouterr().out
