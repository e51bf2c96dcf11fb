"""Whether data can be downloaded: proxies, offline mode and the Hugging Face hub.

The request is a HEAD of the hub's front page; any response proves that the connection works. It has three
stages: reach the proxy, reach the hub, get the response. Each way in which one fails has its fix.
The system resolves names without a time limit, so the request runs in a thread that may be abandoned.
Behind a proxy, very different causes look like the same broken download. A proxy that answers the request for
a tunnel with 503 is working, and reports that *it* cannot reach the hub. A proxy that does not answer has a
wrong address. A name that does not resolve and no proxy set usually means that a proxy is required.

Only `hf:` sources need the hub; without one, an unreachable hub is only a warning. A proxy's user and
password are used but never shown: `_address` keeps scheme, host and port alone.
"""

import email.utils
import http.client
import os
import re
import socket
import ssl
import time
import urllib.request
from urllib.parse import SplitResult, urlsplit

from narrowgauge.system.errors import words_of
from narrowgauge.system.processes import in_time
from narrowgauge.trainer.cluster.doctor.facts import Facts, Hub, Verdict, miss, ok, warn

_HUB, _STAGES = "https://huggingface.co", 3
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_STAY_OFFLINE = "where none is wanted, set HF_HUB_OFFLINE=1"


def ask_hub(seconds: float = 4.0) -> Hub:
    """The outcome of a request to the hub, with a time limit for each stage."""
    if any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in _OFFLINE):
        return Hub("offline mode (HF_HUB_OFFLINE): hf: sources come from the hub's cache alone")
    server = _address(os.environ.get("HF_ENDPOINT") or _HUB, "https")
    if not server or server.scheme not in ("http", "https"):
        return Hub("HF_ENDPOINT is invalid", "write https://HOST, or unset it to use huggingface.co")
    host, proxies = server.hostname or "", urllib.request.getproxies_environment()
    bypass = urllib.request.proxy_bypass(host)
    address = "" if bypass else proxies.get(server.scheme) or proxies.get("all", "")
    proxy = _address(address, "http") if address else None
    if address and not proxy:
        return _never_asked("in HTTPS_PROXY", "its address cannot be read; write http://HOST:PORT", host)
    if proxy and proxy.scheme != "http":
        return Hub(f"not asked through the proxy {proxy.geturl()}: only http:// proxies are tried here")
    whole = _STAGES * seconds
    late = _no_way(host, proxy, f"no answer in {whole:.0f} s")
    return in_time(lambda: _ask(server, proxy, address, seconds), whole, late)


def _address(text: str, scheme: str) -> SplitResult | None:
    """The scheme, host and port of an address; None if it is invalid.

    Its user and password, which may contain any character, even "/" and "@", are left out.
    """
    scheme, rest = text.strip().split("://", 1) if "://" in text else (scheme, text)
    try:
        parts = urlsplit(f"{scheme.lower()}://{rest.rpartition('@')[2]}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        (parts.hostname or "").encode("idna")
    except ValueError:
        return None
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    return parts._replace(netloc=f"{host}:{port}", path="") if re.fullmatch(r"[\w.:%\[\]-]+", host) else None


def _ask(server: SplitResult, proxy: SplitResult | None, address: str, seconds: float) -> Hub:
    """Reach the proxy, if any, then the hub; report the stage at which it ended."""
    host = server.hostname or ""
    if proxy:
        try:
            socket.create_connection((proxy.hostname, proxy.port), timeout=seconds).close()
        except OSError as error:
            return _never_asked(proxy.geturl(), words_of(error).lower(), host)
    opener = urllib.request.OpenerDirector()  # does not follow redirects, and does not raise for a status
    for handler in (
        urllib.request.ProxyHandler({server.scheme: address} if proxy else {}),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
    ):
        opener.add_handler(handler)
    request = urllib.request.Request(f"{server.geturl()}/", method="HEAD")
    request.add_header("User-Agent", "narrowgauge-doctor")
    try:
        with opener.open(request, timeout=seconds) as answer:
            status, headers = answer.status, answer.headers
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)  # of a `URLError`
        return _failed(host, proxy, reason if isinstance(reason, Exception) else error)
    if status >= 500 or status == 407:  # without a tunnel, the error may be the proxy's or the hub's
        if proxy and server.scheme == "http":
            return _refused(proxy, host, status)
        fix = "try again later; if HF_ENDPOINT names a mirror, see that it is the right one"
        return Hub(f"{host} answers HTTP {status}", fix)
    try:
        ahead = email.utils.parsedate_to_datetime(headers["Date"]).timestamp() - time.time()
    except (TypeError, ValueError):
        ahead = None
    through = f" through the proxy {proxy.geturl()}" if proxy else ""
    return Hub(f"{host} answers{through}", ahead=ahead)


def _failed(host: str, proxy: SplitResult | None, error: Exception) -> Hub:
    """The outcome of a request that got no answer of the hub."""
    tunnel = re.match(r"Tunnel connection failed: (\d+)", str(error))
    if tunnel and proxy:
        return _refused(proxy, host, int(tunnel[1]))
    if isinstance(error, ssl.SSLCertVerificationError):
        return Hub(
            f"{host} shows a certificate that is not trusted ({error.verify_message})",
            "see that the clock is right; where a proxy opens TLS, name its certificate in SSL_CERT_FILE and "
            "REQUESTS_CA_BUNDLE",
        )
    detail = words_of(error).lower()
    if isinstance(error, socket.gaierror):
        return Hub(
            f"the name {host} is not found ({detail}), and no proxy is set",
            f"set HTTPS_PROXY if this network has a proxy; {_STAY_OFFLINE}",
        )
    return _no_way(host, proxy, detail)


def _no_way(host: str, proxy: SplitResult | None, detail: str) -> Hub:
    through = f"through the proxy {proxy.geturl()}" if proxy else "and no proxy is set"
    fix = f"set HTTPS_PROXY if this network has a proxy, or ask for a way out; {_STAY_OFFLINE}"
    return Hub(f"no way to {host} {through} ({detail})", fix)


def _never_asked(proxy: str, detail: str, host: str) -> Hub:
    return Hub(
        f"the proxy {proxy} cannot be reached ({detail}): it was never asked for {host}",
        "correct HTTPS_PROXY, or unset it if this network needs no proxy",
    )


def _refused(proxy: SplitResult, host: str, status: int) -> Hub:
    """The outcome where a proxy is reached and refuses, with an HTTP status, the way on to the hub."""
    found = f"the proxy {proxy.geturl()} is reached, and refuses the way to {host} with HTTP {status}"
    if status in (502, 503, 504):
        return Hub(
            f"{found}: the network up to the proxy is whole, and the proxy finds no way on",
            "try again, then tell the proxy's administrator; until then fetch the data elsewhere and name "
            f"its files; {_STAY_OFFLINE}",
        )
    if status in (403, 405):
        return Hub(found, f"ask the proxy's administrator to let {host} through; {_STAY_OFFLINE}")
    if status == 407:
        return Hub(found, "give user and password in HTTPS_PROXY (http://USER:PASSWORD@HOST:PORT)")
    return Hub(found, "correct HTTPS_PROXY: what answers there may not be a proxy")


def network(facts: Facts) -> Verdict:
    """The verdict on the network; an unreachable hub is MISS if a source needs it, else WARN."""
    found, fix, _ = facts.hub
    if not fix:
        return ok(found)
    return (miss if facts.wants_hub else warn)(found, fix)
