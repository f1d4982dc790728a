"""Log-probabilities of continuations against plain loops over masks, orders and tokens.

Texts become asks as lm-eval cuts them; a score depends on neither its batch nor its padding.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from continuation_tools import EXACT, bound, ids, log_p, random_run
from counted_progress import Counted
from pretrained_tools import make_tokenizer

from bellmask.data.tokenizers import ByteTokenizer, FastTokenizer
from bellmask.evaluate.continuations import (
    Ask,
    AskMaker,
    ContinuationScorer,
    Estimator,
    Score,
    add_up,
    make_plan,
)
from bellmask.generate.fill import fill_rows
from bellmask.generate.settings import Sampling
from bellmask.utils.errors import UserError

BOS = (257,)
TIMED = "--model.modulation time"


@pytest.fixture(scope="module")
def make_run(small_config):
    """``make_run("gpt2", "--framework arm")``: random weights, blocks of 48 tokens."""

    def make(kind="dit", options=""):
        args = [*EXACT, *options.split(), "--data.block-length", "48"]
        return random_run(small_config(*args), kind)

    return make


@pytest.fixture(scope="module")
def own(make_run):
    return make_run()


def scorer(run, kind="auto", batch_tokens=8192, **more):
    return ContinuationScorer(run, Estimator(kind, **more), batch_tokens=batch_tokens)


def one(run, kind, ask, **more):
    (found,) = scorer(run, kind, **more).score([ask])
    return found


# --- texts → asks ----------------------------------------------------------------------------


def test_texts_are_cut_as_lm_eval_cuts_them(text_file):
    model = pytest.importorskip("lm_eval.api.model", reason="lm-eval is not installed")
    inner = make_tokenizer(text_file.read_text(encoding="utf-8")).backend_tokenizer
    pieces = FastTokenizer(inner, eos=inner.token_to_id("<|end|>"))
    stub = SimpleNamespace(backend="causal", tok_encode=lambda text: pieces.encode(text).tolist())
    maker = AskMaker(pieces, 64, ())
    for context, continuation in (
        ("the cat", " sat on the mat"),
        ("the cat ", "sat"),
        ("the cat \n\t ", "sat"),
        ("the c", "at sat."),
        ("   ", "the dog"),
        (" the", "  dog"),
        ("the\u00a0\u2003", "dog"),
        ("na\u00efve \U0001f600", "\U0001f680 then"),
        ("a combining e", "\u0301 sign"),
        ("the cat <|end|>", " ran"),
        ("line\r\n", "line\r\n"),
        ("the", " "),
    ):
        before, target = model.TemplateLM._encode_pair(stub, context, continuation)
        asks = maker.asks(context, continuation, noise=5)
        assert asks == [Ask(tuple(before), tuple(target), (), 5)], (context, continuation)
    (moved,) = maker.asks("the cat ", "sat")
    assert moved.target == maker.encode(" sat") != maker.encode("sat"), "the cut matters"
    for context, continuation in (("the", ""), ("th", "e")):
        with pytest.raises(UserError, match="no tokens"):
            maker.asks(context, continuation)


def byte_maker(block, begin=()):
    return AskMaker(ByteTokenizer(), block, begin)


def test_windows_by_hand():
    """Halves of a block, each after as much as fits of what precedes it."""
    maker = byte_maker(8, BOS)
    assert maker.asks("ctx", "abcdefghij", after="!?", noise=3) == [
        Ask((257, *b"ctx"), tuple(b"abcd"), (), 3),
        Ask((257, *b"bcd"), tuple(b"efgh"), (), 3),
        Ask((257, *b"fgh"), tuple(b"ij"), tuple(b"!?"), 3),
    ]
    assert maker.asks("", "cat") == [Ask(BOS, ids("cat"))]
    assert maker.asks("abcdefgh", "xyz") == [Ask((257, *b"efgh"), ids("xyz"))], "the oldest goes"
    assert maker.asks("ctx", "abcdefg") == [Ask(BOS, ids("abcdefg"))]
    assert byte_maker(8).asks("ctx", "abcde") == [Ask(ids("ctx"), ids("abcde"))]
    assert len(maker.asks("ctx", "abcdefgh")) == 2
    assert byte_maker(16).asks("a", "\ud83db") == [Ask(tuple(b"a"), tuple(b"?b"))]
    assert maker.before((257, 1, 2), 8) == (257, 1, 2), "no second begin sign"
    assert maker.before((257, 1, 2, 3), 3) == (257, 2, 3)
    assert maker.rolling("") == []
    assert maker.rolling(" abcdefghi", noise=2) == [
        Ask(BOS, tuple(b" abc"), (), 2),
        Ask((257, *b"abc"), tuple(b"defg"), (), 2),
        Ask((257, *b"cdefg"), tuple(b"hi"), (), 2),
    ]
    # what follows gets half of the room, or what the context leaves
    maker = byte_maker(16, BOS)
    (full,) = maker.asks("abcdefghijklmnop", "xyz", after="0123456789")
    assert full == Ask((257, *b"klmnop"), ids("xyz"), ids("012345"))
    (short,) = maker.asks("ab", "xyz", after="0123456789abc")
    assert short == Ask((257, *b"ab"), ids("xyz"), ids("0123456789"))


@pytest.mark.parametrize("begin", [(), BOS])
def test_every_token_is_scored_once(begin):
    def text_of(tokens):
        return bytes(token for token in tokens if token < 256).decode()

    for block in (2, 3, 8, 9):
        for length in (1, 7, 8, 9, 40):
            text = "".join(chr(97 + place % 26) for place in range(length))
            made = byte_maker(block, begin).asks("some context", text, after="what follows")
            assert "".join(text_of(ask.target) for ask in made) == text
            assert not any(ask.after for ask in made[:-1])
            for ask in made:
                assert 1 <= ask.length <= block
                assert ask.given[: len(begin)] == begin
                assert text_of(ask.given + ask.target) in "some context" + text
                assert "what follows".startswith(text_of(ask.after))


def test_scores_of_windows_add_up():
    one, two = Score(-3.0, 0.5, 4, 16, False), Score(-2.0, 0.0, 3, 7, True)
    assert add_up([one, two]) == Score(-5.0, 0.5, 7, 23, False)
    assert add_up([two, two]).is_exact
    assert add_up([one, one]).error == 1.0
    assert math.isnan(add_up([one, Score(-1.0, math.nan, 1, 1, False)]).error)


# --- masked runs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [("dit", ""), ("dit", "--data.wrap True"), ("llama", ""), ("gpt2", "--data.wrap True")],
)
def test_exact_is_the_sum_over_all_masks_and_left_to_right_a_chain(make_run, kind, options):
    run = make_run(kind, options)
    begin = BOS if run.is_wrapped or run.model.first_maskable else ()
    for given, target, after in (("the cat ", "sat.", ""), ("a", "cat", " ran"), ("", "x", "yz")):
        ask = Ask(begin + ids(given), ids(target), ids(after))
        found = one(run, "auto", ask)
        value, count = pytest.approx(bound(run, ask), abs=2e-4), len(target)
        assert found == Score(value, 0.0, count, 2**count - 1, True)
        assert one(run, "exact", ask) == found
    ask = Ask(begin + ids("the "), ids("cat sat on it"), ids("!"))
    length = len(ask.target)
    chain = sum(log_p(run, ask, range(place, length))[place] for place in range(length))
    found = one(run, "left_to_right", ask)
    assert found == Score(pytest.approx(chain, abs=5e-4), 0.0, length, length, True)


@pytest.mark.parametrize("target", ["a", "at", "cats"])
def test_the_bound_is_the_mean_over_all_orders(own, target):
    """Sec. 2.2: in any order, each token after those that came before it."""
    ask = Ask(ids("the "), ids(target), ids("!"))
    chains = []
    for order in permutations(range(len(target))):
        steps = [log_p(own, ask, order[n:])[place] for n, place in enumerate(order)]
        chains.append(sum(steps))
    assert one(own, "exact", ask).log_probability == pytest.approx(np.mean(chains), abs=2e-4)


TRIES = 200


def many(run, kind, ask, draws):
    """(estimates with fresh masks, the errors that they report)."""
    asks = [replace(ask, noise=number) for number in range(TRIES)]
    found = scorer(run, kind, draws=draws, longest_exact=0).score(asks)
    assert not any(score.is_exact for score in found)
    return np.array([(score.log_probability, score.error) for score in found]).T


@pytest.mark.parametrize(("kind", "draws"), [("strata", 4), ("auto", 5), ("bernoulli", 4)])
def test_drawn_masks_are_unbiased_and_their_errors_honest(own, kind, draws):
    ask = Ask(ids("the "), ids("cat.."), ids(" it"))
    values, errors = many(own, kind, ask, draws)
    exact = one(own, "exact", ask).log_probability
    spread = values.std(ddof=1)
    assert abs(values.mean() - exact) < 4 * spread / math.sqrt(TRIES)
    assert math.sqrt((errors**2).mean()) == pytest.approx(spread, rel=0.25)
    assert spread > 0.1


def test_diffullama_is_off_by_its_empty_masks(own):
    """Its expectation, mask by mask; without empty ones it would be far from it."""
    ask, draws = Ask(ids("the "), ids("cat")), 4
    expected = 0.0
    for rate in (0.25, 0.5, 0.75, 1.0):
        for count in (1, 2, 3):
            for hidden in combinations(range(3), count):
                chance = rate**count * (1 - rate) ** (3 - count)
                expected += chance * 3 * sum(log_p(own, ask, hidden).values()) / count / draws
    values, _ = many(own, "diffullama", ask, draws)
    error = values.std(ddof=1) / math.sqrt(TRIES)
    assert abs(values.mean() - expected) < 4 * error
    assert abs(expected - one(own, "exact", ask).log_probability) > 8 * error


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_time_conditioned_run_is_told_a_time_of_its_mask(make_run, schedule):
    """A mask rate r is reached at the time where alpha = 1 - r."""
    run = make_run("dit", f"{TIMED} --schedule {schedule}")
    ask = Ask(ids("the "), ids("cats"), (), 3)
    plan = make_plan(ask, Estimator("strata", 6), seed=5, uses_time=True)
    time_R = run.framework.schedule.inverse(torch.from_numpy(1 - plan.rate_R)).numpy()
    total = 0.0
    for mask, weight, t in zip(plan.is_masked_RL, plan.weight_R, time_R, strict=True):
        total += weight * sum(log_p(run, ask, np.flatnonzero(mask).tolist(), t=float(t)).values())
    (found,) = scorer(run, "auto", draws=6).score([ask], seed=5)
    assert found.log_probability == pytest.approx(total, rel=1e-4)
    assert not found.is_exact
    assert log_p(run, ask, [0], t=0.1) != log_p(run, ask, [0], t=0.9)
    assert (np.abs(time_R - plan.rate_R).max() > 0.02) == (schedule == "cosine")


def test_seed_and_noise_number_decide_the_masks(own):
    asks = [Ask(ids("the "), ids("cat sat on")), Ask(ids("the "), ids("dogs"))]
    ours = scorer(own, draws=8)
    first, other = ours.score(asks), ours.score(asks, seed=1)
    assert first == ours.score(asks)
    assert first[0] != other[0]
    assert first[1] == other[1], "the short one is exact"
    assert [ours.is_exact(ask) for ask in asks] == [score.is_exact for score in first]
    assert [score.is_exact for score in first] == [False, True]
    assert scorer(own, draws=8, is_common=False).score(asks)[0] != first[0]
    same, alike, apart = ours.score([asks[0], asks[0], replace(asks[0], noise=5)])
    assert same == alike != apart
    assert math.isnan(scorer(own, draws=1).score(asks)[0].error)


def test_passes_that_score_nothing_are_not_made(own):
    """Bernoulli masks of one token are mostly empty; the network sees the others alone."""
    calls = []
    hook = own.model.register_forward_pre_hook(lambda _, given: calls.append(len(given[0])))
    asks = [Ask(ids("the "), ids("x"), (), number) for number in range(20)]
    found = scorer(own, "bernoulli", draws=2, batch_tokens=64).score(asks)
    hook.remove()
    assert sum(calls) == sum(score.num_passes for score in found) < 40
    assert scorer(own).score([]) == scorer(own).is_greedy([]) == []


# --- causal runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_an_arm_is_the_chain_rule(make_run, kind):
    run = make_run(kind, "--framework arm")
    for given in ("", "the cat "):
        ask = Ask((257, *ids(given)), ids("sat on it"), noise=3)
        with torch.no_grad():
            logits = run.model.language_model(torch.tensor([[*ask.given, *ask.target]])).logits[0]
        log_p_LV, start = logits.double().log_softmax(1), len(ask.given) - 1
        total = float(sum(log_p_LV[start + n, token] for n, token in enumerate(ask.target)))
        found = one(run, "auto", ask)
        assert found == Score(pytest.approx(total, abs=2e-4), 0.0, 9, 1, True)
        assert one(run, "strata", ask) == found
        assert scorer(run).is_exact(ask)


def in_order(run, ask, order):
    """Own trunk: begin sign, what is shown, then the target's tokens in an order."""
    tokens = [*ask.given, *ask.target, *ask.after]
    start = len(ask.given)
    shown = [p for p in range(len(tokens)) if not start <= p < start + len(ask.target)]
    places = shown + [start + place for place in order]
    with torch.no_grad():
        logits = run.model(
            torch.tensor([[run.tokenizer.mask_id, *(tokens[p] for p in places[:-1])]]),
            torch.arange(len(shown), len(tokens)),
            positions=torch.tensor([0, *(p + 1 for p in places[:-1])]),
            target_positions=torch.tensor([p + 1 for p in places]),
        )
    log_p_NV = logits.double().log_softmax(1)
    return float(sum(log_p_NV[n, ask.target[place]] for n, place in enumerate(order)))


