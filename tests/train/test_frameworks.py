"""Training of the causal frameworks: losses by hand, any accumulation, exact resume."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from bellmask.assemble import train_run
from bellmask.build import build_framework, build_model, build_objective
from bellmask.config import RunConfig
from bellmask.data.blocks import Blocks
from bellmask.data.packing import Row
from bellmask.diffusion.objectives import ChainRule
from bellmask.diffusion.orders import Framework, any_order, arm, sigma_arm
from bellmask.errors import UserError
from bellmask.evaluate.result import Likelihood
from bellmask.model.transformer import Denoiser
from bellmask.options import ModelOptions, TrainOptions
from bellmask.presets import preset
from bellmask.records import TIME_FIELDS, read_metrics
from bellmask.rng import stream_key, uniform_rows
from bellmask.run import load_run
from bellmask.train.distributed import World
from bellmask.train.step import StepPlanner, TrainStep

Config = Callable[..., RunConfig]
CAUSAL = ["arm", "sigma_arm", "aoarm"]
SIGMA = [3, 1, 5, 0, 7, 2, 6, 4]
FRAMEWORKS: dict[str, Framework] = {
    "arm": arm(8),
    "sigma_arm": sigma_arm(torch.tensor(SIGMA)),
    "aoarm": any_order(),
}
each = pytest.mark.parametrize("name", CAUSAL)


def blocks(is_padded: bool = False) -> Blocks:
    draw = np.random.default_rng(5)
    return Blocks.from_rows(
        Row(draw.integers(0, 9, 8), int(draw.integers(1, 9)) if is_padded else 8, n)
        for n in range(40)
    )


def awake(encoding: str) -> Denoiser:
    options = ModelOptions(num_layers=2, width=16, num_heads=2, dropout=0.0)
    model = Denoiser(options, 9, is_causal=True, encoding=encoding)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def planner(name: str, is_padded: bool, **options: Any) -> StepPlanner:
    settings = replace(TrainOptions(batch_size=16, seed=4), **options)
    return StepPlanner(
        blocks(is_padded), ChainRule(), settings, World(), framework=FRAMEWORKS[name]
    )


def train_step(model: nn.Module, plan: StepPlanner) -> TrainStep:
    return TrainStep(
        model, plan, World(), mask_id=9, divide_by_c=True, clip=0, precision=torch.float32
    )


def by_hand(model: Denoiser, name: str, plan: StepPlanner, step: int) -> Tensor:
    """Mean next-token cross-entropy of the step's rows, one row after another, without pads."""
    length, losses = plan.length(step), []
    u = uniform_rows(stream_key(4, "masks", step), torch.arange(16), 8)
    for sample, row in enumerate(plan.plan.rows(step).tolist()):
        n = min(int(plan.blocks.lengths[row]), length)
        tokens = np.asarray(plan.blocks.tokens[row])[:n].tolist()
        order = {
            "arm": list(range(n)),
            "sigma_arm": [i for i in SIGMA if i < n],
            "aoarm": u[sample, :n].argsort().tolist(),
        }[name]
        ordered = [tokens[i] for i in order]
        logits = model(
            torch.tensor([[9, *ordered[:-1]]]),
            torch.arange(n),
            positions=torch.tensor([0, *(i + 1 for i in order[:-1])]),
            target_positions=torch.tensor([i + 1 for i in order]),
        )
        losses.append(F.cross_entropy(logits, torch.tensor(ordered), reduction="none"))
    return torch.cat(losses).mean()


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("encoding", ["source", "crossed"])
@each
def test_a_step_is_the_mean_next_token_cross_entropy_and_its_gradient(
    name: str, encoding: str, is_padded: bool
) -> None:
    model = awake(encoding)
    plan = planner(name, is_padded, microbatch_size=4, random_length_fraction=0.5)
    short = next(s for s in range(50) if 2 < plan.length(s) < 8)
    full = next(s for s in range(50) if plan.length(s) == 8)
    for step in (short, full):
        model.zero_grad()
        result = train_step(model, plan)(step)
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        loss = by_hand(model, name, plan, step)
        loss.backward()
        assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert result.num_masked == result.num_maskable
        assert result.largest_weight == 1
        for a, p in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad, rtol=1e-3, atol=2e-5)


@each
def test_accumulation_changes_nothing(name: str) -> None:
    whole, parts = awake("crossed"), awake("crossed")
    one, four = planner(name, True), planner(name, True, microbatch_size=4)
    for step in range(4):
        a, b = train_step(whole, one)(step), train_step(parts, four)(step)
        assert len(four(step).microbatches) == 4
        assert a.loss == pytest.approx(b.loss, abs=1e-5)
        assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-4)
        for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)
        whole.zero_grad()
        parts.zero_grad()


def test_random_orders_change_from_step_to_step_and_from_row_to_row() -> None:
    plan = planner("aoarm", False)
    orders = [any_order().orders(plan(s).microbatches[0].u_BL).tolist() for s in range(3)]
    assert all(len({tuple(order) for order in one}) == 16 for one in orders)
    assert orders[0] != orders[1] != orders[2]


@each
def test_a_run_of_this_framework_is_built_of_its_parts(name: str) -> None:
    config = preset(f"tiny_{name}")
    assert isinstance(build_objective(config), ChainRule)
    framework, model = build_framework(config), build_model(config, 9)
    assert framework.is_causal
    assert framework.is_exact == (name != "aoarm")
    assert all(block.is_causal for block in model.blocks)
    assert not any(block.is_causal for block in build_model(preset("tiny"), 9).blocks)
    assert (model.second_half == build_model(preset("tiny"), 9).second_half) == (name != "aoarm")


