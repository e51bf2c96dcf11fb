"""`doctor`: checks this machine. It does not import torch, which may be what is broken."""

from typing import Annotated

from narrowgauge.trainer.laboratory.arguments import Console, Form, Source


def doctor(
    *,
    json: Annotated[bool, "print a JSON list of {item, status, found, fix}"] = False,
    data: Annotated[Source | None, "also check this data (as for train --data)"] = None,
    tokenizer: Annotated[str | None, Form("T"), "also check this tokenizer: bytes, bpe-N or a file"] = None,
    console: Console,
) -> int:
    """Check this machine and say how to fix what is missing (then exit code 1)."""
    from narrowgauge.trainer.cluster.doctor.doctor import as_json, examine, print_items

    verdicts = examine(data, tokenizer)
    if json:
        print(as_json(verdicts))
    else:
        print_items(verdicts, console)
    return int(any(verdict.status == "MISS" for verdict in verdicts.values()))
