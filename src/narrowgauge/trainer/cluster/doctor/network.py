"""Whether data can be downloaded: proxies, offline mode and the Hugging Face hub.

The request is a HEAD of the hub's front page; any response proves that the connection works. It has three
stages: reach the proxy, reach the hub, get the response. `FAILURES` has the ways in which they fail.
The system resolves names without a time limit, so the request runs in a thread that may be abandoned.
Behind a proxy, very different causes look like the same broken download. A proxy that answers the request for
a tunnel with 503 is working, and reports that *it* cannot reach the hub. A proxy that does not answer has a
wrong address. A name that does not resolve and no proxy set usually means that a proxy is required.

Only `hf:` sources need the hub; without one, an unreachable hub is only a warning. A proxy's user and
password are used but never stored: `Hub.proxy` is built from scheme, host and port alone.
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
#: How a request fails: what was found and the fix, to be filled in with the fields of `Hub`.
FAILURES = {
    "proxy refused": (
        "the proxy {proxy} is reached, and refuses the way to {host} with HTTP {status}",
        "correct HTTPS_PROXY: what answers there may not be a proxy",
    ),
    "proxy unreachable": (
        "the proxy {proxy} cannot be reached ({detail}): it was never asked for {host}",
        "correct HTTPS_PROXY, or unset it if this network needs no proxy",
    ),
    "no address": (
        "HF_ENDPOINT is invalid",
        "write https://HOST, or unset it to use huggingface.co",
    ),
    "no name": (
        "the name {host} is not found ({detail}), and no proxy is set",
        f"set HTTPS_PROXY if this network has a proxy; {_STAY_OFFLINE}",
    ),
    "certificate": (
        "{host} shows a certificate that is not trusted ({detail})",
        "see that the clock is right; where a proxy opens TLS, name its certificate in SSL_CERT_FILE and "
        "REQUESTS_CA_BUNDLE",
    ),
    "refused": (
        "{host} answers HTTP {status}",
        "try again later; if HF_ENDPOINT names a mirror, see that it is the right one",
    ),
}
FAILURES["no network"] = FAILURES["no answer"] = (
    "no way to {host}{through} ({detail})",
    f"set HTTPS_PROXY if this network has a proxy, or ask for a way out; {_STAY_OFFLINE}",
)
_FORBIDDEN = "", f"ask the proxy's administrator to let {{host}} through; {_STAY_OFFLINE}"
_NO_WAY_ON = (
    ": the network up to the proxy is whole, and the proxy finds no way on",
    "try again, then tell the proxy's administrator; until then fetch the data elsewhere and name its files; "
    + _STAY_OFFLINE,
)
# What a refusal of the proxy means, by its HTTP status, and the fix.
_REFUSALS = {403: _FORBIDDEN, 405: _FORBIDDEN, 502: _NO_WAY_ON, 503: _NO_WAY_ON, 504: _NO_WAY_ON}
_REFUSALS[407] = "", "give user and password in HTTPS_PROXY (http://USER:PASSWORD@HOST:PORT)"


def ask_hub(seconds: float = 4.0) -> Hub:
    """The outcome of a request to the hub, with a time limit for each stage."""
    server = _address(os.environ.get("HF_ENDPOINT") or _HUB, "https")
    hub = Hub(host=server.hostname or "" if server else "", outcome="no address")
    if any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in _OFFLINE):
        return hub._replace(outcome="offline")
    if not server or server.scheme not in ("http", "https"):
        return hub
    proxies = urllib.request.getproxies_environment()
    bypass = urllib.request.proxy_bypass(hub.host)
    address = "" if bypass else proxies.get(server.scheme) or proxies.get("all", "")
    proxy = _address(address, "http") if address else None
    if proxy:
        hub = hub._replace(proxy=proxy.geturl())
        if proxy.scheme != "http":
            return hub._replace(outcome="not asked", detail="only http:// proxies are tried here")
    elif address:
        detail = "its address cannot be read; write http://HOST:PORT"
        return hub._replace(outcome="proxy unreachable", proxy="in HTTPS_PROXY", detail=detail)
    whole = _STAGES * seconds
    late = hub._replace(outcome="no answer", detail=f"no answer in {whole:.0f} s")
    return in_time(lambda: _ask(server, proxy, address, hub, seconds), whole, late)


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


def _ask(server: SplitResult, proxy: SplitResult | None, address: str, hub: Hub, seconds: float) -> Hub:
    """Reach the proxy, if any, then the hub; report the stage at which it ended."""
    try:
        if proxy:
            socket.create_connection((proxy.hostname, proxy.port), timeout=seconds).close()
    except OSError as error:
        return hub._replace(outcome="proxy unreachable", detail=words_of(error).lower())
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
        return _failed(hub, reason if isinstance(reason, Exception) else error)
    if status >= 500 or status == 407:  # without a tunnel, the error may be the proxy's or the hub's
        refused = "proxy refused" if proxy and server.scheme == "http" else "refused"
        return hub._replace(outcome=refused, status=status)
    try:
        ahead = email.utils.parsedate_to_datetime(headers["Date"]).timestamp() - time.time()
    except (TypeError, ValueError):
        ahead = None
    return hub._replace(outcome="reached", status=status, ahead=ahead)


def _failed(hub: Hub, error: Exception) -> Hub:
    """The outcome of a request that got no answer of the hub."""
    if tunnel := re.match(r"Tunnel connection failed: (\d+)", str(error)):
        return hub._replace(outcome="proxy refused", status=int(tunnel[1]))
    if isinstance(error, ssl.SSLCertVerificationError):
        return hub._replace(outcome="certificate", detail=error.verify_message)
    outcome = "no name" if isinstance(error, socket.gaierror) else "no network"
    return hub._replace(outcome=outcome, detail=words_of(error).lower())


def network(facts: Facts) -> Verdict:
    """The verdict on the network; an unreachable hub is MISS if a source needs it, else WARN."""
    hub, sources = facts.hub, facts.data.name.split(",") if facts.data else []
    through = f" through the proxy {hub.proxy}" if hub.proxy else ""
    if hub.outcome == "reached":
        return ok(f"{hub.host} answers{through}")
    if hub.outcome == "offline":
        return ok("offline mode (HF_HUB_OFFLINE): hf: sources come from the hub's cache alone")
    if hub.outcome == "not asked":
        return ok(f"not asked{through}: {hub.detail}")
    found, fix = FAILURES[hub.outcome]
    if hub.outcome == "proxy refused":
        more, fix = _REFUSALS.get(hub.status or 0, ("", fix))
        found += more
    words = hub._asdict() | {"through": through or " and no proxy is set"}
    wanted = any(name.strip().startswith("hf:") for name in sources)
    return (miss if wanted else warn)(found.format(**words), fix.format(**words))
