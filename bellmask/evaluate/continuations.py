"""Log-probabilities of continuations under any run, batched, the same whatever the batch.

A masked model is asked for a bound: its passes are rows of the continuation partly masked behind a
context that is always visible. A causal model needs one pass. Rows of all asks are sorted by width
and go through the network together, padded to a multiple of 32 tokens that nobody attends to; the
width depends on the ask alone.

B rows of a batch, L their width, R passes of an ask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bellmask.data.tokenizers import Tokenizer
from bellmask.diffusion.frameworks import Mdm, Ordered, Problem
from bellmask.generate.fill import WIDTH, pad_rows
from bellmask.generate.rules import RULES, RuleName
from bellmask.model.attention import attention_mask
from bellmask.storage.loading import Loaded, LoadOptions
from bellmask.utils.distributed import autocast, pick_precision
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.progress import NO_PROGRESS, Progress
from bellmask.utils.rng import stream_key, uniform
from bellmask.utils.stats import collapsed_strata_error

# Options


@dataclass(frozen=True, kw_only=True)
class RequestOptions(LoadOptions):
    """Names and meaning are those of ``--model_args NAME=VALUE,...`` of lm-eval."""

    estimator: Literal["auto", "exact", "strata", "bernoulli", "diffullama", "left_to_right"] = (
        "auto"
    )
    """How a masked model's log-probability of a continuation is found. auto: all masks of short
    ones, evenly spread mask counts (strata) for longer ones. An ARM is always exact."""
    draws: int = 16
    """Masks per continuation where they are drawn; orders of an AoARM."""
    longest_exact: int = 6
    """Tokens up to which auto takes all masks (2^n - 1 of them)."""
    common: bool = True
    """Choices of a question draw the same masks (common random numbers)."""
    seed: int = 0
    """Of masks and samples; lm-eval's own seeds have no say in them."""
    batch_tokens: int = 8192
    """Tokens per forward pass; changes no result. lm-eval's batch_size is not used."""
    gap: int = 32
    """Tokens to write where the task says no max_gen_toks."""
    rule: RuleName = "most_confident"
    """Which masked tokens a step of writing reveals, see bellmask generate."""
    steps: int | None = None
    """Steps of writing; default: one token per step."""
    temperature: float | None = None
    """Of writing; default: what the task says, 0 where it does not sample."""

    def check(self) -> RequestOptions:
        """This, or one :class:`UserError`; draws and masks are checked by the estimator."""
        if self.gap < 1:
            raise UserError(f"gap must be at least 1, got {self.gap}")
        if self.steps is not None and not RULES[self.rule].takes_grid:
            raise UserError(f"rule {self.rule} has one step per token: no steps")
        return self


# What a model is asked: the probability of some tokens, given those before and behind them.
#
# A continuation is tokenized as lm-eval does it: white space at the end of the context moves to the
# continuation, and its tokens are those of both together behind the context's own. Where context
# and continuation do not fit into the run's block, the oldest tokens of the context go; a
# continuation that is too long by itself is cut into windows, each after the tokens before it,
# whose log-probabilities add up.

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """Tokens whose probability is wanted, between tokens that are shown."""

    given: Tokens
    """Shown before; the run's begin sign included."""
    target: Tokens
    """Scored; never empty."""
    after: Tokens = ()
    """Shown behind: masked models and AoARMs only."""
    noise: int = 0
    """Asks with one number draw the same masks: common random numbers over the choices."""

    @property
    def length(self) -> int:
        """Tokens of the whole row."""
        return len(self.given) + len(self.target) + len(self.after)


@dataclass(frozen=True)
class Score:
    """The log-probability of a target, and what it cost."""

    log_probability: float
    """Nats: minus the NELBO of a masked model or AoARM, a lower bound; exact for an ARM."""
    error: float
    """Standard deviation of the estimate over masks; 0 without noise, nan for a single draw."""
    num_tokens: int
    num_passes: int
    """Rows that went through the network."""
    is_exact: bool
    """The estimate has no noise."""


def add_up(scores: Sequence[Score]) -> Score:
    """The windows of one continuation as one score; their draws share numbers, so errors add."""
    return Score(
        math.fsum(score.log_probability for score in scores),
        math.fsum(score.error for score in scores),
        sum(score.num_tokens for score in scores),
        sum(score.num_passes for score in scores),
        all(score.is_exact for score in scores),
    )


