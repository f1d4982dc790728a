"""A fixed list of small runs, and the numbers they give: what a rebuild must not change.

Everything goes through public entry points, the ``bellmask`` command above all, so the list
outlives any change of modules. ``test_frozen.py`` compares the results with ``results.json`` (to
1e-4, on any CPU); ``tools/same_numbers.py`` compares those of two checkouts exactly.

``zoo/`` has tiny trained runs. Commands run in a copy of that folder, which is their working
directory: paths in them are relative, so the folder can be copied anywhere.

    python tests/frozen/cases.py results OUT.json [--only PATTERN] [--all]
    python tests/frozen/cases.py zoo               # train the zoo anew and store it
    python tests/frozen/cases.py freeze            # store results.json anew
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ZOO = Path(os.environ.get("BELLMASK_FROZEN_ZOO", HERE / "zoo"))
RESULTS = HERE / "results.json"

SHORT = (
    "--data.train text.txt --data.cache cache --train.steps 8 --log.every 1 "
    "--validation.every '4 steps' --validation.blocks 64 --quiet --optim.warmup-steps 2 "
    "--validation.samples-every '8 steps' --validation.num-samples 2 --validation.sample-steps 4"
)
NARROW = "--model.num-layers 2 --model.width 8 --model.num-heads 2 --data.block-length 16"
SMALL_GPT2 = "--start.architecture gpt2.json"
SAMPLE = "--num 3 --seed 5 --format jsonl --out out/samples.jsonl"
PAPER_PRESETS = "lm1b lm1b_unpacked owt cpt_gpt2_large sft_tasks sft_sharegpt".split()
LAPTOP_PRESETS = "tiny small arm_tiny cpt_tiny sft_tiny tiny_base tiny_arm tiny_aoarm".split()


@dataclass(frozen=True)
class Case:
    """Commands, and the files under ``out`` that hold their numbers."""

    name: str
    commands: tuple[str, ...]
    num_processes: int = 1
    """Processes of the first command."""
    is_stored: bool = True
    """Its results are in ``results.json``; others are for ``same_numbers.py`` alone."""


def _case(name: str, *commands: str, **more: Any) -> Case:
    return Case(name, commands, **more)


def _training(name: str, options: str, **more: Any) -> Case:
    return _case(f"train-{name}", f"train {options} {SHORT} --out out/run", **more)


def _sampling(name: str, options: str, run: str = "fluent", **more: Any) -> Case:
    return _case(f"generate-{name}", f"generate {run} {SAMPLE} {options}", **more)


def _cases() -> Iterator[Case]:
    yield _training("base", "tiny_base")
    yield _training("bell", "tiny_bell")
    yield _training("importance", "tiny --objective importance")
    yield _training("middle_flat", "tiny_base --schedule middle_flat --schedule.scale 0.2")
    yield _training("muon", "tiny --optimizer muon")
    yield _training("fast", "tiny_fast --data.document-attention")
    yield _training("arm_conv", "tiny_arm --model.local-conv 5")
    yield _training("dropout", "tiny --model.dropout 0.1")
    unpacked = "tiny --data.packing unpacked --data.documents line"
    yield _training("unpacked", f"{unpacked} --model.modulation time")
    for framework in ("arm", "sigma_arm", "aoarm"):
        yield _training(framework, f"tiny_{framework}")
    yield _training("causal_lm", f"arm_tiny {SMALL_GPT2} --data.tokenizer bytes")
    yield _training("cpt", "cpt_tiny --start.model gpt2 --start.anneal-steps 6")
    sft = "sft_tiny --start.model cpt --sft.train toy:reverse:3 --sft.round-to 8"
    yield _training("sft", f"{sft} --data.block-length 64")
    yield _training("two_processes", f"tiny_bell {NARROW}", num_processes=2)

    for rule in ("ancestral", "random"):
        yield _sampling(rule, f"--steps 6 --rule {rule}")
    # without a prefix all confidences are equal at first, and rounding would decide
    for rule in ("most_confident", "entropy", "margin"):
        yield _sampling(rule, f"--steps 6 --rule {rule} --prefix 'the cat '")
    yield _sampling("first_hitting", "--rule first_hitting")
    yield _sampling("cosine", "--rule margin --grid cosine --temperature 0.7 --top-k 9 --prefix a")
    yield _sampling("top_p", "--rule entropy --top-p 0.8 --noise float32 --prefix 'the '")
    yield _sampling("remask", "--remask 0.3")
    yield _sampling("rescale", "--remask 0.5 --remask-kind rescale", is_stored=False)
    yield _sampling("blocks", "--block-length 4 --cache prefix --rule margin --prefix 'a '")
    yield _sampling("guidance", "--guidance 1.5 --canvas 'the [MASK*5] sat [MASK*4].'")
    yield _sampling("base", "--weights raw --checkpoint latest", "base", is_stored=False)
    yield _sampling("arm", "--prefix 'the cat '", "arm")
    yield _sampling("aoarm", "--canvas 'the [MASK*6] mat'", "aoarm")
    yield _sampling("cpt", "--rule most_confident --prefix 'the '", "cpt")
    yield _sampling("answers", "--prompt 'Reverse: a b c'", "sft")

    for run in ("bell", "arm", "sigma_arm", "aoarm", "gpt2", "cpt", "sft"):
        yield _case(f"evaluate-{run}", f"evaluate {run} --blocks 24 --draws 3 --out out")
    yield _case("evaluate-other-text", "evaluate base --data other.txt --weights raw --out out")
    pair = "evaluate base bell --out out"
    yield _case(
        "zero-shot",
        f"{pair} --suite zero-shot --corpora ptb wikitext2 --from ptb=other.txt "
        "--from wikitext2=text.txt --blocks 12 --seeds 2",
    )
    yield _case("generative", f"{pair} --suite generative --scorer arm --nfe 2 8 --num 3 --seeds 2")
    yield _case("paper", f"{pair} --suite paper --data-dir tasks --limit 3 --seeds 2 --draws 4")
    yield _case(
        "paper-sft",
        "evaluate sft --suite paper --data-dir tasks --tasks piqa triviaqa winogrande "
        "--limit 2 --seeds 1 --out out",
        is_stored=False,
    )
    yield _case(
        "lm-eval",
        "lm-eval base arm --tasks piqa winogrande triviaqa lambada --data-dir tasks --limit 3 "
        "--draws 4 --out out",
    )
    yield _case(
        "judge",
        "judge pairwise sft cpt --benchmark prompts.jsonl --judge local:gpt2 --seeds 2 --steps 4 "
        "--length 8 --out out",
    )
    compared = f"{NARROW} --data.train text.txt --data.cache cache --train.steps 12"
    short = "--validation.every '4 steps' --validation.blocks 32"
    yield _case(
        "compare",
        f"compare tiny base bell {compared} {short} --quiet --runs runs --out out",
    )
    yield _case("report", "report base bell arm --out out")
    yield _case(
        "compare-seeds",
        f"compare tiny base bell --seeds 3 {compared} {short} --quiet --runs runs --out out",
        is_stored=False,
    )
    yield _case(
        "compare-grid",
        f"compare tiny base bell+muon arm --grid optim.lr=3e-3,6e-3 {compared} {short} --quiet "
        "--runs runs --out out",
        is_stored=False,
    )
    stages = "--train.steps 8 --validation.every '4 steps' --data.cache cache"
    yield _case(
        "compare-stages",
        f"compare --suite cpt_sft --seeds 1 --quiet --runs runs --out out "
        f"--cpt {shlex.quote(f'cpt_tiny --start.model gpt2 --data.train text.txt {stages}')} "
        f"--sft {shlex.quote(f'sft_tiny --sft.train toy:reverse:3 --sft.round-to 8 {stages}')}",
        is_stored=False,
    )

    yield _case(
        "analyze-time-laws",
        "analyze time-laws --laws uniform gaussian:0.4,0.1 laplace:0.5,0.2 --length 64 --out out",
    )
    yield _case("analyze-schedules", "analyze schedules --out out", is_stored=False)
    yield _case(
        "analyze-inefficient-masks",
        "analyze inefficient-masks --length 20 --out out",
    )
    yield _case("analyze-context-curve", "analyze context-curve base arm --blocks 16 --out out")
    yield _case(
        "analyze-context-drop", "analyze context-drop steps --blocks 16 --out out", is_stored=False
    )
    for name, options in {
        "radius": "--radii 1 4 --masks 2",
        "additivity": "--counts 1 2 4",
    }.items():
        yield _case(
            f"analyze-gradient-{name}",
            f"analyze gradient-{name} bell --draws 4 {options} --out out",
        )
    yield _case("analyze-orders", "analyze orders arm sigma_arm aoarm --out out", is_stored=False)
    yield _case("analyze-decompose", "analyze decompose toy --rows 16 --out out")
    yield _case("plan", "plan owt --devices 4xH100 --out out/plan.json")
    for name in ("lm1b_base --devices 2x8xH100 --scale.sharding full", "cpt_tiny --devices CPU"):
        preset = name.split()[0]
        options = " --start.model gpt2 --data.block-length 16" if preset == "cpt_tiny" else ""
        yield _case(f"plan-{preset}", f"plan {name}{options} --out out/plan.json", is_stored=False)
    for name in PAPER_PRESETS + LAPTOP_PRESETS:
        yield _case(f"config-{name}", f"config show {name}", is_stored=False)
    yield _case("export-hf", "export bell --format hf --out out/exported", is_stored=False)
    yield _case("export-cpt", "export cpt --format hf --out out/exported", is_stored=False)
    yield _case(
        "mdlm",
        "export bell --format mdlm --out out/mdlm.safetensors",
        "import out/mdlm.safetensors --format mdlm --tokenizer bytes --out out/back",
        "evaluate out/back --data text.txt --blocks 8 --out out/evaluation",
        is_stored=False,
    )

    for name, options in {
        "laplace": "tiny --law laplace --law.scale 0.2 --optim.curve cosine",
        "dirac": "tiny --law dirac --law.mu 0.4",
        "cosine": "tiny_base --schedule cosine --optim.ema 0",
        "unstratified": "tiny_base --train.no-stratified",
        "document_attention": "tiny --data.documents line --data.document-attention",
        "accumulated": "tiny --train.microbatch-size 8",
        "recompute": "tiny --scale.recompute block",
        "bpe": "tiny --data.tokenizer bpe:300",
        "aoarm_crossed": "tiny_aoarm --framework.encoding crossed",
        "lora": "cpt_tiny --start.model gpt2 --start.lora-rank 4",
        "min_masks": f"{sft} --data.block-length 64 --sft.min-masks 1 --sft.average tokens",
    }.items():
        yield _training(name, options, is_stored=False)
    for name in ("adamw", "muon"):
        command = f"tiny {NARROW} --scale.sharding full --optimizer {name}"
        yield _training(f"sharded_{name}", command, num_processes=2, is_stored=False)
    first = f"train tiny {SHORT} {NARROW} --train.steps 4 --out out/run"
    yield _case("train-resumed", first, f"{first} --train.steps 8 --resume yes")


CASES = {case.name: case for case in _cases()}

OF_THE_MACHINE = {
    "run.json": {
        "format", "bellmask", "torch", "python", "machine", "started", "last_started",
        "threads", "id",
    },
    "state.json": {"run", "seconds"},
    "metrics.jsonl": {"seconds", "tokens_per_second"},
    "comparison.json": {"bellmask", "root"},
    "results.json": {"bellmask", "time_ratio", "time_speed_up", "seconds", "tokens_per_second"},
}  # fmt: skip
"""By file: what is true of one machine, moment or version."""
EVERYWHERE = {"bellmask"}


def _leaves(
    value: Any, place: str = "", skipped: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in skipped:
                yield from _leaves(inner, f"{place}.{key}" if place else key, skipped)
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{place}[{number}]", skipped)
    else:
        yield place, value


def _digest(array: Any) -> str:
    content = hashlib.sha256(array.tobytes()).hexdigest()
    return f"{array.dtype} {list(array.shape)} {content}"


def _file_leaves(path: Path) -> Iterator[tuple[str, Any]]:
    skipped = frozenset(EVERYWHERE | OF_THE_MACHINE.get(path.name, set()))
    if path.name == "manifest.json":  # digests of files, in which tensors stand in any order
        return
    if path.suffix == ".json":
        yield from _leaves(json.loads(path.read_text(encoding="utf-8")), skipped=skipped)
    elif path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        yield from _leaves(lines, skipped=skipped)
    elif path.suffix in (".md", ".tex", ".txt", ".csv"):
        for number, line in enumerate(path.read_text("utf-8").splitlines()):
            yield f"line {number + 1}", line
    elif path.suffix == ".npz":
        import numpy as np

        with np.load(path) as arrays:
            yield from ((name, _digest(arrays[name])) for name in arrays.files)
    elif path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dictionary)
                yield name, _digest(tensors.get_tensor(name))


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """A copy of the zoo as working directory; the caller's afterwards."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="frozen-") as made:
        shutil.copytree(ZOO, made, dirs_exist_ok=True)
        os.chdir(made)
        try:
            yield Path(made)
        finally:
            os.chdir(before)


