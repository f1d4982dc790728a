"""A causal LM as a denoiser, against the causal LM itself and dense references."""

import pytest
import torch
import torch.nn.functional as F
from pretrained_tools import (
    WINDOWS,
    V,
    each_kind,
    eager_states,
    make_config,
    make_denoiser,
    make_lm,
    token_rows,
)
from transformers import LlamaForCausalLM

from bellmask.model.pretrained import PretrainedDenoiser, make_language_model, probe
from bellmask.utils.errors import UserError

L = 12


PAST = torch.ones(L, L, dtype=torch.bool).tril()


@each_kind
@torch.no_grad()
def test_one_mask_and_causal_attention_give_the_causal_lms_own_probability(kind):
    model = make_denoiser(kind, is_causal=True)
    (x_L,) = token_rows(1, L)
    log_p = model.language_model(input_ids=x_L[None]).logits[0].log_softmax(-1)
    expected = -log_p[torch.arange(L - 1), x_L[1:]]
    is_masked = torch.eye(L, dtype=torch.bool)[1:]  # row k has the mask at k + 1 and nowhere else
    x_BL, rows = torch.where(is_masked, V, x_L), is_masked.flatten().nonzero().squeeze(1)
    found = model(x_BL, rows, x_L[1:], reduce=False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@each_kind
@torch.no_grad()
def test_states_are_those_of_a_dense_reference(kind):
    """Open, causal and between (annealing), with and without padding."""
    model = make_denoiser(kind)
    is_masked = torch.rand(3, L, generator=torch.Generator().manual_seed(1)) < 0.4
    x_BL = torch.where(is_masked, V, token_rows(3, L))
    u_LL = torch.rand(L, L, generator=torch.Generator().manual_seed(2))
    is_real = (torch.arange(L) < torch.tensor([[5], [L], [8]]))[:, None, None]
    everywhere, half_open = torch.ones_like(PAST)[None, None], (PAST | (u_LL < 0.3))[None, None]
    for is_causal, mask, is_seen in (
        (False, None, everywhere),
        (False, half_open, half_open),
        (False, is_real, everywhere & is_real),
        (True, None, PAST[None, None]),
        (True, is_real, PAST & is_real),
    ):
        model.is_causal = is_causal
        expected = eager_states(model, x_BL, is_seen)
        torch.testing.assert_close(model.hidden(x_BL, mask=mask), expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("kind", WINDOWS)
def test_windows_are_open_too(kind):
    model, x_BL = make_denoiser(kind, **WINDOWS[kind]), token_rows(2, 40)
    assert model.has_windows
    with torch.no_grad():
        expected = eager_states(model, x_BL, torch.ones(1, 1, 40, 40, dtype=torch.bool))
        torch.testing.assert_close(model.hidden(x_BL), expected, rtol=0, atol=3e-5)
        narrow = model.language_model.base_model(input_ids=x_BL, is_causal=False, use_cache=False)
    assert (narrow.last_hidden_state - expected).abs().max() > 0.1, "no window was there to open"


@each_kind
def test_gradients_are_those_of_plain_cross_entropy(kind):
    """Weighted rows through the head's own backward, against autograd over all logits."""
    model, x0_BL = make_denoiser(kind), token_rows(2, L)
    is_masked = torch.rand(2, L, generator=torch.Generator().manual_seed(5)) < 0.5
    is_masked[:, 0] = False
    x_BL, rows = torch.where(is_masked, V, x0_BL), is_masked.flatten().nonzero().squeeze(1)
    weight = torch.linspace(0.5, 2, len(rows))
    loss = model(x_BL, rows, x0_BL.flatten()[rows], weight_N=weight)
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    inner = model.language_model
    table = torch.cat([inner.get_input_embeddings().weight, model.mask_row[None]])
    logits = inner(inputs_embeds=table[x_BL], is_causal=False, use_cache=False).logits
    ce = F.cross_entropy(logits[:, :-1].flatten(0, 1), x0_BL[:, 1:].flatten(), reduction="none")
    plain = (ce[is_masked[:, 1:].flatten()] * weight).sum()
    plain.backward()
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    assert found.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-4)
    assert found["mask_row"].abs().max() > 0.01


def test_neither_the_mask_nor_an_added_pad_has_a_logit():
    inner = make_lm(make_config("llama"))
    model, x_BL, pad = PretrainedDenoiser(inner, V + 1), token_rows(1, L), V
    assert (model.num_logits, model.mask_id, len(model.block_modules())) == (V, V + 1, 2)
    assert model(x_BL, torch.arange(1, L)).shape == (L - 1, V)
    expected = inner.get_input_embeddings().weight.mean(0)
    torch.testing.assert_close(model.mask_row, expected, rtol=0, atol=1e-6)
    padded, is_real = x_BL.clone(), (torch.arange(L) < 8)[None, None, None]
    padded[0, 8:] = pad
    with torch.no_grad():
        a, b = model.hidden(padded, mask=is_real), model.hidden(x_BL, mask=is_real)
    torch.testing.assert_close(a[0, :8], b[0, :8], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "dtype"), [("gpt2", torch.bfloat16), ("llama", torch.float32)])
