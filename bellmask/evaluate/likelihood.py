"""``bellmask evaluate RUN``: the NLL per token on fixed contexts, for every framework.

MDM: a block of L_b tokens gets masks of exactly n tokens, n spread evenly over 1 .. L_b; the mean
cross-entropy of the masked rows, averaged over n, is the NELBO per token (paper Eq. L_MDM and the
shared form of Sec. 2.2 with N_c = L_b - n). There is no time floor and no weight that explodes.
Causal frameworks: one pass per order scores every N_c of a block. Masks and orders are a function
of the seed and the set of blocks alone: two models that are compared see the same ones. Standard
errors are over documents and masks. The same draws give the NLL by context count; it is shown with
the cross-entropies of the unigram and of each position's distribution.

B blocks, R draws per block, L block length.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from numpy.typing import NDArray
from torch import Tensor

from bellmask.config.command_line import parse_command, take_option
from bellmask.config.options import DataOptions
from bellmask.data.blocks import Blocks, Row
from bellmask.data.corpora import CORPORA
from bellmask.data.prepare import prepare
from bellmask.diffusion.frameworks import Framework, Mdm, Model, Ordered, Problem
from bellmask.diffusion.progress import RATES
from bellmask.evaluate.suite import on_all_ranks, write_results
from bellmask.model.transformer import AttentionRules
from bellmask.storage.build import build_rules
from bellmask.storage.loading import Loaded, LoadOptions
from bellmask.utils import stats
from bellmask.utils.console import announced, plural
from bellmask.utils.distributed import World, autocast
from bellmask.utils.errors import UserError, check_least, look_up
from bellmask.utils.files import read_arrays, replacing, without_nan
from bellmask.utils.progress import NO_PROGRESS, Progress, progress_bar
from bellmask.utils.rng import shuffle, stream_key, uniform, uniform_rows
from bellmask.utils.table import Table

logger = logging.getLogger(__name__)

# Options


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(LoadOptions):
    """Evaluate a run: NELBO per token ± standard error (exact NLL for an ARM or sigma-ARM),
    perplexity, bits per byte, NLL by context count; for reference, the cross-entropy of the unigram
    and of per-position token frequencies.

    Examples:
    bellmask evaluate runs/bell

    bellmask evaluate runs/bell --draws 8 --blocks 0

    bellmask evaluate runs/bell --data other.txt --checkpoint best

    bellmask evaluate runs/bell --split test

    Suites, each with its own options (add --help):

    bellmask evaluate runs/base runs/bell --suite zero-shot

    bellmask evaluate runs/base runs/bell --suite generative

    bellmask evaluate runs/base runs/bell --suite paper
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, an exported folder, or OWNER/NAME on the hub."""
    data: str | None = None
    """Text to evaluate on (path or glob) instead of the run's validation text."""
    split: Literal["valid", "test"] | None = None
    """Split of the run's corpus, or of a named one in --data; default: the run's validation split.
    Use test for final numbers only."""
    blocks: int = 2048
    """Blocks to use, spread evenly over the text; 0 means all."""
    draws: int = 4
    """Masks per block (orders for an AoARM; an exact NLL needs none); 2 or more cover the whole
    range of context counts in each block."""
    batch_size: int = 64
    """Blocks per forward pass."""
    seed: int = 1234
    """Seed of masks and orders."""
    out: str | None = None
    """Folder for evaluation.json, context_curve.png/.svg and blocks.npz; default RUN/evaluation,
    RUN/evaluation-NAME for --data NAME, RUN/evaluation-test for --split test."""


# Per-block results of an evaluation, and derived numbers.

MOST_NATS = 1e30
"""No cross-entropy of float32 logits comes near; larger ones have no finite variance."""


def perplexity_of(nll: float) -> float:
    """exp(nll); infinite if it overflows."""
    return math.exp(nll) if nll < 700 else math.inf if nll >= 700 else math.nan


