"""Log-probabilities of tokens given others, against plain loops over masks, orders and tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from continuation_tools import EXACT, bound, log_p, random_run, surprise, token_nll, with_data
from counted_progress import Counted
from pretrained_tools import make_config, make_lm, make_tokenizer

from bellmask import load
from bellmask.data.tokenizers import ByteTokenizer, FastTokenizer
from bellmask.evaluate.scorer import (
    Estimator,
    Request,
    RequestMaker,
    Score,
    Scorer,
    add_up,
    load_scorer,
    make_plan,
    run_scorer,
)
from bellmask.generate.fill import fill_rows
from bellmask.generate.settings import Sampling
from bellmask.utils.errors import UserError

BOS = (257,)
TIMED = "--model.modulation time"
TRIES = 200


def request(given="", target="", noise=0, begin=()):
    return Request((*begin, *given.encode()), tuple(target.encode()), noise)


@pytest.fixture(scope="module")
def make_run(small_config):
    """``make_run("gpt2 --framework arm")``: random weights, blocks of 48 tokens."""

    def make(text="dit"):
        kind, *options = text.split()
        return random_run(small_config(*EXACT, *options, "--data.block-length", "48"), kind)

    return make


@pytest.fixture(scope="module")
def own(make_run):
    return make_run()


def scorer(run, kind="auto", **more):
    return Scorer(run, Estimator(kind, **more))


def one(run, kind, asked, **more):
    (found,) = scorer(run, kind, **more).score([asked])
    return found


# --- texts → requests


def test_texts_are_cut_as_lm_eval_cuts_them(text_file):
    model = pytest.importorskip("lm_eval.api.model", reason="lm-eval is not installed")
    inner = make_tokenizer(text_file.read_text(encoding="utf-8")).backend_tokenizer
    pieces = FastTokenizer(inner, eos=inner.token_to_id("<|end|>"))
    stub = SimpleNamespace(backend="causal", tok_encode=lambda text: pieces.encode(text).tolist())
    maker = RequestMaker(pieces, 64, ())
    for context, continuation in (
        ("the cat", " sat on the mat"),
        ("the cat \n\t ", "sat"),
        ("the c", "at sat."),
        ("the\u00a0\u2003", "dog"),
        ("the cat <|end|>", " ran"),
    ):
        before, target = model.TemplateLM._encode_pair(stub, context, continuation)
        made = maker.requests(context, continuation, noise=5)
        assert made == [Request(tuple(before), tuple(target), 5)], (context, continuation)
    with pytest.raises(UserError, match="no tokens"):
        maker.requests("th", "e")


def test_windows_by_hand():
    """Halves of a block, each after as much as fits of what precedes it."""
    maker, bare = (RequestMaker(ByteTokenizer(), 8, begin) for begin in (BOS, ()))
    framed = partial(request, begin=BOS)
    for made, expected in (
        (maker.requests("", "cat"), [framed("", "cat")]),
        (maker.requests("abcdefgh", "xyz"), [framed("efgh", "xyz")]),
        (maker.requests("ctx", "abcdefg"), [framed("", "abcdefg")]),
        (bare.requests("ctx", "abcde"), [request("ctx", "abcde")]),
        (bare.requests("a", "\ud83db"), [request("a", "?b")]),
        (maker.rolling(""), []),
        (maker.rolling(" abcdefg"), [framed("", " abc"), framed("abc", "defg")]),
    ):
        assert made == expected
    assert maker.requests("ctx", "abcdefghij", noise=3) == [
        framed("ctx", "abcd", noise=3),
        framed("bcd", "efgh", noise=3),
        framed("defgh", "ij", noise=3),
    ]
    assert maker.before((257, 1, 2), 8) == (257, 1, 2), "no second start token"
    assert maker.before((257, 1, 2, 3), 3) == (257, 2, 3)
    first, second = Score(-3.0, 0.5, 4, 16, False), Score(-2.0, 0.0, 3, 7, True)
    assert add_up([first, second]) == Score(-5.0, 0.5, 7, 23, False)
    assert add_up([second, second]).is_exact


# --- masked runs


@pytest.mark.parametrize("kind", ["dit", "llama", "gpt2 --data.wrap True"])
def test_exact_is_the_sum_over_all_masks_and_left_to_right_a_chain(make_run, kind):
    run = make_run(kind)
    begin = BOS if run.is_wrapped or run.model.first_maskable else ()
    for given, target in (("the cat ", "sat."), ("a", "cat"), ("", "x")):
        asked = request(given, target, begin=begin)
        found = one(run, "auto", asked)
        value, count = pytest.approx(bound(run, asked), abs=2e-4), len(target)
        assert found == Score(value, 0.0, count, 2**count - 1, True) == one(run, "exact", asked)
    asked = request("the ", "cat sat on it", begin=begin)
    length = len(asked.target)
    chain = sum(log_p(run, asked, range(place, length))[place] for place in range(length))
    found = one(run, "left_to_right", asked)
    assert found == Score(pytest.approx(chain, abs=5e-4), 0.0, length, length, True)


def many(run, kind, asked, draws):
    """(estimates with fresh masks, the errors that they report)."""
    every = [replace(asked, noise=number) for number in range(TRIES)]
    found = scorer(run, kind, draws=draws, longest_exact=0).score(every)
    assert not any(score.is_exact for score in found)
    return np.array([(score.log_probability, score.error) for score in found]).T


@pytest.mark.parametrize(
    ("kind", "draws"), [("strata", 4), ("auto", 5), ("bernoulli", 4), ("diffullama", 4)]
)
def test_drawn_masks_are_unbiased_and_their_errors_honest(own, kind, draws):
    """But for diffullama's, whose expectation leaves out empty masks."""
    asked = request("the ", "cat..", " it")
    values, errors = many(own, kind, asked, draws)
    expected = one(own, "exact", asked).log_probability
    if kind == "diffullama":
        expected = 0.0
        for rate, count in product((0.25, 0.5, 0.75, 1.0), (1, 2, 3, 4, 5)):
            chance = rate**count * (1 - rate) ** (5 - count)
            for hidden in combinations(range(5), count):
                total = sum(log_p(own, asked, hidden).values())
                expected += chance * 5 * total / count / draws
    spread = values.std(ddof=1)
    assert abs(values.mean() - expected) < 4 * spread / math.sqrt(TRIES)
    if kind == "diffullama":
        return
    assert math.sqrt((errors**2).mean()) == pytest.approx(spread, rel=0.25)
    assert spread > 0.1


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_time_conditioned_run_is_told_a_time_of_its_mask(make_run, schedule):
    """A mask rate r is reached at the time where alpha = 1 - r."""
    run, asked = make_run(f"dit {TIMED} --schedule {schedule}"), request("the ", "cats", noise=3)
    plan = make_plan(asked, Estimator("strata", 6), seed=5, uses_time=True)
    time_R = run.framework.schedule.inverse(torch.from_numpy(1 - plan.rate_R)).numpy()
    total = 0.0
    for mask, weight, t in zip(plan.is_masked_RL, plan.weight_R, time_R, strict=True):
        hidden = np.flatnonzero(mask).tolist()
        total += weight * sum(log_p(run, asked, hidden, t=float(t)).values())
    (found,) = scorer(run, "auto", draws=6).score([asked], seed=5)
    assert found.log_probability == pytest.approx(total, rel=1e-4)
    assert not found.is_exact
    assert (np.abs(time_R - plan.rate_R).max() > 0.02) == (schedule == "cosine")


