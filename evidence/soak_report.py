"""Report of the soak: one small JSON file, a figure, and a section of docs/scaling.md."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bellmask.report.figures import COLORS, save_figure
from bellmask.utils.files import without_nan
from bellmask.utils.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from analyses import rounded
from soak_compare import EARLY, read_lines
from soak_faults import FAULTS
from soak_watch import AGENT, RANKS, memory, series

BEGIN, END = "<!-- soak: written by evidence/soak.py -->", "<!-- end of soak -->"
WARM_UP = 180.0
"""Seconds of a life before memory is expected to be level."""
LEAST_LIFE = 25.0
"""Shorter lives say little about peaks."""


def summarize(out: Path) -> dict[str, Any]:
    """Everything that is told, from the files of the parts."""
    soak = json.loads((out / "soak.json").read_text(encoding="utf-8"))
    reference = out / "reference.json"
    samples = read_lines(out / "watch.jsonl")
    events = soak["events"]
    damaged = (out / "run.log").read_text(encoding="utf-8", errors="replace").count(" is damaged")
    result = {
        "minutes": soak["minutes"],
        "steps": soak["steps"],
        "faults": {name: tell_fault(name, events) for name in FAULTS},
        "half_written": sum(event.get("is_half_written", False) for event in events),
        "flips": sum("file" in event for event in events),
        "flips_noticed": damaged,
        "marks_wrong": sum(event.get("mark", "stopped") != "stopped" for event in events),
        "visits": tell_visits(soak["visits"]),
        "leftovers": soak["leftovers"],
        "marks": soak["marks"],
        "memory": memory(samples, warm_up=WARM_UP, least=LEAST_LIFE),
        "folder": {
            "files": samples[-1]["folder"]["count"],
            "bytes": samples[-1]["folder"]["bytes"],
            "most_leftovers": max(sample["folder"]["leftovers"] for sample in samples),
        },
        "reference": json.loads(reference.read_text("utf-8")) if reference.exists() else None,
        "events": [[event["time"] / 60, event["name"]] for event in events],
        "series": series(samples),
    }
    result["is_kept"] = is_kept(result)
    return dict(rounded(without_nan(result)))


def tell_fault(name: str, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How often, and how long until the run was further than before."""
    back = [event["back"] for event in events if event["name"] == name]
    if not back:
        return {"count": 0}
    return {"count": len(back), "median": statistics.median(back), "longest": max(back)}


