"""An exported folder, loaded by bellmask and by transformers, is the run it came from.

Runs on our own trunk go by the name of their tokenizer; the others are small causal LMs.
"""

from __future__ import annotations

import ast
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from commands import refuses, succeeds
from pretrained_tools import SIZES, WINDOWS, make_config, make_lm
from remote_code import keep_modules
from safetensors.torch import load_file, save_file

import bellmask
from bellmask.config import options as opt
from bellmask.config.config import RunConfig
from bellmask.exchange import huggingface as hugging_face
from bellmask.exchange.huggingface import export_hugging_face, exported_options
from bellmask.run import load_run
from bellmask.storage import loading as hub
from bellmask.storage.loading import map_ids
from bellmask.storage.run_folder import MetricsFile
from bellmask.train.train_run import train_run
from bellmask.utils.errors import UserError

TRUNKS = ("bytes", "bpe", "bert-like", "gpt2-like", "symbols")
ARM = ("--framework", "arm")
SIGN = "<|endoftext|>"
LETTERS = "abcdefghijklmnopqrstuvwxyz. \n"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
ODD = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "mask_token": "<m>"}
CAUSAL = {
    # tied embeddings, BOS is EOS, neither pad nor mask
    "gpt2": ({"bos_token": SIGN, "eos_token": SIGN}, {"resid_pdrop": 0.1}),
    # a head of its own, two heads on one key; a pad, a mask amid the vocabulary, spare rows
    "llama": (ODD, {"tie_word_embeddings": False}),
    # a head with a bias
    "phi": (ODD, SIZES),
    # layers that see eight positions only, until a mask opens them
    "qwen2": (
        {"pad_token": "<pad>", "eos_token": SIGN},
        {"tie_word_embeddings": True, **WINDOWS["qwen2"]},
    ),
}


