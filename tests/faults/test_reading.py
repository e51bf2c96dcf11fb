"""F4 to F6. Data on their way: killed, cut off or refused, they come to the same bytes or to a clear end."""

import http.server
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import threading
import time
import urllib.request
from contextlib import contextmanager

import pytest

from narrowgauge.data.sources.hub import retried
from narrowgauge.errors import UserError
from support.fault_jobs import alive, descendants
from support.fault_runs import contents
from support.fault_table import case


@pytest.fixture
def lines(tmp_path):
    """Enough JSON lines for two workers and some seconds."""
    rng = random.Random(0)
    words = ["narrow", "gauge", "caf\u00e9", "<|endoftext|>", "steam\n\n"]
    with (tmp_path / "lines.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(30_000):
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=40))}) + "\n")
    return tmp_path / "lines.jsonl"


@case("F4")
@pytest.mark.parametrize("workers", [1, 2])
def test_prepare_killed_at_random_moments_makes_the_same_bytes_at_last(narrowgauge, lines, tmp_path, workers):
    seed = secrets.randbits(32)
    print(f"delays from random.Random({seed})")
    rng, words = random.Random(seed), ["prepare", lines, "--tokenizer", "bpe-300", "--workers", workers]
    start = time.monotonic()
    assert narrowgauge(*words, "--out", tmp_path / "undisturbed").code == 0
    longest, out = time.monotonic() - start, tmp_path / "place" / "out"
    expected = dict(contents(tmp_path / "undisturbed"))
    for _ in range(6):
        process = narrowgauge.start(*words, "--out", out)
        time.sleep(rng.uniform(0, longest))
        process.send(signal.SIGKILL)
        process.wait()
        if out.exists():  # whole or not at all
            assert dict(contents(out)) == expected
            shutil.rmtree(out)
    for left in out.parent.rglob("*"):  # after an hour it is taken for abandoned
        os.utime(left, (time.time() - 4000,) * 2)
    assert narrowgauge(*words, "--out", out).code == 0
    assert dict(contents(out)) == expected
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@contextmanager
def served(answer):
    """The address of a server on this machine; `answer(path)` is the body, or None for 503."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = answer(self.path)
            self.send_response(503 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        do_HEAD = do_POST = do_GET

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@case("F5")
@pytest.mark.parametrize("failures", [1, 3, 100])
def test_remote_reads_that_fail(failures):
    """One row a request; the fifth row fails so often. Pauses grow, the order stays, and it ends."""
    left, pauses = [failures], []

    def answer(path):
        row = int(path.rpartition("/")[2])
        if row == 5 and left[0]:
            left[0] -= 1
            return None
        return json.dumps({"text": f"row {row}"} if row < 20 else None).encode()

    def rows(skip):
        for row in itertools.count(skip):
            with urllib.request.urlopen(f"{address}/{row}") as reply:
                content = json.load(reply)
            if content is None:
                return
            yield content

    got = []
    with served(answer) as address:
        reading = retried(rows, "a/b", sleep=pauses.append)
        if failures < 100:
            got.extend(reading)
            assert [row["text"] for row in got] == [f"row {n}" for n in range(20)]
        else:
            with pytest.raises(UserError, match=r"failed in 4 attempts, after 5 rows"):
                got.extend(reading)
    assert len(pauses) == min(failures, 3)
    assert pauses == sorted(set(pauses)), "each pause is longer than the one before"


@case("F5")
def test_a_hub_that_is_down_is_told_in_a_sentence(narrowgauge, tmp_path):
    """The library has its own retries below ours: this takes about two minutes, of which all is waiting."""
    pytest.importorskip("datasets")
    with served(lambda path: None) as address:
        where = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        ended = narrowgauge.start("prepare", "hf:some/thing", "--out", tmp_path / "out", **where).wait(300)
    assert ended.code == 2
    assert "Traceback" not in ended.err
    last = ended.err.splitlines()[-1]
    assert last.startswith("narrowgauge: data set 'some/thing' failed in 4 attempts, after 0 rows")
    assert f"the mirror HF_ENDPOINT={address}" in last
    assert not (tmp_path / "out").exists()


@case("F6", tier="thorough")
def test_a_worker_that_is_killed_is_missed_and_the_same_line_goes_on(narrowgauge, lines, tmp_path):
    """Training reads through a thread; only prepare reads through processes."""
    words = ["prepare", lines, "--tokenizer", "bpe-300", "--workers", "2", "--out", tmp_path / "out"]
    process = narrowgauge.start(*words)
    process.until(lambda: len(workers_of(process.pid)) == 1)
    (worker,) = workers_of(process.pid)
    os.kill(worker, signal.SIGKILL)
    start = time.monotonic()
    ended = process.wait(60)
    assert time.monotonic() - start < 30
    assert ended.code == 2
    assert "one of 2 workers was killed" in ended.err
    assert not alive(worker)
    assert not (tmp_path / "out").exists()
    assert narrowgauge(*words).code == 0


def workers_of(pid):
    """The processes that the fork server of a process has started."""
    return [p for p in descendants(pid) if p not in descendants(pid, depth=1)]
