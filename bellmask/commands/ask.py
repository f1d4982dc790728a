"""``bellmask generate`` with prompts: questions in, answers out.

Sample number i, counted through all questions, depends on the seed, i and its question alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bellmask.commands.generating import SEPARATOR, note, observing, write_out
from bellmask.generate.prompts import Asked, read_questions
from bellmask.utils.files import sound

if TYPE_CHECKING:
    from bellmask.answers import Answer, Answerer
    from bellmask.commands.generate import GenerateOptions
    from bellmask.generate.settings import Sampling
    from bellmask.run import Run


def answer_and_write(options: GenerateOptions, loaded: Run) -> int:
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
    write_out(sound(content) + "\n", options.output)
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
    options: GenerateOptions, loaded: Run, sampling: Sampling, name: str
) -> list[list[str]]:
    """A run's answers, [question][sample]."""
    answers = _answer(loaded, _asked(options), options, sampling, f"answering with {name}")
    texts = [answer.text for answer in answers]
    starts = range(0, len(texts), options.num)
    return [texts[start : start + options.num] for start in starts]


def _asked(options: GenerateOptions) -> list[Asked]:
    if options.prompt is not None:
        return [Asked.plain(options.prompt)]
    assert options.prompts is not None
    return read_questions(Path(options.prompts))


def _answer(
    loaded: Run, asked: Sequence[Asked], options: GenerateOptions, sampling: Sampling, title: str
) -> list[Answer]:
    """``--num`` answers to each question, with a progress bar, or shown live."""
    from bellmask.answers import Answerer, Question

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
            on_batch=observed.advance,
            on_step=observed.on_step,
        )
    observed.save(options, loaded, [answer.text for answer in answers], is_answer=True)
    if num_cut := sum(answer.is_cut for answer in answers[:: options.num]):
        note(
            f"{num_cut} of {len(asked)} prompts did not fit into the run's rows of "
            f"{loaded.config.data.block_length} tokens and lost their oldest tokens"
        )
    return answers


def _say_what_is_odd(answerer: Answerer, asked: Sequence[Asked]) -> None:
    """Questions in a form that the run was not trained for."""
    if not answerer.is_tuned:
        note("the run was not fine-tuned on prompts: it continues them as text")
    elif not answerer.knows_turns and any(len(one.messages) > 1 for one in asked):
        note("the run was fine-tuned on single prompts: it has not seen conversations")


def _line(asked: Asked, sample: int, answer: Answer) -> dict[str, Any]:
    return {
        **asked.line,
        "sample": sample,
        "response": answer.text,
        "num_tokens": answer.num_tokens,
        "prompt_cut": answer.is_cut,
    }