def save_causal_lm(folder, kind):
    """Random weights, letters as tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    roles, options = CAUSAL[kind]
    specials = sorted(set(roles.values()), key=["<pad>", "<m>", "<s>", "</s>", SIGN].index)
    entries = {name: i for i, name in enumerate(["?", *LETTERS, *specials])}
    inner = Tokenizer(models.WordLevel(entries, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", **roles)
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    spare = 3 if kind == "llama" else 0
    make_lm(make_config(kind, len(entries) + spare, **options)).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _modules_stay_here(monkeypatch, tmp_path):
    keep_modules(monkeypatch, tmp_path)


@pytest.fixture(scope="session")
def find_run(zoo, run_of, small_config, tmp_path_factory):
    """``find_run("gpt2", "--start.lora-rank", "2")``: a run, one step from a small causal LM."""
    made = {}

    def find(kind, *more):
        if kind in TRUNKS:
            return load_run(run_of(kind))
        if kind == "neighbors":
            return load_run(run_of("bytes", model=replace(small_config().model, local_conv=5)))
        if kind not in CAUSAL and not Path(kind).exists():
            return load_run(zoo / kind)
        if (kind, *more) not in made:
            folder = tmp_path_factory.mktemp("causal")
            source = save_causal_lm(folder / f"small-{kind}", kind) if kind in CAUSAL else kind
            short = ["--train.steps", "1", "--optim.warmup-steps", "0", "--optim.ema", "0.5"]
            config = small_config(*short, "--start.model", str(source), *more)
            config = replace(config, model=replace(config.model, dropout=0.0))
            with torch.enable_grad():  # whatever the test that asks first
                train_run(config, folder / "run", is_quiet=True)
            made[kind, *more] = folder / "run"
        return load_run(made[kind, *more])

    return find


@pytest.fixture(scope="session")
def find_export(find_run, tmp_path_factory):
    """The same, exported."""
    made = {}

    def find(*key):
        if key not in made:
            made[key] = exported(find_run(*key), tmp_path_factory.mktemp("exports") / "out")
        return made[key]

    return find


def exported(run, folder, weights="ema", **more):
    export_hugging_face(run, folder, weights=weights, **more)
    return folder


def auto_model(folder, **more):
    from transformers import AutoModelForMaskedLM

    return AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True, **more).eval()


def auto_tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@torch.no_grad()
def our_logits(run, x_BL, **more):
    """[B, L, V], in our ids; of a causal LM without position 0, which is given."""
    first = run.model.first_maskable
    rows_N = torch.arange(x_BL.numel()).view(x_BL.shape)[:, first:].flatten()
    return run.model(x_BL, rows_N, **more).view(len(x_BL), x_BL.shape[1] - first, -1)


def assert_near(found, expected, atol=1e-5):
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("kind", [*TRUNKS, *CAUSAL, "cpt"])
def test_text_gives_the_same_logits_three_ways(find_run, find_export, kind):
    run, folder = find_run(kind), find_export(kind)
    loaded, model, tokenizer = bellmask.load(folder), auto_model(folder), auto_tokenizer(folder)
    order, first = torch.from_numpy(map_ids(run.tokenizer).completed()), run.model.first_maskable
    assert tokenizer.mask_token_id == order[-1] == model.config.mask_token_id
    assert (loaded.step, loaded.config.model) == (run.step, run.config.model)
    texts = ["ab ba cde", "e"] if kind == "symbols" else ["the cats sat on mat", "on"]
    texts += ["the mät\n"] if kind in ("bytes", "bpe", "gpt2-like") else []
    assert loaded.nll(texts, draws=2) == run.nll(texts, draws=2)
    for text in texts:
        ids = torch.from_numpy(run.tokenizer.encode(text))
        theirs = tokenizer(text)["input_ids"]
        assert theirs == order[ids].tolist(), "the text has the same ids"
        assert tokenizer.decode(theirs).split() == run.tokenizer.decode(ids.numpy()).split()
        x_BL = torch.cat([torch.full((first,), run.tokenizer.bos_id), ids])[None]
        if first:
            x_BL[0, -1] = run.tokenizer.pad_id  # read like any token unless it is hidden
        x_BL[0, first::2] = run.tokenizer.mask_id
        expected = our_logits(run, x_BL)
        assert expected.std() > 0.1
        assert torch.equal(our_logits(loaded, x_BL), expected)
        with torch.no_grad():
            found = model(input_ids=order[x_BL]).logits
        predicted = order[: expected.shape[-1]]
        assert_near(found[:, first:, predicted], expected)
        silent = [i for i in range(found.shape[-1]) if i not in predicted.tolist()]
        assert tokenizer.mask_token_id in silent
        assert (found[..., silent] == -math.inf).all(), "neither the mask nor an added pad"
        assert (found[:, :first, predicted] == 0).all(), "position 0 knows nothing"


@pytest.mark.parametrize(
    ("kind", "expected"),
    {
        "bytes": [257, 256, 258, 259],
        "bert-like": [2, 4, 0, 3],
        "gpt2-like": [265, 265, 267, 266],
        "llama": [32, 33, 30, 31],
        "qwen2": [31, 31, 30, 32],
    }.items(),
)
def test_special_tokens_keep_their_names_and_ids(find_export, kind, expected):
    folder = find_export(kind)
    tokenizer, config = auto_tokenizer(folder), json.loads((folder / "config.json").read_text())
    roles = ("bos", "eos", "pad", "mask")
    assert [getattr(tokenizer, f"{role}_token_id") for role in roles] == expected
    assert [config[f"{role}_token_id"] for role in roles] == expected
    assert tokenizer("the" + tokenizer.mask_token)["input_ids"][-1] == expected[-1]
    if kind in CAUSAL:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        assert chat == "user: hi\nassistant:"


def test_every_byte_of_utf8_has_its_own_id(find_export):
    tokenizer = auto_tokenizer(find_export("bytes"))
    letters = [*range(0x800), *range(0x800, 0xD800, 499), *range(0xE000, 0x110000, 9973)]
    text = "".join(map(chr, letters))
    found = tokenizer(text, truncation=False)["input_ids"]
    assert found == list(text.encode())
    assert tokenizer.decode(found) == text


@pytest.mark.parametrize(
    ("key", "bos", "pad", "mask"),
    [
        (("bytes",), 257, 258, 259),
        (("neighbors",), 257, 258, 259),
        (("qwen2",), 31, 30, 32),
        (("qwen2", "--model.local-conv", "3", "--optim.lr", "0.1"), 31, 30, 32),
    ],
    ids=["bytes", "neighbors", "qwen2", "qwen2, neighbors"],
)
@torch.no_grad()
def test_padding_and_pairs_are_hidden_however_attention_is_computed(
    find_run, find_export, key, bos, pad, mask
):
    run, models = find_run(*key), [auto_model(find_export(*key))]
    near = run.model.local_conv
    assert (near is not None) == (len(key) > 1 or key == ("neighbors",))
    assert near is None or bool(near.weight.abs().min() > 0)
    if key[0] in CAUSAL:
        models.append(auto_model(find_export(*key), attn_implementation="eager"))
    row = torch.tensor([[bos, 5, mask, 7, mask, 3, mask, 4, 8, mask]])
    padded, seen = torch.cat([row, torch.tensor([[pad, pad]])], 1), (torch.arange(12) < 10)[None]
    pairs = seen[:, None].expand(1, 12, 12).long()
    first = run.model.first_maskable
    expected = our_logits(run, padded, mask=seen[:, None, None])[:, : 10 - first]
    for model in models:
        for given in (
            {"input_ids": row},
            {"input_ids": padded, "attention_mask": seen.long()},
            {"input_ids": padded, "attention_mask": pairs},
        ):
            found = model(**given).logits[:, first:10, : expected.shape[-1]]
            assert_near(found, expected)
        unhidden = model(input_ids=padded).logits[:, first:10, : expected.shape[-1]]
        assert (unhidden - expected).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_saved_again_it_is_the_same_and_tied_rows_are_stored_once(
    find_run, find_export, kind, tmp_path
):
    model = auto_model(find_export(kind))
    model.save_pretrained(tmp_path / "again")
    again, x = auto_model(tmp_path / "again"), torch.tensor([[30, 5, 31, 7]])
    assert torch.equal(model(input_ids=x).logits, again(input_ids=x).logits)
    for folder in (find_export(kind), tmp_path / "again"):
        names = load_file(folder / "model.safetensors").keys()
        assert names == {n for n, _ in find_run(kind).model.named_parameters()}
    is_tied = again.get_input_embeddings().weight is again.get_output_embeddings().weight
    assert is_tied == (kind == "gpt2")


@pytest.mark.parametrize(
    ("kind", "x", "labels"),
    [
        ("bert-like", [3, 5, 3, 6], [-100, 7, -100, 9]),
        ("gpt2", [30, 31, 5, 31], [8, 7, -100, 9]),  # position 0 is left out
    ],
)
def test_the_loss_is_the_mean_cross_entropy_of_the_labels(find_export, kind, x, labels):
    model = auto_model(find_export(kind))
    given = {"input_ids": torch.tensor([x]), "labels": torch.tensor([labels])}
    out = model(**given)
    p = out.logits.detach().softmax(-1)
    torch.testing.assert_close(out.loss.detach(), -(p[0, 1, 7].log() + p[0, 3, 9].log()) / 2)
    out.loss.backward()
    assert all(torch.isfinite(q.grad).all() for q in model.parameters())
    loss, logits = model(**given, return_dict=False)
    assert torch.equal(loss, out.loss)
    assert torch.equal(logits, out.logits)
    if kind == "gpt2":
        assert model.mask_row.grad.abs().max() > 0
        assert model.config.text_config.resid_pdrop == 0.0, "the run's dropout, not GPT-2's 0.1"


def timed(run_of, time_input, **sections):
    options = opt.ModelOptions(2, 16, 2, dropout=0.0, modulation="time", time_input=time_input)
    return load_run(run_of("bytes", model=options, **sections))


@pytest.mark.parametrize("time_input", ["stretched", "sigma"])
@torch.no_grad()
def test_times_are_told_or_counted(run_of, tmp_path, time_input):
    run = timed(run_of, time_input)
    folder = exported(run, tmp_path / "out")
    model, x = auto_model(folder), torch.tensor([[259, 104, 259, 101], [100, 104, 259, 101]])
    times, counted = torch.tensor([0.9, 0.2]), our_logits(run, x, t_B=torch.tensor([0.5, 0.25]))
    assert_near(model(input_ids=x, t=times).logits[..., :259], our_logits(run, x, t_B=times))
    assert_near(model(input_ids=x).logits[..., :259], counted)
    real = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    half = model(input_ids=x, attention_mask=real).logits
    assert torch.equal(half, model(input_ids=x, attention_mask=real, t=0.5 * real[:, 2]).logits)
    rounded = auto_model(folder, dtype=torch.bfloat16)(input_ids=x).logits[..., :259]
    assert rounded.dtype == torch.bfloat16
    assert (counted - rounded.float()).abs().max() < 0.2 < counted.std()
    loaded = bellmask.load(folder)
    assert torch.equal(our_logits(loaded, x, t_B=times), our_logits(run, x, t_B=times))
    cosine = timed(run_of, time_input, schedule=opt.ScheduleOptions("cosine"))
    with pytest.raises(ValueError, match="cosine"):
        auto_model(exported(cosine, tmp_path / "cosine"))(input_ids=x)


def test_low_rank_updates_are_merged(find_run, tmp_path):
    pytest.importorskip("peft")
    run = find_run("gpt2", "--start.lora-rank", "2", "--start.lora-alpha", "8", "--optim.lr", "0.1")
    x_BL = torch.tensor([[30, 5, run.tokenizer.mask_id, 7]])
    before = our_logits(run, x_BL)
    loaded = bellmask.load(exported(run, tmp_path / "out"))
    assert torch.equal(our_logits(run, x_BL), before), "the run itself keeps its updates"
    assert (loaded.config.start.lora_rank, loaded.config.start.lora_alpha) == (0, 16.0)
    assert not [name for name, _ in loaded.model.named_parameters() if "lora" in name]
    assert_near(our_logits(loaded, x_BL), before)
    assert (our_logits(find_run("gpt2"), x_BL) - before).abs().max() > 1e-3


def test_an_arm_is_a_plain_causal_lm(find_run, find_export):
    """No code comes along; each token's log-probability is that of the tokens before it."""
    from transformers import AutoModelForCausalLM

    run, out = find_run("gpt2", *ARM), find_export("gpt2", *ARM)
    assert not list(out.glob("*.py"))
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(model).__name__ == "GPT2LMHeadModel"
    loaded, tokenizer = bellmask.load(out), auto_tokenizer(out)
    assert (tokenizer.mask_token, tokenizer.pad_token, len(tokenizer)) == (None, None, 31)
    row = tokenizer(tokenizer.bos_token + "the cat sat.", return_tensors="pt")
    x_BL = row["input_ids"]
    with torch.no_grad():
        logits = model(**row).logits
    assert_near(logits[:, :-1], our_logits(run, x_BL))
    nll = -sum(logits[0, i].log_softmax(-1)[x_BL[0, i + 1]] for i in range(x_BL.shape[1] - 1))
    assert run.nll(["the cat sat."])[0].nll == pytest.approx(float(nll), rel=1e-5)
    assert loaded.nll(["the cat sat."]) == run.nll(["the cat sat."])
    assert loaded.sample(2, length=8) == run.sample(2, length=8)
    # a masked run begins with either of them alike, the mask's row included
    began = [find_run(str(folder), "--train.seed", "3") for folder in (run.folder, out)]
    x_BL[0, ::2] = began[0].tokenizer.mask_id
    assert torch.equal(*(our_logits(one, x_BL) for one in began))