def run_bellmask(command: str, num_processes: int = 1) -> str:
    """What a command prints; RuntimeError with what it said when its exit code is not 0."""
    args = shlex.split(command)
    if num_processes > 1:
        import bellmask

        environment = {**os.environ, "PYTHONPATH": str(Path(bellmask.__file__).parents[1])}
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        # what follows -- is not torchrun's: it would take --num for an option of its own
        launch += ["--nproc-per-node", str(num_processes), "-m", "--", "bellmask", *args]
        done = subprocess.run(launch, capture_output=True, text=True, env=environment)
        code, said = done.returncode, done.stdout + done.stderr
    else:
        from bellmask.cli import run_command

        stream = io.StringIO()
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            code = run_command(args)
        said = stream.getvalue()
    if code != 0:
        raise RuntimeError(f"bellmask {command}\nexit code {code}\n{said}")
    return said


def results_of(case: Case) -> dict[str, Any]:
    """All numbers of a case by file and place; run it in a :func:`working_folder`."""
    shutil.rmtree("out", ignore_errors=True)
    Path("out").mkdir()
    found: dict[str, Any] = {}
    for number, command in enumerate(case.commands):
        said = run_bellmask(command, case.num_processes if number == 0 else 1)
        if command.startswith("config "):
            found.update((f"screen:{place}", value) for place, value in _leaves(json.loads(said)))
    for path in sorted(Path("out").rglob("*")):
        # kept, cache: parts of a command that was stopped
        if path.is_file() and not {"kept", "cache"} & {*path.parts}:
            found.update((f"{path}:{place}", value) for place, value in _file_leaves(path))
    return found


