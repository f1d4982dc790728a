"""Questions scored again and again with fresh masks, by each way of estimating.

K repetitions, N questions, C choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bellmask.analyze.choice_noise import Repeats
from bellmask.evaluate.continuations import Ask, ContinuationScorer, Estimator, Kind, Score, add_up
from bellmask.evaluate.paper_suite import RunContestant
from bellmask.evaluate.paper_tasks import Choice, Prompts
from bellmask.storage.loading import Loaded
from bellmask.utils.rng import stream_key

OURS: Literal["auto"] = "auto"
WAYS: dict[str, tuple[Kind, bool]] = {
    "strata": ("strata", True),
    "strata_apart": ("strata", False),
    "bernoulli": ("bernoulli", True),
    "bernoulli_apart": ("bernoulli", False),
    "diffullama": ("diffullama", False),
}
"""Name → (estimator, whether the choices of a question share their numbers)."""
LABELS = {
    OURS: "exact if short, else strata (ours)",
    "strata": "strata, common numbers",
    "strata_apart": "strata, own numbers",
    "bernoulli": "Bernoulli, common numbers",
    "bernoulli_apart": "Bernoulli, own numbers",
    "diffullama": "DiffuLLaMA's, own numbers (biased)",
}


class Asker:
    """A task's questions as the suite of Table 4 asks a run; each has numbers of its own."""

    def __init__(
        self,
        run: Loaded,
        task: str,
        items: Sequence[Choice],
        prompts: Prompts = "plain",
        longest_exact: int = 6,
        batch_tokens: int = 8192,
    ) -> None:
        self.run, self.longest_exact, self.batch_tokens = run, longest_exact, batch_tokens
        ours = Estimator(OURS, longest_exact=longest_exact)
        maker = RunContestant(run, ours, prompts=prompts)
        self.asks: list[Ask] = []
        self.place: list[tuple[int, int]] = []
        for number, item in enumerate(items):
            noise = stream_key(0, task, item.number) % (1 << 62)
            pairs = zip(item.contexts, item.continuations, strict=True)
            for choice, (context, continuation) in enumerate(pairs):
                windows = maker.asks(context, continuation, noise)
                self.asks += windows
                self.place += [(number, choice)] * len(windows)
        self.gold_N = np.array([item.gold for item in items])
        self.shape = len(items), max(len(item.continuations) for item in items)
        self.is_there_NC = np.zeros(self.shape, dtype=bool)
        self.is_drawn_NC = np.zeros(self.shape, dtype=bool)
        for ask, place in zip(self.asks, self.place, strict=True):
            self.is_there_NC[place] = True
            self.is_drawn_NC[place] |= not maker.is_exact(ask)

    def scorer(self, kind: Kind, draws: int, is_common: bool = True) -> ContinuationScorer:
        """The run with one way of estimating."""
        estimator = Estimator(kind, draws, self.longest_exact, is_common)
        return ContinuationScorer(self.run, estimator, batch_tokens=self.batch_tokens)

    def score(
        self, scorer: ContinuationScorer, seed: int = 0, wanted_NC: NDArray[np.bool_] | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(log-probability per token, passes) of every choice, or of the wanted ones."""
        numbers = [n for n, place in enumerate(self.place) if wanted_NC is None or wanted_NC[place]]
        found = dict(zip(numbers, scorer.score([self.asks[n] for n in numbers], seed=seed)))
        windows: dict[tuple[int, int], list[Score]] = {}
        for number, score in found.items():
            windows.setdefault(self.place[number], []).append(score)
        score_NC, passes_NC = np.full(self.shape, -np.inf), np.zeros(self.shape)
        for place, parts in windows.items():
            whole = add_up(parts)
            score_NC[place] = whole.log_probability / whole.num_tokens
            passes_NC[place] = whole.num_passes
        return score_NC, passes_NC


def score_again(
    asker: Asker, draws: Sequence[int], num_repeats: int, seed: int, advance: Callable[[int], None]
) -> dict[str, list[Repeats]]:
    """Of each way the repetitions for each number of draws."""
    repeats: dict[str, list[Repeats]] = {OURS: []}
    exact = asker.score(asker.scorer(OURS, 1), wanted_NC=~asker.is_drawn_NC)
    for way, (kind, is_common) in WAYS.items():
        repeats[way] = []
        for count in draws:
            scorer = asker.scorer(kind, count, is_common)
            all_scores = []
            for number in range(num_repeats):
                key = stream_key(seed, "choices", way, count, number)
                all_scores.append(asker.score(scorer, key))
                advance(count * int(asker.is_there_NC.sum()))
            scores, passes = (np.stack(part) for part in zip(*all_scores, strict=True))
            repeats[way].append(Repeats(scores, passes.mean(axis=0).sum(axis=1)))
            if way == "strata":  # ours differs where nothing needs to be drawn
                ours = np.where(asker.is_drawn_NC, scores, exact[0])
                cost_NC = np.where(asker.is_drawn_NC, passes.mean(axis=0), exact[1])
                repeats[OURS].append(Repeats(ours, cost_NC.sum(axis=1)))
    return repeats
