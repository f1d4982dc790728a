"""``bellmask evaluate RUN``: the NLL per token on fixed contexts, for every framework.

MDM: a block of L_b tokens gets masks of exactly n tokens, n spread evenly over 1 .. L_b; the mean
cross-entropy of the masked rows, averaged over n, is the NELBO per token (paper Eq. L_MDM and the
shared form of Sec. 2.2 with N_c = L_b - n). There is no time floor and no weight that explodes.
Causal frameworks: one pass per order scores every N_c of a block. Masks and orders are a function
of the seed and the set of blocks alone: two models that are compared see the same ones. Standard
errors are over documents and masks. The same draws give the NLL by context count; beside it stand
the cross-entropies of the unigram and of each position's own distribution.

B blocks, R draws per block, L block length.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor

from bellmask.config.command_line import parse_command, take_option
from bellmask.data.blocks import Blocks
from bellmask.data.packing import Row
from bellmask.data.prepare import prepare
from bellmask.diffusion.frameworks import Framework, Mdm, Model, Ordered, Problem
from bellmask.evaluate.result import Likelihood
from bellmask.model.attention import AttentionRules
from bellmask.storage.build import build_rules
from bellmask.storage.loading import Loaded, LoadOptions
from bellmask.utils.distributed import World, autocast, pick_precision
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import write_text
from bellmask.utils.progress import NO_PROGRESS, Progress, progress_bar
from bellmask.utils.rng import shuffle, stream_key, uniform, uniform_rows
from bellmask.utils.stats import Floats, Labels, clustered_error, document_clusters
from bellmask.utils.table import Table

# Options


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(LoadOptions):
    """Measure a run: NELBO per token ± standard error (the exact NLL of an ARM or sigma-ARM),
    perplexity, bits per byte, NLL by context count, beside the cross-entropy of the unigram and of
    each position's own distribution.

    Examples:
    bellmask evaluate runs/bell

    bellmask evaluate runs/bell --draws 8 --blocks 0

    bellmask evaluate runs/bell --data other.txt --checkpoint best

    Suites, each with options of its own (add --help):
    bellmask evaluate runs/base runs/bell --suite zero-shot

    bellmask evaluate runs/base runs/bell --suite generative

    bellmask evaluate runs/base runs/bell --suite paper
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, an exported folder, or OWNER/NAME on the hub."""
    data: str | None = None
    """Text to measure on (path or glob) instead of the run's validation text."""
    blocks: int = 2048
    """Blocks to use, spread evenly over the text; 0 means all."""
    draws: int = 4
    """Masks per block; 2 or more cover all context counts of each block. For an AoARM orders; an
    exact NLL has none."""
    batch_size: int = 64
    """Blocks per forward pass."""
    seed: int = 1234
    """Decides masks and orders."""
    out: str | None = None
    """Folder for evaluation.json, context_curve.png/.svg and blocks.npz; default RUN/evaluation,
    or RUN/evaluation-NAME for --data NAME."""


# The NLL of a model on blocks.


