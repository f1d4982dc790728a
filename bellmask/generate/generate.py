"""``bellmask generate``: samples, continuations, infillings and answers to prompts.

The parts: the options; what all generations share; prompts from files; answers; samples,
continuations and infillings; texts of several runs side by side; the command itself.
"""

from __future__ import annotations

import contextlib
import html
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bellmask.config.command_line import parse_command
from bellmask.config.config import RunConfig
from bellmask.data.example_files import Message, Role
from bellmask.generate.answers import ANSWER_STEPS, Answer, Answerer, Question
from bellmask.generate.canvas import Canvas, OnStep, to_all
from bellmask.generate.fill import decode_samples, fill_canvas, run_canvas
from bellmask.generate.live import Watch
from bellmask.generate.sampler import Generation
from bellmask.generate.settings import DEFAULT_STEPS, Sampling
from bellmask.generate.trace import Recorder
from bellmask.report.page import POLICY
from bellmask.storage.loading import Loaded, LoadOptions
from bellmask.storage.runs import by_folder, open_runs
from bellmask.utils.console import visible, visible_lines
from bellmask.utils.errors import UserError
from bellmask.utils.files import check_folder, load_json, sanitize, write_text
from bellmask.utils.progress import NO_PROGRESS, Progress, progress_bar
from bellmask.utils.table import PIPE_WIDTH


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(LoadOptions):
    """Sample text: from nothing, after a prefix, into the gaps of a canvas, or as an answer.

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
    """Samples; of each prompt with --prompts."""
    length: int | None = None
    """Tokens per sample; default: the run's block length. Of an answer: of the answer alone;
    default: what most of the training examples needed. Not with --canvas."""
    prefix: str | None = None
    """Given beginning."""
    canvas: str | None = None
    """Text with gaps: [MASK*12] stands for 12 tokens to generate. Given tokens are kept."""
    prompt: str | None = None
    """Ask, in the form of the run's training examples, and print the answer alone. Taken as it is
    typed: for a line break write one (in bash $'one\\ntwo')."""
    prompts: str | None = None
    """File of prompts. For a run fine-tuned on prompts: questions, one per line, or JSON lines with
    "prompt" or "messages". For any other run: beginnings to continue, one per line, or JSON lines
    with "prompt" or "canvas"."""
    side_by_side: bool = False
    """Compare runs on the same prompts: a table, comparison.html and comparison.md in --out."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    """How to sample."""
    seed: int = 0
    """Sample i depends on the seed and i alone, not on the batch; with --prompts samples are
    counted through."""
    batch_size: int = 64
    """Samples per forward pass."""
    watch: bool = False
    """Show the text being unmasked."""
    fps: float | None = None
    """Steps per second of --watch at most, 12 by default; 0 does not wait."""
    trace: str | None = None
    """File for the trajectory; 'bellmask report trace FILE' makes a page and a strip of it."""
    format: Literal["text", "jsonl"] = "text"
    """text, or one JSON object per line: text, ids and prompt; of answers all keys of the prompt's
    line, response, sample, num_tokens and prompt_cut."""
    out: str | None = None
    """File to write (with --side-by-side a folder); default: the screen."""


def _check(options: GenerateOptions) -> None:
    if not options.runs:
        raise UserError("generate needs a run folder: bellmask generate RUN")
    if options.num < 1 or options.batch_size < 1:
        raise UserError("--num and --batch-size must be at least 1")
    options.sampling.check()
    if options.canvas is not None and (options.prefix is not None or options.length is not None):
        raise UserError("--canvas says all: it goes with neither --prefix nor --length")
    if options.length is not None and options.length < 1:
        raise UserError(f"--length must be at least 1, got {options.length}")
    sources = ("prefix", "canvas", "prompt", "prompts")
    given = [f"--{name}" for name in sources if getattr(options, name) is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} do not go together: one says what is given")
    if options.prompts is not None and not Path(options.prompts).is_file():
        raise UserError(f"there is no file of prompts {options.prompts}")
    if len(options.runs) > 1 and not options.side_by_side:
        raise UserError("several runs are compared with --side-by-side")
    if options.side_by_side and (options.trace or options.watch or options.format == "jsonl"):
        raise UserError("--side-by-side goes with neither --watch, --trace nor --format jsonl")
    if options.fps is not None and not options.watch:
        raise UserError("--fps goes with --watch")
    _check_places(options)


def _check_places(options: GenerateOptions) -> None:
    """Where results go: found out before anything is generated."""
    if options.side_by_side:
        check_folder(options.out, "--out")
    files = {"--trace": options.trace}
    if not options.side_by_side:
        files["--out"] = options.out
    for name, path in files.items():
        if path is not None and not Path(path).parent.is_dir():
            raise UserError(f"there is no folder {Path(path).parent} to write {name} into")
        if path is not None and Path(path).is_dir():
            raise UserError(f"{name} {path} is a folder; give a file")
    if options.trace and options.out and Path(options.trace) == Path(options.out):
        raise UserError(f"--trace and --out are the same file {options.trace}")


# What answering and continuing share: loading, a live view or a bar, the trace, the output.

SEPARATOR = "\n--------\n"


def note(text: str) -> None:
    """Something to know, beside the results."""
    print(f"note: {text}", file=sys.stderr)


def load_noted(options: GenerateOptions, name: str) -> Loaded:
    """The run, with a note where it is used otherwise than it was trained."""
    loaded = options.load(name)
    if loaded.config.data.document_attention:
        note("the run was trained with attention inside documents; here all of a row is seen")
    return loaded


@dataclass(frozen=True)
class Observed:
    """What a generation reports to."""

    on_step: OnStep | None
    progress: Progress
    recorder: Recorder | None

    def save(
        self,
        options: GenerateOptions,
        loaded: Loaded,
        texts: Sequence[str],
        is_answer: bool = False,
    ) -> None:
        """Write the trace, if one is asked for."""
        if self.recorder is not None and options.trace is not None:
            title = f"{loaded.folder.name}, step {loaded.step}"
            settings = settings_of(options, is_answer)
            self.recorder.save(Path(options.trace), title, settings, texts)


@contextlib.contextmanager
def observing(
    options: GenerateOptions, loaded: Loaded, title: str, total: int
) -> Iterator[Observed]:
    """Shown live with --watch, else a progress bar; recorded with --trace."""
    recorder = Recorder(loaded.tokenizer) if options.trace is not None else None
    receivers = [] if recorder is None else [recorder]
    if options.watch:
        keep_last = not (sys.stdout.isatty() and options.out is None)  # the texts follow
        with Watch(
            loaded.tokenizer,
            title=loaded.folder.name,
            fps=12.0 if options.fps is None else options.fps,
            keep_last=keep_last,
        ) as watch:
            yield Observed(to_all(*receivers, watch), NO_PROGRESS, recorder)
    else:
        with progress_bar(title, "samples", total) as progress:
            yield Observed(to_all(*receivers) if receivers else None, progress, recorder)


def settings_of(options: GenerateOptions, is_answer: bool = False) -> dict[str, Any]:
    """How the texts were made, for who reads them."""
    default_steps = ANSWER_STEPS if is_answer else DEFAULT_STEPS
    sampling, plain = options.sampling, asdict(Sampling())
    asked = {name: v for name, v in asdict(sampling).items() if v != plain[name]}
    steps = {"steps": sampling.steps or default_steps} if sampling.has_steps else {}
    return {"rule": sampling.rule, **steps, **asked, "seed": options.seed}


def write_out(content: str, output: str | None) -> None:
    """As a whole file, or to a pipe; on a screen without control codes, which would steer it."""
    if output is None:
        is_screen = sys.stdout.isatty()
        sys.stdout.write(visible_lines(content) if is_screen else sanitize(content))
    else:
        write_text(Path(output), content)


# Prompts from files: beginnings to continue, canvases with gaps, or questions to answer.
#
# In a text file each line is one; blank lines and lines that begin with # are skipped. JSON lines
# are told by the name (.jsonl, .json).

RESULTS = ("response", "sample", "num_tokens", "prompt_cut")
"""Keys of a line of answers; a line of questions may have any other one."""


@dataclass(frozen=True)
class Prompt:
    """What is asked: a beginning to continue, or a canvas with gaps; the other one is None."""

    prompt: str | None = None
    canvas: str | None = None

    @property
    def text(self) -> str:
        """As it was written."""
        return self.canvas or self.prompt or ""


def read_prompts(path: Path) -> list[Prompt]:
    """What a file gives to continue or to fill: lines, or {"prompt": ...} or {"canvas": ...}."""
    return [
        _prompt(line, where) if is_json else Prompt(line) for line, where, is_json in _lines(path)
    ]


@dataclass(frozen=True)
class PromptQuestion:
    """A question of a file: a prompt, or a conversation that ends with the user's words."""

    messages: tuple[Message, ...]
    is_conversation: bool = False
    line: dict[str, Any] = field(default_factory=dict)
    """All that was written, to be passed on with the answer."""

    @staticmethod
    def plain(prompt: str) -> PromptQuestion:
        """A single prompt, not empty."""
        if not prompt.strip():
            raise UserError("the prompt is empty: there is nothing to answer")
        return PromptQuestion((Message("user", prompt),), line={"prompt": prompt})

    @property
    def text(self) -> str:
        """For who reads the answer."""
        if not self.is_conversation:
            return self.messages[0].text
        return "\n".join(f"{message.role}: {message.text}" for message in self.messages)


