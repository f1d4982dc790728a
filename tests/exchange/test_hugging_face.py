"""An exported folder, loaded by transformers and by bellmask, is the run it came from."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from remote_code import keep_modules

import bellmask
from bellmask.cli import run_command
from bellmask.errors import UserError
from bellmask.exchange import hub, hugging_face
from bellmask.exchange.hugging_face import export_hugging_face
from bellmask.exchange.vocabulary import map_ids
from bellmask.options import (
    DataOptions,
    FrameworkOptions,
    LawOptions,
    ModelOptions,
    ObjectiveOptions,
    ScheduleOptions,
)
from bellmask.records import MetricsFile, read_metrics
from bellmask.run import Run, load_run

TEXTS = {
    "bytes": ["the cät sat\n", "on"],
    "bpe": ["the cats sat on the mät.", " the"],
    "bert-like": ["the cats sat", "on mat"],
    "gpt2-like": ["the cats sat on the mät.", " the"],
    "symbols": ["ab ba cde", "e"],
}
TIMED = ModelOptions(2, 16, 2, dropout=0.0, modulation="time", time_input="sigma")


@pytest.fixture(autouse=True)
def _modules_stay_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keep_modules(monkeypatch, tmp_path)


def exported(run: Run, folder: Path, weights: str = "ema") -> Path:
    export_hugging_face(run, folder, weights=weights)
    return folder


def auto_model(folder: Path, **more: Any):
    from transformers import AutoModelForMaskedLM

    return AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True, **more).eval()


def auto_tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@torch.no_grad()
def our_logits(run: Run, x_BL: torch.Tensor, **more: Any) -> torch.Tensor:
    """[B, L, V], in our ids."""
    rows_N = torch.arange(x_BL.numel())
    return run.model(x_BL, rows_N, **more).view(*x_BL.shape, -1)


@pytest.mark.parametrize("kind", TEXTS)
def test_text_gives_the_same_logits_three_ways(
    tools: SimpleNamespace, tmp_path: Path, kind: str
) -> None:
    run = load_run(tools.write_run(tmp_path / "run", tools.TOKENIZERS[kind]()))
    folder = exported(run, tmp_path / "out")
    loaded, model, tokenizer = bellmask.load(folder), auto_model(folder), auto_tokenizer(folder)
    order = torch.from_numpy(map_ids(run.tokenizer).completed())
    assert tokenizer.mask_token_id == order[-1] == model.config.mask_token_id
    assert (loaded.step, loaded.config.model) == (run.step, run.config.model)
    assert loaded.nll(TEXTS[kind], draws=2) == run.nll(TEXTS[kind], draws=2)
    for text in TEXTS[kind]:
        x_BL = torch.from_numpy(run.tokenizer.encode(text))[None].clone()
        theirs = tokenizer(text, return_tensors="pt")
        assert torch.equal(theirs["input_ids"], order[x_BL]), "the text has the same ids"
        assert (
            tokenizer.decode(theirs["input_ids"][0]).split()
            == run.tokenizer.decode(x_BL[0].numpy()).split()
        )
        x_BL[0, ::2] = run.tokenizer.mask_id
        theirs["input_ids"][0, ::2] = tokenizer.mask_token_id
        expected = our_logits(run, x_BL)
        assert expected.std() > 0.1
        assert torch.equal(our_logits(loaded, x_BL), expected)
        with torch.no_grad():
            found = model(**theirs).logits
        torch.testing.assert_close(found[..., order[:-1]], expected, atol=1e-6, rtol=1e-6)
        assert (found[..., tokenizer.mask_token_id] == -math.inf).all()


def test_special_tokens_keep_their_names_and_ids(tools: SimpleNamespace, tmp_path: Path) -> None:
    found = {}
    for kind in ("bytes", "bpe", "bert-like", "gpt2-like"):
        run = load_run(tools.write_run(tmp_path / kind, tools.TOKENIZERS[kind]()))
        tokenizer = auto_tokenizer(exported(run, tmp_path / f"{kind}-out"))
        names = ("bos", "eos", "pad", "mask")
        found[kind] = [getattr(tokenizer, f"{name}_token_id") for name in names]
        masked = tokenizer("the" + tokenizer.mask_token)["input_ids"]
        assert masked[-1] == tokenizer.mask_token_id, "a mask can be written into the text"
    assert found == {
        "bytes": [257, 256, 258, 259],
        "bpe": [1, 0, 2, 265],
        "bert-like": [2, 4, 0, 3],
        "gpt2-like": [265, 265, 267, 266],
    }


def test_padding_is_hidden_by_the_attention_mask(tools: SimpleNamespace, tmp_path: Path) -> None:
    run = load_run(tools.write_run(tmp_path / "run", tools.TOKENIZERS["bytes"]()))
    folder = exported(run, tmp_path / "out")
    model, tokenizer = auto_model(folder), auto_tokenizer(folder)
    batch = tokenizer(["the cat", "a"], padding=True, return_tensors="pt")
    alone = model(**tokenizer(["a"], return_tensors="pt")).logits
    together = model(**batch).logits[1:, :1]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    pairs = batch["attention_mask"][:, None, :].expand(-1, 7, -1)
    same = model(input_ids=batch["input_ids"], attention_mask=pairs).logits[1:, :1]
    torch.testing.assert_close(same, alone, atol=1e-5, rtol=0)
    unhidden = model(input_ids=batch["input_ids"]).logits[1:, :1]
    assert (unhidden - alone)[..., :5].abs().max() > 0.01


def test_the_loss_is_the_mean_cross_entropy_of_the_labels(
    tools: SimpleNamespace, tmp_path: Path
) -> None:
    run = load_run(tools.write_run(tmp_path / "run", tools.TOKENIZERS["bert-like"]()))
    model = auto_model(exported(run, tmp_path / "out"))
    x = torch.tensor([[3, 5, 3, 6]])
    labels = torch.tensor([[7, -100, 9, -100]])
    out = model(input_ids=x, labels=labels)
    p = out.logits.detach().softmax(-1)
    expected = -(p[0, 0, 7].log() + p[0, 2, 9].log()) / 2
    torch.testing.assert_close(out.loss.detach(), expected)
    out.loss.backward()
    assert all(torch.isfinite(q.grad).all() for q in model.parameters())
    loss, logits = model(input_ids=x, labels=labels, return_dict=False)
    assert torch.equal(loss, out.loss)
    assert torch.equal(logits, out.logits)


@pytest.mark.parametrize("time_input", ["stretched", "sigma"])
def test_times_are_told_or_counted(tools: SimpleNamespace, tmp_path: Path, time_input: str) -> None:
    options = ModelOptions(2, 16, 2, dropout=0.0, modulation="time", time_input=time_input)
    run = load_run(tools.write_run(tmp_path / "run", tools.TOKENIZERS["bytes"](), options))
    folder = exported(run, tmp_path / "out")
    model = auto_model(folder)
    x = torch.tensor([[259, 104, 259, 101], [100, 104, 259, 101]])
    with torch.no_grad():
        told = model(input_ids=x, t=torch.tensor([0.9, 0.2])).logits[..., :259]
        counted = model(input_ids=x).logits[..., :259]
    for found, times in ((told, [0.9, 0.2]), (counted, [0.5, 0.25])):
        expected = our_logits(run, x, t_B=torch.tensor(times))
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-6)
    assert torch.equal(
        our_logits(bellmask.load(folder), x, t_B=torch.tensor([0.9, 0.2])),
        our_logits(run, x, t_B=torch.tensor([0.9, 0.2])),
    )


def test_pads_are_not_counted_as_time_and_other_schedules_must_be_told(
    tools: SimpleNamespace, tmp_path: Path
) -> None:
    words = tools.TOKENIZERS["bytes"]()
    run = load_run(tools.write_run(tmp_path / "run", words, TIMED))
    model = auto_model(exported(run, tmp_path / "out"))
    x = torch.tensor([[259, 104, 258, 258]])
    real = torch.tensor([[1, 1, 0, 0]])
    with torch.no_grad():
        found = model(input_ids=x, attention_mask=real).logits
        told = model(input_ids=x, attention_mask=real, t=torch.tensor([0.5])).logits
    assert torch.equal(found, told)
    cosine = {"schedule": ScheduleOptions("cosine")}
    run = load_run(tools.write_run(tmp_path / "cosine", words, TIMED, **cosine))
    with pytest.raises(ValueError, match="cosine"):
        auto_model(exported(run, tmp_path / "other"))(input_ids=x)


def test_the_shipped_code_needs_torch_and_transformers_only() -> None:
    folder = Path(hugging_face.__file__).parent / "hub_code"
    imported = set()
    for name in hugging_face.CODE:
        for node in ast.walk(ast.parse((folder / name).read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add((node.module or "").split(".")[0])
    assert imported <= {"__future__", "math", "typing", "torch", "transformers"}


def test_half_precision_gives_nearly_the_same(tools: SimpleNamespace, tmp_path: Path) -> None:
    run = load_run(tools.write_run(tmp_path / "run", tools.TOKENIZERS["bytes"](), TIMED))
    folder = exported(run, tmp_path / "out")
    x = torch.tensor([[259, 104, 259, 101]])
    with torch.no_grad():
        full, half = (auto_model(folder, dtype=d)(input_ids=x).logits[..., :259] for d in
                      (torch.float32, torch.bfloat16))  # fmt: skip
    assert half.dtype == torch.bfloat16
    assert (full - half.float()).abs().max() < 0.2 < full.std()


def test_the_card_has_the_measured_numbers(tools: SimpleNamespace, tmp_path: Path) -> None:
    folder = tools.write_run(tmp_path / "run", tools.TOKENIZERS["bytes"]())
    run = load_run(folder)
    assert "Nothing was measured" in (exported(run, tmp_path / "none") / "README.md").read_text()
    numbers = {"nll": 1.23456, "nll_se": 0.0123, "perplexity": 3.43689, "bits_per_byte": 1.7811}
    numbers |= {"num_blocks": 64, "num_draws": 4}
    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.write({"kind": "validation", "step": 3, **numbers, "nll": 9.9})
    metrics.write({"kind": "validation", "step": 7, **numbers})
    card = (exported(run, tmp_path / "validated") / "README.md").read_text()
    assert "| validation | 1.2346 ± 0.0123 | 3.437 | 1.7811 | 64 x 4 |" in card
    assert "9.9" not in card, "numbers of other steps are not this model's"
    for place, data, nll in (
        ("evaluation", "the run's validation text", 1.5),
        ("evaluation-other", "texts/other.txt", 2.5),
    ):
        (folder / place).mkdir()
        report = {**numbers, "step": 7, "data": data, "nll": nll, "nll_se": None}
        (folder / place / "evaluation.json").write_text(json.dumps(report))
    card = (exported(run, tmp_path / "evaluated") / "README.md").read_text()
    assert "| validation | 1.5000 | 3.437" in card
    assert "| other.txt | 2.5000 |" in card
    assert "1.2346" not in card, "an evaluation is worth more than a validation in passing"
    assert "| WikiText-2, raw | CC BY-SA 4.0 |" in card
    count = sum(p.numel() for p in run.model.parameters())
    assert f"| parameters | {count:,} |" in card
    assert "objective bell, law TruncatedGaussian" in card
    assert "moving average" in card


def test_the_cards_programs_run(
    tools: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run(tools.write_run(tmp_path / "run", tools.TOKENIZERS["bytes"]()))
    card = (exported(run, tmp_path / "model") / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    programs = [part.split("```")[0] for part in card.split("```python\n")[1:]]
    assert len(programs) == 2
    names: dict[str, Any] = {}
    for program in programs:
        exec(program, names)
    assert names["logits"].shape == (1, 13, 260)


def test_what_belongs_to_this_machine_stays_here(tools: SimpleNamespace, tmp_path: Path) -> None:
    data = DataOptions(train="/home/me/notes.txt", block_length=12, cache="/home/me/cache")
    run = load_run(tools.write_run(tmp_path / "run", tools.TOKENIZERS["bytes"](), data=data))
    folder = exported(run, tmp_path / "out")
    assert "/home/me" not in (folder / "README.md").read_text()
    assert "notes.txt" in (folder / "README.md").read_text()
    assert "/home/me/cache" not in (folder / "bellmask" / "config.json").read_text()
    assert "machine" not in json.loads((folder / "run.json").read_text())


def test_never_half_an_export(
    tools: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run(tools.write_run(tmp_path / "run", tools.TOKENIZERS["bytes"]()))

    def fail(*_: Any, **__: Any) -> str:
        raise OSError("the disk is full")

    monkeypatch.setattr(hugging_face, "model_card", fail)
    with pytest.raises(OSError, match="disk is full"):
        exported(run, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir() if p.name != "modules"] == ["run"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    with pytest.raises(UserError, match="out exists"):
        exported(run, tmp_path / "out")


def test_an_export_has_one_checkpoint_and_one_kind_of_weights(
    tools: SimpleNamespace, tmp_path: Path
) -> None:
    folder = tools.write_run(tmp_path / "run", tools.TOKENIZERS["bytes"]())
    raw = load_run(folder, weights="raw")
    out = exported(raw, tmp_path / "out", weights="raw")
    assert bellmask.load(out, weights="raw", checkpoint="7").step == 7
    assert (
        bellmask.load(out).nll(["a"], draws=2)
        == raw.nll(["a"], draws=2)
        != load_run(folder).nll(["a"], draws=2)
    )
    with pytest.raises(UserError, match="raw weights; it has no ema ones"):
        bellmask.load(out, weights="ema")
    with pytest.raises(UserError, match="export of step 7; it has no checkpoint 3"):
        bellmask.load(out, checkpoint="3")
    assert bellmask.load(folder).nll(["a"], draws=2) == load_run(folder).nll(["a"], draws=2), (
        "runs load too"
    )


def test_damage_is_noticed(tools: SimpleNamespace, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    run = load_run(tools.write_run(tmp_path / "run", tools.TOKENIZERS["bytes"]()))
    out = exported(run, tmp_path / "out")
    weights = load_file(out / "model.safetensors")
    del weights["head.bias"]
    save_file(weights, out / "model.safetensors")
    with pytest.raises(UserError, match="does not hold the tensors"):
        bellmask.load(out)
    (out / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="larger model than the 3 bytes"):
        bellmask.load(out)
    (out / "bellmask" / "tokenizer.json").write_text('{"kind": "symbols", "num_tokens": 5}')
    with pytest.raises(UserError, match="not the one the run was trained with"):
        bellmask.load(out)


def test_causal_runs_are_refused(tools: SimpleNamespace, tmp_path: Path) -> None:
    sections = {
        "framework": FrameworkOptions("sigma_arm"),
        "law": LawOptions("uniform"),
        "objective": ObjectiveOptions("nelbo"),
    }
    words = tools.TOKENIZERS["bytes"]()
    run = load_run(tools.write_run(tmp_path / "run", words, **sections))
    with pytest.raises(UserError, match=r"causal model \(framework sigma_arm\)"):
        exported(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class FakeHub:
    """Keeps what is uploaded in a folder."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fails = fails

    def create_repo(self, name: str, **options: Any) -> str:
        if self.fails:
            raise OSError("401 Unauthorized\nlog in")
        self.calls.append((name, options))
        return f"https://hub/{name}"

    def upload_folder(self, **options: Any) -> None:
        self.calls.append((options.pop("repo_id"), options))