@pytest.mark.parametrize("wrap", ["True", "False"])
def test_an_arm_of_our_own_trunk(make_run, wrap):
    run = make_run("dit", f"--framework arm --data.wrap {wrap}")
    (ask,) = scorer(run).asks("the cat", " sat on it")
    assert ask.given[:1] == (BOS if wrap == "True" else ids("t"))
    value = pytest.approx(in_order(run, ask, range(10)), abs=2e-4)
    assert one(run, "auto", ask) == Score(value, 0.0, 10, 1, True)


def test_an_aoarm_is_a_mean_over_orders(make_run):
    """What follows the gap is shown too; over all orders the mean is the bound."""
    run = make_run("dit", "--framework aoarm")
    ask = Ask(ids("the "), ids("cat"), ids(" sat"))
    chains = np.array([in_order(run, ask, order) for order in permutations(range(3))])
    asks = [replace(ask, noise=number) for number in range(TRIES)]
    found = scorer(run, draws=2).score(asks)
    values = np.array([score.log_probability for score in found])
    error = chains.std() / math.sqrt(2)
    assert abs(values.mean() - chains.mean()) < 4 * error / math.sqrt(TRIES)
    assert values.std() == pytest.approx(error, rel=0.25)
    assert math.sqrt(np.mean([s.error**2 for s in found])) == pytest.approx(error, rel=0.25)
    assert (found[0].num_passes, found[0].is_exact) == (2, False)
    singles = scorer(run, draws=1).score(asks[:30])
    assert all(math.isnan(score.error) for score in singles)
    near = [np.abs(chains - score.log_probability) for score in singles]
    assert max(apart.min() for apart in near) < 2e-4
    assert {int(apart.argmin()) for apart in near} == set(range(6))


