"""Split a trained model's loss by context count into an irreducible and a reducible part.

On a toy source every conditional of the data is known, so both terms of Prop. 3.1 are: the red
H(X^I | Z, I), in closed form for an order-1 chain and by forward-backward on drawn contexts
otherwise, and the blue E KL(p_data || p_theta), always on drawn contexts and from whole
distributions, never as a difference of two noisy cross-entropies.

B rows, L block length, N predictions, V symbols.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from bellmask.analyze.base import Analysis, StageOptions, describe_run
from bellmask.analyze.context import CONTEXT_LABEL
from bellmask.data.corpora import is_toy
from bellmask.data.toys import ExactDenoiser, ToySource, toy_source
from bellmask.diffusion.frameworks import Framework, Ordered
from bellmask.diffusion.laws import TruncatedGaussian
from bellmask.diffusion.objectives import Bell, Nelbo
from bellmask.diffusion.theory import context_weights
from bellmask.report.figures import COLORS, finish_axes, new_figure
from bellmask.storage.loading import Loaded
from bellmask.storage.runs import check_all_maskable, check_same_text, chosen_steps, open_runs
from bellmask.utils.distributed import to_float64
from bellmask.utils.errors import UserError, check_least
from bellmask.utils.progress import Progress
from bellmask.utils.rng import stream_key, uniform_rows
from bellmask.utils.stats import plus_minus
from bellmask.utils.table import Table


@dataclass(frozen=True, kw_only=True)
class DecomposeOptions(StageOptions):
    """Irreducible and reducible loss by context count, exactly: Prop. 3.1 and Finding 2 (Sec. 3.2).

    For runs on the same toy corpus (--data.train toy:sticky, toy:order2, toy:hidden,
    toy:local:0.5), whose conditionals are known: the entropy of the data (red) and the KL
    divergence of the model (blue) at each number of observed tokens, at every checkpoint; the red
    parts add up to H(X) in every framework. Also where base and bell spend their training weight,
    and what law an oracle that knows the blue part would choose.

    Examples:
    bellmask analyze decompose runs/toy-base runs/toy-bell runs/toy-arm

    bellmask analyze decompose runs/toy-base --checkpoints 100 300 1000 --rows 1024
    """

    rows: int = 256
    """New rows of the source, each evaluated at every context count."""


# The irreducible entropy by context count, the red part of Prop. 3.1
#
# H^n = H(X^I | Z_n, I) in nats per prediction, for n = 0 .. L - 1 context tokens. An ``order_L`` is
# a permutation of places 0 .. L - 1: the target of count n is ``order_L[n]``, its context the
# places before it in the order (ARM: 0, 1, 2, ...; sigma-ARM: any fixed one). None stands for MDM,
# where context and target are drawn at random; AoARM, which averages over all orders, has the same
# H^n. For each framework the H^n add up to H(X).

BATCH_ROWS = 64
"""Rows of a Monte Carlo batch."""


def entropy(p: Tensor) -> Tensor:
    """Nats, over the last axis."""
    return -torch.xlogy(p, p).sum(-1)


# Paper: Prop. 3.1, Eq. 5
def chain_entropy(source: ToySource) -> Tensor:
    """H^n of MDM (and AoARM) for a stationary order-1 chain, in closed form, float64 [L].

    Let h(d) = H(X^d | X^0). By the chain rule a symbol whose nearest observed neighbors are a to
    the left and b to the right has entropy h(a) + h(b) - h(a + b), or h(a) with a single one. Of
    all (target, context) with n observed, (L - a - b) C(L-1-a-b, n-2) have the neighbors (a, b),
    and C(L - a, n) only one at distance a to the left (as many to the right), out of L C(L-1, n).
    """
    length = source.length
    h = _entropy_at_distance(source)
    n, d = torch.arange(1, length)[:, None], torch.arange(1, length)
    pairs_D = 2 * (h.cumsum(0)[:-2]) - (d - 1) * h[1:-1]  # sum over a + b = d
    all_N1 = math.log(length) + _log_binomial(torch.tensor(length - 1), n)
    two = torch.exp(_log_binomial(length - 1 - d, n - 2) - all_N1) * (length - d)
    one = 2 * torch.exp(_log_binomial(length - d, n) - all_N1)
    return torch.cat([h[-1:], two @ pairs_D + one @ h[1:-1]])


# Paper: Prop. 3.1, Eq. 5
def ordered_chain_entropy(source: ToySource, order_L: Tensor) -> Tensor:
    """H^n of ARM or sigma-ARM for a stationary order-1 chain, exact, float64 [L]."""
    length, h = source.length, _entropy_at_distance(source).tolist()
    seen: list[int] = []
    found = []
    for place in order_L.tolist():
        at = bisect.bisect(seen, place)
        a = place - seen[at - 1] if at > 0 else length
        b = seen[at] - place if at < len(seen) else length
        found.append(h[a] + h[b] - h[min(a + b, length)])
        seen.insert(at, place)
    return torch.tensor(found, dtype=torch.float64)


# Paper: Eq. 14, Eq. 15, Eq. 16, Eq. 17
def row_entropy(
    source: ToySource, *, num_rows: int = 1 << 14, seed: int = 0
) -> tuple[float, float]:
    """(H(X) in nats, its standard error): exact where the source has an order, else Monte Carlo."""
    if source.order is not None:
        return source.entropy, 0.0
    rows = torch.arange(num_rows)
    u = uniform_rows(stream_key(seed, "entropy", "rows"), rows, source.num_uniforms)
    found = [-source.log_probability(source.draw(part)) for part in u.split(1024)]
    mean, error = _mean_and_error(torch.cat(found))
    return float(mean), float(error)


def _mean_and_error(values_B: Tensor) -> tuple[Tensor, Tensor]:
    return values_B.mean(0), values_B.std(0) / math.sqrt(len(values_B))


def _entropy_at_distance(source: ToySource) -> Tensor:
    """h(d) = H(X^d | X^0) for d = 0 .. L - 1, then h(L) = H(X): a neighbor that is not there.

    Of a source that is a stationary order-1 chain.
    """
    state_VS = (source.emission_SV.T > 0).double()
    move_VV = state_VS @ source.transition_SS @ source.emission_SV
    start_V = source.initial_S @ source.emission_SV
    power, found = torch.eye(len(start_V), dtype=torch.float64), []
    for _ in range(source.length):
        found.append(start_V @ entropy(power))
        power = power @ move_VV
    return torch.stack([*found, entropy(start_V)])


def _log_binomial(m: Tensor, k: Tensor) -> Tensor:
    """Log C(m, k), -inf where it is 0."""
    is_zero = (k < 0) | (k > m)
    m, k = m.double().clamp(min=0), k.double().clamp(min=0)
    log_c = torch.lgamma(m + 1) - torch.lgamma(k + 1) - torch.lgamma((m - k).clamp(min=0) + 1)
    return torch.where(is_zero, -math.inf, log_c)


# Where a time law spends its rows, when the reducible loss at each context count is known exactly
#
# A row with N_c tokens shown has L - N_c targets, each with ``blue`` nats left to learn (Prop.
# 3.1): it holds (L - N_c) blue(N_c). The base draws all context counts alike, the bell those in the
# middle. The oracle, which knows blue, draws rows in proportion to what they hold.

SPENT_BELOW = 0.05
"""Weight counts as wasted where less than this fraction of the loss can still be learned."""

LAWS = {"base": Nelbo(time_floor=0.0), "bell": Bell(TruncatedGaussian())}


# Paper: Finding 2
def spend(red_L: Tensor, blue_L: Tensor) -> dict[str, Any]:
    """Reducible loss seen by base and bell per unit of weight, and by all three per row drawn.

    Weights on N_c = 0 .. L-1 sum to one; shares of rows drawn there lack those at N_c = L. A
    uniform time makes all L + 1 counts alike; the bell's weight is rows times targets.
    """
    length = len(red_L)
    targets_L = length - torch.arange(length, dtype=torch.float64)
    held_L, rate_L = targets_L * blue_L, targets_L / length
    omega = {name: context_weights(objective, length) for name, objective in LAWS.items()}
    draws = {
        "base": torch.full((length,), 1 / (length + 1), dtype=torch.float64),
        "bell": omega["bell"] / targets_L,
        "oracle": held_L.clamp(min=0) / held_L.clamp(min=0).sum(),
    }
    found: dict[str, Any] = {"most_per_row": float(held_L.max())}
    for name, draw_L in draws.items():
        total = float(draw_L.sum())
        mean = float((draw_L * rate_L).sum()) / total
        found[name] = {
            "reducible_per_row": float((draw_L * held_L).sum()),
            "mask_rate_mean": mean,
            "mask_rate_sd": (float((draw_L * (rate_L - mean) ** 2).sum()) / total) ** 0.5,
            "draws": draw_L.tolist(),
        }
    is_spent_L = blue_L < SPENT_BELOW * (red_L + blue_L)
    for name, omega_L in omega.items():
        weight_L = omega_L / omega_L.sum()
        red, blue = float((weight_L * red_L).sum()), float((weight_L * blue_L).sum())
        found[name] |= {
            "irreducible": red,
            "reducible": blue,
            "reducible_share": blue / (red + blue),
            "spent_on_nothing": float((weight_L * is_spent_L).sum()),
            "weights": weight_L.tolist(),
        }
    return found


# Measurement: both terms at every checkpoint of every run


# Paper: Prop. 3.1, Eq. 5
@torch.no_grad()
def split_losses(
    run: Loaded, source: ToySource, x_BL: Tensor, u_BL: Tensor
) -> tuple[Tensor, Tensor]:
    """(red, blue): entropy of the data and KL(data || model) of each row at each context count.

    Means over the predictions at that count, float64 [B, L] each. All counts come from one pass for
    causal frameworks, else from L.
    """
    batch, length = x_BL.shape
    exact, mask_id = ExactDenoiser(source, run.framework.is_causal), source.num_tokens
    if isinstance(run.framework, Ordered):
        problems = [run.framework.every_context(x_BL, u_BL, mask_id=mask_id)]
    else:
        counts = torch.arange(length)[:, None].expand(-1, batch)
        problems = [run.framework.given(x_BL, n_B, u_BL, mask_id=mask_id) for n_B in counts]
    number, red, blue = torch.zeros(3, batch * length, dtype=torch.float64)
    for problem in problems:
        p_NV = problem.logits(exact, torch.device("cpu")).exp()
        log_q_NV = to_float64(problem.logits(run.model, run.device)).log_softmax(-1).cpu()
        kl_N = (torch.xlogy(p_NV, p_NV) - p_NV * log_q_NV).sum(-1)
        place_N = problem.rows_N // length * length + problem.context_N
        number.index_add_(0, place_N, torch.ones_like(kl_N))
        red.index_add_(0, place_N, entropy(p_NV))
        blue.index_add_(0, place_N, kl_N)
    return (red / number).view(batch, length), (blue / number).view(batch, length)


# Paper: Eq. 14, Eq. 15, Eq. 16, Eq. 17
def exact_red(source: ToySource, framework: Framework) -> Tensor | None:
    """The red curve in closed form, where the source is a stationary order-1 chain."""
    if source.order != 1:
        return None
    if isinstance(framework, Ordered) and framework.rank_L is not None:
        return ordered_chain_entropy(source, framework.rank_L.argsort())
    return chain_entropy(source)


def _stage(
    run: Loaded, source: ToySource, options: DecomposeOptions, progress: Progress
) -> dict[str, Any]:
    """Red and blue at one checkpoint, with errors over rows."""
    parts = []
    for rows in torch.arange(options.rows).split(BATCH_ROWS):
        u_row = uniform_rows(stream_key(options.seed, "decompose rows"), rows, source.num_uniforms)
        u_BL = uniform_rows(stream_key(options.seed, "decompose contexts"), rows, source.length)
        parts.append(split_losses(run, source, source.draw(u_row), u_BL))
        progress.advance(len(rows))
    stage: dict[str, Any] = {"step": run.step}
    for name, values in zip(("red", "blue"), zip(*parts)):
        value_BL = torch.cat(values)
        (mean_L, error_L), (total, error) = map(_mean_and_error, (value_BL, value_BL.sum(1)))
        stage |= {name: mean_L.tolist(), f"{name}_se": error_L.tolist()}
        stage |= {f"{name}_sum": float(total), f"{name}_sum_se": float(error)}
    known = exact_red(source, run.framework)
    if known is not None:
        stage |= {"red": known.tolist(), "red_se": [0.0] * len(known)}
        stage |= {"red_sum": float(known.sum()), "red_sum_se": 0.0}
    if not run.framework.is_causal:
        red_L, blue_L = (torch.tensor(stage[n], dtype=torch.float64) for n in ("red", "blue"))
        stage["spend"] = spend(red_L, blue_L)
    return stage


def _measure(options: DecomposeOptions, progress: Progress) -> dict[str, Any]:
    check_least(options, rows=2)
    runs = open_runs(options.runs)
    check_all_maskable(runs, "decompose")
    for run in runs:
        if not is_toy(run.config.data.train):
            raise UserError(f"{run.folder} was not trained on a toy: --data.train toy:sticky")
    check_same_text(runs)
    source = toy_source(runs[0].config.data)
    steps = {run.name: chosen_steps(run, options.checkpoints) for run in runs}
    progress.start(sum(map(len, steps.values())) * options.rows)
    found = []
    for run in runs:
        stages = []
        for step in steps[run.name]:
            loaded = run.load(step, options.device)
            stages.append(_stage(loaded, source, options, progress))
        found.append(describe_run(run, loaded.framework, stages))
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


# Tables


def _tables(numbers: dict[str, Any]) -> list[Table]:
    return [_sums(numbers), *map(_by_count, numbers["runs"]), *_spending(numbers)]


def _sums(numbers: dict[str, Any]) -> Table:
    rows = []
    for run in numbers["runs"]:
        last = run["stages"][-1]
        sums = [plus_minus(last[f"{p}_sum"], last[f"{p}_sum_se"], 4) for p in ("red", "blue")]
        rows.append([f"{run['name']}, step {last['step']}", *sums])
    error = numbers["row_entropy_se"]
    title = f"{numbers['source']}: sums over context counts, nats per row; "
    title += f"H(X) = {numbers['row_entropy']:.4f}" + (f" ± {error:.4f}" if error else " exactly")
    return Table(title, ["run", "irreducible (red)", "reducible (blue)"], rows)


def _by_count(run: dict[str, Any]) -> Table:
    """Both parts at some of the context counts."""
    stages, length = run["stages"], len(run["stages"][-1]["red"])
    shown = {0, 1, length // 8, length // 4, length // 2, 3 * length // 4, length - 1}
    rows = []
    for n in sorted(shown & set(range(length))):
        red = plus_minus(stages[-1]["red"][n], stages[-1]["red_se"][n] or None, 4)
        blue = [plus_minus(stage["blue"][n], stage["blue_se"][n], 4) for stage in stages]
        rows.append([str(n), red, *blue])
    columns = ["observed tokens", "red", *(f"blue, step {stage['step']}" for stage in stages)]
    return Table(f"{run['name']}: nats per prediction (Prop. 3.1)", columns, rows)


def _spending(numbers: dict[str, Any]) -> list[Table]:
    """Reducible loss seen by base and bell per unit of training weight, and per row drawn."""
    by_weight, by_row = [], []
    every = [(run, stage) for run in numbers["runs"] for stage in run["stages"]]
    for run, stage in every:
        if "spend" not in stage:
            continue
        label, spent = f"{run['name']}, step {stage['step']}", stage["spend"]
        laws, oracle = [spent[law] for law in LAWS], spent["oracle"]
        met = [f"{law['reducible']:.4f} ({law['reducible_share']:.0%})" for law in laws]
        by_weight.append([label, *met, *(f"{law['spent_on_nothing']:.0%}" for law in laws)])
        held = [law["reducible_per_row"] for law in (*laws, oracle)]
        rate = plus_minus(oracle["mask_rate_mean"], oracle["mask_rate_sd"])
        by_row.append([label, *(f"{nats:.3f}" for nats in (*held, spent["most_per_row"])), rate])
    if not by_row:
        return []
    columns = ["model", "base, nats", "bell, nats", "base, wasted weight", "bell, wasted weight"]
    title = "reducible nats per unit of training weight (share of the loss); weight on contexts "
    title += f"where less than {SPENT_BELOW:.0%} can be learned"
    rows = ["model", "base", "bell", "oracle", "maximum per row", "oracle's mask rate"]
    per_row = "reducible nats per drawn row (oracle: rows drawn in proportion to them)"
    return [Table(title, columns, by_weight), Table(per_row, rows, by_row)]


# Figure


def decompose_figure(numbers: Mapping[str, Any]) -> Figure:
    """Irreducible loss by framework, what is left to learn by run, draws of base, bell, oracle."""
    masked = [run for run in numbers["runs"] if "spend" in run["stages"][-1]]
    count = 3 if masked else 2
    figure, panels = new_figure(4.6 * count, 4.2, count)
    red, blue, *draws = panels
    kinds: dict[str, Any] = {}
    for run, color in zip(numbers["runs"], itertools.cycle(COLORS)):
        # AoARM draws contexts as MDM does
        kind = "MDM, AoARM" if run["framework"] in ("mdm", "aoarm") else run["name"]
        kinds.setdefault(kind, run["stages"][-1]["red"])
        for stage, style in _ends(run):
            label = f"{run['name']}, step {stage['step']}"
            blue.plot(stage["blue"], style, color=color, label=label)
    for (kind, values), color in zip(kinds.items(), itertools.cycle(COLORS)):
        red.plot(values, color=color, label=kind)
    for axes in draws:  # of the first masked run
        run = masked[0]
        for law, color in zip(LAWS, COLORS):
            axes.plot(run["stages"][-1]["spend"][law]["draws"], color=color, label=law)
        for stage, style in _ends(run):
            label = f"oracle of {run['name']}, step {stage['step']}"
            axes.plot(stage["spend"]["oracle"]["draws"], style, color="0.2", label=label)
        axes.set_ylim(bottom=0)
        title = "rows drawn at each context count"
        finish_axes(axes, CONTEXT_LABEL, "share of rows", title, legend=2)
    how = "closed form" if numbers["is_closed_form"] else "forward-backward"
    title, y = f"irreducible: entropy of the data ({how})", "nats per prediction"
    finish_axes(red, CONTEXT_LABEL, y, title, legend=2)
    blue.set_yscale("log")
    finish_axes(blue, CONTEXT_LABEL, y, "reducible: KL(data || model)", legend=2)
    title = f"{numbers['source']}: rows of {numbers['block_length']}"
    figure.suptitle(f"{title}, {numbers['num_symbols']} symbols", fontsize=11)
    return figure


def _ends(run: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str]]:
    """The last checkpoint, and the first one dotted, where it is another."""
    stages = run["stages"]
    return [(stages[0], ":"), (stages[-1], "-")][len(stages) == 1 :]


# Paper: Prop. 3.1, Eq. 5
DECOMPOSE = Analysis("decompose", DecomposeOptions, _measure, _tables, decompose_figure, "rows")
