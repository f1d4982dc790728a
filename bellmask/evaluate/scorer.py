"""Log-probability of some tokens given others, for every kind of model.

A :class:`Scorer` scores requests under a run. A masked model gives a bound: its passes are rows of
the target partly masked after tokens that are always visible. A causal model needs one pass. Rows
of all requests are sorted by width and go through the network together, padded to a multiple of 32
tokens that nobody attends to; the width depends on the request alone, so no score depends on its
batch.

A :class:`TextScorer` scores whole texts under a model that reads left to right: a Hugging Face
causal LM, or an ARM run.

B rows of a batch, L their width or tokens of a target, R passes of a request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bellmask.data.tokenizers import Tokenizer
from bellmask.diffusion.frameworks import Mdm, Ordered, Problem
from bellmask.generate.fill import WIDTH, pad_rows
from bellmask.generate.rules import RULES, RuleName
from bellmask.model.causal_lm import NAME as SMOLLM2
from bellmask.model.causal_lm import fingerprint, smollm2_folder
from bellmask.model.transformer import attention_mask, hash_weights
from bellmask.storage.loading import Loaded, LoadOptions, load
from bellmask.utils.distributed import World, autocast, pick_device
from bellmask.utils.errors import UserError, check_least, look_up
from bellmask.utils.files import sanitize
from bellmask.utils.libraries import check_shards, import_transformers, quiet
from bellmask.utils.progress import NO_PROGRESS, Progress
from bellmask.utils.rng import stream_key, uniform
from bellmask.utils.stats import Floats, clustered_error, collapsed_strata_error

# Options

Kind = Literal["auto", "exact", "strata", "bernoulli", "diffullama", "left_to_right"]
MOST_EXACT = 12
"""4095 masks; twice as many with each further token."""


@dataclass(frozen=True)
class Estimator:
    """How continuations are scored."""

    estimator: Kind = "auto"
    """Estimator of a masked model's log-probability of a continuation. auto: all masks for short
    ones, evenly spread mask counts (strata) for longer ones. An ARM is always exact."""
    draws: int = 16
    """Masks drawn per continuation; orders for an AoARM."""
    longest_exact: int = 6
    """Longest continuation, in tokens, for which auto uses all 2^n - 1 masks."""
    batch_tokens: int = 8192
    """Tokens per forward pass; does not change results."""
    common: bool = True
    """Use the same masks for all choices of a question (common random numbers)."""

    def check_estimator(self) -> None:
        """A :class:`UserError` for what cannot be."""
        look_up("estimator", self.estimator, dict.fromkeys(get_args(Kind)))
        check_least(self, draws=1, batch_tokens=1)
        if not 0 <= self.longest_exact <= MOST_EXACT:
            raise UserError(f"--longest-exact must be 0 to {MOST_EXACT}, got {self.longest_exact}")

    def key(self, request: Request, seed: int) -> int:
        """Names the random numbers of a request."""
        own = () if self.common else ("-".join(map(str, request.given + request.target)),)
        return stream_key(seed, "continuations", request.noise, *own)

    def kind_for(self, length: int, uses_time: bool = False) -> Kind:
        """The kind for a continuation of this length.

        A time-conditioned model needs a time that its mask may have come from: always drawn.
        """
        kind = self.estimator
        if kind == "auto":
            return "exact" if length <= self.longest_exact and not uses_time else "strata"
        if uses_time and kind in ("exact", "left_to_right"):
            raise UserError(f"a time-conditioned run takes no {kind} estimator; use strata")
        if kind == "exact" and length > MOST_EXACT:
            raise UserError(f"{length} tokens have too many masks (most: {MOST_EXACT}); use auto")
        return kind


@dataclass(frozen=True, kw_only=True)
class RequestOptions(LoadOptions, Estimator):
    """Names and meaning are those of ``--model_args NAME=VALUE,...`` of lm-eval, whose own
    batch_size is not used.
    """

    seed: int = 0
    """Seed of masks and samples; lm-eval's own seeds do not affect them."""
    gap: int = 32
    """Tokens to generate if the task sets no max_gen_toks."""
    rule: RuleName = "most_confident"
    """Which masked tokens a generation step reveals, see bellmask generate."""
    steps: int | None = None
    """Generation steps; default: one token per step."""
    temperature: float | None = None
    """Sampling temperature; default: the task's, or 0 if it does not sample."""

    def check(self) -> RequestOptions:
        """This, or one :class:`UserError`; draws and masks are checked by the estimator."""
        check_least(self, gap=1)
        if self.steps is not None and not RULES[self.rule].takes_grid:
            raise UserError(f"rule {self.rule} takes one step per token: omit steps")
        return self