@dataclass(frozen=True)
class Likelihood:
    """Per-block values of one evaluation; everything else is derived from them."""

    length_B: NDArray[np.int64]
    """Maskable tokens of each block."""
    level_B: stats.Floats
    """Where in [0, 1) each block's mask counts start: what the strata are strata of."""
    count_BR: NDArray[np.int64]
    """Masked tokens of each draw: L_b - N_c; 0 if a short block has no such draw."""
    ce_BR: stats.Floats
    """Mean cross-entropy of the draw's targets, nats."""
    document_B: NDArray[np.int64]
    num_bytes: float
    """Bytes of text that the tokens represent."""
    fingerprint: str = ""
    """Of the blocks and the seed: what must agree for two evaluations to be paired."""
    is_causal: bool = False
    """Every context count of a block was scored, once per order."""
    is_exact: bool = False
    """The NLL is exact; otherwise an upper bound."""

    @property
    def num_draws(self) -> int:
        """Masks per block; for causal ones orders, each of which starts with nothing shown."""
        if self.is_causal:
            longest = int(self.length_B.argmax())  # a row may have nothing to score
            return int((self.count_BR[longest] == self.length_B[longest]).sum())
        return self.count_BR.shape[1]

    @property
    def num_tokens(self) -> int:
        return int(self.length_B.sum())

    @property
    def block_nll(self) -> stats.Floats:
        """NLL (bound) per token of each block, nats: the mean over its draws."""
        is_drawn = self.count_BR > 0
        return (self.ce_BR * is_drawn).sum(axis=1) / is_drawn.sum(axis=1).clip(min=1)

    @property
    def nll(self) -> float:
        """NLL (bound) per token, nats: a token-weighted ratio, not a mean over blocks."""
        return float((self.length_B * self.block_nll).sum() / self.num_tokens)

    @property
    def is_finite(self) -> bool:
        """False for a model that diverged; its values cannot be used."""
        return bool((np.abs(self.ce_BR) < MOST_NATS).all())

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.nll)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text; nan where the bytes are not known."""
        nats = self.nll * self.num_tokens
        return nats / self.num_bytes / math.log(2) if self.num_bytes else math.nan

    @property
    def clusters(self) -> NDArray[np.int64] | None:
        """Document of each block, when documents span blocks and there are enough of them."""
        return stats.document_clusters(self.document_B)

    @property
    def standard_error(self) -> float:
        """Standard error of ``nll`` over documents and masks."""
        return self._error_of(self.block_nll)

    @property
    def draw_errors(self) -> stats.Floats:
        """Standard error of each block's value over masks or orders; nan for a single draw."""
        num_blocks, draws = len(self.ce_BR), self.num_draws
        if self.is_exact or draws == 1:
            return np.full(num_blocks, 0.0 if self.is_exact else np.nan)
        if self.is_causal:  # an order is a draw, its value the mean over slots
            value_BR = self.ce_BR.reshape(num_blocks, draws, -1).sum(2)
            value_BR = value_BR / self.length_B[:, None].clip(min=1)
            return value_BR.std(axis=1, ddof=1) / math.sqrt(draws)
        order = np.arange(draws, dtype=np.float64)
        return np.array([stats.collapsed_strata_error(ce_R, order) for ce_R in self.ce_BR])

    def difference(self, other: Likelihood) -> tuple[float, float]:
        """(this nll - the other's, its standard error), paired: same blocks and masks."""
        if not self.is_paired_with(other):
            raise ValueError("only evaluations on the same blocks and masks can be compared")
        stratified = other if self.is_causal else self
        return self.nll - other.nll, stratified._error_of(self.block_nll - other.block_nll)

    def is_paired_with(self, other: Likelihood) -> bool:
        """The same blocks, and for two that were masked the same masks."""
        if self.fingerprint != other.fingerprint:
            return False
        return self.is_causal or other.is_causal or np.array_equal(self.count_BR, other.count_BR)

    def _error_of(self, value_B: stats.Floats) -> float:
        """Delta method for the ratio, then strata of mask counts; causal ones have blocks only."""
        if len(value_B) < 2:
            return math.nan
        mean = (self.length_B * value_B).sum() / self.num_tokens
        residual_B = self.length_B * (value_B - mean) / self.length_B.mean()
        clusters = self.clusters
        if self.is_causal:
            return stats.clustered_error(residual_B, clusters)
        if clusters is None and self.num_draws > 1 and len(value_B) > 2 * stats.NEIGHBORS:
            clusters = np.arange(len(value_B))  # steadier than pairs; one draw varies too much
        return stats.collapsed_strata_error(residual_B, self.level_B, clusters)

    def summary(self) -> dict[str, Any]:
        """The reported numbers; None if not finite, which JSON cannot represent."""
        numbers = {
            "nll": self.nll,
            "nll_se": self.standard_error,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "num_blocks": len(self.length_B),
            "num_tokens": self.num_tokens,
            "num_draws": self.num_draws,
            "is_exact": self.is_exact,
        }
        return without_nan(numbers)

    def save(self, path: Path) -> None:
        """Write all arrays as .npz, atomically."""
        with replacing(path) as scratch, scratch.open("wb") as stream:
            np.savez_compressed(stream, **vars(self))

    @staticmethod
    def load(path: Path) -> Likelihood:
        """Read what ``save`` wrote; OSError or ValueError where that cannot be."""
        arrays = read_arrays(path)
        kinds = {"num_bytes": float, "fingerprint": str, "is_causal": bool, "is_exact": bool}
        try:
            values = {name: kind(arrays[name].item()) for name, kind in kinds.items()}
            found = Likelihood(**{**arrays, **values})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an evaluation: {error}") from None
        by_block = (found.length_B, found.document_B, found.level_B)
        by_draw = (found.count_BR, found.ce_BR)
        # i: integers, f: floats
        codes = "".join(array.dtype.kind for array in (*by_block, *by_draw))
        is_right = codes == "iifif" and found.ce_BR.ndim == 2 and found.ce_BR.size > 0
        is_right &= {array.shape for array in by_draw} == {found.ce_BR.shape}
        is_right &= {array.shape for array in by_block} == {found.ce_BR.shape[:1]}
        if not is_right or found.length_B.min() < 0 or found.length_B.sum() < 1:
            raise ValueError("its arrays do not fit together")
        return found


