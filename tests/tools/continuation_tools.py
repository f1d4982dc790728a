"""Runs with random weights, made in milliseconds, and their log-probabilities by plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from pretrained_tools import make_config, make_lm

from bellmask.config.config import RunConfig
from bellmask.data.tokenizers import ByteTokenizer
from bellmask.evaluate.scorer import Request
from bellmask.model.pretrained import PretrainedDenoiser
from bellmask.run import Run
from bellmask.storage.build import build_framework, build_model

EXACT = ["--train.precision", "float32"]


def random_run(config: RunConfig, kind: str = "dit", seed: int = 0) -> Run:
    """A byte-level run whose weights are so large that every visible token matters."""
    tokenizer = ByteTokenizer()
    count = tokenizer.num_tokens
    if kind == "dit":
        model: Any = build_model(config, count)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                center = 1.0 if name.endswith("norm.weight") else 0.0
                parameter.copy_(center + 0.5 * torch.randn(parameter.shape, generator=draw))
    else:
        config = replace(config, model=replace(config.model, backbone="causal_lm"))
        is_causal = config.framework.name == "arm"
        model = PretrainedDenoiser(
            make_lm(make_config(kind, count), seed=seed), count, is_causal=is_causal
        )
    device = torch.device("cpu")
    return Run(Path("nowhere"), config, 0, tokenizer, model.eval(), build_framework(config), device)


def with_data(run: Any, **options: Any) -> Any:
    """The same run under other options of its data."""
    return replace(run, config=replace(run.config, data=replace(run.config.data, **options)))


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def log_p(run: Run, request: Request, hidden: Sequence[int], t: float = 0.5) -> dict[int, float]:
    """Log-probability of each hidden token of the target, by one call with a single row."""
    row, first = torch.tensor([request.tokens]), len(request.given)
    rows = torch.tensor(sorted(hidden)) + first
    row[0, rows] = run.tokenizer.mask_id
    with torch.no_grad():
        logits = run.model(row, rows, t_B=torch.tensor([t])).double()
    found = logits.log_softmax(1)
    return {n: float(found[row, request.target[n]]) for row, n in enumerate(sorted(hidden))}


def surprise(logits_V: torch.Tensor, token: int) -> float:
    return float(torch.logsumexp(logits_V.double(), 0) - logits_V[token].double())


@torch.no_grad()
def token_nll(model: Any, ids: Sequence[int]) -> list[float]:
    """-log p of each token but the first, each from a forward pass over its own prefix alone."""
    return [
        surprise(model(torch.tensor([ids[:n]])).logits[0, -1], ids[n]) for n in range(1, len(ids))
    ]


def bound(run: Run, request: Request) -> float:
    """- sum over n of the mean over all masks of n tokens of their mean cross-entropy."""
    total = 0.0
    for count in range(1, len(request.target) + 1):
        hidden = list(combinations(range(len(request.target)), count))
        total += sum(sum(log_p(run, request, h).values()) / count for h in hidden) / len(hidden)
    return total
