"""``bellmask compare``, ``report`` and ``demo``: the main job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bellmask.commands import stages
from bellmask.config.presets import PRESETS, peek_option, resolve, take_option, tiny, wants_help
from bellmask.utils.errors import UserError, look_up
from bellmask.utils.files import count_of

COMPARE_HELP = """How many times sooner does a variant reach the reference's final NLL?

usage: bellmask compare PRESET [VARIANT ...] [--suite NAME] [--reference NAME] [--seeds N]
                        [--grid OPTION=V1,V2] [--jobs N] [--out DIR] [--runs DIR] [--quiet]
                        [options of a run, the same for all variants]

Trains variants that differ only in what is compared: same initial weights, data order, batch,
steps and evaluation masks. Interrupt it at will; the same command goes on where it stopped.
  VARIANT      base, bell, uniform, dirac:MU, gaussian:MU,SIGMA, laplace:MU,B, importance,
               importance_t, middle_flat; the causal arm, sigma_arm, aoarm (+crossed); with +muon
               or +unstratified; or 'LABEL=--option value'. Default: base bell
  --suite      one of the paper's ablations: {suites};
               or cpt_sft, Table 4, without a PRESET: bellmask compare --suite cpt_sft --help
  --reference  the variant whose final NLL is the target; default base, else the first one
  --seeds N    paired training seeds; an interval needs 3. Default 1
  --grid       a grid for every variant; best is compared with best. May be given several times
  --jobs N     trainings side by side; with 2 or more each has one thread. Default 1
  --out DIR    where results.json, curves.png/.svg and report.html go
  --runs DIR   run folders, shared by all comparisons; default runs/shared
  --quiet      say nothing but errors and the result

examples:
  bellmask compare tiny base bell --seeds 3 --jobs 2
  bellmask compare small --suite families --jobs 2
  bellmask compare small base bell arm --seeds 3 --jobs 2
  bellmask compare tiny base bell --grid optim.lr=3e-3,6e-3 --train.steps 300
  bellmask compare tiny bell 'wide=--law gaussian --law.scale 0.2' --reference bell
"""

REPORT_HELP = """Rebuild results.json, curves.png/.svg and report.html from run folders.

usage: bellmask report FOLDER [FOLDER ...] [--reference NAME] [--out DIR]
       bellmask report trace FILE [options]     (bellmask report trace --help says more)

One folder of 'bellmask compare', or two or more run folders of 'bellmask train'. Nothing is
trained. Runs whose text, tokenizer, masks or steps differ are refused.
  --reference  default: the comparison's own; for run folders base, else the first one
  --out DIR    default: the comparison's folder; for run folders 'report' beside the first one

examples:
  bellmask report runs/compare-tiny-base-bell
  bellmask report runs/base runs/bell --out runs/base-bell
  bellmask report trace runs/bell/trace.json
"""

DEMO_HELP = """Base against bell on a laptop, in minutes: the paper's headline, measured.

usage: bellmask demo [--data FILE] [--seeds N] [--jobs N] [--steps N] [--out DIR] [--quiet]

Trains both with the same options, three paired seeds each, on WikiText-2 bytes, and says how many
times sooner bell reaches base's final NLL. Repeat the command to continue one that was stopped.
  --data FILE  your own text (path or quoted glob) instead
  --seeds N    default 3
  --jobs N     trainings side by side, one thread each; default 2 where there are two cores
  --steps N    default 1000
  --out DIR    default runs/demo
  --quiet      say nothing but errors and the result

examples:
  bellmask demo
  bellmask demo --data book.txt --out runs/book