@dataclass(frozen=True)
class AskMaker:
    """Texts → asks, by the tokenizer and the block length of a run."""

    tokenizer: Tokenizer
    block_length: int
    begin: Tokens
    """The begin sign that the run's rows have, or nothing."""

    def asks(
        self, context: str, continuation: str, *, after: str = "", noise: int = 0
    ) -> list[Ask]:
        """One ask, or the windows of a continuation that does not fit."""
        before, target = self.split(context, continuation)
        if not target:
            raise UserError(f"the continuation {continuation!r} has no tokens: nothing to score")
        behind = self.split(context + continuation, after)[1] if after else ()
        return self.windows(before, target, behind, noise)

    def rolling(self, text: str, *, noise: int = 0) -> list[Ask]:
        """The whole text, nothing shown before it but the begin sign; none for an empty text."""
        ids = self.encode(text)
        return self.windows((), ids, (), noise) if ids else []

    def encode(self, text: str) -> Tokens:
        """Tokens of a text; halves of surrogate pairs, which no tokenizer takes, become '?'."""
        return tuple(self.tokenizer.encode(text.encode("utf-8", "replace").decode()).tolist())

    def split(self, context: str, continuation: str) -> tuple[Tokens, Tokens]:
        """(tokens of the context, of the continuation), as lm-eval cuts them."""
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        before = self.encode(kept) if kept else ()
        return before, self.encode(kept + continuation)[len(before) :]

    def windows(self, before: Tokens, target: Tokens, behind: Tokens, noise: int) -> list[Ask]:
        """Rows of a block at most; only the last window sees what is behind."""
        block = self.block_length
        most = block - len(self.begin)
        if len(target) > most:
            size = max(1, block // 2)
            pieces = [target[start : start + size] for start in range(0, len(target), size)]
        else:
            pieces = [target]
        made, seen = [], before
        for number, piece in enumerate(pieces):
            is_last = number == len(pieces) - 1
            room = most - len(piece)
            # half of it, and what the context leaves
            shown = behind[: max(room // 2, room - len(seen))] if is_last else ()
            made.append(
                Ask(self.before(seen, block - len(piece) - len(shown)), piece, shown, noise)
            )
            seen = seen + piece
        return made

    def before(self, tokens: Tokens, room: int) -> Tokens:
        """The begin sign and the last tokens that have room."""
        begin = () if self.begin and tokens[:1] == self.begin else self.begin
        if len(begin) + len(tokens) <= room:
            return begin + tokens
        left = room - len(self.begin)
        return self.begin + tokens[len(tokens) - left :]


# Which masks estimate a continuation's log-probability, and with which weights.
#
# The bound is a sum over mask counts n = 1 .. L of E[mean cross-entropy | n of L masked] (shared
# form of Sec. 2.2, N_c = L - n visible tokens of the continuation). Every estimator is a plan: R
# passes with masks and weights, log p ~ - sum_r weight_r * (sum of cross-entropies that pass r
# scores).
#
# | kind          | masks                                      | weight of a pass | noise    |
# |---------------|--------------------------------------------|------------------|----------|
# | exact         | all 2^L - 1                                | 1 / (n C(L, n))  | none     |
# | strata        | n = 1 + floor(L (r + u) / R), then any n   | L / (R n)        | unbiased |
# | bernoulli     | rate t = (r + 1 - u) / R, each token apart | 1 / (R t)        | unbiased |
# | diffullama    | rate t = (r + 1) / R, each token apart     | L / (R n)        | biased   |
# | left_to_right | token i and all behind it; scores i        | 1                | none     |
#
# bernoulli's variance is infinite, if only by a logarithm: a mask at a tiny rate has a huge weight.
# diffullama counts a pass without a mask as 0, and with one draw it always masks all. left_to_right
# is another chain of factors, the likelihood of writing the tokens in that order.
#
# R passes, L tokens of the continuation.

Kind = Literal["auto", "exact", "strata", "bernoulli", "diffullama", "left_to_right"]
KINDS: tuple[Kind, ...] = ("auto", "exact", "strata", "bernoulli", "diffullama", "left_to_right")
MOST_EXACT = 12
"""4095 masks; twice as many with each further token."""
_STRIDE = 1 << 20
"""Counters of one draw; no continuation is longer."""


@dataclass(frozen=True)
class Estimator:
    """How a masked model's log-probability of a continuation is estimated."""

    kind: Kind = "auto"
    """auto: exact for short continuations, strata for longer ones."""
    draws: int = 16
    """Masks per continuation where they are drawn; orders of an AoARM."""
    longest_exact: int = 6
    """Tokens up to which auto takes all masks."""
    is_common: bool = True
    """Choices of a question draw the same numbers; False, for comparison: each draws its own."""

    def check(self) -> Estimator:
        """This, or a :class:`UserError`."""
        look_up("estimator", self.kind, dict.fromkeys(KINDS))
        if self.draws < 1:
            raise UserError(f"--draws must be at least 1, got {self.draws}")
        if not 0 <= self.longest_exact <= MOST_EXACT:
            raise UserError(
                f"--longest-exact must be from 0 to {MOST_EXACT} (2^n - 1 masks), got "
                f"{self.longest_exact}"
            )
        return self

    def key(self, ask: Ask, seed: int) -> int:
        """Names the random numbers of an ask."""
        own = () if self.is_common else ("-".join(map(str, (*ask.given, *ask.target))),)
        return stream_key(seed, "continuations", ask.noise, *own)

    def kind_for(self, length: int, uses_time: bool = False) -> Kind:
        """The kind that a continuation of so many tokens gets.

        A time-conditioned model needs a time that its mask may have come from: always drawn.
        """
        if self.kind == "auto":
            is_short = length <= self.longest_exact and not uses_time
            return "exact" if is_short else "strata"
        if uses_time and self.kind in ("exact", "left_to_right"):
            raise UserError(f"a time-conditioned run has no {self.kind} estimator; use strata")
        if self.kind == "exact" and length > MOST_EXACT:
            raise UserError(
                f"a continuation of {length} tokens has too many masks to take all (at most "
                f"{MOST_EXACT} tokens); use auto, which does so for short ones only"
            )
        return self.kind


@dataclass(frozen=True)
class MaskPlan:
    """Passes of one ask."""

    kind: Kind
    is_masked_RL: NDArray[np.bool_]
    is_scored_RL: NDArray[np.bool_]
    weight_R: NDArray[np.float64]
    rate_R: NDArray[np.float64]
    """A mask rate that such a mask may have come from, for time-conditioned models."""

    @property
    def is_noisy(self) -> bool:
        """Other random numbers would give another value."""
        return self.kind in ("strata", "bernoulli", "diffullama")

    def conclude(self, sum_R: NDArray[np.float64]) -> Score:
        """The score from each pass's sum of cross-entropies."""
        value_R = self.weight_R * sum_R
        count = len(value_R)
        error = 0.0
        if self.is_noisy:
            level = np.arange(count, dtype=np.float64)
            error = collapsed_strata_error(count * value_R, level) if count > 1 else math.nan
        passes = int(self.is_scored_RL.any(axis=1).sum())
        length = self.is_masked_RL.shape[1]
        return Score(-math.fsum(value_R), error, length, passes, not self.is_noisy)


def make_plan(ask: Ask, estimator: Estimator, *, seed: int, uses_time: bool = False) -> MaskPlan:
    """The passes that estimate an ask's log-probability."""
    length = len(ask.target)
    kind = estimator.kind_for(length, uses_time)
    if kind == "exact":
        return _exact(length)
    if kind == "left_to_right":
        return _left_to_right(length)
    u_R, u_RL = _numbers(ask, estimator, seed)
    draws, place_R = estimator.draws, np.arange(estimator.draws)
    if kind == "strata":
        count_R = 1 + np.floor(length * (place_R + u_R) / draws).astype(np.int64)
        count_R = count_R.clip(max=length)
        # the n smallest numbers; the largest of them is a rate that masks just these
        order_RL = np.sort(u_RL, axis=1)
        rate_R = order_RL[place_R, count_R - 1]
        is_masked = u_RL <= rate_R[:, None]
        return MaskPlan(kind, is_masked, is_masked, length / (draws * count_R), rate_R)
    if kind == "bernoulli":
        rate_R = (place_R + 1 - u_R) / draws  # never 0
        is_masked = u_RL < rate_R[:, None]
        return MaskPlan(kind, is_masked, is_masked, 1 / (draws * rate_R), rate_R)
    rate_R = (place_R + 1) / draws
    is_masked = u_RL < rate_R[:, None]
    weight_R = length / (draws * is_masked.sum(1).clip(min=1))
    return MaskPlan(kind, is_masked, is_masked, weight_R, rate_R)


def _exact(length: int) -> MaskPlan:
    number = np.arange(1, 2**length)
    is_masked = (number[:, None] >> np.arange(length)) & 1 == 1
    count_R = is_masked.sum(1)
    ways_R = np.array([math.comb(length, n) for n in count_R])
    return MaskPlan("exact", is_masked, is_masked, 1 / (count_R * ways_R), count_R / (length + 1))


def _left_to_right(length: int) -> MaskPlan:
    is_masked = np.triu(np.ones((length, length), dtype=bool))
    rate_R = is_masked.sum(1) / (length + 1)
    scored = np.eye(length, dtype=bool)
    return MaskPlan("left_to_right", is_masked, scored, np.ones(length), rate_R)


def _numbers(
    ask: Ask, estimator: Estimator, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(the shared shift of all strata, one number per pass and token), both in [0, 1)."""
    key = estimator.key(ask, seed)
    draws, length = estimator.draws, len(ask.target)
    counters = torch.arange(draws)[:, None] * _STRIDE + torch.arange(length)
    u_RL = uniform(key, counters).numpy()
    level = uniform(stream_key(key, "level"), torch.zeros(1, dtype=torch.int64)).numpy()
    return np.repeat(level, draws), u_RL


# Passes through the network that one ask takes, as rows, and the score that they add up to.
#
# R passes of an ask, L tokens of its target.

SHOWN_FIRST = -1e6
"""Where an order puts what is shown: before all that is asked for."""


# Rows


@dataclass(frozen=True)
class PassRow:
    """One pass of one ask."""

    ask: Ask
    tokens: Tensor
    """With masks where they are."""
    is_scored: Tensor
    rate: float = 0.0
    numbers: Any = None
    """The order of a causal run's tokens, smallest first."""


def clean(ask: Ask) -> list[int]:
    """All tokens of an ask, none masked."""
    return [*ask.given, *ask.target, *ask.after]


def masked_row(
    ask: Ask,
    mask_id: int,
    is_masked_L: NDArray[np.bool_],
    is_scored_L: NDArray[np.bool_],
    rate: float,
) -> PassRow:
    """Some of the target masked; ``rate`` is for time-conditioned models."""
    start, stop = len(ask.given), len(ask.given) + len(ask.target)
    tokens = torch.tensor(clean(ask))
    tokens[start:stop][torch.from_numpy(is_masked_L)] = mask_id
    is_scored = torch.zeros(len(tokens), dtype=torch.bool)
    is_scored[start:stop] = torch.from_numpy(is_scored_L)
    return PassRow(ask, tokens, is_scored, rate)


def ordered_row(ask: Ask, number_L: Tensor) -> PassRow:
    """What is shown comes first, in its own order, then the target, smallest number first."""
    tokens = torch.tensor(clean(ask))
    numbers = SHOWN_FIRST + torch.arange(len(tokens), dtype=torch.float64)
    numbers[len(ask.given) : len(ask.given) + len(ask.target)] = number_L
    return PassRow(ask, tokens, torch.ones(len(tokens), dtype=torch.bool), numbers=numbers)


# Jobs


@dataclass(frozen=True)
class MaskedJob:
    """An ask to a masked model."""

    ask: Ask
    plan: MaskPlan
    mask_id: int

    def __len__(self) -> int:
        return len(self.plan.weight_R)

    def is_needed(self, place: int) -> bool:
        """A pass that scores nothing is not made."""
        return bool(self.plan.is_scored_RL[place].any())

    def row(self, place: int) -> PassRow:
        """One pass as a row of tokens."""
        return masked_row(
            self.ask,
            self.mask_id,
            self.plan.is_masked_RL[place],
            self.plan.is_scored_RL[place],
            float(self.plan.rate_R[place]),
        )

    def conclude(self, sum_R: NDArray[np.float64]) -> Score:
        """The score from the sums of all passes."""
        return self.plan.conclude(sum_R)


@dataclass(frozen=True)
class OrderedJob:
    """An ask to a causal model: left to right, or for an AoARM in random orders."""

    ask: Ask
    draws: int
    key: int
    """Names the orders that are drawn."""
    is_exact: bool

    def __len__(self) -> int:
        return self.draws

    def is_needed(self, place: int) -> bool:
        """All are."""
        return True

    def row(self, place: int) -> PassRow:
        """One pass as a row of tokens: the target in a drawn order."""
        key = stream_key(self.key, "orders", place)
        return ordered_row(self.ask, uniform(key, torch.arange(len(self.ask.target))))

    def conclude(self, sum_R: NDArray[np.float64]) -> Score:
        """Mean over orders."""
        error = 0.0 if self.is_exact else np.nan
        if self.draws > 1:
            error = float(sum_R.std(ddof=1) / np.sqrt(self.draws))
        length = len(self.ask.target)
        return Score(-float(sum_R.mean()), error, length, self.draws, self.is_exact)


Job = MaskedJob | OrderedJob


# Scores of a run: the passes of all asks go through the network in batches.


class ContinuationScorer:
    """Asks a run how probable texts are after others."""

    def __init__(
        self, run: Loaded, estimator: Estimator | None = None, *, batch_tokens: int = 8192
    ) -> None:
        """``batch_tokens`` of padded rows go through the network at once; it changes no score."""
        if run.config.framework.name == "sigma_arm":
            raise UserError(
                f"{run.folder} is a sigma-ARM: it reads tokens in one fixed order, so it has no "
                "probability of a continuation after a context; give an mdm, arm or aoarm run"
            )
        if batch_tokens < 1:
            raise UserError(f"--batch-tokens must be at least 1, got {batch_tokens}")
        self.run, self.estimator = run, (estimator or Estimator()).check()
        self.batch_tokens = batch_tokens
        self.uses_time = bool(run.model.uses_time)
        begin = (run.tokenizer.bos_id,) if run.is_wrapped or run.model.first_maskable else ()
        self.maker = AskMaker(run.tokenizer, run.config.data.block_length, begin)

    def asks(
        self, context: str, continuation: str, *, after: str = "", noise: int = 0
    ) -> list[Ask]:
        """See :meth:`AskMaker.asks`."""
        return self.maker.asks(context, continuation, after=after, noise=noise)

    def rolling(self, text: str, *, noise: int = 0) -> list[Ask]:
        """See :meth:`AskMaker.rolling`."""
        return self.maker.rolling(text, noise=noise)

    @property
    def is_causal(self) -> bool:
        """The run reads tokens one after another."""
        return self.run.framework.is_causal

    def is_exact(self, ask: Ask) -> bool:
        """The ask's score has no noise: any seed gives the same."""
        if self.is_causal:
            return self.run.framework.is_exact
        kind = self.estimator.kind_for(len(ask.target), self.uses_time)
        return kind in ("exact", "left_to_right")

    def score(
        self, asks: Sequence[Ask], *, seed: int = 0, progress: Progress = NO_PROGRESS
    ) -> list[Score]:
        """The score of each ask."""
        self._check(asks)
        jobs = [self._job(ask, seed) for ask in asks]
        left = [sum(map(job.is_needed, range(len(job)))) for job in jobs]
        sums = [np.zeros(len(job)) for job in jobs]
        progress.advance(left.count(0))
        for part in self._batches(jobs):
            values = self._run_batch([jobs[number].row(place) for number, place in part])
            for (number, place), value in zip(part, values, strict=True):
                sums[number][place] = value
                left[number] -= 1
                progress.advance(left[number] == 0)
        return [job.conclude(sum_R) for job, sum_R in zip(jobs, sums, strict=True)]

    def is_greedy(self, asks: Sequence[Ask], progress: Progress = NO_PROGRESS) -> list[bool]:
        """See :func:`writes_target`."""
        self._check(asks)
        return writes_target(self, asks, progress)

    def _check(self, asks: Sequence[Ask]) -> None:
        sees_behind = not self.is_causal or not self.run.framework.is_exact
        first = self.run.model.first_maskable
        for ask in asks:
            if not ask.target or len(ask.given) < first:
                raise ValueError("an ask needs a target, and a begin sign where the run has one")
            if ask.after and not sees_behind:
                raise UserError("an ARM cannot see what follows a gap; ask a masked run")

    def _job(self, ask: Ask, seed: int) -> Job:
        if not self.is_causal:
            plan = make_plan(ask, self.estimator, seed=seed, uses_time=self.uses_time)
            return MaskedJob(ask, plan, self.run.tokenizer.mask_id)
        is_exact = self.run.framework.is_exact
        draws = 1 if is_exact else self.estimator.draws
        return OrderedJob(ask, draws, self.estimator.key(ask, seed), is_exact)

    def row_with(self, ask: Ask, is_masked: NDArray[np.bool_]) -> PassRow:
        """A pass of a masked model with just these tokens of the target masked, all of them scored.

        A time-conditioned model is told what sampling tells it: the share of the row.
        """
        rate = float(is_masked.sum()) / ask.length
        return masked_row(ask, self.run.tokenizer.mask_id, is_masked, is_masked, rate)

    def left_to_right_row(self, ask: Ask) -> PassRow:
        """A pass of a causal model with the target in its own order, whatever the framework's."""
        return ordered_row(ask, torch.arange(len(ask.target), dtype=torch.float64))

    def width(self, ask: Ask) -> int:
        """Tokens of the ask's padded rows."""
        rounded = -(-ask.length // WIDTH) * WIDTH
        return max(ask.length, min(rounded, self.run.config.data.block_length))

    def _batches(self, jobs: Sequence[Job]) -> Iterator[list[tuple[int, int]]]:
        """(ask, pass) pairs of one width, all padded or none."""
        groups: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        for number, job in enumerate(jobs):
            width = self.width(job.ask)
            group = groups.setdefault((width, width == job.ask.length), [])
            group += [(number, place) for place in range(len(job)) if job.is_needed(place)]
        for (width, _), members in sorted(groups.items()):
            size = max(1, self.batch_tokens // width)
            for start in range(0, len(members), size):
                yield members[start : start + size]

    @torch.no_grad()
    def _run_batch(self, rows: Sequence[PassRow]) -> list[float]:
        """The sum of cross-entropies that each row scores."""
        problem, mask = self.problem(rows)
        device = self.run.device
        precision = pick_precision(self.run.config.train.precision, device)
        with autocast(device, precision):
            ce_N = problem.ask(self.run.model, device, mask=mask, reduce=False)
        owner_N = problem.rows_N // problem.x_BL.shape[1]
        total_B = torch.zeros(len(rows), dtype=torch.float64)
        return total_B.index_add_(0, owner_N, ce_N.double().cpu()).tolist()

    def problem(self, rows: Sequence[PassRow]) -> tuple[Problem, Tensor | None]:
        """(what the model is asked in a batch, its attention mask)."""
        width = self.width(rows[0].ask)
        pad, framework = self.run.tokenizer.pad_id, self.run.framework
        x0_BL, is_real_BL = pad_rows([row.tokens for row in rows], width, pad)
        is_full = bool(is_real_BL.all())
        if isinstance(framework, Ordered):
            u_BL = torch.zeros(len(rows), width, dtype=torch.float64)
            for number, row in enumerate(rows):
                u_BL[number, : row.ask.length] = row.numbers
            whole = framework.every_context(
                x0_BL,
                u_BL,
                mask_id=self.run.tokenizer.mask_id,
                is_real_BL=None if is_full else is_real_BL,
            )
            return _only_targets(whole, rows, width), None
        assert isinstance(framework, Mdm)
        is_scored_BL = torch.zeros_like(is_real_BL)
        for number, row in enumerate(rows):
            is_scored_BL[number, : len(row.is_scored)] = row.is_scored
        targets_BL, _ = pad_rows([torch.tensor(clean(row.ask)) for row in rows], width, pad)
        rows_N = is_scored_BL.flatten().nonzero().squeeze(1)
        rate_B = torch.tensor([row.rate for row in rows], dtype=torch.float64)
        problem = Problem(
            x0_BL,
            rows_N,
            targets_BL.flatten()[rows_N],
            torch.zeros_like(rows_N),
            framework.schedule.inverse(1 - rate_B),
        )
        return problem, None if is_full else attention_mask(is_real_BL)


def _only_targets(whole: Problem, rows: Sequence[PassRow], width: int) -> Problem:
    """Of every slot's prediction those of the targets: what is shown comes first in any order."""
    shown_B = torch.tensor([row.ask.length - len(row.ask.target) for row in rows])
    length_B = torch.tensor([row.ask.length for row in rows])
    owner_N, slot_N = whole.rows_N // width, whole.rows_N % width
    is_kept_N = (slot_N >= shown_B[owner_N]) & (slot_N < length_B[owner_N])
    return Problem(
        whole.x_BL,
        whole.rows_N[is_kept_N],
        whole.targets_N[is_kept_N],
        whole.context_N[is_kept_N],
        None,
        whole.positions,
        whole.target_positions,
    )


# Would a model write a continuation by itself? lm-eval's ``is_greedy``, for any order.
#
# A masked model is given a gap of exactly the continuation's length (so it is told the length) and
# writes the token it is surest of, at temperature 0, one per pass; an ARM writes from left to
# right. The first token that differs ends it, so most answers take a pass or two.
#
# B rows of a batch, N masked positions, V vocabulary.

MOST_LOGITS = 1 << 26
"""Logits of a batch that exist at once: 256 MB."""


def writes_target(
    scorer: ContinuationScorer, asks: Sequence[Ask], progress: Progress = NO_PROGRESS
) -> list[bool]:
    """For each ask: is the target what the model would write?"""
    found: dict[int, bool] = {}
    hidden = {number: np.ones(len(ask.target), dtype=bool) for number, ask in enumerate(asks)}
    while len(found) < len(asks):
        left = [number for number in range(len(asks)) if number not in found]
        for part in _batches(scorer, asks, left):
            for number, verdict in zip(part, _one_pass(scorer, asks, part, hidden), strict=True):
                if verdict is not None:
                    found[number] = verdict
                    progress.advance()
    return [found[number] for number in range(len(asks))]


def _batches(
    scorer: ContinuationScorer, asks: Sequence[Ask], left: Sequence[int]
) -> Iterator[list[int]]:
    groups: dict[tuple[int, bool], list[int]] = {}
    for number in left:
        width = scorer.width(asks[number])
        groups.setdefault((width, width == asks[number].length), []).append(number)
    vocabulary = scorer.run.tokenizer.num_tokens
    for (width, _), members in sorted(groups.items()):
        longest = max(len(asks[number].target) for number in members)
        size = max(1, min(scorer.batch_tokens // width, MOST_LOGITS // (longest * vocabulary)))
        for start in range(0, len(members), size):
            yield members[start : start + size]


@torch.no_grad()
def _one_pass(
    scorer: ContinuationScorer,
    asks: Sequence[Ask],
    part: Sequence[int],
    hidden: dict[int, np.ndarray],
) -> list[bool | None]:
    """One token more of each ask (of a causal model all); None where it is not decided yet."""
    run = scorer.run
    if scorer.is_causal:
        rows = [scorer.left_to_right_row(asks[number]) for number in part]
    else:
        rows = [scorer.row_with(asks[number], hidden[number]) for number in part]
    problem, mask_or_none = scorer.problem(rows)
    with autocast(run.device, pick_precision(run.config.train.precision, run.device)):
        logits_NV = problem.logits(run.model, run.device, mask_or_none).float().cpu()
    sure_N, best_N = logits_NV.log_softmax(1).max(1)
    is_right_N = best_N == problem.targets_N
    owner_N = problem.rows_N // problem.x_BL.shape[1]
    verdicts: list[bool | None] = []
    for place, number in enumerate(part):
        mine = (owner_N == place).nonzero().squeeze(1)
        if scorer.is_causal:
            verdicts.append(bool(is_right_N[mine].all()))
        else:
            verdicts.append(_reveal(hidden[number], sure_N[mine], is_right_N[mine]))
    return verdicts


def _reveal(is_hidden_L: np.ndarray, sure_N: Tensor, is_right_N: Tensor) -> bool | None:
    """Write the surest token into the gap: wrong ends it, the last right one too."""
    first = int(sure_N.argmax())
    if not bool(is_right_N[first]):
        return False
    is_hidden_L[np.flatnonzero(is_hidden_L)[first]] = False
    return None if is_hidden_L.any() else True
