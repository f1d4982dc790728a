"""A trained model's loss, split by context count into what no model can avoid and what is left.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from bellmask.analyze.base import Analysis, StageOptions, finish_axes
from bellmask.analyze.context import CONTEXT_LABEL, describe_run
from bellmask.data.corpora import is_toy
from bellmask.data.toys import ExactDenoiser, ToySource, toy_source
from bellmask.diffusion.frameworks import Framework, Ordered, Problem
from bellmask.diffusion.laws import TruncatedGaussian
from bellmask.diffusion.objectives import Bell, Nelbo
from bellmask.diffusion.theory import context_weights
from bellmask.report.figures import COLOURS
from bellmask.storage.loading import Loaded
from bellmask.storage.runs import check_all_maskable, check_same_text, chosen_steps, open_runs
from bellmask.utils.errors import UserError
from bellmask.utils.progress import NO_PROGRESS, Progress
from bellmask.utils.rng import stream_key, uniform_rows
from bellmask.utils.table import Table


@dataclass(frozen=True, kw_only=True)
class DecomposeOptions(StageOptions):
    """Irreducible and reducible loss by context count, exactly: Prop. 3.1 and Finding 2 (Sec. 3.2).

    For runs on the same toy corpus (--data.train toy:sticky, toy:order2, toy:hidden,
    toy:local:0.5), whose conditionals are known: the red entropy of the data and the blue KL
    divergence of the model at each number of observed tokens, at every checkpoint; the red parts
    add up to H(X) in every framework. Also where base and bell spend their training weight, and
    what law an oracle that knows the blue part would choose.

    Examples:
    bellmask analyze decompose runs/toy-base runs/toy-bell runs/toy-arm

    bellmask analyze decompose runs/toy-base --checkpoints 100 300 1000 --rows 1024
    """

    rows: int = 256
    """Fresh rows of the source, each asked at every context count."""


# What no model can beat: the irreducible entropy by context count, the red part of Prop. 3.1
#
# H^n = H(X^I | Z_n, I) in nats per prediction, for n = 0 .. L - 1 context tokens. An ``order_L`` is
# a permutation of places 0 .. L - 1: the target of count n is ``order_L[n]``, its context the
# places before it in the order (ARM: 0, 1, 2, ...; sigma-ARM: any fixed one). None stands for MDM,
# where context and target are drawn at random; AoARM, which averages over all orders, has the same
# H^n. For each framework the H^n add up to H(X).

Places = tuple[int, ...]
MOST_SUMMANDS = 1 << 27
"""Enumeration adds V^L probabilities for each of 2^L sets of places: some seconds at this many."""
NUMBERS_AT_ONCE = 1 << 22
"""Entries of the largest array of a Monte Carlo batch."""


def entropy(p: Tensor) -> Tensor:
    """Nats, over the last axis."""
    return -torch.xlogy(p, p).sum(-1)


def chain_entropy(source: ToySource) -> Tensor:
    """H^n of MDM (and AoARM) for a stationary order-1 chain, in closed form, float64 [L].

    Let h(d) = H(X^d | X^0). By the chain rule a symbol whose nearest observed neighbours are a to
    the left and b to the right has entropy h(a) + h(b) - h(a + b), or h(a) with a single one. Of
    all (target, context) with n observed, (L - a - b) C(L-1-a-b, n-2) have the neighbours (a, b),
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


def ordered_chain_entropy(source: ToySource, order_L: Tensor) -> Tensor:
    """H^n of ARM or sigma-ARM for a stationary order-1 chain, exact, float64 [L]."""
    length, h = source.length, _entropy_at_distance(source).tolist()
    seen: list[int] = []
    found = []
    for place in _checked(order_L, length):
        at = bisect.bisect(seen, place)
        a = place - seen[at - 1] if at > 0 else length
        b = seen[at] - place if at < len(seen) else length
        found.append(h[a] + h[b] - h[min(a + b, length)])
        seen.insert(at, place)
    return torch.tensor(found, dtype=torch.float64)