def read_questions(path: Path) -> list[PromptQuestion]:
    """What a file asks: lines, {"prompt": ...} or {"messages": [{"role": ..., "content": ...}]}."""
    return [
        _question(line, where) if is_json else PromptQuestion.plain(line)
        for line, where, is_json in _lines(path)
    ]


def _lines(path: Path) -> Iterator[tuple[str, str, bool]]:
    """(line, where it is, whether it is JSON) of each prompt; UserError if there is none."""
    if not path.is_file():
        raise UserError(f"there is no file of prompts {path}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    is_json = path.suffix.lower() in (".jsonl", ".json")
    is_empty = True
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if line.strip() and (is_json or not line.lstrip().startswith("#")):
            is_empty = False
            yield line, f"{path}, line {number}", is_json
    if is_empty:
        raise UserError(f"{path} holds no prompts; write one per line")


def _read_json(line: str, where: str) -> dict[str, Any]:
    """The object of a line; one without keys for any other content."""
    try:
        content = load_json(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:  # a number without end, lists in lists in lists
        raise UserError(f"{where} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def _prompt(line: str, where: str) -> Prompt:
    content = _read_json(line, where)
    keys = set(content)
    if len(keys & {"prompt", "canvas"}) != 1:
        raise UserError(f'{where}: write {{"prompt": "..."}} or {{"canvas": "... [MASK*8] ..."}}')
    if unknown := keys - {"prompt", "canvas"}:
        raise UserError(f"{where}: {min(unknown)!r} is not known; allowed are prompt or canvas")
    (key,) = keys
    if not isinstance(content[key], str) or not content[key]:
        raise UserError(f"{where}: {key!r} must be a text that is not empty")
    return Prompt(**{key: sanitize(content[key])})


def _question(line: str, where: str) -> PromptQuestion:
    content = _read_json(line, where)
    if len(content.keys() & {"prompt", "messages"}) != 1:
        raise UserError(
            f'{where}: write {{"prompt": "..."}} or {{"messages": [{{"role": "user", "content": '
            '"..."}]}'
        )
    if "response" in content:  # a file of examples: what was right goes beside the answer
        content = {("reference" if k == "response" else k): v for k, v in content.items()}
    for name in RESULTS:
        if name in content:
            raise UserError(f"{where}: {name!r} is a key of the answer; call it otherwise")
    if "messages" in content:
        return PromptQuestion(_messages(content["messages"], where), True, content)
    if not isinstance(content["prompt"], str) or not content["prompt"].strip():
        raise UserError(f"{where}: 'prompt' must be a text that is not empty")
    return PromptQuestion((Message("user", content["prompt"]),), line=content)


def _messages(listed: Any, where: str) -> tuple[Message, ...]:
    """A system message or none, then user and assistant in turn, the user first and last."""
    turns = listed if isinstance(listed, list) else []
    for turn in turns:
        is_turn = isinstance(turn, dict) and isinstance(turn.get("content"), str)
        if not is_turn or turn.get("role") not in get_args(Role):
            raise UserError(
                f'{where}: a message is {{"role": "user", "content": "..."}}; roles are '
                f"{', '.join(get_args(Role))}"
            )
    said = tuple(Message(turn["role"], turn["content"]) for turn in turns)
    roles = [message.role for message in said]
    turn_roles = roles[1:] if roles[:1] == ["system"] else roles
    expected = ["user", "assistant"] * (len(turn_roles) // 2) + ["user"]
    if turn_roles != expected:
        raise UserError(
            f"{where}: the roles are {', '.join(roles) or 'none'}; after a system message, if any, "
            "user and assistant take turns, and the last word is the user's"
        )
    return said


# Questions in, answers out.
#
# Sample number i, counted through all questions, depends on the seed, i and its question alone.


def answer_and_write(options: GenerateOptions, loaded: Loaded) -> int:
    """Answer every question ``--num`` times and write what was answered."""
    asked = _asked(options)
    answers = _answer(loaded, asked, options, options.sampling, "answering")
    if options.format == "jsonl":
        lines = [
            json.dumps(_line(asked[i // options.num], i, answer), ensure_ascii=False)
            for i, answer in enumerate(answers)
        ]
        content = "\n".join(lines)
    else:
        content = SEPARATOR.join(answer.text for answer in answers)
    write_out(sanitize(content) + "\n", options.out)
    nfe = sum(answer.nfe for answer in answers) / len(answers)
    tokens = sum(answer.num_tokens for answer in answers)
    print(
        f"{len(answers)} {'answer' if len(answers) == 1 else 'answers'}, {tokens} tokens, "
        f"{nfe:.1f} network calls per answer",
        file=sys.stderr,
    )
    return 0


def asked_texts(options: GenerateOptions) -> list[str]:
    """What is asked."""
    return [one.text for one in _asked(options)]


def answered_beside(
    options: GenerateOptions, loaded: Loaded, sampling: Sampling, name: str
) -> list[list[str]]:
    """A run's answers, [question][sample]."""
    answers = _answer(loaded, _asked(options), options, sampling, f"answering with {name}")
    texts = [answer.text for answer in answers]
    starts = range(0, len(texts), options.num)
    return [texts[start : start + options.num] for start in starts]


def _asked(options: GenerateOptions) -> list[PromptQuestion]:
    if options.prompt is not None:
        return [PromptQuestion.plain(options.prompt)]
    assert options.prompts is not None
    return read_questions(Path(options.prompts))


def _answer(
    loaded: Loaded,
    asked: Sequence[PromptQuestion],
    options: GenerateOptions,
    sampling: Sampling,
    title: str,
) -> list[Answer]:
    """``--num`` answers to each question, with a progress bar, or shown live."""
    answerer = Answerer(loaded)
    _say_what_is_odd(answerer, asked)
    questions = [
        Question(one.messages, one.is_conversation or answerer.knows_turns)
        for one in asked
        for _ in range(options.num)
    ]
    with observing(options, loaded, title, len(questions)) as observed:
        answers = answerer.answer(
            questions,
            length=options.length,
            sampling=sampling,
            seed=options.seed,
            batch_size=options.batch_size,
            progress=observed.progress,
            on_step=observed.on_step,
        )
    observed.save(options, loaded, [answer.text for answer in answers], is_answer=True)
    if num_cut := sum(answer.is_cut for answer in answers[:: options.num]):
        note(
            f"{num_cut} of {len(asked)} prompts did not fit into the run's rows of "
            f"{loaded.config.data.block_length} tokens and lost their oldest tokens"
        )
    return answers


def _say_what_is_odd(answerer: Answerer, asked: Sequence[PromptQuestion]) -> None:
    """Questions in a form that the run was not trained for."""
    if not answerer.is_tuned:
        note("the run was not fine-tuned on prompts: it continues them as text")
    elif not answerer.knows_turns and any(len(one.messages) > 1 for one in asked):
        note("the run was fine-tuned on single prompts: it has not seen conversations")


def _line(asked: PromptQuestion, sample: int, answer: Answer) -> dict[str, Any]:
    return {
        **asked.line,
        "sample": sample,
        "response": answer.text,
        "num_tokens": answer.num_tokens,
        "prompt_cut": answer.is_cut,
    }


# Samples, continuations and infillings.


def continue_and_write(options: GenerateOptions, loaded: Loaded) -> int:
    """Fill what is to be filled and write the texts."""
    prompts = _prompts(options)
    made = _generate(loaded, prompts, options, options.sampling, "generating")
    _write(options, prompts, [decode_samples(loaded, one) for one in made], made)
    calls, nfe = sum(one.num_calls for one in made), sum(one.nfe for one in made) / len(made)
    print(f"{calls} network calls, {nfe:.1f} per sample", file=sys.stderr)
    return 0


def begun_texts(options: GenerateOptions) -> list[str]:
    """What is continued or filled."""
    return [prompt.text for prompt in _prompts(options)]


def continued_beside(
    options: GenerateOptions, loaded: Loaded, sampling: Sampling, name: str
) -> list[list[str]]:
    """A run's texts, [prompt][sample]."""
    made = _generate(loaded, _prompts(options), options, sampling, f"generating with {name}")
    return [decode_samples(loaded, one) for one in made]


def _prompts(options: GenerateOptions) -> list[Prompt]:
    if options.prompts is None:
        return [Prompt(options.prefix, options.canvas)]
    return read_prompts(Path(options.prompts))


def _canvas(loaded: Loaded, prompt: Prompt, options: GenerateOptions) -> Canvas:
    length = None if prompt.canvas is not None else options.length
    canvas = run_canvas(loaded, prefix=prompt.prompt or "", template=prompt.canvas, length=length)
    if len(canvas) > loaded.config.data.block_length:
        note(
            f"the canvas has {len(canvas)} tokens, the run was trained on "
            f"{loaded.config.data.block_length}"
        )
    return canvas


def _generate(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    options: GenerateOptions,
    sampling: Sampling,
    title: str,
) -> list[Generation]:
    """All samples of all prompts, with a progress bar, or shown live."""
    canvases = [_canvas(loaded, prompt, options) for prompt in prompts]
    made: list[Generation] = []
    with observing(options, loaded, title, options.num * len(canvases)) as observed:
        for canvas in canvases:
            made.append(
                fill_canvas(
                    loaded,
                    canvas,
                    options.num,
                    sampling,
                    seed=options.seed,
                    first_sample=options.num * len(made),
                    batch_size=options.batch_size,
                    progress=observed.progress,
                    on_step=observed.on_step,
                )
            )
    observed.save(options, loaded, [text for one in made for text in decode_samples(loaded, one)])
    return made


def _write(
    options: GenerateOptions,
    prompts: Sequence[Prompt],
    texts: Sequence[Sequence[str]],
    made: Sequence[Generation],
) -> None:
    if options.format == "jsonl":
        lines = [
            json.dumps(
                {
                    "sample": i,
                    **({"prompt": prompt.text} if options.prompts else {}),
                    "text": text,
                    "ids": ids,
                },
                ensure_ascii=False,
            )
            for n, (prompt, some, one) in enumerate(zip(prompts, texts, made, strict=True))
            for i, (text, ids) in enumerate(
                zip(some, one.ids_BL.tolist(), strict=True), start=n * options.num
            )
        ]
        content = "\n".join(lines) + "\n"
    else:
        content = SEPARATOR.join(text for some in texts for text in some) + "\n"
    write_out(content, options.out)


# Texts of several runs on the same prompts, side by side, for qualitative comparison (App. E).
#
# A table that fits the screen, a page that needs nothing else, a Markdown file.

NARROWEST = 28
"""Characters of a column; where there is no room for that, runs stand under one another."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1c1c; --soft: #666; --line: #d8d8d8;
  --panel: #f5f6f8; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --ink: #ececec; --soft: #9a9ea6;
  --line: #3a3d44; --panel: #1d2026; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1400px; padding: 1rem;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; white-space: pre-wrap; overflow-wrap: anywhere; }
h2 small { color: var(--soft); font-weight: normal; }
h3 { font-size: .95rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
.runs { display: grid; gap: .8rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); }
.run { border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; min-width: 0; }
pre { background: var(--panel); border-radius: 6px; padding: .5rem .6rem; margin: .3rem 0;
  font: .9rem/1.5 ui-monospace, "DejaVu Sans Mono", Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.given { color: var(--soft); }
"""


@dataclass(frozen=True)
class SideBySide:
    """The texts of each run for each prompt."""

    runs: Sequence[str]
    """Names; the first one is the reference, at the left."""
    prompts: Sequence[str]
    """As they were asked, canvases with their gaps."""
    texts: Sequence[Sequence[Sequence[str]]]
    """[run][prompt][sample]."""
    title: str = "Side by side"
    settings: str = ""
    """How the texts were made, in one line."""

    def __post_init__(self) -> None:
        if len(set(self.runs)) != len(self.runs):
            raise UserError(f"two runs have the same name: {', '.join(self.runs)}")
        assert len(self.texts) == len(self.runs)
        assert all(len(of_run) == len(self.prompts) for of_run in self.texts)

    def show(self, console: Console | None = None) -> None:
        """Print it, folded to the width of the screen."""
        console = console or Console(highlight=False)
        if not console.is_terminal and console.width < PIPE_WIDTH:
            console = Console(highlight=False, width=PIPE_WIDTH, file=console.file)
        for number in range(len(self.prompts)):
            console.print(self._heading(number))
            console.print(self._table(number, console.width))
        if self.settings:
            console.print(Text(visible(self.settings), style="dim"))

    def _asked(self, number: int) -> str:
        return visible_lines(self.prompts[number]) or "(nothing given)"

    def _heading(self, number: int) -> Text:
        return Text(f"{number + 1}. {self._asked(number)}", style="bold")

    def _table(self, number: int, width: int) -> Table:
        if len(self.runs) * (NARROWEST + 3) + 1 <= width:
            table = Table(show_lines=True, expand=True)
            for name in self.runs:
                table.add_column(Text(visible(name)), overflow="fold", ratio=1)
            for row in zip(*(of_run[number] for of_run in self.texts), strict=True):
                table.add_row(*(self._marked(number, text) for text in row))
            return table
        table = Table(show_lines=True, expand=True, show_header=False)
        table.add_column(overflow="fold")
        for name, of_run in zip(self.runs, self.texts, strict=True):
            for text in of_run[number]:
                table.add_row(
                    Text.assemble((f"{visible(name)}\n", "bold"), self._marked(number, text))
                )
        return table

    def _marked(self, number: int, text: str) -> Text:
        """A text with its given beginning dimmed."""
        given, made = self._split(number, text)
        return Text.assemble((visible_lines(given), "dim"), visible_lines(made))

    def _split(self, number: int, text: str) -> tuple[str, str]:
        """(given beginning, what was made); of a canvas, which has gaps, nothing is told apart."""
        prompt = self.prompts[number]
        return (prompt, text[len(prompt) :]) if text.startswith(prompt) else ("", text)

    def page(self) -> str:
        """A self-contained page."""
        sections = "".join(self._section(number) for number in range(len(self.prompts)))
        title, note = (html.escape(visible(text)) for text in (self.title, self.settings))
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
            f'<title>{title}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>'
            f"<body><h1>{title}</h1><p>{note}</p>{sections}</body></html>\n"
        )

    def _section(self, number: int) -> str:
        prompt = html.escape(self._asked(number))
        runs = ""
        for name, of_run in zip(self.runs, self.texts, strict=True):
            boxes = ""
            for text in of_run[number]:
                given, made = (html.escape(visible_lines(p)) for p in self._split(number, text))
                # a line end right behind <pre> would be dropped; the element keeps it
                boxes += f'<pre><span class="given">{given}</span>{made}</pre>'
            runs += f'<div class="run"><h3>{html.escape(visible(name))}</h3>{boxes}</div>'
        heading = f"<h2><small>{number + 1}.</small> {prompt}</h2>"
        return f'<section>{heading}<div class="runs">{runs}</div></section>'

    def markdown(self) -> str:
        """The same as Markdown; texts are fenced, so that nothing in them is markup."""
        parts = [f"# {_one_line(self.title)}"]
        parts += [_one_line(self.settings)] if self.settings else []
        for number in range(len(self.prompts)):
            parts += [f"## Prompt {number + 1}", _fenced(self._asked(number))]
            for name, of_run in zip(self.runs, self.texts, strict=True):
                parts += [f"**{_one_line(name)}**"]
                parts += [_fenced(text) for text in of_run[number]]
        return "\n\n".join(parts) + "\n"

    def save(self, folder: Path) -> list[Path]:
        """Write comparison.html and comparison.md; returns their paths."""
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file; give a folder for comparison.html and .md")
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "comparison.html", folder / "comparison.md"]
        for path, content in zip(paths, (self.page(), self.markdown()), strict=True):
            write_text(path, content)
        return paths


def show_side_by_side(
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Sequence[str]]],
    output: Path | None = None,
    settings: str = "",
) -> None:
    """Print each run's texts [prompt][sample]; page and Markdown go to the folder ``output``."""
    title = f"{' and '.join(columns)} side by side"
    table = SideBySide(list(columns), prompts, list(columns.values()), title, settings)
    paths = [] if output is None else table.save(output)
    table.show()
    for path in paths:
        print(path)


def _one_line(text: str) -> str:
    """A line of Markdown without markup."""
    signs = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]<>#|&"})
    return visible(" ".join(text.split())).translate(signs)


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    text, fence = visible_lines(text), "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


# The command.


def _is_asked(options: GenerateOptions, config: RunConfig) -> bool:
    """True where an answer is wanted: for --prompt, and for --prompts of a fine-tuned run."""
    is_tuned = config.sft.train is not None
    return options.prompt is not None or (options.prompts is not None and is_tuned)


def _side_by_side(options: GenerateOptions) -> int:
    runs = open_runs(options.runs)
    are_asked = {str(run.folder): _is_asked(options, run.config) for run in runs}
    if len(set(are_asked.values())) > 1:
        odd = ", ".join(name for name, is_asked in are_asked.items() if not is_asked)
        raise UserError(
            f"{odd}: not fine-tuned on prompts, so --prompts are beginnings there and questions "
            "for the others; ask all of them with --prompt"
        )
    is_asked = all(are_asked.values())
    texts = asked_texts(options) if is_asked else begun_texts(options)
    write = answered_beside if is_asked else continued_beside
    columns: dict[str, list[list[str]]] = {}
    for name, folder in by_folder(options.runs).items():
        loaded = load_noted(options, str(folder))
        is_causal = loaded.framework.is_causal
        sampling = options.sampling.for_causal() if is_causal else options.sampling
        title = f"{name} (token by token)" if is_causal else name
        columns[title] = write(options, loaded, sampling, name)
    settings = settings_of(options, is_answer=is_asked)
    line = ", ".join(f"{name} {value}" for name, value in settings.items())
    show_side_by_side(texts, columns, Path(options.out) if options.out else None, line)
    return 0


def main(args: Sequence[str]) -> int:
    """Generate and write."""
    options = parse_command(GenerateOptions, args, command="generate")
    _check(options)
    if options.side_by_side:
        return _side_by_side(options)
    loaded = load_noted(options, options.runs[0])
    if _is_asked(options, loaded.config):
        return answer_and_write(options, loaded)
    return continue_and_write(options, loaded)
