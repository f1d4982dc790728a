"""The built-in network against its formula written out, naive losses, and coins for dropout.

Calls with cached keys and values against one pass over the whole row.
"""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from sampling_tools import awake, seeded
from torch.nn.attention.flex_attention import create_block_mask

from bellmask.config.options import ModelOptions
from bellmask.diffusion.frameworks import any_order, arm, sigma_arm
from bellmask.model import dit
from bellmask.model.dit import (
    LEVELS,
    TimeEmbedding,
    dropout_scale,
    gelu,
    rotary_table,
    rotate,
    same_document,
)
from bellmask.model.transformer import (
    AttentionRules,
    Denoiser,
    attention_mask,
    count_parameters,
    document_ids,
    draw_kept,
)
from bellmask.train.parallel import recompute_blocks

SMALL = ModelOptions(num_layers=2, width=16, num_heads=2, dropout=0.0)
V, L = 7, 10
CPU = torch.device("cpu")
STD = {"constant": 0.4, "time": 0.15}
"""Of the weights. With time, 0.4 makes losses of 250 nats, which float32 has to four digits."""


def tokens(batch=3, length=L):
    return torch.randint(V + 1, (batch, length), generator=seeded(1))


def assert_same_gradients(model, found, expected, error):
    """To an error relative to the largest gradient of all."""
    parameters = dict(model.named_parameters())
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    ours = torch.autograd.grad(found, parameters.values(), **options)
    theirs = torch.autograd.grad(expected, parameters.values(), **options)
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    for name, a, e in zip(parameters, ours, theirs, strict=True):
        assert float((a - e).abs().max()) <= error * largest, name


# the formula


def plain_norm(x, weight, shift, scale):
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight * (1 + scale) + shift


