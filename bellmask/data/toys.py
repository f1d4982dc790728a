"""Sources with exactly known conditionals: the ground truth of tests and analyses.

All of them are hidden-Markov sources: chains of any order, noisy ones, and one whose locality can
be tuned, the property that makes masked diffusion a slow learner (paper Sec. 3). V symbols, S
hidden states, L length, B rows; the mask is id V, as everywhere. All sums are float64.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bellmask.config.config import RunConfig, run_options
from bellmask.config.options import DataOptions
from bellmask.data.blocks import Blocks
from bellmask.data.corpora import TOY_PREFIX
from bellmask.data.tokenizers import Tokenizer
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.rng import stream_key, uniform_rows

CAUSAL_ROWS = 1024
"""Causal predictions that are computed at once."""
SHARPNESS = 12.0
"""Random distributions are softmax(sharpness u), u uniform."""
LONGEST_MEMORY = 2
"""Orders that are detected; a source with a longer memory counts as hidden."""


def random_rows(name: str, count: int, width: int, sharpness: float = SHARPNESS) -> Tensor:
    """Distributions [count, width], positive and always the same; the sharper, the less even."""
    u = uniform_rows(stream_key(0, "toy", name), torch.arange(count), width)
    return torch.softmax(sharpness * u, dim=1)


def stationary(transition_SS: Tensor) -> Tensor:
    """The stationary distribution of an irreducible chain: pi (1 - P + J) = pi J = (1, ..., 1)."""
    size = len(transition_SS)
    matrix = torch.eye(size, dtype=torch.float64) - transition_SS + 1
    return torch.linalg.solve(matrix.T, torch.ones(size, dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class ToySource:
    """A hidden Markov source: a hidden state, and a symbol that each state emits."""

    initial_S: Tensor
    transition_SS: Tensor
    """Row s: the distribution of the next state after s."""
    emission_SV: Tensor
    """Row s: the distribution of the symbol in state s."""
    length: int

    @staticmethod
    def markov(initial_V: Tensor, transition_VV: Tensor, length: int) -> ToySource:
        """An order-1 chain: the state is the symbol."""
        symbol = torch.eye(len(initial_V), dtype=torch.float64)
        return ToySource(initial_V, transition_VV, symbol, length)

    @staticmethod
    def sticky(num_tokens: int, length: int, stay: float) -> ToySource:
        """Uniform start; the symbol stays with a probability, else moves anywhere at random."""
        move = torch.full((num_tokens, num_tokens), (1 - stay) / num_tokens, dtype=torch.float64)
        start = torch.full((num_tokens,), 1 / num_tokens, dtype=torch.float64)
        return ToySource.markov(start, move + stay * torch.eye(num_tokens).double(), length)

    @staticmethod
    def order_two(num_tokens: int, length: int, sharpness: float = SHARPNESS) -> ToySource:
        """Each pair of symbols has its own distribution of the next one; stationary.

        The state (a, b) = number a V + b has emitted b, after a. All rows are positive, so every
        pair leads to every other one.
        """
        pairs = num_tokens * num_tokens
        next_PV = random_rows("order_two", pairs, num_tokens, sharpness)
        symbol_PV = torch.eye(num_tokens, dtype=torch.float64).repeat(num_tokens, 1)
        # from (a, b) to (b, c) only
        move = (symbol_PV[:, :, None] * next_PV[:, None]).view(pairs, pairs)
        return ToySource(stationary(move), move, symbol_PV, length)

    @staticmethod
    def hidden(num_tokens: int, length: int, num_states: int = 4, stay: float = 0.9) -> ToySource:
        """States that stay for a while and follow each other in a cycle, with noisy symbols."""
        start = torch.full((num_states,), 1 / num_states, dtype=torch.float64)
        same = torch.eye(num_states, dtype=torch.float64)
        move = stay * same + (1 - stay) * same.roll(1, dims=1)
        return ToySource(start, move, random_rows("hidden", num_states, num_tokens), length)

    # Paper: Fig. 1
    @staticmethod
    def local(num_tokens: int, length: int, locality: float, num_topics: int = 4) -> ToySource:
        """Tunable locality: p(x^i | x^(i-1), k) = locality P[x^(i-1), x^i] + (1 - locality) Q_k.

        The topic k is drawn once per row, and the row is stationary given its topic. At locality 1
        only neighbors matter (the topic is idle and left out: a plain chain); at 0 the symbols
        are exchangeable, and all places say as much about a symbol as its neighbors. The state
        (k, v) is number k V + v.
        """
        topics = 1 if locality == 1 else num_topics
        chain_VV = random_rows("local/chain", num_tokens, num_tokens)
        topic_KV = random_rows("local/topics", topics, num_tokens)
        moves = [locality * chain_VV + (1 - locality) * topic_V for topic_V in topic_KV]
        start = torch.cat([stationary(move) for move in moves]) / topics
        symbol = torch.eye(num_tokens, dtype=torch.float64).repeat(topics, 1)
        return ToySource(start, torch.block_diag(*moves), symbol, length)

    @property
    def num_tokens(self) -> int:
        return self.emission_SV.shape[1]

    @cached_property
    def order(self) -> int | None:
        """The number of last symbols that determine the state, 1 or 2; None for other sources."""
        emits_SV = self.emission_SV > 0
        ends_WS = emits_SV.T
        for order in range(1, LONGEST_MEMORY + 1):
            if bool((ends_WS.sum(1) <= 1).all()):
                return order
            after_WS = (ends_WS.double() @ self.transition_SS) > 0
            ends_WS = (after_WS[:, None] & emits_SV.T).flatten(0, 1)
        return None

    # Paper: Eq. 14, Eq. 15, Eq. 16, Eq. 17
    @cached_property
    def entropy(self) -> float:
        """H(X) of a whole row, nats: the exact losses summed over context counts (Prop 3.1).

        Sources of an order only: the first symbols, then each one given the state before it.
        """
        if self.order is None:
            raise ValueError("the row entropy of a hidden source has no closed form")
        seen_WS, state_S = self.emission_SV.T * self.initial_S, self.initial_S
        for _ in range(min(self.order, self.length) - 1):
            seen_WS = ((seen_WS @ self.transition_SS)[:, None] * self.emission_SV.T).flatten(0, 1)
            state_S = state_S @ self.transition_SS
        words = seen_WS.sum(1)
        total = -float(torch.xlogy(words, words).sum())
        next_SV = self.transition_SS @ self.emission_SV
        next_S = -torch.xlogy(next_SV, next_SV).sum(1)
        for _ in range(self.length - self.order):
            total += float(state_S @ next_S)
            state_S = state_S @ self.transition_SS
        return total

    @cached_property
    def num_uniforms(self) -> int:
        """Uniform numbers that a row is drawn from: L, and L more where emissions are noisy."""
        return self.length * (1 if bool((self.emission_SV.amax(1) == 1).all()) else 2)

    def draw(self, u: Tensor) -> Tensor:
        """Rows from uniform numbers [B, num_uniforms]: those of the states, then of the symbols."""
        start, move = _inverse(self.initial_S[None]), _inverse(self.transition_SS)
        emit = _inverse(self.emission_SV)
        columns = u.T.contiguous()
        states = [start(torch.zeros(len(u), dtype=torch.int64), columns[0])]
        for column in columns[1 : self.length]:
            states.append(move(states[-1], column))
        if self.num_uniforms == self.length:
            return self.emission_SV.argmax(1)[torch.stack(states, dim=1)]
        noise = columns[self.length :]
        return torch.stack([emit(state, v) for state, v in zip(states, noise)], dim=1)

    # Paper: Eq. 12
    def log_conditionals(self, x_BL: Tensor) -> Tensor:
        """Log p(x^i = v | all observed symbols but i), float64 [B, L, V]; mask = not observed.

        Paper Eq. p_data_cond; where the observed symbols are impossible together it is NaN.
        """
        weight_BLS = self._observed(x_BL)
        before_BLS, _ = self._forward(weight_BLS)
        joint_BLV = (before_BLS * self._backward(weight_BLS)) @ self.emission_SV
        return torch.log(joint_BLV / joint_BLV.sum(-1, keepdim=True))

    def log_probability(self, x_BL: Tensor) -> Tensor:
        """Log p of the observed symbols of each row, nats, float64 [B]."""
        return self._forward(self._observed(x_BL))[1]

    def _observed(self, x_BL: Tensor) -> Tensor:
        """p(what is seen at i | state), [B, L, S]: 1 where nothing is."""
        nothing = torch.ones(len(self.initial_S), 1, dtype=torch.float64)
        return torch.cat([self.emission_SV, nothing], dim=1).T[x_BL]

    def _forward(self, weight_BLS: Tensor) -> tuple[Tensor, Tensor]:
        """(p(state i | seen before i) [B, L, S], log p of all that is seen [B])."""
        state = self.initial_S.expand(len(weight_BLS), -1)
        before, log_p = [], torch.zeros(len(weight_BLS), dtype=torch.float64)
        for weight in weight_BLS.unbind(1):
            before.append(state)
            joint = state * weight
            total = joint.sum(1, keepdim=True)
            log_p = log_p + total.log().squeeze(1)
            state = (joint / total.where(total > 0, 1)) @ self.transition_SS
        return torch.stack(before, dim=1), log_p

    def _backward(self, weight_BLS: Tensor) -> Tensor:
        """p(seen after i | state i) up to a factor, [B, L, S]."""
        after = [torch.ones_like(weight_BLS[:, 0])]
        for weight in weight_BLS[:, 1:].flip(1).unbind(1):
            back = (after[-1] * weight) @ self.transition_SS.T
            after.append(back / back.sum(1, keepdim=True))
        return torch.stack(after[::-1], dim=1)


def _inverse(table_RC: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """(rows, uniform numbers) → columns drawn from those rows' distributions.

    Bisection of the cumulative sums, all rows at once: 4 times faster than torch.searchsorted.
    """
    size = 1 << (table_RC.shape[1] - 1).bit_length()
    edges = torch.full((len(table_RC), size), 2.0, dtype=torch.float64)
    cumulative = table_RC.cumsum(1)
    edges[:, : table_RC.shape[1]] = cumulative / cumulative[:, -1:]
    edges = edges.flatten()
    steps = [1 << bit for bit in reversed(range(size.bit_length() - 1))]

    def draw(row_B: Tensor, u_B: Tensor) -> Tensor:
        first = row_B * size
        place = first
        for step in steps:
            place = place + step * (edges.index_select(0, place + (step - 1)) <= u_B)
        return place - first

    return draw


# Paper: Eq. 12
@dataclass(frozen=True)
class ExactDenoiser:
    """The perfect model of a source, callable like :class:`bellmask.model.transformer.Denoiser`."""

    source: ToySource
    is_causal: bool = False
    """Inputs are slots: slot 0 a start token, slot r the token at place ``positions[r]`` (from 1);
    slot r predicts place ``target_positions[r]`` from slots 1 .. r. Default: left to right."""

    def __call__(
        self,
        x_BL: Tensor,
        rows_N: Tensor,
        targets_N: Tensor | None = None,
        *,
        weight_N: Tensor | None = None,
        t_B: Tensor | None = None,
        positions: Tensor | None = None,
        target_positions: Tensor | None = None,
        mask: Tensor | None = None,
        reduce: bool = True,
    ) -> Tensor:
        """Log-probabilities [N, V]; or with targets the (weighted) sum, or each row's value."""
        if self.is_causal:
            log_p_NV = self._causal(x_BL, rows_N, positions, target_positions)
        else:
            log_p_NV = self.source.log_conditionals(x_BL).flatten(0, 1)[rows_N]
        if targets_N is None:
            return log_p_NV
        ce_N = -log_p_NV.gather(1, targets_N[:, None]).squeeze(1)
        if not reduce:
            return ce_N
        return ce_N.sum() if weight_N is None else (ce_N * weight_N).sum()

    def _causal(
        self, x_BL: Tensor, rows_N: Tensor, positions: Tensor | None, targets: Tensor | None
    ) -> Tensor:
        """Each row's slots as separate masked rows, a few rows at a time."""
        slots = torch.arange(x_BL.shape[1])
        held_BL = (slots if positions is None else positions).expand_as(x_BL)
        sought_BL = (slots + 1 if targets is None else targets).expand_as(x_BL)
        found = []
        for rows in rows_N.split(CAUSAL_ROWS):
            batch, slot = rows // len(slots), rows % len(slots)
            is_seen = slots <= slot[:, None]
            # place 0 is no place: it takes the start token and whatever is not seen
            place = torch.where(is_seen, held_BL[batch], 0)
            token = torch.where(is_seen, x_BL[batch], self.source.num_tokens)
            z = torch.full((len(rows), self.source.length + 1), self.source.num_tokens)
            log_p = self.source.log_conditionals(z.scatter(1, place, token)[:, 1:])
            found.append(log_p[torch.arange(len(rows)), sought_BL[batch, slot] - 1])
        return torch.cat(found)