def tell_visits(visits: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Command to outcomes."""
    kinds = sorted({visit["kind"] for visit in visits})
    return {k: dict(Counter(v["outcome"] for v in visits if v["kind"] == k)) for k in kinds}


def is_kept(result: Mapping[str, Any]) -> bool:
    """True when everything that the page promises was so; memory is for the reader to judge."""
    reference = result["reference"]
    failed = sum(outcomes.get("failed", 0) for outcomes in result["visits"].values())
    return (
        failed == 0
        and result["leftovers"] == 0
        and result["marks"] == []
        and result["marks_wrong"] == 0
        and result["flips_noticed"] >= result["flips"]
        and (reference is None or (reference["is_same"] and not reference["one"]["noise_differs"]))
    )


def memory_figure(result: Mapping[str, Any]) -> Figure:
    """Memory of all processes over the hour, with the faults, above how far the run was."""
    told = result["series"]
    figure = Figure(figsize=(10, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, 1])
    for number, name in enumerate(FAULTS):
        times = [minute for minute, kind in result["events"] if kind == name]
        for axes in (upper, lower):
            axes.vlines(
                times, 0, 1, transform=axes.get_xaxis_transform(), linewidth=0.9, alpha=0.55,
                colors=COLORS[number + 3], label=name if axes is upper else None,
            )  # fmt: skip
    for role, color in zip((*RANKS, AGENT), COLORS):
        values = [float("nan") if v is None else v for v in told[role]]
        upper.plot(told["minutes"], values, color=color, linewidth=1.3, label=f"memory: {role}")
    upper.set_ylabel("resident memory (MiB)")
    upper.set_ylim(bottom=0)
    lower.plot(told["minutes"], told["step"], color="0.2", linewidth=1.3)
    lower.set_ylabel("newest saved step")
    lower.set_xlabel("minutes")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.legend(
        *upper.get_legend_handles_labels(), fontsize=8, ncols=3, loc="outside upper center"
    )
    return figure


def fault_table(result: Mapping[str, Any]) -> str:
    """What was done, how often, and what it cost."""
    rows = [
        [name, str(told["count"]), f"{told['median']:.0f} s", f"{told['longest']:.0f} s"]
        for name, told in result["faults"].items()
        if told["count"]
    ]
    total = sum(told["count"] for told in result["faults"].values())
    rows.append(["all", str(total), "", ""])
    return Table(
        "", ["fault", "times", "further than before after (median)", "longest"], rows
    ).markdown()


def memory_table(result: Mapping[str, Any]) -> str:
    """One row per process of the run; long-lived ones tell growth, all of them tell peaks."""
    columns = ["process", "lives", "longest life", "memory in it, from / to", "growth per hour"]
    columns += ["peaks, first / last third of lives", "open files", "threads"]
    rows = []
    for role, told in result["memory"].items():
        life, ends = told["longest"], told["peaks"]
        growth = "-" if life["rate"] is None else f"{life['rate']:+.1f} ± {life['rate_error']:.1f}"
        third = "-"
        if ends["first"] is not None:
            third = f"{ends['first']['mean']:.0f} / {ends['last']['mean']:.0f}"
        cells = [role, str(told["lives"]), f"{life['minutes']:.1f} min"]
        cells += [f"{life['rss_first']:.1f} / {life['rss_last']:.1f}", growth, third]
        cells += [f"{life[name][0]} / {life[name][1]}" for name in ("files", "threads")]
        rows.append(cells)
    return Table("", columns, rows).markdown()


def comparison_table(reference: Mapping[str, Any]) -> str:
    """Disturbed against undisturbed."""
    compared = reference["compared"]
    rows = []
    for name, part in compared.items():
        if isinstance(part, dict):
            number = f"{next(iter(part.values())):,}"
            cells = [str(part.get(key, "-")) for key in ("lost", "too_many", "different")]
            rows.append([name, number, *cells])
    return Table(
        "", ["disturbed against undisturbed", "number", "lost", "too many", "different"], rows
    ).markdown()


def section(result: Mapping[str, Any]) -> str:
    """The part of the page between its two marks."""
    visits = "; ".join(
        f"`bellmask {kind}`: " + ", ".join(f"{n} {outcome}" for outcome, n in outcomes.items())
        for kind, outcomes in result["visits"].items()
    )
    lines = [
        f"{result['minutes']:.0f} minutes, {result['steps']:,} steps; a validation, samples and a "
        "checkpoint every 40 steps; the last quarter without faults.",
        "",
        fault_table(result),
        f"Saves that a kill really cut in two: {result['half_written']}. Flipped bits: "
        f"{result['flips']}; damage noticed on resuming: {result['flips_noticed']} times. "
        f"Half-written folders at the end: {result['leftovers']}. Visits to the live folder: "
        f"{visits or 'none'}. (Refused: the newest checkpoint was damaged or gone, and the message "
        "said so.)",
        "",
    ]
    reference = result["reference"]
    if reference is not None:
        lines += [comparison_table(reference), *tell_reference(reference)]
    lines += [
        "Memory is resident MiB. Growth is a least-squares line through the longest life after its "
        "first three minutes (or third), with the standard error of its slope; two numbers of "
        "files and threads are in the middle and at the end of that life. The last dip of the "
        "figure is the stop after which the run is told its last step.",
        "",
        memory_table(result),
        "![Memory and progress during the soak](figures/soak.png)",
    ]
    return "\n".join(lines)


def tell_reference(reference: Mapping[str, Any]) -> list[str]:
    """What the two undisturbed runs say."""
    one = reference["one"]
    gap = "-" if one["largest_gap_early"] is None else f"{one['largest_gap_early']:.1g}"
    return [
        f"The undisturbed run took {reference['minutes']:.0f} minutes. One process, "
        f"{one['steps']:,} steps: batches, times and masks differ in {one['noise_differs']} of "
        f"{one['lines']} lines; losses of the first {EARLY} steps differ by at most {gap} of "
        "themselves.",
        "",
    ]


def write_section(result: Mapping[str, Any], docs: Path) -> None:
    """docs/results/soak.json, docs/figures/soak.*, and the section of the page if there is one."""
    for folder in (docs / "results", docs / "figures"):
        folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, separators=(",", ":"), allow_nan=False)
    (docs / "results" / "soak.json").write_text(text + "\n", encoding="utf-8")
    save_figure(memory_figure(result), docs / "figures" / "soak")
    page = docs / "scaling.md"
    if page.exists():
        page.write_text(put_between(page.read_text("utf-8"), section(result)), encoding="utf-8")


def put_between(page: str, text: str) -> str:
    """The page with its section replaced; ValueError when it has no place for one."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the two lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}"