def evaluate(
    model: Model,
    blocks: Blocks,
    *,
    mask_id: int,
    framework: Framework | None = None,
    draws: int = 1,
    seed: int = 1234,
    batch_size: int = 64,
    world: World | None = None,
    precision: torch.dtype = torch.float32,
    rules: AttentionRules | None = None,
    row_keys: Tensor | None = None,
    in_step: bool = False,
    progress: Progress = NO_PROGRESS,
) -> Likelihood:
    """Measure a model on all the given blocks: the NELBO, or for a fixed order the exact NLL.

    ``model(x, rows, targets, t_B=, mask=, reduce=False)`` returns each row's cross-entropy; causal
    ones get ``positions`` and ``target_positions`` instead of ``t_B``. Ranks share the work; each
    gets the whole result. Masks of block b are those
    of ``row_keys[b]``, by default b itself. ``draws`` counts masks, or random orders. ``in_step``:
    all ranks call the model equally often, as sharded weights need it.
    """
    scorer = Scorer(model, blocks, mask_id, framework, world, precision, rules)
    world, is_causal = scorer.world, scorer.framework.is_causal
    length_B = blocks.num_maskable(slice(None))
    level_B, count_BR = mask_counts(length_B, draws, seed, row_keys)
    if is_causal:
        draws = 1 if scorer.framework.is_exact else draws
        count_BR = (length_B[:, None] - torch.arange(blocks.block_length)).clamp(min=0)
        count_BR = count_BR.repeat(1, draws)
    ce_BR = torch.zeros(count_BR.shape, dtype=torch.float64)
    width = count_BR.shape[1] // draws
    for part, is_extra in _parts(len(blocks), batch_size, world, in_step=in_step):
        index = torch.arange(part.start, part.stop)
        keys = None if row_keys is None else row_keys[part]
        for draw in range(draws):
            key = stream_key(seed, "evaluation masks", draw)
            columns = slice(draw * width, (draw + 1) * width)
            if is_causal:
                found = scorer.by_context(index, key, keys)
            else:
                context_B = length_B[part] - count_BR[part, draw]
                found = scorer.mean(index, context_B, key, keys)[:, None]
            if not is_extra:
                ce_BR[part, columns] = found
        progress.advance(part.stop - part.start)
    ce_BR = world.all_reduce_sum(ce_BR.to(world.device)).cpu()
    return Likelihood(
        length_B.numpy(),
        level_B.numpy(),
        count_BR.numpy(),
        ce_BR.numpy(),
        np.asarray(blocks.documents),
        blocks.num_bytes,
        f"{blocks.fingerprint}/{seed}",
        is_causal,
        scorer.framework.is_exact,
    )


