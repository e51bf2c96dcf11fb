"""The way to the hub, through servers of this machine that behave as proxies and mirrors do."""

import base64
import contextlib
import gc
import os
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from narrowgauge.trainer.cluster.doctor.doctor import check
from narrowgauge.trainer.cluster.doctor.network import ask_hub
from support.fault_jobs import free_port
from support.healthy import CPU_ONLY

SECRET = "s3cr/t@w:rd"
UNREADABLE = (f"me:{SECRET}@host:port", f"me:{SECRET}@", "")
NO_ADDRESS = ("http://mirror:port", "https://[::1", "https://a..b", "ftp://mirror", "https://")
# Before Python 3.11.4 http.client leaves the socket of a refused tunnel to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@pytest.fixture(autouse=True)
def _no_garbage_for_other_tests():
    yield
    gc.collect()


@contextlib.contextmanager
def server(status, date=None):
    """A server that answers everything with one status; gives its address and the requests that came."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            requests.append((self.command, self.path, self.headers.get("Proxy-Authorization")))
            self.send_response_only(status)
            if date:
                self.send_header("Date", date)
            self.end_headers()

        do_CONNECT = do_HEAD = do_GET = answer

        def log_message(self, *words):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{listening.server_port}", requests
        finally:
            listening.shutdown()
            thread.join()


@pytest.fixture
def ask(monkeypatch):
    """Asks the hub where only these variables name proxies, mirrors and wishes; (its answer, the verdict)."""

    def with_variables(variables, **options):
        for name in list(os.environ):
            if name.lower().endswith("_proxy") or name.startswith(("HF_", "TRANSFORMERS_")):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        hub = ask_hub(**options)
        return hub, check(replace(CPU_ONLY, hub=hub))["network"]

    return with_variables


REFUSALS = {
    503: "the proxy finds no way on",
    407: "give user and password",
    403: "administrator",
    404: "correct",
}


@pytest.mark.parametrize("status", REFUSALS)
def test_a_proxy_that_refuses_is_told_apart_from_no_network(ask, status):
    with server(status) as (address, requests):
        _, item = ask({"HTTPS_PROXY": f"http://me:{SECRET}@{address}"})
    assert [request[:2] for request in requests] == [("CONNECT", "huggingface.co:443")]
    assert base64.b64decode(requests[0][2].removeprefix("Basic ")).decode() == f"me:{SECRET}"
    assert item.status == "WARN"
    refused = "the proxy http://{} is reached, and refuses the way to {} with HTTP {}"
    assert item.found.startswith(refused.format(address, "huggingface.co", status))
    assert REFUSALS[status] in f"{item.found} {item.fix}"
    if status < 407:
        return
    with server(status) as (address, requests):  # without a tunnel
        _, item = ask({"http_proxy": address, "HF_ENDPOINT": "http://mirror.test"})
    assert item.found.startswith(refused.format(address, "mirror.test", status))
    assert requests == [("HEAD", "http://mirror.test:80/", None)]


@pytest.mark.parametrize(
    ("variable", "address", "words"),
    [
        ("HTTPS_PROXY", f"http://me:{SECRET}@NOBODY", "(connection refused): it was never asked for"),
        *(("HTTPS_PROXY", f"http://{x}", "http://HOST:PORT): it was never asked for") for x in UNREADABLE),
        *(("HF_ENDPOINT", x, "HF_ENDPOINT is invalid") for x in NO_ADDRESS),
    ],
)
def test_an_address_that_leads_nowhere(ask, variable, address, words):
    hub, item = ask({variable: address.replace("NOBODY", f"127.0.0.1:{free_port()}")})
    assert item.status == "WARN"
    assert words in item.found
    assert "s3cr" not in str(hub)


def test_a_mirror_that_answers_and_its_clock(ask):
    with server(200, date="Wed, 01 Jan 2020 00:00:00 GMT") as (address, requests):
        variables = {"HF_ENDPOINT": f"http://{address}", "NO_PROXY": "127.0.0.1", "ALL_PROXY": "http://x:1"}
        hub, item = ask(variables)
    assert requests == [("HEAD", "/", None)]
    assert item == ("OK", "127.0.0.1 answers", "")
    clock = check(replace(CPU_ONLY, hub=hub))["clock"]
    assert (clock.status, "ahead of the hub's" in clock.found) == ("WARN", True)
    with server(500) as (address, _):
        _, item = ask({"HF_ENDPOINT": f"http://{address}"})
    assert (item.status, item.found) == ("WARN", "127.0.0.1 answers HTTP 500")
    _, item = ask({"HF_ENDPOINT": "https://hub.invalid"}, seconds=1)  # a name that no one has
    assert (item.status, "and no proxy is set" in item.found) == ("WARN", True)


def test_offline_is_a_wish_and_nothing_is_asked(ask):
    with server(503) as (address, requests):
        _, item = ask({"TRANSFORMERS_OFFLINE": "1", "HTTPS_PROXY": f"http://{address}"})
    assert (requests, item.status, item.found[:12]) == ([], "OK", "offline mode")
