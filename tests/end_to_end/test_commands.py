"""The commands as a user runs them: codes, refusals, help, streams. Numbers are in tests/frozen."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
import torch
from commands import bellmask, refuses, succeeds

from bellmask.cli import COMMANDS, run_command
from bellmask.storage.run_folder import read_metrics
from bellmask.train.train_run import train_run


def test_a_run_says_how_it_goes_and_can_be_repeated_from_its_config(copy_run, tmp_path):
    """Exactly: noise and order of the data are functions of the seed."""
    config = copy_run("base") / "config.json"
    few = "--train.steps 4 --log.every 1 --validation.every 2 --validation.samples-every 4".split()
    said = succeeds("train", config, *few, "--out", tmp_path / "one")
    lines = said.out.splitlines()
    assert [line.split()[1] for line in lines if " tokens/s" in line] == ["1", "2", "3", "4"]
    *_, last = (line for line in lines if "validation nll" in line)
    assert last.endswith(where := " blocks of the validation text")
    assert lines[-1].startswith("done: step 4, validation NLL")
    assert where in lines[-1]
    succeeds("train", tmp_path / "one" / "config.json", "--out", tmp_path / "two", "--quiet")
    a, b = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    kinds = ["train", "train", "validation", "train", "train", "validation"]
    assert [line["kind"] for line in a] == kinds
    assert [r.get("loss", r.get("nll")) for r in a] == [r.get("loss", r.get("nll")) for r in b]
    assert (tmp_path / "one/samples/step-000000004.txt").read_text().count("--------") == 3


def test_samples_do_not_depend_on_the_batch(zoo, tmp_path):
    """Prompts that are the same get other numbers, so other noise; given tokens stay."""
    (tmp_path / "prompts.txt").write_text("ab\nab\n")
    line = (
        f"generate {zoo / 'bell'} --prompts {tmp_path}/prompts.txt --num 2 --format jsonl".split()
    )
    whole, parts = (succeeds(*line, "--batch-size", size) for size in (4, 1))
    assert whole.out == parts.out
    rows = [json.loads(line) for line in whole.out.splitlines()]
    assert [(row["sample"], row["prompt"], row["ids"][:2]) for row in rows] == [
        (number, "ab", [97, 98]) for number in range(4)
    ]
    assert len({tuple(row["ids"]) for row in rows}) == 4


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ("trian tiny", "'trian'; did you mean 'train'?"),
        ("train", "preset"),
        ("resume", "needs a run folder"),
        ("resume nowhere", "nowhere is not a run folder"),
        ("resume {run} --optim.lr 1", "optim.lr: was"),
        ("train tinny", "'tinny'; did you mean 'tiny'"),
        ("train xyzzy", "preset 'xyzzy' ('bellmask presets' lists all)"),
        ("train tiny --data my.txt", "unknown option --data; did you mean --data.train?"),
        ("train tiny --train.steps 1e3", "--train.steps needs a whole number; write 1000, not 1e3"),
        (
            "train tiny --train.microbatch-size many",
            "--train.microbatch-size needs None or a whole number or auto, not 'many'",
        ),
        ("train tiny --train.steps 1.5", "--train.steps needs a whole number, not '1.5'"),
        ("train tiny --optim.lr abc", "--optim.lr needs a number, not 'abc'"),
        ("train tiny --train.steps", "--train.steps needs a value"),
        ("train tiny --optim.betas 0.9", "--optim.betas needs 2 values"),
        ("train tiny --optim.lrr 3", "unknown option --optim.lrr; did you mean --optim.lr?"),
        ("train tiny --law.mu 0.4 extra", "unknown argument extra"),
        ("generate RUN --rule confident", "did you mean 'most_confident'?"),
        ("evaluate", "RUN is missing"),
        ("train tiny --law gausian", "'gausian'; did you mean 'gaussian'?"),
        ("train tiny --optim.lrr 1", "--optim.lr"),
        ("train tiny --data.train none.txt", "none.txt"),
        ("train tiny --data.tokenizer some/folder/none", "some/folder/none"),
        ("train tiny --config none.json", "none.json"),
        ("train tiny --out", "--out needs a value"),
        ("train tiny --tyro-print-completion bash", "--tyro-print-completion"),
        ("prepare wikitext2 --optim.lr 3", "--optim.lr"),
        ("compare tiny --seeds 3 base bell", "base"),
        ("train tiny --resume maybe", "'maybe'"),
        (
            "train tiny --train.device cuda --data.train toy:sticky --data.tokenizer symbols:8",
            "GPU",
        ),
        ("evaluate", "RUN"),
        ("evaluate nowhere", "nowhere"),
        ("evaluate {run} --checkpoint 5", "'5'"),
        ("evaluate {run} --draws 0", "--draws"),
        ("evaluate {run} --data none.txt", "none.txt"),
        ("evaluate {run} --wieghts raw", "--weights"),
        ("generate {run} --canvas abc", "gap"),
        ("generate {run} --canvas a[MASK] --length 4", "--length"),
        ("generate {run} --prefix 0123456789abcdef", "none are left to generate"),
        ("generate {run} --temperature -1", "--temperature"),
        ("generate {run} --out none/x.txt", "none"),
        ("generate {run} --out {run}", "{run}"),
        ("generate {run} --trace x.json --out x.json", "same file"),
        ("generate {run} --guidance 1", "guidance"),
        ("generate {run} {run}", "--side-by-side"),
        ("generate {run} --fps 3", "--watch"),
        ("generate {run} {run} --side-by-side", "twice"),
        ("evaluate {run} --suite zero-shot --suite generative", "--suite"),
        ("evaluate {run} --suite zeroshot", "'zero-shot'"),
        ("evaluate {run} --suite generative --guidance 1", "--guidance"),
        ("evaluate {run} --suite zero-shot --corpora ptb --from lm1b=x", "--corpora"),
        ("config shw tiny", "'show'"),
        ("config diff tiny", "config diff"),
        ("presets all", "all"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing_behind(args, names, zoo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = zoo / "bell"
    refuses(*shlex.split(args.format(run=run)), names=names.format(run=run))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command):
    out = succeeds(command, "--help").out
    assert "example" in out.lower()
    assert f"bellmask {command}" in out
    assert command in succeeds("--help").out


@pytest.mark.parametrize("words", ["prepare wikitext2", "data show wikitext2", "train small"])
def test_help_after_a_name(words):
    assert "--data.block-length" in succeeds(*words.split(), "--help").out


def test_help_shows_no_none(monkeypatch):
    out = succeeds("train", "tiny", "--help").out
    assert "--start.model STR" in out
    assert "{None" not in out
    words = " ".join(out.replace("│", " ").split())
    assert "(default: None)" not in words
    assert "(default: )" not in words
    assert "(default: 64)" in words


def test_a_message_comes_before_torchrun_ends_all(monkeypatch):
    """Processes that say nothing wait for the one that does."""
    slept = []
    monkeypatch.setattr("bellmask.cli.time.sleep", slept.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert "nothing" in bellmask("nothing").err
    assert not slept
    monkeypatch.setenv("LOCAL_RANK", "1")
    said = bellmask("nothing")
    assert (said.code, said.err, len(slept)) == (2, "", 1)


def test_a_wrong_command_line_ends_a_process_with_code_2(warm):
    process = warm.start(["train", "tiny", "--law", "gausian"])
    assert process.wait() == 2
    assert process.text().startswith("error: ")
    assert process.text().count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 99 bytes\nframes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
    ],
)
def test_memory_that_runs_out_is_one_message(error, monkeypatch):
    """Also of a process that otherwise says nothing."""

    def fail(args):
        raise error

    monkeypatch.setattr("bellmask.train.train.main", fail)
    monkeypatch.setenv("LOCAL_RANK", "1")
    said = bellmask("train")
    assert said.code == 1
    assert said.err.startswith("error: not enough memory (")
    assert "--train.microbatch-size" in said.err
    assert "frames" not in said.err
    monkeypatch.setattr("bellmask.train.train.main", lambda args: torch.zeros(2).view(3))
    with pytest.raises(RuntimeError, match="shape"):
        run_command(["train"])


def test_config_show_and_diff():
    shown = json.loads(succeeds("config", "show", "lm1b", "--optim.weight_decay=0.5").out)
    assert shown["optim"]["weight_decay"] == 0.5
    told = "note: the network will be that of runs/arm_tiny, not of the model section"
    assert told in succeeds("config", "show", "cpt_tiny").err
    lines = succeeds("config", "diff", "tiny_base", "tiny_bell").out.splitlines()
    names = ["law.name", "law.mu", "law.scale", "objective.name"]
    assert [line.split(":")[0] for line in lines] == names
    assert lines[3] == 'objective.name: "nelbo" -> "bell"'


def test_trackers_get_the_metrics(tmp_path, small_config):
    config = small_config("--log.trackers", "tensorboard", "--train.steps", "2")
    train_run(config, tmp_path / "run", is_quiet=True)
    (events,) = (tmp_path / "run" / "tensorboard").glob("events*")
    assert events.stat().st_size > 200


def test_importing_is_light_and_training_needs_nothing_optional(tmp_path, zoo):
    """In a bare process: nothing optional or heavy, no files, no arguments, no noise drawn."""
    program = f"""
import os, sys, threading
before = set(sys.modules)
sys.argv = ["prog", "--law", "nonsense"]
import bellmask
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
for heavy in ("torch", "transformers", "matplotlib", "rich", "tyro", "numpy", "wandb"):
    assert heavy not in new, heavy
assert threading.active_count() == 1
import torch
state = torch.random.get_rng_state()
for name in bellmask.__all__:
    getattr(bellmask, name)
assert torch.equal(state, torch.random.get_rng_state())
new = {{name.split(".")[0] for name in set(sys.modules)}}
optional = ("transformers", "tensorboard", "wandb", "trackio", "datasets", "scipy")
assert not new & set(optional)
assert not os.listdir()

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in optional:
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
from bellmask.cli import run_command
sys.exit(run_command("train {zoo / "base" / "config.json"} --train.steps 1 --out run".split()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").exists()