# Requests
#
# A continuation is tokenized as lm-eval does it: white space at the end of the context moves to the
# continuation, and its tokens are those of both together behind the context's own. Where context
# and continuation do not fit into the run's block, the oldest tokens of the context go; a
# continuation that is too long by itself is cut into windows, each after the tokens before it,
# whose log-probabilities add up.

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """Target tokens to score, after visible tokens."""

    given: Tokens
    """Visible tokens before the target, including the run's start token."""
    target: Tokens
    """The target; never empty."""
    noise: int = 0
    """Requests with one number draw the same masks: common random numbers over the choices."""

    @property
    def tokens(self) -> Tokens:
        return self.given + self.target

    @property
    def length(self) -> int:
        """Tokens of the whole row."""
        return len(self.tokens)

    @property
    def place(self) -> slice:
        """Where in the row the target is."""
        return slice(len(self.given), len(self.given) + len(self.target))


@dataclass(frozen=True)
class Score:
    """The log-probability of a target, and its cost."""

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
    parts = [astuple(score) for score in scores] or [(0.0, 0.0, 0, 0, True)]
    values, errors, tokens, passes, are_exact = zip(*parts, strict=True)
    return Score(math.fsum(values), math.fsum(errors), sum(tokens), sum(passes), all(are_exact))


