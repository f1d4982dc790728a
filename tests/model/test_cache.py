"""Calls with kept keys and values against one pass over the whole row."""

import pytest
import torch
from torch import Tensor

from bellmask.diffusion.orders import any_order, arm, sigma_arm
from bellmask.generate.sequential import generate_in_order
from bellmask.model.attention import attend, attention_mask
from bellmask.model.cache import KeyValues
from bellmask.model.transformer import Denoiser
from bellmask.options import ModelOptions

V, L, B = 7, 8, 3
FRAMEWORKS = {
    "arm": arm(L),
    "sigma_arm": sigma_arm(torch.tensor([3, 1, 5, 0, 7, 2, 6, 4])),
    "aoarm": any_order(),
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def awake(num_layers: int, *, is_causal: bool, encoding: str = "source", **more) -> Denoiser:
    options = ModelOptions(num_layers=num_layers, width=16, num_heads=2, dropout=0.0, **more)
    model, draw = Denoiser(options, V, is_causal=is_causal, encoding=encoding), seeded(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.4)
    return model.eval()


def last_rows(batch: int, width: int) -> Tensor:
    return torch.arange(batch) * width + width - 1


@pytest.mark.parametrize("widths", [[1] * L, [3, 1, 1, 1, 1, 1], [2, 4, 2]], ids=str)
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("encoding", ["source", "literal", "crossed"])
@pytest.mark.parametrize("name", FRAMEWORKS)
@torch.no_grad()
def test_slot_by_slot_a_causal_model_says_what_it_says_at_once(name, encoding, num_layers, widths):
    model = awake(num_layers, is_causal=True, encoding=encoding)
    x0_BL = torch.randint(V, (B, L), generator=seeded(1))
    u_BL = torch.rand(B, L, generator=seeded(2), dtype=torch.float64)
    problem = FRAMEWORKS[name].every_context(x0_BL, u_BL, mask_id=V)
    held, sought = (one.expand(B, L) for one in (problem.positions, problem.target_positions))
    whole = model(problem.x_BL, torch.arange(B * L), positions=held, target_positions=sought).view(
        B, L, V
    )
    cache, start = model.new_cache(), 0
    for width in widths:
        part = slice(start, start + width)
        found = model(
            problem.x_BL[:, part],
            torch.arange(B * width),
            positions=held[:, part],
            target_positions=sought[:, part],
            cache=cache,
        )
        torch.testing.assert_close(found.view(B, width, V), whole[:, part], rtol=1e-5, atol=1e-5)
        start += width
        assert [len(cache.layers), *{k.shape[1] for k, _ in cache.layers}] == [num_layers, start]


@torch.no_grad()
def test_the_kept_part_matters():
    """Without the cache, or with another row's, the next slot says something else."""
    model = awake(2, is_causal=True)
    x_BL = torch.randint(V, (B, L), generator=seeded(1))
    cache = model.new_cache()
    model(x_BL[:, :5], last_rows(B, 5), cache=cache)
    after = {"positions": torch.tensor([5])}
    mixed = cache.select(torch.tensor([1, 2, 0]))
    right = model(x_BL[:, 5:6], last_rows(B, 1), cache=cache.select(torch.arange(B)), **after)
    wrong = model(x_BL[:, 5:6], last_rows(B, 1), cache=mixed, **after)
    bare = model(x_BL[:, 5:6], last_rows(B, 1), **after)
    expected = model(x_BL[:, :6], last_rows(B, 6))
    torch.testing.assert_close(right, expected, rtol=1e-5, atol=1e-5)
    for other in (wrong, bare):
        assert (other - expected).abs().amax(1).min() > 1e-3


class Forgetful:
    """A model without its cache: it gets every prefix anew. Notes how much it gets."""

    def __init__(self, model: Denoiser):
        self.model, self.widths = model, []

    def __call__(self, x_BL, *args, **more):
        self.widths.append(x_BL.shape[1])
        return self.model(x_BL, *args, **more)


class Remembering(Forgetful):
    def new_cache(self):
        return self.model.new_cache()


@pytest.mark.parametrize("encoding", ["source", "literal", "crossed"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_model_that_keeps_keys_and_values_makes_the_same_rows(name, encoding):
    model, framework = awake(2, is_causal=True, encoding=encoding), FRAMEWORKS[name]
    first = {"arm": [0, 1], "sigma_arm": [3, 1], "aoarm": [2, 6]}[name]
    for given in ([], first):
        canvas = torch.full((6, L), V)
        canvas[:, given] = 5
        whole, kept = Forgetful(model), Remembering(model)
        expected, found, direct = (
            generate_in_order(one, canvas, framework, mask_id=V, seed=2)
            for one in (whole, kept, model)
        )
        assert found.ids_BL.equal(expected.ids_BL)
        assert direct.ids_BL.equal(expected.ids_BL)
        assert whole.widths == list(range(len(given) + 1, L + 1))
        assert kept.widths == [len(given) + 1] + [1] * (L - 1 - len(given))
        assert (found.num_calls, found.num_rows) == (len(kept.widths), 6 * len(kept.widths))


# a prefix of a bidirectional model


@pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("prefix", [1, 3, 7])
@torch.no_grad()
def test_a_kept_prefix_is_exact_for_one_layer(prefix, is_padded):
    model = awake(1, is_causal=False)
    first = torch.randint(V + 1, (B, L), generator=seeded(1))
    mask = None
    if is_padded:
        mask = attention_mask(torch.arange(L) < torch.tensor([[8], [8], [7]]))
    cache = model.new_cache(prefix)
    rows = torch.arange(B * L)
    torch.testing.assert_close(
        model(first, rows, mask=mask, cache=cache), model(first, rows, mask=mask)
    )
    for seed in (2, 3):
        later = torch.cat(
            [first[:, :prefix], torch.randint(V + 1, (B, L - prefix), generator=seeded(seed))], 1
        )
        found = model(
            later[:, prefix:],
            torch.arange(B * (L - prefix)),
            positions=torch.arange(prefix, L),
            mask=mask,
            cache=cache,
        ).view(B, L - prefix, V)
        expected = model(later, rows, mask=mask).view(B, L, V)[:, prefix:]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert [k.shape[1] for k, _ in cache.layers] == [prefix]


@torch.no_grad()
def test_a_kept_prefix_is_close_for_two_layers_and_exact_while_nothing_changes():
    model = awake(2, is_causal=False)
    first = torch.randint(V + 1, (B, L), generator=seeded(1))
    cache = model.new_cache(4)
    model(first, last_rows(B, L), cache=cache)
    rest = {"positions": torch.arange(4, L), "cache": cache}
    same = model(first[:, 4:], last_rows(B, 4), **rest)
    torch.testing.assert_close(same, model(first, last_rows(B, L)), rtol=1e-5, atol=1e-5)
    changed = first.clone()
    changed[:, 5] = (first[:, 5] + 1) % V
    found = model(changed[:, 4:], last_rows(B, 4), **rest)
    assert (found - model(changed, last_rows(B, L))).abs().max() > 1e-3


# the container


def pair(seed: int, length: int, batch: int = B) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, batch, length, 2, 4, generator=seeded(seed)).unbind(0)
    return k, v


def test_all_is_kept_or_only_a_prefix_of_the_first_call():
    for keep, lengths in ((None, [3, 5, 6]), (2, [3, 4, 3])):
        cache, seen = KeyValues(keep), []
        for seed, length in enumerate((3, 2, 1)):
            for layer in range(2):
                own = pair(10 * seed + layer, length)
                whole = cache.extend(layer, *own)
                assert whole[0].shape[1] == lengths[seed]
                for got, mine in zip(whole, own, strict=True):
                    assert got[:, -length:].equal(mine)
                seen.append(whole)
        for layer in range(2):
            start = pair(layer, 3)
            kept = 3 if keep is None else keep
            for got, mine in zip(seen[4 + layer], start, strict=True):
                assert got[:, :kept].equal(mine[:, :kept])


def test_rows_are_picked_and_the_original_stays():
    cache = KeyValues(2)
    own = pair(1, 4)
    cache.extend(0, *own)
    some = cache.select(torch.tensor([2, 0]))
    assert some.keep == 2
    assert some.layers[0][0].equal(own[0][[2, 0], :2])
    assert some.layers[0][1].equal(own[1][[2, 0], :2])
    grown = some.extend(0, *pair(2, 1, batch=2))
    assert grown[0].shape[1] == 3
    assert cache.layers[0][0].equal(own[0][:, :2])


@pytest.mark.parametrize("is_padded", [False, True])
def test_late_queries_of_more_keys_see_what_they_would_in_a_whole_row(is_padded):
    q, k = pair(1, 6)
    v, _ = pair(2, 6)
    mask = attention_mask(torch.arange(6) < torch.tensor([[6], [4], [5]])) if is_padded else None
    whole = attend(q, k, v, mask, True)
    for start in range(6):
        torch.testing.assert_close(attend(q[:, start:], k, v, mask, True), whole[:, start:])
    assert not whole.isnan().any()
