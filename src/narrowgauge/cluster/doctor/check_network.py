"""Can data be fetched? The verdict on proxies, offline mode and the Hugging Face hub.

Who sits behind a proxy sees the same broken download for very different reasons. A proxy that answers the
request for a tunnel with 503 is there, and says that *it* cannot reach the hub; a proxy that does not answer
is a wrong address; a name that is not found without any proxy mostly means that there must be one.

Only `hf:` sources need the hub, so that it cannot be reached is a warning, and more where one is asked for.
"""

from narrowgauge.cluster.doctor.facts import Facts, Hub, Item, miss, ok, warn

_OFFLINE = "where none is wanted, set HF_HUB_OFFLINE=1"


def check_network(facts: Facts) -> list[Item]:
    """The item of this file."""
    hub, sources = facts.hub, facts.data.name.split(",") if facts.data else []
    wanted = any(name.strip().startswith("hf:") for name in sources)
    through = f" through the proxy {hub.proxy}" if hub.proxy else ""
    if hub.outcome == "reached":
        return [ok("network", f"{hub.host} answers{through}")]
    if hub.outcome == "offline":
        return [ok("network", "offline mode (HF_HUB_OFFLINE): hf: sources come from the hub's cache alone")]
    if hub.outcome == "not asked":
        return [ok("network", f"not asked{through}: {hub.detail}")]
    found, fix = _verdict(hub)
    return [(miss if wanted else warn)("network", found, fix)]


def _verdict(hub: Hub) -> tuple[str, str]:
    """(what was found, the fix) where the hub was not reached."""
    match hub.outcome:
        case "proxy refused":
            return _refused(hub)
        case "proxy unreachable":
            return (
                f"the proxy {hub.proxy} cannot be reached ({hub.detail}): it was never asked for {hub.host}",
                "correct HTTPS_PROXY, or unset it if this network needs no proxy",
            )
        case "no name":
            return (
                f"the name {hub.host} is not found ({hub.detail}), and no proxy is set",
                f"set HTTPS_PROXY if this network has a proxy; {_OFFLINE}",
            )
        case "certificate":
            return (
                f"{hub.host} shows a certificate that is not trusted ({hub.detail})",
                "see that the clock is right; where a proxy opens TLS, name its certificate in SSL_CERT_FILE "
                "and REQUESTS_CA_BUNDLE",
            )
        case "refused":
            return (
                f"{hub.host} answers HTTP {hub.status}",
                "try again later; if HF_ENDPOINT names a mirror, see that it is the right one",
            )
        case _:
            through = f" through the proxy {hub.proxy}" if hub.proxy else " and no proxy is set"
            return (
                f"no way to {hub.host}{through} ({hub.detail})",
                f"set HTTPS_PROXY if this network has a proxy, or ask for a way out; {_OFFLINE}",
            )


def _refused(hub: Hub) -> tuple[str, str]:
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
