"""``bellmask chat``: talk to a run in the terminal and see its answers being unmasked.

The parts: the options; the conversation; the chat with its slash commands; the command itself.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.text import Text

from bellmask.config.command_line import parse_command
from bellmask.data.chat_templates import Message
from bellmask.generate.answers import Answer, Answerer, Question
from bellmask.generate.live import AnswerView, check_fps
from bellmask.generate.sampler import OnStep
from bellmask.generate.settings import Sampling
from bellmask.storage.loading import LoadOptions
from bellmask.utils.console import visible, visible_lines
from bellmask.utils.errors import UserError, look_up


@dataclass(frozen=True, kw_only=True)
class ChatOptions(LoadOptions):
    """Chat with a run and watch its answers being unmasked. /help lists commands, /quit exits.

    From a pipe, each input line is a prompt and each output line its answer.

    Examples:
    bellmask chat runs/sft

    bellmask chat runs/sft --rule most_confident --steps 16 --temperature 0.7

    bellmask chat runs/sft --length 128 --block-length 32 --system 'Answer in one sentence.'

    echo 'What is a bell?' | bellmask chat runs/sft
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, exported folder, or a name on the hub."""
    length: int | None = None
    """Maximum number of tokens of an answer; default: enough for most training examples."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    """How to sample."""
    seed: int = 0
    """Sampling seed: the same inputs with the same seed get the same answers."""
    system: str = ""
    """System prompt."""
    memory: Literal["auto", "on", "off"] = "auto"
    """on: the conversation so far is part of the prompt. off: each line is a separate prompt. auto:
    as the run was fine-tuned, on conversations or on single prompts."""
    fps: float = 24.0
    """Maximum number of updates shown per second; 0: no limit."""


# A conversation with a run: messages, the next prompt, sampling of answers.
#
# Each answer gets the next sample number, so none is drawn from the noise of another, and all of
# them follow from the seed.


class Talk:
    """``talk.ask("Hello")``, ``talk.retry()``, ``talk.reset()``; fields may be set in between."""

    def __init__(self, answerer: Answerer, options: ChatOptions) -> None:
        self.answerer, self.seed, self.system = answerer, options.seed, options.system
        memory = {"auto": answerer.knows_turns, "on": True, "off": False}
        self.has_memory = memory[options.memory]
        """Whether earlier messages are part of the prompt."""
        self.number = 0
        """Number of the next answer's sample."""
        self.length = answerer.check_length(options.length)
        self.sampling = answerer.sampling(options.sampling.check())
        self.reset()

    def set(self, name: str, value: float) -> None:
        """Change the length (tokens of an answer) or a sampling setting."""
        if name == "length":
            self.length = self.answerer.check_length(int(value))
            return
        if name == "steps" and self.answerer.run.framework.is_causal:
            raise UserError("this run generates token by token: it has no steps")
        asked: dict[str, Any] = {name: value}
        self.sampling = self.answerer.sampling(replace(self.sampling, **asked).check())

    def reset(self) -> None:
        """Forget the conversation."""
        self.said: tuple[Message, ...] = ()
        self._last: tuple[str, tuple[Message, ...]] | None = None

    def ask(self, text: str, on_step: OnStep | None = None) -> Answer:
        """Send a message; question and answer are remembered once the answer is complete."""
        self._last = text, self.said
        return self.retry(on_step)

    def retry(self, on_step: OnStep | None = None) -> Answer:
        """Another answer to the last question, in place of the first."""
        if self._last is None:
            raise UserError("there is no prompt yet")
        text, before = self._last
        number, self.number = self.number, self.number + 1
        how: dict[str, Any] = {"seed": self.seed, "samples": [number], "on_step": on_step}
        how |= {"length": self.length, "sampling": self.sampling}
        (answer,) = self.answerer.answer([self.question(text, before)], **how)
        self.said = (*before, Message("user", text), Message("assistant", answer.text))
        return answer

    def question(self, text: str, before: tuple[Message, ...]) -> Question:
        """The messages given to the model."""
        system = (Message("system", self.system),) if self.system else ()
        earlier = before if self.has_memory else ()
        return Question((*system, *earlier, Message("user", text)), self.has_memory)


# Lines in, answers and notes out; lines that begin with a slash are commands.


SLASH_COMMANDS = {
    "/reset": "forget the conversation",
    "/retry": "another answer to the last prompt",
    "/steps": "sampling steps: /steps 32",
    "/length": "maximum tokens of an answer: /length 64",
    "/temperature": "0 takes the most likely token: /temperature 0.7",
    "/system": "set the system prompt; without text, remove it",
    "/help": "this",
    "/quit": "exit",
}
HINTS = """A line that ends with \\ continues on the next; a space before / makes it text.
Ctrl-C stops an answer; at the prompt it exits, as does Ctrl-D."""


