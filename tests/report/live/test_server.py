"""The server of live pages: which requests it answers, and with what."""

import http.client
import socket
import threading

import pytest

from narrowgauge.errors import UserError
from narrowgauge.report.live.server import Page, PageServer


@pytest.fixture
def server():
    made = []

    def html():
        made.append(1)
        return "<!doctype html><title>here</title>"

    pages = {"": Page("1", html), "save": Page("2", html, "mine.html")}
    with PageServer(pages.get) as server:
        server.made = made
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path=None, method="GET", **headers):
    """(status, headers, text) of a request; `path` stands as it is on the wire."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, f"/{server.token}/" if path is None else path, headers=names)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, text


def test_it_listens_on_the_loopback_address_alone(server):
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):  # a server of all addresses would answer here
        socket.create_connection(("127.0.0.2", server.server_port), timeout=5)


def test_the_token_opens_the_page(server):
    status, headers, text = ask(server)
    assert (status, text) == (200, "<!doctype html><title>here</title>")
    assert server.url == f"http://127.0.0.1:{server.server_port}/{server.token}/"
    assert len(server.token) >= 32
    assert headers["Cache-Control"] == "no-store"
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert headers["Referrer-Policy"] == "no-referrer"


FORBIDDEN = "the address lacks its token: open the one that `narrowgauge watch` printed\n"
HOST = "the request names another host"


@pytest.mark.parametrize(
    ("path", "host", "status", "words"),
    [
        *(
            (path, None, 403, FORBIDDEN)
            for path in ("/", "/wrong/", "/{}x/", "/%2e%2e/{}/", "/wrong/save", "*")
        ),
        ("/{}", None, 404, "page not found"),  # links depend on the slash
        *(
            (f"/{{}}/{rest}", None, 404, "page not found")
            for rest in ("../../etc/passwd", "save/", "other", "%00", "/")
        ),
        *(
            ("/{}/", host, 403, HOST)
            for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example")
        ),
        *(("/{}/", host, 403, HOST) for host in ("[::1]:80", "")),
    ],
)
def test_nothing_is_told_to_who_lacks_the_address(server, path, host, status, words):
    """No token, another page, or a name that another site may have pointed here."""
    headers = {} if host is None else {"Host": host}
    found, _, text = ask(server, path.format(server.token), **headers)
    assert found == status
    assert text.startswith(words) or (words is HOST and words in text)
    assert not server.made


def test_a_tunnel_may_end_at_another_port_and_a_query_is_ignored(server):
    for host in ("localhost", "localhost:9999", "127.0.0.1:1"):
        assert ask(server, Host=host)[0] == 200
    assert ask(server, f"/{server.token}/?/../save")[0] == 200


def test_it_answers_get_alone(server):
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, method=method)[::2] == (405, "this server answers GET alone\n")
    assert ask(server, method="HEAD")[::2] == (200, "")


def test_a_reader_who_has_the_page_gets_no_second_copy(server):
    tag = ask(server)[1]["ETag"]
    assert ask(server, If_None_Match=tag)[::2] == (304, "")
    assert len(server.made) == 1
    assert ask(server, If_None_Match='"0"')[0] == 200


def test_the_page_to_be_kept_has_a_name(server):
    headers = ask(server, f"/{server.token}/save")[1]
    assert headers["Content-Disposition"] == 'attachment; filename="mine.html"'


def test_a_port_that_cannot_be_used_is_refused_and_tokens_differ(server):
    for port in (70_000, -1):
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 cannot be used"):
            PageServer({}.get, port)
    with pytest.raises(UserError, match="take another --port, or none for a free one"):
        PageServer({}.get, server.server_port)
    with PageServer({}.get) as other:
        assert other.token != server.token
