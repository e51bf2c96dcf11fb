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


@pytest.mark.parametrize("path", ["/", "/wrong/", "/{}x/", "/%2e%2e/{}/", "/wrong/save", "*"])
def test_without_the_token_nothing_is_told(server, path):
    status, _, text = ask(server, path.format(server.token))
    assert status == 403
    assert text == "the address lacks its token: open the one that `narrowgauge watch` printed\n"
    assert not server.made


@pytest.mark.parametrize("rest", ["../../etc/passwd", "save/", "other", "%00", "/", "?/../save"])
def test_no_other_address_leads_anywhere(server, rest):
    status, _, text = ask(server, f"/{server.token}/{rest}")
    if rest.startswith("?"):
        assert status == 200, "what follows the question mark is ignored"
    else:
        assert (status, text.partition(":")[0]) == (404, "page not found")


def test_the_page_needs_the_slash_that_its_links_depend_on(server):
    assert ask(server, f"/{server.token}")[0] == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::1]:80", ""]
)
def test_another_host_name_is_refused(server, host):
    status, _, text = ask(server, Host=host)
    assert status == 403
    assert "the request names another host" in text
    assert not server.made


@pytest.mark.parametrize("host", ["localhost", "localhost:9999", "127.0.0.1:1"])
def test_a_tunnel_may_end_at_another_port(server, host):
    assert ask(server, Host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_answers_get_alone(server, method):
    status, _, text = ask(server, method=method)
    assert (status, text) == (405, "this server answers GET alone\n")
    assert ask(server, method="HEAD")[::2] == (200, "")


def test_a_reader_who_has_the_page_gets_no_second_copy(server):
    tag = ask(server)[1]["ETag"]
    status, _, text = ask(server, If_None_Match=tag)
    assert (status, text) == (304, "")
    assert len(server.made) == 1
    assert ask(server, If_None_Match='"0"')[0] == 200


def test_the_page_to_be_kept_has_a_name(server):
    headers = ask(server, f"/{server.token}/save")[1]
    assert headers["Content-Disposition"] == 'attachment; filename="mine.html"'


def test_tokens_differ(server):
    with PageServer({}.get) as other:
        assert other.token != server.token


@pytest.mark.parametrize("port", [70_000, -1])
def test_an_impossible_port_is_refused(port):
    with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 cannot be used"):
        PageServer({}.get, port)


def test_a_taken_port_is_refused(server):
    with pytest.raises(UserError, match="take another --port, or none for a free one"):
        PageServer({}.get, server.server_port)
