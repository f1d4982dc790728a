"""Zero-shot perplexity: which tokens are scored, how many draws, and both kinds of error."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bellmask.assemble import train_run
from bellmask.config import RunConfig
from bellmask.data.blocks import Blocks
from bellmask.data.corpora import find_policy
from bellmask.data.packing import Row
from bellmask.errors import UserError
from bellmask.evaluate import zero_shot
from bellmask.evaluate.likelihood import evaluate
from bellmask.evaluate.pilot import PILOT_BLOCKS, Case, Pilot, choose_draws, mask_noise
from bellmask.evaluate.result import Likelihood
from bellmask.evaluate.zero_shot import (
    TextSet,
    check_run,
    collect,
    compare,
    find_missing,
    join_seeds,
    load_sets,
    measure,
    own_family,
    refuse_missing,
    result_key,
    set_options,
    summarise,
)
from bellmask.model.transformer import hash_weights
from bellmask.options import DataOptions
from bellmask.run import Run, load_run

MASK = 50


def rows(count: int, length: int) -> Blocks:
    made = [Row(np.full(length, n % 7), length, n) for n in range(count)]
    return Blocks.from_rows(made, num_bytes=count * length * 2.0)


# --- the pilot -------------------------------------------------------------------------------


def rising(x_BL, rows_N, targets_N, **_):
    """Cross-entropy n / L: all noise comes from where the counts fall."""
    share_B = (x_BL == MASK).double().mean(1)
    return share_B[rows_N // x_BL.shape[1]]


def rising_noise(draws: int, length: int, num_blocks: int) -> float:
    """Counts are k + r L / R for a k uniform over L / R values, one per block."""
    return math.sqrt(((length / draws) ** 2 - 1) / 12) / length / math.sqrt(num_blocks)


def rising_case(num_blocks: int, length: int = 64, **more: Any) -> Case:
    run = partial(evaluate, rising, mask_id=MASK, **more)
    return Case("run", "set", rows(num_blocks, length), run)


@pytest.mark.parametrize("draws", [2, 4, 8])
def test_noise_is_that_of_the_closed_form(draws: int) -> None:
    case = rising_case(400)
    found = [mask_noise(case, draws, seed) for seed in range(25)]
    truth = rising_noise(draws, 64, 400)
    assert np.sqrt(np.mean(np.square(found))) == pytest.approx(truth, rel=0.12)
    assert np.std(found) < truth / 5, "a single pilot is good to about an eighth"
    assert mask_noise(case, draws, 3, num_seeds=4) == pytest.approx(found[3] / 2)


def test_the_fewest_draws_that_suffice_are_taken() -> None:
    case = rising_case(400)
    for draws in (2, 4, 8, 16):
        allowed = 1.4 * rising_noise(draws, 64, 400)  # twice the draws have half the noise
        pilot = choose_draws([case], allowed, seed=1, ladder=(2, 4, 8, 16, 32))
        assert pilot.draws == draws
        assert pilot.noise is not None
        assert pilot.noise < allowed
        assert [trial["draws"] for trial in pilot.tried] == [2, 4, 8, 16][: len(pilot.tried)]
        assert f"{draws} draws per block and seed: the fewest" in pilot.reason
    assert choose_draws([case], allowed, seed=1, num_seeds=64).draws == 2


def test_the_noisiest_case_decides_and_others_are_not_tried_again() -> None:
    calls: list[tuple[str, int]] = []

    def counted(name: str, case: Case) -> Case:
        def run(blocks: Blocks, *, draws: int, seed: int) -> Likelihood:
            calls.append((name, draws))
            assert len(blocks) <= PILOT_BLOCKS
            return case.evaluate(blocks, draws=draws, seed=seed)

        return replace(case, set=name, evaluate=run)

    cases = [counted("many", rising_case(40_000, 16)), counted("few", rising_case(10, 16))]
    seen: list[tuple[int, int]] = []
    allowed = 1.4 * rising_noise(4, 16, 10)
    pilot = choose_draws(
        cases, allowed, seed=1, ladder=(2, 4, 8), on_trial=lambda *now: seen.append(now)
    )
    assert (pilot.draws, pilot.where) == (4, "few, run")
    assert calls == [("many", 2)] * 2 + [("few", 2)] * 2 + [("few", 4)] * 2
    assert seen == [(0, 2), (1, 2), (2, 3)]


def test_a_precision_out_of_reach_is_said() -> None:
    pilot = choose_draws([rising_case(16)], 1e-9, seed=1, ladder=(2, 3))
    assert pilot.draws == 3
    assert "the most that are tried" in pilot.reason
    assert Pilot(6).reason == "6 draws per block and seed, as given"


# --- errors and seeds ------------------------------------------------------------------------


def noisy(x_BL, rows_N, targets_N, **_):
    """Depends on the token, the count and the place."""
    count_B = (x_BL == MASK).double().mean(1)
    return targets_N / 3 + count_B[rows_N // x_BL.shape[1]] + (rows_N % x_BL.shape[1]) / 8


SEEDS = [5, 6, 7]


@pytest.fixture(scope="module")
def three() -> tuple[Blocks, list[Likelihood]]:
    blocks = rows(30, 12)
    return blocks, [evaluate(noisy, blocks, mask_id=MASK, draws=3, seed=seed) for seed in SEEDS]


def test_seeds_together_have_the_mean_and_the_error_of_all_draws(three) -> None:
    blocks, results = three
    joined = join_seeds(results, blocks, SEEDS)
    block_values = np.mean([result.block_nll for result in results], axis=0)
    assert joined.nll == pytest.approx(block_values.mean())
    assert joined.standard_error == pytest.approx(block_values.std(ddof=1) / math.sqrt(30))
    assert joined.num_draws == 9


def test_the_summary_by_hand(three) -> None:
    blocks, results = three
    joined = join_seeds(results, blocks, SEEDS)
    found = summarise(results, joined)
    each = [math.exp(float(result.block_nll.mean())) for result in results]
    assert found["seed_perplexities"] == pytest.approx(each)
    assert found["seed_mean"] == pytest.approx(np.mean(each))
    assert found["seed_deviation"] == pytest.approx(np.std(each, ddof=1))
    assert found["perplexity"] == pytest.approx(math.exp(joined.nll))
    assert found["perplexity_se"] == pytest.approx(math.exp(joined.nll) * joined.standard_error)
    assert found["bits_per_byte"] == pytest.approx(joined.nll / math.log(2) / 2)
    assert (found["num_draws"], found["num_seeds"], found["num_tokens"]) == (3, 3, 360)
    assert math.isnan(summarise(results[:1], joined)["seed_deviation"])


def test_differences_are_paired(three) -> None:
    blocks, results = three
    joined = join_seeds(results, blocks, SEEDS)

    def worse(*args, **more):
        return noisy(*args, **more) + 0.25

    other = [evaluate(worse, blocks, mask_id=MASK, draws=3, seed=seed) for seed in SEEDS]
    found = compare(join_seeds(other, blocks, SEEDS), joined)
    assert found is not None
    assert found["difference"] == pytest.approx(0.25)
    assert found["se"] == pytest.approx(0, abs=1e-9), "although each has an error of its own"
    assert found["perplexity_ratio"] == pytest.approx(math.exp(0.25))
    assert joined.standard_error > 0.05
    elsewhere = rows(29, 12)
    assert compare(join_seeds(results, elsewhere, SEEDS), joined) is None


# --- sets and runs ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(
    small_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    options = {
        "bell": [],
        "wrapped": ["--data.wrap", "True"],
        "arm": ["--framework", "arm"],
        "apart": ["--data.document-attention"],
        "unpacked": ["--data.packing", "unpacked", "--data.documents", "line"],
    }
    for name, more in options.items():
        train_run(small_config("--train.steps", "2", *more), folder / name, is_quiet=True)
    return {name: load_run(folder / name) for name in options}


@pytest.fixture
def news(tmp_path: Path) -> TextSet:
    path = tmp_path / "news.csv"
    lines = [f'"{n}","Title {n}","It is the {n}. story ."\n' for n in range(40)]
    path.write_text("".join(lines), encoding="utf-8")
    return TextSet("ag_news", str(path))


def tokens(blocks: Blocks) -> np.ndarray:
    return np.asarray(blocks.tokens)


@pytest.mark.parametrize("eos", ["mdlm", "duo"])
@pytest.mark.parametrize("name", ["bell", "wrapped", "unpacked"])
def test_blocks_are_the_texts_cut_without_overlap(runs, news, eos, name: str) -> None:
    """AG News has no detokeniser: title and text as they are; rows as the run's own are framed."""
    run = runs[name]
    found, missing = load_sets([run], [news], eos)
    assert not missing
    ids = []
    for n in range(40):
        ids += run.tokenizer.encode(f"Title {n} It is the {n}. story .").tolist()
        ids += [run.tokenizer.eos_id] if eos == "mdlm" else []
    inner = 14 if name == "wrapped" else 16
    rows = np.array(ids[: len(ids) // inner * inner]).reshape(-1, inner)
    if name == "wrapped":
        begin, end = (
            np.full(len(rows), run.tokenizer.bos_id),
            np.full(len(rows), run.tokenizer.eos_id),
        )
        rows = np.column_stack([begin, rows, end])
    (blocks,) = found["ag_news"]
    assert np.array_equal(tokens(blocks), rows)


def test_a_set_keeps_its_own_rules_and_the_run_its_own(runs) -> None:
    data = replace(
        runs["bell"].config.data,
        detokenizer="lm1b",
        documents="file",
        column="body",
        mixture=("ptb=0.2",),
        valid="other.txt",
        insert_eos=False,
    )
    run = replace(runs["bell"], config=replace(runs["bell"].config, data=data))
    options = set_options(run, TextSet("ptb", "ptb.txt"), "mdlm")
    policy = find_policy(options, "ptb")
    assert (policy.detokenizer, policy.documents, policy.column) == ("ptb", "line", "sentence")
    assert (policy.insert_eos, policy.wrap) == (True, False)
    assert options.mixture == ()
    assert options.valid is None
    assert options.block_length == 16
    assert set_options(run, TextSet("ptb", "p.jsonl", "words"), "duo").column == "words"
    assert own_family(run, TextSet("ptb"))
    assert not own_family(run, TextSet("lm1b"))
    trained = replace(run, config=replace(run.config, data=DataOptions(train="wikitext2")))
    assert own_family(trained, TextSet("wikitext103"))


def test_ag_news_as_first_published_has_no_header() -> None:
    def column(**more: Any) -> str:
        return find_policy(DataOptions(train="ag_news", **more), "ag_news").column

    assert column(from_files="test.csv.gz") == "1+2"
    assert column(from_files="test.parquet") == "text"
    assert column() == "text"
    assert column(from_files="test.csv", column="text") == "text"
    assert find_policy(DataOptions(train="lm1b", from_files="a.csv"), "lm1b").column == "text"


def test_runs_that_cannot_read_the_sets_are_refused(runs) -> None:
    with pytest.raises(UserError, match="--eos duo leaves that out; use --eos mdlm"):
        check_run(runs["apart"], "duo")
    check_run(runs["apart"], "mdlm")
    data = DataOptions(train="toy:sticky", tokenizer="symbols:8")
    toy = replace(runs["bell"], config=replace(runs["bell"].config, data=data))
    with pytest.raises(UserError, match="trained on toy:sticky: it reads no text"):
        check_run(toy, "mdlm")


def test_missing_sets_are_all_named_and_given_files_must_be_there(runs, news, monkeypatch) -> None:
    def unreachable(name: str, *_: Any, **__: Any) -> None:
        raise UserError(f"cannot reach {name} on the hub (no network). Offline? Download it")

    monkeypatch.setattr("bellmask.data.catalogue.hub_source", unreachable)
    sets = [TextSet("ptb"), news, TextSet("arxiv")]
    missing = find_missing([runs["bell"]], sets, "mdlm")
    assert list(missing) == ["ptb", "arxiv"]
    assert missing["ptb"] == "cannot reach ptb/valid on the hub (no network)."
    with pytest.raises(UserError) as error:
        refuse_missing(missing, sets, skip_missing=False)
    for words in ("2 of 3 sets", "--from ptb=PATH --from arxiv=PATH", "--skip-missing", "network"):
        assert words in str(error.value)
    refuse_missing(missing, sets, skip_missing=True)
    wrong = [TextSet("ptb", "no/such.txt"), news]
    missing = find_missing([runs["bell"]], wrong, "mdlm")
    with pytest.raises(UserError, match=r"there is no file no/such\.txt") as error:
        refuse_missing(missing, wrong, skip_missing=True)
    assert "--from" not in str(error.value)
    with pytest.raises(UserError, match="none of the sets is here"):
        refuse_missing({"ptb": "gone"}, [TextSet("ptb")], skip_missing=True)


def test_text_that_turns_out_unreadable_is_missing_too(runs, tmp_path: Path) -> None:
    path = tmp_path / "papers.jsonl"
    path.write_text('{"body": "text"}\n' * 50, encoding="utf-8")
    text = TextSet("arxiv", str(path))
    assert not find_missing([runs["bell"]], [text], "mdlm")
    found, missing = load_sets([runs["bell"]], [text], "mdlm")
    assert not found
    assert "no column 'article'; it has: body" in missing["arxiv"]
    assert load_sets([runs["bell"]], [replace(text, column="body")], "mdlm")[0]["arxiv"]


def test_an_evaluation_that_was_kept_is_not_made_again(runs, news, tmp_path: Path) -> None:
    run = runs["bell"]
    blocks = load_sets([run], [news], "mdlm")[0]["ag_news"][0].spread(8)
    keep = [tmp_path / f"{seed}.npz" for seed in (1, 2)]
    seen: list[int] = []
    first = measure(
        run, blocks, draws=2, seeds=(1, 2), batch_size=5, on_batch=seen.append, keep=keep
    )
    assert seen == [5, 8, 13, 16]
    assert first[0].nll == run.evaluate(blocks, draws=2, seed=1).nll
    assert first[1].nll == run.evaluate(blocks, draws=2, seed=2).nll
    (tmp_path / "2.npz").write_bytes(b"half of it")
    seen.clear()
    again = measure(
        run, blocks, draws=2, seeds=(1, 2), batch_size=8, on_batch=seen.append, keep=keep
    )
    assert seen == [16], "the damaged one is made again, the other is not"
    assert [r.nll for r in again] == pytest.approx([r.nll for r in first])
    assert again[1].is_paired_with(first[1])


def test_an_exact_run_is_measured_once_and_stays_paired(runs, news) -> None:
    found, _ = load_sets([runs["bell"], runs["arm"]], [news], "mdlm")
    blocks = {"ag_news": [b.spread(8) for b in found["ag_news"]]}
    both = {"bell": runs["bell"], "arm": runs["arm"]}
    results = {
        ("ag_news", name): measure(run, own, draws=2, seeds=(1, 2))
        for (name, run), own in zip(both.items(), blocks["ag_news"])
    }
    assert len(results["ag_news", "arm"]) == 1
    sets = [news, TextSet("ptb")]
    numbers = collect(both, sets, blocks, {"ptb": "no network"}, results, [1, 2])
    text, gone = numbers["sets"]
    assert gone["missing"] == "no network"
    assert gone["results"] == gone["differences"] == {}
    bell, arm = text["results"]["bell"], text["results"]["arm"]
    assert (bell["is_exact"], arm["is_exact"]) == (False, True)
    difference = text["differences"]["arm"]
    assert difference["difference"] == pytest.approx(arm["nll"] - bell["nll"])
    masked = np.mean([result.block_nll for result in results["ag_news", "bell"]], axis=0)
    gap_B = results["ag_news", "arm"][0].block_nll - masked
    assert difference["se"] == pytest.approx(gap_B.std(ddof=1) / math.sqrt(8))
    logits = _left_to_right(runs["arm"], blocks["ag_news"][1])
    assert arm["perplexity"] == pytest.approx(math.exp(logits), rel=1e-5)


def _left_to_right(run: Run, blocks: Blocks) -> float:
    """Mean -log p of each token after those before it, a row at a time."""
    total, count = 0.0, 0
    for row in torch.from_numpy(tokens(blocks).astype(np.int64)):
        held = torch.cat([torch.tensor([run.tokenizer.mask_id]), row[:-1]])[None]
        places = torch.arange(len(row))[None]
        with torch.no_grad():
            logits = run.model(
                held, places[0], positions=places, target_positions=places + 1, mask=None
            )
        total -= float(logits.log_softmax(-1).gather(1, row[:, None]).sum())
        count += len(row)
    return total / count


def test_a_key_names_what_decides_a_measurement(runs) -> None:
    few, many = rows(4, 16), rows(5, 16)
    key = partial(result_key, runs["bell"], "weights")
    first = key(few, 2)
    assert first == key(few, 2)
    assert len({first, key(many, 2), key(few, 3)}) == 3
    assert result_key(runs["bell"], "other weights", few, 2) != first
    arm = partial(result_key, runs["arm"], "weights", few)
    assert arm(2) == arm(3), "an exact value has no draws"
    assert hash_weights(runs["bell"].model) != hash_weights(runs["arm"].model)
    assert hash_weights(runs["bell"].model) == hash_weights(copy.deepcopy(runs["bell"].model))


def test_the_titles_are_those_of_the_paper() -> None:
    assert list(zero_shot.TITLES) == [
        "ptb", "wikitext2", "wikitext103", "lm1b", "lambada", "ag_news", "pubmed", "arxiv",
    ]  # fmt: skip
    assert TextSet("text8").title == "text8"
