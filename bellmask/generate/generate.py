"""``bellmask generate``: samples, continuations, infillings and answers to prompts.

The parts: the options; prompts from files; texts from a run; texts of several runs side by side;
the command itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bellmask.config.command_line import parse_command
from bellmask.config.config import RunConfig
from bellmask.data.chat_templates import Message
from bellmask.data.readers import Record, kind_of, read_records, readable_errors, text_of
from bellmask.generate.answers import ANSWER_STEPS, Answerer, Question
from bellmask.generate.fill import decode_samples, fill_canvas, run_canvas
from bellmask.generate.live import Watch, check_fps
from bellmask.generate.sampler import Generation, Step
from bellmask.generate.settings import DEFAULT_STEPS, Sampling
from bellmask.generate.trace import Recorder
from bellmask.report.page import html_page, page_text
from bellmask.storage.loading import Loaded, LoadOptions
from bellmask.storage.runs import by_folder, open_runs
from bellmask.utils.console import visible, visible_lines
from bellmask.utils.errors import UserError, refuse
from bellmask.utils.files import check_folder, has_kinds, sanitize, write_text
from bellmask.utils.progress import progress_bar
from bellmask.utils.table import PIPE_WIDTH, in_markdown

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(LoadOptions):
    """Generate text: unconditionally, after a prefix, in the gaps of a canvas, or as an answer.

    Examples:
    bellmask generate runs/bell --num 4 --steps 64

    bellmask generate runs/bell --prefix 'The history of ' --length 64 --rule most_confident

    bellmask generate runs/bell --canvas 'The [MASK*12] of the war [MASK*8].' --watch

    bellmask generate runs/bell --num 100 --format jsonl --out samples.jsonl

    bellmask generate runs/bell --rule first_hitting --trace trace.json

    bellmask generate runs/base runs/bell --prompts prompts.txt --side-by-side

    bellmask generate runs/sft --prompt 'What is a bell?' --num 3

    bellmask generate runs/sft --prompts questions.jsonl --format jsonl --out answers.jsonl
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder; several with --side-by-side."""
    num: int = 1
    """Number of samples; per prompt with --prompts."""
    length: int | None = None
    """Tokens per sample; default: the run's block length. For answers: tokens of the answer alone;
    default: enough for most training examples. Not with --canvas."""
    prefix: str | None = None
    """Text to continue."""
    canvas: str | None = None
    """Text with gaps: [MASK*12] stands for 12 tokens to generate. Given tokens do not change."""
    prompt: str | None = None
    """A prompt, formatted like the run's training examples; prints only the answer. Escapes are
    not interpreted; for a line break use $'one\\ntwo' in bash."""
    prompts: str | None = None
    """File of prompts. For a run fine-tuned on prompts: one prompt per line, or JSON lines with
    "prompt" or "messages". For any other run: one text to continue per line, or JSON lines
    with "prompt" or "canvas"."""
    side_by_side: bool = False
    """Compare runs on the same prompts: a table, comparison.html and comparison.md in --out."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    """How to sample."""
    seed: int = 0
    """Sampling seed. Sample i depends on the seed and i alone, not on the batch; with --prompts,
    samples are numbered across prompts."""
    batch_size: int = 64
    """Samples per forward pass."""
    watch: bool = False
    """Show the text being unmasked."""
    fps: float = 12.0
    """Maximum number of steps per second with --watch; 0: no limit."""
    trace: str | None = None
    """File to save all steps to; 'bellmask report trace FILE' turns it into a page and a figure."""
    format: Literal["text", "jsonl"] = "text"
    """text, or one JSON object per line: text, ids and prompt; for answers all keys of the prompt's
    line, response, sample, num_tokens and prompt_cut."""
    out: str | None = None
    """Output file (a folder with --side-by-side); default: stdout."""


def _check(options: GenerateOptions) -> None:
    options.sampling.check()
    check_fps(options.fps)
    sources = ("prefix", "canvas", "prompt", "prompts")
    given = [f"--{name}" for name in sources if getattr(options, name) is not None]
    is_shown = options.trace or options.watch or options.format == "jsonl"
    problems = {
        "generate needs a run folder: bellmask generate RUN": not options.runs,
        "--num and --batch-size must be at least 1": min(options.num, options.batch_size) < 1,
        f"{' and '.join(given)} cannot be combined": len(given) > 1,
        "--canvas cannot be combined with --length": None not in (options.canvas, options.length),
        "--fps needs --watch": options.fps != GenerateOptions.fps and not options.watch,
        "several runs need --side-by-side": (len(options.runs) > 1 and not options.side_by_side),
        "--side-by-side cannot be combined with --watch, --trace or --format jsonl": (
            options.side_by_side and is_shown
        ),
    }
    refuse(problems)
    # outputs are checked before anything is generated
    if options.side_by_side:
        check_folder(options.out)
        return
    files = [Path(path) for path in (options.trace, options.out) if path is not None]
    for file in files:
        if file.is_dir() or not file.parent.is_dir():
            raise UserError(f"{file} cannot be written: give a file in a folder that exists")
    if len(set(files)) < len(files):
        raise UserError(f"--trace and --out are the same file {options.trace}")


# Prompts from files: beginnings to continue, canvases with gaps, or questions to answer.
#
# In a text file each line is one; blank lines and lines that begin with # are skipped. Any other
# file has records, as files of examples do.

RESULTS = ("response", "sample", "num_tokens", "prompt_cut")
"""Keys of a line of answers, which a line of questions cannot have."""


def read_prompts(path: Path) -> list[dict[str, str]]:
    """Texts to continue or canvases from a file: lines, or {"prompt": ...} or {"canvas": ...}."""
    kinds, prompts = ("prompt", "canvas"), []
    for record, where in _records(path, kinds):
        if unknown := record.keys() - {*kinds}:
            raise UserError(f"{where}: unknown key {min(unknown)!r}; use prompt or canvas")
        prompts.append({key: _text(record, key, where) for key in record})
    return prompts


def read_questions(path: Path) -> list[Question]:
    """Questions: lines, {"prompt": ...} or {"messages": [{"role": ..., "content": ...}]}."""
    questions = []
    for record, where in _records(path, ("prompt", "messages")):
        if "response" in record:  # a file of examples: the reference stays next to the answer
            record = {("reference" if k == "response" else k): v for k, v in record.items()}
        if taken := [name for name in RESULTS if name in record]:
            raise UserError(f"{where}: the key {taken[0]!r} is used for the answer; rename it")
        has_roles = "messages" in record
        if has_roles:
            messages = _messages(record["messages"], where)
        else:
            messages = (Message("user", _text(record, "prompt", where)),)
        questions.append(Question(messages, has_roles, record))
    return questions


def _records(path: Path, kinds: Sequence[str]) -> Iterator[tuple[Record, str]]:
    """(record, where it is), a line of text as {"prompt": line}; each has one key of ``kinds``."""
    if not path.is_file():
        raise UserError(f"there is no file of prompts {path}")
    if kind_of(path.name) == "text":
        with readable_errors(str(path)):
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        lines = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        records: list[Record] = [{"prompt": line} for line in lines]
    else:
        records = list(read_records(path))
    if not records:
        raise UserError(f"{path} has no prompts; write one per line")
    for number, record in enumerate(records, start=1):
        where = f"{path}, prompt {number}"
        if sum(kind in record for kind in kinds) != 1:
            raise UserError(f"{where}: a line needs either {' or '.join(map(repr, kinds))}")
        yield record, where


def _text(record: Record, key: str, where: str) -> str:
    if not (text := text_of(record, key, where)).strip():
        raise UserError(f"{where}: {key!r} must be a non-empty text")
    return text


def _messages(listed: Any, where: str) -> tuple[Message, ...]:
    """A system message or none, then user and assistant in turn, the user first and last."""
    turns = listed if isinstance(listed, list) else []
    if not all(has_kinds(turn, {"role": str, "content": str}) for turn in turns):
        raise UserError(f'{where}: a message is {{"role": "user", "content": "..."}}')
    roles = [turn["role"] for turn in turns]
    turn_roles = roles[1:] if roles[:1] == ["system"] else roles
    if turn_roles != ["user", "assistant"] * (len(turn_roles) // 2) + ["user"]:
        rule = "after an optional system message user and assistant alternate, the user first and"
        raise UserError(f"{where}: {rule} last; got {', '.join(roles) or 'no messages'}")
    return tuple(Message(turn["role"], turn["content"]) for turn in turns)


# Texts from a run: shared parts of answering and continuing, then each of them.
#
# Sample number i, counted over all prompts, depends only on the seed, i and its prompt.


@dataclass(frozen=True)
class Samples:
    """Texts of a run, ``--num`` samples for each prompt."""

    prompts: list[str]
    """As they were asked, canvases with their gaps."""
    texts: list[str]
    lines: list[dict[str, Any]]
    """For --format jsonl."""
    cost: str
    """Number of network calls, in words."""


def _load(options: GenerateOptions, name: str) -> Loaded:
    """The run, with a note if it is used differently than in training."""
    loaded = options.load(name)
    if loaded.config.data.document_attention:
        logger.info("the run was trained to attend within documents; here it attends to whole rows")
    return loaded


@contextlib.contextmanager
def _observing(
    options: GenerateOptions, loaded: Loaded, recorder: Recorder | None, total: int
) -> Iterator[dict[str, Any]]:
    """Shared arguments for answers and canvases: seed, batches, and observers of steps.

    Shown live with --watch on a terminal, else with a progress bar; recorded if there is a
    recorder.
    """
    made_with = {"seed": options.seed, "batch_size": options.batch_size, "on_step": recorder}
    if not (options.watch and sys.stderr.isatty()):
        with progress_bar(f"generating with {loaded.folder.name}", "samples", total) as progress:
            yield made_with | {"progress": progress}
        return
    is_repeated = sys.stdout.isatty() and options.out is None  # the texts follow
    look: dict[str, Any] = {"title": loaded.folder.name, "fps": options.fps}
    with Watch(loaded.tokenizer, keep_last=not is_repeated, **look) as watch:

        def on_step(step: Step) -> None:
            if recorder is not None:
                recorder(step)
            watch(step)

        yield made_with | {"on_step": on_step}


def answer_prompts(
    options: GenerateOptions, loaded: Loaded, sampling: Sampling, recorder: Recorder | None = None
) -> Samples:
    """``--num`` answers to each question."""
    if options.prompts is not None:
        asked = read_questions(Path(options.prompts))
    elif options.prompt is not None and options.prompt.strip():
        asked = [replace(Question.plain(options.prompt), line={"prompt": options.prompt})]
    else:
        raise UserError("the prompt is empty")
    answerer = Answerer(loaded)
    if not answerer.is_tuned:
        logger.info("the run was not fine-tuned on prompts: it only continues them")
    elif not answerer.knows_turns and any(len(one.messages) > 1 for one in asked):
        logger.info("the run was fine-tuned on single prompts: it has not seen conversations")
    questions = [question for question in asked for _ in range(options.num)]
    with _observing(options, loaded, recorder, len(questions)) as made_with:
        answers = answerer.answer(questions, length=options.length, sampling=sampling, **made_with)
    if num_cut := sum(answer.is_cut for answer in answers[:: options.num]):
        logger.info(f"{num_cut} of {len(asked)} prompts did not fit and lost their oldest tokens")
    lines = []
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        said = {"response": answer.text, "num_tokens": answer.num_tokens}
        lines.append({**question.line, "sample": number, **said, "prompt_cut": answer.is_cut})
    num_tokens = sum(answer.num_tokens for answer in answers)
    nfe = sum(answer.nfe for answer in answers) / len(answers)
    count = "1 answer" if len(answers) == 1 else f"{len(answers)} answers"
    cost = f"{count}, {num_tokens} tokens, {nfe:.1f} network calls per answer"
    return Samples([one.text for one in asked], [answer.text for answer in answers], lines, cost)


def continue_prompts(
    options: GenerateOptions, loaded: Loaded, sampling: Sampling, recorder: Recorder | None = None
) -> Samples:
    """``--num`` samples from nothing, of each beginning, or of each canvas."""
    prompts = [{"prompt": options.prefix or ""}]
    if options.canvas is not None:
        prompts = [{"canvas": options.canvas}]
    elif options.prompts is not None:
        prompts = read_prompts(Path(options.prompts))
    asked = [text for prompt in prompts for text in prompt.values()]
    canvases, block_length = [], loaded.config.data.block_length
    for prompt in prompts:
        prefix, template = prompt.get("prompt", ""), prompt.get("canvas")
        canvas = run_canvas(loaded, prefix=prefix, template=template, length=options.length)
        canvases.append(canvas)
        if len(canvas) > block_length:
            told = "the canvas has %d tokens, the run was trained on %d"
            logger.info(told, len(canvas), block_length)
    made: list[Generation] = []
    with _observing(options, loaded, recorder, options.num * len(canvases)) as made_with:
        for number, canvas in enumerate(canvases):
            made_with["first_sample"] = options.num * number
            made.append(fill_canvas(loaded, canvas, options.num, sampling, **made_with))
    lines: list[dict[str, Any]] = []
    for prompted, one in zip(asked, made, strict=True):
        about = {"prompt": prompted} if options.prompts else {}
        for text, ids in zip(decode_samples(loaded, one), one.ids_BL.tolist(), strict=True):
            lines.append({"sample": len(lines), **about, "text": text, "ids": ids})
    calls, nfe = sum(one.num_calls for one in made), sum(one.nfe for one in made) / len(made)
    cost = f"{calls} network calls, {nfe:.1f} per sample"
    return Samples(asked, [line["text"] for line in lines], lines, cost)


def settings_of(options: GenerateOptions, is_answer: bool) -> dict[str, Any]:
    """Description of how the texts were generated."""
    default_steps = ANSWER_STEPS if is_answer else DEFAULT_STEPS
    sampling = options.sampling
    steps = {"steps": sampling.steps or default_steps} if sampling.has_steps else {}
    return {"rule": sampling.rule, **steps, **sampling.changed(), "seed": options.seed}


# Texts of several runs on the same prompts, side by side, for qualitative comparison (App. E).
#
# A table that fits the screen, a self-contained page, a Markdown file.

STYLE = """
h2 { white-space: pre-wrap; } h3 { font-size: .95rem; margin: 0; overflow-wrap: anywhere; }
.run { border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; min-width: 0; }
"""


# Paper: Fig. 12
@dataclass(frozen=True)
class SideBySide:
    """The texts of each run for each prompt."""

    prompts: Sequence[str]
    """As they were asked, canvases with their gaps."""
    runs: Mapping[str, Sequence[Sequence[str]]]
    """Name to texts [prompt][sample]; the first one is the reference, at the left."""
    settings: str
    """How the texts were made, in one line."""

    @property
    def title(self) -> str:
        return f"{' and '.join(self.runs)} side by side"

    def show(self, console: Console | None = None) -> None:
        """Print it, folded to the width of the screen."""
        width = None if sys.stdout.isatty() else PIPE_WIDTH
        console = console or Console(highlight=False, width=width)
        for number in range(len(self.prompts)):
            console.print(Text(f"{number + 1}. {self._asked(number)}", style="bold"))
            table = Table(show_lines=True, expand=True)
            for name in self.runs:
                table.add_column(Text(visible(name)), overflow="fold", ratio=1)
            for texts in zip(*(texts[number] for texts in self.runs.values()), strict=True):
                pairs = [map(visible_lines, self._split(number, text)) for text in texts]
                table.add_row(*(Text.assemble((given, "dim"), made) for given, made in pairs))
            console.print(table)
        console.print(Text(visible(self.settings), style="dim"))

    def _asked(self, number: int) -> str:
        return visible_lines(self.prompts[number]) or "(nothing given)"

    def _split(self, number: int, text: str) -> tuple[str, str]:
        """(given beginning, generated text); a canvas with gaps is not split."""
        prompt = self.prompts[number]
        return (prompt, text[len(prompt) :]) if text.startswith(prompt) else ("", text)

    def page(self) -> str:
        body = f"<p>{page_text(self.settings)}</p>"
        for number in range(len(self.prompts)):
            body += f"<h2><small>{number + 1}.</small> {page_text(self._asked(number))}</h2>"
            body += '<div class="columns">'
            for name, texts in self.runs.items():
                body += f'<div class="run"><h3>{page_text(visible(name))}</h3>'
                for text in texts[number]:
                    given, made = map(page_text, self._split(number, text))
                    # a line end right behind <pre> would be dropped; the element keeps it
                    body += f'<pre><span class="soft">{given}</span>{made}</pre>'
                body += "</div>"
            body += "</div>"
        return html_page(visible(self.title), body, style=STYLE)

    def markdown(self) -> str:
        """The same as Markdown; texts are fenced, so that they contain no markup."""
        parts = [f"# {in_markdown(self.title)}", in_markdown(self.settings)]
        for number in range(len(self.prompts)):
            parts += [f"## Prompt {number + 1}", _fenced(self._asked(number))]
            for name, texts in self.runs.items():
                parts += [f"**{in_markdown(name)}**", *map(_fenced, texts[number])]
        return "\n\n".join(parts) + "\n"


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    text, fence = visible_lines(text), "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


# The command.

SEPARATOR = "\n--------\n"


def _is_asked(options: GenerateOptions, config: RunConfig) -> bool:
    """True if an answer is requested: for --prompt, and for --prompts with a fine-tuned run."""
    is_tuned = config.sft.train is not None
    return options.prompt is not None or (options.prompts is not None and is_tuned)


def write_out(content: str, output: str | None) -> None:
    """Write a file, or to a pipe; on a screen, without control codes."""
    if output is None:
        is_screen = sys.stdout.isatty()
        sys.stdout.write(visible_lines(content) if is_screen else sanitize(content))
    else:
        write_text(Path(output), content)


def _side_by_side(options: GenerateOptions) -> None:
    are_asked = {str(run.folder): _is_asked(options, run.config) for run in open_runs(options.runs)}
    if len(set(are_asked.values())) > 1:
        odd = ", ".join(name for name, is_asked in are_asked.items() if not is_asked)
        raise UserError(f"{odd}: not fine-tuned on prompts; use --prompt for all of them")
    is_answer = all(are_asked.values())
    prompts: list[str] = []
    runs: dict[str, list[list[str]]] = {}
    for name, folder in by_folder(options.runs).items():
        loaded, sampling = _load(options, str(folder)), options.sampling
        if loaded.framework.is_causal:
            name, sampling = f"{name} (token by token)", sampling.for_causal()
        made = (answer_prompts if is_answer else continue_prompts)(options, loaded, sampling)
        starts = range(0, len(made.texts), options.num)
        prompts, runs[name] = made.prompts, [made.texts[i : i + options.num] for i in starts]
    settings = [f"{name} {value}" for name, value in settings_of(options, is_answer).items()]
    table = SideBySide(prompts, runs, ", ".join(settings))
    table.show()
    if options.out is not None:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, content in (("html", table.page()), ("md", table.markdown())):
            write_text(folder / f"comparison.{suffix}", content)
            print(folder / f"comparison.{suffix}")


def main(args: Sequence[str]) -> int:
    options = parse_command(GenerateOptions, args, command="generate")
    _check(options)
    if options.side_by_side:
        _side_by_side(options)
        return 0
    loaded = _load(options, options.runs[0])
    is_answer = _is_asked(options, loaded.config)
    recorder = Recorder(loaded.tokenizer) if options.trace is not None else None
    generate = answer_prompts if is_answer else continue_prompts
    made = generate(options, loaded, options.sampling, recorder)
    if recorder is not None:
        title = f"{loaded.folder.name}, step {loaded.step}"
        trace = recorder.trace(title, settings_of(options, is_answer), made.texts)
        trace.save(Path(str(options.trace)))
    if options.format == "jsonl":
        content = "\n".join(json.dumps(line, ensure_ascii=False) for line in made.lines)
    else:
        content = SEPARATOR.join(made.texts)
    write_out(content + "\n", options.out)
    print(made.cost, file=sys.stderr)
    return 0
