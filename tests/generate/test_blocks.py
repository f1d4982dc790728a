"""Block by block, with and without a cache of what precedes the block.

Networks are float64: with and without a cache are two computations of the same rows.
"""

import itertools

import pytest
import torch
from sampling_tools import MASK, V, awake, each, even, history, make_told, masked

from bellmask.diffusion.schedules import Cosine
from bellmask.generate.sampler import SamplingDenoiser, TokenChoice
from bellmask.utils.errors import UserError

# which places come when


def by_hand(canvas, block_length):
    """For each row its blocks, from its first masked place on; masked places of each."""
    blocks = []
    for row in canvas:
        gaps = [i for i, token in enumerate(row) if token == MASK]
        edges = range(gaps[0] if gaps else 0, len(row), block_length)
        blocks.append([{i for i in gaps if e <= i < e + block_length} for e in edges])
    return blocks


@each
@pytest.mark.parametrize("block_length", [1, 3, 5, 30])
def test_a_block_is_finished_before_the_next_begins(rule, block_length):
    """Rows that begin at different places have blocks of their own, side by side."""
    canvas = masked(5, 11)
    canvas[1, :4], canvas[2, [0, 3, 4]], canvas[3], canvas[4, 1:10] = 1, 2, 3, 0
    seen = [ids != MASK for ids in history(even, canvas, 6, rule, block_length=block_length)]
    assert seen[-1].all()
    for b, blocks in enumerate(by_hand(canvas.tolist(), block_length)):
        for before, after in itertools.pairwise(seen):
            new = {i for i in range(11) if after[b, i] and not before[b, i]}
            open_blocks = [block for block in blocks if any(not before[b, i] for i in block)]
            assert new <= (open_blocks[0] if open_blocks else set())


@each
def test_a_block_as_long_as_the_rest_changes_nothing(rule):
    model, canvas = awake(2, V).double(), masked(16, 9)
    canvas[:, :2] = 1
    whole, _ = make_told(model, canvas, 5, rule)
    for block_length in (7, 50):
        one, _ = make_told(model, canvas, 5, rule, block_length=block_length)
        assert one.ids_BL.equal(whole.ids_BL)
        assert (one.num_calls, one.num_rows) == (whole.num_calls, whole.num_rows)
    assert not make_told(model, canvas, 5, rule, block_length=3)[0].ids_BL.equal(whole.ids_BL)


# the cache


class Widths:
    """Rows and tokens per row that go through each layer of a model, call by call."""

    def __init__(self, model):
        self.calls = []
        for number, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda _, args, n=number: self.note(n, args[0]))

    def note(self, layer, x_BLD):
        if layer == 0:
            self.calls.append([])
        self.calls[-1].append(tuple(x_BLD.shape[:2]))


def canvases():
    """Empty, after a prompt, with gaps, of which some are full, and padded."""
    prompt, gaps = masked(5, 12), masked(5, 12)
    prompt[:, :4] = torch.arange(20).view(5, 4) % V
    gaps[0, 2], gaps[1, 5:], gaps[2], gaps[3, :7] = 1, 2, 3, 4
    real = torch.arange(12) < torch.tensor([12, 7, 9, 12, 5])[:, None]
    padded = torch.where(real, MASK, 0)
    padded[:, :2] = torch.arange(10).view(5, 2) % V
    empty = (masked(5, 12), None)
    return {"empty": empty, "prompt": (prompt, None), "gaps": (gaps, None), "pad": (padded, real)}


@pytest.mark.parametrize(
    ("name", "w"), [("empty", 0.0), ("prompt", 0.8), ("gaps", 0), ("pad", 0.8)]
)
@each
def test_one_layer_with_a_cache_is_the_same_as_without(rule, w, name):
    """Keys and values of the first layer depend on their own token alone."""
    model, (canvas, real) = awake(1, V).double(), canvases()[name]
    options = {"block_length": 3, "real": real, "w": w, "seed": 4, "schedule": Cosine()}
    plain, straight = make_told(model, canvas, 12, rule, **options)
    widths = Widths(model)
    kept, cached = make_told(model, canvas, 12, rule, is_cached=True, **options)
    assert kept.ids_BL.equal(plain.ids_BL)
    assert kept.num_calls == plain.num_calls == len(widths.calls)
    assert kept.num_rows == sum(rows for ((rows, _),) in widths.calls)
    for (x, wanted, expected), (y, asked, found) in zip(straight.asked, cached.asked, strict=True):
        assert x.equal(y)
        assert wanted.equal(asked)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("w", [0.0, 0.8])