# The NLL of a model on blocks.


# Paper: Eq. 1, Lemma A.2, Eq. 8
def evaluate(
    model: Model,
    blocks: Blocks,
    *,
    draws: int = 1,
    seed: int = 1234,
    batch_size: int = 64,
    row_keys: Tensor | None = None,
    in_step: bool = False,
    progress: Progress = NO_PROGRESS,
    **settings: Any,
) -> Likelihood:
    """Measure a model on all the given blocks: the NELBO, or for a fixed order the exact NLL.

    ``model(x, rows, targets, t_B=, mask=, reduce=False)`` returns each row's cross-entropy; causal
    ones get ``positions`` and ``target_positions`` instead of ``t_B``. Ranks share the work; each
    gets the whole result. Masks of block b are those
    of ``row_keys[b]``, by default b itself. ``draws`` counts masks, or random orders. ``in_step``:
    all ranks call the model equally often, as sharded weights need it. ``settings`` (``mask_id``
    and more) are those of :class:`BlockScorer`.
    """
    scorer = BlockScorer(model, blocks, **settings)
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
    if world.size > 1:
        ce_BR = world.all_reduce_sum(ce_BR.to(world.device)).cpu()
    tensors = {"length_B": length_B, "level_B": level_B, "count_BR": count_BR, "ce_BR": ce_BR}
    values: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
    values |= {"document_B": np.asarray(blocks.documents), "num_bytes": blocks.num_bytes}
    values |= {"is_causal": is_causal, "is_exact": scorer.framework.is_exact}
    return Likelihood(fingerprint=f"{blocks.fingerprint}/{seed}", **values)


Network = Callable[..., Any]
"""Returns logits [B, L, V], or an object that has them."""
Rows = Tensor | Sequence[Tensor | Sequence[int]]