def test_what_cannot_be_exported_is_refused(find_run, run_of, tmp_path):
    causal = {"law": opt.LawOptions("uniform"), "objective": opt.ObjectiveOptions("nelbo")}
    sigma = load_run(run_of("bytes", framework=opt.FrameworkOptions("sigma_arm"), **causal))
    llama = find_run("llama")  # its tokenizer has a mask, for which an ARM has no row
    arm = replace(llama, config=replace(llama.config, framework=opt.FrameworkOptions("arm")))
    for run, words in ((sigma, "sigma_arm"), (arm, "mask")):
        with pytest.raises(UserError, match=words):
            exported(run, tmp_path / "out")
    command = ["export", llama.folder, "--out", tmp_path / "out", "--format", "hf"]
    mdlm = ["export", llama.folder, "--out", tmp_path / "out.safetensors", "--format", "mdlm"]
    refuses(*mdlm, names="--format hf")
    refuses(*mdlm, "--push", "me/small", names="--push")
    refuses(*command, "--push", "me", names="--push")
    refuses(*command, "--private", names="--private")
    assert [p.name for p in tmp_path.iterdir() if p.name != "modules"] == []


@pytest.mark.parametrize("kind", ["gpt2-like", "gpt2"])
def test_the_command_writes_the_same_again_and_the_same_text_from_the_same_seed(
    find_run, kind, tmp_path
):
    run, first, second = find_run(kind), tmp_path / "first", tmp_path / "second"
    succeeds("export", run.folder, "--format", "hf", "--out", first)
    succeeds("export", first, "--format", "hf", "--out", second)
    for path in first.rglob("*"):
        if path.is_file() and path.name != "README.md":
            assert path.read_bytes() == (second / path.relative_to(first)).read_bytes(), path
    assert run.sample(3, seed=1, steps=4) == bellmask.load(first).sample(3, seed=1, steps=4)


