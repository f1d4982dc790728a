"""Checkpoints as files: they come back as they were, or their damage is found."""

from __future__ import annotations

import errno
import hashlib
import json
import os

import pytest
import torch
from fault_tools import flip

from bellmask.config.options import CheckpointOptions
from bellmask.storage.checkpoint import CheckpointStore, find_damage, load_tensors, read_state
from bellmask.utils.distributed import World
from bellmask.utils.errors import UserError


def store(folder, **options):
    return CheckpointStore(folder, CheckpointOptions(**options), World())


def tensors(value):
    return {"model.a": torch.full((3, 2), value), "optimizer.a.step": torch.tensor(value)}


def save(target, step, nll=None):
    return target.save(step, tensors(float(step)), {"step": step, "nll": nll})


def test_tensors_and_state_come_back(tmp_path):
    """No pickle; a step that is saved again replaces the old one."""
    save(store(tmp_path), 7)
    folder = store(tmp_path).save(7, tensors(0.1), {"step": 7, "loss": 0.1 + 0.2})
    loaded = tensors(0.0)
    load_tensors(folder, loaded)
    assert all(torch.equal(loaded[k], v) for k, v in tensors(0.1).items())
    assert read_state(folder) == {"step": 7, "loss": 0.1 + 0.2}
    assert (tmp_path / "latest").read_text().strip() == folder.name
    assert {p.suffix for p in folder.iterdir()} == {".json", ".safetensors"}


def add_name(name, content=b"text"):
    """The manifest names a file elsewhere, which is there and whose hash is right."""

    def change(path):
        known = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for place in (path.parents[1] / "x", path.parents[2] / "x"):
            place.write_bytes(content)
        path.write_text(json.dumps({**json.loads(path.read_text()), name: known}))

    return change


ANY = {
    "flipped": lambda path: flip(path, 3),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "emptied": lambda path: path.write_bytes(b""),
    "removed": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "others beside": lambda path: (path.parent / "zzz.safetensors").write_bytes(b"0"),
}
GARBAGE = [b"[1, 2]", b"{}", b"[" * 100_000, b"\xff\xfe\x00", b'{"state.json": 5}']
MANIFESTS = {
    **{f"garbage {n}": lambda path, g=g: path.write_bytes(g) for n, g in enumerate(GARBAGE)},
    **{f"elsewhere {n!r}": add_name(n) for n in ("../x", "/etc/hostname", "..", "", "a\0b", "x/y")},
}
WAYS = [(part, how) for part in ("*.safetensors", "state.json", "manifest.json") for how in ANY]


@pytest.mark.parametrize(("part", "how"), [*WAYS, *(("manifest.json", how) for how in MANIFESTS)])
def test_damage_is_found_and_the_newest_intact_one_is_used(part, how, tmp_path):
    target = store(tmp_path / "checkpoints", keep_last=5)
    good, bad = save(target, 1), save(target, 2)
    assert find_damage(bad) is None
    (ANY | MANIFESTS)[how](next(bad.glob(part)))
    assert find_damage(bad)
    with pytest.raises(UserError, match=r"damaged: .* --checkpoint STEP \(others: 1\)"):
        load_tensors(bad, tensors(0.0))
    found, complaints = target.newest_intact()
    assert found == good
    assert len(complaints) == 1
    assert str(bad) in complaints[0]


def test_retention_keeps_last_every_named_and_best(tmp_path):
    kept = store(tmp_path, keep_last=2, keep_every=4, keep_steps=(3,))
    for name in (".writing-000000002", ".removing-step-000000001", ".damaged-step-000000003"):
        (tmp_path / name).mkdir()
    assert kept.all() == []
    kept.clean()
    assert not list(tmp_path.iterdir())
    save(kept, 1)
    assert kept.best() is None
    with pytest.raises(UserError, match=r"'best'.*best, 1"):
        kept.find("best")
    for step, nll in enumerate([9.0, 1.0, 5.0, 5.0, 4.0, 4.0, 4.0, 4.0, 3.0], start=1):
        save(kept, step, nll)
    assert [int(p.name[5:]) for p in kept.all()] == [2, 3, 4, 8, 9]
    assert kept.find("best") == kept.best() == tmp_path / "step-000000002"
    assert kept.find("latest") == kept.find("9")


def test_a_good_checkpoint_survives_housekeeping_that_fails(tmp_path, monkeypatch, caplog):
    """An old one cannot be removed, as where somebody has its files open on a network disk."""
    target = store(tmp_path, keep_last=1)
    save(target, 1)
    replace = os.replace

    def no_removing(old, new):
        if ".removing-" in str(new):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(new))
        replace(old, new)

    monkeypatch.setattr(os, "replace", no_removing)
    assert find_damage(save(target, 2)) is None
    assert "step-000000002 is saved, but" in caplog.text


class Alone(World):
    """One of two processes, which hears nothing of the other."""

    def all_gather_object(self, value):
        return [value]


def test_processes_share_the_search_for_damage(tmp_path):
    folder = save(store(tmp_path), 1)
    worlds = [Alone(rank, 2) for rank in (0, 1)]
    assert [find_damage(folder, world) for world in worlds] == [None, None]
    for part in ("*.safetensors", "state.json"):
        (path,) = folder.glob(part)
        flip(path, 3)
        assert sorted(bool(find_damage(folder, world)) for world in worlds) == [False, True]
        flip(path, 3)
