"""A trained model's loss, split by context count into what no model can avoid and what is left.

On a toy source every conditional of the data is known, so both terms of Prop. 3.1 are: the red
H(X^I | Z, I), in closed form for an order-1 chain and by forward-backward on drawn contexts
otherwise, and the blue E KL(p_data || p_theta), always on drawn contexts and from whole
distributions, never as a difference of two noisy cross-entropies.

B rows, L block length, N predictions, V symbols.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from bellmask.analyze.analysis import Analysis, OnProgress, Table
from bellmask.analyze.budget import SPENT_BELOW, spend
from bellmask.analyze.entropy import (
    chain_entropy,
    entropy,
    ordered_chain_entropy,
    row_entropy,
)
from bellmask.analyze.runs import (
    NamedRun,
    check_all_maskable,
    check_same_text,
    chosen_steps,
    open_runs,
)
from bellmask.data.corpora import is_toy
from bellmask.data.toys import ExactDenoiser, ToySource, toy_source
from bellmask.diffusion.frameworks import Framework, Ordered, Problem
from bellmask.report.decompose_plots import decompose_figure
from bellmask.storage.loading import Loaded
from bellmask.utils.errors import UserError
from bellmask.utils.rng import stream_key, uniform_rows

BATCH_ROWS = 64


@dataclass(frozen=True)
class DecomposeOptions:
    """Irreducible and reducible loss by context count, exactly: Prop. 3.1 and Finding 2 (Sec. 3.2).

    For runs on a toy corpus (--data.train toy:sticky, toy:order2, toy:hidden, toy:local:0.5), whose
    conditionals are known: the red entropy of the data and the blue KL divergence of the model at
    each number of observed tokens, at every checkpoint; the red parts add up to H(X) in every
    framework. Also where base and bell spend their training weight, and what law an oracle that
    knows the blue part would choose.

    Examples:
    bellmask analyze decompose runs/toy-base runs/toy-bell runs/toy-arm

    bellmask analyze decompose runs/toy-base --checkpoints 100 300 1000 --rows 1024
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Run folders on the same toy corpus."""
    checkpoints: tuple[int, ...] = ()
    """Steps to look at; default: every checkpoint that each run has kept."""
    rows: int = 256
    """Fresh rows of the source, each asked at every context count."""
    seed: int = 1234
    """Decides rows and contexts, the same for all runs."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""
    out: str | None = None
    """Folder for the results; default RUN/analysis for one run, else runs/analysis/decompose."""


def split_losses(
    run: Loaded, source: ToySource, x_BL: Tensor, u_BL: Tensor
) -> tuple[Tensor, Tensor]:
    """(red, blue) of each row at each context count, float64 [B, L]."""
    framework, mask_id = run.framework, run.tokenizer.mask_id
    exact = ExactDenoiser(source, is_causal=framework.is_causal)
    red_BL, blue_BL = (torch.zeros(x_BL.shape, dtype=torch.float64) for _ in range(2))
    for problem in _problems(framework, x_BL, u_BL, mask_id):
        red_N, blue_N = _split(problem, exact, run)
        owner_N = problem.rows_N // x_BL.shape[1]
        place_N = owner_N * x_BL.shape[1] + problem.context_N
        share_N = 1 / place_N.bincount(minlength=x_BL.numel())[place_N].double()
        red_BL.view(-1).index_add_(0, place_N, red_N * share_N)
        blue_BL.view(-1).index_add_(0, place_N, blue_N * share_N)
    return red_BL, blue_BL


def _problems(framework: Framework, x_BL: Tensor, u_BL: Tensor, mask_id: int) -> list[Problem]:
    """Every context count of every row: in one pass for causal frameworks, else in L."""
    if isinstance(framework, Ordered):
        return [framework.every_context(x_BL, u_BL, mask_id=mask_id)]
    return [
        framework.given(x_BL, torch.full((len(x_BL),), context), u_BL, mask_id=mask_id)
        for context in range(x_BL.shape[1])
    ]