"""


def _one(values: list[str], default: str) -> str:
    return values[-1] if values else default


def _count(values: list[str], option: str, default: int) -> int:
    text = _one(values, str(default))
    if not (count := count_of(text)):
        raise UserError(f"{option} must be a whole number of at least 1, got {text!r:.40}")
    return count


def _take_flag(args: list[str], name: str) -> bool:
    found = name in args
    args[:] = [arg for arg in args if arg != name]
    return found


def compare(args: list[str]) -> int:
    """Measure how many times sooner a variant gets there."""
    from bellmask.compare.suites import SUITES

    if stages.is_meant(args):
        return stages.run(args)
    if wants_help(args):
        print(COMPARE_HELP.format(suites=", ".join(SUITES)))
        return 0
    names = ("--suite", "--reference", "--seeds", "--grid", "--jobs", "--out", "--runs")
    given = {name: take_option(args, name) for name in names}
    is_quiet = _take_flag(args, "--quiet")
    preset, texts, args = _split(args)

    from bellmask.compare.comparison import compare as run
    from bellmask.compare.comparison import pick_reference
    from bellmask.compare.plan import parse_grid
    from bellmask.compare.variants import check_shared, parse_variants

    if given["--suite"] and texts:
        raise UserError("give variants or --suite, not both")
    if given["--suite"]:
        texts = look_up("suite", given["--suite"][-1], SUITES)()
    variants = parse_variants(texts or ["base", "bell"])
    check_shared(args, [Path(file) for file in peek_option(args, "--config")])
    stem, config = resolve([preset, *args], "bellmask compare")
    what = _one(given["--suite"], "-".join(v.name.split("=")[0] for v in variants)[:60])
    out = Path(
        _one(given["--out"], f"runs/compare-{stem}-{what}".replace(":", "").replace(",", "_"))
    )
    results = run(
        config,
        variants,
        reference=_one(given["--reference"], pick_reference([v.name for v in variants])),
        out=out,
        root=Path(_one(given["--runs"], "runs/shared")),
        seeds=_count(given["--seeds"], "--seeds", 1),
        grid=parse_grid(given["--grid"]),
        jobs=_count(given["--jobs"], "--jobs", 1),
        is_quiet=is_quiet,
    )
    _finish(results, out)
    return 0


def _split(args: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """(preset, variants, the rest): variants come before the first option."""
    if not args or args[0].startswith("-"):
        raise UserError(f"bellmask compare needs a preset first: {', '.join(PRESETS)}")
    end = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    return args[0], list(args[1:end]), list(args[end:])


def _finish(results: dict[str, Any], out: Path) -> None:
    from bellmask.report.tables import print_comparison

    data = results["data"]
    title = f"{data['train']}, {data['tokenizer']}, {results['steps']} steps; NLL in nats per token"
    print_comparison(results, title)
    print(f"report: {out / 'report.html'}")


def report(args: list[str]) -> int:
    """Rebuild a comparison's report from run folders; or show a trace."""
    if args and args[0] == "trace":
        from bellmask.generate.trace_page import main as report_trace

        return report_trace(args[1:])
    if wants_help(args):
        print(REPORT_HELP)
        return 0
    reference, out = take_option(args, "--reference"), take_option(args, "--out")
    for arg in args:
        if arg.startswith("-"):
            raise UserError(f"unknown option {arg}; report takes --reference and --out")
    if not args:
        raise UserError("report needs a comparison's folder or run folders")

    from bellmask.compare.comparison import PLAN, from_comparison, from_runs, write_report

    folders, failed, title = [Path(arg) for arg in args], list[str](), ""
    if len(folders) == 1 and (folders[0] / PLAN).exists():
        entries, default, title, failed = from_comparison(folders[0])
        where = Path(_one(out, str(folders[0])))
    elif len(folders) == 1 and not folders[0].is_dir():
        raise UserError(f"there is no folder {folders[0]}")
    elif len(folders) == 1:
        raise UserError(f"{folders[0]} is not a comparison; give two or more run folders")
    else:
        entries, default = from_runs(folders)
        where = Path(_one(out, str(folders[0].parent / "report")))
    results = write_report(entries, _one(reference, default), where, title, failed)
    _finish(results, where)
    return 0


def demo(args: list[str]) -> int:
    """Base against bell on a laptop, in minutes."""
    if wants_help(args):
        print(DEMO_HELP)
        return 0
    names = ("--data", "--seeds", "--jobs", "--out", "--steps")
    given = {name: take_option(args, name) for name in names}
    is_quiet = _take_flag(args, "--quiet")
    if args:
        raise UserError(f"unknown option {args[0]}; demo takes {', '.join(names)} and --quiet")

    from bellmask.compare.comparison import compare as run
    from bellmask.compare.variants import parse_variants

    config = tiny()
    if given["--data"]:
        config = replace(config, data=replace(config.data, train=given["--data"][-1]))
    steps = _count(given["--steps"], "--steps", config.train.steps)
    every = f"{max(1, min(100, steps // 10))} steps"
    config = replace(
        config,
        train=replace(config.train, steps=steps),
        validation=replace(config.validation, every=every),
    ).check()
    out = Path(_one(given["--out"], "runs/demo"))
    results = run(
        config,
        parse_variants(["base", "bell"]),
        reference="base",
        out=out,
        root=out / "runs",
        seeds=_count(given["--seeds"], "--seeds", 3),
        jobs=_count(given["--jobs"], "--jobs", 2 if (os.cpu_count() or 1) > 1 else 1),
        is_quiet=is_quiet,
        title="bellmask: how many times sooner does the bell get there?",
    )
    _finish(results, out)
    return 0
