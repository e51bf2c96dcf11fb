"""`prepare`: documents in, token files out."""

import argparse
from pathlib import Path

from rich.console import Console

from narrowgauge.data import (
    DEFAULT_TOKENIZER,
    TOKEN_LAYOUTS,
    Options,
    check_name,
    export_tokens,
    open_data,
    prepare,
)
from narrowgauge.errors import unknown
from narrowgauge.runs.monitor.progress import Display

OWN = "narrowgauge"
_SOURCES = (
    "stdlib, a directory, a glob, .txt, .jsonl, .parquet, a Wikipedia pages-articles .xml (all but .parquet "
    "also in .gz, .bz2, .zst), or hf:NAME[:CONFIG[:SPLIT]]"
)


def add_options(p: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    p.add_argument("source", metavar="SOURCE", help=_SOURCES)
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the corpus goes")
    p.add_argument(
        "--tokenizer",
        metavar="T",
        help=f"bytes, bpe-N (learnt from the text) or a tokenizer's file ({DEFAULT_TOKENIZER})",
    )
    p.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that read and encode (all cores, where there is enough to read)",
    )
    p.add_argument("--text-key", default="text", metavar="KEY", help="key or column of the text (text)")
    p.add_argument("--val-fraction", type=float, default=0.1, metavar="F", help="share held out (0.1)")
    p.add_argument(
        "--layout",
        default=OWN,
        metavar="L",
        help=f"of the token files: {', '.join((OWN, *TOKEN_LAYOUTS))} ({OWN}, the only one with a manifest)",
    )
    p.add_argument(
        "--name",
        metavar="NAME",
        help="llmc: how the files' names begin (text); megatron: of one .bin and .idx with all documents, "
        "held-out ones last, such as wikipedia_text_document (without it: a pair for each part)",
    )
    p.add_argument("--dedup", action="store_true", help="leave out documents whose text was there before")
    p.add_argument(
        "--tolerant",
        type=float,
        nargs="?",
        const=0.01,
        metavar="SHARE",
        help="set aside records that are no text, up to this share (0.01); without it the first is an error",
    )


def run(options: argparse.Namespace) -> None:
    """Prepare the source and print what was written."""
    if options.layout not in (OWN, *TOKEN_LAYOUTS):
        raise unknown("layout", options.layout, (OWN, *TOKEN_LAYOUTS))
    check_name(options.name, options.layout)
    console = Console()
    chosen = Options(options.val_fraction, options.dedup, options.tolerant, options.text_key)
    with Display(console, 1, 1) as display:
        corpus = prepare(
            options.source,
            options.tokenizer,
            options.out if options.layout == OWN else None,
            display.stage,
            options=chosen,
            workers=options.workers,
        )
        if options.layout != OWN:
            export_tokens(open_data(str(corpus.directory)), options.layout, options.out, options.name)
    facts = corpus.manifest
    lines = [
        f"train  {facts.train_documents:>12,} documents  {facts.train_tokens:>15,} tokens",
        f"val    {facts.val_documents:>12,} documents  {facts.val_tokens:>15,} tokens",
    ]
    if facts.duplicates:
        lines.append(f"left out {facts.duplicates:,} duplicates")
    if facts.rejected:
        lines.append(f"set aside {facts.rejected:,} records: {corpus.directory / 'rejected.jsonl'}")
    lines.append(f"train on it: narrowgauge train --data {options.out}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
