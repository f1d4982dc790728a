from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from bellmask.errors import UserError
from bellmask.options import CheckpointOptions
from bellmask.train.checkpoint import (
    CheckpointStore,
    find_damage,
    load_tensors,
    read_state,
    step_of,
)
from bellmask.train.distributed import World


def store(folder: Path, **options: object) -> CheckpointStore:
    return CheckpointStore(folder, CheckpointOptions(**options), World())  # type: ignore[arg-type]


def tensors(value: float = 1.5) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((3, 2), value), "optimizer.a.step": torch.tensor(value)}


def save(target: CheckpointStore, step: int, nll: float | None = None) -> Path:
    return target.save(step, tensors(step), {"step": step, "nll": nll})


def test_tensors_and_state_come_back(tmp_path: Path) -> None:
    folder = store(tmp_path).save(7, tensors(0.1), {"step": 7, "loss": 0.1 + 0.2})
    loaded = tensors(0.0)
    load_tensors(folder, loaded)
    assert all(torch.equal(loaded[k], v) for k, v in tensors(0.1).items())
    assert read_state(folder) == {"step": 7, "loss": 0.1 + 0.2}
    assert (tmp_path / "latest").read_text().strip() == folder.name


def test_there_is_no_pickle_in_a_checkpoint(tmp_path: Path) -> None:
    folder = save(store(tmp_path), 1)
    assert {p.suffix for p in folder.iterdir()} == {".json", ".safetensors"}


def damage_flip(folder: Path) -> None:
    (shard,) = folder.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def damage_cut(folder: Path) -> None:
    (shard,) = folder.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-3])


def damage_missing(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def damage_state(folder: Path) -> None:
    (folder / "state.json").write_text("{}")


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("not json")


@pytest.mark.parametrize(
    "harm", [damage_flip, damage_cut, damage_missing, damage_state, damage_manifest]
)
def test_damage_is_found_and_the_newest_intact_one_is_used(tmp_path: Path, harm) -> None:  # type: ignore[no-untyped-def]
    kept = store(tmp_path, keep_last=5)
    good, bad = save(kept, 1), save(kept, 2)
    assert find_damage(bad) is None
    harm(bad)
    assert find_damage(bad)
    with pytest.raises(UserError, match="damaged"):
        load_tensors(bad, tensors())
    found, complaints = kept.newest_intact()
    assert found == good
    assert len(complaints) == 1
    assert str(bad) in complaints[0]


def test_retention_keeps_last_every_named_and_best(tmp_path: Path) -> None:
    kept = store(tmp_path, keep_last=2, keep_every=4, keep_steps=(3,))
    for step, nll in enumerate([9.0, 1.0, 5.0, 5.0, 4.0, 4.0, 4.0, 4.0, 3.0], start=1):
        save(kept, step, nll)
    assert [step_of(p) for p in kept.all()] == [2, 3, 4, 8, 9]
    assert kept.best() == tmp_path / "step-000000002"
    assert kept.find("best") == kept.best()
    assert kept.find("latest") == kept.find("9")


def test_unvalidated_checkpoints_are_never_best(tmp_path: Path) -> None:
    kept = store(tmp_path, keep_last=1)
    save(kept, 1)
    assert kept.best() is None
    with pytest.raises(UserError, match=r"no checkpoint 'best'.*steps: 1"):
        kept.find("best")


def test_leftovers_are_invisible_and_cleaned(tmp_path: Path) -> None:
    kept = store(tmp_path)
    save(kept, 1)
    for name in (".writing-000000002", ".removing-step-000000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{")
    assert len(kept.all()) == 1
    kept.clean()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000000001"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    kept = store(tmp_path)
    save(kept, 1)
    folder = kept.save(1, tensors(5.0), {"step": 1, "nll": None})
    loaded = tensors(0.0)
    load_tensors(folder, loaded)
    assert torch.equal(loaded["model.a"], torch.full((3, 2), 5.0))
    assert json.loads((folder / "manifest.json").read_text()).keys() >= {"state.json"}


def test_a_good_checkpoint_survives_housekeeping_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An old one cannot be removed, as where somebody has its files open on a network disk."""
    target = store(tmp_path, keep_last=1)
    save(target, 1)
    replace = os.replace

    def no_removing(old: Path, new: Path) -> None:
        if ".removing-" in str(new):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(new))
        replace(old, new)

    monkeypatch.setattr(os, "replace", no_removing)
    assert save(target, 2) == tmp_path / "step-000000002"
    assert "step-000000002 is saved, but" in capsys.readouterr().err
    assert find_damage(tmp_path / "step-000000002") is None


def test_checking_a_checkpoint_only_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read-only file systems refuse to sync."""
    folder = save(store(tmp_path), 1)

    def refuse(handle: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    assert find_damage(folder) is None


class Late(World):
    """A process whose file system shows it another's file late."""

    def texts(self, text: str) -> list[str]:
        is_list = text.startswith("[")
        return [text, json.dumps([*json.loads(text), "other.safetensors"]) if is_list else text]


def test_the_manifest_has_files_that_only_another_process_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = CheckpointStore(tmp_path, CheckpointOptions(), Late())
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "other.safetensors").write_bytes(b"there")
    (tmp_path / "hidden" / "own.safetensors").write_bytes(b"here")
    listed = Path.iterdir

    def stale(folder: Path) -> list[Path]:
        return [p for p in listed(folder) if p.name != "other.safetensors"]

    monkeypatch.setattr(Path, "iterdir", stale)
    found = target._hash_files(1, tmp_path / "hidden")
    assert sorted(found) == ["other.safetensors", "own.safetensors"]