def test_an_export_is_pushed_after_it_is_whole(
    tools: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    run = tools.write_run(tmp_path / "run", tools.TOKENIZERS["bytes"]())
    api = FakeHub()
    monkeypatch.setattr(hub, "_library", lambda: SimpleNamespace(HfApi=lambda: api))
    args = ["export", str(run), "--format", "hf", "--out", str(tmp_path / "out")]
    assert run_command([*args, "--push", "me/small", "--private"]) == 0
    assert "pushed: https://hub/me/small" in capsys.readouterr().out
    (made, options), (name, upload) = api.calls
    assert (made, name) == ("me/small", "me/small")
    assert (options["private"], options["exist_ok"]) == (True, True)
    assert upload["folder_path"] == str(tmp_path / "out")
    assert 'bellmask.load("me/small")' in (tmp_path / "out" / "README.md").read_text()
    api.fails = True
    args[-1] = str(tmp_path / "again")
    assert run_command([*args, "--push", "me/small"]) == 2
    error = capsys.readouterr().err
    assert "is written, but could not be pushed" in error
    assert "401 Unauthorized)" in error
    assert (tmp_path / "again" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--push", "me"], "OWNER/NAME"),
        (["--private"], "--push"),
        (["--format", "mdlm", "--push", "me/small"], "NAME.safetensors"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_written(
    tools: SimpleNamespace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    more: list[str],
    message: str,
) -> None:
    run = tools.write_run(tmp_path / "run", tools.TOKENIZERS["bytes"]())
    args = ["export", str(run), "--format", "hf", "--out", str(tmp_path / "out"), *more]
    assert run_command(args) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_names_on_the_hub_are_loaded(
    tools: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run(tools.write_run(tmp_path / "run", tools.TOKENIZERS["bytes"]()))
    out = exported(run, tmp_path / "snapshot")

    def download(repo_id: str) -> str:
        if repo_id != "me/small":
            raise OSError("404: no such repository")
        return str(out)

    monkeypatch.setattr(hub, "_library", lambda: SimpleNamespace(snapshot_download=download))
    assert bellmask.load("me/small").nll(["a"], draws=2) == run.nll(["a"], draws=2)
    with pytest.raises(UserError, match=r"the hub does not give it \(404: no such repository\)"):
        bellmask.load("me/other")
    monkeypatch.chdir(tmp_path)
    for path in ("nowhere", "run/misspelt"):
        with pytest.raises(UserError, match=f"there is no folder {path}"):
            bellmask.load(path)
    network = tools.PublishedNetwork(260, 259)
    folder = tmp_path / "theirs"
    folder.mkdir()
    from safetensors.torch import save_file

    save_file(network.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="bellmask import"):
        bellmask.load(folder)


def test_an_export_can_be_exported_again(tools: SimpleNamespace, tmp_path: Path) -> None:
    run = tools.write_run(tmp_path / "run", tools.TOKENIZERS["gpt2-like"]())
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_command(["export", str(run), "--format", "hf", "--out", str(first)]) == 0
    assert run_command(["export", str(first), "--format", "hf", "--out", str(second)]) == 0
    for path in first.rglob("*"):
        if path.is_file() and path.name != "README.md":
            assert path.read_bytes() == (second / path.relative_to(first)).read_bytes(), path
    weights = tmp_path / "w.safetensors"
    assert run_command(["export", str(first), "--format", "mdlm", "--out", str(weights)]) == 0
    back = ["--format", "mdlm", "--tokenizer", str(first), "--out", str(tmp_path / "back")]
    assert run_command(["import", str(weights), *back]) == 0
    a, b = load_run(run), load_run(tmp_path / "back")
    x = np.array([[a.tokenizer.mask_id, 3, 5]])
    kept = map_ids(a.tokenizer).ours
    torch.testing.assert_close(
        our_logits(b, torch.from_numpy(x))[..., kept],
        our_logits(a, torch.from_numpy(x))[..., kept],
        atol=0, rtol=0,
    )  # fmt: skip


def test_the_pages_program_runs(
    tools: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run(tools.write_run(tmp_path / "run", tools.TOKENIZERS["bytes"]()))
    out = exported(run, tmp_path / "exports" / "bell")
    mode = (out / "model.safetensors").stat().st_mode
    assert mode == (out / "config.json").stat().st_mode, "who may read one may read the other"
    page = (Path(__file__).parents[2] / "docs" / "exchange.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    assert names["logits"].shape == (1, 9, 260)


def test_a_trained_run_is_measured_the_same_after_export(
    small_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bellmask.assemble import train_run

    monkeypatch.setenv("BELLMASK_CACHE", str(tmp_path / "cache"))
    train_run(small_config("--validation.every", "3 steps"), tmp_path / "run", is_quiet=True)
    run = load_run(tmp_path / "run")
    loaded = bellmask.load(exported(run, tmp_path / "out"))
    train, valid = loaded.blocks()
    loaded.check_same_data(train)
    found, expected = (r.evaluate(valid.slice(0, 8), draws=2).nll for r in (loaded, run))
    assert found == expected
    last = read_metrics(run.folder / "metrics.jsonl")[-1]
    assert last["kind"] == "validation"
    assert f"{last['nll']:.4f} ± {last['nll_se']:.4f}" in (tmp_path / "out/README.md").read_text()


def test_every_byte_of_utf8_has_its_own_id(tools: SimpleNamespace, tmp_path: Path) -> None:
    run = load_run(tools.write_run(tmp_path / "run", tools.TOKENIZERS["bytes"]()))
    tokenizer = auto_tokenizer(exported(run, tmp_path / "out"))
    letters = [*range(0x800), *range(0x800, 0xD800, 499), *range(0xE000, 0x110000, 9973)]
    text = "".join(map(chr, letters))
    found = tokenizer(text, truncation=False)["input_ids"]
    assert found == list(text.encode())
    assert len(set(found)) > 240
    assert tokenizer.decode(found) == text


def test_what_is_pushed_names_no_folder_of_the_machine(
    tools: SimpleNamespace, tmp_path: Path
) -> None:
    run = load_run(tools.write_run(tmp_path / "run", tools.TOKENIZERS["bytes"]()))
    options = replace(run.config.data, train=str(tmp_path / "secret" / "text.txt"))
    run = replace(run, config=replace(run.config, data=options))
    for name, expected in (("me/small", "text.txt"), (None, options.train)):
        out = tmp_path / f"export-{name is None}"
        export_hugging_face(run, out, weights="raw", name=name)
        stored = json.loads((out / "bellmask" / "config.json").read_text())
        assert stored["data"]["train"] == expected
