"""``bellmask data``: the named corpora, and the data card of prepared blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bellmask.config.presets import take_option
from bellmask.utils.errors import UserError, look_up

if TYPE_CHECKING:
    from bellmask.config.options import DataOptions

HELP = """List named corpora, or show what a corpus became.

usage: bellmask data list
       bellmask data show NAME|PATH [--from PATH] [--split train|valid] [--data.OPTION VALUE ...]

The card has counts, tokens per byte, hashes of the sources, licence, every rule that was applied
and the fingerprint, then a few decoded blocks. Blocks that are not prepared yet are prepared first.

examples:
  bellmask data list
  bellmask data show wikitext2
  bellmask data show wikitext2 --split valid
  bellmask data show lm1b --from 'lm1b/*.txt' --data.tokenizer bert-base-uncased
"""
OWN = ("--from", "--split")


def parse_data(args: list[str], where: str) -> tuple[DataOptions, dict[str, str]]:
    """(data options, the command's own) from ``NAME [--from PATH] [--split S] [--data.* ...]``."""
    from bellmask.config.config import RunConfig, override
    from bellmask.config.presets import PRESETS

    own = {name: values[-1] for name in OWN if (values := take_option(args, name))}
    if not args or args[0].startswith("-"):
        raise UserError(f"{where} needs a corpus or a path first ('bellmask data list')")
    name = args.pop(0)
    start = PRESETS[name]() if name in PRESETS else RunConfig()
    data = start.data if name in PRESETS else replace(start.data, train=name)
    config = override(replace(start, data=data), args, where).check()
    options = config.data
    if "--from" in own:
        options = replace(options, from_files=own["--from"])
    return options, own


def require_text(options: DataOptions, split: str) -> None:
    """Refuse a validation split where there is no text for it."""
    from bellmask.data.corpora import has_split

    if split == "valid" and options.valid is None and not has_split(options, "valid"):
        raise UserError(
            f"{options.train} has no validation text of its own: training holds out the last "
            f"{options.valid_fraction:.0%} of its blocks; give some with --data.valid PATH"
        )


def print_card(card: dict[str, Any], title: str) -> None:
    """The data card as a table."""
    from bellmask.utils.console import print_plain_table

    try:
        rows = _card_rows(card)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise UserError(f"the data card of {title} is damaged; delete the data cache") from None
    print_plain_table(title, ["data card", ""], rows)


def _card_rows(card: dict[str, Any]) -> list[list[str]]:
    ratio = card["text_tokens"] / max(1, card["text_bytes"])
    rows = [
        ["source", card["source"]],
        ["licence", card["licence"]],
        *[["  " + name, mark] for name, mark in list(card["origin"].items())[:8]],
        ["documents", f"{card['num_documents']:,}"],
        ["text", f"{card['text_bytes']:,} bytes, {card['text_tokens']:,} tokens"],
        ["tokens per byte", f"{ratio:.4f}"],
        ["blocks", f"{card['num_blocks']:,} of {card['block_length']} tokens"],
        ["a document is", f"{card['documents']}, column {card['column']}"],
        ["detokeniser", card["detokenizer"]],
        ["packing", f"{card['packing']}, remainder {card['remainder']}"],
        ["EOS after documents", "yes" if card["insert_eos"] else "no"],
        ["rows wrapped in BOS ... EOS", "yes" if card["wrap"] else "no"],
        ["vocabulary", f"{card['num_token_kinds']:,} tokens and the mask"],
        ["fingerprint", card["fingerprint"]],
    ]
    return [[str(cell) for cell in row] for row in rows]


def _list() -> None:
    from bellmask.data.corpora import CORPORA, InWheel
    from bellmask.utils.console import print_table

    rows = []
    for name, corpus in CORPORA.items():
        in_wheel = any(isinstance(split, InWheel) for split in corpus.splits.values())
        where = "package index" if in_wheel else "hub" if corpus.splits else "--from"
        rows.append([name, where, corpus.detokenizer, corpus.licence])
    print_table("named corpora", ["name", "comes from", "detokeniser", "licence"], rows)
    for name, corpus in CORPORA.items():
        if corpus.note:
            print(f"{name}: {corpus.note}")


def _show(args: list[str]) -> None:
    options, own = parse_data(args, "bellmask data show")
    split = own.get("--split", "train")
    if split not in ("train", "valid"):
        raise UserError(f"--split must be train or valid, not {split!r}")
    require_text(options, split)

    from bellmask.data.blocks import read_card
    from bellmask.data.prepare import locate, make_tokenizer, prepare
    from bellmask.utils.console import preparing_bar, visible_lines

    tokenizer = make_tokenizer(options)
    with preparing_bar() as on_progress:
        blocks = prepare(options, tokenizer, split, on_progress)
    folder, _, _ = locate(options, tokenizer, split)
    print_card(read_card(folder), f"{options.train}, {split}")
    for number in (0, len(blocks) // 2, len(blocks) - 1):
        text = tokenizer.decode(blocks.rows(slice(number, number + 1))[0].numpy())
        print(f"\nblock {number}:\n{visible_lines(text)}")


def run(args: Sequence[str]) -> int:
    """List or show."""
    if not args or any(arg in ("-h", "--help") for arg in args):
        print(HELP)
        return 0
    action, *rest = args
    look_up("data action", action, {"list": 0, "show": 0})
    if action == "list":
        if rest:
            raise UserError(f"data list takes no arguments, got {' '.join(rest)}")
        _list()
    else:
        _show(rest)
    return 0