def enumerated_entropy(source: ToySource, order_L: Tensor | None = None) -> Tensor:
    """H^n of any small source from the table of all its rows, float64 [L]; they add up to H(X).

    A target drawn at random joins its context to a random set of n + 1 places, so H^n of MDM is
    the mean entropy of n + 1 places less that of n.
    """
    length, kinds = source.length, source.num_tokens
    if (2 * kinds) ** length > MOST_SUMMANDS:
        raise UserError(
            f"{kinds} symbols at {length} places are too many to enumerate; use sampled_entropy"
        )
    rows = torch.cartesian_prod(*[torch.arange(kinds)] * length).view(-1, length)
    table = source.log_probability(rows).exp().view([kinds] * length)

    def entropy_of(places: Places) -> float:
        others = [place for place in range(length) if place not in places]
        return float(entropy((table.sum(others) if others else table).flatten()))

    if order_L is None:
        total = [_mean_entropy(length, count, entropy_of) for count in range(length + 1)]
    else:
        order = _checked(order_L, length)
        total = [entropy_of(tuple(order[:count])) for count in range(length + 1)]
    return torch.tensor(total, dtype=torch.float64).diff()


def sampled_entropy(
    source: ToySource,
    order_L: Tensor | None = None,
    *,
    num_rows: int = 256,
    seed: int = 0,
    progress: Progress = NO_PROGRESS,
) -> tuple[Tensor, Tensor]:
    """(H^n, its standard error over rows), float64 [L] each, of any source by Monte Carlo.

    Only rows and contexts are drawn; at each context the entropy of the exact conditional is
    taken, not -log p of a drawn symbol. For MDM every row goes through a random order of its own,
    and all masked places of a context count. Row r depends on the seed and r alone.
    """
    length = source.length
    order = None if order_L is None else torch.tensor(_checked(order_L, length))
    batch = max(1, NUMBERS_AT_ONCE // (length * length * len(source.initial_S)))
    found = []
    for rows in torch.arange(num_rows).split(batch):
        u = uniform_rows(stream_key(seed, "entropy", "orders"), rows, length)
        order_BL = u.argsort(1) if order is None else order.expand(len(rows), -1)
        found.append(_row_entropies(source, _rows(source, seed, rows), order_BL, order is None))
        progress.advance(len(rows))
    return _mean_and_error(torch.cat(found))


def row_entropy(
    source: ToySource, *, num_rows: int = 1 << 14, seed: int = 0
) -> tuple[float, float]:
    """(H(X) in nats, its standard error): exact where the source has an order, else Monte Carlo."""
    if source.order is not None:
        return source.entropy, 0.0
    batch = max(1, NUMBERS_AT_ONCE // (source.length * len(source.initial_S)))
    parts = torch.arange(num_rows).split(batch)
    found = [-source.log_probability(_rows(source, seed, rows)) for rows in parts]
    mean, error = _mean_and_error(torch.cat(found)[:, None])
    return float(mean), float(error)


def _rows(source: ToySource, seed: int, rows: Tensor) -> Tensor:
    """Rows of the source by number."""
    return source.draw(uniform_rows(stream_key(seed, "entropy", "rows"), rows, source.num_uniforms))


def _row_entropies(source: ToySource, x_BL: Tensor, order_BL: Tensor, is_mdm: bool) -> Tensor:
    """The conditional entropy for each row and context count, [B, L]: of the next place in the
    order, or the mean over all masked places.
    """
    batch, length = x_BL.shape
    rank_BL = order_BL.argsort(1)
    is_masked_BNL = rank_BL[:, None] >= torch.arange(length)[:, None]
    z_BNL = torch.where(is_masked_BNL, source.num_tokens, x_BL[:, None])
    p = source.log_conditionals(z_BNL.view(-1, length)).exp()
    h_BNL = entropy(p).view(batch, length, length)
    if is_mdm:
        return (h_BNL * is_masked_BNL).sum(2) / is_masked_BNL.sum(2)
    return h_BNL.gather(2, order_BL[..., None]).squeeze(2)


def _mean_and_error(values_BN: Tensor) -> tuple[Tensor, Tensor]:
    return values_BN.mean(0), values_BN.std(0) / math.sqrt(len(values_BN))


def _mean_entropy(length: int, count: int, entropy_of: Callable[[Places], float]) -> float:
    """Over all sets of so many places."""
    sets = list(itertools.combinations(range(length), count))
    return sum(map(entropy_of, sets)) / len(sets)


def _entropy_at_distance(source: ToySource) -> Tensor:
    """h(d) = H(X^d | X^0) for d = 0 .. L - 1, then h(L) = H(X): a neighbour that is not there."""
    start_V, move_VV = _stationary_chain(source)
    power, found = torch.eye(len(start_V), dtype=torch.float64), []
    for _ in range(source.length):
        found.append(start_V @ entropy(power))
        power = power @ move_VV
    return torch.stack([*found, entropy(start_V)])


def _stationary_chain(source: ToySource) -> tuple[Tensor, Tensor]:
    """(distribution of a symbol, transitions) of a source that is a stationary order-1 chain."""
    if source.order != 1:
        kind = "hidden" if source.order is None else f"of order {source.order}"
        raise UserError(
            f"the closed form is for chains of order 1, and this source is {kind}; "
            "use sampled_entropy or enumerated_entropy"
        )
    state_VS = (source.emission_SV.T > 0).double()
    start_V = source.initial_S @ source.emission_SV
    move_VV = state_VS @ source.transition_SS @ source.emission_SV
    if not torch.allclose(start_V @ move_VV, start_V, rtol=0, atol=1e-9):
        raise UserError(
            "the closed form is for stationary chains, and this one's first symbol is distributed "
            "unlike its second; start it from its stationary distribution, or use sampled_entropy"
        )
    return start_V, move_VV


def _log_binomial(m: Tensor, k: Tensor) -> Tensor:
    """Log C(m, k), -inf where it is 0."""
    is_zero = (k < 0) | (k > m)
    m, k = m.double().clamp(min=0), k.double().clamp(min=0)
    log_c = torch.lgamma(m + 1) - torch.lgamma(k + 1) - torch.lgamma((m - k).clamp(min=0) + 1)
    return torch.where(is_zero, -math.inf, log_c)


def _checked(order_L: Tensor, length: int) -> list[int]:
    order = order_L.tolist()
    if sorted(order) != list(range(length)):
        raise UserError(f"an order is a permutation of the places 0 to {length - 1}, not {order}")
    return order


# Where a time law spends its rows, when the reducible loss at each context count is known exactly
#
# A row with N_c tokens shown has L - N_c targets, each with ``blue`` nats left to learn (Prop.
# 3.1): it holds (L - N_c) blue(N_c). The base draws all context counts alike, the bell those in the
# middle. The oracle, which knows blue, draws rows in proportion to what they hold.

SPENT_BELOW = 0.05
"""Weight counts as spent on nothing where less than this share of the loss can still be learned."""


def _num_targets(length: int) -> Tensor:
    """L - N_c for N_c = 0 .. L-1."""
    return length - torch.arange(length, dtype=torch.float64)


def law_weights(length: int) -> dict[str, Tensor]:
    """Weights on N_c = 0 .. L-1 in the loss of base and default bell, each summing to one."""
    objectives = {"base": Nelbo(time_floor=0.0), "bell": Bell(TruncatedGaussian())}
    found = {name: context_weights(o, length) for name, o in objectives.items()}
    return {name: omega / omega.sum() for name, omega in found.items()}


def law_draws(length: int) -> dict[str, Tensor]:
    """Shares of rows that base and default bell draw at N_c = 0 .. L-1 (what is missing: N_c = L).

    A uniform time makes all L + 1 counts alike; an unweighted objective's weight is rows times
    targets.
    """
    bell = context_weights(Bell(TruncatedGaussian()), length) / _num_targets(length)
    return {"base": torch.full((length,), 1 / (length + 1), dtype=torch.float64), "bell": bell}


def oracle_draws(blue_L: Tensor) -> Tensor:
    """Rows in proportion to the reducible nats they hold."""
    held = blue_L.clamp(min=0) * _num_targets(len(blue_L))
    return held / held.sum()


def spend(red_L: Tensor, blue_L: Tensor) -> dict[str, Any]:
    """What base and bell meet per unit of weight, and what all three meet per row drawn."""
    length = len(red_L)
    is_spent_L = blue_L < SPENT_BELOW * (red_L + blue_L)
    found: dict[str, Any] = {}
    for name, weight_L in law_weights(length).items():
        red, blue = float((weight_L * red_L).sum()), float((weight_L * blue_L).sum())
        found[name] = {
            "irreducible": red,
            "reducible": blue,
            "reducible_share": blue / (red + blue),
            "spent_on_nothing": float((weight_L * is_spent_L).sum()),
            "weights": weight_L.tolist(),
        }
    found["most_per_row"] = float((_num_targets(length) * blue_L).max())
    rate_L = _num_targets(length) / length
    for name, draw_L in {**law_draws(length), "oracle": oracle_draws(blue_L)}.items():
        total = float(draw_L.sum())
        mean = float((draw_L * rate_L).sum()) / total
        found.setdefault(name, {}).update(
            reducible_per_row=float((draw_L * _num_targets(length) * blue_L).sum()),
            mask_rate_mean=mean,
            mask_rate_sd=(float((draw_L * (rate_L - mean) ** 2).sum()) / total) ** 0.5,
            draws=draw_L.tolist(),
        )
    return found


# Measurement: both terms at every checkpoint of every run

BATCH_ROWS = 64


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
    run: Loaded, source: ToySource, options: DecomposeOptions, progress: Progress
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
        progress.advance(len(rows))
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


def _measure(options: DecomposeOptions, progress: Progress) -> dict[str, Any]:
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


def _shown_contexts(length: int) -> list[int]:
    wanted = [0, 1, length // 8, length // 4, length // 2, 3 * length // 4, length - 1]
    return sorted({context for context in wanted if 0 <= context < length})


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


# Figure


def decompose_figure(numbers: Mapping[str, Any]) -> Figure:
    """Irreducible loss by framework, what is left to learn by run, draws of base, bell, oracle."""
    masked = [run for run in numbers["runs"] if "spend" in run["stages"][-1]]
    count = 3 if masked else 2
    figure = Figure(figsize=(4.6 * count, 4.2), layout="constrained")
    panels = figure.subplots(1, count)
    _draw_red(panels[0], numbers)
    _draw_blue(panels[1], numbers)
    if masked:
        _draw_draws(panels[2], masked[0])
    for axes in panels:
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    title = f"{numbers['source']}: rows of {numbers['block_length']}"
    figure.suptitle(f"{title}, {numbers['num_symbols']} symbols", fontsize=11)
    return figure


def _draw_red(axes: Axes, numbers: Mapping[str, Any]) -> None:
    """One curve per way of drawing contexts: AoARM's is MDM's."""
    drawn: dict[str, Any] = {}
    for run in numbers["runs"]:
        kind = "MDM, AoARM" if run["framework"] in ("mdm", "aoarm") else run["name"]
        drawn.setdefault(kind, run["stages"][-1]["red"])
    for (kind, red), colour in zip(drawn.items(), itertools.cycle(COLOURS)):
        axes.plot(range(len(red)), red, color=colour, label=kind)
    how = "closed form" if numbers["is_closed_form"] else "forward-backward"
    title = f"irreducible: entropy of the data ({how})"
    finish_axes(axes, CONTEXT_LABEL, "nats per prediction", title)


def _draw_blue(axes: Axes, numbers: Mapping[str, Any]) -> None:
    """First and last checkpoint of each run."""
    for run, colour in zip(numbers["runs"], itertools.cycle(COLOURS)):
        first, last = run["stages"][0], run["stages"][-1]
        contexts = range(len(last["blue"]))
        if first["step"] != last["step"]:
            axes.plot(
                contexts,
                first["blue"],
                ":",
                color=colour,
                linewidth=1,
                label=f"{run['name']}, step {first['step']}",
            )
        axes.plot(contexts, last["blue"], color=colour, label=f"{run['name']}, step {last['step']}")
    axes.set_yscale("log")
    finish_axes(axes, CONTEXT_LABEL, "nats per prediction", "reducible: KL(data || model)")


def _draw_draws(axes: Axes, run: Mapping[str, Any]) -> None:
    """Base and bell, and the oracle at the first and last checkpoint."""
    first, last = run["stages"][0], run["stages"][-1]
    contexts = range(len(last["blue"]))
    for law, colour in (("base", COLOURS[0]), ("bell", COLOURS[1])):
        axes.plot(contexts, last["spend"][law]["draws"], color=colour, label=law)
    for stage, style in ((first, ":"), (last, "-")) if first is not last else ((last, "-"),):
        label = f"oracle of {run['name']}, step {stage['step']}"
        axes.plot(contexts, stage["spend"]["oracle"]["draws"], style, color="0.2", label=label)
    axes.set_ylim(bottom=0)
    finish_axes(axes, CONTEXT_LABEL, "share of rows", "rows drawn at each context count")


DECOMPOSE = Analysis("decompose", DecomposeOptions, _measure, _tables, decompose_figure, "rows")
