"""The verdict on the way to data: proxies, offline mode and the Hugging Face hub.

Behind a proxy, very different causes look like the same broken download. A proxy that answers the request for
a tunnel with 503 is there, and says that *it* cannot reach the hub. A proxy that does not answer is a wrong
address. A name that is not found without any proxy mostly means that there must be one.

Only `hf:` sources need the hub. Where none is asked for, a hub that cannot be reached is only a warning.
"""

from narrowgauge.cluster.doctor.facts import Facts, Hub, Verdict, miss, ok, warn

_OFFLINE = "where none is wanted, set HF_HUB_OFFLINE=1"


def check_network(facts: Facts) -> dict[str, Verdict]:
    """The verdict on the network; a hub that is not reached is MISS if a source needs it, else WARN."""
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
    """(what was found, the fix) where the hub was not reached."""
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
            found, fix = "HF_ENDPOINT is no address", "write https://HOST, or unset it to use huggingface.co"
        case "no name":
            found = f"the name {hub.host} is not found ({hub.detail}), and no proxy is set"
            fix = f"set HTTPS_PROXY if this network has a proxy; {_OFFLINE}"
        case "certificate":
            found = f"{hub.host} shows a certificate that is not trusted ({hub.detail})"
            fix = "see that the clock is right; where a proxy opens TLS, name its certificate in "
            fix += "SSL_CERT_FILE and REQUESTS_CA_BUNDLE"
        case "refused":
            found = f"{hub.host} answers HTTP {hub.status}"
            fix = "try again later; if HF_ENDPOINT names a mirror, see that it is the right one"
        case _:
            found = f"no way to {hub.host}{through} ({hub.detail})"
            fix = f"set HTTPS_PROXY if this network has a proxy, or ask for a way out; {_OFFLINE}"
    return found, fix


def _refused(hub: Hub) -> tuple[str, str]:
    """(what was found, the fix) where a proxy was reached, and the hub was not."""
    found = f"the proxy {hub.proxy} is reached, and refuses the way to {hub.host} with HTTP {hub.status}"
    match hub.status:
        case 407:
            return found, "give user and password in HTTPS_PROXY (http://USER:PASSWORD@HOST:PORT)"
        case 403 | 405:
            return found, f"ask the proxy's administrator to let {hub.host} through; {_OFFLINE}"
        case 502 | 503 | 504:
            return (
                f"{found}: the network up to the proxy is whole, and the proxy finds no way on",
                "try again, then tell the proxy's administrator; until then fetch the data elsewhere and "
                f"name its files; {_OFFLINE}",
            )
        case _:
            return found, "correct HTTPS_PROXY: what answers there may not be a proxy"