def any_network(network: Network, mask_id: int) -> Model:
    """A network as evaluation calls a model.

    The mask is no token: its logit, where there is one, does not count. Padded rows are given with
    an ``attention_mask``.
    """

    def losses(
        x_BL: Tensor, rows_N: Tensor, targets_N: Tensor, *, mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        more = {} if mask is None else {"attention_mask": mask[:, 0, 0].long()}
        found: Any = network(x_BL, **more)
        logits_NV = getattr(found, "logits", found).flatten(0, 1)[rows_N].float()
        if mask_id < logits_NV.shape[1]:
            logits_NV[:, mask_id] = -math.inf
        return F.cross_entropy(logits_NV, targets_N, reduction="none")

    return losses


def nelbo(
    network: Network,
    rows: Rows,
    *,
    mask_id: int,
    starts: Sequence[int] | None = None,
    draws: int = 1,
    seed: int = 1234,
    batch_size: int = 64,
    world: World | None = None,
) -> Likelihood:
    """The NELBO per token of any network, with its standard error.

    ``network(x)`` returns the logits [B, L, V] about the token at each position. ``rows`` are token
    ids [B, L], or rows of different lengths; of those, tokens before ``starts`` are given and never
    masked. Rows count as independent documents.
    """
    how: dict[str, Any] = {"draws": draws, "seed": seed, "batch_size": batch_size}
    with _scorer(network, rows, mask_id, starts, world) as scorer:
        how |= {"mask_id": mask_id, "world": scorer.world}
        return evaluate(scorer.model, scorer.blocks, **how)


def probe(
    network: Network, rows: Rows, *, mask_id: int, starts: Sequence[int] | None = None
) -> Tensor:
    """The input of :meth:`bellmask.ProgressLaw.update`, for any network.

    The arguments are those of :func:`nelbo`; the same 16 rows each time are enough.
    """
    with _scorer(network, rows, mask_id, starts, None) as scorer:
        return nll_by_rate(scorer)


@contextlib.contextmanager
def _scorer(
    network: Network, rows: Rows, mask_id: int, starts: Sequence[int] | None, world: World | None
) -> Iterator[BlockScorer]:
    """A scorer for any network and rows; the network is in evaluation mode inside."""
    arrays = [torch.as_tensor(row).cpu().numpy() for row in rows]
    if not arrays:
        raise UserError("at least one row is needed")
    if any((row == mask_id).any() for row in arrays):
        raise UserError(f"mask_id {mask_id} occurs in the rows; it must not be a token of the text")
    width = max(map(len, arrays))
    blocks = Blocks.from_rows(
        Row(np.pad(row, (0, width - len(row))), len(row), number, starts[number] if starts else 0)
        for number, row in enumerate(arrays)
    )
    module = network if isinstance(network, torch.nn.Module) else torch.nn.Identity()
    parameter, was_training = next(module.parameters(), None), module.training
    world = world or World(device=torch.device("cpu") if parameter is None else parameter.device)
    module.eval()
    try:
        yield BlockScorer(any_network(network, mask_id), blocks, mask_id, world=world)
    finally:
        module.train(was_training)


def nll_by_rate(
    scorer: BlockScorer, *, batch_size: int = 64, in_step: bool = False, seed: int = 1234
) -> Tensor:
    """Mean cross-entropy of masked tokens at each of a probe's mask rates: [K, B], all ranks'.

    The masks of a row are nested, and the same in every call: falls from call to call are paired.
    """
    length_B = scorer.blocks.num_maskable(slice(None))
    index_B = length_B.nonzero().squeeze(1)
    length_N, index_N = (one.repeat(len(RATES)) for one in (length_B[index_B], index_B))
    rate_N = torch.tensor(RATES, dtype=torch.float64).repeat_interleave(len(index_B))
    context_N = length_N - (rate_N * length_N).round().long().clamp(min=1)
    ce_N, key = torch.zeros(len(index_N), dtype=torch.float64), stream_key(seed, "probe")
    for part, is_extra in _parts(len(index_N), batch_size, scorer.world, in_step=in_step):
        found = scorer.mean(index_N[part], context_N[part], key)
        if not is_extra:
            ce_N[part] = found
    if scorer.world.size > 1:
        ce_N = scorer.world.all_reduce_sum(ce_N.to(scorer.world.device)).cpu()
    return ce_N.view(len(RATES), -1)


# Paper: Lemma A.2, Eq. 8
def mask_counts(
    length_B: Tensor, draws: int, seed: int, row_keys: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(levels [B], counts [B, R]): n = 1 + floor(L_b (r + u_b) / R).

    The u_b are one per stratum, in random order over blocks. With several draws each block covers
    all of 1 .. L_b by itself as well. ``row_keys``: u_b depends on its key alone, without strata.
    """
    num_blocks = len(length_B)
    keys = torch.arange(num_blocks) if row_keys is None else row_keys
    level = uniform(stream_key(seed, "evaluation levels"), keys)
    if row_keys is None:
        level = (shuffle(stream_key(seed, "evaluation strata"), num_blocks) + level) / num_blocks
    share_BR = (torch.arange(draws) + level[:, None]) / draws
    counts = 1 + (length_B[:, None] * share_BR).floor().long()
    return level, torch.minimum(counts, length_B[:, None])


def _parts(
    total: int, size: int, world: World, *, in_step: bool = False
) -> Iterator[tuple[slice, bool]]:
    """This rank's batches of blocks: every world.size-th.

    ``in_step``: all ranks get as many, because a model that is cut needs all of them in every call;
    the second value is True for a batch that is only computed for other ranks.
    """
    starts = range(0, total, size)
    num_rounds = -(-len(starts) // world.size)
    for number in range(world.rank, num_rounds * world.size, world.size):
        is_extra = number >= len(starts)
        if in_step or not is_extra:
            start = starts[0 if is_extra else number]
            yield slice(start, min(start + size, total)), is_extra


@dataclass(frozen=True)
class BlockScorer:
    """Cross-entropies of a model on blocks, in contexts that its framework draws."""

    model: Model
    blocks: Blocks
    mask_id: int
    framework: Framework = field(default_factory=Mdm)
    world: World = field(default_factory=World)
    precision: torch.dtype = torch.float32
    rules: AttentionRules = field(default_factory=AttentionRules)

    def mean(
        self, index_B: Tensor, context_B: Tensor, key: int, row_keys_B: Tensor | None = None
    ) -> Tensor:
        """Mean cross-entropy of each block's targets given exactly N_c tokens, float64 [B].

        nan where N_c tokens leave none to ask for; 0 for a block that has none at all.
        """
        ask = partial(self.framework.given, context_B=context_B)
        problem, ce_N = self._score(ask, index_B, key, row_keys_B)
        owner_N = problem.rows_N // problem.x_BL.shape[1]
        total_B = torch.zeros(len(index_B), dtype=torch.float64).index_add_(0, owner_N, ce_N)
        is_empty_B = self.blocks.num_maskable(index_B) == 0
        return (total_B / owner_N.bincount(minlength=len(index_B))).where(~is_empty_B, 0.0)

    def by_context(self, index_B: Tensor, key: int, row_keys_B: Tensor | None = None) -> Tensor:
        """Cross-entropy at every N_c, float64 [B, L], of a causal framework; 0 beyond a row."""
        assert isinstance(self.framework, Ordered)
        problem, ce_N = self._score(self.framework.every_context, index_B, key, row_keys_B)
        ce_BL = torch.zeros(problem.x_BL.shape, dtype=torch.float64)
        ce_BL[problem.rows_N // ce_BL.shape[1], problem.context_N] = ce_N
        return ce_BL

    @torch.no_grad()
    def _score(
        self, ask: Callable[..., Problem], index_B: Tensor, key: int, row_keys_B: Tensor | None
    ) -> tuple[Problem, Tensor]:
        """(the model's inputs, each scored row's cross-entropy)."""
        x0_BL, length_B = self.blocks.rows(index_B), self.blocks.row_lengths(index_B)
        u_BL = uniform_rows(key, index_B if row_keys_B is None else row_keys_B, x0_BL.shape[1])
        if self.blocks.starts is not None and not self.framework.is_causal:
            width = max(1, int(length_B.max()))  # nobody sees what is beyond the longest row
            x0_BL, u_BL = x0_BL[:, :width], u_BL[:, :width]
        place = torch.arange(x0_BL.shape[1])
        is_real_BL = place < length_B[:, None]
        is_maskable_BL = is_real_BL & (place >= self.blocks.row_starts(index_B)[:, None])
        problem = ask(
            x0_BL, u_BL=u_BL, mask_id=self.mask_id, is_real_BL=_unless_all(is_maskable_BL)
        )
        mask = None
        if not self.framework.is_causal:
            mask = self.rules.mask(x0_BL, _unless_all(is_real_BL))
        device = self.world.device
        with autocast(device, self.precision):
            ce_N = problem.ask(self.model, device, mask=mask, reduce=False)
        return problem, ce_N.cpu().double()


def _unless_all(is_true_BL: Tensor) -> Tensor | None:
    """None instead of a mask that hides nothing."""
    return None if bool(is_true_BL.all()) else is_true_BL


# The same of a run, on blocks or on texts.


def _settings(run: Loaded) -> dict[str, Any]:
    """Arguments of an evaluation that depend on the run."""
    return {
        "mask_id": run.tokenizer.mask_id,
        "framework": run.framework,
        "world": World(device=run.device),
        "precision": run.precision,
        "rules": build_rules(run.config.data, run.tokenizer),
    }


def evaluate_run(run: Loaded, blocks: Blocks, **options: Any) -> Likelihood:
    """The NLL (bound) on blocks; ``draws``, ``seed``, ``batch_size``, ``row_keys``, ``world`` and
    ``progress`` as for :func:`evaluate`.
    """
    blocks = blocks.starting_at(run.model.first_maskable)
    found = evaluate(run.model, blocks, **_settings(run) | options)
    if not math.isfinite(found.perplexity):
        raise UserError(
            f"the NLL of {run.folder} is {found.nll:.4g} nats per token: its training diverged, or "
            "its weights are damaged; use another checkpoint"
        )
    return found


def scorer_of(run: Loaded, blocks: Blocks) -> BlockScorer:
    """Cross-entropies on blocks in contexts of given size, for curves by context count."""
    return BlockScorer(run.model, blocks.starting_at(run.model.first_maskable), **_settings(run))


@dataclass(frozen=True)
class TextNll:
    """The NLL of one text in nats: exact for a fixed order, else an upper bound on -log p."""

    nll: float
    standard_error: float
    """Of the estimate over masks or orders; more draws make it smaller, an exact one has none."""
    num_tokens: int

    @property
    def per_token(self) -> float:
        return self.nll / self.num_tokens


def text_nll(
    run: Loaded, texts: Sequence[str], *, draws: int = 32, seed: int = 1234
) -> list[TextNll]:
    """The NLL (bound) of each text; one longer than a block is cut into blocks, scored apart.

    A text's value does not depend on the other texts.
    """
    if isinstance(texts, str):
        raise UserError("nll takes a list of texts; for one text use run.nll([text])")
    if not texts:
        return []
    rows = [row for number, text in enumerate(texts) for row in _text_rows(run, number, text)]
    blocks = Blocks.from_rows(rows, num_bytes=sum(len(text.encode()) for text in texts))
    place = np.arange(len(rows)) - np.searchsorted(blocks.documents, blocks.documents)
    result = evaluate_run(run, blocks, draws=draws, seed=seed, row_keys=torch.from_numpy(place))
    total = result.length_B * result.block_nll
    variance = (result.length_B * result.draw_errors) ** 2
    found = []
    for number in range(len(texts)):
        mine = blocks.documents == number
        nll, error = float(total[mine].sum()), float(np.sqrt(variance[mine].sum()))
        found.append(TextNll(nll, error, int(result.length_B[mine].sum())))
    return found


def _text_rows(run: Loaded, number: int, text: str) -> list[Row]:
    first, tokenizer = run.model.first_maskable, run.tokenizer
    ids, length = tokenizer.encode(text), run.config.data.block_length - first
    if not len(ids):
        raise UserError(f"text {number} is empty: it has no likelihood")
    begin = np.full(first, tokenizer.bos_id)  # given, so that every token of the text counts
    pieces = [ids[start : start + length] for start in range(0, len(ids), length)]
    padding = [np.full(length - len(piece), tokenizer.pad_id) for piece in pieces]
    return [
        Row(np.concatenate([begin, piece, pad]), first + len(piece), number)
        for piece, pad in zip(pieces, padding, strict=True)
    ]


# NLL by context count, and reference cross-entropies for its low end.
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
    share_B = result.length_B / (result.count_BR > 0).sum(1)  # tokens that a draw represents
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


# Paper: Fig. 3, Eq. 10
def exact_curve(
    scorer: BlockScorer, contexts: Sequence[int], *, seed: int = 1234, batch_size: int = 64
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
        parts = index.split(batch_size)
        values = [scorer.mean(part, torch.full_like(part, context), key) for part in parts]
        ce, weight = torch.cat(values).numpy(), length[index].double().numpy()
        cluster = stats.document_clusters(np.asarray(blocks.documents)[index.numpy()])
        nll, error = weighted_mean(ce, weight, cluster)
        points.append(ContextPoint(context, context, nll, error, len(ce)))
    return points


def weighted_mean(
    value: stats.Floats, weight: stats.Floats, cluster: stats.Labels | None
) -> tuple[float, float]:
    """A token-weighted mean and its standard error (delta method, clustered)."""
    mean = float((weight * value).sum() / weight.sum())
    return mean, stats.clustered_error(weight * (value - mean) / weight.mean(), cluster)


REFERENCES = {"unigram": "unigram_cross_entropy", "position-wise": "position_wise_cross_entropy"}
"""Cross-entropies from training counts to validation tokens, nats per token: names in tables, and
in JSON. unigram: add-one smoothed training frequencies, the optimum without context; position-wise:
a training distribution per position, the optimum at N_c = 0 where rows have structure."""


def unigram_cross_entropy(train: Blocks, valid: Blocks, num_tokens: int) -> float:
    """The first of the two references alone: one count per token, whatever the block length."""
    counts = unigram_counts(train.slice(0, min(len(train), REFERENCE_BLOCKS)), num_tokens)
    return _cross_entropy([counts] * valid.block_length, valid)


def unigram_counts(blocks: Blocks, num_tokens: int) -> stats.Floats:
    """How often each token is a maskable one of the blocks, and once more."""
    columns = _columns(blocks)
    return np.ones(num_tokens) + sum(np.bincount(ids, minlength=num_tokens) for ids in columns)


# Paper: Fig. 3
def references(train: Blocks, valid: Blocks, num_tokens: int) -> dict[str, float]:
    """Both references, from the first training blocks (at most ``REFERENCE_BLOCKS``)."""
    train = train.slice(0, min(len(train), REFERENCE_BLOCKS))
    counts = np.stack([np.bincount(ids, minlength=num_tokens) for ids in _columns(train)])
    unigram = counts.sum(0) + 1.0
    own = counts + POSITION_PRIOR * unigram / unigram.sum()
    alone = _cross_entropy([unigram] * valid.block_length, valid)
    return dict(zip(REFERENCES.values(), (alone, _cross_entropy(own, valid))))


def _cross_entropy(counts: Sequence[stats.Floats] | stats.Floats, blocks: Blocks) -> float:
    """To the tokens of blocks, from a distribution (not normalized) for each position."""
    pairs = zip(counts, _columns(blocks))
    return -float(np.log(np.concatenate([own[tokens] / own.sum() for own, tokens in pairs])).mean())


def _columns(blocks: Blocks) -> list[stats.Labels]:
    """At each position the maskable tokens of all rows."""
    tokens, lengths = np.asarray(blocks.tokens), np.asarray(blocks.lengths)
    starts = blocks.row_starts(slice(None)).numpy()
    return [
        tokens[(starts <= position) & (position < lengths), position].astype(np.int64)
        for position in range(blocks.block_length)
    ]


# Tables and the figure


def own_text(data: DataOptions) -> str:
    """What a run validates on, in words."""
    return "validation text" if data.valid_split == "valid" else "test text"


def describe_text(num_blocks: int, text: str) -> str:
    """``512 blocks of the validation text``: NLLs of other blocks differ."""
    return f"{plural(num_blocks, 'block')} of {text}"


def _title(report: dict[str, Any]) -> str:
    text = describe_text(report["num_blocks"], report["data"])
    return f"{report['run']}, step {report['step']}, on {text}"


def _show(report: dict[str, Any]) -> None:
    what, bound = ("exact NLL", "") if report["is_exact"] else ("NELBO", " (bound)")
    references = {f"{name} cross-entropy": report[key] for name, key in REFERENCES.items()}
    numbers = {
        f"{what}, nats per token": stats.plus_minus(report["nll"], report["nll_se"], 4),
        f"perplexity{bound}": f"{report['perplexity']:.3f}",
        f"bits per byte{bound}": stats.plus_minus(report["bits_per_byte"], None, 4),
        **{name: stats.plus_minus(value, None, 4) for name, value in references.items()},
        "blocks x draws": f"{report['num_blocks']} x {report['num_draws']}",
    }
    Table(_title(report), ["quantity", "value"], list(map(list, numbers.items()))).print()
    for title, points in (
        ("NLL by context count: bins of the draws above", report["context_curve"]),
        ("NLL at exact context counts: the first blocks, 512 at most", report["exact_contexts"]),
    ):
        rows = []
        for p in points:
            context = str(p["low"]) if p["low"] == p["high"] else f"{p['low']}-{p['high']}"
            error = "-" if math.isnan(p["standard_error"]) else f"{p['standard_error']:.4f}"
            rows.append([context, f"{p['nll']:.4f}", error, str(p["num_draws"])])
        if rows:  # few blocks make no bins
            Table(title, ["observed tokens", "nats", "standard error", "draws"], rows).print()


# The command

SUITES = {
    "zero-shot": "bellmask.evaluate.zero_shot",
    "generative": "bellmask.evaluate.generative",
    "paper": "bellmask.evaluate.paper_suite",
}
"""Suites by name; the module's ``main(args)`` is the command, with its own options."""


def _blocks(
    loaded: Loaded, data: str | None, split: Literal["valid", "test"] | None
) -> tuple[Blocks | None, Blocks]:
    """(training text for the references, None where it is gone and not needed; text to measure)."""
    if split is not None and data is None:
        loaded = replace(loaded, config=loaded.config.with_options({"data.valid_split": split}))
    try:
        train, valid = loaded.blocks()
        loaded.check_same_data(train)
    except UserError as error:
        if data is None:
            raise
        logger.info("no unigram reference without the training text: %s", error)
        train = None
    if data is not None:
        if split is not None and data not in CORPORA:
            raise UserError(f"--split needs a named corpus; --data {data} is evaluated as a whole")
        valid = prepare(replace(loaded.config.data, valid=data), loaded.tokenizer, split or "valid")
    return train, valid


def main(args: Sequence[str]) -> int:
    """Evaluate, print tables, write files; or hand over to a suite."""
    rest = list(args)
    if suite := take_option(rest, "--suite"):
        if len(suite) > 1:
            raise UserError(f"one --suite at a time, got {' and '.join(suite)}")
        return import_module(look_up("suite", suite[-1], SUITES)).main(rest)
    options = parse_command(EvaluateOptions, rest, command="evaluate")
    check_least(options, draws=1, batch_size=1, blocks=0)
    name = Path(options.data).stem if options.data else None
    place = "-".join(filter(None, ["evaluation", name, options.split]))
    return on_all_ranks(_measure, options, [options.run], place)


def _measure(options: EvaluateOptions, world: World, folder: Path) -> None:
    from bellmask.report.figures import plot_context_curve  # loads matplotlib

    loaded = options.load(options.run)
    with announced("preparing text"):
        train, valid = _blocks(loaded, options.data, options.split)
    blocks = valid.spread(options.blocks).starting_at(loaded.model.first_maskable)
    how: dict[str, Any] = {"seed": options.seed, "batch_size": options.batch_size}
    with progress_bar("evaluating", "blocks", len(blocks)) as progress:
        more = {"draws": options.draws, "world": world, "progress": progress}
        result = evaluate_run(loaded, blocks, **more, **how)
    length = blocks.block_length
    ends = [n for n in dict.fromkeys([0, 2, 8, length - 4, length - 1]) if 0 <= n < length]
    first = blocks.slice(0, min(512, len(blocks)))
    with announced("measuring exact context counts and references"):
        exact = exact_curve(scorer_of(loaded, first), ends, **how)
        known: dict[str, Any] = dict.fromkeys(REFERENCES.values())
        known |= references(train, blocks, loaded.tokenizer.num_tokens) if train else {}
    data = loaded.config.data
    own = f"the run's {own_text(data)}" if options.split is None else data.valid or data.train
    text = options.data or own
    report: dict[str, Any] = {
        "run": loaded.folder.name,
        "step": loaded.step,
        "data": ", ".join(filter(None, [text, options.split])),
        "data_fingerprint": blocks.fingerprint,
        "seed": options.seed,
        **result.summary(),
        **known,
        "context_curve": [asdict(point) for point in binned_curve(result)],
        "exact_contexts": [asdict(point) for point in exact],
    }
    write_results(folder, report, "evaluation")
    lines = {name: report[key] for name, key in REFERENCES.items() if report[key] is not None}
    title = f"{_title(report)}: {report['nll']:.4f} nats/token"
    plot_context_curve(report["context_curve"], lines, folder / "context_curve", title=title)
    result.save(folder / "blocks.npz")
    _show(report)
    print(f"written: {folder}/evaluation.json, context_curve.png, context_curve.svg, blocks.npz")