def mask_counts(
    length_B: Tensor, draws: int, seed: int, row_keys: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(levels [B], counts [B, R]): n = 1 + floor(L_b (r + u_b) / R).

    One draw: the u_b are one per stratum, in random order over blocks. Several: each block covers
    all of 1 .. L_b by itself.
    """
    num_blocks = len(length_B)
    keys = torch.arange(num_blocks) if row_keys is None else row_keys
    level = uniform(stream_key(seed, "evaluation levels"), keys)
    if draws == 1 and row_keys is None:
        level = (shuffle(stream_key(seed, "evaluation strata"), num_blocks) + level) / num_blocks
    share_BR = (torch.arange(draws) + level[:, None]) / draws
    counts = 1 + (length_B[:, None] * share_BR).floor().long()
    return level, torch.minimum(counts, length_B[:, None])


def _parts(
    total: int, size: int, world: World, *, in_step: bool = False
) -> Iterator[tuple[slice, bool]]:
    """This rank's batches of blocks: every world.size-th.

    ``in_step``: all ranks get as many, because a model that is cut needs all of them in every call;
    then the second value is True of a batch that only keeps others company.
    """
    starts = range(0, total, size)
    num_rounds = -(-len(starts) // world.size)
    for number in range(world.rank, num_rounds * world.size, world.size):
        is_extra = number >= len(starts)
        if in_step or not is_extra:
            start = starts[0 if is_extra else number]
            yield slice(start, min(start + size, total)), is_extra


class Scorer:
    """Cross-entropies of a model on blocks, in contexts that its framework draws."""

    def __init__(
        self,
        model: Model,
        blocks: Blocks,
        mask_id: int,
        framework: Framework | None = None,
        world: World | None = None,
        precision: torch.dtype = torch.float32,
        rules: AttentionRules | None = None,
    ) -> None:
        self.model, self.blocks, self.mask_id = model, blocks, mask_id
        self.world, self.precision = world or World(), precision
        self.rules = rules or AttentionRules()
        self.framework = framework or Mdm(noises_pads=self.rules.sees_pads)

    def mean(
        self, index_B: Tensor, context_B: Tensor, key: int, row_keys_B: Tensor | None = None
    ) -> Tensor:
        """Mean cross-entropy of each block's targets given exactly N_c tokens, float64 [B].

        nan where N_c tokens leave none to ask for; 0 for a block that has none at all.
        """
        rows = self._draw(index_B, key, row_keys_B)
        problem = self.framework.given(
            rows.x0_BL,
            context_B,
            rows.u_BL,
            mask_id=self.mask_id,
            is_real_BL=rows.is_maskable_BL,
        )
        ce_N, owner_N = self._score(problem, rows), problem.rows_N // rows.x0_BL.shape[1]
        total_B = torch.zeros(len(index_B), dtype=torch.float64).index_add_(0, owner_N, ce_N)
        is_empty_B = self.blocks.num_maskable(index_B) == 0
        return (total_B / owner_N.bincount(minlength=len(index_B))).where(~is_empty_B, 0.0)

    def by_context(self, index_B: Tensor, key: int, row_keys_B: Tensor | None = None) -> Tensor:
        """Cross-entropy at every N_c, float64 [B, L], of a causal framework; 0 beyond a row."""
        assert isinstance(self.framework, Ordered)
        rows = self._draw(index_B, key, row_keys_B)
        problem = self.framework.every_context(
            rows.x0_BL, rows.u_BL, mask_id=self.mask_id, is_real_BL=rows.is_maskable_BL
        )
        ce_BL = torch.zeros(rows.x0_BL.shape, dtype=torch.float64)
        ce_BL[problem.rows_N // ce_BL.shape[1], problem.context_N] = self._score(problem, rows)
        return ce_BL

    def _draw(self, index_B: Tensor, key: int, row_keys_B: Tensor | None) -> _Rows:
        x0_BL, length_B = self.blocks.rows(index_B), self.blocks.row_lengths(index_B)
        full = length = x0_BL.shape[1]
        if self.blocks.starts is not None and not self.framework.is_causal:
            length = max(1, int(length_B.max()))  # nobody sees what is beyond the longest row
        u_BL = uniform_rows(key, index_B if row_keys_B is None else row_keys_B, full)
        place = torch.arange(length)
        is_real_BL = place < length_B[:, None]
        is_given_BL = place < self.blocks.row_starts(index_B)[:, None]
        return _Rows(x0_BL[:, :length], u_BL[:, :length], is_real_BL, is_given_BL)

    @torch.no_grad()
    def _score(self, problem: Problem, rows: _Rows) -> Tensor:
        mask = None
        if not self.framework.is_causal:
            mask = self.rules.mask(rows.x0_BL, _unless_all(rows.is_real_BL))
        device = self.world.device
        with autocast(device, self.precision):
            ce_N = problem.ask(self.model, device, mask=mask, reduce=False)
        return ce_N.double().cpu()


@dataclass(frozen=True)
class _Rows:
    """Blocks to be scored, their noise, and what of them is padding or given."""

    x0_BL: Tensor
    u_BL: Tensor
    is_real_BL: Tensor
    is_given_BL: Tensor

    @property
    def is_maskable_BL(self) -> Tensor | None:
        return _unless_all(self.is_real_BL & ~self.is_given_BL)


def _unless_all(is_true_BL: Tensor) -> Tensor | None:
    """None in place of a mask that hides nothing."""
    return None if bool(is_true_BL.all()) else is_true_BL


# The same of a run, on blocks or on texts.


def evaluate_run(
    run: Loaded,
    blocks: Blocks,
    *,
    draws: int = 1,
    seed: int = 1234,
    batch_size: int = 64,
    row_keys: Tensor | None = None,
    progress: Progress = NO_PROGRESS,
) -> Likelihood:
    """The NLL (bound) on blocks; see :func:`evaluate`."""
    return evaluate(
        run.model,
        blocks.starting_at(run.model.first_maskable),
        mask_id=run.tokenizer.mask_id,
        framework=run.framework,
        draws=draws,
        seed=seed,
        batch_size=batch_size,
        world=World(device=run.device),
        precision=pick_precision(run.config.train.precision, run.device),
        rules=build_rules(run.config.data, run.tokenizer),
        row_keys=row_keys,
        progress=progress,
    ).checked(run.folder)


def scorer_of(run: Loaded, blocks: Blocks) -> Scorer:
    """Cross-entropies on blocks in contexts of given size, for curves by context count."""
    return Scorer(
        run.model,
        blocks.starting_at(run.model.first_maskable),
        run.tokenizer.mask_id,
        run.framework,
        World(device=run.device),
        pick_precision(run.config.train.precision, run.device),
        build_rules(run.config.data, run.tokenizer),
    )


@dataclass(frozen=True)
class TextNll:
    """The NLL of one text in nats: exact for a fixed order, else an upper bound on -log p."""

    nll: float
    standard_error: float
    """Of the estimate over masks or orders; more draws make it smaller, an exact one has none."""
    num_tokens: int

    @property
    def per_token(self) -> float:
        """Nats per token."""
        return self.nll / self.num_tokens


def text_nll(
    run: Loaded, texts: Sequence[str], *, draws: int = 32, seed: int = 1234
) -> list[TextNll]:
    """The NLL (bound) of each text; one longer than a block is cut into blocks, scored apart.

    A text's masks are its own: its value does not depend on the others.
    """
    if isinstance(texts, str):
        raise UserError("nll takes a list of texts; for a single one write run.nll([text])")
    if not texts:
        return []
    rows = [row for number, text in enumerate(texts) for row in _text_rows(run, number, text)]
    blocks = Blocks.from_rows(rows, num_bytes=sum(len(text.encode()) for text in texts))
    place = np.arange(len(rows)) - np.searchsorted(blocks.documents, blocks.documents)
    keys = torch.from_numpy(place)
    result = evaluate_run(run, blocks, draws=draws, seed=seed, row_keys=keys)
    total = result.length_B * result.block_nll
    variance = (result.length_B * result.draw_errors) ** 2
    return [
        TextNll(
            float(total[mine].sum()),
            float(np.sqrt(variance[mine].sum())),
            int(result.length_B[mine].sum()),
        )
        for number in range(len(texts))
        for mine in [blocks.documents == number]
    ]


def _text_rows(run: Loaded, number: int, text: str) -> list[Row]:
    first, tokenizer = run.model.first_maskable, run.tokenizer
    ids, length = tokenizer.encode(text), run.config.data.block_length - first
    if not len(ids):
        raise UserError(f"text number {number} is empty: it has no likelihood")
    begin = np.full(first, tokenizer.bos_id)  # given, so that every token of the text counts
    pieces = [ids[start : start + length] for start in range(0, len(ids), length)]
    padding = [np.full(length - len(piece), tokenizer.pad_id) for piece in pieces]
    return [
        Row(np.concatenate([begin, piece, pad]), first + len(piece), number)
        for piece, pad in zip(pieces, padding, strict=True)
    ]


# NLL by context count, and the cross-entropies that the low end should come down to.
REFERENCE_BLOCKS = 100_000
"""Training blocks that the unigram and position-wise counts use at most (the first ones)."""
POSITION_PRIOR = 100.0
"""Weight of the unigram, in counts, in each position's own distribution."""


@dataclass(frozen=True)
class ContextPoint:
    """Mean cross-entropy of masked tokens that see ``low`` to ``high`` others."""

    low: int
    high: int
    nll: float
    standard_error: float
    num_draws: int


def binned_curve(result: Likelihood, num_bins: int = 16) -> list[ContextPoint]:
    """The draws of an evaluation, grouped by context count: free, and averages to its NLL."""
    draws = result.ce_BR.shape[1]
    context = np.where(result.count_BR > 0, result.length_B[:, None] - result.count_BR, -1).ravel()
    share_B = result.length_B / (result.count_BR > 0).sum(1)  # tokens that a draw stands for
    ce, weight = result.ce_BR.ravel(), np.repeat(share_B, draws)
    owner = result.clusters if result.clusters is not None else np.arange(len(result.ce_BR))
    cluster = np.repeat(owner, draws)
    longest = int(result.length_B.max())
    edges = np.unique(np.linspace(0, longest, min(num_bins, longest) + 1).astype(int))
    points = []
    for low, stop in itertools.pairwise(edges.tolist()):
        inside = (context >= low) & (context < stop)
        if inside.sum() >= 2:
            nll, error = weighted_mean(ce[inside], weight[inside], cluster[inside])
            points.append(ContextPoint(low, stop - 1, nll, error, int(inside.sum())))
    return points


def exact_curve(
    scorer: Scorer, contexts: Sequence[int], *, seed: int = 1234, batch_size: int = 64
) -> list[ContextPoint]:
    """The loss at exactly these context counts, over the tokens of blocks that are long enough."""
    blocks = scorer.blocks
    length = blocks.num_maskable(slice(None))
    points = []
    for context in contexts:
        index = (length > context).nonzero().squeeze(1)
        if len(index) < 2:
            continue
        key = stream_key(seed, "context", context)
        values = [
            scorer.mean(part, torch.full_like(part, context), key)
            for part in index.split(batch_size)
        ]
        ce, weight = torch.cat(values).numpy(), length[index].double().numpy()
        cluster = document_clusters(np.asarray(blocks.documents)[index.numpy()])
        nll, error = weighted_mean(ce, weight, cluster)
        points.append(ContextPoint(context, context, nll, error, len(ce)))
    return points


def weighted_mean(value: Floats, weight: Floats, cluster: Labels | None) -> tuple[float, float]:
    """A token-weighted mean and its standard error (delta method, clustered)."""
    mean = float((weight * value).sum() / weight.sum())
    return mean, clustered_error(weight * (value - mean) / weight.mean(), cluster)


@dataclass(frozen=True)
class References:
    """Cross-entropies from training counts to validation tokens, nats per token."""

    unigram: float
    """Add-one smoothed training frequencies: what a model without context comes down to."""
    position_wise: float
    """A training distribution per position: the optimum at N_c = 0 where rows have structure."""


def unigram_cross_entropy(train: Blocks, valid: Blocks, num_tokens: int) -> float:
    """The first of the two references alone: one count per token, whatever the block length."""
    counts = np.ones(num_tokens)
    for tokens, is_real in _columns(train.slice(0, min(len(train), REFERENCE_BLOCKS))):
        counts += np.bincount(tokens[is_real], minlength=num_tokens)
    log_share = np.log(counts / counts.sum())
    parts = [log_share[tokens[is_real]] for tokens, is_real in _columns(valid)]
    return -float(sum(part.sum() for part in parts)) / sum(len(part) for part in parts)


def references(train: Blocks, valid: Blocks, num_tokens: int) -> References:
    """Both references, from the first training blocks (at most ``REFERENCE_BLOCKS``)."""
    train = train.slice(0, min(len(train), REFERENCE_BLOCKS))
    counts = np.zeros((train.block_length, num_tokens), dtype=np.int64)
    for position, (tokens, is_real) in enumerate(_columns(train)):
        counts[position] = np.bincount(tokens[is_real], minlength=num_tokens)
    unigram = counts.sum(0) + 1.0
    unigram /= unigram.sum()
    own = counts + POSITION_PRIOR * unigram
    own /= own.sum(1, keepdims=True)
    total, by_position, scored = 0.0, 0.0, 0
    for position, (tokens, is_real) in enumerate(_columns(valid)):
        real = tokens[is_real]
        total -= float(np.log(unigram[real]).sum())
        by_position -= float(np.log(own[position][real]).sum())
        scored += len(real)
    return References(total / scored, by_position / scored)


def _columns(blocks: Blocks) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """At each position the tokens of all rows, and whether each is maskable."""
    tokens, lengths = np.asarray(blocks.tokens), np.asarray(blocks.lengths)
    starts = blocks.row_starts(slice(None)).numpy()
    return [
        (tokens[:, position].astype(np.int64), (starts <= position) & (position < lengths))
        for position in range(blocks.block_length)
    ]


# Tables and the figure


def _write(report: dict[str, Any], folder: Path) -> None:
    from bellmask.report.figures import plot_context_curve  # loads matplotlib

    write_text(folder / "evaluation.json", json.dumps(report, indent=1) + "\n")
    plot_context_curve(
        report["context_curve"],
        {
            name: report[key]
            for name, key in (
                ("unigram", "unigram_cross_entropy"),
                ("position-wise", "position_wise_cross_entropy"),
            )
            if report[key] is not None
        },
        folder / "context_curve",
        title=f"{report['run']}, step {report['step']}, on {report['data']}: "
        f"{report['nll']:.4f} nats/token",
    )


def _show(report: dict[str, Any], folder: Path) -> None:
    bits = report["bits_per_byte"]
    what, bound = ("exact NLL", "") if report["is_exact"] else ("NELBO", " (bound)")
    Table(
        f"{report['run']}, step {report['step']}, on {report['data']}",
        ["quantity", "value"],
        [
            [f"{what}, nats per token", f"{report['nll']:.4f} ± {_number(report['nll_se'])}"],
            [f"perplexity{bound}", f"{report['perplexity']:.3f}"],
            [f"bits per byte{bound}", _number(bits)],
            ["unigram cross-entropy", _number(report["unigram_cross_entropy"])],
            ["position-wise cross-entropy", _number(report["position_wise_cross_entropy"])],
            ["blocks x draws", f"{report['num_blocks']} x {report['num_draws']}"],
        ],
    ).print()
    for title, points in (
        ("NLL by context count: bins of the draws above", report["context_curve"]),
        ("NLL at exact context counts: the first blocks, 512 at most", report["exact_contexts"]),
    ):
        rows = [
            [
                str(p["low"]) if p["low"] == p["high"] else f"{p['low']}-{p['high']}",
                f"{p['nll']:.4f}",
                f"{p['standard_error']:.4f}",
                str(p["num_draws"]),
            ]
            for p in points
        ]
        if rows:  # few blocks make no bins
            Table(title, ["observed tokens", "nats", "standard error", "draws"], rows).print()
    print(f"written: {folder}/evaluation.json, context_curve.png, context_curve.svg, blocks.npz")


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


# The command

SUITES = {
    "zero-shot": "bellmask.evaluate.zero_shot",
    "generative": "bellmask.evaluate.generative",
    "paper": "bellmask.evaluate.paper_suite",
}
"""Suites by name; the module's ``main(args)`` is the command, with options of its own."""


def _blocks(loaded: Loaded, options: EvaluateOptions) -> tuple[Blocks | None, Blocks]:
    if options.data is not None:
        data = replace(loaded.config.data, valid=options.data)
        valid = prepare(data, loaded.tokenizer, "valid")
        train = _training_blocks(loaded)
    else:
        train, valid = loaded.blocks()
        loaded.check_same_data(train)
    return train, valid.spread(options.blocks).starting_at(loaded.model.first_maskable)


def _training_blocks(loaded: Loaded) -> Blocks | None:
    """For the reference cross-entropies; None where the training text is gone."""
    try:
        train, _ = loaded.blocks()
        loaded.check_same_data(train)
    except UserError as error:
        print(f"note: no unigram reference without the training text: {error}", file=sys.stderr)
        return None
    return train


def _with_progress(loaded: Loaded, blocks: Blocks, options: EvaluateOptions) -> Any:
    with progress_bar("evaluating", "blocks", len(blocks)) as progress:
        return evaluate_run(
            loaded,
            blocks,
            draws=options.draws,
            seed=options.seed,
            batch_size=options.batch_size,
            progress=progress,
        )


def main(args: Sequence[str]) -> int:
    """Evaluate, print tables, write files; or hand over to a suite."""
    rest = list(args)
    if suite := take_option(rest, "--suite"):
        if len(suite) > 1:
            raise UserError(f"one --suite at a time, got {' and '.join(suite)}")
        return import_module(look_up("suite", suite[-1], SUITES)).main(rest)
    options = parse_command(EvaluateOptions, rest, command="evaluate")
    if options.draws < 1 or options.batch_size < 1 or options.blocks < 0:
        raise UserError("--draws and --batch-size must be at least 1, --blocks at least 0")

    loaded = options.load(options.run)
    train_blocks, blocks = _blocks(loaded, options)
    result = _with_progress(loaded, blocks, options)
    length = blocks.block_length
    ends = [n for n in dict.fromkeys([0, 2, 8, length - 4, length - 1]) if 0 <= n < length]
    exact = exact_curve(
        scorer_of(loaded, blocks.slice(0, min(512, len(blocks)))),
        ends,
        seed=options.seed,
        batch_size=options.batch_size,
    )
    known = None
    if train_blocks is not None:
        known = references(train_blocks, blocks, loaded.tokenizer.num_tokens)
    report: dict[str, Any] = {
        "run": loaded.folder.name,
        "step": loaded.step,
        "data": options.data or "the run's validation text",
        "data_fingerprint": blocks.fingerprint,
        "seed": options.seed,
        **result.summary(),
        "unigram_cross_entropy": known.unigram if known else None,
        "position_wise_cross_entropy": known.position_wise if known else None,
        "context_curve": [asdict(point) for point in binned_curve(result)],
        "exact_contexts": [asdict(point) for point in exact],
    }
    own = f"evaluation-{Path(options.data).stem}" if options.data else "evaluation"
    folder = Path(options.out) if options.out else loaded.folder / own
    folder.mkdir(parents=True, exist_ok=True)
    result.save(folder / "blocks.npz")
    _write(report, folder)
    _show(report, folder)
    return 0