@dataclass(frozen=True)
class RequestMaker:
    """Texts → requests, by the tokenizer and the block length of a run."""

    tokenizer: Tokenizer
    block_length: int
    begin: Tokens
    """The start token that the run's rows have, or nothing."""

    def requests(self, context: str, continuation: str, *, noise: int = 0) -> list[Request]:
        """One request, or the windows of a continuation that does not fit."""
        before, target = self.split(context, continuation)
        if not target:
            raise UserError(f"the continuation {continuation!r} has no tokens to score")
        return self.windows(before, target, noise)

    def rolling(self, text: str, *, noise: int = 0) -> list[Request]:
        """The whole text, nothing shown before it but the start token; none for an empty text."""
        ids = self.encode(text)
        return self.windows((), ids, noise) if ids else []

    def encode(self, text: str) -> Tokens:
        return tuple(self.tokenizer.encode(sanitize(text)).tolist())

    def split(self, context: str, continuation: str) -> tuple[Tokens, Tokens]:
        """(tokens of the context, of the continuation), as lm-eval cuts them."""
        shown = context.rstrip()
        before = self.encode(shown) if shown else ()
        return before, self.encode(context + continuation)[len(before) :]

    def windows(self, before: Tokens, target: Tokens, noise: int) -> list[Request]:
        """Rows of a block at most."""
        block = self.block_length
        size = len(target) if len(target) <= block - len(self.begin) else max(1, block // 2)
        made, seen = [], before
        for start in range(0, len(target), size):
            piece = target[start : start + size]
            made.append(Request(self.before(seen, block - len(piece)), piece, noise))
            seen = seen + piece
        return made

    def before(self, tokens: Tokens, room: int) -> Tokens:
        """The start token and the last tokens that have room."""
        begin = () if self.begin and tokens[:1] == self.begin else self.begin
        if len(begin) + len(tokens) <= room:
            return begin + tokens
        return self.begin + tokens[len(tokens) + len(self.begin) - room :]


# Which passes estimate a request's log-probability, and with which weights.
#
# The bound is a sum over mask counts n = 1 .. L of E[mean cross-entropy | n of L masked] (shared
# form of Sec. 2.2, N_c = L - n visible tokens of the target). Every estimator is a plan: R
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
# is another factorization: the likelihood of generating the tokens in that order. A causal model
# scores the whole target in each pass: an ARM in its own order, an AoARM in R random ones.

NOISELESS = ("exact", "left_to_right", "chain")
_STRIDE = 1 << 20
"""Counters of one draw; no continuation is longer."""


@dataclass(frozen=True)
class Plan:
    """The passes of one request; each is a row through the network."""

    request: Request
    kind: Kind | Literal["orders", "chain", "guess"]
    is_masked_RL: NDArray[np.bool_]
    is_scored_RL: NDArray[np.bool_]
    weight_R: Floats
    rate_R: Floats
    """A mask rate that such a mask may have come from, for time-conditioned models."""
    order_RL: Floats | None = None
    """Of a causal model: its target's tokens come smallest number first, after all others."""

    def conclude(self, sum_R: Floats) -> Score:
        """The score from each pass's sum of cross-entropies."""
        value_R, count = self.weight_R * sum_R, len(sum_R)
        is_exact = self.kind in NOISELESS
        error = 0.0 if is_exact else math.nan
        if count > 1 and self.kind == "orders":
            error = clustered_error(sum_R)
        elif count > 1 and not is_exact:
            error = collapsed_strata_error(count * value_R, np.arange(count, dtype=np.float64))
        num_passes = int(self.is_scored_RL.any(axis=1).sum())
        return Score(-math.fsum(value_R), error, len(self.request.target), num_passes, is_exact)


Pass = tuple[Plan, int]
"""A plan, and the number of one of its passes."""


def make_plan(request: Request, estimator: Estimator, *, seed: int, uses_time: bool) -> Plan:
    """The passes of a masked model."""
    length, draws = len(request.target), estimator.draws
    kind = estimator.kind_for(length, uses_time)
    if kind == "exact":
        is_masked = (np.arange(1, 2**length)[:, None] >> np.arange(length)) & 1 == 1
        count_R = is_masked.sum(1)
        ways_R = np.array([math.comb(length, n) for n in count_R])
        weight_R, rate_R = 1 / (count_R * ways_R), count_R / (length + 1)
        return Plan(request, kind, is_masked, is_masked, weight_R, rate_R)
    if kind == "left_to_right":
        is_masked = np.triu(np.ones((length, length), dtype=bool))
        rate_R = is_masked.sum(1) / (length + 1)
        return Plan(request, kind, is_masked, np.eye(length, dtype=bool), np.ones(length), rate_R)
    key, place_R = estimator.key(request, seed), np.arange(draws)
    u_RL = uniform(key, torch.arange(draws)[:, None] * _STRIDE + torch.arange(length)).numpy()
    shift = float(uniform(stream_key(key, "level"), torch.zeros(1, dtype=torch.int64)))
    if kind == "strata":
        count_R = 1 + np.floor(length * (place_R + shift) / draws).astype(np.int64)
        count_R = count_R.clip(max=length)
        # the n smallest numbers; the largest of them is a rate that masks just these
        rate_R = np.sort(u_RL, axis=1)[place_R, count_R - 1]
        is_masked = u_RL <= rate_R[:, None]
    else:
        rate_R = (place_R + 1 - (shift if kind == "bernoulli" else 0)) / draws  # never 0
        is_masked = u_RL < rate_R[:, None]
        count_R = is_masked.sum(1).clip(min=1)
    weight_R = 1 / (draws * rate_R) if kind == "bernoulli" else length / (draws * count_R)
    return Plan(request, kind, is_masked, is_masked, weight_R, rate_R)


def chain_plan(request: Request) -> Plan:
    """The one pass of a causal model that reads the target from left to right."""
    return _order_plan(request, "chain", np.arange(len(request.target), dtype=np.float64)[None])


def _order_plan(request: Request, kind: Literal["orders", "chain"], order_RL: Floats) -> Plan:
    """All of the target, in each order."""
    draws, every_RL = len(order_RL), np.ones(order_RL.shape, dtype=bool)
    weight_R = np.full(draws, 1 / draws)
    return Plan(request, kind, every_RL, every_RL, weight_R, np.zeros(draws), order_RL)


def guess_plan(request: Request, is_hidden_L: NDArray[np.bool_]) -> Plan:
    """One pass with just these tokens masked.

    A time-conditioned model gets the same time as in sampling: the masked fraction of the row.
    """
    hidden, rate = is_hidden_L[None].copy(), np.array([is_hidden_L.sum() / request.length])
    return Plan(request, "guess", hidden, hidden, np.ones(1), rate)


# Scores of a run: the passes of all requests go through the network in batches.

SHOWN_FIRST = -1e6
"""Rank of visible tokens in an order: before all targets."""
MOST_LOGITS = 1 << 26
"""Logits of a batch that exist at once: 256 MB."""


# Paper: Table 4
class Scorer:
    """Scores tokens given others under a run."""

    def __init__(self, run: Loaded, estimator: Estimator | None = None) -> None:
        if run.config.framework.name == "sigma_arm":
            raise UserError(f"{run.folder} is a sigma-ARM; give an mdm, arm or aoarm run")
        self.run, self.estimator = run, estimator or Estimator()
        self.estimator.check_estimator()
        self.uses_time = bool(run.model.uses_time)
        begin = (run.tokenizer.bos_id,) if run.is_wrapped or run.model.first_maskable else ()
        self.maker = RequestMaker(run.tokenizer, run.config.data.block_length, begin)
        self.requests = self.maker.requests

    @property
    def is_causal(self) -> bool:
        """The run reads tokens one after another."""
        return self.run.framework.is_causal

    def is_exact(self, request: Request) -> bool:
        """The request's score has no noise: any seed gives the same."""
        if self.is_causal:
            return self.run.framework.is_exact
        return self.estimator.kind_for(len(request.target), self.uses_time) in NOISELESS

    def score(
        self, requests: Sequence[Request], *, seed: int = 0, progress: Progress = NO_PROGRESS
    ) -> list[Score]:
        """The score of each request."""
        plans = [self._plan(request, seed) for request in requests]
        # a pass that scores nothing is not made
        passes = [
            (number, int(place))
            for number, plan in enumerate(plans)
            for place in np.flatnonzero(plan.is_scored_RL.any(axis=1))
        ]
        rows = [(plans[number], place) for number, place in passes]
        left = Counter(number for number, _ in passes)
        sums = [np.zeros(len(plan.weight_R)) for plan in plans]
        progress.advance(len(plans) - len(left))
        for row, ce_N in self._ask(rows, self._losses):
            number, place = passes[row]
            sums[number][place] = ce_N.numpy().sum()
            left[number] -= 1
            progress.advance(left[number] == 0)
        return [plan.conclude(sum_R) for plan, sum_R in zip(plans, sums, strict=True)]

    def token_losses(self, requests: Sequence[Request]) -> list[Floats]:
        """Cross-entropies of each target's tokens, of an ARM."""
        rows = [(chain_plan(request), 0) for request in requests]
        found = dict(self._ask(rows, self._losses))
        return [found[number].numpy() for number in range(len(requests))]

    def is_greedy(
        self, requests: Sequence[Request], progress: Progress = NO_PROGRESS
    ) -> list[bool]:
        """For each request: is the target what the model would write? For any order.

        A masked model is given a gap of exactly the target's length (so it is told the length) and
        writes the token it is surest of, at temperature 0, one per pass; a causal one writes from
        left to right. The first token that differs ends it, so most answers take a pass or two.
        """
        found: dict[int, bool] = {}
        hidden = [np.ones(len(request.target), dtype=bool) for request in requests]
        while left := [number for number in range(len(requests)) if number not in found]:
            plans = [
                chain_plan(requests[n]) if self.is_causal else guess_plan(requests[n], hidden[n])
                for n in left
            ]
            rows = [(plan, 0) for plan in plans]
            for row, guess_N2 in self._ask(rows, self._best_guesses, is_logits=True):
                sure_N, is_right_N = guess_N2.T
                number, surest = left[row], int(sure_N.argmax())
                is_right = bool(is_right_N.all() if self.is_causal else is_right_N[surest])
                written = slice(None) if self.is_causal else np.flatnonzero(hidden[number])[surest]
                hidden[number][written] = False
                if not is_right or not hidden[number].any():
                    found[number] = is_right
                    progress.advance()
        return [found[number] for number in range(len(requests))]

    def _plan(self, request: Request, seed: int) -> Plan:
        if not self.is_causal:
            return make_plan(request, self.estimator, seed=seed, uses_time=self.uses_time)
        if self.run.framework.is_exact:
            return chain_plan(request)
        key, place_L = self.estimator.key(request, seed), torch.arange(len(request.target))
        draws = range(self.estimator.draws)
        orders = [uniform(stream_key(key, "orders", draw), place_L) for draw in draws]
        return _order_plan(request, "orders", torch.stack(orders).numpy())

    def _width(self, request: Request) -> int:
        """Tokens of the request's padded rows."""
        rounded = -(-request.length // WIDTH) * WIDTH
        return max(request.length, min(rounded, self.run.config.data.block_length))

    def _ask(
        self, rows: Sequence[Pass], ask: Callable[..., Tensor], *, is_logits: bool = False
    ) -> Iterator[tuple[int, Tensor]]:
        """(number of a pass, what is known of its scored tokens), in batches of passes of one
        width, all padded or none.
        """
        groups: dict[tuple[int, bool], list[int]] = {}
        for number, (plan, _) in enumerate(rows):
            width = self._width(plan.request)
            groups.setdefault((width, width == plan.request.length), []).append(number)
        for (width, _), members in sorted(groups.items()):
            size = self.estimator.batch_tokens // width
            if is_logits:
                longest = max(len(rows[number][0].request.target) for number in members)
                size = min(size, MOST_LOGITS // (longest * self.run.tokenizer.num_tokens))
            for start in range(0, len(members), max(1, size)):
                batch = members[start : start + max(1, size)]
                problem, mask = self._problem([rows[number] for number in batch])
                with torch.no_grad(), autocast(self.run.device, self.run.precision):
                    found = ask(problem, mask)
                owner_N = problem.rows_N // width
                parts = found.split(owner_N.bincount(minlength=len(batch)).tolist())
                yield from zip(batch, parts, strict=True)

    def _losses(self, problem: Problem, mask: Tensor | None) -> Tensor:
        """Cross-entropies of the tokens that each pass scores."""
        return problem.ask(self.run.model, self.run.device, mask=mask, reduce=False).cpu().double()

    def _best_guesses(self, problem: Problem, mask: Tensor | None) -> Tensor:
        """[N, 2]: log-probability of the likeliest token, is it the target's."""
        logits_NV = problem.logits(self.run.model, self.run.device, mask).float()
        sure_N, best_N = torch.stack(logits_NV.log_softmax(1).max(1)).cpu()
        return torch.stack([sure_N, (best_N == problem.targets_N).float()], dim=1)

    def _problem(self, rows: Sequence[Pass]) -> tuple[Problem, Tensor | None]:
        """(the model's problem for a batch, its attention mask)."""
        framework, tokenizer = self.run.framework, self.run.tokenizer
        requests = [plan.request for plan, _ in rows]
        width = self._width(requests[0])
        tokens = [torch.tensor(request.tokens) for request in requests]
        x0_BL, is_real_BL = pad_rows(tokens, width, tokenizer.pad_id)
        real_BL = None if bool(is_real_BL.all()) else is_real_BL
        if isinstance(framework, Ordered):
            # what is shown comes first, in its own order, then the target
            u_BL = SHOWN_FIRST + torch.arange(width, dtype=torch.float64).repeat(len(rows), 1)
            for u_L, (plan, place) in zip(u_BL, rows, strict=True):
                assert plan.order_RL is not None
                u_L[plan.request.place] = torch.from_numpy(plan.order_RL[place])
            whole = framework.every_context(
                x0_BL, u_BL, mask_id=tokenizer.mask_id, is_real_BL=real_BL
            )
            shown_B = torch.tensor([r.length - len(r.target) for r in requests])
            is_target_N = whole.rows_N % width >= shown_B[whole.rows_N // width]
            return whole.select(is_target_N), None
        assert isinstance(framework, Mdm)
        is_masked_BL, is_scored_BL = torch.zeros_like(is_real_BL), torch.zeros_like(is_real_BL)
        for number, (plan, place) in enumerate(rows):
            is_masked_BL[number, plan.request.place] = torch.from_numpy(plan.is_masked_RL[place])
            is_scored_BL[number, plan.request.place] = torch.from_numpy(plan.is_scored_RL[place])
        rows_N = is_scored_BL.flatten().nonzero().squeeze(1)
        rate_B = torch.tensor([plan.rate_R[place] for plan, place in rows], dtype=torch.float64)
        x_BL = x0_BL.masked_fill(is_masked_BL, tokenizer.mask_id)
        t_B, targets_N = framework.schedule.inverse(1 - rate_B), x0_BL.flatten()[rows_N]
        problem = Problem(x_BL, rows_N, targets_N, torch.zeros_like(rows_N), t_B)
        return problem, attention_mask(real_BL)


# Whole texts under a model that reads left to right
#
# A sample is a list of documents, as a packed row holds them. It is tokenized by the scorer,
# document by document, with the scorer's EOS between them. What is counted follows the public code
# of mdlm and duo: every token but the EOS tokens after the first one. The first token is predicted
# from BOS; a tokenizer without BOS has nothing to predict it from, so it is not counted. Cost: one
# forward pass over each sample.

Documents = Sequence[str]
PUBLISHED_CONTEXT = 1024
"""Scorer tokens per sample in the public codes."""
FEWEST_TOKENS = 2
"""A shorter sample is left out of all numbers."""


@dataclass(frozen=True)
class TextScore:
    """One sample under a scorer."""

    nll: float
    """Sum over the counted tokens, in nats."""
    num_tokens: int
    """Counted tokens; 0 for a sample that is too short to count."""
    ids: list[int]
    """The scorer's tokens of the text, without BOS and EOS."""
    is_cut: bool
    """True when tokens beyond the scorer's context were dropped."""


# Paper: Table 8
@dataclass(frozen=True)
class TextScorer:
    """A model that reads left to right, and how it reads samples."""

    name: str
    fingerprint: str
    """Changes when the numbers may."""
    context: int
    """Tokens that are scored together."""
    rule: str
    """First token and long texts, in words."""
    token_losses: Callable[[Sequence[Request]], list[Floats]]
    """Cross-entropies of each target's tokens."""
    encode: Callable[[str], Sequence[int]]
    begin: Tokens
    eos: int | None
    num_given: int
    """Tokens at the start of a row that are not predicted."""
    has_pieces: bool
    """A long text is scored in pieces of the context; otherwise it is cut there."""
    batch_size: int = 8
    """Samples that are scored at once."""
    world: World = field(default_factory=World)
    """Processes that share the samples."""

    def score(
        self, samples: Sequence[Documents], progress: Progress = NO_PROGRESS
    ) -> list[TextScore]:
        """Each sample's score, in order, whatever the batch size and the number of processes."""
        own = progress.scaled(self.world.size)
        return self.world.share(samples, lambda mine: self._score(mine, own))

    def _score(self, samples: Sequence[Documents], progress: Progress) -> list[TextScore]:
        size = self.context - len(self.begin)

        def pieces_of(row: Sequence[int]) -> list[Tokens]:
            starts = range(0, len(row), size)
            return [self.begin + tuple(row[start : start + size]) for start in starts]

        whole = [join_documents(list(map(self.encode, sample)), self.eos) for sample in samples]
        rows = whole if self.has_pieces else [ids[:size] for ids in whole]
        texts = [[i for i in row if i != self.eos] for row in rows]
        found = [TextScore(0.0, 0, text, False) for text in texts]
        order = [n for n, text in enumerate(texts) if len(text) >= FEWEST_TOKENS]
        order.sort(key=lambda n: len(rows[n]), reverse=True)
        progress.advance(len(samples) - len(order))
        for first in range(0, len(order), self.batch_size):
            part = order[first : first + self.batch_size]
            pieces = [pieces_of(rows[n]) for n in part]
            given = self.num_given
            requests = [Request(row[:given], row[given:]) for own in pieces for row in own]
            losses = iter(self.token_losses(requests))
            for n, own in zip(part, pieces, strict=True):
                ce_L = np.concatenate(list(islice(losses, len(own))))
                counted = is_counted([*self.begin, *rows[n]], self.eos, given)[given:]
                nll, is_cut = float(ce_L[counted].sum()), len(whole[n]) > len(rows[n])
                found[n] = TextScore(nll, int(counted.sum()), texts[n], is_cut)
            progress.advance(len(part))
        return found


def join_documents(documents: Sequence[Sequence[int]], eos: int | None) -> list[int]:
    """Tokens of documents in one row, EOS between them where there is one."""
    sign = [] if eos is None else [eos]
    return [token for ids in documents for token in (*sign, *ids)][len(sign) :]


# Paper: Table 8
def is_counted(ids: Sequence[int], eos: int | None, num_given: int = 1) -> NDArray[np.bool_]:
    """Which tokens of a row count: not the given ones, and of all EOS tokens only the first.

    Where the given BOS is the same sign as EOS, it is the first one, as in the public codes.
    """
    row = np.asarray(ids, dtype=np.int64)
    is_eos = row == (-1 if eos is None else eos)
    counted = ~is_eos | (np.cumsum(is_eos) == 1)
    counted[:num_given] = False
    return counted


def run_scorer(run: Loaded, *, context: int = PUBLISHED_CONTEXT) -> TextScorer:
    """An ARM of this package, by its own tokenizer: the exact NLL.

    A text longer than a block is scored in pieces of a block, each from the start token on, as
    the run saw its training text; nothing is dropped.
    """
    if run.config.framework.name != "arm":
        raise UserError(f"{run.folder} is {run.config.framework.name}; a scorer must be an ARM")
    scorer, context = Scorer(run), min(context, run.config.data.block_length)
    return TextScorer(
        f"{run.folder.name}, step {run.step}",
        f"{run.tokenizer.fingerprint}/{hash_weights(run.model)}",
        context,
        f"all tokens scored, in pieces of {context}, each with a start token",
        scorer.token_losses,
        scorer.maker.encode,
        scorer.maker.begin,
        run.tokenizer.eos_id if run.tokenizer.eos_id >= 0 else None,
        num_given=len(scorer.maker.begin),
        has_pieces=True,
    )


def load_scorer(
    name: str,
    *,
    device: str = "auto",
    context: int = PUBLISHED_CONTEXT,
    cache: str | None = None,
) -> TextScorer:
    """A scorer: ``smollm2``, a run folder with an ARM, a Hugging Face folder or a model's name."""
    if context < 2:
        raise UserError(f"--context must be at least 2, got {context}")
    folder, source = Path(name), str(smollm2_folder(cache)) if name == SMOLLM2 else name
    if (folder / "run.json").exists():
        return run_scorer(load(folder, device=device), context=context)
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f"there is no folder {name} with a scorer")
    return _load_causal_lm(name, source, device, context)


def _load_causal_lm(name: str, source: str, device: str, context: int) -> TextScorer:
    """A Hugging Face model and its tokenizer; a UserError if that fails.

    In float32: logits of GPT-2 are around -100, where bfloat16 has steps of 0.5.
    """
    target = pick_device(device)
    library = import_transformers(f"scorer {name!r}")
    # no network, no such name, damaged files, another kind of model
    with quiet(f"cannot load scorer {name!r} (without a network: {SMOLLM2}, a folder, an ARM run)"):
        check_shards(source)
        how: dict[str, Any] = {"trust_remote_code": False}
        tokenizer = library.AutoTokenizer.from_pretrained(source, **how)
        model = library.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **how)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise UserError(f"scorer {name!r}: its tokenizer has more tokens than the model")
    tokenizer.split_special_tokens = True  # "</s>" in a sample is just text
    model = model.to(target).eval()
    mark = fingerprint(source)  # a model of the hub by its commit, too
    mark += "" if Path(source).is_dir() else f"@{getattr(model.config, '_commit_hash', None)}"
    bos = tokenizer.bos_token_id
    context = min(context, getattr(model.config, "max_position_embeddings", None) or context)
    first = "not scored (no BOS)" if bos is None else "predicted from BOS"
    return TextScorer(
        Path(name).name if Path(name).is_dir() else name,
        mark,
        context,
        f"first token {first}; a sample beyond {context} tokens (BOS included) is cut",
        partial(_causal_lm_losses, model),
        lambda text: tokenizer(text, add_special_tokens=False, verbose=False).input_ids,
        () if bos is None else (bos,),
        tokenizer.eos_token_id,
        num_given=1,
        has_pieces=False,
    )


@torch.no_grad()
def _causal_lm_losses(model: Any, requests: Sequence[Request]) -> list[Floats]:
    """As :meth:`Scorer.token_losses`. Pads come after a row, where no token sees them."""
    rows = [torch.tensor(request.tokens) for request in requests]
    x_BL, is_real_BL = pad_rows(rows, max(map(len, rows)), 0)
    x_BL, mask_BL = x_BL.to(model.device), is_real_BL.long().to(model.device)
    logits_BLV = model(input_ids=x_BL, attention_mask=mask_BL, use_cache=False).logits
    found = []
    for logits_LV, x_L, request in zip(logits_BLV, x_BL, requests, strict=True):
        first, length = len(request.given), request.length
        logits_LV = logits_LV[first - 1 : length - 1].float()
        ce_L = F.cross_entropy(logits_LV, x_L[first:length], reduction="none")
        found.append(ce_L.cpu().double().numpy())
    return found