def plain_turn(x, positions):
    """RoPE by complex numbers; x [B, L, H, E], positions [L] or [B, L]."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None].float() * 10000.0 ** (-torch.arange(half) / half)
    turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex128)
    y = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([y.real, y.imag], dim=-1)


def plain_states(model, x_BL, is_seen, source, target, encoding, condition):
    """As the DiT paper writes it: nothing is fused, gates multiply the branches."""

    def vectors(modulation):
        if condition is None:
            return modulation.vectors
        table = condition @ modulation.linear.weight.T + modulation.linear.bias
        return table.view(len(x_BL), -1, 1, 16).unbind(1)

    h = embedded = model.embedding.weight[x_BL]
    if model.local_conv is not None:
        for k, tap in enumerate(model.local_conv.weight[:, 0].T):
            for i, j in ((i, i + k - model.local_conv.num_left) for i in range(L)):
                if 0 <= j < L:
                    sees = is_seen.expand(len(x_BL), 1, L, L)[:, 0, i, j, None]
                    h = h.index_add(1, torch.tensor([i]), (tap * embedded[:, j] * sees)[:, None])
    for number, block in enumerate(model.blocks):
        is_late = number >= len(model.blocks) // 2
        query_at = target if is_late and encoding != "source" else source
        key_at = target if is_late and encoding == "literal" else source
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = vectors(block.modulation)
        z = plain_norm(h, block.attention_norm.weight, shift_a, scale_a)
        q, k, v = ((z @ w.T).view(*x_BL.shape, 2, 8) for w in block.qkv.weight.chunk(3))
        score = torch.einsum("bqhe,bkhe->bhqk", plain_turn(q, query_at), plain_turn(k, key_at))
        share = (score / math.sqrt(8)).masked_fill(~is_seen, -math.inf).softmax(-1)
        seen = torch.einsum("bhqk,bkhe->bqhe", share, v).flatten(2)
        h = h + gate_a * (seen @ block.attention_out.weight.T)
        z = plain_norm(h, block.mlp_norm.weight, shift_m, scale_m)
        z = z @ block.mlp_in.weight.T + block.mlp_in.bias
        z = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        h = h + gate_m * (z @ block.mlp_out.weight.T + block.mlp_out.bias)
    return plain_norm(h, model.final_norm.weight, *vectors(model.final_modulation))


@pytest.mark.parametrize(
    ("modulation", "encoding", "num_layers", "local_conv"),
    [("constant", e, n, 0) for e in ("source", "literal", "crossed") for n in (1, 3)]
    + [("constant", "crossed", 2, 0), ("time", "source", 2, 0), ("time", "crossed", 3, 0)]
    + [("constant", "source", 1, 5), ("time", "source", 1, 3)],
)
@pytest.mark.parametrize("is_causal", [False, True], ids=["open", "causal"])
def test_states_and_gradients_are_those_of_the_plain_formula(
    modulation, encoding, num_layers, local_conv, is_causal
):
    """With padding, positions of sources and targets, both kinds of modulation, neighbors."""
    options = {"modulation": modulation, "encoding": encoding, "is_causal": is_causal}
    options |= {"local_conv": local_conv}
    model, x = awake(num_layers, V, std=STD[modulation], **options).double(), tokens()
    orders = torch.stack([torch.randperm(L + 1, generator=seeded(s)) for s in (2, 3, 4)])
    source, target = orders[:, :-1], orders[:, 1:]
    is_real = (torch.arange(L) < torch.tensor([[6], [L], [3]]))[:, None, None]
    pairs = (torch.rand(3, 1, L, L, generator=seeded(5)) < 0.5) | torch.eye(L).bool()
    past = torch.ones(L, L).tril().bool() if is_causal else torch.ones(L, L).bool()
    t_B = torch.tensor([0.2, 0.5, 0.9])
    condition = model.time_embedding(t_B) if modulation == "time" else None
    given = {"t_B": t_B, "positions": source, "target_positions": target}
    for mask in (None, is_real, pairs):
        is_seen = past if mask is None else past & mask
        found = model.hidden(x, mask=mask, **given)
        expected = plain_states(model, x, is_seen, source, target, encoding, condition)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        direction = torch.randn(3, L, 16, generator=seeded(0), dtype=torch.float64)
        sums = [(one * direction).sum() for one in (found, expected)]
        assert_same_gradients(model, *sums, 1e-5)
    if encoding == "source":  # positions are 0 .. L-1 unless said otherwise, for each row alike
        given = {"t_B": t_B, "positions": torch.arange(L)}
        torch.testing.assert_close(model.hidden(x, t_B=t_B), model.hidden(x, **given))


@pytest.mark.parametrize(
    ("time_input", "scaled", "error"),  # float32 has 1000 to 6e-5
    [
        ("stretched", lambda t: 1000 * t, 1e-4),
        ("sigma", lambda t: -math.log(1 - (1 - 1e-3) * t), 1e-5),
    ],
)
def test_time_is_256_sinusoids_and_two_layers(time_input, scaled, error):
    """sigma: the total noise of mdlm's schedule, of which 1e-3 stays visible at t = 1."""
    torch.manual_seed(0)
    module = TimeEmbedding(time_input)
    times = [0.0, 0.01, 0.25, 0.5, 1.0]
    angle = [[scaled(t) * 10_000 ** (-k / 128) for k in range(128)] for t in times]
    waves = torch.tensor([[*map(math.cos, row), *map(math.sin, row)] for row in angle])
    expected = F.silu(module.out(F.silu(module.into(waves))))
    torch.testing.assert_close(module(torch.tensor(times)), expected, rtol=0, atol=error)


