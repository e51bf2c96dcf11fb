"""Whether data can be downloaded: proxies, offline mode and the Hugging Face hub.

The request is a HEAD of the hub's front page; any response proves that the connection works. It has three
stages: reach the proxy, reach the hub, get the response. `Hub` has a word for each way in which they fail.
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
from dataclasses import replace
from urllib.parse import SplitResult, urlsplit

from narrowgauge.system.errors import words_of
from narrowgauge.system.processes import in_time
from narrowgauge.trainer.cluster.doctor.facts import Facts, Hub, Verdict, miss, ok, warn

_HUB, _STAGES = "https://huggingface.co", 3
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_STAY_OFFLINE = "where none is wanted, set HF_HUB_OFFLINE=1"


def ask_hub(seconds: float = 4.0) -> Hub:
    """The outcome of a request to the hub, with a time limit for each stage."""
    server = _address(os.environ.get("HF_ENDPOINT") or _HUB, "https")
    hub = Hub(host=server.hostname or "" if server else "", outcome="no address")
    if any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in _OFFLINE):
        return replace(hub, outcome="offline")
    if not server or server.scheme not in ("http", "https"):
        return hub
    address = proxy_for(server.scheme, server.hostname or "")
    proxy = _address(address, "http") if address else None
    if proxy:
        hub = replace(hub, proxy=proxy.geturl())
        if proxy.scheme != "http":
            return replace(hub, outcome="not asked", detail="only http:// proxies are tried here")
    elif address:
        detail = "its address cannot be read; write http://HOST:PORT"
        return replace(hub, outcome="proxy unreachable", proxy="in HTTPS_PROXY", detail=detail)
    whole = _STAGES * seconds
    late = replace(hub, outcome="no answer", detail=f"no answer in {whole:.0f} s")
    return in_time(lambda: _ask(server, proxy, address, hub, seconds), whole, late)


def proxy_for(scheme: str, host: str) -> str:
    """The proxy that the environment sets for a host; "" for none."""
    proxies = urllib.request.getproxies_environment()
    return "" if urllib.request.proxy_bypass(host) else proxies.get(scheme) or proxies.get("all", "")


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
        return replace(hub, outcome="proxy unreachable", detail=words_of(error).lower())
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
        return replace(hub, outcome=refused, status=status)
    try:
        ahead = email.utils.parsedate_to_datetime(headers["Date"]).timestamp() - time.time()
    except (TypeError, ValueError):
        ahead = None
    return replace(hub, outcome="reached", status=status, ahead=ahead)


def _failed(hub: Hub, error: Exception) -> Hub:
    """The outcome of a request that got no answer of the hub."""
    if tunnel := re.match(r"Tunnel connection failed: (\d+)", str(error)):
        return replace(hub, outcome="proxy refused", status=int(tunnel[1]))
    if isinstance(error, ssl.SSLCertVerificationError):
        return replace(hub, outcome="certificate", detail=error.verify_message)
    outcome = "no name" if isinstance(error, socket.gaierror) else "no network"
    return replace(hub, outcome=outcome, detail=words_of(error).lower())


def check_network(facts: Facts) -> dict[str, Verdict]:
    """The verdict on the network; an unreachable hub is MISS if a source needs it, else WARN."""
    hub, sources = facts.hub, facts.data.name.split(",") if facts.data else []
    wanted = any(name.strip().startswith("hf:") for name in sources)
    through = f" through the proxy {hub.proxy}" if hub.proxy else ""
    match hub.outcome:
        case "reached":
            verdict = ok(f"{hub.host} answers{through}")
        case "offline":
            verdict = ok("offline mode (HF_HUB_OFFLINE): hf: sources come from the hub's cache alone")
        case "not asked":
            verdict = ok(f"not asked{through}: {hub.detail}")
        case _:
            verdict = (miss if wanted else warn)(*_verdict(hub))
    return {"network": verdict}


def _verdict(hub: Hub) -> tuple[str, str]:
    """(what was found, the fix) for a hub that was not reached."""
    through = f" through the proxy {hub.proxy}" if hub.proxy else " and no proxy is set"
    match hub.outcome:
        case "proxy refused":
            return _refused(hub)
        case "proxy unreachable":
            found = (
                f"the proxy {hub.proxy} cannot be reached ({hub.detail}): it was never asked for {hub.host}"
            )
            fix = "correct HTTPS_PROXY, or unset it if this network needs no proxy"
        case "no address":
            found, fix = "HF_ENDPOINT is invalid", "write https://HOST, or unset it to use huggingface.co"
        case "no name":
            found = f"the name {hub.host} is not found ({hub.detail}), and no proxy is set"
            fix = f"set HTTPS_PROXY if this network has a proxy; {_STAY_OFFLINE}"
        case "certificate":
            found = f"{hub.host} shows a certificate that is not trusted ({hub.detail})"
            fix = "see that the clock is right; where a proxy opens TLS, name its certificate in "
            fix += "SSL_CERT_FILE and REQUESTS_CA_BUNDLE"
        case "refused":
            found = f"{hub.host} answers HTTP {hub.status}"
            fix = "try again later; if HF_ENDPOINT names a mirror, see that it is the right one"
        case _:
            found = f"no way to {hub.host}{through} ({hub.detail})"
            fix = f"set HTTPS_PROXY if this network has a proxy, or ask for a way out; {_STAY_OFFLINE}"
    return found, fix


def _refused(hub: Hub) -> tuple[str, str]:
    """(what was found, the fix) where the proxy was reached but the hub was not."""
    found = f"the proxy {hub.proxy} is reached, and refuses the way to {hub.host} with HTTP {hub.status}"
    match hub.status:
        case 407:
            return found, "give user and password in HTTPS_PROXY (http://USER:PASSWORD@HOST:PORT)"
        case 403 | 405:
            return found, f"ask the proxy's administrator to let {hub.host} through; {_STAY_OFFLINE}"
        case 502 | 503 | 504:
            return (
                f"{found}: the network up to the proxy is whole, and the proxy finds no way on",
                "try again, then tell the proxy's administrator; until then fetch the data elsewhere and "
                f"name its files; {_STAY_OFFLINE}",
            )
        case _:
            return found, "correct HTTPS_PROXY: what answers there may not be a proxy"