def test_with_two_layers_the_first_call_of_a_block_is_exact_and_later_ones_are_short(w):
    model, canvas = awake(2, V).double(), masked(4, 12)
    canvas[:, :3] = torch.arange(12).view(4, 3) % V
    widths, differ = Widths(model), []
    _, network = make_told(model, canvas, 12, "first_hitting", block_length=3, is_cached=True, w=w)
    calls, copies = list(widths.calls), 2 if w else 1
    for x_BL, is_wanted_BL, found in network.asked:
        plain = SamplingDenoiser(model, MASK, guidance=w)
        plain.begin(canvas)
        with torch.no_grad():
            expected = plain.logits(x_BL, is_wanted_BL, torch.zeros(4))
        differ.append((found - expected).abs().max().item())
    # blocks begin at 3, 6, 9: all 12 tokens once, then those from the block's start on
    expected = [(4 * copies, width) for width in (12, 9, 9, 12, 6, 6, 12, 3, 3)]
    assert calls == [[one] * 2 for one in expected]
    assert max(differ[0::3]) < 1e-9
    assert min(differ[1::3] + differ[2::3]) > 1e-3


def test_rows_that_begin_elsewhere_keep_what_precedes_all_their_blocks():
    """Blocks 2-4, 5-7, 8-9 and 4-6, 7-9: the prefix ends at 2, 5, 8; every row is kept anew."""
    model, canvas = awake(2, V), masked(2, 10)
    canvas[0, :2], canvas[1, :4] = 1, 2
    widths = Widths(model)
    made, _ = make_told(model, canvas, 12, "first_hitting", block_length=3, is_cached=True)
    first = [(2, 10), (2, 8), (2, 8), (2, 10), (2, 5), (2, 5), (2, 10), (1, 2)]
    assert [one[0] for one in widths.calls] == first
    assert (made.num_calls, made.num_rows) == (8, 15)


def frozen(model, first, x_BL, prefix):
    """Layer by layer, places before ``prefix`` are replaced by what they were in ``first``."""
    then, now = [], []

    def keep(_, args, out):
        then.append(out.clone())

    def put_back(_, args, out):
        now.append(1)
        return torch.cat([then[len(now) - 1][:, :prefix], out[:, prefix:]], dim=1)

    for hook, x in ((keep, first), (put_back, x_BL)):
        handles = [block.register_forward_hook(hook) for block in model.blocks]
        with torch.no_grad():
            h_BLD = model.hidden(x)
        for handle in handles:
            handle.remove()
    return torch.nn.functional.linear(h_BLD, model.head.weight, model.head.bias).detach()


def test_the_kept_prefix_is_that_of_the_blocks_first_call():
    """Two layers by hand: later calls with the logits of a model whose prefix stays as it was."""
    model, canvas = awake(2, V).double(), masked(1, 6)
    canvas[:, :2] = torch.tensor([[1, 5]])
    _, network = make_told(model, canvas, 12, "first_hitting", block_length=4, is_cached=True)
    first = network.asked[0][0]
    for x_BL, is_wanted_BL, found in network.asked[1:]:
        torch.testing.assert_close(found, frozen(model, first, x_BL, 2)[is_wanted_BL])


@each
def test_with_a_cache_a_sample_does_not_depend_on_the_batch(rule):
    model, canvas = awake(2, V).double(), masked(1, 10)
    canvas[:, :2] = 3
    options = {"block_length": 3, "is_cached": True, "w": 0.8, "choice": TokenChoice(0.9)}
    whole, _ = make_told(model, canvas.repeat(6, 1), 12, rule, **options)
    parts = [
        make_told(model, canvas.repeat(n, 1), 12, rule, first_sample=first, **options)[0]
        for first, n in ((0, 1), (1, 3), (4, 2))
    ]
    assert torch.cat([part.ids_BL for part in parts]).equal(whole.ids_BL)
    assert len(whole.ids_BL.unique(dim=0)) > 1


def test_a_cache_is_refused_for_models_that_see_the_time_or_have_none():
    timed, calls = awake(1, V, modulation="time"), []

    def model(x_BL, rows_N, **_):
        calls.append(x_BL)
        return torch.zeros(len(rows_N), V)

    with pytest.raises(UserError, match="--cache"):
        make_told(timed, masked(1, 6), 4, block_length=2, is_cached=True)
    with pytest.raises(UserError, match="keys and values"):
        make_told(model, masked(1, 6), 6, block_length=3, is_cached=True)
    assert calls == []
    assert make_told(timed, masked(1, 6), 4, block_length=2)[0].num_calls