def test_seed_and_noise_number_decide_the_masks(own):
    asked = [request("the ", "cat sat on"), request("the ", "dogs")]
    ours = scorer(own, draws=8)
    first, other = ours.score(asked), ours.score(asked, seed=1)
    assert first == ours.score(asked)
    assert first[0] != other[0]
    assert first[1] == other[1], "the short one is exact"
    assert [ours.is_exact(a) for a in asked] == [s.is_exact for s in first] == [False, True]
    assert ours.score([replace(asked[0], noise=5)])[0] != first[0]
    assert math.isnan(scorer(own, draws=1).score(asked)[0].error)
    # bernoulli masks of one token are mostly empty: such a pass is not made
    calls = []
    hook = own.model.register_forward_pre_hook(lambda _, given: calls.append(len(given[0])))
    found = scorer(own, "bernoulli", draws=40, batch_tokens=64).score([request("the ", "x")])
    hook.remove()
    assert sum(calls) == found[0].num_passes < 40
    assert scorer(own).score([]) == scorer(own).is_greedy([]) == []


@pytest.mark.parametrize("kind", ["strata", "bernoulli", "diffullama"])
def test_common_random_numbers(kind):
    """The same masks whatever the tokens, unless each choice draws its own."""

    def masks(target=(1, 2, 3, 4), given=(), noise=9, seed=3, is_common=True):
        estimator = Estimator(kind, draws=6, common=is_common)
        made = make_plan(Request(given, target, noise), estimator, seed=seed, uses_time=False)
        return [*made.is_masked_RL.tolist(), *made.rate_R.tolist()]

    assert masks() == masks(target=(8, 8, 8, 8), given=(5,))
    alone = [{}, {"target": (8, 8, 8, 8)}, {"given": (7,)}]
    others = [masks(**more, is_common=False) for more in alone]
    every = [masks(), masks(noise=10), masks(seed=4), *others]
    assert all(a != b for a, b in combinations(every, 2))


