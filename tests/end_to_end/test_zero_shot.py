"""``bellmask evaluate --suite zero-shot`` as a person types it."""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bellmask.assemble import train_run
from bellmask.cli import run_command
from bellmask.commands.options import parse_command
from bellmask.commands.zero_shot import SETS, ZeroShotOptions
from bellmask.config import RunConfig
from bellmask.data.blocks import Blocks
from bellmask.data.packing import Row
from bellmask.data.sources import file_source
from bellmask.errors import UserError
from bellmask.run import Run, load_run

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
Command = Callable[[str], tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs(small_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, bell and arm, and two texts."""
    folder = tmp_path_factory.mktemp("runs")
    kinds = {
        "base": "--objective nelbo --law uniform",
        "bell": "--train.seed 1",
        "arm": "--framework arm",
    }
    for name, more in kinds.items():
        config = small_config("--train.steps", "4", *more.split())
        train_run(config, folder / name, is_quiet=True)
    lines = "".join(f"item {n} : it earned $ N million <unk> N times\n" for n in range(60))
    (folder / "ptb.txt").write_text(lines, encoding="utf-8")
    rows = [json.dumps({"text": f"“Number {n},” she said."}) for n in range(60)]
    (folder / "lambada.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder


@pytest.fixture
def command(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """``command("bell --blocks 8")`` beside the runs, without a network: (code, stdout, stderr)."""

    def unreachable(name: str, *_: Any, **__: Any) -> None:
        raise UserError(f"cannot reach {name} on the hub")

    monkeypatch.chdir(runs)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("bellmask.data.catalogue.hub_source", unreachable)

    def run(text: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = run_command(["evaluate", *shlex.split(text), "--suite", "zero-shot"])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return (code, *capsys.readouterr())

    return run


TWO = "--corpora ptb lambada --from ptb=ptb.txt --from lambada=lambada.jsonl"


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "zero_shot.json").read_text(encoding="utf-8"))


def test_three_runs_on_two_sets(runs: Path, command: Command) -> None:
    code, out, err = command(f"base bell arm {TWO} --blocks 20 --precision 0.2 --seeds 3")
    assert (code, err) == (0, "")
    found = read(runs / "runs" / "zero-shot")
    assert (found["seeds"], found["eos"]) == ([1234, 1235, 1236], "mdlm")
    assert found["draws"] == found["pilot"]["draws"] == 2
    assert f"pilot: {found['draws_reason']}" in out
    assert [text["name"] for text in found["sets"]] == ["ptb", "lambada"]
    for text in found["sets"]:
        assert set(text["results"]) == {"base", "bell", "arm"}
        assert set(text["differences"]) == {"bell", "arm"}
        bell = text["results"]["bell"]
        assert (bell["num_blocks"], bell["num_tokens"], bell["num_draws"]) == (20, 320, 2)
        assert len(bell["seed_perplexities"]) == 3
        assert f"{bell['perplexity']:.2f} ± {bell['perplexity_se']:.2f}" in out
        assert f"{bell['seed_mean']:.2f} ± {bell['seed_deviation']:.2f}" in out
        arm = text["results"]["arm"]
        assert (arm["num_seeds"], arm["seed_deviation"]) == (1, None)
        assert f"{arm['perplexity']:.2f} (exact)" in out
        difference = text["differences"]["bell"]
        assert f"{difference['difference']:+.4f} ± {difference['se']:.4f}" in out
    for words in ("PTB", "LAMBADA", "difference to base", "Each document ends with EOS", "bounds"):
        assert words in out


def test_the_pilot_speaks_of_the_mean_over_seeds(runs: Path, command: Command) -> None:
    noise = []
    for seeds in (1, 4):
        assert (
            command(f"bell {TWO} --blocks 4 --precision 0.9 --seeds {seeds} --out p{seeds}")[0] == 0
        )
        noise.append(read(runs / f"p{seeds}")["pilot"]["noise"])
    assert noise[0] == pytest.approx(2 * noise[1])


def test_folders_of_one_name_go_by_their_paths(runs: Path, command: Command) -> None:
    (runs / "again").mkdir()
    (runs / "again" / "bell").symlink_to(runs / "bell")
    assert command(f"bell again/bell {TWO} --blocks 4 --draws 2 --seeds 1 --out twice")[0] == 0
    (text, _) = read(runs / "twice")["sets"]
    assert list(text["results"]) == ["bell", "again/bell"]
    assert text["differences"]["again/bell"]["difference"] == 0
    assert text["results"]["bell"]["seed_deviation"] is None


def test_the_numbers_are_those_of_the_text_cut_by_hand(runs: Path, command: Command) -> None:
    """PTB's rules and the run's bytes; the same masks as any evaluation of these blocks."""
    for eos in ("mdlm", "duo"):
        options = f"{TWO} --blocks 0 --draws 2 --seeds 2 --eos {eos} --out {eos}"
        assert command(f"bell {options}")[0] == 0
        found = read(runs / eos)
        text = found["sets"][0]["results"]["bell"]
        run = load_run(runs / "bell")
        lines = [f"item {n} : it earned $1 million ? 1 times" for n in range(60)]
        end = 1 if eos == "mdlm" else 0
        count = sum(len(line.encode()) + end for line in lines)
        assert text["num_tokens"] == count // 16 * 16
        assert text["bits_per_byte"] == pytest.approx(
            text["nll"] / math.log(2) * count / (count - end * 60)
        )
        assert _mean_nll(run, lines, eos) == pytest.approx(text["nll"], rel=1e-5)
    assert "no EOS" not in (runs / "mdlm" / "zero_shot.md").read_text(encoding="utf-8")
    assert "No EOS after documents" in (runs / "duo" / "zero_shot.md").read_text(encoding="utf-8")


def _mean_nll(run: Run, lines: list[str], eos: str) -> float:
    end = [run.tokenizer.eos_id] if eos == "mdlm" else []
    ids = [t for line in lines for t in [*run.tokenizer.encode(line).tolist(), *end]]
    cut = np.array(ids[: len(ids) // 16 * 16]).reshape(-1, 16)
    blocks = Blocks.from_rows(Row(row, 16, n) for n, row in enumerate(cut))
    return float(np.mean([run.evaluate(blocks, draws=2, seed=s).nll for s in (1234, 1235)]))


def test_the_markdown_has_the_papers_table(runs: Path, command: Command) -> None:
    command(f"bell {TWO} --corpora arxiv ptb lambada --blocks 8 --draws 2 --skip-missing")
    found = read(runs / "bell" / "zero-shot")
    text = (runs / "bell" / "zero-shot" / "zero_shot.md").read_text(encoding="utf-8")
    header, _, row = [line for line in text.splitlines() if line.startswith("|")][:3]
    assert header == "| run | arXiv | PTB | LAMBADA |"
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    ptb = found["sets"][1]["results"]["bell"]
    assert cells[:2] == ["bell, step 4", "not here"]
    assert cells[2] == f"{ptb['seed_mean']:.2f} ± {ptb['seed_deviation']:.2f}"
    assert found["draws_reason"] == "2 draws per block and seed, as given"


def test_going_on_measures_only_what_is_left(
    runs: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    whole = Run.evaluate

    def stop_after(limit: int) -> None:
        def evaluate(self: Run, *args: Any, **more: Any) -> Any:
            if len(calls) == limit:
                raise KeyboardInterrupt
            calls.append(more["seed"])
            return whole(self, *args, **more)

        monkeypatch.setattr(Run, "evaluate", evaluate)

    options = f"bell {TWO} --blocks 8 --draws 2 --seeds 2"
    stop_after(3)
    assert command(f"{options} --out stopped")[0] == 130
    assert not (runs / "stopped" / "zero_shot.json").exists()
    calls.clear()
    stop_after(1)
    assert command(f"{options} --out stopped")[0] == 0
    assert calls == [1235]
    monkeypatch.setattr(Run, "evaluate", whole)
    assert command(f"{options} --out whole --batch-size 3")[0] == 0
    stopped, plain = read(runs / "stopped"), read(runs / "whole")
    for one, other in zip(stopped["sets"], plain["sets"]):
        mine, yours = one["results"]["bell"], other["results"]["bell"]
        assert mine["seed_perplexities"] == pytest.approx(yours["seed_perplexities"], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("bell", ["6 of 7 sets cannot be had", "--from arxiv=PATH", "--skip-missing"]),
        ("bell --corpora ptb --skip-missing", ["none of the sets is here"]),
        ("bell --corpora ptb --from ptb=gone.txt --skip-missing", ["there is no file gone.txt"]),
        ("bell --corpora ptbb", ["unknown corpus 'ptbb'; did you mean 'ptb'"]),
        ("bell --corpora ptb ptb", ["each once"]),
        ("bell --from lm1=a.txt", ["unknown set 'lm1'; did you mean 'lm1b'"]),
        ("bell --from ptb.txt", ["--from wants NAME=VALUE", "'ptb.txt'"]),
        ("bell --from ptb=a --from ptb=b", ["--from names ptb twice"]),
        ("bell --column ptb=x", ["give --from ptb=PATH"]),
        (f"bell {TWO} --draws 1", ["--draws must be at least 2"]),
        (f"bell {TWO} --precision 5", ["--precision is a share"]),
        (f"bell {TWO} --seeds 0", ["--seeds and --batch-size must be at least 1"]),
        (f"bell {TWO} --eos none", ["mdlm"]),
        (f"nowhere {TWO}", ["nowhere is not a run folder"]),
        (f"bell bell {TWO}", ["given twice"]),
        (f"{TWO}", ["needs at least one run folder"]),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    runs: Path, command: Command, monkeypatch: pytest.MonkeyPatch, options: str, words: list[str]
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing may be measured")

    monkeypatch.setattr(Run, "evaluate", never)
    if options == "bell":  # WikiText-2 comes by wheel: here it must not be looked for
        monkeypatch.setattr("bellmask.data.catalogue.wheel_source", _some_source(runs))
    code, out, err = command(f"{options} --out refused")
    assert (code, out) == (2, "")
    for word in words:
        assert word in err
    assert "Traceback" not in err
    assert not (runs / "refused").exists()


def _some_source(runs: Path) -> Callable[..., Any]:
    return lambda *_, **__: file_source(str(runs / "ptb.txt"), rule="line", column="text")


def test_help_names_every_option_and_its_examples_parse(command: Command) -> None:
    code, out, err = command("--help")
    assert (code, err) == (0, "")
    for word in ("--from NAME=PATH", "--eos", "--precision", "--skip-missing", "Table 7"):
        assert word in out
    lines = [line.strip(" │").removeprefix("Examples: ") for line in out.splitlines()]
    examples = [line for line in lines if line.startswith("bellmask evaluate ")]
    assert len(examples) == 3
    for line in examples:
        args = [a for a in shlex.split(line)[2:] if a not in ("--suite", "zero-shot")]
        parse_command(ZeroShotOptions, args, command="evaluate")


REAL = {
    "ptb": ("ptb/ptb.valid.txt", None),
    "lm1b": ("lm1b/lm1b.heldout-10-11.tokens", None),
    "lambada": ("lambada/lambada_test_openai.jsonl", None),
    "ag_news": ("ag_news/test.csv", None),
    "pubmed": ("pubmed_sample/pubmed_qa_labeled.jsonl", "context"),
    "arxiv": ("arxiv_sample/arxiv.jsonl", "text"),
}


def test_real_texts(runs: Path, command: Command, tmp_path: Path) -> None:
    """Their first 20 lines; the last two are stand-ins, with columns of other names."""
    args = []
    for name, (file, column) in REAL.items():
        if not (SHARED / file).exists():
            pytest.skip(f"needs the file {file} in the folder $BELLMASK_TEST_DATA")
        with (SHARED / file).open(encoding="utf-8") as stream:
            lines = list(itertools.islice(stream, 20))
        (tmp_path / Path(file).name).write_text("".join(lines), encoding="utf-8")
        args += ["--from", f"{name}={tmp_path / Path(file).name}"]
        args += ["--column", f"{name}={column}"] if column else []
    names = [name for name in SETS if name in REAL]
    options = f"--corpora {' '.join(names)} --blocks 6 --draws 2 --seeds 2 --out real"
    code, out, err = command(f"bell {options} {shlex.join(args)}")
    assert (code, err) == (0, "")
    for text in read(runs / "real")["sets"]:
        result = text["results"]["bell"]
        assert result["num_blocks"] == 6
        assert 100 < result["perplexity"] < 300, "hardly trained: about one of 259 bytes"
        assert text["title"] in out
