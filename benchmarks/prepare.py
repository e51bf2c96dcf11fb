"""What preparing costs: text to tokens and Wikipedia to tokens against the usual route, and the memory.

    python benchmarks/prepare.py --tokenizer FILE [--text FILE ...] [--dump FILE ...] [--rounds 3]
                                 [--workers 2] [--megabytes 60] [--memory 50,100,200] [--out FILE]

- *Text*: one JSON object a line (made of --text, a .txt or a .tar.* of them) through `prepare`, against a
  plain loop over the same documents with the `encode` of Hugging Face's tokenizers, ids in one array.
- *Wikipedia*: a dump (made by repeating the articles of --dump, so .xml.bz2) through `prepare`, against one
  process that reads the same file with ElementTree, cleans with mwparserfromhell and encodes as above.

Both routes run in turn, round by round, each in a process of its own whose start is not counted (that of our
workers is); a round gives one ratio, and the median is printed with the range. *Memory* is the peak over all
processes of a route, of what each holds alone plus its share of what it holds with others (PSS), for dumps of
growing size.
"""

import argparse
import bz2
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from narrowgauge.trainer.data import load_tokenizer, prepare

PIECE = 8000  # characters of a document of the text


def texts_of(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        if path.suffix == ".txt":
            yield path.read_text(encoding="utf-8", errors="replace")
            continue
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and (file := archive.extractfile(member)):
                    yield file.read().decode("utf-8", errors="replace").replace("\0", "")


def make_lines(paths: list[Path], size: int, target: Path) -> int:
    """JSON lines of about `size` bytes of text; returns the bytes written of text."""
    done = 0
    with target.open("w", encoding="utf-8") as file:
        for text in texts_of(paths):
            for start in range(0, len(text), PIECE):
                piece = text[start : start + PIECE]
                file.write(json.dumps({"text": piece}) + "\n")
                done += len(piece.encode())
                if done >= size:
                    return done
    return done


def make_dump(paths: list[Path], size: int, target: Path) -> int:
    """A dump of about `size` bytes that repeats the pages of others; returns the bytes of its XML."""
    pages = b""
    for path in paths:
        raw = bz2.decompress(path.read_bytes())
        raw = raw.decode("utf-16").encode() if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else raw
        pages += b"".join(page + b"</page>\n" for page in raw[raw.index(b"<page>") :].split(b"</page>")[:-1])
    head, times = b'<mediawiki xml:lang="en">\n', max(size // len(pages), 1)
    with bz2.open(target, "wb", compresslevel=9) as file:
        file.write(head)
        for _ in range(times):
            file.write(pages)
        file.write(b"</mediawiki>\n")
    return len(head) + times * len(pages)


def usual_text(source: Path, tokenizer: Path, out: Path) -> int:
    """The usual route: a plain loop over documents."""
    library = load_tokenizer(tokenizer).library
    ids: list[np.ndarray[Any, Any]] = []
    with source.open(encoding="utf-8") as file:
        for line in file:
            ids.append(np.array(library.encode(json.loads(line)["text"]).ids, dtype=np.uint16))
    np.concatenate(ids).tofile(out)
    return sum(map(len, ids))


def usual_wiki(source: Path, tokenizer: Path, out: Path) -> int:
    """The usual route: one process, mwparserfromhell, the same tokenizer."""
    import mwparserfromhell

    library = load_tokenizer(tokenizer).library
    ids: list[np.ndarray[Any, Any]] = []
    with bz2.open(source) as file:
        for _, element in ElementTree.iterparse(file):
            if element.tag == "page":
                if element.findtext("ns") == "0" and element.find("redirect") is None:
                    text = element.findtext("revision/text") or ""
                    prose = mwparserfromhell.parse(text).strip_code()
                    ids.append(np.array(library.encode(prose).ids, dtype=np.uint16))
                element.clear()
    np.concatenate(ids).tofile(out)
    return sum(map(len, ids))


def ours(source: Path, tokenizer: Path, out: Path, workers: int) -> int:
    manifest = prepare(str(source), str(tokenizer), out, workers=workers).manifest
    return manifest.train_tokens + manifest.val_tokens


def pss_of_tree(root: int) -> int:
    """Kilobytes held by the process and all below it, what is shared counted once."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    total, todo = 0, [root]
    while todo:
        process = todo.pop()
        todo += children.get(process, [])
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


def in_a_process(route: str, source: Path, tokenizer: Path, workers: int, watch: bool) -> dict[str, float]:
    """Run a route in a process of its own: seconds of the work, tokens, and the peak of memory if watched."""
    command = [sys.executable, __file__, "--route", route, "--source", str(source)]
    command += ["--tokenizer", str(tokenizer), "--workers", str(workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak, stop = [0], threading.Event()

        def look() -> None:
            while not stop.wait(0.2):
                peak[0] = max(peak[0], pss_of_tree(process.pid))

        watcher = threading.Thread(target=look)
        if watch:
            watcher.start()
        assert process.stdout
        said = process.stdout.read()
        stop.set()
    if process.returncode:
        sys.exit(f"the route {route} failed")
    return {**json.loads(said), "peak_mb": peak[0] / 1024}


def one_route(options: argparse.Namespace) -> None:
    routes: dict[str, Callable[[Path], int]] = {
        "usual-text": lambda out: usual_text(options.source, options.tokenizer, out / "ids"),
        "usual-wiki": lambda out: usual_wiki(options.source, options.tokenizer, out / "ids"),
        "ours": lambda out: ours(options.source, options.tokenizer, out / "corpus", options.workers),
    }
    with tempfile.TemporaryDirectory(dir=options.source.parent) as out:
        start = time.perf_counter()
        tokens = routes[options.route](Path(out))
        print(json.dumps({"seconds": time.perf_counter() - start, "tokens": tokens}))


def compare(name: str, usual: str, source: Path, size: int, options: argparse.Namespace) -> dict[str, Any]:
    ratios, best = [], {usual: 1e9, "ours": 1e9}
    for _ in range(options.rounds):
        round_ = {
            route: in_a_process(route, source, options.tokenizer, options.workers, False)["seconds"]
            for route in (usual, "ours")
        }
        ratios.append(round_[usual] / round_["ours"])
        best = {route: min(best[route], seconds) for route, seconds in round_.items()}
    speeds = {route: size / 1e6 / seconds for route, seconds in best.items()}
    median = statistics.median(ratios)
    print(
        f"{name:10s} {median:5.2f} x the usual route  [{min(ratios):.2f}, {max(ratios):.2f}]  "
        f"{speeds['ours']:.2f} against {speeds[usual]:.2f} MB/s of {size / 1e6:.0f} MB, "
        f"{options.workers} workers"
    )
    return {"ratio": median, "low": min(ratios), "high": max(ratios), "mb_per_s": speeds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--dump", type=Path, nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--memory", default="", help="sizes of dumps in megabytes of XML, as 50,100,200")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--route", help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.route:
        one_route(options)
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        lines, dump = Path(folder, "text.jsonl"), Path(folder, "dump.xml.bz2")
        if options.text:
            size = make_lines(options.text, options.megabytes * 10**6, lines)
            found["text"] = compare("text", "usual-text", lines, size, options)
        if options.dump:
            size = make_dump(options.dump, options.megabytes * 10**6, dump)
            found["wikipedia"] = compare("wikipedia", "usual-wiki", dump, size, options)
        for megabytes in filter(None, options.memory.split(",")):
            size = make_dump(options.dump, int(megabytes) * 10**6, dump)
            peak = in_a_process("ours", dump, options.tokenizer, options.workers, True)["peak_mb"]
            print(f"memory     {peak:5.0f} MB at the peak for {size / 1e6:.0f} MB of XML")
            found.setdefault("memory", []).append({"xml_mb": size / 1e6, "peak_mb": peak})
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
