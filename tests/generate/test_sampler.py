"""The sampling loop against a sampler of one row in plain Python, and against known joints."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from sampling_tools import BITS, MASK, V, each, make, make_told, masked, p_value

from bellmask.data.blocks import share_out
from bellmask.data.toys import ExactDenoiser, ToySource
from bellmask.diffusion.schedules import Cosine, Linear, MiddleFlat, Polynomial, Schedule
from bellmask.generate.rules import RULES, Remasking
from bellmask.generate.sampler import (
    SamplingDenoiser,
    TokenChoice,
    cosine_grid,
    count_grid,
    generate,
    uniform_grid,
)
from bellmask.utils.errors import UserError
from bellmask.utils.rng import stream_key, uniform


class Spy:
    """A model that notes each call; its logits depend on the whole row and the position."""

    def __init__(self):
        self.calls = []

    def __call__(self, x_BL, rows_N, *, t_B, mask):
        self.calls.append((x_BL.clone(), rows_N.clone(), t_B.clone(), mask))
        places = [divmod(n, x_BL.shape[1]) for n in rows_N.tolist()]
        return torch.stack([logits_of(x_BL[b].tolist(), place) for b, place in places])


def logits_of(row, place):
    seed = sum(token * (i + 1) for i, token in enumerate(row)) + 3 * (place + 1)
    return 2 * torch.sin(seed * torch.arange(1, V + 1, dtype=torch.float64))


# One row in plain Python, position by position.

SCORES = {
    "most_confident": lambda p, token: p[token],
    "margin": lambda p, token: sorted(p)[-1] - sorted(p)[-2],
    "entropy": lambda p, token: sum(one * math.log(one) for one in p),
}


def grids_of(grid, sizes, schedule):
    """The times of each block, of which the sizes are given."""
    if not isinstance(grid, torch.Tensor):
        per = grid or 1
        shares = [[min(1, k * per / n) for k in range(-(-n // per) + 1)] for n in sizes]
        return [schedule.inverse(torch.tensor(one, dtype=torch.float64)).tolist() for one in shares]
    last, times = len(grid) - 1, grid.tolist()
    if len(sizes) == 1:
        return [times]
    parts = []
    for steps in share_out(sizes, last):
        at = np.linspace(0, last, max(1, steps) + 1)
        parts.append(np.interp(at, range(last + 1), times).tolist())
    return parts


@dataclass
class Slow:
    """``Slow(row, number, ...).run()``: rows after each step, what was asked, the times."""

    canvas: list
    number: int
    name: str
    grid: torch.Tensor | int | None
    schedule: Schedule
    seed: int
    w: float
    t: float
    block_length: int = 100

    def u(self, place, *name, token=None):
        counter = self.number * len(self.row) + place
        counter = counter if token is None else counter * V + token
        return float(uniform(stream_key(self.seed, *name), torch.tensor([counter])))

    def run(self):
        self.row = list(self.canvas)
        gaps = [i for i, token in enumerate(self.row) if token == MASK]
        edges = range(gaps[0], len(self.row), self.block_length)
        blocks = [[i for i in gaps if e <= i < e + self.block_length] for e in edges]
        blocks = [block for block in blocks if block]
        history, asked = [list(self.row)], []
        grid = None if self.name == "first_hitting" else self.grid
        parts = grids_of(grid, list(map(len, blocks)), self.schedule)
        for block, times in zip(blocks, parts, strict=True):
            for k, (t, s) in enumerate(itertools.pairwise(times)):
                asked.append(self.step(block, t, s, k, len(blocks) == 1))
                history.append(list(self.row))
        return history, asked, [t for times in parts for t in times[1:]]

    def step(self, block, t, s, k, is_alone):
        """(row as it was, places asked for, the time told), or None."""
        before = list(self.row)
        alpha_t, alpha_s = (
            float(self.schedule.alpha(torch.tensor(one).double())) for one in (t, s)
        )
        is_open = [i for i in block if before[i] == MASK]
        made = [i for i in block if before[i] != MASK]
        budget = max(0, len(is_open) - round(len(block) * (1 - alpha_s)))
        by_u = sorted(is_open, key=lambda i: self.u(i, "reveal"))
        count_t = self.inverse(1 - before.count(MASK) / len(before))
        time, forgotten = t if is_alone else count_t, []
        if self.name == "ancestral":
            places = [i for i in is_open if self.u(i, "reveal") < alpha_s]
        elif self.name == "first_hitting":
            places = by_u[:1]
            time = self.inverse(self.u(places[0], "reveal")) if is_alone else count_t
        elif self.name == "random":
            places, time = by_u[:budget], count_t
        elif self.name in SCORES:
            places, time = is_open if budget else [], count_t
        else:
            largest = min(1.0, (1 - alpha_s) / alpha_t) if alpha_t else 1.0
            sigma = min(0.3, largest) if self.name == "cap" else 0.5 * largest
            p = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
            places = [i for i in is_open if self.u(i, "reveal", k) < p]
            forgotten = [i for i in made if self.u(i, "forget", k) < sigma]
        drawn = {i: self.draw(before, i, k) for i in sorted(places)}
        keep = list(drawn)
        if self.name in SCORES:
            keep = sorted(drawn, key=lambda i: -drawn[i][1])[:budget]
        for i in keep:
            self.row[i] = drawn[i][0]
        for i in forgotten:
            self.row[i] = MASK
        return (before, list(drawn), time) if drawn else None

    def inverse(self, alpha):
        return float(self.schedule.inverse(torch.tensor(alpha, dtype=torch.float64)))

    def draw(self, row, place, k):
        """(token, how sure it is)."""
        logits = logits_of(row, place)
        if self.w:
            blind = [MASK if given != MASK else token for given, token in zip(self.canvas, row)]
            blind[0] = row[0]  # which the model needs
            unseeing = logits_of(blind, place)
            logits = unseeing + (1 + self.w) * (logits - unseeing)
        step = () if self.name in ("ancestral", "first_hitting", "random") else (k,)
        noise = [-math.log(-math.log(self.u(place, "gumbel", *step, token=v))) for v in range(V)]
        token = max(range(V), key=lambda v: float(logits[v]) / self.t + noise[v])
        score = SCORES.get(self.name, lambda p, token: 0.0)
        return token, score(logits.softmax(0).tolist(), token)


CASES = {
    "uniform": {"grid": uniform_grid(5)},
    "cosine": {"grid": cosine_grid(7), "schedule": Cosine(), "w": 0.7, "t": 0.8},
    "one by one": {"grid": None, "schedule": MiddleFlat()},
    "by two in blocks": {"grid": 2, "block_length": 3, "schedule": Cosine()},
    "blocks": {"grid": cosine_grid(9), "block_length": 4, "w": 1.5},
    "few steps for many blocks": {"grid": uniform_grid(2), "block_length": 2},
}


@each
@pytest.mark.parametrize("case", CASES)
def test_rows_steps_and_calls_are_those_of_a_sampler_in_plain_python(rule, case):
    """What each row is after each step; which rows and places the network is asked for, what it
    sees and at which time; what it costs. Also of a row that is full.
    """
    options = {"schedule": Linear(), "w": 0.0, "t": 1.0, **CASES[case]}
    grid, w, temperature = options.pop("grid"), options.pop("w"), options.pop("t")
    canvas = masked(3, 11)
    canvas[:, [0, 4]] = torch.tensor([[1, 2], [3, 4], [5, 0]])
    spy, steps = Spy(), []
    spy.first_maskable = 1  # guidance leaves the first token, as a causal LM needs it
    made, network = make_told(
        spy,
        canvas,
        grid,
        rule,
        w=w,
        seed=3,
        first_sample=7,
        choice=TokenChoice(temperature),
        on_step=lambda step: steps.append((step, step.ids_BL.tolist())),
        **options,
    )
    slow = [
        Slow(row, 7 + b, rule, grid, seed=3, w=w, t=temperature, **options).run()
        for b, row in enumerate(canvas.tolist())
    ]
    assert [rows for _, rows in steps] == [list(rows) for rows in zip(*(one[0] for one in slow))]
    assert made.ids_BL.tolist() == steps[-1][1]
    called, num_calls = iter(spy.calls), 0
    for (step, _), asked in zip(steps[1:], zip(*(one[1] for one in slow)), strict=True):
        if active := [one for one in asked if one is not None]:
            num_calls += 1
            x_BL, rows_N, t_B, _ = next(called)
            assert x_BL[: len(active)].tolist() == [row for row, _, _ in active]
            places = [11 * b + i for b, (_, places, _) in enumerate(active) for i in places]
            assert rows_N[:: 2 if w else 1].tolist() == places  # guided and not, in turn
            torch.testing.assert_close(
                t_B.double()[: len(active)], torch.tensor([t for *_, t in active]).double()
            )
            assert len(x_BL) == len(t_B) == len(active) * (2 if w else 1)
        assert step.num_calls == num_calls
    assert next(called, None) is None
    assert (made.num_calls, network.num_calls) == (num_calls, num_calls)
    assert made.num_rows == sum(len(x_BL) for x_BL, *_ in spy.calls) == 3 * made.nfe
    assert [step.number for step, _ in steps] == list(range(len(steps)))
    assert {(step.num_steps, step.first_sample) for step, _ in steps} == {(len(steps) - 1, 7)}
    for (step, rows), t in zip(steps[1:], slow[0][2], strict=True):
        if "block_length" in options:  # the rows' own time, not the block's
            share = sum(row.count(MASK) for row in rows) / 33
            t = float(options["schedule"].inverse(torch.tensor(1 - share).double()))
        assert step.t == pytest.approx(t)


@each
def test_rows_do_not_depend_on_the_batch_and_full_ones_cost_nothing(rule):
    """Nor on canvases with other gaps beside them, where rules count no steps for the batch."""
    canvas = masked(7, 10)
    canvas[:, 4], canvas[3] = 1, 5
    for grid, options in (
        (uniform_grid(6), {}),
        (uniform_grid(6), {"choice": TokenChoice(0.0)}),
        (1, {"choice": TokenChoice(1.2, 5, 0.95, torch.float32), "w": 0.4, "block_length": 3}),
    ):
        whole = make(Spy(), canvas, grid, rule, **options).ids_BL
        for places in ([0], [6, 2], [1, 3, 4, 5]):
            numbers = torch.tensor(places)
            part = make(Spy(), canvas[places], grid, rule, first_sample=numbers, **options)
            assert part.ids_BL.equal(whole[places])
    full = make(None, canvas[3:4], uniform_grid(6), rule)
    assert (full.num_calls, full.num_rows, full.ids_BL.tolist()) == (0, 0, [[5] * 10])
    if rule in ("ancestral", "first_hitting", "cap", "rescale"):
        canvas[0, :9] = 2
        other = make(Spy(), canvas, uniform_grid(6), rule).ids_BL
        assert other[1:].equal(
            make(Spy(), canvas[1:], uniform_grid(6), rule, first_sample=1).ids_BL
        )


def test_rows_with_other_gaps_have_blocks_of_their_own():
    """From each row's first masked place on; steps are counted for the row with most to fill."""
    canvas = torch.tensor([[6, 1, 1, 6, 6, 6], [1, 1, 6, 6, 1, 6], [6, 1, 1, 1, 1, 1]])
    left = []
    told = {"on_step": lambda step: left.append((step.ids_BL == MASK).sum(1).tolist())}
    made = make(Spy(), canvas, 1, "random", block_length=2, **told)
    assert left == [[4, 3, 1], [3, 2, 0], [3, 1, 0], [2, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert (made.num_calls, made.num_rows) == (5, 3 + 1 + 2 + 1 + 1)


# exact samplers have the joint distribution, others do not

CHAIN = ToySource.markov(
    torch.tensor([0.7, 0.3], dtype=torch.float64),
    torch.tensor([[0.85, 0.15], [0.35, 0.65]], dtype=torch.float64),
    length=4,
)
START, MOVE = CHAIN.initial_S.tolist(), CHAIN.transition_SS.tolist()
JOINT = {
    row: START[row[0]] * math.prod(MOVE[a][b] for a, b in itertools.pairwise(row)) for row in BITS
}
ONE = [[sum(p for row, p in JOINT.items() if row[i] == v) for v in (0, 1)] for i in range(4)]
MARGINALS = {row: math.prod(ONE[i][v] for i, v in enumerate(row)) for row in BITS}
EXACT = {
    "ancestral": ("ancestral", uniform_grid(128), None),
    "ancestral, cosine grid": ("ancestral", cosine_grid(160), None),
    "ancestral in blocks": ("ancestral", uniform_grid(160), 3),
    "first hitting": ("first_hitting", None, None),
    "first hitting in blocks": ("first_hitting", None, 2),
    "one by one": ("random", None, None),
    "cap": (Remasking(0.02), uniform_grid(100), None),
    "rescale": (Remasking(0.02, "rescale"), uniform_grid(100), None),
}
COSINE = ("ancestral", "first hitting in blocks", "cap")


def drawn(rule, grid, given=None, **options):
    canvas = torch.tensor([[(given or {}).get(i, 2) for i in range(4)]]).repeat(2000, 1)
    return make(ExactDenoiser(CHAIN), canvas, grid, rule, mask_id=2, **options)


@pytest.mark.parametrize("given", [{}, {1: 1, 3: 0}], ids=str)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [(name, Linear()) for name in EXACT] + [(name, Cosine()) for name in COSINE],
)
def test_exact_samplers_have_the_joint_distribution(name, schedule, given):
    """Of all rows, or of what is missing given the rest."""
    rule, grid, block_length = EXACT[name]
    made = drawn(rule, grid, given, schedule=schedule, block_length=block_length)
    assert p_value(made.ids_BL, JOINT, given) > 1e-4, "many cases: 1e-3 would often be chance"
    assert given or p_value(made.ids_BL, MARGINALS, {}) < 1e-9


def test_all_at_once_or_two_at_a_time_is_not_the_joint_distribution():
    assert p_value(drawn("random", 2, seed=3).ids_BL, JOINT, {}) < 1e-6
    for rule in ("ancestral", "random", "cap"):
        made = drawn(rule, uniform_grid(1))
        assert (made.num_calls, made.num_rows) == (1, 2000)
        assert p_value(made.ids_BL, MARGINALS, {}) > 1e-3


# grids, pads, what is refused


def test_grids_are_their_formulas():
    assert uniform_grid(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    expected = [math.cos(math.pi / 2 * k / 6) for k in range(7)]
    assert cosine_grid(6).tolist() == pytest.approx(expected, abs=1e-15)
    assert cosine_grid(1000)[-1] == 0
    for schedule in (Linear(), Cosine(), Polynomial(3.0), MiddleFlat()):
        for tokens, per_step in ((1, 1), (7, 2), (3, 50), (64, 5)):
            grid = count_grid(tokens, per_step, schedule)
            assert (len(grid), *grid[[0, -1]]) == (-(-tokens // per_step) + 1, 1.0, 0.0)
            shown = [min(tokens, per_step * k) for k in range(len(grid))]
            assert (tokens * schedule.alpha(grid)).tolist() == pytest.approx(shown, abs=1e-6)


@each
@pytest.mark.parametrize("w", [0.0, 1.0])
def test_pads_are_kept_hidden_from_the_network_and_not_counted(rule, w):
    lengths, spy = torch.tensor([3, 8, 5, 8]), Spy()
    is_real = torch.arange(8) < lengths[:, None]
    canvas = torch.where(is_real, MASK, 0)
    canvas[:, 0] = torch.arange(4)  # to tell rows apart
    made = make(spy, canvas, uniform_grid(10), rule, real=is_real, w=w)
    assert made.ids_BL[~is_real].eq(0).all()
    assert (made.ids_BL != MASK).all()
    assert any(len(x_BL) < (8 if w else 4) for x_BL, *_ in spy.calls)
    for x_BL, rows_N, t_B, mask in spy.calls:
        visible = mask.expand(len(x_BL), 1, 8, 8)[:, 0, 0]
        assert visible.flatten()[rows_N].all()
        for row, seen, t in zip(x_BL[: len(x_BL) // (2 if w else 1)].tolist(), visible, t_B):
            assert seen.tolist() == is_real[row[0]].tolist()
            if rule in ("random", *SCORES):
                assert float(t) == pytest.approx(row.count(MASK) / int(lengths[row[0]]))


def test_what_would_leave_masks_or_has_nothing_to_guide_is_refused():
    bad_canvases = (torch.tensor([[MASK + 1]]), torch.tensor([[-1]]), masked(1, 6)[0], masked(0, 6))
    bad_grids = (torch.tensor([1.0, 0.3]), torch.tensor([0.0, 1.0]), torch.tensor([1, 0.5, 0.5, 0]))
    for names, options in (
        *(("canvas", {"canvas_BL": canvas}) for canvas in bad_canvases),
        *(("grid", {"grid": grid}) for grid in (*bad_grids, 0)),
        ("grid", {"rule": RULES["first_hitting"]}),
        ("block_length", {"block_length": 0}),
    ):
        with pytest.raises(UserError, match=names):
            generate(
                SamplingDenoiser(None, MASK), **{"canvas_BL": masked(2, 6), "grid": 1} | options
            )
    with pytest.raises(UserError, match="guidance"):
        make(Spy(), masked(5, 7), 1, w=3.0)
