"""A cache of what precedes the block.

Networks are float64: with and without a cache are two computations of the same rows.
"""

import pytest
import torch
from sampling_tools import MASK, V, awake, each, make_told, masked

from bellmask.diffusion.schedules import Cosine
from bellmask.generate.sampler import SamplingDenoiser, uniform_grid
from bellmask.utils.errors import UserError

GRID = uniform_grid(12)


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
    plain, straight = make_told(model, canvas, GRID, rule, **options)
    widths = Widths(model)
    kept, cached = make_told(model, canvas, GRID, rule, is_cached=True, **options)
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
    _, network = make_told(
        model, canvas, None, "first_hitting", block_length=3, is_cached=True, w=w
    )
    calls, copies = list(widths.calls), 2 if w else 1
    for x_BL, is_wanted_BL, found in network.asked:
        plain = SamplingDenoiser(model, MASK, guidance=w)
        plain.begin(canvas)
        with torch.no_grad():
            expected = plain.read(x_BL, is_wanted_BL, torch.zeros(4), lambda logits: logits)
        differ.append((found - expected).abs().max().item())
    # blocks begin at 3, 6, 9: all 12 tokens once, then those from the block's start on
    expected = [(4 * copies, width) for width in (12, 9, 9, 12, 6, 6, 12, 3, 3)]
    assert calls == [[one] * 2 for one in expected]
    assert max(differ[0::3]) < 1e-9
    assert min(differ[1::3] + differ[2::3]) > 1e-3


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
    _, network = make_told(model, canvas, None, "first_hitting", block_length=4, is_cached=True)
    first = network.asked[0][0]
    for x_BL, is_wanted_BL, found in network.asked[1:]:
        torch.testing.assert_close(found, frozen(model, first, x_BL, 2)[is_wanted_BL])


def test_a_cache_is_refused_for_models_that_see_the_time_or_have_none():
    timed = awake(1, V, modulation="time")
    for model, names in ((timed, "--cache"), (lambda *_, **__: None, "keys and values")):
        with pytest.raises(UserError, match=names):
            make_told(model, masked(1, 6), GRID, block_length=2, is_cached=True)
    assert make_told(timed, masked(1, 6), GRID, block_length=2)[0].num_calls