def stored_part(results: dict[str, Any]) -> dict[str, Any]:
    """What holds on any CPU: numbers and texts, no digests of arrays, options or bookkeeping."""
    skipped = ("config.json", "run.json", "state.json", "tokenizer.json", ".md", ".tex", ".txt")
    stored = {}
    for place, value in results.items():
        name = place.partition(":")[0]
        if name.endswith((".npz", ".safetensors", *skipped)) or "/answers/" in name:
            continue
        stored[place] = json.loads(
            json.dumps(value), parse_float=lambda text: float(f"{float(text):.7g}")
        )
    return stored


def all_results(pattern: str, only_stored: bool) -> dict[str, dict[str, Any]]:
    """Results of all cases whose name matches; a failed one has the key ``failed``."""
    made: dict[str, dict[str, Any]] = {}
    with working_folder():
        for case in CASES.values():
            if not fnmatch.fnmatch(case.name, pattern) or (only_stored and not case.is_stored):
                continue
            try:
                made[case.name] = results_of(case)
            except (Exception, SystemExit) as error:
                made[case.name] = {"failed": f"{type(error).__name__}: {error}"}
            state = "failed" if "failed" in made[case.name] else f"{len(made[case.name])} values"
            print(f"{case.name}: {state}", flush=True)
    return made


