"""The sampling loops: a network, canvases with given tokens, a time grid and a rule; for causal
models token by token, in the order they were trained for.

Random numbers are keyed by sample and position, so a sample does not depend on its batch. For blind
rules the reveal times are known beforehand: the network is called only when something is revealed,
only on rows where it is, its head only on those positions. That is also exact for time-conditioned
models (they get the time of the step in which they are called).

B canvases, L length, N predicted positions, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bellmask.data.blocks import share_out
from bellmask.data.tokenizers import ByteTokenizer, Tokenizer
from bellmask.diffusion.frameworks import Ordered
from bellmask.diffusion.schedules import Linear, Schedule
from bellmask.generate.rules import RULES, Moment, Rule
from bellmask.model.head import CHUNK_ROWS
from bellmask.model.transformer import KeyValues, attention_mask
from bellmask.utils.distributed import float64_device
from bellmask.utils.errors import UserError
from bellmask.utils.rng import stream_key, uniform

# Canvases: rows of ids to generate, the mask id in each position that is not given.

_GAP = re.compile(r"\[MASK(?:\*([0-9]{1,9}))?\]")
_ALMOST_GAP = re.compile(r"\[\s*mask[^\]]*\]", re.IGNORECASE)

LONGEST = 1 << 20
"""Maximum tokens of a canvas: more than any network supports, but little memory."""


def canvas_from_pieces(
    tokenizer: Tokenizer,
    pieces: Sequence[str | int],
    before: Sequence[int] = (),
    behind: Sequence[int] = (),
) -> Tensor:
    """A row [L]: texts are given, a number is as many tokens to generate: ``["The ", 12, "."]``.

    ``before`` and ``behind`` are ids around them, BOS and EOS say.
    """
    ids = list(before)
    for piece in pieces:
        if isinstance(piece, str):
            ids += tokenizer.encode(piece).tolist()
        elif piece < 1:
            raise UserError(f"a gap needs at least one token, got {piece}")
        elif len(ids) + piece > LONGEST:
            raise UserError(f"a canvas can have at most {LONGEST:,} tokens")
        else:
            ids += [tokenizer.mask_id] * piece
    return torch.tensor([*ids, *behind])


def read_gaps(text: str) -> list[str | int]:
    """``"The [MASK*12] sat on the [MASK]."`` as pieces: [MASK*n] is a gap of n tokens."""
    pieces: list[str | int] = []
    for number, part in enumerate(_GAP.split(text)):
        if number % 2:
            pieces.append(int(part or "1"))
        elif odd := _ALMOST_GAP.search(part):
            raise UserError(f"{odd[0]} is not a gap; write [MASK] or [MASK*12]")
        elif part:
            pieces.append(part)
    if all(isinstance(piece, str) for piece in pieces):
        raise UserError("the canvas has no gap; write [MASK*12] to generate 12 tokens there")
    return pieces


# Steps of a generation as observers see them: the rows after each step, and tokens as text.
#
# Observers get a :class:`Step` per step. B rows of one batch, L length.

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, eq=False)
class Step:
    """The rows of one batch after a step. Tokens may appear, change, or be masked again."""

    number: int
    """0 is the initial canvas, then 1, 2, ... for each step."""
    num_steps: int
    """Steps planned in all."""
    num_calls: int
    """Network calls so far, for this batch."""
    t: float
    """Time after the step: 1 all masked, 0 clean. With blocks, by the fraction of masked tokens of
    the batch."""
    first_sample: int
    """Sample number of row 0."""
    ids_BL: Tensor
    """On the CPU, int64, the mask id where masked. Do not modify it; the
    sampler may change it later, so copy what you keep."""


OnStep = Callable[[Step], None]


def token_texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    """The text of each token inside a text; ids must not be the mask.

    A token is decoded after another one, since some decoders treat the first token of a text
    differently (a space is dropped, a word piece keeps its sign). Bytes that are not a character
    by themselves are shown as ``\\xNN`` for byte tokens, else as the replacement character;
    special tokens, which decoding omits, by name.
    """
    decode, first = tokenizer.decode, tokenizer.encode("a")
    before = decode(first)
    named = {tokenizer.pad_id: "<pad>", tokenizer.bos_id: "<bos>", tokenizer.eos_id: "<eos>"}

    @cache
    def text_of(token: int) -> str:
        alone, both = decode(np.array([token])), decode(np.append(first, token))
        if token in named and not alone:
            return named[token]
        text = both[len(before) :] if both.startswith(before) else alone
        if isinstance(tokenizer, ByteTokenizer) and text == REPLACEMENT:
            return f"\\x{token:02x}"
        return text or REPLACEMENT

    return text_of


# Time grids for sampling: from 1 (all masked) down to 0 (clean), float64 [steps + 1].


# Paper: Sec. 2.1: reverse process
def uniform_grid(num_steps: int) -> Tensor:
    """``num_steps`` equal steps from t = 1 to t = 0."""
    return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)


def cosine_grid(num_steps: int) -> Tensor:
    """t = cos(pi/2 k/K): few tokens in the first steps, when little is known, many in the last."""
    share = torch.arange(num_steps, dtype=torch.float64) / num_steps
    return torch.cat([torch.cos(share * (math.pi / 2)), torch.zeros(1, dtype=torch.float64)])


def count_grid(num_tokens: int, per_step: int = 1, schedule: Schedule | None = None) -> Tensor:
    """The times at which ``per_step`` tokens more of ``num_tokens`` are visible."""
    steps = torch.arange(math.ceil(num_tokens / per_step) + 1, dtype=torch.float64)
    return (schedule or Linear()).inverse((steps * per_step / num_tokens).clamp(max=1))


Grid = Tensor | int | None
"""Times, or tokens per step; None: as the rule has it."""
GRIDS: dict[str, Callable[[int], Tensor]] = {"uniform": uniform_grid, "cosine": cosine_grid}
"""Grids of a number of steps; ``count`` goes by tokens instead."""


# Calls of the network while sampling: only rows that need one, counted, guided, with a cache.

Reader = Callable[[Tensor], Tensor]
"""What is made of some rows of logits."""


class SamplingDenoiser:
    """A denoiser for samplers, which counts the cost of its calls.

    ``model(x, rows, t_B=, mask=)`` returns logits [N, V]; for a cache also ``positions=``,
    ``cache=``, and it has ``new_cache``. A model with ``reads_chunks`` takes a function as its
    third argument, and all its logits never exist at once.
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        mask_id: int,
        *,
        is_real_BL: Tensor | None = None,
        guidance: float = 0.0,
        device: torch.device | None = None,
    ) -> None:
        """Guidance w > 0 takes logits u + (1 + w)(c - u), where u does not see given tokens."""
        self.model, self.mask_id, self.device = model, mask_id, device or torch.device("cpu")
        self.is_real_BL, self.guidance = is_real_BL, guidance

    def begin(self, canvas_BL: Tensor) -> None:
        """Count from zero, without a cache, for canvases whose given tokens guidance will hide."""
        self.num_calls = self.num_rows = self._prefix = 0
        self._cache: KeyValues | None = None
        self._is_given_BL = canvas_BL != self.mask_id
        # what a causal LM predicts the first token from stays, as it did in training
        self._is_given_BL[:, : getattr(self.model, "first_maskable", 0)] = False
        if self.guidance and not bool(self._is_given_BL.any()):
            raise UserError("guidance needs given tokens: a prefix or a canvas")

    def cache_prefix(self, length: int) -> None:
        """From the next call on keep the keys and values of the first ``length`` positions.

        That call takes every row along, so calls per sample then depend a little on the batch.
        """
        if getattr(self.model, "uses_time", False):
            raise UserError("a time-conditioned model cannot cache between calls: omit --cache")
        if not hasattr(self.model, "new_cache"):
            raise UserError("this model cannot cache keys and values between calls")
        self._prefix, self._cache = length, None

    def masked_share(self, is_masked_BL: Tensor) -> Tensor:
        """Of the tokens of each row, without padding, [B]."""
        length = is_masked_BL.shape[1] if self.is_real_BL is None else self.is_real_BL.sum(1)
        return is_masked_BL.sum(1).double() / length

    def read(self, x_BL: Tensor, is_wanted_BL: Tensor, t_B: Tensor, reader: Reader) -> Tensor:
        """What ``reader`` makes of the logits [N, V] at the wanted positions, joined.

        It gets parts of them, row by row; rows of the batch that want none are left out.
        """
        active = is_wanted_BL.any(dim=1).nonzero().squeeze(1)
        if self._prefix and self._cache is None:
            active = torch.arange(len(x_BL))  # the cache must hold every row
        x, wanted, t = x_BL[active], is_wanted_BL[active], t_B[active]
        rows_N = wanted.flatten().nonzero().squeeze(1)
        self.num_calls += 1
        if not self.guidance:
            return self._call(x, rows_N, t, active, reader)
        blind = torch.where(self._is_given_BL[active], self.mask_id, x)
        both = torch.cat([active, active + len(x_BL)])

        def guided(logits: Tensor) -> Tensor:
            seeing, unseeing = logits.unflatten(0, (-1, 2)).unbind(1)
            return reader(unseeing + (1 + self.guidance) * (seeing - unseeing))

        pairs = torch.stack([rows_N, rows_N + x.numel()], dim=1).flatten()
        return self._call(torch.cat([x, blind]), pairs, t.repeat(2), both, guided)

    def _call(
        self, x_BL: Tensor, rows_N: Tensor, t_B: Tensor, batch_B: Tensor, reader: Reader
    ) -> Tensor:
        """One pass over rows whose places in the (doubled) batch are ``batch_B``."""
        self.num_rows += len(x_BL)
        mask, more = None, dict[str, Any]()
        if self.is_real_BL is not None:
            mask = attention_mask(self.is_real_BL[batch_B % len(self.is_real_BL)])
        if self._prefix and self._cache is None:
            self._cache = self.model.new_cache(self._prefix)  # type: ignore[attr-defined]
            more["cache"] = self._cache
        elif self._cache is not None:
            length = x_BL.shape[1]
            rows_N = rows_N - (rows_N // length + 1) * self._prefix
            x_BL = x_BL[:, self._prefix :]
            more["positions"] = torch.arange(self._prefix, length, device=self.device)
            more["cache"] = self._cache.select(batch_B.to(self.device))
        more["t_B"] = t_B.float().to(self.device)
        more["mask"] = None if mask is None else mask.to(self.device)
        given = x_BL.to(self.device), rows_N.to(self.device)
        if getattr(self.model, "reads_chunks", False):
            return self.model(*given, reader, **more)
        return torch.cat(list(map(reader, self.model(*given, **more).split(CHUNK_ROWS))))


# Drawing a token from logits: temperature, top-k, top-p, and noise keyed by sample.


@dataclass(frozen=True)
class TokenChoice:
    """How a token is drawn from its logits."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int | None = None
    """Only the k most likely tokens, and those as likely as the k-th."""
    top_p: float | None = None
    """Only the smallest set of most likely tokens that has this much probability."""
    dtype: torch.dtype = torch.float64
    """Of the noise. float32 noise cannot reach the tail and lowers the effective temperature."""

    def draw(self, logits_NV: Tensor, counters_N: Tensor, key: int) -> Tensor:
        """One token per row by the Gumbel trick, its noise keyed by the row's counter."""
        if self.temperature == 0:
            return logits_NV.argmax(dim=1)
        device, num_tokens = float64_device(logits_NV.device), logits_NV.shape[1]
        column = torch.arange(num_tokens, device=device)
        smallest, largest = torch.finfo(self.dtype).tiny, 1 - torch.finfo(self.dtype).eps
        chosen = []
        for logits, counters in zip(
            logits_NV.split(CHUNK_ROWS), counters_N.to(device).split(CHUNK_ROWS), strict=True
        ):
            u = uniform(key, counters[:, None] * num_tokens + column).to(self.dtype)
            noise = -torch.log(-torch.log(u.clamp(smallest, largest)))
            chosen.append((self._scaled(logits.to(device)) + noise).argmax(dim=1))
        return torch.cat(chosen).to(logits_NV.device)

    def _scaled(self, logits_NV: Tensor) -> Tensor:
        """Logits over temperature, -inf for what top-k and then top-p leave out."""
        scaled = logits_NV.to(self.dtype) / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[1]:
            last = scaled.topk(self.top_k, dim=1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < last, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, place = scaled.sort(dim=1, descending=True, stable=True)
            p = ordered.softmax(dim=1)
            is_out = p.cumsum(dim=1) - p >= self.top_p  # more likely tokens have enough probability
            is_out = torch.zeros_like(is_out).scatter(1, place, is_out)
            scaled = scaled.masked_fill(is_out, -torch.inf)
        return scaled


# The loop.


@dataclass(frozen=True)
class Generation:
    """Finished rows and their cost."""

    ids_BL: Tensor
    num_calls: int
    """Network calls, over all steps in which anything was revealed."""
    num_rows: int
    """Rows sent through the network in total (twice per call with guidance)."""

    @property
    def nfe(self) -> float:
        """Function evaluations per sample: how often its row went through the network."""
        return self.num_rows / len(self.ids_BL)


class Noise:
    """Random numbers of numbered samples of a seed, by position and step."""

    def __init__(self, seed: int, first_sample: int | Tensor, canvas_BL: Tensor) -> None:
        """``first_sample`` is the number of the first row, or those of all rows."""
        count, length = canvas_BL.shape
        if isinstance(first_sample, int):
            first_sample = first_sample + torch.arange(count)
        self.seed, self.first = seed, int(first_sample[0])
        self.place_BL = first_sample[:, None] * length + torch.arange(length)
        """A counter for each position of each sample."""

    def numbers(self, step: int | None, name: str) -> Tensor:
        """Uniform numbers of a named stream, the same in each step or a step's own, [B, L]."""
        return uniform(self.key(step, name), self.place_BL)

    def key(self, step: int | None, name: str) -> int:
        return stream_key(self.seed, name, *([] if step is None else [step]))


def _check(
    network: SamplingDenoiser, canvas_BL: Tensor, grid: Grid, rule: Rule, block_length: int | None
) -> None:
    """Reject settings that would fail later or be ignored."""
    is_canvas = canvas_BL.ndim == 2 and canvas_BL.numel() > 0
    if not is_canvas or not 0 <= int(canvas_BL.min()) <= int(canvas_BL.max()) <= network.mask_id:
        raise UserError(f"a canvas must be rows of token ids from 0 to {network.mask_id}, the mask")
    if not rule.takes_grid and grid is not None:
        raise UserError("this rule has its own times: it takes no grid")
    is_grid = grid is None or (not isinstance(grid, Tensor) and grid >= 1)
    if isinstance(grid, Tensor) and grid.ndim == 1 and len(grid) > 1:
        falls = bool((grid.diff() < 0).all())
        is_grid = falls and float(grid[0]) == 1 and float(grid[-1]) == 0
    if not is_grid:
        raise UserError("a grid is a number of tokens per step, or times that decrease from 1 to 0")
    if block_length is not None and block_length < 1:
        raise UserError(f"block_length must be at least 1, got {block_length}")


# Paper: Sec. 2.1: reverse process
@torch.no_grad()
def generate(
    network: SamplingDenoiser,
    canvas_BL: Tensor,
    grid: Grid,
    rule: Rule = RULES["ancestral"],
    *,
    choice: TokenChoice | None = None,
    schedule: Schedule | None = None,
    seed: int = 0,
    first_sample: int | Tensor = 0,
    block_length: int | None = None,
    is_cached: bool = False,
    on_step: OnStep | None = None,
) -> Generation:
    """Fill every masked position of the canvases; given tokens never change.

    ``grid`` goes from t = 1 to 0, or is the number of tokens that each step reveals (ancestral
    rules: on average); None is 1, and a rule with times of its own takes none. With
    ``block_length`` blocks of so many positions are finished one after the other from the first
    masked position on, each with its share of the grid's steps; ``is_cached`` keeps what comes
    before the block in a cache. ``first_sample`` is the first row's number, or those of all rows
    [B]: other numbers, other noise. Rows should be masked at the same positions: steps are counted
    for the row with most to fill.
    """
    schedule, choice = schedule or Linear(), choice or TokenChoice()
    _check(network, canvas_BL, grid, rule, block_length)
    network.begin(canvas_BL)
    if is_cached:
        network.cache_prefix(0)  # rejects what cannot be cached before starting
    noise, tell = Noise(seed, first_sample, canvas_BL), on_step or (lambda step: None)
    x_BL, u_BL = canvas_BL.clone(), noise.numbers(None, "reveal")
    turns = _turns(canvas_BL == network.mask_id, block_length)
    grids = _share_grid(grid, turns, schedule)
    number, num_steps, is_alone = 0, sum(len(one) - 1 for one in grids), len(turns) == 1
    tell(Step(0, num_steps, 0, 1.0, noise.first, x_BL))
    for is_turn_BL, part in zip(turns, grids, strict=True):
        if is_cached and (start := int(is_turn_BL.any(0).long().argmax())):
            network.cache_prefix(start)
        for k, (t, s) in enumerate(itertools.pairwise(part)):
            is_masked_BL = x_BL == network.mask_id
            is_open_BL = is_masked_BL & is_turn_BL
            alpha_t, alpha_s = schedule.alpha(t), schedule.alpha(s)
            remaining_B = (is_turn_BL.sum(1) * (1 - alpha_s)).round().long()
            count_t_B = schedule.inverse(1 - network.masked_share(is_masked_BL))
            moment = Moment(
                is_open_BL=is_open_BL,
                is_made_BL=is_turn_BL & ~is_masked_BL,
                alpha_t=float(alpha_t),
                alpha_s=float(alpha_s),
                budget_B=(is_open_BL.sum(1) - remaining_B).clamp(min=0),
                t_B=t.expand(len(x_BL)) if is_alone else count_t_B,
                count_t_B=count_t_B,
                is_alone=is_alone,
                u_BL=u_BL,
                fresh=partial(noise.numbers, k),
                schedule=schedule,
            )
            is_forgotten_BL = rule.forgotten(moment)
            is_candidate_BL = rule.candidates(moment)
            if bool(is_candidate_BL.any()):
                key = noise.key(k if rule.is_repeated else None, "gumbel")
                reader = _drawing(choice, rule, noise.place_BL[is_candidate_BL], key)
                drawn = network.read(x_BL, is_candidate_BL, rule.times(moment), reader).cpu()
                is_revealed_BL = rule.revealed(moment, is_candidate_BL, drawn[:, -1])
                x_BL[is_revealed_BL] = drawn[is_revealed_BL[is_candidate_BL], 0].long()
            if is_forgotten_BL is not None:
                x_BL[is_forgotten_BL] = network.mask_id
            number += 1
            if not is_alone:  # the time of the whole rows, not of the block
                s = schedule.inverse(1 - (x_BL == network.mask_id).double().mean())
            tell(Step(number, num_steps, network.num_calls, float(s), noise.first, x_BL))
    return Generation(x_BL, network.num_calls, network.num_rows)


def _drawing(choice: TokenChoice, rule: Rule, counter_N: Tensor, key: int) -> Reader:
    """Parts of the logits, in order → the tokens drawn, and for a rule that asks their scores."""
    done = 0

    def read(logits_NV: Tensor) -> Tensor:
        nonlocal done
        part = slice(done, done + len(logits_NV))
        done = part.stop
        tokens_N = choice.draw(logits_NV, counter_N[part], key)
        if rule.score is None:
            return tokens_N[:, None]
        score_N = rule.score(logits_NV.float().log_softmax(dim=1), tokens_N)
        return torch.stack([tokens_N.float(), score_N], dim=1)  # exact below 2^24 tokens

    return read


def _turns(is_masked_BL: Tensor, block_length: int | None) -> list[Tensor]:
    """The masked positions, or those of each block from a row's first masked position on."""
    if block_length is None:
        return [is_masked_BL]
    start_B = is_masked_BL.long().argmax(dim=1, keepdim=True)
    block_BL = (torch.arange(is_masked_BL.shape[1]) - start_B) // block_length
    last = int(torch.where(is_masked_BL, block_BL, 0).max())
    turns = [is_masked_BL & (block_BL == number) for number in range(last + 1)]
    return [one for one in turns if bool(one.any())]


def _share_grid(grid: Grid, turns: list[Tensor], schedule: Schedule) -> list[Tensor]:
    """For each turn a grid of the same shape, steps in proportion to its tokens, at least one."""
    sizes = [int(one.sum(1).max()) for one in turns]
    if not isinstance(grid, Tensor):
        return [count_grid(size, grid or 1, schedule) if size else torch.ones(1) for size in sizes]
    if len(turns) < 2:
        return [grid] * len(turns)
    last = len(grid) - 1
    parts = []
    for steps in share_out(sizes, last):
        at = torch.linspace(0, last, max(1, steps) + 1, dtype=torch.float64)
        low = at.floor().long().clamp(max=last - 1)
        parts.append(torch.lerp(grid[low], grid[low + 1], at - low))
    return parts


# Token by token with a causal model.
#
# One call per token, and one for all given ones: a model that can keep keys and values sees each
# slot once; any other gets the whole prefix each time.


@torch.no_grad()
def generate_in_order(
    model: Callable[..., Tensor],
    canvas_BL: Tensor,
    framework: Ordered,
    *,
    mask_id: int,
    choice: TokenChoice | None = None,
    seed: int = 0,
    first_sample: int | Tensor = 0,
    device: torch.device | None = None,
    on_step: OnStep | None = None,
) -> Generation:
    """Fill the masked positions; all canvases have the same ones.

    Given tokens must come first: any of them can where orders are random; a fixed order has its own
    first ones (for an ARM the prefix). ``first_sample`` as for :func:`generate`.
    """
    device, choice = device or torch.device("cpu"), choice or TokenChoice()
    num_samples, length = canvas_BL.shape
    noise, tell = Noise(seed, first_sample, canvas_BL), on_step or (lambda step: None)
    is_given_L = canvas_BL[0] != mask_id
    assert bool(((canvas_BL != mask_id) == is_given_L).all()), "other positions are given"
    num_given = int(is_given_L.sum())
    order_BL = _order(framework, noise.numbers(None, "order"), is_given_L)
    counter_BL = noise.place_BL.gather(1, order_BL)
    slots_BL = canvas_BL.gather(1, order_BL)
    begin_B = torch.full((num_samples, 1), mask_id)
    position_BL = torch.cat([torch.zeros_like(begin_B), order_BL + 1], dim=1)
    make_cache = getattr(model, "new_cache", None)
    cache = make_cache() if make_cache else None
    made_BL, num_steps = canvas_BL.clone(), length - num_given
    tell(Step(0, num_steps, 0, 1.0, noise.first, made_BL))
    for number, slot in enumerate(range(num_given, length), start=1):
        seen = slice(0 if cache is None or number == 1 else slot, slot + 1)
        width = seen.stop - seen.start
        logits_BV = model(
            torch.cat([begin_B, slots_BL], dim=1)[:, seen].to(device),
            (torch.arange(num_samples) * width + width - 1).to(device),
            positions=position_BL[:, seen].to(device),
            target_positions=position_BL[:, seen.start + 1 : slot + 2].to(device),
            **({} if cache is None else {"cache": cache}),
        )
        tokens_B = choice.draw(logits_BV, counter_BL[:, slot], noise.key(None, "gumbel"))
        slots_BL[:, slot] = tokens_B.cpu()
        made_BL.scatter_(1, order_BL[:, slot, None], slots_BL[:, slot, None])
        tell(Step(number, num_steps, number, 1 - number / num_steps, noise.first, made_BL))
    return Generation(made_BL, num_steps, num_steps * num_samples)


def _order(framework: Ordered, u_BL: Tensor, is_given_L: Tensor) -> Tensor:
    """Positions in the order they come, given ones first; [B, L]."""
    length = len(is_given_L)
    if framework.rank_L is None:
        return torch.where(is_given_L, u_BL - 1, u_BL).argsort(dim=1)
    is_arm = bool((framework.rank_L.diff() > 0).all())
    if length > len(framework.rank_L) and not is_arm:
        raise UserError(f"this model has an order of {len(framework.rank_L)} tokens, not {length}")
    order_L = torch.arange(length) if is_arm else framework.orders(u_BL[:1]).reshape(-1)
    if bool(is_given_L[order_L].long().diff().gt(0).any()):
        raise UserError("this model has a fixed order: an ARM takes a prefix, a sigma-ARM nothing")
    return order_L.expand(len(u_BL), -1).contiguous()