def test_blocks_are_added_up_in_float32_where_weights_are_shorter(kind, dtype):
    """As with weights that FSDP gathers in bfloat16. A CPU's LayerNorm cannot."""
    model, caught = make_denoiser(kind).bfloat16(), []
    for block in model.block_modules():
        block.register_forward_hook(lambda _, given, made: caught.append(given[0].dtype))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model.hidden(token_rows(1, 4))
    assert caught == [dtype] * 2


def test_no_square_mask_at_full_attention():
    """What the base model is given, without and with padding."""
    model, x_BL, seen = make_denoiser("llama"), token_rows(2, L), []
    base = model.language_model.base_model
    base.register_forward_pre_hook(lambda _, __, given: seen.append(given), with_kwargs=True)
    for mask in (None, torch.ones(2, 1, 1, L, dtype=torch.bool)):
        model(x_BL, torch.tensor([3]), x_BL[0, 3:4], mask=mask)
    assert seen[0]["is_causal"] is False
    assert seen[0].get("attention_mask") is None
    assert seen[1]["attention_mask"].shape == (2, 1, 1, L)


# architectures that cannot be denoisers


class Capped(LlamaForCausalLM):
    """Bends its logits after the head, so gently that small ones hardly differ."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = 30 * torch.tanh(out.logits / 30)
        return out


class Closed(LlamaForCausalLM):
    """Stays causal whatever it is asked."""

    @property
    def base_model(self):
        return lambda is_causal=True, **kwargs: self.model(**kwargs)


@pytest.mark.parametrize(
    ("made", "attention", "why"),
    [
        (Capped, "sdpa", "linear map"),
        (Closed, "sdpa", "stays causal"),
        (LlamaForCausalLM, "eager", "eager"),  # it would add a boolean mask as 0 and 1
    ],
)
def test_architectures_that_would_be_wrong_are_refused(made, attention, why):
    model = made._from_config(make_config("llama"), attn_implementation=attention)
    with pytest.raises(UserError, match=f"odd.*{why}"):
        probe(model, "odd")
    probe(make_lm(make_config("llama")), "plain")


@pytest.mark.parametrize(
    ("kind", "values", "why"),
    [
        ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 16}, "masked model"),
        ("bloom", {"n_layer": 2, "n_head": 2}, "BloomFor"),
        ("bert", {"intermediate_size": 32}, "sees later tokens"),
        ("no such thing", {}, "Unrecognized"),
    ],
)
def test_unknown_and_unfit_architectures_give_one_clear_error(kind, values, why):
    small = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(UserError, match=f"^{kind}.*{why}"):
        make_language_model({"model_type": kind, **small, **values}, 0.0)
