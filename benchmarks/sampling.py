"""Tokens per second and network calls of every sampling rule, against a plain loop.

usage: python benchmarks/sampling.py [--rounds N] [--sizes tiny small paper] [--samples N]

The plain loop is the reverse process as written down: the same network at every one of the 128
steps, logits of every position turned into float64 probabilities, one draw for each position.
All take turns in one process, and medians are compared. Weights are random: neither speed nor the
number of calls depends on them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from subjects import PAPER, SMALL, TINY, Size

from bellmask.diffusion.frameworks import Framework, Mdm, arm
from bellmask.generate.fill import fill
from bellmask.generate.sampler import Generation
from bellmask.generate.settings import Sampling
from bellmask.model.transformer import Denoiser
from bellmask.utils.libraries import keep_freed_memory
from bellmask.utils.table import Table

STEPS = 128
PLAIN = "plain loop, 128 steps"
Work = Callable[[int], Generation]


@dataclass(frozen=True)
class Setting:
    """A network and the rows it fills."""

    model: Denoiser
    causal: Denoiser
    canvas_BL: torch.Tensor
    mask_id: int

    def ours(self, sampling: Sampling, framework: Framework | None = None) -> Work:
        """The package's sampler."""
        model = self.model if framework is None else self.causal

        def run(seed: int) -> Generation:
            return fill(
                model,
                self.canvas_BL,
                framework or Mdm(),
                sampling,
                mask_id=self.mask_id,
                seed=seed,
            )

        return run

    @torch.no_grad()
    def plain(self, seed: int) -> Generation:
        """Every position, every step, float64."""
        torch.manual_seed(seed)
        x = self.canvas_BL.clone()
        every_row = torch.arange(x.numel())
        for k in range(STEPS):
            t, s = 1 - k / STEPS, 1 - (k + 1) / STEPS
            p = self.model(x, every_row).double().softmax(-1).view(*x.shape, -1)
            weight = torch.cat([p * (t - s), torch.full((*x.shape, 1), s, dtype=p.dtype)], dim=-1)
            noise = -torch.log(torch.rand(weight.shape, dtype=torch.float64) + 1e-20)
            x = torch.where(x == self.mask_id, (weight / noise).argmax(-1), x)
        return Generation(x, STEPS, STEPS * len(x))


def make_setting(size: Size, samples: int) -> Setting:
    """128 tokens to fill behind 8 given ones, with random weights."""
    torch.manual_seed(0)
    models = [Denoiser(size.model, size.vocabulary, is_causal=causal) for causal in (False, True)]
    for model in models:
        torch.nn.init.normal_(model.eval().head.weight, std=0.5)
    canvas = torch.full((samples, 136), size.vocabulary)
    canvas[:, :8] = torch.arange(8)
    return Setting(models[0], models[1], canvas, size.vocabulary)


def subjects(setting: Setting) -> dict[str, Work]:
    """What is compared, by name."""
    blocks = {"rule": "most_confident", "steps": STEPS, "block_length": 32}
    half = {"rule": "most_confident", "steps": STEPS // 2, "block_length": 32}
    table = {
        "ancestral": Sampling(steps=STEPS),
        "first_hitting": Sampling(rule="first_hitting"),
        "random": Sampling(rule="random", steps=STEPS),
        "most_confident": Sampling(rule="most_confident", steps=STEPS),
        "margin": Sampling(rule="margin", steps=STEPS),
        "entropy": Sampling(rule="entropy", steps=STEPS),
        "ancestral, remask 0.02": Sampling(steps=STEPS, remask=0.02),
        "ancestral, guidance 1": Sampling(steps=STEPS, guidance=1.0),
        "most_confident, blocks of 32": Sampling(**blocks),
        "most_confident, blocks of 32, cache": Sampling(**blocks, cache="prefix"),
        "most_confident, blocks of 32, cache, 2 a step": Sampling(**half, cache="prefix"),
    }
    made: dict[str, Work] = {PLAIN: setting.plain}
    made |= {name: setting.ours(sampling) for name, sampling in table.items()}
    made["ARM, token by token, cache"] = setting.ours(Sampling(), arm(setting.canvas_BL.shape[1]))
    return made


def measure(size: Size, samples: int, rounds: int) -> list[list[str]]:
    """A row for each subject: milliseconds, tokens per second, calls, ratio to the plain loop."""
    setting = make_setting(size, samples)
    seconds: dict[str, list[float]] = {}
    nfe: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name, work in subjects(setting).items():
            started = time.perf_counter()
            made = work(number)
            if number:  # the first round warms up
                seconds.setdefault(name, []).append(time.perf_counter() - started)
                nfe.setdefault(name, []).append(made.nfe)
    tokens = 128 * samples
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return [
        [
            name,
            f"{1000 * value:.0f}",
            f"{tokens / value:.0f}",
            f"{statistics.mean(nfe[name]):.1f}",
            f"{middle[PLAIN] / value:.2f}x",
        ]
        for name, value in middle.items()
    ]


def main() -> None:
    """Measure and print."""
    sizes = {size.name: size for size in (TINY, SMALL, PAPER)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--sizes", nargs="+", choices=list(sizes), default=["tiny", "small"])
    given = parser.parse_args()
    keep_freed_memory()
    columns = ["rule", "ms", "tokens/s", "calls per sample", "tokens/s over plain"]
    for name in given.sizes:
        rows = measure(sizes[name], given.samples, given.rounds)
        title = f"{name}: {given.samples} samples of 128 tokens, {torch.get_num_threads()} threads"
        Table(title, columns, rows).print()


if __name__ == "__main__":
    main()
