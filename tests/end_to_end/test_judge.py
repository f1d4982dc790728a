"""``bellmask judge pairwise``, from models or files of outputs to tables, with scripted judges."""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from commands import bellmask, refuses
from judge_server import (
    ALPACA,
    KEY,
    VARIABLE,
    JudgeServer,
    by_length,
    error,
    good,
    needs_alpaca,
    script,
    set_key,
    shown,
)  # fmt: skip
from tuned_runs import tuned

from bellmask.evaluate.judge_prompts import open_style
from bellmask.storage.loading import LoadOptions
from bellmask.storage.run_folder import read_description

NUM = 9
A = ["x" * (5 + 3 * n) for n in range(NUM)]
B = ["y" * (8 + 2 * n) for n in range(NUM - 1)] + [A[-1]]
"""Length differences -3, -2, -1, 0, 1, 2, 3, 4, and one pair of equal answers: by length
4 wins, 3 losses, 2 ties."""
FAST = "judge_server.skip_certificates"
BY_LENGTH = {"wins": 4, "losses": 3, "ties": 2, "unreadable": 0}


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    set_key(monkeypatch)
    monkeypatch.setattr("bellmask.evaluate.judge_endpoint.back_off", lambda attempt: 0.0)


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, records)))
    return path


@pytest.fixture
def files(tmp_path):
    """A, B and the options for the tasks that they answer."""
    requests = [f"request {n}" for n in range(NUM)]
    sides = [
        write_lines(
            tmp_path / name / "outputs.jsonl",
            [{"prompt": r, "response": s} for r, s in zip(requests, said, strict=True)],
        )
        for name, said in (("a", A), ("b", B))
    ]
    tasks = [{"prompt": r, "category": ("even", "odd")[n % 2]} for n, r in enumerate(requests)]
    return [*sides, "--benchmark", write_lines(tmp_path / "tasks.jsonl", tasks)]