# --- causal runs


def in_order(run, asked, order):
    """Own trunk: start token, what is shown, then the target's tokens in an order."""
    tokens, start = asked.tokens, len(asked.given)
    shown = [p for p in range(len(tokens)) if not start <= p < start + len(asked.target)]
    places = shown + [start + place for place in order]
    with torch.no_grad():
        logits = run.model(
            torch.tensor([[run.tokenizer.mask_id, *(tokens[p] for p in places[:-1])]]),
            torch.arange(len(shown), len(tokens)),
            positions=torch.tensor([0, *(p + 1 for p in places[:-1])]),
            target_positions=torch.tensor([p + 1 for p in places]),
        )
    log_p_NV = logits.double().log_softmax(1)
    return float(sum(log_p_NV[n, asked.target[place]] for n, place in enumerate(order)))


def by_library(run, asked):
    """A causal LM: one call of the language model itself."""
    with torch.no_grad():
        logits = run.model.language_model(torch.tensor([asked.tokens])).logits[0]
    log_p_LV, start = logits.double().log_softmax(1), len(asked.given) - 1
    return float(sum(log_p_LV[start + n, token] for n, token in enumerate(asked.target)))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "dit --data.wrap True", "dit"])
def test_an_arm_is_the_chain_rule(make_run, kind):
    run = make_run(f"{kind} --framework arm")
    (asked,) = scorer(run).requests("the cat", " sat on it", noise=3)
    assert (asked.given[:1] == BOS) == (kind != "dit")
    is_own = kind.startswith("dit")
    total = in_order(run, asked, range(10)) if is_own else by_library(run, asked)
    found = one(run, "auto", asked)
    assert found == Score(pytest.approx(total, abs=2e-4), 0.0, 10, 1, True)
    assert one(run, "strata", asked) == found
    assert scorer(run).is_exact(asked)


def test_an_aoarm_is_a_mean_over_orders(make_run):
    """What follows the gap is shown too; over all orders the mean is the bound."""
    run, asked = make_run("dit --framework aoarm"), request("the ", "cat", " sat")
    chains = np.array([in_order(run, asked, order) for order in permutations(range(3))])
    every = [replace(asked, noise=number) for number in range(TRIES)]
    found = scorer(run, draws=2).score(every)
    values = np.array([score.log_probability for score in found])
    error = chains.std() / math.sqrt(2)
    assert abs(values.mean() - chains.mean()) < 4 * error / math.sqrt(TRIES)
    assert values.std() == pytest.approx(error, rel=0.25)
    assert math.sqrt(np.mean([s.error**2 for s in found])) == pytest.approx(error, rel=0.25)
    assert (found[0].num_passes, found[0].is_exact) == (2, False)
    singles = scorer(run, draws=1).score(every[:30])
    assert all(math.isnan(score.error) for score in singles)
    near = [np.abs(chains - score.log_probability) for score in singles]
    assert max(apart.min() for apart in near) < 2e-4
    assert {int(apart.argmin()) for apart in near} == set(range(6))


def test_what_cannot_be_asked_is_refused(make_run):
    timed = make_run(f"dit {TIMED}")
    assert [Estimator().kind_for(n) for n in (1, 6, 7)] == ["exact", "exact", "strata"]
    assert Estimator(longest_exact=12).kind_for(12) == "exact"
    assert Estimator().kind_for(1, uses_time=True) == "strata"
    for refused, words in (
        (lambda: Estimator("exact").kind_for(13), "13 tokens"),
        (Estimator("strat").check_estimator, "'strata'"),
        (Estimator(longest_exact=-1).check_estimator, "--longest-exact"),
        (lambda: scorer(make_run("dit --framework sigma_arm")), "sigma-ARM"),
        (lambda: one(timed, "left_to_right", request("", "a")), "left_to_right"),
    ):
        with pytest.raises(ValueError, match=words):
            refused()