class Chat:
    """``chat.take(line)`` answers the line, or runs its command."""

    def __init__(self, talk: Talk, console: Console, fps: float) -> None:
        self.talk, self.console, self.fps = talk, console, fps
        self.is_live = sys.stdin.isatty()

    def say(self, text: str) -> None:
        """Print a note on stderr."""
        self.console.print(Text(visible_lines(text), style="dim"), soft_wrap=True)

    def take(self, line: str) -> bool:
        """False to end the chat."""
        if not line.strip():
            if not self.is_live:
                print()  # line n of the output belongs to line n of the input
            return True
        try:
            command = re.fullmatch(r"(/[a-z]+)(?:\s+(.*))?", line.rstrip(), re.DOTALL)
            if command:
                return self._obey(command[1], (command[2] or "").strip())
            self.answer(lambda on_step: self.talk.ask(line, on_step))
        except UserError as error:
            if not self.is_live:
                raise
            self.say(f"error: {error}")
        return True

    def _obey(self, name: str, rest: str) -> bool:
        look_up("command", name, SLASH_COMMANDS)
        if rest and name in ("/reset", "/retry", "/help", "/quit"):
            raise UserError(f"{name} takes no argument, got {rest!r}")
        match name:
            case "/reset":
                self.talk.reset()
                self.say("forgotten")
            case "/retry":
                self.answer(self.talk.retry)
            case "/steps" | "/length" | "/temperature":
                try:
                    value = float(rest) if name == "/temperature" else int(rest)
                except ValueError:
                    raise UserError(f"{name} needs a number, got {rest!r}") from None
                self.talk.set(name[1:], value)
                self.say(f"{name[1:]} {value:g}")
            case "/system":
                self.talk.system = rest
                self.say("system prompt set" if rest else "system prompt removed")
            case "/help":
                for other, does in SLASH_COMMANDS.items():
                    self.say(f"  {other:<13} {does}")
                self.say(HINTS)
        return name != "/quit"

    def answer(self, ask: Callable[[OnStep | None], Answer]) -> None:
        """Show an answer while it is generated, then print it."""
        view = AnswerView(self.talk.answerer.run.tokenizer, fps=self.fps, console=self.console)
        start = time.monotonic()
        try:
            with view if self.is_live else contextlib.nullcontext():
                answer = ask(view if self.is_live else None)
        except KeyboardInterrupt:
            if not self.is_live:
                raise
            self.say("stopped; /retry tries again")
            return
        seconds = time.monotonic() - start - view.seconds_waited
        print(visible_lines(answer.text) if self.is_live else visible(answer.text), flush=True)
        if answer.is_cut:
            self.say("note: the prompt was too long; its oldest tokens were dropped")
        if view.frame is not None:
            step, speed = view.frame.step, answer.num_tokens / max(seconds, 1e-9)
            counts = f"{step.num_steps} steps, {step.num_calls} calls, {answer.num_tokens} tokens"
            self.say(f"{counts}, {seconds:.2f} s, {speed:.0f} tokens/s")

    def introduce(self) -> None:
        """Notes before the first line."""
        talk, answerer, loaded = self.talk, self.talk.answerer, self.talk.answerer.run
        steps = f" in {talk.sampling.steps} steps" if talk.sampling.steps else ""
        self.say(
            f"{loaded.folder.name}, step {loaded.step}, on {loaded.device}: answers of up to "
            f"{talk.length} tokens{steps}; /help lists commands"
        )
        if answerer.is_tuned:
            kind = "conversations" if answerer.knows_turns else "single prompts"
            self.say(f"fine-tuned on {kind} (template {loaded.config.sft.template})")
        else:
            self.say("the run was not fine-tuned on prompts: it only continues your text")
        memory = "the conversation so far is part of the prompt"
        self.say(memory if talk.has_memory else "each line is a separate prompt")


# The command.


def _typed_lines() -> Iterator[str]:
    """The user's input; a line that ends with \\ continues on the next."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history)
    while True:
        line = _input("> ")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + _input(". ")
        yield line


def _input(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)  # answers go to a file, the prompt does not
    return input()


def main(args: Sequence[str]) -> int:
    """Load the run and chat until the user exits."""
    options = parse_command(ChatOptions, args, command="chat")
    options.sampling.check()
    check_fps(options.fps)
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    talk = Talk(Answerer(options.load(options.run)), options)
    chat = Chat(talk, Console(stderr=True, highlight=False), options.fps)
    chat.introduce()
    lines = _typed_lines() if chat.is_live else (line.rstrip("\r\n") for line in sys.stdin)
    try:
        for line in lines:
            if not chat.take(line):
                break
    except (EOFError, KeyboardInterrupt):
        if not chat.is_live:
            raise
        chat.say("")
    return 0
