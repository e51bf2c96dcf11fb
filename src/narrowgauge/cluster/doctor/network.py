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

import base64
import email.utils
import http.client
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

from narrowgauge.cluster.doctor.facts import Facts, Hub, Verdict, miss, ok, warn
from narrowgauge.errors import words_of
from narrowgauge.processes import in_time

_HUB, _STAGES = "https://huggingface.co", 3
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_STAY_OFFLINE = "where none is wanted, set HF_HUB_OFFLINE=1"


@dataclass(frozen=True, slots=True)
class _Server:
    """The hub or a proxy from the environment; `headers` are those that a proxy requires."""

    scheme: str
    host: str
    port: int
    headers: dict[str, str]

    @property
    def place(self) -> str:
        """The host and the port, as in an address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def ask_hub(seconds: float = 4.0) -> Hub:
    """The outcome of a request to the hub, with a time limit for each stage."""
    server = _server(os.environ.get("HF_ENDPOINT") or _HUB, "https")
    hub = Hub(host=server.host if server else "", outcome="no address")
    if any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in _OFFLINE):
        return replace(hub, outcome="offline")
    if not server or server.scheme not in ("http", "https"):
        return hub
    address = proxy_for(server.scheme, server.host)
    proxy = _server(address, "http") if address else None
    if proxy:
        hub = replace(hub, proxy=f"{proxy.scheme}://{proxy.place}")
        if proxy.scheme != "http":
            return replace(hub, outcome="not asked", detail="only http:// proxies are tried here")
    elif address:
        detail = "its address cannot be read; write http://HOST:PORT"
        return replace(hub, outcome="proxy unreachable", proxy="in HTTPS_PROXY", detail=detail)
    whole = _STAGES * seconds
    late = replace(hub, outcome="no answer", detail=f"no answer in {whole:.0f} s")
    return in_time(lambda: _ask(server, proxy, hub, seconds), whole, late)


def proxy_for(scheme: str, host: str) -> str:
    """The proxy that the environment sets for a host; "" for none."""
    proxies = urllib.request.getproxies_environment()
    return "" if urllib.request.proxy_bypass(host) else proxies.get(scheme) or proxies.get("all", "")


def _server(address: str, scheme: str) -> _Server | None:
    """Parse an address, whose password may contain any character, even "/" and "@"; None if it is invalid."""
    scheme, rest = address.strip().split("://", 1) if "://" in address else (scheme, address)
    credentials, _, place = rest.rpartition("@")
    try:
        parts = urlsplit(f"//{place}")
        host, port = parts.hostname or "", parts.port or (443 if scheme == "https" else 80)
        host.encode("idna")
    except ValueError:
        return None
    user = base64.b64encode(unquote(credentials).encode()).decode()
    headers = {"Proxy-Authorization": f"Basic {user}"} if credentials else {}
    return _Server(scheme.lower(), host, port, headers) if re.fullmatch(r"[\w.:%-]+", host) else None


def _ask(server: _Server, proxy: _Server | None, hub: Hub, seconds: float) -> Hub:
    """Reach the proxy, if any, then the hub; report the stage at which it ended."""
    try:
        if proxy:
            socket.create_connection((proxy.host, proxy.port), timeout=seconds).close()
    except OSError as error:
        return replace(hub, outcome="proxy unreachable", detail=words_of(error).lower())
    try:
        status, headers = _head(server, proxy, seconds)
    except ssl.SSLCertVerificationError as error:
        return replace(hub, outcome="certificate", detail=error.verify_message)
    except socket.gaierror as error:
        return replace(hub, outcome="no name", detail=words_of(error).lower())
    except (OSError, http.client.HTTPException) as error:
        if tunnel := re.match(r"Tunnel connection failed: (\d+)", str(error)):
            return replace(hub, outcome="proxy refused", status=int(tunnel[1]))
        return replace(hub, outcome="no network", detail=words_of(error).lower())
    if status >= 500 or status == 407:  # without a tunnel, the error may be the proxy's or the hub's
        refused = "proxy refused" if proxy and server.scheme == "http" else "refused"
        return replace(hub, outcome=refused, status=status)
    try:
        ahead = email.utils.parsedate_to_datetime(headers["Date"]).timestamp() - time.time()
    except (TypeError, ValueError):
        ahead = None
    return replace(hub, outcome="reached", status=status, ahead=ahead)


def _head(server: _Server, proxy: _Server | None, seconds: float) -> tuple[int, http.client.HTTPMessage]:
    """(status, headers) of the hub's front page; redirects are not followed."""
    request = urllib.request.Request(f"{server.scheme}://{server.place}/", method="HEAD")
    request.add_header("User-Agent", "narrowgauge-doctor")
    if proxy:
        request.set_proxy(proxy.place, "http")  # for https:// it asks for a tunnel
        request.headers.update(proxy.headers)
    opener = urllib.request.OpenerDirector()  # does not follow redirects, and does not raise for a status
    opener.add_handler(urllib.request.HTTPHandler())
    opener.add_handler(urllib.request.HTTPSHandler())
    try:
        with opener.open(request, timeout=seconds) as answer:
            return answer.status, answer.headers
    except urllib.error.URLError as error:
        raise error.reason if isinstance(error.reason, OSError) else error from None


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
