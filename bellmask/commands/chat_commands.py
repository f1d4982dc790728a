"""The lines of ``bellmask chat`` that begin with a slash, and what they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bellmask.utils.errors import UserError

if TYPE_CHECKING:
    from bellmask.commands.chat import Chat


@dataclass(frozen=True)
class Command:
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
    for name, command in COMMANDS.items():
        chat.say(f"  {f'{name} {command.needs or command.takes}':<16} {command.help}")
    chat.say("A line that ends with \\ goes on in the next; a space before / makes it text.")
    chat.say("Ctrl-C stops an answer; at the prompt it ends the chat, as Ctrl-D does.")


def _quit(chat: Chat, rest: str) -> bool:
    return False


COMMANDS = {
    "/reset": Command("forget what was said", _reset),
    "/retry": Command("another answer to the last question", _retry),
    "/steps": Command("sampling steps", _steps, "N", "32"),
    "/length": Command("tokens of an answer, at most", _length, "N", "64"),
    "/temperature": Command("0 takes the most likely token", _temperature, "X", "0.7"),
    "/system": Command("said before all else; without a text: nothing is", _system, takes="TEXT"),
    "/help": Command("this", _help),
    "/quit": Command("the end", _quit),
}