# whole runs


def signal_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    from bellmask.train.trainer import Trainer

    update = Trainer._update

    def then_signal(trainer: Trainer) -> None:
        update(trainer)
        if trainer.state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_update", then_signal)


def weights(folder: Path, step: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for shard in (folder / "checkpoints" / f"step-{step:09d}").glob("*.safetensors"):
        found |= load_file(shard)
    return found


def timeless(folder: Path) -> list[dict[str, Any]]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in TIME_FIELDS} for line in lines]


OPTIONS = (
    "--model.dropout 0.2 --train.microbatch-size 4 --validation.draws 2 --log.every 1 "
    "--train.random-length-fraction 0.3 --train.steps 6 --validation.every 3"
).split()


@each
def test_resuming_is_exact(
    name: str, small_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(*OPTIONS, start=preset(f"tiny_{name}"))
    train_run(config, tmp_path / "whole", is_quiet=True)
    with monkeypatch.context() as patch:
        signal_at(patch, 4)
        assert train_run(config, tmp_path / "parts", is_quiet=True).step == 4
    assert train_run(config, tmp_path / "parts", resume="yes", is_quiet=True).step == 6
    mine, theirs = weights(tmp_path / "whole", 6), weights(tmp_path / "parts", 6)
    assert mine
    assert all(mine[k].equal(theirs[k]) for k in mine | theirs)
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "parts")
    stored = Likelihood.load(tmp_path / "whole" / "validation" / "step-000000006.npz")
    assert (stored.is_causal, stored.is_exact) == (True, name != "aoarm")
    assert stored.num_draws == (2 if name == "aoarm" else 1)
    validated = [line for line in timeless(tmp_path / "whole") if "is_exact" in line]
    assert validated[-1]["nll"] == pytest.approx(stored.nll)
    assert validated[-1]["is_exact"] == (name != "aoarm")


def test_an_order_cannot_change_when_a_run_is_resumed(small_config: Config, tmp_path: Path) -> None:
    start = preset("tiny_sigma_arm")
    config = small_config("--train.steps", "1", start=start)
    train_run(config, tmp_path / "run", is_quiet=True)
    other = config.with_options({"framework.order_seed": 77})
    with pytest.raises(UserError, match=r"framework\.order_seed: was .*, now 77"):
        train_run(other, tmp_path / "run", resume="yes", is_quiet=True)
    same = config.with_options({"framework.order_seed": config.train.seed})
    train_run(same, tmp_path / "run", resume="yes", is_quiet=True)


def test_an_arm_learns_and_its_run_scores_and_samples(small_config: Config, tmp_path: Path) -> None:
    """A loaded run evaluates with its own framework, and writes after a prefix only."""
    options = "--train.steps 40 --validation.every 40 --optim.ema 0 --log.every 40".split()
    config = small_config(*options, start=preset("tiny_arm"))
    result = train_run(config, tmp_path / "run", is_quiet=True)
    run = load_run(tmp_path / "run", device="cpu")
    _, valid = run.blocks()
    found = run.evaluate(valid.slice(0, 32), draws=3)
    assert found.is_exact
    assert result.nll is not None
    assert found.nll == pytest.approx(result.nll, abs=1e-5)
    assert found.nll < 0.75 * np.log(run.tokenizer.num_tokens)
    made = run.generate(run.canvas(prefix="the ", length=10), 3)
    assert made.ids_BL[:, :4].tolist() == [run.tokenizer.encode("the ").tolist()] * 3
    with pytest.raises(UserError, match="fixed order"):
        run.generate(run.canvas(template="[MASK*3] the"), 1)
    scores = run.nll(["the cat sat", "old moon"], draws=2)
    assert [score.standard_error for score in scores] == [0.0, 0.0]


def test_a_run_of_before_the_frameworks_goes_on_as_masked_diffusion(
    small_config: Config, tmp_path: Path
) -> None:
    """Its config.json has no such section."""
    config = small_config("--train.steps", "2")
    train_run(config, tmp_path / "run", is_quiet=True)
    path = tmp_path / "run" / "config.json"
    tree = json.loads(path.read_text())
    assert tree.pop("framework")["name"] == "mdm"
    path.write_text(json.dumps(tree))
    assert not load_run(tmp_path / "run", device="cpu").framework.is_causal
    longer = config.with_options({"train.steps": 3})
    assert train_run(longer, tmp_path / "run", resume="yes", is_quiet=True).step == 3


@pytest.mark.parametrize("name", ["arm", "sigma_arm", "aoarm"])
def test_runs_on_wrapped_rows_can_be_sampled(small_config, tmp_path, name) -> None:
    """A fixed order is given BOS where that comes first, and writes EOS itself."""
    config = small_config("--framework", name, "--data.wrap", "True", "--train.steps", "1")
    train_run(config, tmp_path / "run", is_quiet=True)
    run = load_run(tmp_path / "run")
    canvas = run.canvas()
    given = canvas.is_given_L.nonzero().flatten().tolist()
    order = getattr(run.framework, "rank_L", None)
    if order is None:
        assert given == [0, len(canvas) - 1]
    else:
        assert given == ([0] if int(order[0]) == 0 else [])
    assert len(run.sample(2)) == 2
