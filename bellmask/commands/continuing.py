"""``bellmask generate`` without questions: samples, continuations and infillings."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bellmask.commands.generating import SEPARATOR, note, observing, write_out
from bellmask.generate.prompts import Prompt, read_prompts

if TYPE_CHECKING:
    from bellmask.commands.generate import GenerateOptions
    from bellmask.generate.canvas import Canvas
    from bellmask.generate.engine import Generation
    from bellmask.generate.settings import Sampling
    from bellmask.run import Run


def continue_and_write(options: GenerateOptions, loaded: Run) -> int:
    """Fill what is to be filled and write the texts."""
    prompts = _prompts(options)
    made = _generate(loaded, prompts, options, options.sampling, "generating")
    _write(options, prompts, [loaded.texts(one) for one in made], made)
    calls, nfe = sum(one.num_calls for one in made), sum(one.nfe for one in made) / len(made)
    print(f"{calls} network calls, {nfe:.1f} per sample", file=sys.stderr)
    return 0


def begun_texts(options: GenerateOptions) -> list[str]:
    """What is continued or filled."""
    return [prompt.text for prompt in _prompts(options)]


def continued_beside(
    options: GenerateOptions, loaded: Run, sampling: Sampling, name: str
) -> list[list[str]]:
    """A run's texts, [prompt][sample]."""
    made = _generate(loaded, _prompts(options), options, sampling, f"generating with {name}")
    return [loaded.texts(one) for one in made]


def _prompts(options: GenerateOptions) -> list[Prompt]:
    if options.prompts is None:
        return [Prompt(options.prefix, options.canvas)]
    return read_prompts(Path(options.prompts))


def _canvas(loaded: Run, prompt: Prompt, options: GenerateOptions) -> Canvas:
    length = None if prompt.canvas is not None else options.length
    canvas = loaded.canvas(prefix=prompt.prompt or "", template=prompt.canvas, length=length)
    if len(canvas) > loaded.config.data.block_length:
        note(
            f"the canvas has {len(canvas)} tokens, the run was trained on "
            f"{loaded.config.data.block_length}"
        )
    return canvas


def _generate(
    loaded: Run,
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

            def tell(done: int, before: int = options.num * len(made)) -> None:
                observed.advance(before + done)

            made.append(
                loaded.generate(
                    canvas,
                    options.num,
                    sampling,
                    seed=options.seed,
                    first_sample=options.num * len(made),
                    batch_size=options.batch_size,
                    on_batch=tell,
                    on_step=observed.on_step,
                )
            )
    observed.save(options, loaded, [text for one in made for text in loaded.texts(one)])
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
    write_out(content, options.output)