@torch.no_grad()
def _split(problem: Problem, exact: ExactDenoiser, run: Loaded) -> tuple[Tensor, Tensor]:
    """Entropy of the data and KL(data || model) of each prediction."""
    log_p_NV = problem.logits(exact, torch.device("cpu"))
    log_q_NV = problem.logits(run.model, run.device).double().log_softmax(-1).cpu()
    p_NV = log_p_NV.exp()
    kl_N = torch.where(p_NV > 0, p_NV * (log_p_NV - log_q_NV), 0.0).sum(-1)
    return entropy(p_NV), kl_N


def exact_red(source: ToySource, framework: Framework) -> Tensor | None:
    """The red curve in closed form, where the source is a stationary order-1 chain."""
    if source.order != 1:
        return None
    if isinstance(framework, Ordered) and framework.rank_L is not None:
        return ordered_chain_entropy(source, framework.rank_L.argsort())
    return chain_entropy(source)


def _stage(
    run: Loaded, source: ToySource, options: DecomposeOptions, on_rows: Any
) -> dict[str, Any]:
    """Red and blue at one checkpoint, with errors over rows."""
    reds, blues = [], []
    for rows in torch.arange(options.rows).split(BATCH_ROWS):
        x_BL = source.draw(
            uniform_rows(stream_key(options.seed, "decompose rows"), rows, source.num_uniforms)
        )
        u_BL = uniform_rows(stream_key(options.seed, "decompose contexts"), rows, source.length)
        red_BL, blue_BL = split_losses(run, source, x_BL, u_BL)
        reds.append(red_BL)
        blues.append(blue_BL)
        on_rows(len(rows))
    red_BL, blue_BL = torch.cat(reds), torch.cat(blues)
    known = exact_red(source, run.framework)
    scale = math.sqrt(options.rows)
    red_L = red_BL.mean(0) if known is None else known
    error_L = red_BL.std(0) / scale if known is None else torch.zeros(source.length)
    total = blue_BL.sum(1)
    stage: dict[str, Any] = {
        "step": run.step,
        "red": red_L.tolist(),
        "red_se": error_L.tolist(),
        "blue": blue_BL.mean(0).tolist(),
        "blue_se": (blue_BL.std(0) / scale).tolist(),
        "red_sum": float(red_L.sum()),
        "red_sum_se": 0.0 if known is not None else float(red_BL.sum(1).std()) / scale,
        "blue_sum": float(total.mean()),
        "blue_sum_se": float(total.std()) / scale,
    }
    if not run.framework.is_causal:
        stage["spend"] = spend(red_L, blue_BL.mean(0))
    return stage


