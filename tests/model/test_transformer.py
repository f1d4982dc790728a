from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bellmask.model.attention import attention_mask, rotary_table, rotate
from bellmask.model.transformer import Denoiser, TimeModulation, count_parameters
from bellmask.options import ModelOptions

SMALL = ModelOptions(num_layers=2, width=16, num_heads=2, dropout=0.0)
V, L = 7, 10


def awake(options: ModelOptions = SMALL, *, is_causal: bool = False) -> Denoiser:
    """A model whose zero-initialised parts are random, so that everything matters."""
    torch.manual_seed(3)
    model = Denoiser(options, V, is_causal=is_causal).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def tokens(batch: int = 3, length: int = L) -> Tensor:
    return torch.randint(V + 1, (batch, length), generator=torch.Generator().manual_seed(1))


def all_rows(x: Tensor) -> Tensor:
    return torch.arange(x.numel())


def test_loss_and_gradients_equal_a_naive_full_logits_implementation() -> None:
    model, x = awake(), tokens()
    x0 = x.clamp(max=V - 1)
    is_masked = x == V
    is_masked[0, :4] = True
    weight_B = torch.tensor([0.5, 2.0, 3.0])
    rows = is_masked.flatten().nonzero().squeeze(1)
    ours = model(x, rows, x0.flatten()[rows], weight_N=weight_B[rows // L])
    found = torch.autograd.grad(ours, list(model.parameters()))
    logits = F.linear(model.hidden(x), model.head.weight, model.head.bias)
    log_p = logits.log_softmax(-1).gather(-1, x0[..., None]).squeeze(-1)
    naive = -(log_p * is_masked * weight_B[:, None]).sum()
    expected = torch.autograd.grad(naive, list(model.parameters()))
    torch.testing.assert_close(ours, naive, rtol=1e-5, atol=1e-5)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


def test_at_first_every_block_is_the_identity_and_every_prediction_uniform() -> None:
    model, x = Denoiser(SMALL, V).eval(), tokens()
    logits = model(x, all_rows(x))
    assert not logits.any()
    embedded = F.layer_norm(model.embedding(x), (16,))
    torch.testing.assert_close(model.hidden(x), embedded)


def test_the_head_has_no_logit_for_the_mask() -> None:
    model, x = awake(), tokens()
    assert model.mask_id == V
    assert model(x, all_rows(x)).shape == (x.numel(), V)
    assert model.embedding.weight.shape == (V + 1, 16)


def test_a_bidirectional_model_sees_both_sides() -> None:
    model, x = awake(), tokens()
    changed = x.clone()
    changed[:, -1] = (x[:, -1] + 1) % V
    assert (model.hidden(changed)[:, 0] - model.hidden(x)[:, 0]).abs().min(dim=1).values.all()


def test_a_future_token_never_changes_a_causal_prediction() -> None:
    model, x = awake(is_causal=True), tokens()
    for i in range(1, L):
        changed = x.clone()
        changed[:, i] = (x[:, i] + 1) % V
        same = model.hidden(changed)[:, :i] - model.hidden(x)[:, :i]
        assert same.abs().max() < 1e-5
        assert (model.hidden(changed)[:, i] - model.hidden(x)[:, i]).abs().max() > 1e-3


def test_causal_with_padding_equals_causal_without() -> None:
    model, x = awake(is_causal=True), tokens()
    is_real = torch.arange(L) < torch.tensor([[6], [6], [6]])
    padded = model.hidden(x, mask=attention_mask(is_real))[:, :6]
    torch.testing.assert_close(padded, model.hidden(x[:, :6]), rtol=1e-4, atol=1e-5)


def test_pads_change_nothing() -> None:
    model, x = awake(), tokens()
    is_real = torch.arange(L) < torch.tensor([[6], [L], [3]])
    mask = attention_mask(is_real)
    other = torch.where(is_real, x, (x + 3) % V)
    a, b = model.hidden(x, mask=mask), model.hidden(other, mask=mask)
    torch.testing.assert_close(a[is_real], b[is_real], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a[0, :6], model.hidden(x[:1, :6])[0], rtol=1e-4, atol=1e-5)


def test_document_masks_keep_attention_inside_documents() -> None:
    model, x = awake(), tokens(1)
    document = torch.tensor([[0] * 4 + [1] * 6])
    joint = model.hidden(x, mask=attention_mask(document_BL=document))
    torch.testing.assert_close(joint[:, :4], model.hidden(x[:, :4]), rtol=1e-4, atol=1e-5)
    # RoPE sees differences only, so the second document may keep its positions
    torch.testing.assert_close(joint[:, 4:], model.hidden(x[:, 4:]), rtol=1e-4, atol=1e-5)


def test_document_and_padding_masks_together_leave_no_empty_softmax() -> None:
    model, x = awake(), tokens(1)
    is_real = torch.arange(L)[None] < 7
    document = torch.tensor([[0] * 3 + [1] * 4 + [2] * 3])
    hidden = model.hidden(x, mask=attention_mask(is_real, document))
    assert torch.isfinite(hidden).all()
    torch.testing.assert_close(hidden[:, 3:7], model.hidden(x[:, 3:7]), rtol=1e-4, atol=1e-5)


def test_permuting_tokens_with_their_positions_permutes_the_output() -> None:
    model, x = awake(), tokens()
    order = torch.randperm(L, generator=torch.Generator().manual_seed(0))
    moved = model.hidden(x[:, order], positions=order)
    torch.testing.assert_close(moved, model.hidden(x)[:, order], rtol=1e-4, atol=1e-5)
    per_row = model.hidden(x[:, order], positions=order.expand(3, L))
    torch.testing.assert_close(per_row, moved, rtol=1e-5, atol=1e-6)


def test_rotation_is_a_rotation_by_position_times_frequency() -> None:
    """Against complex multiplication: pair j turns by position * 10000^(-2j/E)."""
    x = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 3, 1, 40, 7])
    turned = rotate(x, rotary_table(positions, 8))
    frequency = 10000.0 ** (-torch.arange(4) / 4)
    turn = torch.polar(torch.ones(5, 4), positions[:, None] * frequency)[None, :, None]
    expected = torch.complex(x[..., :4], x[..., 4:]) * turn
    torch.testing.assert_close(turned[..., :4], expected.real, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(turned[..., 4:], expected.imag, rtol=1e-5, atol=1e-5)


def test_constant_modulation_is_what_time_modulation_does_at_one_time() -> None:
    """The same function class as AdaLN without time input (design: six vectors per block)."""
    timed, x = awake(replace(SMALL, modulation="time")), tokens()
    constant = awake()
    t = torch.full((3,), 0.3)
    assert timed.time_embedding is not None
    condition = timed.time_embedding(t[:1])
    wanted = {}
    for name, value in timed.state_dict().items():
        if "modulation" not in name and "time_embedding" not in name:
            wanted[name] = value
    for name, module in timed.named_modules():
        if isinstance(module, TimeModulation):
            wanted[f"{name}.vectors"] = torch.cat([v[0] for v in module(condition)])
    constant.load_state_dict(wanted)
    torch.testing.assert_close(constant.hidden(x), timed.hidden(x, t_B=t), rtol=1e-4, atol=1e-5)


def test_time_conditioning_matters_and_is_required() -> None:
    model, x = awake(replace(SMALL, modulation="time")), tokens()
    a, b = (model.hidden(x, t_B=torch.full((3,), t)) for t in (0.2, 0.21))
    assert (a - b).abs().max() > 1e-4
    with pytest.raises(ValueError, match="needs the times"):
        model.hidden(x)


def test_dropout_acts_in_training_only() -> None:
    model, x = awake(replace(SMALL, dropout=0.5)), tokens()
    torch.testing.assert_close(model.hidden(x), model.hidden(x))
    model.train()
    assert (model.hidden(x) - model.hidden(x)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("modulation", "num_tokens", "millions"),
    [("time", 30521, 139), ("time", 50258, 170), ("constant", 30521, 132)],
)
def test_parameter_counts_of_the_papers_sizes(
    modulation: str, num_tokens: int, millions: int
) -> None:
    """mdlm small: about 139M for BERT's vocabulary and 170M for GPT-2's."""
    options = replace(ModelOptions(), modulation=modulation)
    with torch.device("meta"):
        count = count_parameters(Denoiser(options, num_tokens))
    assert round(count / 1e6) == millions
    width, layers = 768, 12
    block = 12 * width**2 + 5 * width + 2 * width  # matrices, MLP biases, two norms
    expected = (2 * num_tokens + 1) * width + num_tokens + layers * block + width
    if modulation == "time":
        expected += layers * 6 * width * 129 + 2 * width * 129 + (256 * 128 + 128) + 128 * 129
    else:
        expected += layers * 6 * width + 2 * width
    assert count == expected