# Toy sources as corpora: ``--data.train toy:local:0.5 --data.tokenizer symbols:8``.
#
# Rows are drawn in memory, each its own document, from keys that depend only on the toy, its length
# and the split: the same on every machine and every rank. 2^18 rows of 128 symbols take a few
# seconds. :func:`toy_source` gives an analysis the exact source of a run's data.

NUM_SYMBOLS = 8
NUM_ROWS = {"train": 1 << 18, "valid": 4096}
FORMAT = 1
"""Part of every fingerprint and key; raise it when rows would come out differently."""
_ROWS_AT_ONCE = 1 << 13
_OWN_OPTIONS = ("data.train", "data.tokenizer", "data.block_length", "data.cache")


TOYS: dict[str, tuple[Callable[..., ToySource], str, float, float]] = {
    "sticky": (ToySource.sticky, "stay", 0.8, 0.999),
    "order2": (ToySource.order_two, "", 0.0, 0.0),
    "hidden": (ToySource.hidden, "", 0.0, 0.0),
    "local": (ToySource.local, "locality", 0.5, 1.0),
}
"""Name → ((symbols, length, and the number if it takes one) → source; what the number is, '' where
there is none; its default; the highest one)."""


def _parse(train: str) -> tuple[str, float]:
    name, colon, text = train.removeprefix(TOY_PREFIX).partition(":")
    _, what, default, highest = look_up("toy corpus", name, TOYS)
    if colon and not what:
        raise UserError(f"data.train={train}: {TOY_PREFIX}{name} takes no number")
    try:
        number = float(text) if colon else default
    except ValueError:
        number = -1.0
    if not 0 <= number <= highest:
        raise UserError(f"data.train={train}: the {what} is a number from 0 to {highest:g}")
    return name, number


