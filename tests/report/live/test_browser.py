"""The live page in a real browser: it follows a run, keeps the scroll position, reports a stopped server."""

import os

import pytest

from narrowgauge.laboratory.watch import serving
from support.driver import driven, needs_driver

pytestmark = [needs_driver, pytest.mark.tier("thorough")]  # test_pages.py reads the same pages as text

ACT = """
window.sameDocument = true;
const set = (id, value) => {
  document.getElementById(id).value = value;
  document.getElementById(id).dispatchEvent(new Event("input", { bubbles: true }));
};
set("smooth", 9);
document.querySelector("input[value=step]").click();
document.querySelector("details").open = true;
document.querySelectorAll(".legend button")[1]?.click();
window.scrollTo(0, 500);
"""
SAY = """
return {
  same: window.sameDocument === true,
  smooth: document.getElementById("smooth").value,
  axis: document.querySelector("input[name=axis]:checked").value,
  open: document.querySelector("details").open,
  pressed: [...document.querySelectorAll(".legend button")].map((b) => b.getAttribute("aria-pressed")),
  at: Math.round(window.scrollY),
};
"""
STEP = '{"step": %d, "loss": 3.0, "tokens": %d, "step_ms": 20.0, "tokens_per_s": 3100.0}\n'


def held(run):
    """The run is at work: this process holds it."""
    (run / "status.json").write_text('{"status": "running"}')
    (run / ".lock").write_text(f"process {os.getpid()} on host {os.uname().nodename}\n")


def test_a_page_follows_a_comparison_and_keeps_the_readers_place(make_run, tmp_path):
    root = tmp_path / "runs" / "compared"
    runs = [make_run(f"compared/{name}", recipe=name, steps=60) for name in ("bf16", "fp8", "mxfp4")]
    (root / "report.html").write_text("")
    held(runs[2])
    with serving([root]) as server, driven() as window:
        window.open(server.url)
        window.until(lambda: "60 of 60" in window.text(".standing"))
        window.js(ACT)
        before = window.js(SAY)
        path = window.js("return document.querySelector('#charts .run2 .line').getAttribute('d')")
        make_run.append(runs[2], "".join(STEP % (step, 65_536 * step) for step in range(61, 81)))
        window.until(lambda: "80 of 60" in window.text(".standing"))
        after = window.js(SAY)
        assert after == before, "the same document, with the same choices, at the same place"
        assert (after["smooth"], after["axis"], after["open"]) == ("9", "step", True)
        assert after["pressed"] == ["true", "false", "true"]
        assert window.js("return document.querySelector('#charts .run2 .line').getAttribute('d')") != path
        assert "interim" in window.text(".standing")
        (runs[2] / ".lock").write_text(f"process {2**22 + 1} on host {os.uname().nodename}\n")
        window.until(lambda: "killed" in window.text(".standing"))
        assert window.js(SAY) == before
        fourth = make_run("compared/nvfp4", recipe="nvfp4", steps=60, worse=0.3)
        window.until(lambda: "nvfp4" in window.text(".legend"))
        assert fourth.is_dir()
        assert window.js(SAY)["same"]
        assert window.complaints() == []
        assert window.js("return document.documentElement.scrollWidth - innerWidth") <= 0
        server.shutdown()
        server.server_close()
        window.until(lambda: "the watcher has ended" in window.text("#live"))
        assert "bf16" in window.text(".standing"), "what was shown last stays"


def test_a_run_is_followed_from_before_its_first_step(make_run, tmp_path):
    with serving([tmp_path / "later"]) as server, driven(dark=True, width=500) as window:
        window.open(server.url)
        assert "waits for the first run" in window.text("main")
        make_run.root = tmp_path
        run = make_run("later", steps=0, status="running")
        held(run)
        window.until(lambda: "0" in window.text(".standing tbody td:nth-child(3)"))
        make_run.append(run, STEP % (1, 65_536))
        window.until(lambda: window.js("return document.querySelectorAll('.line').length > 0"))
        ground = window.js("return getComputedStyle(document.body).backgroundColor")
        assert ground == "rgb(20, 23, 26)", "dark, as the system is"
        assert window.js("return document.documentElement.scrollWidth - innerWidth") <= 0
        assert window.complaints() == []


def test_a_ladder_is_followed_through_a_divergence(make_run, tmp_path):
    root = tmp_path / "runs" / "ladder"
    make_run.plan(root, "bf16-seed1-steps60", "mxfp4-seed1-steps60", steps=60)
    make_run("ladder/bf16-seed1-steps60", recipe="bf16", steps=60)
    run = make_run("ladder/mxfp4-seed1-steps60", recipe="mxfp4", steps=20, status="running")
    held(run)
    with serving([root]) as server, driven() as window:
        window.open(server.url)
        window.until(lambda: "20 of 20" in window.text(".standing"))
        assert "interim" in window.text(".standing")
        (run / "status.json").write_text(
            '{"status": "failed", "reason": "Diverged: 8 skipped steps in a row"}'
        )
        (run / ".lock").unlink()
        window.until(lambda: "diverged" in window.text(".standing"))
        assert "8 skipped steps in a row" in window.text("main")
        assert window.complaints() == []


def test_a_wrong_token_shows_a_sentence_and_no_run(make_run, tmp_path):
    run = make_run("secret-name", steps=5)
    with serving([run]) as server, driven() as window:
        window.open(server.url.replace(server.token, "wrong"))
        text = window.text("body")
        assert "the address lacks its token" in text
        assert "secret-name" not in text
