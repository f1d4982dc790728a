from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bellmask.model.attention import attention_mask, rotary_table, rotate
from bellmask.model.modulation import TimeModulation
from bellmask.model.transformer import Block, Denoiser, count_parameters, gelu
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


def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
    """The table for plain heads [B, L, H, 8]: without the axis that tells queries from keys."""
    cos, sin = rotary_table([positions], 8)
    return cos.squeeze(-2), sin.squeeze(-2)


def test_rotation_is_a_rotation_by_position_times_frequency() -> None:
    """Against complex multiplication: pair j turns by position * 10000^(-2j/E)."""
    x = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 3, 1, 40, 7])
    turned = rotate(x, angles(positions))
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


def test_rotation_has_the_gradient_of_the_formula() -> None:
    """The hand-written backward against autograd through torch.cat."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(2, 5, 3, 8, generator=draw, dtype=torch.float64)
    for positions in (torch.tensor([0, 3, 1, 40, 7]), torch.tensor([range(5), range(3, 8)])):
        cos, sin = angles(positions)
        left, right = x[..., :4], x[..., 4:]
        plain = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
        ours = rotate(x, (cos, sin))
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
        (expected,) = torch.autograd.grad((plain * direction).sum(), x)
        (found,) = torch.autograd.grad((ours * direction).sum(), x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    table = tuple(part.double() for part in angles(torch.arange(5)))
    assert torch.autograd.gradcheck(lambda x: rotate(x, table), x)


def test_rotation_of_a_slice_of_a_larger_tensor() -> None:
    """Queries and keys are a view into qkv: strides are not those of a fresh tensor."""
    qkv = torch.randn(2, 5, 9, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    table = angles(torch.arange(5))
    qk = qkv.split([6, 3], dim=2)[0]
    torch.testing.assert_close(rotate(qk, table), rotate(qk.contiguous(), table))
    (found,) = torch.autograd.grad(rotate(qk, table).square().sum(), qkv)
    torch.testing.assert_close(found[:, :, :6], 2 * qk)  # the norm does not change
    assert not found[:, :, 6:].any()


def test_rotation_keeps_norms_and_sees_differences_of_positions_only() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 4, 8, generator=draw, dtype=torch.float64).unbind(0)

    def at(x: Tensor, position: int) -> Tensor:
        return rotate(x, angles(torch.tensor([position])))

    for position in (0, 1, 17, 900):
        torch.testing.assert_close(at(q, position).norm(dim=-1), q.norm(dim=-1))
    for distance in (-3, 0, 5):
        scores = [(at(q, i) * at(k, i + distance)).sum(-1) for i in (3, 4, 20, 333)]
        for score in scores[1:]:
            torch.testing.assert_close(score, scores[0], rtol=1e-3, atol=1e-4)
    near, far = (at(q, 0) * at(k, 1)).sum(-1), (at(q, 0) * at(k, 4)).sum(-1)
    assert (near - far).abs().max() > 0.1


def test_compiled_formulas_are_the_same_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced by torch.compile is written differently; here both run eagerly."""
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    cubic = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    heads = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0))
    table = angles(torch.arange(5))
    eager = rotate(heads, table)
    torch.testing.assert_close(gelu(x), 0.5 * x * (1 + cubic.tanh()), rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(gelu(x), F.gelu(x, approximate="tanh"), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rotate(heads, table), eager)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def plain_turn(x: Tensor) -> Tensor:
    """RoPE at positions 0 .. L-1 by complex numbers, [B, L, H, E]."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex128)
    turned = torch.complex(x[..., :half], x[..., half:]) * turn[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def plain_block(block: Block, x: Tensor, vectors: list[Tensor], mask: Tensor | None) -> Tensor:
    """The block as the DiT paper writes it: nothing is fused, gates multiply the branches."""
    shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = vectors
    batch, length, width = x.shape
    heads = (batch, length, block.num_heads, width // block.num_heads)
    h = plain_norm(x, block.attention_norm.weight) * (1 + scale_a) + shift_a
    q, k, v = ((h @ w.T).view(heads) for w in block.qkv.weight.chunk(3))
    scores = torch.einsum("bqhe,bkhe->bhqk", plain_turn(q), plain_turn(k)) / math.sqrt(heads[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    seen = torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1), v).reshape(x.shape)
    x = x + gate_a * (seen @ block.attention_out.weight.T)
    h = plain_norm(x, block.mlp_norm.weight) * (1 + scale_m) + shift_m
    h = h @ block.mlp_in.weight.T + block.mlp_in.bias
    h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return x + gate_m * (h @ block.mlp_out.weight.T + block.mlp_out.bias)


@pytest.mark.parametrize("is_masked", [False, True], ids=["all seen", "masked"])
@pytest.mark.parametrize("modulation", ["constant", "time"])
def test_a_block_equals_its_plain_formula(modulation: str, is_masked: bool) -> None:
    model = awake(replace(SMALL, modulation=modulation)).double()
    block = model.blocks[0]
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, L, 16, generator=draw, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(3, L, 16, generator=draw, dtype=torch.float64)
    mask = (torch.arange(L) < torch.tensor([[6], [L], [3]]))[:, None, None] if is_masked else None
    condition = torch.randn(3, 128, generator=draw, dtype=torch.float64)
    if modulation == "constant":
        vectors = list(block.modulation.vectors)
    else:
        linear = block.modulation.linear
        table = (condition @ linear.weight.T + linear.bias).view(3, 6, 1, 16)
        vectors = list(table.unbind(1))
    assert all(vector.abs().max() > 0.1 for vector in vectors)
    expected = plain_block(block, x, vectors, mask)
    found = block(x, rotary_table([torch.arange(L)], 8), mask, condition)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    inputs = [x, *block.parameters()]
    names = ["x", *(name for name, _ in block.named_parameters())]
    theirs = torch.autograd.grad((expected * direction).sum(), inputs)
    ours = torch.autograd.grad((found * direction).sum(), inputs)
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    for name, a, e in zip(names, ours, theirs, strict=True):
        assert float((a - e).abs().max()) <= 1e-6 * largest, name


ROWS = {
    "some": [0, 3, 4, 11, 19, 28, 29],
    "one": [17],
    "one sample only": [10, 13, 14],
    "unsorted and twice": [25, 2, 2, 14],
    "all": list(range(3 * L)),
    "none": [],
}


def assert_same_gradients(model: Denoiser, found: Tensor, expected: Tensor, error: float) -> None:
    """To an error relative to the largest gradient of all."""
    parameters = dict(model.named_parameters())
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    ours = torch.autograd.grad(found, parameters.values(), **options)
    theirs = torch.autograd.grad(expected, parameters.values(), **options)
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    for name, a, e in zip(parameters, ours, theirs, strict=True):
        assert float((a - e).abs().max()) <= error * largest, name


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(
    ("modulation", "is_masked"), [("constant", False), ("constant", True), ("time", True)]
)
def test_leaving_rows_out_of_the_last_block_changes_nothing(
    modulation: str, is_masked: bool, num_layers: int, rows: list[int]
) -> None:
    """Hidden states, loss and gradients against all rows, with those picked out afterwards."""
    model = awake(replace(SMALL, modulation=modulation, num_layers=num_layers))
    x, rows_N = tokens(), torch.tensor(rows, dtype=torch.long)
    mask = attention_mask(torch.arange(L) < torch.tensor([[6], [L], [8]])) if is_masked else None
    inputs = {"mask": mask, "t_B": torch.tensor([0.2, 0.5, 0.9])}
    targets_N = (x.flatten()[rows_N] + 1) % V
    weight_N = torch.linspace(0.5, 3, len(rows))
    expected = model.hidden(x, **inputs).flatten(0, 1)[rows_N]
    logits = F.linear(expected, model.head.weight, model.head.bias)
    torch.testing.assert_close(model(x, rows_N, **inputs), logits, rtol=1e-4, atol=1e-4)
    nll_N = F.cross_entropy(logits, targets_N, reduction="none")
    each = model(x, rows_N, targets_N, reduce=False, **inputs)
    torch.testing.assert_close(each, nll_N, rtol=1e-4, atol=1e-4)
    for weight in (None, weight_N):
        naive = (nll_N if weight is None else nll_N * weight).sum()
        ours = model(x, rows_N, targets_N, weight_N=weight, **inputs)
        torch.testing.assert_close(ours, naive, rtol=1e-4, atol=1e-4)
        assert_same_gradients(model, ours, naive, 1e-4)
    model = model.double()  # the head's sums are float32; all before it can be exact
    if model.time_embedding is not None:  # its sinusoids are float32
        model.time_embedding.into.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    whole = model.hidden(x, **inputs)
    assert whole.shape == (3, L, 16)
    found = model.hidden(x, rows_N, **inputs)
    assert found.shape == (len(rows), 16)
    expected = whole.flatten(0, 1)[rows_N]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    direction = torch.randn(len(rows), 16, generator=torch.Generator().manual_seed(0))
    assert_same_gradients(model, (found * direction).sum(), (expected * direction).sum(), 1e-10)


def test_rows_left_out_cost_no_mlp() -> None:
    """The point of it: the last block's MLP sees the wanted rows, the others all rows."""
    model, x = awake(), tokens()
    seen = []
    for block in model.blocks:
        block.mlp_in.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    model.hidden(x, torch.tensor([4, 7, 12]))
    assert seen == [(3, L, 64), (3, 64)]


@pytest.mark.parametrize("is_picked", [False, True], ids=["all rows", "some rows"])
@pytest.mark.parametrize("modulation", ["constant", "time"])
@pytest.mark.parametrize("branch", ["attention", "mlp"])
def test_dropout_keeps_the_mean_and_drops_the_branch_alone(
    branch: str, modulation: str, is_picked: bool
) -> None:
    """One branch's gate is zero: a linear readout has the mean of the model without dropout, and
    the variance b² p / (1 - p) of the branch b, independently for every element.
    """
    rate, num_draws, num_copies = 0.25, 1000, 100
    model = awake(replace(SMALL, num_layers=1, modulation=modulation, dropout=rate))
    silent = 5 if branch == "attention" else 2
    with torch.no_grad():
        modulated = model.blocks[0].modulation
        if modulation == "constant":
            modulated.vectors[silent] = 0
        else:
            modulated.linear.weight.view(6, 16, -1)[silent] = 0
            modulated.linear.bias.view(6, 16)[silent] = 0
    caught: list[Tensor] = []
    model.blocks[0].register_forward_hook(lambda module, args, out: caught.append(out.detach()))
    x, t = tokens(2), torch.tensor([0.3, 0.6])
    rows = torch.tensor([1, 4, 15]) if is_picked else None
    copies = (torch.arange(num_copies)[:, None] * x.numel() + rows).flatten() if is_picked else None
    with torch.no_grad():
        model.hidden(x, rows, t_B=t)
        model.train()
        for seed in range(num_draws // num_copies):
            torch.manual_seed(seed)
            model.hidden(x.repeat(num_copies, 1), copies, t_B=t.repeat(num_copies))
        embedded = model.embedding(x)
    plain = caught[0].double()
    drawn = torch.stack(caught[1:]).double().view(num_draws, *plain.shape)
    branch_values = plain - (embedded if rows is None else embedded.flatten(0, 1)[rows])
    variance = branch_values.square() * rate / (1 - rate)
    error = (variance / num_draws).sqrt()
    assert ((drawn.mean(0) - plain).abs() <= 5 * error + 1e-5).all()
    large = branch_values.abs() > 0.1
    assert large.double().mean() > 0.5
    torch.testing.assert_close(
        drawn.var(0)[large] / variance[large],
        torch.ones_like(variance[large]),
        rtol=0.3,
        atol=0,
    )
    readout = torch.randn(plain.shape, generator=torch.Generator().manual_seed(5)).double()
    sums = (drawn * readout).flatten(1).sum(1)
    spread = float((variance * readout.square()).sum())
    assert abs(sums.mean() - (plain * readout).sum()) < 5 * math.sqrt(spread / num_draws)
    assert abs(sums.var() / spread - 1) < 5 * math.sqrt(2 / num_draws), "elements are independent"


def test_dropout_is_decided_by_the_seed_and_absent_in_evaluation() -> None:
    model, x = awake(replace(SMALL, dropout=0.5)), tokens()
    plain = awake().hidden(x)
    torch.testing.assert_close(model.hidden(x), plain, rtol=0, atol=0)
    model.train()

    def hidden(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model.hidden(x)

    assert torch.equal(hidden(1), hidden(1))
    assert (hidden(1) - hidden(2)).abs().max() > 1e-3
    assert (hidden(1) - plain).abs().max() > 1e-3
    silent = awake().train()
    torch.testing.assert_close(silent.hidden(x), plain, rtol=0, atol=0)


def test_every_branch_of_every_block_has_a_dropout_of_its_own() -> None:
    model, x = awake(replace(SMALL, dropout=0.5)).train(), tokens(20)
    masks: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: masks.extend(args[5]))
    torch.manual_seed(0)
    model.hidden(x)
    assert [mask.shape for mask in masks] == [(20, L, 16)] * 4
    for number, mask in enumerate(masks):
        for other in masks[:number]:
            agreement = (mask == other).double().mean()
            assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(mask.numel())


def test_dropped_elements_have_no_gradient() -> None:
    block = awake(replace(SMALL, dropout=0.5)).blocks[0]
    x = torch.randn(2, L, 16, generator=torch.Generator().manual_seed(0))
    is_kept = torch.zeros(2, L, 16, dtype=torch.bool)
    is_kept[..., 3] = True
    out = block(x, rotary_table([torch.arange(L)], 8), None, None, None, [None, is_kept])
    (gradient,) = torch.autograd.grad(out.sum(), block.mlp_out.weight)
    assert gradient[3].abs().min() > 0
    assert not gradient[torch.arange(16) != 3].any()


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
