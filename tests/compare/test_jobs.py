"""Which GPU a training of a comparison gets."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from bellmask.compare import execute as module
from bellmask.compare.execute import TrainingOptions, execute, plan_runs, visible_gpus
from bellmask.compare.variants import parse_variants
from bellmask.utils.errors import UserError


@pytest.fixture
def started(monkeypatch):
    """Environments of the trainings, of which each ends when the next poll comes."""
    found = []

    def start(command, *, env, **_):
        polls = iter([None] * (1 if len(found) == 0 else 0) + [0] * 99)  # the first takes longer
        named = {k: env.get(k) for k in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")}
        found.append({**named, "command": command})
        return SimpleNamespace(
            stdin=io.BytesIO(), poll=lambda: next(polls), wait=lambda: 0, returncode=0
        )

    monkeypatch.setattr(module.subprocess, "Popen", start)
    monkeypatch.setattr(module, "POLL_SECONDS", 0)
    monkeypatch.setattr(module, "_result", lambda job, *_: job.end() or "done")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return found


def runs(small_config, tmp_path, *names, **options):
    training = TrainingOptions(runs=str(tmp_path), quiet=True, **options)
    return plan_runs(small_config(), parse_variants(names), training), training


def test_trainings_take_turns_on_the_gpus(small_config, tmp_path, started, monkeypatch):
    monkeypatch.setattr(module, "visible_gpus", lambda: ["0", "3"])
    execute(*runs(small_config, tmp_path, "base", "bell", "dirac:0.5", "laplace:0.5,0.1"))
    gpus = [env["CUDA_VISIBLE_DEVICES"] for env in started]
    assert gpus[:2] == ["0", "3"], "as many at a time as there are GPUs"
    assert gpus[2] == "3", "the one that is free: the first training takes longer"
    assert set(gpus) == {"0", "3"}


def test_several_processes_share_a_training(small_config, tmp_path, started, monkeypatch):
    monkeypatch.setattr(module, "visible_gpus", lambda: list("01234"))
    execute(*runs(small_config, tmp_path, "base", "bell", processes_per_job=2))
    assert [env["CUDA_VISIBLE_DEVICES"] for env in started] == ["0,1", "2,3"]
    assert all("--nproc-per-node=2" in env["command"] for env in started)
    with pytest.raises(UserError, match="processes-per-job 6 needs as many GPUs; there are 5"):
        execute(*runs(small_config, tmp_path, "base", processes_per_job=6))


def test_a_named_device_is_left_alone(small_config, tmp_path, started, monkeypatch):
    monkeypatch.setattr(module, "visible_gpus", lambda: ["0", "3"])
    training = TrainingOptions(runs=str(tmp_path), quiet=True, jobs=1)
    config = small_config("--train.device", "cpu")
    execute(plan_runs(config, parse_variants(["base"]), training), training)
    assert started[0]["CUDA_VISIBLE_DEVICES"] in (None, "")
    assert started[0]["OMP_NUM_THREADS"] is None


def test_without_gpus_one_at_a_time(small_config, tmp_path, started):
    execute(*runs(small_config, tmp_path, "base", "bell"))
    assert [env["OMP_NUM_THREADS"] for env in started] == [None, None]


def test_gpus_are_those_that_the_environment_shows(monkeypatch):
    assert visible_gpus() == []
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-8a")
    assert visible_gpus() == ["4", "GPU-8a"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus() == ["0", "1"]
