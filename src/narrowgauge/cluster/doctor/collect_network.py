"""Asks the Hugging Face hub for an answer, through the proxy that the environment names, and gives up soon.

The question is a HEAD of the hub's front page. The answer, whatever it is, proves the way; the words for
every way it can fail are in `doctor_facts.Hub`. Names are resolved by the system, which knows no time limit,
so the whole question is put in a thread that is left behind when it takes too long.

A proxy's user and password are used and never kept: `Hub.proxy` is built from scheme, host and port alone.
"""

import base64
import email.utils
import http.client
import os
import re
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from narrowgauge.cluster.doctor.facts import Hub

_HUB = "https://huggingface.co"
_STEPS = 3  # of which each may take its time: to the proxy, to the hub, to the answer
_YES = {"1", "true", "yes", "on"}


@dataclass(frozen=True, slots=True)
class _Proxy:
    """A proxy as the environment has it; `address` is what may be shown."""

    scheme: str
    host: str
    port: int
    headers: dict[str, str]

    @property
    def address(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"


def ask_hub(environment: Mapping[str, str] = os.environ, seconds: float = 4.0) -> Hub:
    """What comes of asking the hub; each step may take so many seconds."""
    named = environment.get("HF_ENDPOINT") or _HUB
    endpoint = urllib.parse.urlsplit(named if "://" in named else f"https://{named}")
    hub = Hub(host=endpoint.hostname or "huggingface.co", outcome="no answer")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environment.get(name, "").lower() in _YES:
            return replace(hub, outcome="offline")
    address = proxy_for(endpoint.scheme, hub.host, environment)
    try:
        proxy = _parse(address) if address else None
    except ValueError:
        detail = "its address cannot be read; write http://HOST:PORT"
        return replace(hub, outcome="proxy unreachable", proxy="in HTTPS_PROXY", detail=detail)
    if proxy:
        hub = replace(hub, proxy=proxy.address)
        if proxy.scheme != "http":
            return replace(hub, outcome="not asked", detail="only http:// proxies are tried here")
    whole = _STEPS * seconds
    late = replace(hub, detail=f"no answer in {whole:.0f} s")
    return _in_time(lambda: _ask(endpoint, proxy, hub, seconds), whole, late)


def proxy_for(scheme: str, host: str, environment: Mapping[str, str]) -> str:
    """The proxy that the environment names for a host, "" for none; small letters go before capitals."""
    named = {name.lower(): value for name, value in environment.items() if value}
    named |= {name: value for name, value in environment.items() if name.islower() and value}
    proxies = {
        key: value
        for key in ("http", "https", "all", "no")
        if (value := named.get(f"{key}_proxy", "").strip())
    }
    if urllib.request.proxy_bypass_environment(host, proxies):  # type: ignore[attr-defined]
        return ""
    return proxies.get(scheme) or proxies.get("all", "")


def _parse(address: str) -> _Proxy:
    """Take a proxy's address apart, whatever characters its password has.

    Errors: `ValueError`, whose words may hold the password and must not be shown.
    """
    scheme, separator, rest = address.partition("://")
    if not separator:
        scheme, rest = "http", address
    credentials, _, place = rest.rpartition("@")
    parts = urllib.parse.urlsplit(f"//{place}")
    if not parts.hostname or not re.fullmatch(r"[\w.:%-]+", parts.hostname):
        raise ValueError("no host")
    headers = {}
    if credentials:
        user = urllib.parse.unquote(credentials).encode()
        headers["Proxy-Authorization"] = "Basic " + base64.b64encode(user).decode()
    return _Proxy(scheme.lower(), parts.hostname, parts.port or (443 if scheme == "https" else 80), headers)


def _in_time(ask: Callable[[], Hub], seconds: float, late: Hub) -> Hub:
    """The answer, or `late` if there is none in time."""
    answers = list[Hub]()
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else late


def _ask(endpoint: urllib.parse.SplitResult, proxy: _Proxy | None, hub: Hub, seconds: float) -> Hub:
    """Reach the proxy if there is one, then the hub; say at which step it ended."""
    try:
        if proxy:
            try:
                socket.create_connection((proxy.host, proxy.port), timeout=seconds).close()
            except OSError as error:
                return replace(hub, outcome="proxy unreachable", detail=_words(error))
        return _answered(hub, *_head(endpoint, proxy, hub.host, seconds), plain=endpoint.scheme == "http")
    except ssl.SSLCertVerificationError as error:
        return replace(hub, outcome="certificate", detail=error.verify_message)
    except socket.gaierror as error:
        return replace(hub, outcome="no name", detail=_words(error))
    except (OSError, http.client.HTTPException) as error:
        if tunnel := re.match(r"Tunnel connection failed: (\d+)", str(error)):
            return replace(hub, outcome="proxy refused", status=int(tunnel[1]))
        return replace(hub, outcome="no network", detail=_words(error))


def _head(
    endpoint: urllib.parse.SplitResult, proxy: _Proxy | None, host: str, seconds: float
) -> tuple[int, http.client.HTTPMessage]:
    """(status, headers) of the hub's front page."""
    secure = endpoint.scheme == "https"
    port = endpoint.port or (443 if secure else 80)
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(proxy.host if proxy else host, proxy.port if proxy else port, timeout=seconds)
    target, headers = "/", {"User-Agent": "narrowgauge-doctor"}
    if proxy and secure:
        connection.set_tunnel(host, port, proxy.headers)
    elif proxy:
        target, headers = f"http://{host}:{port}/", headers | proxy.headers
    try:
        connection.request("HEAD", target, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers
    finally:
        connection.close()


def _answered(hub: Hub, status: int, headers: http.client.HTTPMessage, plain: bool) -> Hub:
    """The verdict on an answer; through a plain proxy, an error may be the proxy's as well as the hub's."""
    if status >= 500 or status == 407:
        by_proxy = hub.proxy and plain
        return replace(hub, outcome="proxy refused" if by_proxy else "refused", status=status)
    try:
        ahead = email.utils.parsedate_to_datetime(headers["Date"]).timestamp() - time.time()
    except (TypeError, ValueError):
        ahead = None
    return replace(hub, outcome="reached", status=status, ahead=ahead)


def _words(error: BaseException) -> str:
    """What the system calls an error; never more, for the rest may quote what was asked."""
    strerror = getattr(error, "strerror", None)
    return (strerror or str(error) or type(error).__name__).strip().rstrip(".").lower()