def _measure(options: DecomposeOptions, on_progress: OnProgress) -> dict[str, Any]:
    if options.rows < 2:
        raise UserError(f"--rows must be at least 2, got {options.rows}")
    runs = open_runs(options.runs)
    check_all_maskable(runs, "decompose")
    for run in runs:
        if not is_toy(run.config.data.train):
            raise UserError(
                f"{run.folder} was trained on {run.config.data.train}, whose conditionals nobody "
                "knows; train on a toy: --data.train toy:sticky --data.tokenizer symbols:8"
            )
    check_same_text(runs)
    source = toy_source(runs[0].config.data)
    steps = {run.name: chosen_steps(run, options.checkpoints) for run in runs}
    total, done = sum(map(len, steps.values())) * options.rows, 0

    def on_rows(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    found = [_describe(run, source, steps[run.name], options, on_rows) for run in runs]
    entropy_of_rows, error = row_entropy(source, seed=options.seed)
    return {
        "source": runs[0].config.data.train,
        "block_length": source.length,
        "num_symbols": source.num_tokens,
        "rows": options.rows,
        "row_entropy": entropy_of_rows,
        "row_entropy_se": error,
        "is_closed_form": source.order == 1,
        "runs": found,
    }


def _describe(
    run: NamedRun, source: ToySource, steps: list[int], options: DecomposeOptions, on_rows: Any
) -> dict[str, Any]:
    stages, framework = [], None
    for step in steps:
        loaded = run.load(step, options.device)
        framework = loaded.framework
        stages.append(_stage(loaded, source, options, on_rows))
    assert framework is not None
    return {
        "name": run.name,
        "run": run.folder.name,
        "framework": run.config.framework.name,
        "is_exact": framework.is_exact,
        "stages": stages,
    }


def _shown_contexts(length: int) -> list[int]:
    wanted = [0, 1, length // 8, length // 4, length // 2, 3 * length // 4, length - 1]
    return sorted({context for context in wanted if 0 <= context < length})


def _tables(numbers: dict[str, Any]) -> list[Table]:
    return [_sums(numbers), *_by_context(numbers), *_spending(numbers)]


def _sums(numbers: dict[str, Any]) -> Table:
    rows = []
    for run in numbers["runs"]:
        last = run["stages"][-1]
        rows.append(
            [
                f"{run['name']}, step {last['step']}",
                f"{last['red_sum']:.4f} ± {last['red_sum_se']:.4f}",
                f"{last['blue_sum']:.4f} ± {last['blue_sum_se']:.4f}",
            ]
        )
    error = numbers["row_entropy_se"]
    title = f"{numbers['source']}: sums over context counts, nats per row; "
    title += f"H(X) = {numbers['row_entropy']:.4f}" + (f" ± {error:.4f}" if error else " exactly")
    return Table(title, ["run", "irreducible (red)", "reducible (blue)"], rows)


def _by_context(numbers: dict[str, Any]) -> list[Table]:
    tables = []
    for run in numbers["runs"]:
        stages = run["stages"]
        columns = ["observed tokens", "red", *(f"blue, step {stage['step']}" for stage in stages)]
        rows = []
        for context in _shown_contexts(numbers["block_length"]):
            cells = [f"{s['blue'][context]:.4f} ± {s['blue_se'][context]:.4f}" for s in stages]
            error = stages[-1]["red_se"][context]
            red = f"{stages[-1]['red'][context]:.4f}" + (f" ± {error:.4f}" if error else "")
            rows.append([str(context), red, *cells])
        tables.append(Table(f"{run['name']}: nats per prediction (Prop. 3.1)", columns, rows))
    return tables


def _spending(numbers: dict[str, Any]) -> list[Table]:
    """What base and bell meet per unit of training weight, and with the oracle per row drawn."""
    by_weight, by_row = [], []
    for run in numbers["runs"]:
        for stage in run["stages"]:
            if "spend" in stage:
                label = f"{run['name']}, step {stage['step']}"
                by_weight.append([label, *_per_weight(stage["spend"])])
                by_row.append([label, *_per_row(stage["spend"])])
    if not by_row:
        return []
    columns = ["model", "base meets", "bell meets", "base on nothing", "bell on nothing"]
    title = "reducible nats per unit of training weight (share of the loss); weight on contexts "
    title += f"where less than {SPENT_BELOW:.0%} can be learned"
    rows = ["model", "base", "bell", "oracle", "any row at most", "oracle's mask rate"]
    held = "reducible nats held by a row that the law draws (oracle: rows in proportion to what "
    return [
        Table(title, columns, by_weight),
        Table(held + "they hold, so that no context count is left out)", rows, by_row),
    ]


def _per_weight(spent: dict[str, Any]) -> list[str]:
    laws = (spent["base"], spent["bell"])
    return [
        *(f"{law['reducible']:.4f} ({law['reducible_share']:.0%})" for law in laws),
        *(f"{law['spent_on_nothing']:.0%}" for law in laws),
    ]


def _per_row(spent: dict[str, Any]) -> list[str]:
    oracle = spent["oracle"]
    return [
        *(f"{spent[law]['reducible_per_row']:.3f}" for law in ("base", "bell", "oracle")),
        f"{spent['most_per_row']:.3f}",
        f"{oracle['mask_rate_mean']:.2f} ± {oracle['mask_rate_sd']:.2f}",
    ]


DECOMPOSE = Analysis("decompose", DecomposeOptions, _measure, _tables, decompose_figure, "rows")
