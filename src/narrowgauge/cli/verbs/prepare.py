"""`prepare`: converts documents to token files."""

import argparse

from rich.console import Console

from narrowgauge.cli.options import OWN
from narrowgauge.data import TOKEN_LAYOUTS, Options, check_name, export_tokens, open_data, prepare
from narrowgauge.errors import unknown
from narrowgauge.runs.monitor.progress import Display


def run(options: argparse.Namespace) -> None:
    """Prepare the source and print what was written."""
    if options.layout not in (OWN, *TOKEN_LAYOUTS):
        raise unknown("layout", options.layout, (OWN, *TOKEN_LAYOUTS))
    check_name(options.name, options.layout)
    chosen = Options(options.val_fraction, options.dedup, options.tolerant, options.text_key)
    with Display(Console(), 1, 1) as display:
        out = options.out if options.layout == OWN else None
        corpus = prepare(
            options.source, options.tokenizer, out, display.stage, options=chosen, workers=options.workers
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
    display.log("\n".join(lines))
