"""The NLL per token on fixed contexts, with an honest standard error, for every framework.

MDM: a block of L_b tokens gets masks of exactly n tokens, n spread evenly over 1 .. L_b; the mean
cross-entropy of the masked rows, averaged over n, is the NELBO per token (paper Eq. L_MDM and the
shared form of Sec. 2.2 with N_c = L_b - n). There is no time floor and no weight that explodes.
Causal frameworks: one pass per order scores every N_c of a block. Masks and orders are a function
of the seed and the set of blocks alone: two models that are compared see the same ones.

B blocks, R draws per block, L block length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bellmask.data.blocks import Blocks
from bellmask.data.packing import Row
from bellmask.diffusion.frameworks import Framework, Mdm, Model, Ordered, Problem
from bellmask.evaluate.result import Likelihood
from bellmask.model.attention import AttentionRules
from bellmask.storage.build import build_rules
from bellmask.storage.loading import Loaded
from bellmask.train.sharding import is_sharded
from bellmask.utils.distributed import World, autocast, pick_precision
from bellmask.utils.errors import UserError
from bellmask.utils.rng import shuffle, stream_key, uniform, uniform_rows


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
    on_batch: Callable[[int], None] | None = None,
) -> Likelihood:
    """Measure a model on all the given blocks: the NELBO, or for a fixed order the exact NLL.

    ``model(x, rows, targets, t_B=, mask=, reduce=False)`` returns each row's cross-entropy; causal
    ones get ``positions`` and ``target_positions`` instead of ``t_B``. Ranks share the work; each
    gets the whole result. ``on_batch`` is told the blocks done so far. Masks of block b are those
    of ``row_keys[b]``, by default b itself. ``draws`` counts masks, or random orders.
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
    for part, is_extra in _parts(len(blocks), batch_size, world, in_step=is_sharded(model)):
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
        if on_batch:
            on_batch(part.stop)
    ce_BR = world.add_up(ce_BR.to(world.device)).cpu()
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


def evaluate_run(
    run: Loaded,
    blocks: Blocks,
    *,
    draws: int = 1,
    seed: int = 1234,
    batch_size: int = 64,
    row_keys: Tensor | None = None,
    on_batch: Callable[[int], None] | None = None,
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
        on_batch=on_batch,
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
