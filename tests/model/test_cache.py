"""Calls with kept keys and values against one pass over the whole row (in float64)."""

import pytest
import torch
from sampling_tools import awake as awake_in_float32
from sampling_tools import seeded

from bellmask.diffusion.frameworks import any_order, arm, sigma_arm
from bellmask.model.attention import attention_mask

V, L, B = 7, 8, 3
FRAMEWORKS = {
    "arm": arm(L),
    "sigma_arm": sigma_arm(torch.tensor([3, 1, 5, 0, 7, 2, 6, 4])),
    "aoarm": any_order(),
}
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
X_BL = torch.randint(V, (B, L), generator=seeded(1))


def awake(num_layers, **options):
    return awake_in_float32(num_layers, V, **options).double()


@pytest.mark.parametrize("widths", [[1] * L, [2, 4, 2]])
@pytest.mark.parametrize(
    ("encoding", "num_layers"), [("source", 1), ("literal", 2), ("crossed", 3)]
)
@pytest.mark.parametrize("name", FRAMEWORKS)
@torch.no_grad()
def test_slot_by_slot_a_causal_model_says_what_it_says_at_once(name, encoding, num_layers, widths):
    model = awake(num_layers, is_causal=True, encoding=encoding)
    u_BL = torch.rand(B, L, generator=seeded(2), dtype=torch.float64)
    problem = FRAMEWORKS[name].every_context(X_BL, u_BL, mask_id=V)
    held, sought = (one.expand(B, L) for one in (problem.positions, problem.target_positions))

    def logits(part, **more):
        x_BL, places = problem.x_BL[:, part], {"positions": held[:, part]}
        places["target_positions"] = sought[:, part]
        return model(x_BL, torch.arange(x_BL.numel()), **places, **more).view(*x_BL.shape, V)

    whole, cache, start = logits(slice(0, L)), model.new_cache(), 0
    for width in widths:
        part = slice(start, start + width)
        torch.testing.assert_close(logits(part, cache=cache), whole[:, part], **CLOSE)
        start += width
        assert [len(cache.layers), *{k.shape[1] for k, _ in cache.layers}] == [num_layers, start]


# a prefix of a bidirectional model


@pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("prefix", [1, 3, 7])
@torch.no_grad()
def test_a_kept_prefix_is_exact_for_one_layer(prefix, is_padded):
    model, rows = awake(1), torch.arange(B * L)
    mask = attention_mask(torch.arange(L) < torch.tensor([[8], [8], [7]])) if is_padded else None
    cache = model.new_cache(prefix)
    torch.testing.assert_close(
        model(X_BL, rows, mask=mask, cache=cache), model(X_BL, rows, mask=mask), **CLOSE
    )
    for seed in (2, 3):
        late = torch.randint(V + 1, (B, L - prefix), generator=seeded(seed))
        places = {"positions": torch.arange(prefix, L), "mask": mask}
        found = model(late, torch.arange(late.numel()), cache=cache, **places)
        row = torch.cat([X_BL[:, :prefix], late], 1)
        expected = model(row, rows, mask=mask).view(B, L, V)[:, prefix:]
        torch.testing.assert_close(found.view_as(expected), expected, **CLOSE)
        assert [k.shape[1] for k, _ in cache.layers] == [prefix]
