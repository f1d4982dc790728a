"""What makes two runs say the same: part of the key under which their answers are kept."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bellmask.model.transformer import hash_weights
from bellmask.run import Run


def run_marks(run: Run) -> list[Any]:
    """All that decides what a run writes after given tokens, and how a causal LM writes turns."""
    config = run.config.resolved()
    network = [asdict(config.model), None if run.backbone is None else asdict(run.backbone)]
    order = [asdict(config.framework), asdict(config.schedule)]
    weights = [run.tokenizer.fingerprint, hash_weights(run.model), config.train.precision]
    return [weights, network, order]