def test_one_checkpoint_and_one_kind_of_weights(run_of, tmp_path):
    folder = run_of("bytes")
    raw, ema = load_run(folder, weights="raw"), bellmask.load(folder)
    out = exported(raw, tmp_path / "out", weights="raw")
    assert bellmask.load(out, weights="raw", checkpoint="7").step == 7
    stored, mine, other = (r.nll(["a"], draws=2) for r in (bellmask.load(out), raw, ema))
    assert stored == mine != other
    for wrong in ({"weights": "ema"}, {"checkpoint": "3"}):
        with pytest.raises(UserError, match=r"ema|checkpoint 3"):
            bellmask.load(out, **wrong)


def test_damage_is_noticed(find_run, tmp_path):
    out = exported(find_run("gpt2"), tmp_path / "out")
    model, own = out / "model.safetensors", out / "bellmask"
    assert model.stat().st_mode == (out / "config.json").stat().st_mode, "readers of one read both"
    weights = load_file(model)
    others = {name: tensor for name, tensor in weights.items() if name != "mask_row"}
    contents = {name: (own / name).read_bytes() for name in ("backbone.json", "tokenizer.json")}
    symbols = b'{"kind": "symbols", "num_tokens": 5}'
    for path, damaged in (
        (model, others),
        (model, others | {"mask_row": torch.zeros(3)}),
        (model, b"cut"),
        (own / "backbone.json", b"{"),
        (own / "backbone.json", None),
        (own / "tokenizer.json", symbols),
    ):
        if isinstance(damaged, dict):
            save_file(damaged, path)
        else:
            path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"3 bytes|{path.name}"):
            bellmask.load(out)
        save_file(weights, model)
        for name, content in contents.items():
            (own / name).write_bytes(content)
    assert bellmask.load(out).step == 1