def test_what_cannot_be_asked_is_refused(make_run, own):
    arm = scorer(make_run("dit", "--framework arm"))
    behind, nothing = [Ask(ids("a"), ids("b"), ids("c"))], [Ask((1,), ())]
    for refused, words in (
        (lambda: scorer(make_run("dit", "--framework sigma_arm")), "sigma-ARM"),
        (lambda: arm.score(behind), "an ARM"),
        (lambda: arm.is_greedy(behind), "an ARM"),
        (lambda: scorer(own, batch_tokens=0), "--batch-tokens"),
        (lambda: one(make_run("dit", TIMED), "exact", Ask((), (1,))), "exact"),
        (lambda: scorer(make_run("gpt2")).score([Ask((), (1,))]), "begin sign"),
        (lambda: scorer(own).score(nothing), "target"),
    ):
        with pytest.raises(ValueError, match=words):
            refused()


# --- batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dit", "gpt2", "llama", "dit aoarm", "dit arm", "gpt2 arm"])
def test_no_score_depends_on_its_batch(make_run, name):
    """On widths of 32 and 48, padded and full: the last but one fills the block."""
    kind, *framework = name.split()
    run = make_run(kind, f"--framework {framework[0]}" if framework else "")
    texts = ("a", "cat", "sat on the", "ran under the tree and", "x" * 25)
    asks = [Ask((257, *ids("the cat ")), ids(text), (), 2) for text in texts]
    asks += [Ask((257, *ids("c" * 22)), ids("y" * 25)), Ask(BOS, ids("short"))]
    alone = [scorer(run, draws=3).score([ask])[0] for ask in asks]
    for tokens, given, wanted in ((1, asks, alone), (200, asks[::-1] * 2, alone[::-1] * 2)):
        progress = Counted()
        found = scorer(run, draws=3, batch_tokens=tokens).score(given, progress=progress)
        assert progress.done == len(given)
        for score, other in zip(found, wanted, strict=True):
            value = pytest.approx(other.log_probability, rel=1e-5, abs=1e-5)
            error = pytest.approx(other.error, rel=1e-4, abs=1e-4, nan_ok=True)
            assert score == replace(other, log_probability=value, error=error)


