"""Zero-shot perplexity: which tokens are scored, how many draws, and both kinds of error."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from continuation_tools import with_data
from counted_progress import Counted

from bellmask import load
from bellmask.data.blocks import Blocks, Row
from bellmask.data.corpora import find_policy
from bellmask.evaluate import zero_shot
from bellmask.evaluate.likelihood import Likelihood, evaluate
from bellmask.evaluate.zero_shot import (
    PILOT_BLOCKS,
    Case,
    TextSet,
    ZeroShotOptions,
    choose_draws,
    load_blocks,
    make_cases,
    mask_noise,
)
from bellmask.utils.errors import UserError
from bellmask.utils.store import FileStore

MASK = 50


def options(**more):
    return ZeroShotOptions(models=(), **more)


def rows(count, length):
    made = [Row(np.full(length, n % 7), length, n) for n in range(count)]
    return Blocks.from_rows(made, num_bytes=count * length * 2.0)


# the pilot


def rising(x_BL, rows_N, targets_N, **_):
    """Cross-entropy n / L: all noise comes from where the counts fall."""
    share_B = (x_BL == MASK).double().mean(1)
    return share_B[rows_N // x_BL.shape[1]]


def rising_noise(draws, length, num_blocks):
    """Counts are k + r L / R for a k uniform over L / R values, one per block."""
    return math.sqrt(((length / draws) ** 2 - 1) / 12) / length / math.sqrt(num_blocks)


def rising_case(num_blocks, length=64, name="ptb"):
    score = partial(evaluate, rising, mask_id=MASK)
    return Case("run", TextSet(name), rows(num_blocks, length), score)


@pytest.mark.parametrize("draws", [2, 8])
def test_noise_is_that_of_the_closed_form(draws):
    case = rising_case(400)
    found = [mask_noise(case, draws, seed) for seed in range(25)]
    truth = rising_noise(draws, 64, 400)
    assert np.sqrt(np.mean(np.square(found))) == pytest.approx(truth, rel=0.12)
    assert np.std(found) < truth / 5, "a single pilot is good to about an eighth"
    assert mask_noise(case, draws, 3, num_seeds=4) == pytest.approx(found[3] / 2)


def test_the_fewest_draws_that_suffice_are_taken(monkeypatch):
    case = rising_case(400)
    monkeypatch.setattr(zero_shot, "LADDER", (2, 4, 8, 16, 32))
    for draws in (2, 4, 8, 16):
        allowed = 1.4 * rising_noise(draws, 64, 400)  # twice the draws have half the noise
        pilot = choose_draws([case], options(precision=allowed, seeds=1))
        assert pilot.draws == draws
        assert pilot.noise < allowed
    assert choose_draws([case], options(precision=allowed, seeds=64)).draws == 2
    monkeypatch.setattr(zero_shot, "LADDER", (2, 3))
    out_of_reach = choose_draws([rising_case(16)], options(precision=1e-9))
    assert out_of_reach.draws == 3
    assert "--blocks" in out_of_reach.reason
    assert "--blocks" not in pilot.reason


def test_the_noisiest_case_decides_and_others_are_not_tried_again(monkeypatch):
    monkeypatch.setattr(zero_shot, "LADDER", (2, 4, 8))
    calls = []

    def noting(name, blocks, **how):
        calls.append((name, how["draws"]))
        assert len(blocks) <= PILOT_BLOCKS
        return evaluate(rising, blocks, mask_id=MASK, **how)

    cases = [rising_case(40_000, 16), rising_case(10, 16, "lm1b")]
    cases = [replace(case, evaluate=partial(noting, case.text.name)) for case in cases]
    allowed = 1.4 * rising_noise(4, 16, 10)
    pilot = choose_draws(cases, options(precision=allowed, seeds=1))
    assert (pilot.draws, pilot.where) == (4, "LM1B, run")
    assert calls == [("ptb", 2)] * 2 + [("lm1b", 2)] * 2 + [("lm1b", 4)] * 2


# errors and seeds


def noisy(x_BL, rows_N, targets_N, **_):
    """Depends on the token, the count and the place."""
    count_B = (x_BL == MASK).double().mean(1)
    return targets_N / 3 + count_B[rows_N // x_BL.shape[1]] + (rows_N % x_BL.shape[1]) / 8


def three_seeds(model, blocks):
    seeds = [5, 6, 7]
    results = [evaluate(model, blocks, mask_id=MASK, draws=3, seed=seed) for seed in seeds]
    return results, zero_shot.join_seeds(results, blocks, seeds)


def test_the_summary_by_hand_and_differences_are_paired():
    results, joined = three_seeds(noisy, rows(30, 12))
    block_values = np.mean([result.block_nll for result in results], axis=0)
    nll, se = block_values.mean(), block_values.std(ddof=1) / math.sqrt(30)
    found = zero_shot.summarize(results, joined)
    assert joined.nll == pytest.approx(nll)
    assert joined.standard_error == pytest.approx(se, rel=0.1)  # there is no trend over strata
    assert found["perplexity_se"] == pytest.approx(math.exp(nll) * joined.standard_error)
    each = [math.exp(float(result.block_nll.mean())) for result in results]
    mean_and_deviation = (np.mean(each), np.std(each, ddof=1))
    assert (found["seed_mean"], found["seed_deviation"]) == pytest.approx(mean_and_deviation)
    _, worse = three_seeds(lambda *args, **more: noisy(*args, **more) + 0.25, rows(30, 12))
    assert zero_shot.compare(worse, joined) == {
        "difference": pytest.approx(0.25),
        "se": pytest.approx(0, abs=1e-9),  # although each has an error of its own
        "perplexity_ratio": pytest.approx(math.exp(0.25)),
    }
    assert joined.standard_error > 0.05
    assert zero_shot.compare(three_seeds(noisy, rows(29, 12))[1], joined) is None


# sets and runs


@pytest.fixture(scope="module")
def bell(zoo):
    return load(zoo / "bell")


@pytest.fixture
def news(tmp_path):
    path = tmp_path / "news.csv"
    lines = [f'"{n}","Title {n}","It is the {n}. story ."\n' for n in range(40)]
    path.write_text("".join(lines), encoding="utf-8")
    return TextSet("ag_news", str(path))


@pytest.mark.parametrize(
    ("eos", "change"), [("mdlm", {}), ("duo", {"packing": "unpacked"}), ("mdlm", {"wrap": True})]
)
def test_blocks_are_the_texts_cut_without_overlap(bell, news, eos, change):
    """AG News has no detokenizer: title and text as they are; rows as the run's own are framed."""
    run = with_data(bell, **change)
    found, missing = load_blocks([run], [news], options(eos=eos))
    assert not missing
    end, ids = ([run.tokenizer.eos_id] if eos == "mdlm" else []), []
    for n in range(40):
        ids += [*f"Title {n} It is the {n}. story .".encode(), *end]
    inner = 14 if "wrap" in change else 16
    cut = np.array(ids[: len(ids) // inner * inner]).reshape(-1, inner)
    if "wrap" in change:
        signs = (run.tokenizer.bos_id, run.tokenizer.eos_id)
        begin, last = (np.full(len(cut), sign) for sign in signs)
        cut = np.column_stack([begin, cut, last])
    assert np.array_equal(np.asarray(found[news][0].tokens), cut)


def test_a_set_keeps_its_own_rules_and_the_run_its_own(bell):
    more = {"detokenizer": "lm1b", "documents": "file", "column": "body", "insert_eos": False}
    run = with_data(bell, mixture=("ptb=0.2",), valid="other.txt", **more)
    options = zero_shot.set_options(run, TextSet("ptb", "ptb.txt"), "mdlm")
    policy = find_policy(options, "ptb")
    assert (policy.detokenizer, policy.documents, policy.column) == ("ptb", "line", "sentence")
    assert (policy.insert_eos, options.mixture, options.valid) == (True, (), None)
    assert zero_shot.set_options(run, TextSet("ptb", "p.jsonl", "words"), "duo").column == "words"
    assert zero_shot.own_family(run, TextSet("ptb"))
    assert not zero_shot.own_family(run, TextSet("lm1b"))
    assert zero_shot.own_family(with_data(bell, train="wikitext2"), TextSet("wikitext103"))
    assert zero_shot.own_family(with_data(bell, train="imported"), TextSet("ptb")) is None
    assert TextSet("text8").title == "text8"


def test_files_are_sets_of_their_own_names(bell, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    texts = [f"This is text number {n}." for n in range(40)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/plain.txt").write_text("\n".join(texts), encoding="utf-8")
    records = [{"text": text} for text in texts]
    lines = "\n".join(map(json.dumps, records))
    (tmp_path / "lines.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "objects.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
    (tmp_path / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    files = ("in/plain.txt", "lines.jsonl", "objects.json", "texts.json")
    sets = zero_shot.parse_sets(options(corpora=files))
    names = ["plain.txt", "lines.jsonl", "objects.json", "texts.json"]
    assert [text.title for text in sets] == names
    found, missing = load_blocks([bell], sets, options())
    assert not missing
    assert [text.name for text in found] == names
    whole, *others = (blocks[0] for blocks in found.values())
    assert bell.tokenizer.decode(whole.rows(slice(0, 1))[0].numpy()) == texts[0][:16]
    for blocks in others:  # each record is a document
        assert torch.equal(blocks.rows(slice(None)), others[0].rows(slice(None)))
        assert len(np.unique(blocks.documents)) > 20
    caplog.set_level("INFO", logger="bellmask")
    (own,) = zero_shot.parse_sets(options(from_files=("my/set=in/*.txt",)))
    assert (own.title, own.files) == ("my/set", "in/*.txt")
    assert "my/set is not a named corpus" in caplog.text
    (case,) = make_cases({"bell": bell}, {own: [whole]})
    assert "/" not in case.key
    assert zero_shot.own_family(with_data(bell, train="in/*.txt"), own)
    assert not zero_shot.own_family(bell, own)
    both = zero_shot.parse_sets(options(from_files=("mine=in/plain.txt", "ptb=lines.jsonl")))
    assert [text.name for text in both] == [*zero_shot.SETS, "mine"]
    for refused, named in (
        ({"corpora": ("nosuch",)}, "unknown corpus"),
        ({"corpora": ("nosuch.txt",)}, "no file nosuch.txt"),
        ({"corpora": ("in/plain.txt", "./in/plain.txt")}, "twice"),
        ({"corpora": ("lambada",), "from_files": ("ptb=lines.jsonl",)}, "--from"),
    ):
        with pytest.raises(UserError, match=named):
            zero_shot.parse_sets(options(**refused))


def test_runs_that_cannot_read_the_sets_are_refused(bell):
    apart = with_data(bell, document_attention=True)
    zero_shot.check_run(apart, "mdlm")
    with pytest.raises(UserError, match="--eos"):
        zero_shot.check_run(apart, "duo")
    with pytest.raises(UserError, match="toy:sticky"):
        zero_shot.check_run(with_data(bell, train="toy:sticky"), "mdlm")


def test_missing_sets_are_all_named_before_any_is_read(bell, news, tmp_path, monkeypatch):
    def unreachable(name, *_, **__):
        raise UserError(f"cannot reach {name} on the hub (no network). Offline? Download it")

    monkeypatch.setattr("bellmask.data.readers.hub_source", unreachable)
    sets = [TextSet("ptb"), news, TextSet("arxiv")]
    with monkeypatch.context() as patch:
        patch.setattr(zero_shot, "prepare", lambda *_, **__: 1 / 0)
        with pytest.raises(UserError) as error:
            load_blocks([bell], sets, options())
    for words in ("2 of 3", "--from ptb=PATH --from arxiv=PATH", "--skip-missing", "network"):
        assert words in str(error.value)
    assert "Offline" not in str(error.value)
    found, missing = load_blocks([bell], sets, options(skip_missing=True))
    assert (list(found), list(missing)) == ([news], ["ptb", "arxiv"])
    # one that turns out unreadable is missing too
    path = tmp_path / "papers.jsonl"
    path.write_text('{"body": "text"}\n' * 50, encoding="utf-8")
    text = TextSet("arxiv", str(path))
    with pytest.raises(UserError, match="'article'"):
        load_blocks([bell], [text, news], options(skip_missing=True))
    named = replace(text, column="body")
    assert list(load_blocks([bell], [named], options())[0]) == [named]


def test_a_stored_evaluation_is_not_made_again_and_exact_ones_stay_paired(
    bell, news, zoo, tmp_path
):
    runs = {"bell": bell, "arm": load(zoo / "arm")}
    found, _ = load_blocks(list(runs.values()), [news], options())
    blocks = {news: [b.spread(8) for b in found[news]]}
    sets, seeds, progress = [news, TextSet("ptb")], (1, 2), Counted()
    cases = make_cases(runs, blocks, batch_size=5)
    assert [(case.run, case.is_exact) for case in cases] == [("bell", False), ("arm", True)]
    store = FileStore(tmp_path / "blocks", ".npz", Likelihood.load, Likelihood.save)
    first = [case.measure(2, seeds, store, progress) for case in cases]
    assert progress.seen == [5, 8, 13, 16, 21, 24]
    for result, seed in zip(first[0], seeds):
        assert result.nll == bell.evaluate(cases[0].blocks, draws=2, seed=seed, batch_size=5).nll
    assert len(list(store.folder.iterdir())) == 3, "one of the exact run"
    again = cases[0].measure(2, seeds, store, progress)
    assert progress.seen[6:] == [32, 40], "nothing is made again"
    assert [r.nll for r in again] == [r.nll for r in first[0]]
    results = list(zip(cases, first))
    text, gone = zero_shot.collect(runs, sets, {"ptb": "no network"}, results, seeds)["sets"]
    assert gone["missing"] == "no network"
    assert gone["results"] == gone["differences"] == {}
    masked, exact = text["results"].values()
    assert (masked["is_exact"], exact["is_exact"]) == (False, True)
    gap_B = first[1][0].block_nll - np.mean([result.block_nll for result in first[0]], axis=0)
    gap = text["differences"]["arm"]
    assert gap["difference"] == pytest.approx(exact["nll"] - masked["nll"])
    pairs = gap_B[first[0][0].level_B.argsort()].reshape(4, 2)  # neighbors in stratum
    assert gap["se"] == pytest.approx(math.sqrt((np.diff(pairs) ** 2).sum()) / 8)


def test_a_key_names_what_decides_a_measurement(bell, zoo):
    runs = [bell, load(zoo / "base"), with_data(bell, document_attention=True)]
    keys = {
        make_cases({"run": run}, {text: [rows(count, 16)]})[0].key
        for run, count in zip([*runs, bell], (4, 4, 4, 5))
        for text in (TextSet("ptb"), TextSet("lm1b"))
    }
    assert len(keys) == 8
