"""The programs in README and docs run as they are printed."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from remote_code import keep_modules
from torch import nn

from bellmask.assemble import train_run
from bellmask.cli import run_command
from bellmask.compare.plan import PlannedRun

ROOT = Path(__file__).parents[2]


def code_blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


class Network(nn.Module):
    """Bigram-like: embeds a token and its left neighbour."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens + 1, 16)
        self.head = nn.Linear(16, num_tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        return self.head(h + h.roll(1, 1))


def test_the_plain_loop_learns() -> None:
    plain, _, own_law = code_blocks("docs/your-own-loop.md", "python")
    torch.manual_seed(0)
    network = Network(5)
    rows = torch.arange(12).repeat(32, 1) % 5
    seen: list[float] = []

    def loader() -> Iterator[torch.Tensor]:
        for _ in range(150):
            yield rows
            seen.append(float(names["loss"].detach()))

    names: dict[str, Any] = {
        "network": network,
        "mask_id": 5,
        "loader": loader(),
        "optimizer": torch.optim.Adam(network.parameters(), lr=0.05),
    }
    exec(plain, names)
    assert seen[0] > 1.3, "at first about log 5, the scale of the NELBO"
    assert seen[-1] < 0.75 * seen[0]
    exec(own_law, {})


def test_the_hugging_face_trainer_trains(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, BertTokenizer, TrainingArguments

    _, trainer_code, _ = code_blocks("docs/your-own-loop.md", "python")
    names: dict[str, Any] = {}
    exec(trainer_code, names)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=16,
        )
    )  # fmt: skip
    row = {"input_ids": [5, 6, 7, 5, 6, 7, 0, 0], "attention_mask": [1] * 6 + [0] * 2}
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=30, per_device_train_batch_size=8, learning_rate=3e-2,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = names["BellTrainer"](
        model=model, args=arguments, train_dataset=[row] * 64, processing_class=tokenizer
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert np.mean(losses[-5:]) < 0.7 * losses[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_readmes_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text_file: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BELLMASK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "my.txt").write_text(text_file.read_text())
    blocks = code_blocks("README.md", "python")
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert (tmp_path / "runs" / "mine" / "metrics.jsonl").exists()


SHRINK = (
    "--train.steps 2 --model.num-layers 1 --model.width 16 --model.num-heads 2 "
    "--train.batch-size 4 --data.block-length 16 --validation.blocks 8"
).split()


PAGES = ("README.md", *(f"docs/{name}.md" for name in ("data", "comparing", "frameworks")))
PAGES += ("docs/exchange.md", "docs/zero-shot.md", "docs/adapting.md", "docs/chat.md")
PAGES += ("docs/downstream.md", "docs/judging.md", "docs/scaling.md")
PAGES_ON_RUNS = ("docs/sampling.md", "docs/generative-perplexity.md")
"""Pages that begin with runs of other pages."""


def commands(page: str) -> list[str]:
    lines = [
        line.split(" #")[0].strip()
        for block in code_blocks(page, "(?:bash|sh)?")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    # what torchrun starts is tried in one process here, and in several in tests/train
    lines = [re.sub(r"^torchrun .*? -m bellmask", "bellmask", line) for line in lines]
    return [line for line in lines if line.startswith("bellmask ")]


def smaller(args: list[str]) -> list[str]:
    """The same command on little text, with a small model, few steps and few draws."""
    args = ["my.txt" if a == "wikitext2" else a for a in args]
    is_toy = any(a.startswith("toy:") for a in args)
    if "--data.tokenizer" in args and not is_toy:  # the text is too small for 2048 tokens
        args[args.index("--data.tokenizer") + 1] = "bpe:300"
    if "--checkpoint.keep-steps" in args:
        place = args.index("--checkpoint.keep-steps") + 1
        args[place : place + 2] = ["1"]
    if args[0] == "train" and re.match("arm_|cpt_|sft_", args[1]):
        return [*args, *smaller_stage(args[1])]
    if "--sft.train" in args:
        return [*args, *SHRINK[: SHRINK.index("--data.block-length")]]
    if args[0] in ("train", "compare"):
        data = [] if "--data.train" in args else ["--data.train", "my.txt"]
        args += [*SHRINK, *data]
    if args[0] == "evaluate" and "--suite" in args:
        return smaller_suite(args)
    has_steps = not {"first_hitting", "count"} & set(args) and "runs/arm" not in args
    watched = "--fps 0 " if "--watch" in args else ""
    more = {
        "compare": "--seeds 1 --jobs 1 --quiet --validation.every",
        "demo": "--data my.txt --steps 2 --seeds 1 --jobs 1 --quiet",
        "generate": watched + ("--steps 4" if has_steps else ""),
    }
    args += more.get(args[0], "").split() + (["1 steps"] if args[0] == "compare" else [])
    if args[:2] == ["analyze", "gradient-radius"]:
        args += ["--draws", "2"]
    if args[:2] == ["analyze", "inefficient-masks"]:
        args += ["--length", "64"]
    if args[:2] == ["analyze", "estimators"]:
        args += "--blocks 4 --repeats 4 --draws 1 2".split()
    if args[:2] == ["analyze", "decompose"]:
        args += ["--rows", "8"]
    if args[:2] == ["analyze", "choices"]:
        args = args[: args.index("--tasks")]
        args += "--tasks piqa --data-dir benchmarks --questions 2 --repeats 4 --draws 1 2".split()
    if args[0] == "lm-eval":
        args = [*args[: args.index("--tasks")], *"--tasks piqa --data-dir benchmarks".split()]
    if args[0] == "judge":
        args += "--seeds 1 --length 8 --steps 2".split()
    return args


def smaller_stage(name: str) -> list[str]:
    """Sec. 5.3 in two steps each; examples have to fit a row."""
    text = [] if name.startswith("sft_") else ["--data.train", "my.txt"]
    own = ["--data.tokenizer", "bpe:300"] if name.startswith("arm_") else []
    length = ["--data.block-length", "64" if name.startswith("sft_") else "16"]
    few = "--train.steps 2 --train.batch-size 4 --validation.blocks 8".split()
    return [*text, *own, *length, *few]


def smaller_suite(args: list[str]) -> list[str]:
    """A suite on text that is here, with a scorer that is here."""
    runs = [arg for arg in args if arg.startswith("runs/") and arg != "runs/arm"]
    if "paper" in args:
        few = "--tasks piqa --data-dir benchmarks --seeds 2 --draws 2"
    elif "zero-shot" in args:
        few = "--corpora ptb --from ptb=my.txt --blocks 4 --seeds 2 --draws 2"
    else:
        few = "--scorer runs/arm --num 2 --seeds 2 --nfe 2 3"
    suite = args[args.index("--suite") + 1]
    return ["evaluate", *runs, "--suite", suite, *few.split()]


def write_benchmarks(folder: Path) -> None:
    """A task's records: a goal and two ways to reach it."""
    folder.mkdir()
    ways = [("Boil it.", "Freeze it, then wait."), ("Use a spoon.", "Use a very long ladder.")]
    records = [
        {"goal": f"Make tea, cup {n}", "sol1": ways[n % 2][0], "sol2": ways[n % 2][1], "label": 0}
        for n in range(4)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "piqa.jsonl").write_text(lines, encoding="utf-8")


def train_here(runs: Sequence[PlannedRun], **_: Any) -> dict[Path, str]:
    """The trainings of a comparison in this process: starting one for each would take minutes."""
    for run in runs:
        train_run(run.config, run.folder, resume="auto", is_quiet=True)
    return {}


@pytest.mark.parametrize("page", [*PAGES, *PAGES_ON_RUNS])
def test_the_commands_of_the_pages_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text_file: Path
) -> None:
    """As printed, but for a smaller model, fewer steps and text that needs no network."""
    keep_modules(monkeypatch, tmp_path)
    monkeypatch.setattr("bellmask.compare.comparison.execute", train_here)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BELLMASK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "my.txt").write_text(text_file.read_text())
    (tmp_path / "prompts.txt").write_text("the \na \n")
    write_benchmarks(tmp_path / "benchmarks")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a b c\n"))  # what is said in a chat
    found = [shlex.split(command)[1:] for command in commands(page)]
    assert found
    if page == "docs/chat.md":
        few = "--sft.train toy:reverse --sft.round-to 8 --data.block-length 96".split()
        runs = [["train", f"tiny{v}", "--out", f"runs/sft{v}", *few] for v in ("", "_base")]
        found = runs + found
    if page in PAGES_ON_RUNS:
        names = ("base", "bell", "arm")
        found = [["train", f"tiny_{name}", "--out", f"runs/{name}"] for name in names] + found
    for args in found:
        if "--data.from" not in args:  # the paper's runs, on text of the reader's own
            assert run_command(smaller(args)) == 0, args
    names: dict[str, Any] = {}
    for block in code_blocks(page, "python") if page != "README.md" else []:
        exec(block, names)


def test_the_tree_in_the_readme_names_every_file() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "bellmask").rglob("*.py"):
        if path.name != "__init__.py":
            assert re.search(rf"\b{re.escape(path.name)}\b", readme), path.name
    for name in re.findall(r"^    ?(?:  )?([a-z_]+\.py) ", readme, flags=re.MULTILINE):
        assert list((ROOT / "bellmask").rglob(name)), f"{name} is in the README only"


def test_python_is_not_older_than_promised() -> None:
    assert sys.version_info >= (3, 11)
