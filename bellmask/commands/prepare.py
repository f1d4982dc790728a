"""``bellmask prepare``: text to shards, before training needs them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bellmask.utils.errors import UserError

HELP = """Turn a corpus into training blocks, once; training finds them in the cache.

usage: bellmask prepare NAME|PATH [--from PATH] [--split train|valid|all] [--data.OPTION VALUE ...]

NAME is a corpus from 'bellmask data list', or a preset; PATH a file or quoted glob of text, JSONL,
CSV or Parquet (also .gz, .xz, .zst); hub:owner/name[:config[:split]] a data set on the hub.
  --from PATH    read a named corpus from local files, by its rules, instead of fetching it
  --split WHICH  train, valid or all (default)
  --data.*       as for 'bellmask train' (see there): tokenizer, block-length, packing, wrap, ...

Stopped with Ctrl-C or killed, the same command goes on where it stopped.

examples:
  bellmask prepare wikitext2
  bellmask prepare lm1b --from 'lm1b/*.txt' --data.tokenizer bert-base-uncased
  bellmask prepare 'pages/*.jsonl.zst' --data.tokenizer bpe:8192 --data.block-length 512
"""


def run(args: Sequence[str]) -> int:
    """Prepare and say where the blocks are."""
    from bellmask.commands.data import parse_data, print_card, require_text

    if not args or any(arg in ("-h", "--help") for arg in args):
        print(HELP)
        return 0
    options, rest = parse_data(list(args), "bellmask prepare")
    split = rest.get("--split", "all")
    wanted = {"train": ["train"], "valid": ["valid"], "all": ["train", "valid"]}
    if split not in wanted:
        raise UserError(f"--split must be train, valid or all, not {split!r}")

    from bellmask.data.blocks import read_card
    from bellmask.data.corpora import has_split
    from bellmask.data.prepare import locate, make_tokenizer, prepare
    from bellmask.utils.console import preparing_bar

    tokenizer = make_tokenizer(options)
    for part in wanted[split]:
        has_text = has_split(options, part) or (part == "valid" and options.valid is not None)  # type: ignore[arg-type]
        if split == "all" and not has_text:
            continue
        require_text(options, part)
        try:
            with preparing_bar() as on_progress:
                prepare(options, tokenizer, part, on_progress)
        except KeyboardInterrupt:
            print("stopped; the same command goes on where it stopped", file=sys.stderr)
            return 130
        folder, _, _ = locate(options, tokenizer, part)
        print_card(read_card(folder), f"{options.train}, {part}")
        print(f"blocks: {folder}")
    return 0