@pytest.mark.parametrize("name", ["dit", "llama", "dit aoarm", "dit arm", "gpt2 arm"])
def test_no_score_depends_on_its_batch(make_run, name):
    """On widths of 32 and 48, padded and full: the last but one fills the block."""
    run = make_run(name.replace(" ", " --framework "))
    texts = ("a", "cat", "sat on the", "ran under the tree and", "x" * 25)
    asked = [request("the cat ", text, noise=2, begin=BOS) for text in texts]
    asked += [request("c" * 22, "y" * 25, begin=BOS), request("", "short", begin=BOS)]
    alone = [scorer(run, draws=3).score([a])[0] for a in asked]
    for tokens, given, wanted in ((1, asked, alone), (200, asked[::-1] * 2, alone[::-1] * 2)):
        progress = Counted()
        found = scorer(run, draws=3, batch_tokens=tokens).score(given, progress=progress)
        assert progress.done == len(given)
        for score, other in zip(found, wanted, strict=True):
            value = pytest.approx(other.log_probability, rel=1e-5, abs=1e-5)
            error = pytest.approx(other.error, rel=1e-4, abs=1e-4, nan_ok=True)
            assert score == replace(other, log_probability=value, error=error)


# --- is_greedy: what the samplers write into a gap of the same length

GAPS = [("the cat ", 1), ("a", 3), ("x", 6), ("the dog ", 9)]


def written(run, asked, length):
    surest = Sampling(rule="most_confident", grid="count", per_step=1, temperature=0)
    row = torch.tensor([*asked.given, *([run.tokenizer.mask_id] * length)])
    (filled,) = fill_rows(run, [row], surest, longest=48)
    return tuple(filled.ids)


def wrong_at(target, place):
    return tuple((token + 1) % 256 if n == place else token for n, token in enumerate(target))


