"""Records of finished runs: all that a comparison reads, nothing else."""

from __future__ import annotations

import shutil
import tarfile
from dataclasses import replace

import pytest
import records

from bellmask.compare.execute import PlannedRun, TrainingOptions
from bellmask.compare.results import read_run
from bellmask.config.config import load_config


@pytest.fixture
def finished(zoo, tmp_path, monkeypatch):
    """A run of a comparison; training it again would be an error."""
    monkeypatch.setattr(records, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(records, "execute", lambda runs, options: None)
    folder = tmp_path / "runs" / "0123456789abcdef"
    shutil.copytree(zoo / "bell", folder)
    (folder / "samples").mkdir()
    (folder / "samples/step-000000100.txt").write_text("one\n\n--------\n\nanother")
    return PlannedRun("bell", "", load_config(folder / "config.json"), folder)


def test_a_record_is_read_as_its_run(finished, tmp_path):
    place = tmp_path / "place"
    assert records.recorded("medium", finished, place) is None
    there = records.folders("medium", [finished], TrainingOptions(jobs=2), place)
    whole = read_run(finished.folder)
    shutil.rmtree(finished.folder)
    for found in there, records.folders("medium", [finished], TrainingOptions(), tmp_path / "new"):
        read = read_run(found[0])
        assert read.summary() == whole.summary()
        assert (read.block_nll_EB == whole.block_nll_EB).all()
        assert read.samples() == ["one", "another"]
        assert {path.name for path in found[0].iterdir()} == set(records.PARTS)


def test_a_record_of_other_options_is_not_used(finished, tmp_path):
    records.record("medium", finished)
    other = replace(finished, folder=finished.folder.with_name("fedcba9876543210"))
    assert records.recorded("medium", other, tmp_path / "place") is None


def test_a_record_has_no_traces_of_a_machine(finished):
    records.record("medium", finished)
    with tarfile.open(records.archive("medium", finished)) as tar:
        for member in tar:
            assert (member.mtime, member.uid, member.gid, member.uname) == (0, 0, 0, "")
            assert not member.name.startswith("/")
