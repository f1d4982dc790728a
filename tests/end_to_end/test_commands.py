"""The commands as a user runs them, looking at code, words and files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bellmask.assemble import train_run
from bellmask.cli import COMMANDS, run_command
from bellmask.config import RunConfig
from bellmask.records import read_metrics

SMALL = (
    "--model.num-layers 2 --model.width 16 --model.num-heads 2 --train.batch-size 8 "
    "--data.block-length 16 --validation.blocks 32 --validation.every 4 --log.every 2 "
    "--checkpoint.every 4"
).split()


Command = Callable[..., tuple[str, str]]


def bellmask(*args: str, code: int = 0) -> tuple[str, str]:
    """In another process, which takes seconds to start."""
    done = subprocess.run(
        [sys.executable, "-m", "bellmask", *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
    )
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Command:
    """In this process."""

    def run(*args: str) -> tuple[str, str]:
        capsys.readouterr()
        assert run_command([*args]) == 0
        return capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def trained(
    small_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    options = ["--train.steps", "8", "--validation.every", "4", "--checkpoint.every", "4"]
    train_run(small_config(*options, "--validation.samples-every", "8"), folder, is_quiet=True)
    return folder


def test_train_evaluate_generate(tmp_path: Path, text_file: Path) -> None:
    run = str(tmp_path / "run")
    data = ["--data.train", str(text_file), "--data.cache", str(tmp_path / "cache")]
    out, _ = bellmask("train", "tiny", *SMALL, *data, "--train.steps", "8", "--out", run)
    assert "validation nll" in out
    assert "done: step 8, validation NLL" in out
    files = {p.name for p in Path(run).iterdir()}
    assert files >= {"config.json", "run.json", "metrics.jsonl", "checkpoints", "validation"}
    kinds = [(r["kind"], r["step"]) for r in read_metrics(Path(run) / "metrics.jsonl")]
    first = [("train", 2), ("train", 4), ("validation", 4)]
    assert kinds == [*first, ("train", 6), ("train", 8), ("validation", 8)]
    out, _ = bellmask("evaluate", run, "--blocks", "64", "--draws", "2")
    assert "NELBO, nats per token" in out
    assert "unigram cross-entropy" in out
    report = json.loads((Path(run) / "evaluation" / "evaluation.json").read_text())
    assert report["nll_se"] > 0
    assert report["exact_contexts"][0]["low"] == 0
    assert (Path(run) / "evaluation" / "context_curve.png").stat().st_size > 10_000
    out, _ = bellmask("generate", run, "--num", "3", "--steps", "4", "--format", "jsonl")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["sample"] for row in rows] == [0, 1, 2]
    assert all(len(row["ids"]) == 16 for row in rows)


def test_a_run_can_be_repeated_from_its_config(
    trained: Path, tmp_path: Path, here: Command
) -> None:
    again = tmp_path / "again"
    here("train", str(trained / "config.json"), "--out", str(again), "--quiet")
    a, b = (read_metrics(f / "metrics.jsonl") for f in (trained, again))
    assert [r.get("loss", r.get("nll")) for r in a] == [r.get("loss", r.get("nll")) for r in b]


def test_samples_of_prompts_are_counted_through(
    trained: Path, tmp_path: Path, here: Command
) -> None:
    """The same beginning twice: other numbers, other noise."""
    (tmp_path / "prompts.txt").write_text("ab\nab\n")
    file = str(tmp_path / "prompts.txt")
    asked = ["generate", str(trained), "--prompts", file, "--num", "2", "--format", "jsonl"]
    rows = [json.loads(line) for line in here(*asked)[0].splitlines()]
    assert [(row["sample"], row["prompt"]) for row in rows] == [(i, "ab") for i in range(4)]
    assert len({tuple(row["ids"]) for row in rows}) == 4


def test_given_tokens_are_kept_and_samples_do_not_depend_on_the_batch(
    trained: Path, here: Command
) -> None:
    out, _ = here("generate", str(trained), "--canvas", "The [MASK*4] cat [MASK*2].")
    assert out.startswith("The ")
    assert " cat " in out
    out, _ = here("generate", str(trained), "--prefix", "abc", "--length", "9", "--format", "jsonl")
    assert json.loads(out)["ids"][:3] == [97, 98, 99]
    many = ["generate", str(trained), "--num", "5", "--format", "jsonl", "--steps", "6"]
    (out, cost), (same, more) = here(*many), here(*many, "--batch-size", "2")
    assert out == same
    calls = [int(said.splitlines()[-1].split(" network calls, ")[0]) for said in (cost, more)]
    assert calls[0] <= 6 < calls[1] <= 18
    assert cost.split(", ")[-1] == more.split(", ")[-1]
    assert (trained / "samples" / "step-000000008.txt").read_text().count("--------") == 3


def test_output_goes_to_a_file(trained: Path, tmp_path: Path, here: Command) -> None:
    target = tmp_path / "samples.txt"
    out, _ = here("generate", str(trained), "--output", str(target), "--steps", "2")
    assert out == ""
    assert target.read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("trian tiny", "unknown command 'trian'; did you mean 'train'?"),
        ("train", "needs a preset first: tiny"),
        ("train tinny", "unknown preset 'tinny'; did you mean 'tiny'"),
        ("train tiny --law gausian", "unknown time law 'gausian'; did you mean 'gaussian'?"),
        ("train tiny --optim.lrr 1", "--optim.lr"),
        ("train tiny --data.train none.txt", "there is no file none.txt"),
        ("train tiny --data.tokenizer some/folder/none", "there is no tokenizer folder"),
        ("train tiny --config none.json", "there is no config file none.json"),
        ("train none.json", "there is no config file none.json"),
        ("train tiny --out", "--out needs a value"),
        ("train tiny --resume maybe", "unknown resume mode 'maybe'"),
        ("train tiny --train.device cuda --data.train x.txt", "no GPU"),
        ("train lm1b --data.train x.txt --objective nelbo --law dirac", "dirac has none"),
        ("evaluate", "Missing from bellmask evaluate: RUN"),
        ("evaluate nowhere", "there is no folder nowhere"),
        ("evaluate {run} --checkpoint 5", "no checkpoint '5'"),
        ("evaluate {run} --draws 0", "must be at least 1"),
        ("evaluate {run} --data none.txt", "there is no file none.txt"),
        ("evaluate {run} --wieghts raw", "--weights"),
        ("generate {run} --canvas abc", "has no gap"),
        ("generate {run} --canvas a[MASK] --length 4", "goes with neither"),
        ("generate {run} --prefix 0123456789abcdef", "nothing is left to generate"),
        ("generate {run} --temperature -1", "must not be negative"),
        ("generate {run} --output none/x.txt", "there is no folder none"),
        ("generate {run} --output {run}", "is a folder; give a file"),
        ("generate {run} --trace x.json --output x.json", "the same file"),
        ("generate {run} --fps 3", "--fps goes with --watch"),
        ("generate {run} --guidance 1", "nothing is given here"),
        ("generate {run} --steps 1000000000000", "from 1 to 1,000,000"),
        ("generate {run} {run}", "--side-by-side"),
        ("generate {run} {run} --side-by-side", "given twice"),
        ("evaluate {run} --suite zero-shot --suite generative", "one --suite at a time"),
        ("evaluate {run} --suite zeroshot", "did you mean 'zero-shot'"),
        ("evaluate {run} --suite zero-shot --out {run}/config.json", "is a file; give a folder"),
        ("evaluate {run} --suite generative --guidance 1", "nothing is given here"),
        ("evaluate {run} --suite zero-shot --corpora ptb --from lm1b=x", "not among --corpora"),
        ("config shw tiny", "did you mean 'show'"),
        ("config diff tiny", "needs two"),
        ("presets all", "takes no arguments"),
    ],
)
def test_bad_input_gets_one_message_and_exit_code_2(
    args: str,
    message: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(p for p in tmp_path.rglob("*"))
    assert run_command(args.format(run=trained).split()) == 2
    err = capsys.readouterr().err
    assert message in " ".join(err.split())
    assert err.count("error:") == 1
    assert sorted(p for p in tmp_path.rglob("*")) == before, "nothing is left behind"


@pytest.mark.parametrize("command", ["train", "evaluate", "generate", "config", "presets"])
def test_every_command_has_help_with_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert run_command([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "example" in out.lower()
    assert f"bellmask {command}" in out
    assert run_command(["--help"]) == 0
    assert command in capsys.readouterr().out


def test_a_wrong_command_line_ends_a_process_with_code_2_and_no_traceback() -> None:
    _, err = bellmask("train", "tiny", "--law", "gausian", code=2)
    assert err == (
        "error: unknown time law 'gausian'; did you mean 'gaussian'? "
        "(dirac, gaussian, laplace, uniform)\n"
    )


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 99 bytes\nframes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
    ],
)
def test_memory_that_runs_out_is_one_message(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a process that otherwise says nothing."""

    def fail(args: list[str]) -> int:
        raise error

    monkeypatch.setitem(COMMANDS, "train", fail)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_command(["train"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: not enough memory (")
    assert "--train.microbatch-size" in said
    assert "frames" not in said
    monkeypatch.setitem(COMMANDS, "train", lambda args: torch.zeros(2).view(3))
    with pytest.raises(RuntimeError, match="shape"):
        run_command(["train"])


def test_config_show_and_diff(here: Command) -> None:
    out, _ = here("config", "show", "lm1b", "--optim.lr", "1e-4")
    assert json.loads(out)["optim"]["lr"] == 1e-4
    out, _ = here("config", "diff", "tiny_base", "tiny_bell")
    assert out.splitlines() == [
        'law.name: "uniform" -> "gaussian"',
        "law.mu: null -> 0.5",
        "law.scale: null -> 0.1",
        'objective.name: "nelbo" -> "bell"',
    ]


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path, text_file: Path, here: Command) -> None:
    run = tmp_path / "run"
    args = [
        "train", "tiny", *SMALL, "--data.train", str(text_file), "--data.cache", str(tmp_path),
        "--train.steps", "100000", "--out", str(run),
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "bellmask", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not read_metrics(run / "metrics.jsonl") and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "--resume auto" in err
    (latest,) = (run / "checkpoints" / "latest").read_text().split()
    assert (run / "checkpoints" / latest / "manifest.json").exists()
    step = int(latest.split("-")[1])
    resumed = [*args, "--resume", "auto", "--train.steps", str(step + 2)]
    out, _ = here(*resumed)
    assert f"resuming from step {step}" in out
    assert f"done: step {step + 2}" in out


def test_trackers_get_the_metrics(tmp_path: Path, small_config: Callable[..., RunConfig]) -> None:
    config = small_config("--log.trackers", "tensorboard", "--train.steps", "2")
    train_run(config, tmp_path / "run", is_quiet=True)
    events = list((tmp_path / "run" / "tensorboard").glob("events*"))
    assert len(events) == 1
    assert events[0].stat().st_size > 200


def test_importing_is_light_and_has_no_side_effects(tmp_path: Path) -> None:
    """In a bare process: nothing optional or heavy, no files, no arguments, no noise drawn."""
    program = """
import sys, threading
before = set(sys.modules)
sys.argv = ["prog", "--law", "nonsense"]
import bellmask
new = {name.split(".")[0] for name in set(sys.modules) - before}
for heavy in ("torch", "transformers", "matplotlib", "rich", "tyro", "numpy", "wandb"):
    assert heavy not in new, heavy
assert threading.active_count() == 1
import torch
state = torch.random.get_rng_state()
for name in bellmask.__all__:
    getattr(bellmask, name)
assert torch.equal(state, torch.random.get_rng_state())
new = {name.split(".")[0] for name in set(sys.modules)}
for optional in ("transformers", "wandb", "tensorboard", "trackio", "datasets"):
    assert optional not in new, optional
print("light")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.strip() == "light", done.stderr
    assert not list(tmp_path.iterdir())


def test_training_needs_no_optional_package(tmp_path: Path, text_file: Path) -> None:
    program = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "tensorboard", "wandb", "trackio", "scipy"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from bellmask.cli import run_command
sys.exit(run_command("train tiny {" ".join(SMALL)} --train.steps 1 --data.train {text_file} "
    "--data.cache cache --out run --quiet".split()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