def test_compiled_formulas_and_hand_written_gradients_are_the_same_functions(monkeypatch):
    """What is traced by torch.compile is written differently; here both run eagerly."""
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    heads = torch.randn(2, 5, 1, 3, 8, generator=seeded(0), dtype=torch.float64, requires_grad=True)
    table = tuple(part.double() for part in rotary_table([torch.tensor([0, 3, 1, 40, 7])], 8))
    eager = rotate(heads, table)
    assert torch.autograd.gradcheck(lambda heads: rotate(heads, table), heads)
    expected = F.gelu(x, approximate="tanh")
    torch.testing.assert_close(gelu(x), expected, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(gelu(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rotate(heads, table), eager)


def test_at_first_every_block_is_the_identity_and_every_prediction_uniform():
    model, x = Denoiser(SMALL, V).eval(), tokens()
    logits = model(x, torch.arange(x.numel()))
    assert logits.shape == (x.numel(), V), "the mask has no logit"
    assert not logits.any()
    assert (model.mask_id, model.embedding.weight.shape) == (V, (V + 1, 16))
    torch.testing.assert_close(model.hidden(x), F.layer_norm(model.embedding(x), (16,)))


def test_what_is_missing_is_named():
    x = tokens(1)
    with pytest.raises(ValueError, match="times"):
        awake(modulation="time").hidden(x)
    for encoding in ("literal", "crossed"):
        with pytest.raises(ValueError, match="positions"):
            awake(encoding=encoding).hidden(x)


def test_padding_and_documents_hide_what_is_not_there():
    """Only real keys, only those of one's own document, and always oneself: no softmax is empty."""
    is_real = torch.arange(L) < torch.tensor([[6], [L], [3]])
    document = torch.tensor([[0] * 4 + [1] * 6]).expand(3, -1)
    same = document[:, :, None] == document[:, None]
    real = is_real[:, None].expand(3, L, L)
    both = (real & same) | torch.eye(L, dtype=torch.bool)
    assert attention_mask() is None
    assert torch.equal(attention_mask(is_real).expand(3, 1, L, L), real[:, None])
    x = torch.where(torch.arange(L) == 3, 9, torch.ones(3, L, dtype=torch.long))
    assert torch.equal(same_document(document_ids(x, 9)), same[:, None])
    # a pad sees itself alone, and nobody sees it
    found = same_document(document_ids(x, 9, is_real))[:, 0]
    assert torch.equal(found, (both & is_real[..., None]) | torch.eye(L, dtype=torch.bool))


def test_a_document_ends_with_its_eos_but_an_eos_at_the_start_of_a_row_begins_one():
    eos, x = 9, torch.tensor([[9, 1, 2, 9, 3], [1, 9, 9, 2, 3]])
    document, is_real = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 2, 2]]), x != 3
    assert document_ids(x, eos).tolist() == document.tolist()
    for sees_pads, real in ((False, is_real), (True, None)):
        rules = AttentionRules(sees_pads, eos)
        assert torch.equal(rules.mask(x, is_real), document_ids(x, eos, real))
    assert torch.equal(AttentionRules().mask(x, is_real), is_real[:, None, None])
    assert AttentionRules(sees_pads=True).mask(x, is_real) is None


# some rows only


