"""Data sets of the Hugging Face hub, streamed: `hf:NAME[:CONFIG[:SPLIT]]`.

After a network failure the download resumes at the row where it failed, each time after a longer pause. After
too many failures, the error lists what was tried and how to manage without the hub. In offline mode
(HF_HUB_OFFLINE=1) the copy in the library's cache is read instead.
"""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from narrowgauge.data.sources.parquet import Rows
from narrowgauge.data.sources.records import NAME_KEY, Chunk, Source, package
from narrowgauge.errors import UserError, unknown

PREFIX = "hf:"
_ROWS = 256
_PAUSES = (1.0, 4.0, 16.0)  # seconds before each new attempt; the library itself retries within an attempt

# (rows to skip) -> the rows after them
Opener = Callable[[int], Iterator[dict[str, Any]]]


def open_hub(source: str, key: str) -> Source:
    """Open the data set that `source` names; a `UserError` if the name is malformed."""
    name, config, split = _parts(source)

    def rows(skip: int) -> Iterator[dict[str, Any]]:
        return _open(name, config, split, skip)

    return Source(source, (), lambda _: _chunks(source, retried(rows, name), key), identity=source)


def _parts(source: str) -> tuple[str, str | None, str]:
    name, _, rest = source.removeprefix(PREFIX).partition(":")
    config, _, split = rest.partition(":")
    if not name:
        raise UserError(
            f"{source!r} does not name a data set; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT"
        )
    return name, config or None, split or "train"


def retried(
    rows: Opener,
    name: str,
    pauses: tuple[float, ...] = _PAUSES,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[dict[str, Any]]:
    """All rows, in order and once each, across network failures.

    Args:
        rows: Opens the data set after a number of rows.
        name: Name of the data set, for the error.
        pauses: Seconds before each new attempt; every row that arrives resets the count of attempts.
        sleep: Waits; replaced in tests.

    Raises:
        UserError: the failure is permanent, or the attempts are used up.
    """
    done, failures = 0, 0
    while True:
        try:
            for row in rows(done):
                yield row
                done, failures = done + 1, 0
            return
        except UserError:
            raise
        except Exception as error:  # each of the libraries below has its exception types
            if _offline() or not _is_temporary(error) or failures == len(pauses):
                raise _failed(name, error, failures + 1, done) from error
            sleep(pauses[failures])
            failures += 1


def _is_temporary(error: BaseException) -> bool:
    """Whether another attempt can help: a missing data set stays missing, offline mode stays on."""
    names = {type_.__name__ for type_ in type(error).__mro__}
    lasting = {"DatasetNotFoundError", "OfflineModeIsEnabled", "GatedRepoError", "RepositoryNotFoundError"}
    wire = {"ConnectionError", "TimeoutError", "HTTPError", "HfHubHTTPError", "TransportError", "ClientError"}
    return not names & lasting and (isinstance(error, OSError) or bool(names & wire))


def _failed(name: str, error: Exception, attempts: int, rows: int) -> UserError:
    root: BaseException = error  # the library's error names what failed, its root cause why
    while cause := root.__cause__ or root.__context__:
        root = cause
    reasons = dict.fromkeys(f"{type(e).__name__}: {e}" for e in (error, root))
    reason = " ".join(" from ".join(reasons).split())[:400]
    times = f"in {attempts} attempts" if attempts > 1 else "at once"
    return UserError(
        f"data set {name!r} failed {times}, after {rows} rows ({reason}); tried {_network_settings()}; "
        "fix these, or fetch its .parquet or .jsonl files on a machine that reaches them, copy the folder "
        "here and prepare the folder"
    )


def _network_settings() -> str:
    """The proxy, mirror and offline mode of the environment, without passwords."""
    variables = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
    proxy = next((f"{v}={_without_password(os.environ[v])}" for v in variables if os.environ.get(v)), None)
    offline = [f"{v}={os.environ[v]}" for v in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(v)]
    mirror = os.environ.get("HF_ENDPOINT")
    return ", ".join(
        [
            f"the proxy {proxy}" if proxy else "no proxy (HTTPS_PROXY is not set)",
            f"the mirror HF_ENDPOINT={_without_password(mirror)}"
            if mirror
            else "no mirror (HF_ENDPOINT is not set)",
            f"offline mode ({' '.join(offline)})" if _offline() else "not offline mode (HF_HUB_OFFLINE=1)",
        ]
    )


def _without_password(address: str) -> str:
    scheme, mark, rest = address.rpartition("://")
    return scheme + mark + rest.rpartition("@")[2]  # a password may contain any character but the last @


def _offline() -> bool:
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def _open(name: str, config: str | None, split: str, skip: int) -> Iterator[dict[str, Any]]:
    datasets = package("datasets", f"data set {name!r}")
    rows = datasets.load_dataset(name, config, split=split, streaming=not _offline())
    return iter(rows.skip(skip) if skip else rows)


def _chunks(source: str, rows: Iterator[dict[str, Any]], key: str) -> Iterator[Chunk]:
    values, first = list[Any](), 0
    for row in rows:
        if key not in row:
            raise UserError(f"{source}: {unknown('column', key, row)}; {NAME_KEY}")
        values.append(row[key])
        if len(values) == _ROWS:
            yield Rows(source, values, first, 0)
            values, first = [], first + _ROWS
    if values:
        yield Rows(source, values, first, 0)
