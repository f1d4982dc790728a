"""The commands and programs of README and docs run as they are printed, only smaller.

Every ``bellmask`` line of a page's shell blocks runs in this process, with options appended that
make it quick, in a folder with a small text (``my.txt``), benchmarks, and runs of the zoo under the
names that the pages use; a command that trains one of these makes it anew.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import bellmask
from remote_code import keep_modules
from torch import nn
from train_here import train_here

from bellmask.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
FIRST_PAGES = ("README.md", "docs/commands.md")
"""Pages whose commands always run; those of the others in ``make test-full``."""
OTHER_PAGES = [page for page in PAGES if page not in (*FIRST_PAGES, "docs/your-own-loop.md")]
RUNS = {name: name for name in ("base", "bell", "arm", "sigma_arm", "aoarm", "sft")}
RUNS |= {"arm_tiny": "gpt2", "cpt_tiny": "cpt", "sft_tiny": "sft", "run": "bell"}
RUNS |= {"cpt_tiny_base": "cpt", "sft_tiny_base": "sft"}

FEW_STEPS = "--train.steps 2 --train.batch-size 4 --validation.blocks 8 --quiet"
NARROW = "--model.num-layers 1 --model.width 16 --model.num-heads 2"
SMALLER = {
    "demo": "--data my.txt --steps 2 --seeds 1 --jobs 1 --quiet",
    "compare": f"{FEW_STEPS} {NARROW} --data.train my.txt --data.block-length 16 "
    "--validation.every 1 --seeds 1 --jobs 1",
    "evaluate": "--blocks 4 --draws 2",
    "zero-shot": "--corpora ptb --from ptb=my.txt --blocks 4 --seeds 2 --draws 2",
    "generative": "--scorer runs/arm --num 2 --seeds 2 --nfe 2 3",
    "paper": "--tasks piqa --data-dir tasks --limit 2 --seeds 2 --draws 2",
    "lm-eval": "--tasks piqa --data-dir tasks --limit 2 --draws 2",
    "judge": "--seeds 1 --length 8 --steps 2",
    "prepare": "--data.tokenizer bpe:300",
    "gradient-radius": "--draws 2",
    "inefficient-masks": "--length 64",
    "context-curve": "--blocks 4",
    "context-drop": "--blocks 4",
    "decompose": "--rows 8",
}
"""What is appended to a command, its suite or its analysis."""


def code_blocks(page, *languages):
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [code for language, code in blocks if language in languages]


def commands_of(page):
    """Arguments of every command; what torchrun starts is tried in one process."""
    for block in code_blocks(page, "bash", "sh", ""):
        for line in block.replace("\\\n", " ").splitlines():
            words = re.sub(r"^torchrun .*? -m bellmask", "bellmask", line.split(" #")[0].strip())
            if words.startswith("bellmask ") and "--data.from" not in words:
                yield shlex.split(words)[1:]


def value_of(args, option):
    return args[args.index(option) + 1] if option in args else None


def smaller_training(args):
    """A small model on little text; a start's options are those of the zoo's runs."""
    is_stage = re.match("arm_|cpt_|sft_", args[1])
    is_tuned = args[1].startswith("sft_") or "--sft.train" in args
    few = f"{FEW_STEPS} --data.block-length {64 if is_tuned else 16}"
    if args[1].startswith("arm_"):
        few += " --start.architecture gpt2.json --data.tokenizer bytes"
    elif not is_stage and "--start.architecture" not in args and not args[1].endswith(".json"):
        few += f" {NARROW}"
    if not is_tuned and "toy:sticky" not in args:
        few += " --data.train my.txt"
    if value_of(args, "--data.tokenizer") == "bpe:2048":
        few += " --data.tokenizer bpe:300"
    if "--checkpoint.keep-steps" in args:
        few += " --checkpoint.keep-steps 1"
    return few


def smaller(args):
    """The same command with options appended that make it quick."""
    args = ["my.txt" if arg == "wikitext2" else arg for arg in args]
    kind = args[1] if args[0] == "analyze" else args[0]
    kind = value_of(args, "--suite") if "--suite" in args and kind == "evaluate" else kind
    more = smaller_training(args) if kind == "train" else SMALLER.get(kind, "")
    if "--watch" in args:
        more += " --fps 0"
    return [*args, *more.split()]


def run_page(page, place, zoo, monkeypatch):
    """All commands, then all programs of a page."""
    keep_modules(monkeypatch, place)
    train_here(monkeypatch)
    monkeypatch.chdir(place)
    monkeypatch.setenv("BELLMASK_CACHE", str(place / "cache"))
    for name, stored in RUNS.items():
        shutil.copytree(zoo / stored, place / "runs" / name)
    shutil.copytree(zoo / "tasks", "tasks")
    shutil.copy(zoo / "gpt2.json", "gpt2.json")
    shutil.copy(zoo / "text.txt", "my.txt")
    Path("prompts.txt").write_text("the \na \n")
    Path("examples").symlink_to(ROOT / "examples")
    commands = list(commands_of(page))
    for args in commands:
        if args[0] == "train" and "--resume" not in args:
            shutil.rmtree(value_of(args, "--out") or "none", ignore_errors=True)
        monkeypatch.setattr(sys, "stdin", io.StringIO("a b c\n"))  # what is said in a chat
        said = bellmask(*smaller(args))
        assert said.code == 0, f"{shlex.join(smaller(args))}\n{said.text}"
    names = {}
    programs = code_blocks(page, "python")
    for program in programs:
        exec(program, names)
    return len(commands), len(programs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("page", FIRST_PAGES)
def test_the_first_pages_run(page, tmp_path, zoo, monkeypatch):
    num_commands, num_programs = run_page(page, tmp_path, zoo, monkeypatch)
    assert num_commands > 0
    assert num_programs > 0


def test_every_command_has_an_example():
    assert {args[0] for args in commands_of("docs/commands.md")} == set(COMMANDS)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("page", OTHER_PAGES)
def test_the_docs_run(page, tmp_path, zoo, monkeypatch):
    run_page(page, tmp_path, zoo, monkeypatch)


class Network(nn.Module):
    """Bigram-like: embeds a token and its left neighbor."""

    def __init__(self, num_tokens):
        super().__init__()
        self.embedding = nn.Embedding(num_tokens + 1, 16)
        self.head = nn.Linear(16, num_tokens)

    def forward(self, x):
        h = self.embedding(x)
        return self.head(h + h.roll(1, 1))


def test_the_plain_loop_learns():
    plain, tuned, _, own_law = code_blocks("docs/your-own-loop.md", "python")
    torch.manual_seed(0)
    network, rows, seen = Network(5), torch.arange(12).repeat(32, 1) % 5, []

    def loader():
        for _ in range(150):
            yield rows
            seen.append(float(names["loss"].detach()))

    names = {"network": network, "mask_id": 5, "loader": loader()}
    names["optimizer"] = torch.optim.Adam(network.parameters(), lr=0.05)
    exec(plain, names)
    assert seen[0] > 1.3, "at first about log 5, the scale of the NELBO"
    assert seen[-1] < 0.75 * seen[0]
    exec(own_law, {})
    network = Network(5)  # anew, with the law that tunes itself in the same loop
    names |= {"network": network, "loader": loader(), "probe_rows": rows[:16]}
    names["optimizer"] = torch.optim.Adam(network.parameters(), lr=0.05)
    exec(tuned + plain.partition("B strata\n")[2], names)
    assert seen[-1] < 0.75 * seen[150]
    assert names["law"].parameters != [0.5, 0.1]


@pytest.mark.long
def test_the_hugging_face_trainer_trains(tmp_path, monkeypatch):
    program = code_blocks("docs/your-own-loop.md", "python")[2]
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(program.replace("max_steps=30", "max_steps=30, logging_steps=1, use_cpu=True"), names)
    trainer = names["trainer"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert np.mean(losses[-5:]) < 0.7 * losses[0]
