"""A run on a Hugging Face causal LM, exported: loaded by bellmask and by transformers it is the
same model, and another program's view of it (a loop over rows, the causal LM alone) agrees.
"""

from __future__ import annotations

import ast
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_code import keep_modules
from torch import Tensor

import bellmask
from bellmask.assemble import train_run
from bellmask.cli import run_command
from bellmask.config import load_config
from bellmask.errors import UserError
from bellmask.exchange import hugging_face
from bellmask.exchange.causal_export import CAUSAL_CODE
from bellmask.exchange.exported_options import exported_options
from bellmask.exchange.hugging_face import export_hugging_face, export_mdlm
from bellmask.exchange.vocabulary import map_ids
from bellmask.run import Run, load_run

SHARED = Path(os.environ.get("BELLMASK_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
STORIES = SHARED / "stories260K"
SIGN = "<|endoftext|>"
LETTERS = "abcdefghijklmnopqrstuvwxyz. \n"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(autouse=True)
def _modules_stay_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keep_modules(monkeypatch, tmp_path)


def save_tokenizer(folder: Path, specials: list[str], **roles: str) -> int:
    """Letters as tokens; the number of entries."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = {name: i for i, name in enumerate(["?", *LETTERS, *specials])}
    inner = Tokenizer(models.WordLevel(entries, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", **roles)
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return len(entries)


def save_gpt2(folder: Path) -> Path:
    """Tied embeddings, BOS is EOS, neither pad nor mask: GPT-2's signs."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = save_tokenizer(folder, [SIGN], bos_token=SIGN, eos_token=SIGN)
    config = GPT2Config(
        vocab_size=size, n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def save_llama(folder: Path) -> Path:
    """A head of its own, two heads on one key; a pad, and a mask amid the vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "mask_token": "<m>"}
    size = save_tokenizer(folder, ["<pad>", "<m>", "<s>", "</s>"], **roles)
    config = LlamaConfig(
        vocab_size=size + 3, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=24,
        initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_phi(folder: Path) -> Path:
    """A head with a bias, one for each token; the same odd vocabulary."""
    from transformers import PhiConfig, PhiForCausalLM

    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "mask_token": "<m>"}
    config = PhiConfig(
        vocab_size=save_tokenizer(folder, ["<pad>", "<m>", "<s>", "</s>"], **roles),
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    model = PhiForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(folder)
    return folder


def save_windowed(folder: Path) -> Path:
    """Qwen2 with layers that see eight positions only, until a mask opens them."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    size = save_tokenizer(folder, ["<pad>", SIGN], eos_token=SIGN, pad_token="<pad>")
    config = Qwen2Config(
        vocab_size=size, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=24,
        initializer_range=0.3, tie_word_embeddings=True, use_sliding_window=True,
        sliding_window=8, max_window_layers=1,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


MODELS: dict[str, Callable[[Path], Path]] = {
    "gpt2": save_gpt2,
    "llama": save_llama,
    "phi": save_phi,
    "windowed": save_windowed,
}
SHORT = (
    "--train.steps 3 --train.batch-size 4 --optim.warmup-steps 0 --optim.lr 0.01 --optim.ema 0.5 "
    "--validation.every never --validation.blocks 4 --checkpoint.every never"
).split()
ARM = ["--framework", "arm"]


@pytest.fixture(scope="session")
def causal_runs(small_config: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``causal_runs("gpt2", "--start.lora-rank", "2")``: a run folder, trained once."""
    made: dict[tuple[str, ...], Path] = {}

    def train(kind: str, *more: str) -> Path:
        if (kind, *more) not in made:
            folder = tmp_path_factory.mktemp("causal")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(11)
                source = MODELS[kind](folder / f"small-{kind}") if kind in MODELS else Path(kind)
            start = ["--start.model", str(source)] if "--start.architecture" not in more else []
            config = small_config(*SHORT, *start, *more)
            config = replace(config, model=replace(config.model, dropout=0.0))
            train_run(config, folder / "run", is_quiet=True)
            made[kind, *more] = folder / "run"
        return made[kind, *more]

    return train


def exported(run: Run, folder: Path) -> Path:
    export_hugging_face(run, folder, weights="ema")
    return folder


def auto_model(folder: Path, **more: Any) -> Any:
    from transformers import AutoModelForMaskedLM

    return AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True, **more).eval()


def auto_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def our_logits(run: Run, x_BL: Tensor, **more: Any) -> Tensor:
    """[B, L - 1, V] of positions 1 .. L - 1, in our ids."""
    rows_N = torch.arange(x_BL.numel()).view(x_BL.shape)[:, 1:].flatten()
    return run.model(x_BL, rows_N, **more).view(len(x_BL), x_BL.shape[1] - 1, -1)


def masked_rows(run: Run, text: str) -> Tensor:
    """The text after BOS with every third token masked, and the same with every second."""
    ids = torch.from_numpy(run.tokenizer.encode(text))
    row = torch.cat([torch.tensor([run.tokenizer.bos_id]), ids])
    x_BL = torch.stack([row, row])
    x_BL[0, 1::3] = run.tokenizer.mask_id
    x_BL[1, 2::2] = run.tokenizer.mask_id
    return x_BL


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_logits_three_ways(
    causal_runs: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    run = load_run(causal_runs(kind))
    folder = exported(run, tmp_path / "out")
    loaded, model, tokenizer = bellmask.load(folder), auto_model(folder), auto_tokenizer(folder)
    x_BL = masked_rows(run, "the cat sat on the mat.")
    x_BL[0, 9] = run.tokenizer.pad_id  # read like any token unless it is hidden
    expected = our_logits(run, x_BL)
    assert expected.std() > 0.1
    assert torch.equal(our_logits(loaded, x_BL), expected)
    assert loaded.nll(["the cat", "on"], draws=2) == run.nll(["the cat", "on"], draws=2)
    order = torch.from_numpy(map_ids(run.tokenizer).completed())
    assert (
        tokenizer("the cat sat.")["input_ids"]
        == order[torch.from_numpy(run.tokenizer.encode("the cat sat."))].tolist()
    )
    with torch.no_grad():
        found = model(input_ids=order[x_BL]).logits
    assert found.shape == (*x_BL.shape, run.tokenizer.num_tokens + 1)
    predicted = order[: expected.shape[-1]]
    torch.testing.assert_close(found[:, 1:, predicted], expected, atol=1e-5, rtol=0)
    others = [i for i in range(found.shape[-1]) if i not in predicted.tolist()]
    assert tokenizer.mask_token_id in others
    assert (found[..., others] == -math.inf).all(), "neither the mask nor an added pad"
    assert (found[:, 0, predicted] == 0).all(), "position 0 knows nothing"


def test_ids_and_names_of_special_tokens(causal_runs: Callable[..., Path], tmp_path: Path) -> None:
    found = {}
    for kind in ("gpt2", "llama", "windowed"):
        folder = exported(load_run(causal_runs(kind)), tmp_path / kind)
        tokenizer, config = auto_tokenizer(folder), json.loads((folder / "config.json").read_text())
        roles = ("bos", "eos", "pad", "mask")
        found[kind] = [getattr(tokenizer, f"{role}_token_id") for role in roles]
        assert found[kind] == [config[f"{role}_token_id"] for role in roles]
        assert tokenizer("a" + tokenizer.mask_token)["input_ids"] == [1, found[kind][-1]]
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        assert chat == "user: hi\nassistant:"
    assert found == {
        "gpt2": [30, 30, 32, 31],
        "llama": [32, 33, 30, 31],
        "windowed": [31, 31, 30, 32],
    }


def test_padding_and_pairs_are_hidden(causal_runs: Callable[..., Path], tmp_path: Path) -> None:
    run = load_run(causal_runs("windowed"))
    model = auto_model(exported(run, tmp_path / "out"))
    row = torch.tensor([[31, 5, 32, 7, 32, 3, 32, 4, 8, 9, 32, 1, 1]])
    padded = torch.cat([row, torch.tensor([[30, 30]])], dim=1)
    seen = (torch.arange(15) < 13).long()[None]
    with torch.no_grad():
        alone = model(input_ids=row).logits
        hidden = model(input_ids=padded, attention_mask=seen).logits[:, :13]
        pairs = model(input_ids=padded, attention_mask=seen[:, None].expand(1, 15, 15)).logits[
            :, :13
        ]
        unhidden = model(input_ids=padded).logits[:, :13]
    torch.testing.assert_close(hidden, alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(pairs, alone, atol=1e-5, rtol=0)
    assert (unhidden - alone)[..., :30].abs().max() > 0.01
    ours = our_logits(run, padded, mask=seen.bool()[:, None, None])[:, :12]
    torch.testing.assert_close(hidden[:, 1:, : ours.shape[-1]], ours, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["gpt2", "windowed"])
def test_attention_is_open_however_it_is_computed(
    causal_runs: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    folder = exported(load_run(causal_runs(kind)), tmp_path / "out")
    x = torch.tensor([[30, 5, 32, 7, 6, 2, 32, 3, 4, 5, 6, 7, 8]])
    seen = torch.tensor([[1] * 11 + [0] * 2])
    fast, plain = (auto_model(folder, attn_implementation=how) for how in ("sdpa", "eager"))
    with torch.no_grad():
        for mask in (None, torch.ones_like(x), seen):
            a, b = (m(input_ids=x, attention_mask=mask).logits[..., :29] for m in (fast, plain))
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        full = fast(input_ids=x).logits[0, 1, :29]
        x[0, -1] = 9
        assert (fast(input_ids=x).logits[0, 1, :29] - full).abs().max() > 1e-4, "sees the end"


def test_saved_again_it_is_the_same_and_tied_rows_are_stored_once(
    causal_runs: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors import safe_open

    for kind in ("gpt2", "llama"):
        run = load_run(causal_runs(kind))
        model = auto_model(exported(run, tmp_path / f"{kind}-out"))
        model.save_pretrained(tmp_path / f"{kind}-again")
        again = auto_model(tmp_path / f"{kind}-again")
        x = torch.tensor([[30, 5, 31, 7]])
        assert torch.equal(model(input_ids=x).logits, again(input_ids=x).logits)
        names = {}
        for folder in ("out", "again"):
            with safe_open(tmp_path / f"{kind}-{folder}" / "model.safetensors", "pt") as stream:
                names[folder] = set(stream.keys())
        assert names["out"] == names["again"] == {n for n, _ in run.model.named_parameters()}
        for made in (model, again):
            is_tied = made.get_input_embeddings().weight is made.get_output_embeddings().weight
            assert is_tied == (kind == "gpt2")


def test_the_loss_leaves_position_0_out(causal_runs: Callable[..., Path], tmp_path: Path) -> None:
    model = auto_model(exported(load_run(causal_runs("gpt2")), tmp_path / "out"))
    x, labels = torch.tensor([[30, 31, 5, 31]]), torch.tensor([[8, 3, -100, 9]])
    out = model(input_ids=x, labels=labels)
    p = out.logits.detach().softmax(-1)
    expected = -(p[0, 1, 3].log() + p[0, 3, 9].log()) / 2
    torch.testing.assert_close(out.loss.detach(), expected)
    out.loss.backward()
    assert all(torch.isfinite(q.grad).all() for q in model.parameters())
    assert model.mask_row.grad.abs().max() > 0
    assert model.config.text_config.resid_pdrop == 0.0, "the run's dropout, not GPT-2's 0.1"
    loss, logits = model(input_ids=x, labels=labels, return_dict=False)
    assert torch.equal(loss, out.loss)
    assert torch.equal(logits, out.logits)


def test_half_precision_gives_nearly_the_same(
    causal_runs: Callable[..., Path], tmp_path: Path
) -> None:
    folder = exported(load_run(causal_runs("llama")), tmp_path / "out")
    x = torch.tensor([[32, 5, 31, 7, 31, 30]])
    seen = torch.tensor([[1, 1, 1, 1, 1, 0]])
    with torch.no_grad():
        full, half = (
            auto_model(folder, dtype=d)(input_ids=x, attention_mask=seen).logits[..., :29]
            for d in (torch.float32, torch.bfloat16)
        )
    assert half.dtype == torch.bfloat16
    assert (full - half.float()).abs().max() < 0.2 < full.std()


def test_low_rank_updates_are_merged(causal_runs: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = causal_runs("gpt2", "--start.lora-rank", "2", "--start.lora-alpha", "8")
    run = load_run(folder)
    x_BL = masked_rows(run, "the cat sat.")
    before = our_logits(run, x_BL)
    out = exported(run, tmp_path / "out")
    assert torch.equal(our_logits(run, x_BL), before), "the run itself keeps its updates"
    loaded = bellmask.load(out)
    assert (loaded.config.start.lora_rank, loaded.config.start.lora_alpha) == (0, 16.0)
    assert not [name for name, _ in loaded.model.named_parameters() if "lora" in name]
    torch.testing.assert_close(our_logits(loaded, x_BL), before, atol=1e-5, rtol=0)
    unmerged = bellmask.load(exported(load_run(causal_runs("gpt2")), tmp_path / "other"))
    assert (our_logits(unmerged, x_BL) - before).abs().max() > 1e-3
    order = torch.from_numpy(map_ids(run.tokenizer).completed())
    with torch.no_grad():
        found = auto_model(out)(input_ids=order[x_BL]).logits[:, 1:, : before.shape[-1]]
    torch.testing.assert_close(found, before, atol=1e-5, rtol=0)


def test_the_command_and_the_same_text_from_the_same_seed(
    causal_runs: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run, out = causal_runs("gpt2"), tmp_path / "out"
    assert run_command(["export", str(run), "--format", "hf", "--out", str(out)]) == 0
    capsys.readouterr()
    texts = []
    for folder in (run, out):
        more = "--num 3 --seed 1 --steps 4 --length 12".split()
        assert run_command(["generate", str(folder), *more]) == 0
        texts.append(capsys.readouterr().out.replace(str(folder), ""))
    assert texts[0] == texts[1]
    assert len(texts[0]) > 20
    second = tmp_path / "second"
    assert run_command(["export", str(out), "--format", "hf", "--out", str(second)]) == 0
    for path in out.rglob("*"):
        if path.is_file() and path.name != "README.md":
            assert path.read_bytes() == (second / path.relative_to(out)).read_bytes(), path


def test_a_fine_tuned_run_answers_the_same(
    causal_runs: Callable[..., Path], tmp_path: Path
) -> None:
    """Template and usual length of a response come along."""
    from bellmask.answers import Answerer, Question
    from bellmask.data.messages import Message

    examples = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"{a}{b}", "response": b + a} for a in "abcdef" for b in "ghijkl"]
    examples.write_text("\n".join(json.dumps(pair) for pair in pairs))
    run = load_run(causal_runs("gpt2", "--sft.train", str(examples), "--sft.round-to", "4"))
    out = tmp_path / "pushed"
    export_hugging_face(run, out, weights="ema", name="me/small")
    ours, theirs = Answerer(run), Answerer(bellmask.load(out))
    assert ours.length == theirs.length == 4
    asked = [Question.plain("ag"), Question((Message("user", "b"),), is_conversation=True)]
    found = [one.answer(asked, seed=5) for one in (ours, theirs)]
    assert found[0] == found[1]
    assert "| pairs.jsonl | yours to know |" in (out / "README.md").read_text()
    assert str(tmp_path) not in (out / "bellmask" / "config.json").read_text()


def test_mdlms_layout_is_refused(
    causal_runs: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run, out = causal_runs("gpt2"), tmp_path / "out.safetensors"
    assert run_command(["export", str(run), "--format", "mdlm", "--out", str(out)]) == 2
    shown = capsys.readouterr().err
    assert "causal LM (gpt2); mdlm's layout" in shown
    assert "use --format hf" in shown
    with pytest.raises(UserError, match="mdlm's layout"):
        export_mdlm(load_run(run), out)
    assert not out.exists()


def test_an_arm_is_a_plain_causal_lm(causal_runs: Callable[..., Path], tmp_path: Path) -> None:
    """No code comes along; each token's log-probability is that of the tokens before it."""
    from transformers import AutoModelForCausalLM

    run = load_run(causal_runs("gpt2", *ARM))
    out = exported(run, tmp_path / "out")
    assert not list(out.glob("*.py"))
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.lm_head.weight is model.transformer.wte.weight
    loaded, tokenizer = bellmask.load(out), auto_tokenizer(out)
    assert (tokenizer.mask_token, tokenizer.pad_token, len(tokenizer)) == (None, None, 31)
    row = tokenizer(tokenizer.bos_token + "the cat sat.", return_tensors="pt")
    x_BL = row["input_ids"]
    with torch.no_grad():
        logits = model(**row).logits
    torch.testing.assert_close(logits[:, :-1], our_logits(run, x_BL), atol=1e-5, rtol=0)
    nll = -sum(logits[0, i].log_softmax(-1)[x_BL[0, i + 1]] for i in range(x_BL.shape[1] - 1))
    assert run.nll(["the cat sat."])[0].nll == pytest.approx(float(nll), rel=1e-5)
    assert loaded.nll(["the cat sat."]) == run.nll(["the cat sat."])
    assert loaded.sample(2, length=8) == run.sample(2, length=8)
    assert torch.equal(loaded.model.mask_row, run.model.mask_row), "for a masked run that begins so"
    made = model.generate(**row, max_new_tokens=3, do_sample=False)
    assert made.shape[1] <= x_BL.shape[1] + 3
    card = (out / "README.md").read_text()
    assert "pipeline_tag: text-generation" in card
    assert "AutoModelForCausalLM" in card
    assert "masked" not in card.split("## Use")[0].replace("Measured", "")


def test_an_arm_whose_tokenizer_has_a_mask_is_refused(
    causal_runs: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="a mask of its own"):
        exported(load_run(causal_runs("llama", *ARM)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_random_weights_on_bytes(causal_runs: Callable[..., Path], tmp_path: Path) -> None:
    """With ``start.architecture`` every token has a row, the pad too."""
    path = save_gpt2(tmp_path / "shape") / "config.json"
    run = load_run(causal_runs("gpt2", "--start.architecture", str(path)))
    out = exported(run, tmp_path / "out")
    x_BL = masked_rows(run, "the cat")
    expected = our_logits(run, x_BL)
    assert torch.equal(our_logits(bellmask.load(out), x_BL), expected)
    model = auto_model(out)
    assert model.config.silent_token_ids == [259]
    with torch.no_grad():
        found = model(input_ids=x_BL).logits[:, 1:, :259]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert bellmask.load(out).config.start.architecture == "config.json"


def test_no_path_of_the_machine_is_told(causal_runs: Callable[..., Path], tmp_path: Path) -> None:
    run = load_run(causal_runs("gpt2"))
    start = str(run.config.start.model)
    assert Path(start).is_absolute()
    out = tmp_path / "pushed"
    export_hugging_face(run, out, weights="ema", name="me/small")
    for path in out.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors":
            assert str(Path(start).parent) not in path.read_text(), path
            assert str(Path(run.config.data.train).parent) not in path.read_text(), path
    assert load_config(out / "bellmask" / "config.json").start.model == "small-gpt2"
    facts = (out / "README.md").read_text()
    assert "| began as | small-gpt2 |" in facts
    assert "| blocks, width, heads | 2, 16, 2 |" in facts


def test_options_are_shortened_where_they_are_paths(tmp_path: Path) -> None:
    from bellmask.config import RunConfig

    plain = RunConfig()
    config = replace(
        plain,
        sft=replace(plain.sft, train="sharegpt:/home/me/talk.json", valid="/home/me/a:b.jsonl"),
        data=replace(plain.data, mixture=("/home/me/more.txt=0.3",)),
        start=replace(plain.start, model="owner/name"),
    )
    kept, cut = (exported_options(config, is_pushed=pushed) for pushed in (False, True))
    assert kept["sft"]["train"] == "sharegpt:/home/me/talk.json"
    assert (cut["sft"]["train"], cut["sft"]["valid"]) == ("sharegpt:talk.json", "a:b.jsonl")
    assert cut["data"]["mixture"] == ["more.txt=0.3"]
    assert cut["start"]["model"] == kept["start"]["model"] == "owner/name"


def test_the_cards_programs_run(
    causal_runs: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, more in enumerate(([], ARM)):
        run = load_run(causal_runs("gpt2", *more))
        card = (exported(run, tmp_path / f"model{number}") / "README.md").read_text()
        programs = [part.split("```")[0] for part in card.split("```python\n")[1:]]
        assert len(programs) == 2
        names: dict[str, Any] = {}
        for program in programs:
            exec(program, names)
        assert names["logits"].shape[-1] == (33, 31)[number]


def test_damage_is_noticed(causal_runs: Callable[..., Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    out = exported(load_run(causal_runs("gpt2")), tmp_path / "out")
    weights = load_file(out / "model.safetensors")
    save_file({**weights, "mask_row": torch.zeros(3)}, out / "model.safetensors")
    with pytest.raises(UserError, match="does not hold the tensors"):
        bellmask.load(out)
    del weights["mask_row"]
    save_file(weights, out / "model.safetensors")
    with pytest.raises(UserError, match="does not hold the tensors"):
        bellmask.load(out)
    (out / "bellmask" / "backbone.json").write_text("{")
    with pytest.raises(UserError, match=r"backbone\.json"):
        bellmask.load(out)
    (out / "bellmask" / "backbone.json").unlink()
    with pytest.raises(UserError, match=r"backbone\.json is missing"):
        bellmask.load(out)


def test_a_run_can_begin_with_an_export(causal_runs: Callable[..., Path], tmp_path: Path) -> None:
    arm = load_run(causal_runs("gpt2", *ARM))
    out = exported(arm, tmp_path / "small-arm")
    a, b = (load_run(causal_runs(str(folder), "--train.seed", "3")) for folder in (arm.folder, out))
    x_BL = masked_rows(a, "the cat")
    assert torch.equal(our_logits(a, x_BL), our_logits(b, x_BL))


def test_the_shipped_code_needs_torch_and_transformers_only() -> None:
    path = Path(hugging_face.__file__).parent / "hub_code" / CAUSAL_CODE
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported == {"__future__", "collections", "typing", "torch", "transformers"}


@pytest.mark.skipif(not STORIES.exists(), reason="stories260K is not here")
def test_a_real_model(causal_runs: Callable[..., Path], tmp_path: Path) -> None:
    run = load_run(causal_runs(str(STORIES)))
    out = exported(run, tmp_path / "out")
    loaded, model, tokenizer = bellmask.load(out), auto_model(out), auto_tokenizer(out)
    text = "Once upon a time there was a little dog."
    x_BL = masked_rows(run, text)
    expected = our_logits(run, x_BL)
    assert torch.equal(our_logits(loaded, x_BL), expected)
    assert loaded.sample(2, seed=1, steps=4) == run.sample(2, seed=1, steps=4)
    order = torch.from_numpy(map_ids(run.tokenizer).completed())
    row = tokenizer(tokenizer.bos_token + text)["input_ids"]
    assert row[1:] == order[torch.from_numpy(run.tokenizer.encode(text))].tolist()
    with torch.no_grad():
        found = model(input_ids=order[x_BL]).logits[:, 1:, order[: expected.shape[-1]]]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (out / "model.safetensors").stat().st_size < 1.2e6, "tied rows once"
