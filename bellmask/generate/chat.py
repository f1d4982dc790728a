"""``bellmask chat``: talk to a run in the terminal and see its answers being unmasked.

The parts: the options; the conversation; the view of an answer; the chat that joins them; its slash
commands; the command itself.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Annotated, Any, Literal

import tyro
from rich.cells import chop_cells
from rich.console import Console, Group
from rich.text import Text

from bellmask.config.command_line import parse_command
from bellmask.data.example_files import Message
from bellmask.data.tokenizers import Tokenizer
from bellmask.generate.answers import Answer, Answerer, Question
from bellmask.generate.canvas import OnStep, Step
from bellmask.generate.live import STYLES, Frame, LiveView
from bellmask.generate.settings import Sampling
from bellmask.storage.loading import LoadOptions
from bellmask.utils.console import MASK, REMASKED, plain_ascii, visible, visible_lines
from bellmask.utils.errors import UserError, look_up


@dataclass(frozen=True, kw_only=True)
class ChatOptions(LoadOptions):
    """Talk to a run; its answers are unmasked before your eyes. /help lists commands, /quit ends.

    Lines from a pipe are asked one after the other; their answers are lines of the output.

    Examples:
    bellmask chat runs/sft

    bellmask chat runs/sft --rule most_confident --steps 16 --temperature 0.7

    bellmask chat runs/sft --length 128 --block-length 32 --system 'Answer in one sentence.'

    echo 'What is a bell?' | bellmask chat runs/sft
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, exported folder, or a name on the hub."""
    length: int | None = None
    """Tokens of an answer, at most; default: what most of the training examples needed."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    """How to sample."""
    seed: int = 0
    """The same words in the same order get the same answers from the same seed."""
    system: str = ""
    """Said to the model before all else."""
    memory: Literal["auto", "on", "off"] = "auto"
    """on: all that was said is part of the prompt; off: each line is asked alone. auto: as the run
    was fine-tuned, on conversations or on single prompts (template and examples tell)."""
    fps: float | None = None
    """Changes shown per second at most, 24 by default; 0 does not wait."""


# A conversation with a run: what was said, what is asked next, how answers are drawn.
#
# Each answer gets the next sample number, so none is drawn from the noise of another, and all of
# them follow from the seed.


@dataclass(frozen=True)
class Turn:
    """What was asked and what was answered."""

    asked: str
    answered: str

    @property
    def messages(self) -> tuple[Message, Message]:
        """As both sides said it."""
        return Message("user", self.asked), Message("assistant", self.answered)


@dataclass
class Talk:
    """``talk.ask("Hello")``, ``talk.retry()``, ``talk.reset()``; fields may be set in between."""

    answerer: Answerer
    has_memory: bool
    """Earlier turns are part of the prompt; else each line is asked alone."""
    length: int
    sampling: Sampling
    seed: int = 0
    system: str = ""
    """Said to the model before all else."""
    number: int = 0
    """Of the next answer's sample."""
    turns: tuple[Turn, ...] = ()
    _last: tuple[str, tuple[Turn, ...]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.answerer.check_length(self.length)
        self.set_sampling()

    def set_length(self, length: int) -> None:
        """Tokens of an answer from now on."""
        self.length = self.answerer.check_length(length)

    def set_sampling(self, **settings: float) -> None:
        """Other sampling settings from now on."""
        asked = replace(self.sampling, **settings)  # type: ignore[arg-type]
        if "steps" in settings and self.answerer.run.framework.is_causal:
            raise UserError("this run writes token by token: there are no steps to choose")
        self.sampling = self.answerer.sampling(asked.check())

    def reset(self) -> None:
        """Forget what was said."""
        self.turns, self._last = (), None

    def ask(self, text: str, on_step: OnStep | None = None) -> Answer:
        """Say something; question and answer are remembered once the answer is whole."""
        return self._answer(text, self.turns, on_step)

    def retry(self, on_step: OnStep | None = None) -> Answer:
        """Another answer to the last question, in place of the first."""
        if self._last is None:
            raise UserError("nothing has been asked yet")
        return self._answer(*self._last, on_step)

    def question(self, text: str, before: tuple[Turn, ...]) -> Question:
        """All that the model is given."""
        said = [Message("system", self.system)] if self.system else []
        if self.has_memory:
            said += [message for turn in before for message in turn.messages]
        is_conversation = self.has_memory or self.answerer.knows_turns
        return Question((*said, Message("user", text)), is_conversation)

    def _answer(self, text: str, before: tuple[Turn, ...], on_step: OnStep | None) -> Answer:
        self._last = text, before
        number, self.number = self.number, self.number + 1
        (answer,) = self.answerer.answer(
            [self.question(text, before)],
            length=self.length,
            sampling=self.sampling,
            seed=self.seed,
            first_sample=number,
            on_step=on_step,
        )
        self.turns = (*before, Turn(text, answer.text))
        return answer


# One answer being unmasked, live in the terminal: the answer alone, up to its first EOS.
#
# Masked positions are dim blocks, tokens of the last step stand out. What comes after the leftmost
# EOS so far is not shown: it will not be part of the answer. Lines break where the text does and
# are folded anywhere, as a terminal folds the finished answer. One row, L length.

END = "|"
"""Where the answer ends."""
DEFAULT_FPS = 24.0


class AnswerView(LiveView):
    """``with AnswerView(tokenizer) as view: ...`` and ``on_step=view``, for one answer.

    ``fps`` is the most changes shown per second; 0 does not wait. The view goes away at the end,
    when the finished answer is to be printed; of an interrupted one the last frame stays.
    """

    def __init__(self, tokenizer: Tokenizer, *, fps: float = DEFAULT_FPS, **more: Any) -> None:
        super().__init__(tokenizer, fps=fps, keep_last=False, **more)
        self._eos_id = tokenizer.eos_id
        self._shown: Text | None = None

    @property
    def step(self) -> Step | None:
        """The last one, if any."""
        return None if self._frame is None else self._frame.step

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.transient = kind is None
        super().__exit__(kind, error, trace)

    def __call__(self, step: Step) -> None:
        """Show one step, if it changes anything that is seen."""
        frame = self._take(step)
        answer = self._answer(frame)
        if self.console.is_terminal and answer != self._shown:
            self._shown = answer
            self._wait()
            self._live.update(Group(*self._lines(answer, frame.step)), refresh=True)

    def render(self) -> list[Text]:
        """The latest frame: the answer's lines, as many as fit on the screen, and the step."""
        assert self._frame is not None
        return self._lines(self._answer(self._frame), self._frame.step)

    def _lines(self, answer: Text, step: Step) -> list[Text]:
        lines = self._fold(answer)
        room = max(1, self.console.height - 3)
        if len(lines) > room:
            more = Text(f"... {len(lines) - room + 1} more lines", style="dim")
            lines = [*lines[: room - 1], more]
        return [*lines, Text(f"step {step.number} of {step.num_steps}", style="dim")]

    def _answer(self, frame: Frame) -> Text:
        """The gap up to the leftmost EOS, each token in the style of what happened to it."""
        text = Text()
        blocks = {"masked": MASK, "remasked": REMASKED}
        ids = zip(frame.canvas_BL[0].tolist(), frame.step.ids_BL[0].tolist(), strict=True)
        for (canvas, token), kind in zip(ids, frame.kinds(0), strict=True):
            if canvas != self._mask_id:
                continue
            if token == self._eos_id:
                text.append(END, style="dim")
                break
            shown = blocks.get(kind) or visible_lines(self._texts(token))
            if not text.plain:
                shown = shown.lstrip()  # as the finished answer
            if self.console.options.ascii_only:
                shown = "\n".join(plain_ascii(line) for line in shown.split("\n"))
            text.append(shown, style=STYLES[kind])
        return text

    def _fold(self, text: Text) -> list[Text]:
        """Lines no wider than the screen."""
        lines: list[Text] = []
        for line in text.split("\n", allow_blank=True):
            pieces = chop_cells(line.plain, self.console.width)
            cuts = [sum(map(len, pieces[: n + 1])) for n in range(len(pieces) - 1)]
            lines += line.divide(cuts)
        return lines


# Lines in, answers and notes out.


class Chat:
    """Lines in, answers and notes out."""

    def __init__(self, talk: Talk, console: Console, fps: float) -> None:
        self.talk, self.console, self.fps = talk, console, fps
        self.is_live = sys.stdin.isatty()

    def say(self, text: str) -> None:
        """A note, beside the answers."""
        self.console.print(Text(visible_lines(text), style="dim"), soft_wrap=True)

    def take(self, line: str) -> bool:
        """Answer a line or do what its command says; False when it is over."""
        if not line.strip():
            if not self.is_live:
                print()  # line n of the output belongs to line n of the input
            return True
        try:
            command = re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", line.strip(), re.DOTALL)
            if command and not line[0].isspace():
                return self._obey(command[1], (command[2] or "").strip())
            self._answer(lambda on_step: self.talk.ask(line, on_step))
        except UserError as error:
            if not self.is_live:
                raise
            self.say(f"error: {error}")
        return True

    def _obey(self, name: str, rest: str) -> bool:
        command = look_up("command", f"/{name}", SLASH_COMMANDS)
        if rest and not (command.needs or command.takes):
            raise UserError(f"/{name} takes nothing, got {rest!r}")
        if command.needs and not rest:
            raise UserError(f"/{name} needs {command.needs}: /{name} {command.example}")
        return command.do(self, rest) is not False

    def retry(self) -> None:
        """Another answer to the last question."""
        self._answer(self.talk.retry)

    def _answer(self, ask: Callable[[OnStep | None], Answer]) -> None:
        view = AnswerView(self.talk.answerer.run.tokenizer, fps=self.fps, console=self.console)
        start = time.monotonic()
        try:
            with view if self.is_live else contextlib.nullcontext():
                answer = ask(view if self.is_live else None)
        except KeyboardInterrupt:
            if not self.is_live:
                raise
            self.say("stopped; /retry asks again")
            return
        seconds = time.monotonic() - start - view.seconds_waited
        text = visible_lines(answer.text) if self.is_live else visible(answer.text)
        print(text, flush=True)
        if answer.is_cut:
            self.say("note: the prompt was too long; its oldest tokens were dropped")
        if self.is_live and view.step is not None:
            speed = answer.num_tokens / max(seconds, 1e-9)
            self.say(
                f"{view.step.num_steps} steps, {view.step.num_calls} calls, {seconds:.2f} s, "
                f"{answer.num_tokens} tokens, {speed:.0f} tokens/s"
            )


# The lines of ``bellmask chat`` that begin with a slash, and what they do.


@dataclass(frozen=True)
class SlashCommand:
    """What a line that begins with a slash does."""

    help: str
    do: Callable[[Chat, str], bool | None]
    """False ends the chat."""
    needs: str = ""
    """What must follow."""
    example: str = ""
    takes: str = ""
    """What may follow."""


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{text!r} is not a whole number") from None


def _reset(chat: Chat, rest: str) -> None:
    chat.talk.reset()
    chat.say("forgotten")


def _retry(chat: Chat, rest: str) -> None:
    chat.retry()


def _steps(chat: Chat, rest: str) -> None:
    chat.talk.set_sampling(steps=_whole_number(rest))
    chat.say(f"{chat.talk.sampling.steps} steps")


def _length(chat: Chat, rest: str) -> None:
    chat.talk.set_length(_whole_number(rest))
    chat.say(f"answers of up to {chat.talk.length} tokens")


def _temperature(chat: Chat, rest: str) -> None:
    try:
        chat.talk.set_sampling(temperature=float(rest))
    except ValueError as error:
        known = isinstance(error, UserError)
        raise error if known else UserError(f"{rest!r} is not a number") from None
    chat.say(f"temperature {chat.talk.sampling.temperature:g}")


def _system(chat: Chat, rest: str) -> None:
    chat.talk.system = rest
    chat.say("said before all else from now on" if rest else "no system text any more")


def _help(chat: Chat, rest: str) -> None:
    for name, command in SLASH_COMMANDS.items():
        chat.say(f"  {f'{name} {command.needs or command.takes}':<16} {command.help}")
    chat.say("A line that ends with \\ goes on in the next; a space before / makes it text.")
    chat.say("Ctrl-C stops an answer; at the prompt it ends the chat, as Ctrl-D does.")


def _quit(chat: Chat, rest: str) -> bool:
    return False


SLASH_COMMANDS = {
    "/reset": SlashCommand("forget what was said", _reset),
    "/retry": SlashCommand("another answer to the last question", _retry),
    "/steps": SlashCommand("sampling steps", _steps, "N", "32"),
    "/length": SlashCommand("tokens of an answer, at most", _length, "N", "64"),
    "/temperature": SlashCommand("0 takes the most likely token", _temperature, "X", "0.7"),
    "/system": SlashCommand(
        "said before all else; without a text: nothing is", _system, takes="TEXT"
    ),
    "/help": SlashCommand("this", _help),
    "/quit": SlashCommand("the end", _quit),
}


# The command.


def introduction(talk: Talk) -> list[str]:
    """What one should know before the first line."""
    loaded, sft = talk.answerer.run, talk.answerer.run.config.sft
    steps = f" in {talk.sampling.steps} steps" if talk.sampling.steps else ""
    lines = [
        f"{loaded.folder.name}, step {loaded.step}, on {loaded.device}: answers of up to "
        f"{talk.length} tokens{steps}; /help lists commands"
    ]
    if not talk.answerer.is_tuned:
        lines.append("the run was never fine-tuned on prompts: it just continues your text")
    else:
        kind = "conversations" if talk.answerer.knows_turns else "single prompts"
        lines.append(f"fine-tuned on {kind} (template {sft.template})")
    if talk.has_memory:
        lines.append("what was said before is part of the prompt")
    else:
        lines.append("each line is asked alone")
    if talk.system and not talk.answerer.knows_turns:
        lines.append("the run has seen no system texts; this one is written before your line")
    return lines


def _talk(options: ChatOptions) -> Talk:
    answerer = Answerer(options.load(options.run))
    return Talk(
        answerer,
        has_memory=answerer.knows_turns if options.memory == "auto" else options.memory == "on",
        length=answerer.length if options.length is None else options.length,
        sampling=options.sampling,
        seed=options.seed,
        system=options.system,
    )


def _at_a_terminal(chat: Chat) -> None:
    """Read lines until Ctrl-D, Ctrl-C or /quit; a line that ends with \\ goes on in the next."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history)
    try:
        while chat.take(_read()):
            pass
    except (EOFError, KeyboardInterrupt):
        chat.say("")


def _read() -> str:
    line = _input("> ")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + _input(". ")
    return line


def _input(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)  # answers go to a file: the prompt does not belong there
    sys.stderr.flush()
    return input()


def main(args: Sequence[str]) -> int:
    """Load the run and talk until the user ends it."""
    options = parse_command(ChatOptions, args, command="chat")
    options.sampling.check()
    fps = DEFAULT_FPS if options.fps is None else options.fps
    if not 0 <= fps < float("inf"):
        raise UserError(f"--fps must be 0 (no waiting) or more, got {fps}")
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    chat = Chat(_talk(options), Console(stderr=True, highlight=False), fps)
    for line in introduction(chat.talk):
        chat.say(line)
    if sys.stdin.isatty():
        _at_a_terminal(chat)
    else:
        for line in sys.stdin:
            if not chat.take(line.rstrip("\r\n")):
                break
    return 0