@pytest.fixture(scope="module")
def runs(zoo, tmp_path_factory):
    """Two runs whose folders have one name, fine-tuned on conversations; an ARM; a sigma-ARM."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "x": tuned(zoo / "bell", folder / "x" / "base", True),
        "y": tuned(zoo / "sft", folder / "y" / "base", True, block_length=64),
        "arm": tuned(zoo / "arm", folder / "arm", None),
        "fixed": zoo / "sigma_arm",
    }


@pytest.fixture
def talks(tmp_path):
    """Options for quick answers to three tasks of one or two turns."""
    tasks = [{"turns": ["Say 1"]}, {"turns": ["Say 2", "Go"]}, {"turns": ["Say 3", "Go on"]}]
    path = write_lines(tmp_path / "turns.jsonl", tasks)
    return ["--benchmark", path, "--length", 8, "--steps", 3, "--seeds", 2]


@pytest.fixture
def judge(tmp_path):
    """Run the command in this process. The key is nowhere."""

    def call(*args, server=None, code=0):
        args = [*args] if server is None else [*args, *at(server)]
        args += [] if "--out" in args else ["--out", tmp_path / "out"]
        said = bellmask("judge", "pairwise", *args)
        assert said.code == code, said.text
        assert "Traceback" not in said.err
        assert KEY not in said.out + said.err
        for path in tmp_path.rglob("*"):
            assert path.is_dir() or KEY not in path.read_text(errors="replace")
        return said

    return call


def at(server):
    return ["--judge", "scripted", "--base-url", server.base_url]


def numbers(folder):
    return json.loads((folder / "judge.json").read_text())


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- files of outputs ------------------------------------------------------------------------


def test_a_judge_that_likes_length(files, judge, tmp_path):
    out = tmp_path / "out"
    with JudgeServer(by_length) as server:
        first = judge(*files, server=server)
        found = numbers(out)
        pairs = Counter(shown(body) for body in server.requests)
        again = judge(*files, server=server)
        assert len(server.requests) == 16, "nothing is asked twice"
    assert pairs == Counter([*zip(A[:-1], B[:-1]), *zip(B[:-1], A[:-1])]), "both orders, once each"
    assert found["results"][0]["counts"] == BY_LENGTH
    over = found["over_seeds"]
    assert (over["win_rate"]["mean"], over["non_tie"]["mean"]) == pytest.approx((5 / 9, 4 / 7))
    assert found["judge"]["first_share"] == 0.5
    assert found["seeds"] == [0], "files are the same with every seed"
    assert numbers(out) == found
    assert "no requests to send" in again.out
    for text in ("55.56", "57.14", "scripted, plain prompts, both orders"):
        assert text in first.out
        assert text in (out / "judge.md").read_text()
    verdicts = lines(out / "verdicts.jsonl")
    assert "".join(v["result"][0] for v in verdicts) == "llltwwwwt"
    keys = {line["key"] for line in lines(out / "transcript.jsonl")}
    assert {key for v in verdicts for key in v["requests"]} == keys


def test_faults_change_no_number_and_refusals_are_told(files, judge, tmp_path):
    """Two requests fail at first; both orders of the last pair that differs are too long; a
    temperature is not taken."""
    slow, long = error(429, "slow", {"Retry-After": "0"}), {"code": "context_length_exceeded"}
    failing = script(*[by_length] * 3, error(500, f"no {KEY}"), *[by_length] * 3, slow, by_length)
    too_long = script(error(413, "too long"), (400, {}, json.dumps({"error": long})))

    def reply(body):
        if "temperature" in body:
            return error(400, "temperature is not supported with this model")
        return too_long(body) if A[-2] in shown(body) else failing(body)

    with JudgeServer(reply) as server:
        said = judge(*files, server=server)
        count = len(server.requests)
        assert count >= 16 + 3
        judge(*files, server=server)
        assert len(server.requests) == count, "what was refused would be refused again"
    found = numbers(tmp_path / "out")
    assert found["results"][0]["counts"] == BY_LENGTH | {"wins": 3, "unreadable": 1}
    refused, changed = found["cautions"]
    assert "rejected 2 requests (HTTP 4" in refused
    assert "temperature" in changed
    for text in (said.out, (tmp_path / "out" / "judge.md").read_text()):
        assert all(line in text for line in found["cautions"])
    kept = lines(tmp_path / "out" / "transcript.jsonl")
    assert len({line["key"] for line in kept}) == len(kept) == 16


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_ended_in_the_middle(sign, files, judge, tmp_path, warm):
    """What was kept is not asked again; the numbers are those of an undisturbed run."""
    out, count, seventh = tmp_path / "out", itertools.count(1), threading.Event()

    def slowly(body):
        if next(count) == 7:
            seventh.set()
            if sign == signal.SIGINT:
                signal.pthread_kill(threading.main_thread().ident, sign)
        time.sleep(0.1)
        return by_length(body)

    with JudgeServer(slowly) as server:
        args = [*files, *at(server), "--num-threads", 2, "--out", out]
        if sign == signal.SIGINT:
            said = judge(*args, code=130).text
        else:
            env = {VARIABLE: KEY, "OPENAI_LOG": "debug"}
            process = warm.start(["judge", "pairwise", *args], env=env, prepare=[FAST])
            assert seventh.wait(120), process.text()
            process.signal(sign)
            assert process.wait() == -sign
            time.sleep(0.2)  # what was under way
            said = process.text()
        kept, before = len(lines(out / "transcript.jsonl")), len(server.requests)
        assert before - 2 * (sign == signal.SIGKILL) <= kept < 16, "even what was under way"
        assert sign == signal.SIGKILL or f"{kept} of 16 answers arrived and are stored" in said
        assert KEY not in said
        assert not (out / "judge.json").exists()
        server.reply = by_length
        judge(*args)
        assert len(server.requests) == before + 16 - kept
    keys = [line["key"] for line in lines(out / "transcript.jsonl")]
    assert len(set(keys)) == len(keys) == 16
    assert numbers(out)["results"][0]["counts"] == BY_LENGTH, "as undisturbed"


# --- models that answer ----------------------------------------------------------------------


def test_two_runs_and_two_turns(runs, talks, judge, tmp_path):
    out = tmp_path / "out"
    with JudgeServer(by_length) as server:
        judge(runs["x"], runs["y"], *talks, server=server)
    found, verdicts = numbers(out), lines(out / "verdicts.jsonl")
    assert [found[side]["name"] for side in "ab"] == [str(runs["x"]), str(runs["y"])]
    turns = [("0", 1), ("1", 1), ("1", 2), ("2", 1), ("2", 2)]
    places = [(seed, *place) for seed in (0, 1) for place in turns]
    assert [(v["seed"], v["task"], v["turn"]) for v in verdicts] == places
    texts = {
        (line["seed"], line["task"], line["turn"]): line["text"]
        for line in lines(out / "answers" / found["a"]["answers"])
    }
    assert [v["a"] for v in verdicts] == [texts[place] for place in places]
    asked = {text for body in server.requests for text in shown(body) if text.startswith("User")}
    first, second = texts[0, "1", 1], texts[0, "1", 2]
    assert f"User: Say 2\n\nAssistant: {first}\n\nUser: Go\n\nAssistant: {second}" in asked
    pairs = Counter(shown(body) for body in server.requests)
    assert len(pairs) == len(server.requests) >= 8, "each different question once, over both seeds"


# --- published benchmarks --------------------------------------------------------------------


@needs_alpaca
def test_alpaca_eval_with_probabilities(judge, tmp_path):
    """A judge that says: the first one shown, with a probability that follows from its length."""

    def chance(text):
        return 1 / (1 + math.exp(-(len(text) - 1000) / 700))

    def reply(body):
        text = body["messages"][-1]["content"]
        first = text.split('"model_identifier": "m",\n        "output": """', 1)[1]
        first = first.split('"""\n    },\n    {\n        "model_identifier": "M"', 1)[0]
        p = chance(first)
        assert body["max_tokens"] <= 8
        return good("m", logprobs={"m": math.log(p), "M": math.log(1 - p)})

    names = ("text_davinci_003", "gpt4_1106_preview")
    a, b = (ALPACA / f"{name}.model_outputs.json" for name in names)
    with JudgeServer(reply) as server:
        judge(a, b, "--data-dir", ALPACA, "--tasks", 40, server=server)
        assert len(server.requests) == 80
    rows = [json.loads(path.read_text()) for path in (a, b)]
    picked = [[side[n * 805 // 40]["output"] for side in rows] for n in range(40)]
    by_hand = [(chance(one) + 1 - chance(two)) / 2 for one, two in picked]
    found = numbers(tmp_path / "out")
    assert found["over_seeds"]["win_rate"]["mean"] == pytest.approx(sum(by_hand) / 40, abs=1e-9)


def test_two_files_of_outputs_bring_their_instructions(files, judge, tmp_path, monkeypatch):
    """Nothing is fetched; B's order does not matter."""

    def no_hub():
        raise AssertionError("the hub is asked")

    monkeypatch.setattr("bellmask.evaluate.judge_prompts._alpaca_from_hub", no_hub)
    prompts = "bellmask.evaluate.judge_prompts"
    monkeypatch.setattr(f"{prompts}.open_style", lambda _, cache: open_style("plain", cache))
    write_lines(files[1], lines(files[1])[::-1])
    with JudgeServer(by_length) as server:
        said = judge(*files[:2], server=server)
    assert f"the 9 instructions in {files[0]}" in said.err
    found = numbers(tmp_path / "out")
    assert found["results"][0]["counts"] == BY_LENGTH
    assert [v["a"] for v in lines(tmp_path / "out" / "verdicts.jsonl")] == A, "A's order"


# --- money and mistakes ----------------------------------------------------------------------


def test_a_dry_run_loads_writes_and_sends_nothing_and_needs_no_key(
    runs, talks, files, judge, tmp_path, monkeypatch
):
    """Ten pairs of two seeds in both orders, with one or two answers of 8 tokens on each side."""
    monkeypatch.delenv(VARIABLE)
    args = [runs["x"], runs["y"], *talks, "--judge", "gpt-4o"]
    assert "OPENAI_API_KEY" in judge(*args, code=2).err
    monkeypatch.delattr(LoadOptions, "load")
    said = judge(*files, "--judge", "gpt-4o", "--dry-run")
    assert "16 requests" in said.out
    said = judge(*args, "--dry-run")
    assert "20 requests" in said.out
    assert "at most about $" in said.out
    for name in ("x", "y"):
        assert f"answers of {runs[name]} count as 8 tokens each" in said.out
    without = [arg for arg in args if arg not in ("--length", 8)]
    found = re.search(r"count as (\d+) tokens", judge(*without, "--dry-run").out)
    assert int(found[1]) == read_description(runs["x"])["response_tokens"]
    said = judge(runs["arm"], *without[1:], "--dry-run")  # not fine-tuned: half of its rows of 96
    assert f"answers of {runs['arm']} count as 48 tokens each" in said.out
    assert "--max-usd 0.001" in judge(*args, "--dry-run", "--max-usd", 0.001, code=2).err
    judge(*args[:-1], f"local:{runs['arm']}", "--dry-run")
    hub = ["owner/name", *without[1:], "--dry-run"]
    assert "--length" in judge(*hub, code=2).err
    assert not (tmp_path / "out").exists()


def test_money(files, judge, tmp_path):
    """$1 for each answer: 100,000 tokens at $10 a million, which no estimate foresees."""

    def reply(body):
        status, headers, text = by_length(body)
        body = json.loads(text) | {"usage": {"prompt_tokens": 100_000, "completion_tokens": 0}}
        return status, headers, json.dumps(body)

    one = [*files, "--num-threads", 1, "--price-in", 10, "--price-out", 0]
    with JudgeServer(reply) as server:
        assert "--max-usd 0.01" in judge(*one, "--max-usd", 0.01, server=server, code=2).err
        assert not server.requests
        said = judge(*one, "--max-usd", 5, server=server, code=1)
        assert "5 of 16 answers arrived and are stored" in said.err
        assert "spent $5.0000 of $5" in said.out
        assert not (tmp_path / "out" / "judge.json").exists()
        assert len(server.requests) == 5
        assert "spent $11.0000" in judge(*one, server=server).out
        assert len(server.requests) == 16
        assert "spent" not in judge(*one, "--max-usd", 20, server=server).out
    assert numbers(tmp_path / "out")["judge"]["usd"] == pytest.approx(16.0)
    assert numbers(tmp_path / "out")["results"][0]["counts"] == BY_LENGTH


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ("nowhere/a B", "nowhere/a"),
        ("A.json B", "A.json"),
        ("TEXT B", "TEXT: records must be in"),
        ("A A", "A and B are both"),
        ("A FIXED", "sigma-ARM"),
        ("A B --benchmark mtbench", "did you mean 'mt-bench'"),
        ("A B --benchmark none.jsonl", "none.jsonl"),
        ("A B --judge local:nowhere/x/y", "nowhere/x/y"),
        ("A B --judge local:x --max-usd 1", "--max-usd"),
        ("A B --judge local:", "--judge needs a name"),
        ("A B --price-in 1", "--price-in and --price-out"),
        ("A B --max-usd 1", "--max-usd"),
        ("A B --judge gpt-4o --max-usd 1", "gpt-4o"),
        ("A B --seeds 0", "--seeds"),
        ("A B --tasks 99", "99"),
        ("A B --out TASKS", "is a file"),
    ],
)
def test_mistakes_are_one_message_before_anything_is_sent(
    args, names, files, runs, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("TEXT").write_text("some text")
    place = {"A": files[0], "B": files[1], "TASKS": files[3], "FIXED": runs["fixed"]}
    given = [place.get(arg, arg) for arg in args.split()]
    given += [] if "--benchmark" in given else files[2:]
    given += [] if "--judge" in given else ["--judge", "gpt-4o-x"]
    with JudgeServer() as server:
        is_local = any(str(arg).startswith("local:") for arg in given)
        given += [] if "--base-url" in given or is_local else ["--base-url", server.base_url]
        given += [] if "--out" in given else ["--out", "out"]
        refuses("judge", "pairwise", *given, names=names)
        assert not server.requests