# --- is_greedy: what the samplers write into a gap of the same length -------------------------

GAPS = [("the cat ", 1, ""), ("a", 3, "b"), ("x", 6, " ran away"), ("the dog ", 9, "")]


def written(run, given, length, after):
    surest = Sampling(rule="most_confident", grid="count", per_step=1, temperature=0)
    row = torch.tensor([*given, *([run.tokenizer.mask_id] * length), *after])
    (filled,) = fill_rows(run, [row], surest, longest=48)
    return filled.ids


def wrong_at(target, place):
    return tuple((token + 1) % 256 if n == place else token for n, token in enumerate(target))


@pytest.mark.parametrize(
    ("kind", "options"),
    [("dit", ""), ("gpt2", ""), ("llama", ""), ("dit", f"{TIMED} --schedule cosine")],
)
def test_a_masked_run_is_greedy_where_it_would_write_the_target(make_run, kind, options):
    run = make_run(kind, options)
    asks, expected = [], []
    for before, length, behind in GAPS:
        given, after = (257, *ids(before)), ids(behind)
        target = written(run, given, length, after)
        asks.append(Ask(given, tuple(target), after))
        asks += [Ask(given, wrong_at(target, n), after) for n in {0, length // 2, length - 1}]
        expected += [True] + [False] * (len(asks) - len(expected) - 1)
    signs = (run.tokenizer.pad_id, run.tokenizer.eos_id)
    asks.append(Ask(BOS, signs))
    expected.append(tuple(written(run, BOS, 2, ())) == signs)
    progress = Counted()
    assert scorer(run, batch_tokens=1).is_greedy(asks, progress) == expected
    assert progress.done == len(asks)
    assert scorer(run).is_greedy(asks[::-1]) == expected[::-1]


def test_the_surest_token_is_written_first(own):
    """Somewhere it is not the first: left to right would write something else."""
    differing = 0
    for before, length, behind in GAPS[1:]:
        given, after = (257, *ids(before)), ids(behind)
        row = torch.tensor([[*given, *([own.tokenizer.mask_id] * length), *after]])
        for place in range(len(given), len(given) + length):
            with torch.no_grad():
                row[0, place] = own.model(row, torch.tensor([place])).argmax()
        made = row[0, len(given) : len(given) + length].tolist()
        differing += made != written(own, given, length, after)
    assert differing


@pytest.mark.parametrize("framework", ["arm", "aoarm"])
def test_a_causal_run_is_greedy_from_left_to_right(make_run, framework):
    """By a loop: begin sign, what is shown, then one token after the other."""
    run = make_run("dit", f"--framework {framework}")
    given, target = ids("the cat "), []
    for _ in range(5):
        row = torch.tensor([[run.tokenizer.mask_id, *given, *target]])
        length = row.shape[1]
        with torch.no_grad():
            logits = run.model(
                row,
                torch.tensor([length - 1]),
                positions=torch.arange(length),
                target_positions=torch.arange(1, length + 1),
            )
        target.append(int(logits.argmax()))
    asks = [
        Ask(given, tuple(target)),
        Ask(given, wrong_at(target, 4)),
        Ask(given, tuple(target[:2])),
    ]
    assert scorer(run).is_greedy(asks) == [True, False, True]
