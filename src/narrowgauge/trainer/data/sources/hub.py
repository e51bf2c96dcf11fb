"""Data sets of the Hugging Face hub: `hf:NAME[:CONFIG[:SPLIT]]`, by its library `datasets`.

The library downloads a data set into its cache (HF_HOME), resumes a download that was cut off, and reads the
cache in offline mode (HF_HUB_OFFLINE=1). It runs no code of a data set. If it fails for good, the error lists
what was tried and how to manage without the hub.
"""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.request import getproxies

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.trainer.data.sources.parquet import ROWS, rows
from narrowgauge.trainer.data.sources.records import NAME_KEY, Chunk, Source, package

PREFIX = "hf:"
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def open_hub(source: str, key: str) -> Source:
    """The data set that `source` names, its text in the column `key`; a `UserError` if it names none."""
    name, _, rest = source.removeprefix(PREFIX).partition(":")
    config, _, split = rest.partition(":")
    if not name:
        raise UserError(
            f"{source!r} does not name a data set; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT"
        )

    def chunks(_: object) -> Iterator[Chunk]:
        table = _load(name, config or None, split or "train")
        if key not in table.column_names:
            raise UserError(f"{source}: {unknown('column', key, table.column_names)}; {NAME_KEY}")
        table = table.select_columns([key])
        for first in range(0, len(table), ROWS):
            yield Chunk(0, partial(rows, source, table[first : first + ROWS][key], first))

    return Source(source, (), chunks, identity=source)


def _load(name: str, config: str | None, split: str) -> Any:
    datasets = package("datasets", f"data set {name!r}")
    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # each of the libraries below has its exception types
        root: BaseException = error  # the library's error names what failed, its root cause why
        while cause := root.__cause__ or root.__context__:
            root = cause
        reasons = dict.fromkeys(f"{type(e).__name__}: {e}" for e in (error, root))
        reason = " ".join(" from ".join(reasons).split())[:400]
        raise UserError(
            f"data set {name!r} cannot be read ({reason}); tried {_network_settings()}; fix these, or fetch "
            "its .parquet or .jsonl files on a machine that reaches them, copy the folder here and prepare "
            "the folder"
        ) from error


def _network_settings() -> str:
    """The proxy, mirror and offline mode of the environment, without passwords."""
    proxies, mirror = getproxies(), os.environ.get("HF_ENDPOINT")
    proxy = next((proxies[kind] for kind in ("https", "http", "all") if proxies.get(kind)), None)
    offline = next((f"{name}={os.environ[name]}" for name in _OFFLINE if os.environ.get(name)), "")
    return ", ".join(
        [
            f"the proxy {_without_password(proxy)}" if proxy else "no proxy (HTTPS_PROXY is not set)",
            f"the mirror {_without_password(mirror)}" if mirror else "no mirror (HF_ENDPOINT is not set)",
            f"offline mode ({offline})" if offline else "not offline mode (HF_HUB_OFFLINE=1)",
        ]
    )


def _without_password(address: str) -> str:
    scheme, mark, rest = address.rpartition("://")
    return scheme + mark + rest.rpartition("@")[2]  # a password may contain any character but the last @
