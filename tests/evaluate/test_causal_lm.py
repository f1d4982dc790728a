"""Scores, curves and guidance of runs on a causal LM, whose first position is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pretrained_tools import save_lm

from bellmask.analyze.context import context_bins, losses_by_bin
from bellmask.assemble import train_run
from bellmask.config import RunConfig
from bellmask.data.blocks import Blocks
from bellmask.data.packing import Row
from bellmask.evaluate.scorers import ArmRun
from bellmask.generate.network import Network
from bellmask.run import Run, load_run

Config = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    return save_lm(tmp_path_factory.mktemp("lm") / "gpt2", "gpt2", text_file.read_text())


@pytest.fixture(scope="module", params=["plain rows", "wrapped rows"])
def arm(
    request: pytest.FixtureRequest,
    lm: Path,
    small_config: Config,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    folder = tmp_path_factory.mktemp("runs") / "arm"
    wrap = ["--data.wrap", str(request.param == "wrapped rows")]
    options = ["--framework", "arm", "--start.model", str(lm), "--train.steps", "1"]
    train_run(small_config(*options, *wrap), folder, is_quiet=True)
    return load_run(folder)


def true_nll(run: Run, ids: list[int]) -> list[float]:
    """-log p of every token but the first, by the language model itself."""
    with torch.no_grad():
        logits = run.model.language_model(torch.tensor([ids])).logits[0].double()
    log_p = logits.log_softmax(-1)
    return [-float(log_p[place - 1, ids[place]]) for place in range(1, len(ids))]


def test_an_arm_on_a_causal_lm_scores_what_it_says(arm: Run) -> None:
    """Pieces of a block, each after BOS; every token of the text is scored once."""
    text = "the old dog ran under the new tree and saw a red sun, and then the cat sat there."
    ids = arm.tokenizer.encode(text).tolist()
    bos = [arm.tokenizer.bos_id]
    assert len(ids) > 15, "more than one piece"
    expected = [
        nll
        for start in range(0, len(ids), 15)
        for nll in true_nll(arm, bos + ids[start : start + 15])
    ]
    (score,) = ArmRun(arm, context=1024).score([[text]])
    assert score.num_tokens == len(ids) == len(expected)
    assert score.nll == pytest.approx(math.fsum(expected), rel=1e-5)
    assert arm.nll([text])[0].nll == pytest.approx(score.nll, rel=1e-5)


def test_no_curve_has_a_point_beyond_what_can_be_masked(
    lm: Path, small_config: Config, tmp_path: Path
) -> None:
    rows = [Row(np.arange(8) % 5 + 3 + n % 2, 8, n, 3 * (n % 2)) for n in range(6)]
    for framework in ("mdm", "arm"):
        config = small_config("--framework", framework, "--start.model", str(lm))
        train_run(config, tmp_path / framework, is_quiet=True)
        scorer = load_run(tmp_path / framework).scorer(Blocks.from_rows(rows))
        bins = context_bins(8, 7)
        assert [low for low, _ in bins] == list(range(8))
        is_there = ~np.isnan(losses_by_bin(scorer, bins, 1, 4))
        assert is_there[:, 0::2].sum(0).tolist() == [7, 7, 7], "position 0 is given"
        assert is_there[:, 1::2].sum(0).tolist() == [5, 5, 5], "so are prompts of 3"


def test_guidance_leaves_the_first_position_where_it_was() -> None:
    seen: list[torch.Tensor] = []

    class Model:
        first_maskable = 1

        def __call__(self, x_BL: torch.Tensor, rows_N: torch.Tensor, **_: object) -> torch.Tensor:
            seen.append(x_BL)
            return torch.zeros(len(rows_N), 9)

    network = Network(Model(), 9, guidance=1.0)
    canvas = torch.tensor([[4, 5, 9, 9]])
    network.begin(canvas)
    network.logits(canvas, canvas == 9, torch.ones(1))
    assert seen[0].tolist() == [[4, 5, 9, 9], [4, 9, 9, 9]]


def test_bytes_go_with_maskable_tokens() -> None:
    rows = [Row(np.zeros(10, dtype=np.int64), 10, n, start) for n, start in enumerate((8, 0, 3))]
    blocks = Blocks.from_rows(rows, num_bytes=19.0)  # 2, 10 and 7 maskable tokens
    assert blocks.slice(0, 1).num_bytes == pytest.approx(2)
    assert blocks.slice(1, 3).num_bytes == pytest.approx(17)
    assert blocks.spread(2).num_bytes == pytest.approx(2 + 7)
    assert blocks.starting_at(5).num_bytes == pytest.approx(2 + 5 + 5)
