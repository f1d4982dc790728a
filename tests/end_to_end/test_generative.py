"""``bellmask evaluate --suite generative`` as a user runs it; the scorer is an ARM made here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bellmask.assemble import train_run
from bellmask.cli import run_command
from bellmask.config import RunConfig
from bellmask.evaluate import generative
from bellmask.evaluate.diversity import unigram_entropy

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
SUITE = "--suite generative --nfe 2 8 --num 4 --seeds 2 --device cpu".split()
FILES = {"generative.json", "generative.md", "quality_diversity.png", "quality_diversity.svg"}


@pytest.fixture(scope="module")
def runs(
    small_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for name, args in {"bell": [], "arm": ["--framework", "arm"]}.items():
        train_run(small_config(*args), folder / name, is_quiet=True)
    return {name: folder / name for name in ("bell", "arm")}


def evaluate(*args: str | Path) -> int:
    return run_command(["evaluate", *map(str, args)])


def files_under(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def test_table_plot_and_samples(
    runs: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    out = tmp_path / "out"
    args = [runs["bell"], runs["arm"], *SUITE, "--scorer", runs["arm"], "--out", out]
    assert evaluate(*args) == 0
    screen = capsys.readouterr().out
    for word in ("gen. perplexity", "entropy", "repetition", "calls", "float64 noise", "real text"):
        assert word in screen
    assert screen.count("one network call per token") == 1
    assert {path.name for path in out.iterdir()} == {*FILES, "samples"}
    assert (out / "quality_diversity.png").stat().st_size > 10_000
    assert "| NFE | 2 | 8 | no NFE to choose |" in (out / "generative.md").read_text()
    numbers = json.loads((out / "generative.json").read_text())
    bell, arm = numbers["runs"]
    assert [setting["nfe"] for setting in bell["settings"]] == [2, 8]
    assert [setting["nfe"] for setting in arm["settings"]] == [None]
    assert arm["settings"][0]["mean"]["calls"] == 16
    assert bell["settings"][1]["mean"]["calls"] <= 8
    assert [cell["seed"] for cell in bell["settings"][0]["cells"]] == [0, 1]
    assert numbers["real_text"][0]["settings"][0]["mean"]["perplexity"] > 1
    assert numbers["sampling"]["noise"] == "float64"
    assert len(files_under(out / "samples")) == 2 * (2 * 2 + 2 + 2)
    (path,) = out.glob("samples/bell-*/nfe-8-seed-1.jsonl")
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(kept) == 4
    entropy = sum(unigram_entropy(sample["ids"]) for sample in kept) / 4
    assert bell["settings"][1]["cells"][1]["entropy"] == pytest.approx(entropy)


def test_a_single_run_keeps_its_results_and_precision_is_stated(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    args = [runs["bell"], *SUITE, "--scorer", runs["arm"], "--rule", "first_hitting"]
    assert evaluate(*args, "--noise", "float32", "--top-p", "0.9") == 0
    out = capsys.readouterr().out
    assert "float32 noise lowers" in out
    assert "first_hitting sampling, float32 noise, temperature 1, top-p 0.9" in " ".join(
        out.split()
    )
    folder = runs["bell"] / "generative"
    assert {path.name for path in folder.iterdir()} == {*FILES, "samples"}
    numbers = json.loads((folder / "generative.json").read_text())
    assert numbers["sampling"]["noise"] == "float32"
    assert numbers["runs"][0]["settings"][0]["mean"]["calls"] == 16


def test_what_was_stopped_goes_on(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [runs["bell"], *SUITE, "--scorer", runs["arm"], "--out"]
    assert evaluate(*args, tmp_path / "whole") == 0
    drawn: list[tuple[Any, int]] = []
    plain = generative.draw_samples

    def stopping(run: Any, request: Any, nfe: int | None, seed: int, on_part: Any) -> Any:
        if len(drawn) == 2:
            raise KeyboardInterrupt
        drawn.append((nfe, seed))
        return plain(run, request, nfe, seed, on_part)

    monkeypatch.setattr(generative, "draw_samples", stopping)
    assert evaluate(*args, tmp_path / "stopped") == 130
    assert not FILES & {path.name for path in (tmp_path / "stopped").iterdir()}
    drawn.clear()
    assert evaluate(*args, tmp_path / "stopped") == 0
    assert drawn == [(8, 0), (8, 1)]
    for name in ("generative.json", "generative.md"):
        assert (tmp_path / "stopped" / name).read_text() == (tmp_path / "whole" / name).read_text()
    assert files_under(tmp_path / "stopped") == files_under(tmp_path / "whole")


@pytest.mark.skipif(not (SHARED / "stories260K").exists(), reason="no small story model here")
def test_a_hugging_face_scorer(runs: dict[str, Path], tmp_path: Path) -> None:
    scorer = SHARED / "stories260K"
    assert evaluate(runs["bell"], *SUITE, "--scorer", scorer, "--out", tmp_path) == 0
    numbers = json.loads((tmp_path / "generative.json").read_text())
    assert numbers["scorer"]["name"] == "stories260K"
    assert str(SHARED) not in (tmp_path / "generative.json").read_text()
    real = numbers["real_text"][0]["settings"][0]["mean"]["perplexity"]
    assert real < numbers["runs"][0]["settings"][0]["mean"]["perplexity"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("nowhere", "nowhere is not a run folder"),
        ("", "needs at least one run folder"),
        ("{bell} {bell}", "given twice"),
        ("{bell} --nfe 0", "--nfe takes one or more numbers"),
        ("{bell} --num 0", "--num must be at least 1, got 0"),
        ("{bell} --scorer-batch-size 0", "--scorer-batch-size must be at least 1"),
        ("{bell} --steps 5", "leave out --steps"),
        ("{bell} --temperature -1", "must not be negative"),
        ("{bell} --length 1", "--length must be at least 2"),
        ("{bell} --checkpoint 5", "no checkpoint '5'"),
        ("{bell} --remask 0.1 --rule margin", "--remask goes with --rule ancestral"),
        ("{bell} --scorer {bell}", "a scorer must be an ARM"),
        ("{bell} --scorer ./none", "there is no folder ./none"),
        ("{bell} --scorer {arm} --context 1", "--context must be at least 2"),
        ("{bell} --scorrer x", "--scorer"),
    ],
)
def test_bad_input_gets_one_message(
    args: str,
    message: str,
    runs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = args.format(**runs).split()
    assert evaluate(*given, "--suite", "generative", "--out", "out") == 2
    err = capsys.readouterr().err
    assert message in " ".join(err.split())
    assert err.count("error:") == 1
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_help_has_examples_and_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        evaluate("--suite", "generative", "--help")
    out = " ".join(capsys.readouterr().out.split())
    assert "bellmask evaluate runs/base runs/bell --suite generative" in out
    for option in ("--nfe", "--scorer", "--seeds", "--temperature", "--rule", "--noise"):
        assert option in out