@pytest.mark.parametrize("kind", ["dit", "gpt2", "llama", f"dit {TIMED} --schedule cosine"])
def test_a_masked_run_is_greedy_where_it_would_write_the_target(make_run, kind):
    run, asked, expected = make_run(kind), [], []
    for before, length in GAPS:
        gap = request(before, "", begin=BOS)
        target = written(run, gap, length)
        wrong = [wrong_at(target, n) for n in {0, length // 2, length - 1}]
        asked += [replace(gap, target=tokens) for tokens in (target, *wrong)]
        expected += [True] + [False] * len(wrong)
    progress = Counted()
    assert scorer(run, batch_tokens=1).is_greedy(asked, progress) == expected
    assert progress.done == len(asked)
    assert scorer(run).is_greedy(asked[::-1]) == expected[::-1]


# --- whole texts under a model that reads left to right


@pytest.fixture(params=["bos", "no bos"])
def small_gpt2(request, tmp_path):
    """GPT-2's architecture and signs (BOS is EOS) with random weights and letters as tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    sign = "<|endoftext|>"
    letters = [sign, "?", *"abcdefgh "]
    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    signs = {"eos_token": sign, "unk_token": "?"}
    signs |= {"bos_token": sign} if request.param == "bos" else {}
    PreTrainedTokenizerFast(tokenizer_object=inner, **signs).save_pretrained(tmp_path)
    model = make_lm(make_config("gpt2", len(letters), n_positions=24))
    model.save_pretrained(tmp_path)
    return tmp_path, model, [0] if request.param == "bos" else []


def test_a_causal_lm_counts_as_the_public_codes_do(small_gpt2):
    """A given BOS is the first EOS; positions end at 24; a sign that is spelled is text."""
    folder, model, begin = small_gpt2
    scorer = load_scorer(str(folder), device="cpu")
    assert (scorer.context, scorer.name) == (24, folder.name)
    samples = [["abba cab", "dad", "a"], ["hgfedcba" * 4], ["ha"], ["a"], ["", ""], [], ["<|"]]
    samples.append(["a<|endoftext|>"])
    alone = [scorer.score([sample])[0] for sample in samples]
    for size in (1, 3, 8):
        progress = Counted()
        found = replace(scorer, batch_size=size).score(samples, progress)
        assert progress.done == len(samples)
        assert [replace(a, nll=0) for a in found] == [replace(a, nll=0) for a in alone]
        np.testing.assert_allclose([a.nll for a in found], [a.nll for a in alone], rtol=1e-5)
    for sample, score in zip(samples[:3], found):
        ids = [2 + "abcdefgh ".index(c) if c != "|" else 0 for c in "|".join(sample)]
        row = (begin + ids)[:24]
        is_counted_L = [t != 0 or (n == row.index(0) and not begin) for n, t in enumerate(row)][1:]
        nll = np.array(token_nll(model, row))[is_counted_L]
        assert (score.nll, score.num_tokens) == (pytest.approx(nll.sum(), rel=1e-5), len(nll))
        assert score.ids == [t for t in row if t]
        assert score.is_cut == (len(ids) > 24)
    assert [a.num_tokens for a in found[3:6]] == [0, 0, 0], "too short"
    assert 0 not in found[7].ids
    assert load_scorer(str(folder), device="cpu", context=10).context == 10


def test_a_causal_lm_scores_in_float32_however_it_was_stored(small_gpt2, monkeypatch):
    folder, model, _ = small_gpt2
    model.bfloat16().save_pretrained(folder)
    for where in ("bellmask.evaluate.scorer", "bellmask.utils.distributed"):  # as on a GPU
        monkeypatch.setattr(f"{where}.pick_precision", lambda *_: torch.bfloat16, raising=False)
    losses = load_scorer(str(folder), device="cpu").token_losses
    assert losses.args[0].dtype == torch.float32


@pytest.fixture(scope="module", params=["plain", "wrapped", "causal LM"])
def arm(request, zoo):
    """(run, what its rows begin with): on our own trunk, and on a causal LM that needs BOS."""
    run = load(zoo / ("gpt2" if request.param == "causal LM" else "arm"))
    if request.param == "wrapped":
        run = with_data(run, wrap=True)
    return run, [] if request.param == "plain" else [run.tokenizer.bos_id]


@torch.no_grad()
def arm_nll(run, begin, ids):
    """-log p of each token after ``begin``, each from a pass over its own prefix."""
    if run.model.first_maskable:
        return token_nll(run.model.language_model, begin + ids)
    found, row = [], begin + ids
    for n, token in enumerate(row):  # slot 0 is the start token
        x, places = torch.tensor([[run.tokenizer.mask_id, *row[:n]]]), torch.arange(n + 1)[None]
        logits = run.model(x, torch.tensor([n]), positions=places, target_positions=places + 1)
        found.append(surprise(logits[0], token))
    return found[len(begin) :]


def test_an_arm_scores_pieces_of_its_block_from_the_begin_sign(arm):
    run, begin = arm
    texts = ["the cat sat", "the old dog ran under the new tree and saw a red sun.", "a", ""]
    size, scorer = 16 - len(begin), run_scorer(run)
    assert scorer.context == 16
    for batch_size in (1, 4):
        scores = replace(scorer, batch_size=batch_size).score([[text] for text in texts])
        for text, score in zip(texts[:2], scores):
            ids = list(text.encode())
            pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
            expected = math.fsum(nll for piece in pieces for nll in arm_nll(run, begin, piece))
            assert (score.num_tokens, score.ids, score.is_cut) == (len(ids), ids, False)
            assert score.nll == pytest.approx(expected, rel=1e-5)
            if run.model.first_maskable == len(begin):  # the run's own likelihood has no frame
                assert run.nll([text])[0].nll == pytest.approx(score.nll, rel=1e-5)
        assert [s.num_tokens for s in scores[2:]] == [0, 0]
    # of the EOS between documents the first counts
    nll = arm_nll(run, begin, [*b"cat", run.tokenizer.eos_id, *b"dog", run.tokenizer.eos_id, *b"a"])
    (score,) = scorer.score([["cat", "dog", "a"]])
    assert score.num_tokens == 8
    assert score.nll == pytest.approx(math.fsum(nll) - nll[7], rel=1e-5)


def test_scorers_are_found_by_their_folders_and_others_refused(zoo, tmp_path, monkeypatch):
    assert load_scorer(str(zoo / "arm"), context=2).has_pieces
    (tmp_path / "empty").mkdir()
    for name, more, words in (
        (zoo / "bell", {}, "mdm"),
        (tmp_path / "empty", {}, "cannot load scorer"),
        (tmp_path / "none", {}, "none"),
        ("gpt2-large", {"context": 1}, "--context"),
    ):
        with pytest.raises(UserError, match=words):
            load_scorer(str(name), **more)

    def offline(name):
        raise OSError(f"no network for {name}")

    monkeypatch.setattr("bellmask.evaluate.scorer.check_shards", offline)
    with pytest.raises(UserError, match="no network for owner/name"):
        load_scorer("owner/name")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"bellmask\[gguf\]"):
        load_scorer("smollm2", cache=str(tmp_path))
    assert not list(tmp_path.rglob("*.whl"))