@pytest.mark.parametrize("rows", [[0, 3, 4, 11, 19, 28, 29], [25, 2, 2, 14], []])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(
    ("modulation", "is_masked"), [("constant", False), ("constant", True), ("time", True)]
)
def test_leaving_rows_out_of_the_last_block_changes_nothing(
    modulation, is_masked, num_layers, rows
):
    """States and their gradients, logits and losses, against all rows with those picked out
    afterwards; also unsorted, repeated and no rows. The head's sums are float32.
    """
    model = awake(num_layers, V, std=STD[modulation], modulation=modulation).double()
    x, rows_N = tokens(), torch.tensor(rows, dtype=torch.long)
    mask = attention_mask(torch.arange(L) < torch.tensor([[6], [L], [8]])) if is_masked else None
    inputs = {"mask": mask, "t_B": torch.tensor([0.2, 0.5, 0.9])}
    expected = model.hidden(x, **inputs).flatten(0, 1)[rows_N]
    found = model.hidden(x, rows_N, **inputs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    direction = torch.randn(len(rows), 16, generator=seeded(0))
    assert_same_gradients(model, (found * direction).sum(), (expected * direction).sum(), 1e-10)
    logits = F.linear(expected, model.head.weight, model.head.bias)
    torch.testing.assert_close(model(x, rows_N, **inputs), logits, rtol=1e-10, atol=1e-10)
    targets_N = (x.flatten()[rows_N] + 1) % V
    weight_N = torch.linspace(0.5, 3, len(rows), dtype=torch.float64)
    nll_N = F.cross_entropy(logits, targets_N, reduction="none")
    each = model(x, rows_N, targets_N, reduce=False, **inputs)
    torch.testing.assert_close(each.double(), nll_N, rtol=1e-5, atol=1e-5)
    found, naive = model(x, rows_N, targets_N, weight_N=weight_N, **inputs), nll_N @ weight_N
    torch.testing.assert_close(found.double(), naive, rtol=1e-5, atol=1e-5)
    assert_same_gradients(model, found, naive, 1e-5)


def test_rows_left_out_cost_no_mlp():
    """The point of it: the last block's MLP sees the wanted rows, the others all rows."""
    model, seen = awake(), []
    for block in model.blocks:
        block.mlp_in.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    model.hidden(tokens(), torch.tensor([4, 7, 12]))
    assert seen == [(3, L, 64), (3, 64)]


# cached keys and values


CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@pytest.mark.parametrize("widths", [[1] * L, [2, 5, 3]])
@pytest.mark.parametrize(
    ("framework", "encoding", "num_layers", "local_conv"),
    [
        (arm(L), "source", 1, 0),
        (arm(L), "source", 2, 5),
        (sigma_arm(torch.tensor([3, 1, 5, 0, 9, 7, 2, 6, 4, 8])), "literal", 2, 0),
        (any_order(), "crossed", 3, 0),
    ],
    ids=["arm", "arm, neighbors", "sigma_arm", "aoarm"],
)
@torch.no_grad()
def test_slot_by_slot_a_causal_model_says_what_it_says_at_once(
    framework, encoding, num_layers, local_conv, widths
):
    options = {"is_causal": True, "encoding": encoding, "local_conv": local_conv}
    model = awake(num_layers, V, **options).double()
    u_BL = torch.rand(3, L, generator=seeded(2), dtype=torch.float64)
    problem = framework.every_context(tokens(), u_BL, mask_id=V)
    held, sought = (one.expand(3, L) for one in (problem.positions, problem.target_positions))

    def states(part, cache=None):
        places = {"positions": held[:, part], "target_positions": sought[:, part]}
        return model.hidden(problem.x_BL[:, part], cache=cache, **places)

    whole, cache, start = states(slice(0, L)), model.new_cache(), 0
    for width in widths:
        part = slice(start, start + width)
        torch.testing.assert_close(states(part, cache), whole[:, part], **CLOSE)
        start += width
        assert [len(cache.layers), *{k.shape[1] for k, _ in cache.layers}] == [num_layers, start]


@pytest.mark.parametrize("is_padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("prefix", [1, 7])
@torch.no_grad()
def test_a_cached_prefix_of_an_open_model_is_exact_for_one_layer(prefix, is_padded):
    model, x = awake(1).double(), tokens()
    mask = attention_mask(torch.arange(L) < torch.tensor([[L], [L], [9]])) if is_padded else None
    cache = model.new_cache(prefix)
    torch.testing.assert_close(
        model.hidden(x, mask=mask, cache=cache), model.hidden(x, mask=mask), **CLOSE
    )
    for seed in (2, 3):
        late = torch.randint(V + 1, (3, L - prefix), generator=seeded(seed))
        found = model.hidden(late, positions=torch.arange(prefix, L), mask=mask, cache=cache)
        expected = model.hidden(torch.cat([x[:, :prefix], late], 1), mask=mask)[:, prefix:]
        torch.testing.assert_close(found, expected, **CLOSE)
        assert [k.shape[1] for k, _ in cache.layers] == [prefix]


@pytest.mark.parametrize("prefix", [1, 7])
@torch.no_grad()
def test_neighbors_in_a_cached_prefix_are_seen(prefix):
    """What the first block gets, of chosen rows too; the prefix itself stays as it was."""
    model, x, got = awake(1, local_conv=5).double(), tokens(), []
    model.blocks[0].register_forward_pre_hook(lambda module, args: got.append(args[0]))
    cache = model.new_cache(prefix)
    model.hidden(x, cache=cache)
    for rows in ([0, 1, 2], [2, 0]):
        late = torch.randint(V + 1, (len(rows), L - prefix), generator=seeded(2))
        part = cache.select(torch.tensor(rows))
        model.hidden(late, positions=torch.arange(prefix, L), cache=part)
        model.hidden(torch.cat([x[rows, :prefix], late], 1))
        torch.testing.assert_close(got[-2], got[-1][:, prefix:], **CLOSE)


def test_neighbors_change_nothing_at_first():
    model, x = Denoiser(replace(SMALL, local_conv=5), V), tokens()
    states = model.hidden(x)
    assert count_parameters(model) - count_parameters(Denoiser(SMALL, V)) == 5 * 16
    model.local_conv = None
    assert torch.equal(model.hidden(x), states)


# dropout


@pytest.mark.parametrize("modulation", ["constant", "time"])
@pytest.mark.parametrize("rows", [None, [1, 4, 15]], ids=["all", "some"])
@pytest.mark.parametrize("branch", [0, 1], ids=["attention", "mlp"])
@torch.no_grad()
def test_dropout_scales_what_it_keeps_of_the_branch_alone(branch, rows, modulation):
    """The other branch's gate is zero: x + branch * kept / (1 - rate)."""
    model, silent = awake(1, V, modulation=modulation, dropout=0.25), 5 - 3 * branch
    block = model.blocks[0]
    if modulation == "constant":
        block.modulation.vectors[silent] = 0
    else:
        block.modulation.linear.weight.view(6, 16, -1)[silent] = 0
        block.modulation.linear.bias.view(6, 16)[silent] = 0
    x, states, kept = tokens(2), [], []
    block.register_forward_hook(lambda _, args, out: states.append(out) or kept.append(args[5]))
    rows = None if rows is None else torch.tensor(rows)
    for training in (False, True):
        model.train(training).hidden(x, rows, t_B=torch.tensor([0.3, 0.6]))
    plain, dropped = states
    before = model.embedding(x) if rows is None else model.embedding(x).flatten(0, 1)[rows]
    expected = before + (plain - before) * kept[1][branch] / 0.75
    torch.testing.assert_close(dropped, expected)
    assert not torch.allclose(dropped, plain)


def test_dropout_is_decided_by_the_seed_absent_in_evaluation_and_each_branchs_own():
    model, x, masks = awake(dropout=0.5), tokens(20), []
    torch.testing.assert_close(model.hidden(x), awake().hidden(x))
    for block in model.train().blocks:
        block.register_forward_pre_hook(lambda _, args: masks.extend(args[5]))

    def hidden(seed):
        torch.manual_seed(seed)
        return model.hidden(x)

    torch.testing.assert_close(hidden(1), hidden(1))
    assert (hidden(1) - hidden(2)).abs().max() > 1e-3
    for one, other in itertools.combinations(masks[:4], 2):
        agreement = (one == other).double().mean()
        assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(one.numel())


def test_where_no_choice_is_given_the_block_draws_its_own(monkeypatch):
    """As on a GPU: coins decided by the seed, and the scale that keeps the mean."""
    model, x = awake(1, V, dropout=0.25), tokens(40)
    block = model.blocks[0]
    with torch.no_grad():
        block.modulation.vectors[5] = 0  # the MLP's gate
    monkeypatch.setattr(model, "_draw_kept", lambda *_: [None, None])
    before, plain = model.embedding(x).detach(), []
    block.register_forward_hook(lambda _, args, out: plain.append(out.detach() - before))
    model.eval().hidden(x)
    model.train()
    for _ in range(2):
        torch.manual_seed(3)
        model.hidden(x)
    branch, dropped, again = plain
    factor = (dropped / branch)[branch.abs() > 1e-2]
    is_dropped = factor.abs() < 1e-3
    assert ((factor[~is_dropped] - 4 / 3).abs() < 1e-3).all()
    error = math.sqrt(0.25 * 0.75 / len(factor))
    assert abs(is_dropped.double().mean() - 0.25) < 5 * error
    assert torch.equal(dropped, again)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler of torch.jit
@pytest.mark.parametrize("recompute", ["none", "block", "selective"])
def test_a_compiled_block_drops_the_same_forwards_and_backwards(recompute):
    """Against the block with the choices that the compiled one has made, given from outside."""
    model, x = awake(1, V, dropout=0.25).train(), torch.randn(40, L, 16, generator=seeded(2))
    block, rotary = model.blocks[0], model._rotary(torch.arange(L), None)[0]
    given = (rotary, None, None, None)
    with torch.no_grad():
        block.modulation.vectors[5] = 0  # the MLP's gate: what is left is linear in the choice
        plain = block(x, *given, (torch.ones(40, L, 16), None)) - x
    compiled = copy.deepcopy(block)
    recompute_blocks([compiled], recompute)
    compiled.compile(fullgraph=True)
    torch.manual_seed(3)
    found = compiled(x, *given, (None, None))
    kept = ((found.detach() - x) / plain).nan_to_num().round()  # a scale of 4/3, also in `plain`
    assert abs(kept.mean() - 0.75) < 5 * math.sqrt(0.25 * 0.75 / kept.numel())
    expected = block(x, *given, (kept, torch.zeros_like(kept)))
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(found.shape, generator=seeded(4))
    for loss in ((found * upstream).sum(), (expected * upstream).sum()):
        loss.backward()
    for (name, ours), theirs in zip(compiled.named_parameters(), block.parameters(), strict=True):
        a, e = ours.grad, theirs.grad
        if name == "modulation.vectors":
            a, e = a[:5], e[:5]  # the MLP's gate has a choice of its own
        torch.testing.assert_close(a, e, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
@pytest.mark.parametrize("local_conv", [0, 3])
def test_flex_attention_sees_what_the_mask_shows(local_conv, monkeypatch):
    """Documents and padding, with a local convolution, which sees the mask itself."""
    monkeypatch.setattr(dit, "_block_mask_maker", lambda: create_block_mask)
    monkeypatch.setattr(dit, "LEAST_FLEX_HEAD", 8)
    model, x = awake(local_conv=local_conv).eval(), tokens(3)
    is_real = torch.arange(L) < torch.tensor([[6], [L], [3]])
    x[:, 3] = 1
    for mask in (document_ids(x, 1, is_real), document_ids(x, 1), attention_mask(is_real), None):
        model.uses_flex_attention = False
        expected = model.hidden(x, mask=mask)
        model.uses_flex_attention = True
        torch.testing.assert_close(model.hidden(x, mask=mask), expected)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler of torch.jit
@torch.no_grad()
def test_compiled_flex_attention_sees_what_the_mask_shows():
    """Block masks of other documents compile nothing anew. CPUs have no backward pass for it."""
    attend, stats = torch.compile(dit.attend), torch._dynamo.utils.counters["stats"]
    for seed in (1, 2):
        draw = seeded(seed)
        q, k, v = torch.randn(3, 2, 200, 2, 16, generator=draw)
        documents = document_ids(torch.randint(30, (2, 200), generator=draw), 1)
        found = attend(q, k, v, dit.block_mask(documents), False)
        expected = dit.attend(q, k, v, same_document(documents), False)
        torch.testing.assert_close(found, expected)
        if seed == 1:
            num_graphs = stats["unique_graphs"]
    assert stats["unique_graphs"] == num_graphs


@pytest.mark.parametrize("rate", [0.01, 0.5, 0.9])
def test_what_is_kept_are_independent_coins(rate):
    """Mean and variance of counts (fixed counts are no coins), neighbors, the scale."""
    torch.manual_seed(1)
    kept = torch.stack([draw_kept((50, 20), rate) for _ in range(1000)])
    counts, variance = kept.flatten(1).sum(1).double(), 1000 * rate * (1 - rate)
    # the rate is met to a multiple of 2^-16
    bias = 1000 / LEVELS
    assert abs(counts.mean() - 1000 * (1 - rate)) < 5 * math.sqrt(variance / 1000) + bias
    assert abs(counts.var() / variance - 1) < 5 * math.sqrt(2 / 1000)
    centered = kept.flatten().double() - (1 - rate)
    for lag in (1, 2, 3, 4, 5, 64):
        correlation = (centered[lag:] * centered[:-lag]).mean() / (rate * (1 - rate))
        assert abs(correlation) < 5e-3
    assert dropout_scale(rate) == pytest.approx(1 / (1 - rate), rel=1e-3)
    for shape in [(), (7, 3), (2, 3, 5), (0, 4)]:
        assert draw_kept(shape, rate).shape == shape


@pytest.mark.parametrize(
    ("modulation", "num_tokens", "millions"),
    [("time", 30521, 139), ("time", 50258, 170), ("constant", 30521, 132)],
)
def test_parameter_counts_of_the_papers_sizes(modulation, num_tokens, millions):
    """mdlm small: about 139M for BERT's vocabulary and 170M for GPT-2's."""
    with torch.device("meta"):
        model = Denoiser(replace(ModelOptions(), modulation=modulation), num_tokens)
    assert round(count_parameters(model) / 1e6) == millions