def test_no_export_is_half_or_in_the_way(run_of, tmp_path, monkeypatch):
    run = load_run(run_of("bytes"))
    out = exported(run, tmp_path / "out")
    with pytest.raises(UserError, match="out"):
        exported(run, out)
    monkeypatch.setattr(hugging_face, "model_card", Mock(side_effect=OSError("the disk is full")))
    with pytest.raises(OSError, match="disk is full"):
        exported(run, tmp_path / "other")
    assert {p.name for p in tmp_path.iterdir()} <= {"modules", "out"}


def test_the_card_has_the_measured_numbers(run_of, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    run = replace(load_run(run_of("bytes")), folder=folder)
    (folder / "run.json").write_text("{}")

    def card(name):
        return (exported(run, tmp_path / name) / "README.md").read_text()

    assert "±" not in card("none"), "nothing was measured"
    numbers = {"nll": 1.23456, "nll_se": 0.0123, "perplexity": 3.43689, "bits_per_byte": 1.7811}
    numbers |= {"num_blocks": 64, "num_draws": 4}
    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.write({"kind": "validation", "step": 3, **numbers, "nll": 9.9})
    metrics.write({"kind": "validation", "step": 7, **numbers})
    validated = card("validated")
    assert "| 1.2346 ± 0.0123 | 3.437 | 1.7811 | 64 x 4 |" in validated
    assert "9.9" not in validated, "numbers of other steps are not this model's"
    for place, data, nll in (("", "the run's text", 1.5), ("-other", "/home/me/other.txt", 2.5)):
        path = folder / f"evaluation{place}" / "evaluation.json"
        path.parent.mkdir()
        report = {**numbers, "step": 7, "data": data, "nll": nll, "nll_se": None}
        path.write_text(json.dumps(report))
    evaluated, size = card("evaluated"), sum(p.numel() for p in run.model.parameters())
    for words in ("| 1.5000 | 3.437", "| other.txt | 2.5000 |", "CC BY-SA 4.0", f"{size:,}"):
        assert words in evaluated
    assert "1.2346" not in evaluated, "an evaluation is worth more than a validation in passing"


@pytest.mark.parametrize(
    ("key", "size"), [(("bytes",), 260), (("gpt2",), 33), (("gpt2", *ARM), 31), (("sft",), 260)]
)
def test_the_cards_programs_run(find_export, key, size, monkeypatch):
    folder = find_export(*key)
    monkeypatch.chdir(folder.parent)
    _, *parts = (folder / "README.md").read_text().split("```python\n")
    assert len(parts) == 2
    names = {}
    for part in parts:
        exec(part.split("```")[0], names)
    assert names["logits"].shape[-1] == size


def test_what_belongs_to_this_machine_stays_here(find_run, find_export, tmp_path):
    run, local = find_run("gpt2"), find_export("gpt2")
    assert "machine" not in json.loads((local / "run.json").read_text())
    pushed = exported(run, tmp_path / "pushed", name="me/small")
    places = [str(Path(path).parent) for path in (run.config.start.model, run.config.data.train)]
    for path in pushed.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors":
            assert not any(place in path.read_text() for place in places), path
    assert bellmask.load(pushed).config.start.model == "small-gpt2"
    assert bellmask.load(local).config.data.train == run.config.data.train
    plain = RunConfig()
    config = replace(
        plain,
        sft=replace(plain.sft, train="sharegpt:/home/me/talk.json", valid="/home/me/a:b.jsonl"),
        data=replace(plain.data, mixture=("/home/me/more.txt=0.3",), cache="/home/me/cache"),
        start=replace(plain.start, model="owner/name"),
    )
    whole, cut = (exported_options(config, is_pushed=pushed) for pushed in (False, True))
    sft, data = cut["sft"], cut["data"]
    assert (sft["train"], sft["valid"]) == ("sharegpt:talk.json", "a:b.jsonl")
    assert (data["mixture"], data["cache"]) == (["more.txt=0.3"], None)
    assert cut["start"]["model"] == "owner/name"
    assert whole["sft"]["train"] == "sharegpt:/home/me/talk.json"
    assert whole["data"]["cache"] is None


def test_the_shipped_code_needs_torch_and_transformers_only():
    allowed = {"__future__", "collections", "functools", "math", "typing"}
    allowed |= {"torch", "transformers"}
    for name in (*hugging_face.CODE, *hugging_face.CAUSAL_CODE):
        path = Path(bellmask.__file__).parent / name
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            assert {one.split(".")[0] for one in names} <= allowed


def test_an_export_is_pushed_after_it_is_whole(run_of, tmp_path, monkeypatch):
    api, out = Mock(), tmp_path / "out"
    api.create_repo.return_value = "https://hub/me/small"
    monkeypatch.setattr(hub, "hub_library", lambda: Mock(HfApi=lambda: api))
    command = ["export", run_of("bytes"), "--format", "hf", "--push", "me/small", "--out"]
    assert "https://hub/me/small" in succeeds(*command, out, "--private").text
    api.create_repo.assert_called_with("me/small", repo_type="model", private=True, exist_ok=True)
    upload = api.upload_folder.call_args.kwargs
    assert (upload["repo_id"], upload["folder_path"]) == ("me/small", str(out))
    assert 'bellmask.load("me/small")' in (out / "README.md").read_text()
    api.create_repo.side_effect = OSError("401 Unauthorized\nlog in")
    assert "log in\n" not in refuses(*command, tmp_path / "again", names="401 Unauthorized")
    assert (tmp_path / "again" / "model.safetensors").exists()


def test_names_on_the_hub_are_loaded(find_run, find_export, tmp_path, monkeypatch):
    def download(repo_id):
        if repo_id != "me/small":
            raise OSError("404: no such repository")
        return str(find_export("bytes"))

    monkeypatch.setattr(hub, "hub_library", lambda: SimpleNamespace(snapshot_download=download))
    monkeypatch.chdir(tmp_path)
    loaded = bellmask.load("me/small")
    assert loaded.nll(["a"], draws=2) == find_run("bytes").nll(["a"], draws=2)
    (tmp_path / "theirs").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "theirs" / "config.json").write_text("{}")
    for name, words in (
        ("me/other", "404"),
        ("nowhere", "nowhere"),
        ("theirs/misspelled", "misspelled$"),  # never looked for on the hub
        ("theirs", "bellmask import"),
    ):
        with pytest.raises(UserError, match=words):
            bellmask.load(name)