def make_zoo(only: str) -> None:
    """Train the stored runs: seconds each."""
    narrow = f"{NARROW} --data.train text.txt --data.cache cache --train.steps 60 --quiet "
    narrow += "--train.batch-size 16 --validation.every '30 steps' --validation.blocks 32 "
    narrow += "--checkpoint.every never --optim.warmup-steps 5 --log.every 10"
    pretrained = narrow.replace(NARROW, "--data.block-length 16")
    commands = {
        **{name: f"train tiny_{name} {narrow}" for name in ("base", "bell", "arm")},
        **{name: f"train tiny_{name} {narrow}" for name in ("sigma_arm", "aoarm")},
        # samples should depend on their context, which 60 steps do not teach
        "fluent": f"train tiny_bell {narrow} --model.width 16 --train.steps 2000 --log.every 500 "
        "--validation.every '1000 steps'",
        "steps": f"train tiny {narrow} --checkpoint.every '30 steps' --checkpoint.keep-last 3 "
        "--optim.ema 0",
        "toy": f"train tiny_base {narrow} --data.train toy:sticky --data.tokenizer symbols:8 "
        "--data.block-length 8",
        "gpt2": f"train arm_tiny {SMALL_GPT2} --data.tokenizer bytes {pretrained}",
        "cpt": f"train cpt_tiny --start.model gpt2 --start.anneal-steps 20 {pretrained}",
        "sft": f"train sft_tiny --start.model cpt --sft.train toy:reverse:3 --sft.round-to 8 "
        f"{pretrained.replace('--data.train text.txt', '')} --data.block-length 64",
    }
    with working_folder():
        for name, command in commands.items():
            if not fnmatch.fnmatch(name, only):
                continue
            shutil.rmtree(name, ignore_errors=True)
            print(run_bellmask(f"{command} --out {name}"), name, flush=True)
            shutil.rmtree(ZOO / name, ignore_errors=True)
            shutil.copytree(name, ZOO / name)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("results", "zoo", "freeze"))
    parser.add_argument("out", nargs="?")
    parser.add_argument(
        "--only", default="*", help="names of cases (or of stored runs), with * and ?"
    )
    parser.add_argument("--all", action="store_true", help="also what is not in results.json")
    options = parser.parse_args()
    if options.action == "results" and options.out is None:
        parser.error("results needs a file to write")
    if options.action == "freeze" and options.all:
        parser.error("freeze stores only what the tests read; leave out --all")
    if "BELLMASK_FROZEN_ZOO" not in os.environ:  # else same_numbers.py has chosen the package
        sys.path.insert(0, str(HERE.parents[1]))
    if options.action == "zoo":
        make_zoo(options.only)
        return
    out = RESULTS if options.action == "freeze" else Path(options.out).absolute()
    results = all_results(options.only, not options.all)
    failed = [name for name, found in results.items() if "failed" in found or not found]
    if options.action == "freeze" and (failed or not results):
        sys.exit(f"nothing was stored: {', '.join(failed) or 'no stored case has such a name'}")
    if options.action == "freeze":
        stored = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        stored |= {name: stored_part(found) for name, found in results.items()}
        results = {name: stored[name] for name in CASES if name in stored}
    out.write_text(json.dumps(results, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