def toy_source(options: DataOptions) -> ToySource:
    """The exact source of a run's rows."""
    name, number = _parse(options.train)
    build, what, *_ = TOYS[name]
    return build(NUM_SYMBOLS, options.block_length, *([number] if what else []))


def toy_blocks(options: DataOptions, tokenizer: Tokenizer) -> tuple[Blocks, Blocks]:
    """Training and validation rows, held in memory."""
    if tokenizer.num_tokens != NUM_SYMBOLS:
        raise UserError(f"data.train={options.train} needs --data.tokenizer symbols:{NUM_SYMBOLS}")
    values = RunConfig(data=options).flat()
    given = [
        option.flag
        for path, option in run_options().items()
        if path not in _OWN_OPTIONS and values[path] != option.default
    ]
    if given:
        raise UserError(f"data.train={options.train} is not text: omit {', '.join(given)}")
    return _draw(options, "train"), _draw(options, "valid")


def _draw(options: DataOptions, split: str) -> Blocks:
    (name, number), source = _parse(options.train), toy_source(options)
    count, length = NUM_ROWS[split], source.length
    parts = {"toy": name, "number": number, "symbols": NUM_SYMBOLS, "length": length}
    parts |= {"rows": count, "split": split, "format": FORMAT}
    mark = json.dumps(parts, sort_keys=True)
    key = stream_key(0, "toy corpus", mark)
    tokens = np.empty((count, length), dtype=np.uint8)
    for rows in torch.arange(count).split(_ROWS_AT_ONCE):
        drawn = source.draw(uniform_rows(key, rows, source.num_uniforms))
        tokens[rows[0] : rows[-1] + 1] = drawn.numpy()
    return Blocks(
        tokens,
        np.full(count, length, dtype=np.int64),
        np.arange(count, dtype=np.int64),
        hashlib.sha256(mark.encode()).hexdigest(),
    )
