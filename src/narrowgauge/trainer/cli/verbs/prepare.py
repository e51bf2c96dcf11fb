"""`prepare`: converts documents to token files."""

from typing import Annotated

from narrowgauge.system.errors import unknown
from narrowgauge.trainer import data  # each name is imported when it is used
from narrowgauge.trainer.laboratory.arguments import Console, Folder, Form

OWN = "narrowgauge"  # the layout with a manifest


def prepare(
    source: Annotated[str, Form("SOURCE", is_positional=True)],
    *,
    out: Annotated[Folder, "the folder of the corpus"],
    tokenizer: Annotated[str | None, Form("T")] = None,
    workers: Annotated[int | None, Form("N")] = None,
    text_key: Annotated[str, Form("KEY"), "key or column of the text"] = "text",
    val_fraction: Annotated[float, Form("F"), "share held out"] = 0.1,
    layout: Annotated[str, Form("L")] = OWN,
    name: Annotated[str | None, Form("NAME")] = None,
    dedup: Annotated[bool, "leave out repeated documents"] = False,
    tolerant: Annotated[float | None, Form("SHARE", alone=0.01)] = None,
    console: Console,
) -> None:
    """Turn documents into token files.

    narrowgauge prepare my-texts/ --out data/mine --tokenizer bpe-4096

    Args:
        source: stdlib, a directory, a glob, .txt, .jsonl, .parquet, a Wikipedia pages-articles .xml (all but
            .parquet also in .gz, .bz2, .zst), or hf:NAME[:CONFIG[:SPLIT]].
        tokenizer: Bytes, bpe-N (learned from the text) or a tokenizer file (bpe-4096).
        workers: Processes that read and encode (all cores, if there is enough text).
        layout: Layout of the token files: narrowgauge (the only one with a manifest), llmc, megatron.
        name: llmc: prefix of the file names (text); megatron: one .bin and .idx with all documents, held-out
            ones last, such as wikipedia_text_document (without it, a pair for each part).
        tolerant: Skip up to this share of records that are not text (0.01); without it, the first is an
            error.
    """
    from narrowgauge.trainer.runs.monitor.progress import Display

    if layout not in (layouts := (OWN, *data.TOKEN_LAYOUTS)):
        raise unknown("layout", layout, layouts)
    data.check_name(name, layout)
    chosen = data.Options(val_fraction, dedup, tolerant, text_key)
    with Display(console, 1, 1) as display:
        own = out if layout == OWN else None
        corpus = data.prepare(source, tokenizer, own, display.stage, options=chosen, workers=workers)
        if layout != OWN:
            data.export_tokens(data.open_data(str(corpus.directory)), layout, out, name)
    facts = corpus.manifest
    lines = [
        f"train  {facts.train_documents:>12,} documents  {facts.train_tokens:>15,} tokens",
        f"val    {facts.val_documents:>12,} documents  {facts.val_tokens:>15,} tokens",
    ]
    if facts.duplicates:
        lines.append(f"left out {facts.duplicates:,} duplicates")
    if facts.rejected:
        lines.append(f"set aside {facts.rejected:,} records: {corpus.directory / 'rejected.jsonl'}")
    lines.append(f"train on it: narrowgauge train --data {out}")
    display.log("\n".join(lines))
