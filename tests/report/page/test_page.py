"""The page as a file: self-contained, inert against what it shows, whole or not at all."""

import base64
import hashlib
import json
import re
import shutil

import pytest
from markupsafe import Markup

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.laboratory.watch import write_pages
from narrowgauge.trainer.report import read_run, render_report, write_report
from narrowgauge.trainer.report.page.html import part

HOSTILE = "</script><script>alert(1)</script><!--<script> & \"quotes' \u2028 \u00e9"


@pytest.fixture
def five(make_run):
    recipes = ("bf16", "fp8", "mxfp8", "nvfp4", "mxfp4")
    return [make_run(name, recipe=name, worse=0.03 * i, steps=300) for i, name in enumerate(recipes)]


def page_of(*paths, **how):
    return render_report([read_run(path) for path in paths], **how)


def words_of(*paths, **how):
    """A page without its scripts."""
    return re.sub(r"<script.*?</script>", "", page_of(*paths, **how), flags=re.S)


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


@pytest.mark.parametrize("is_live", [False, True])
def test_the_page_needs_nothing_but_itself(make_run, five, tmp_path, is_live):
    out = tmp_path / "deep" / "report.html"
    make_run.works(five[1])
    write_pages(five, out, is_live)
    html = out.read_text("ascii")
    assert ('id="live"' in html) == is_live
    assert not re.search(r"""(?:src|href|action)\s*=|@import|url\((?!#)|\bfetch\(|XMLHttpRequest""", html)
    addresses = re.findall(r"https?://[^\"' ]*", html)
    assert addresses == ["http://www.w3.org/2000/svg"], "a name space, never fetched"
    script = re.search(r"<script>(.*?)</script>", html, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in html
    assert html.count("<script") == 2


def test_what_comes_from_a_run_is_shown_and_never_obeyed(make_run):
    path = make_run("<img src=x onerror=alert(1)>", sample=HOSTILE)
    make_run.append(path, json.dumps({"event": HOSTILE, "step": 3, "reason": HOSTILE}) + "\n")
    (path / "config.toml").write_text('[model]\nname = "<b onclick=alert(1)>"\n"<i>" = 1\n')
    make_run.ends(path, "failed", HOSTILE)
    html = page_of(path)
    assert (html.count("<script"), html.count("</script>")) == (2, 2)
    assert not re.search(r"<img|<b |<i>|<!--", html)
    kinds = {event["kind"] for event in data_of(html)["runs"][0]["events"]}
    assert HOSTILE in kinds, "the data arrive unchanged"


def test_every_template_escapes():
    assert part("notes", ["<b>", Markup("<i>")]) == '<ul class="notes"><li>&lt;b&gt;</li><li><i></li></ul>'


def test_a_comparison_reads_in_order_without_its_script(five):
    """The verdict, where it comes from, curves, gauges, and one table of the runs."""
    html = words_of(*five, command="narrowgauge compare --recipes bf16,fp8")
    marks = ("Open: one seed proves no difference.", "narrowgauge compare --recipes", "<h2>Loss and gap</h2>")
    marks += ("<h2>Gauges</h2>", "<h2>All figures</h2>", "<h2>Configuration</h2>")
    places = [html.index(mark) for mark in marks]
    assert places == sorted(places)
    assert html.count('aria-label="All runs"') == 1
    losses = [f"{read_run(path).final_val_loss:.4f}" for path in five]
    for word in ("5 runs compared", "<td>emulated</td>", "Once upon a time", "<noscript>", *losses):
        assert word in html
    assert html.count("<details>") == 5 + 2, "a configuration a run, the events, and how to reproduce"
    table = html[html.index("Where they differ") : html.index("Each in full")]
    assert re.findall(r"<code>(.*?)</code>", table) == ["recipe.name"], "differences come first"


def test_the_page_says_when_where_and_by_what_a_run_was_made(make_run):
    path = make_run("solo", steps=20)
    assert "UTC" not in page_of(path), "it recorded no origin"
    start = {"host": "vale", "version": "0.1.0", "command": "<b>", "time": "2026-11-22T07:30:00+00:00"}
    times = {"start": start, "done": {"time": "2026-11-23T08:00:00+02:00"}}
    make_run.edit(path, lambda line: times.get(line["event"]) if "event" in line else {})
    html = page_of(path)
    for words in ("2026-11-22 07:30 to 2026-11-23 06:00 UTC", "vale, cpu", "narrowgauge 0.1.0, torch 2.13.0"):
        assert words in html
    assert "<code>&lt;b&gt;</code>" in html


def test_the_page_holds_the_recipe(make_run):
    path = make_run("own", recipe="experiments/mine.toml")
    make_run.set(path, "[validation]", '"wgrad.x" = "bf16"\n[validation]')
    (path / "recipe.toml").write_text("name = 'mine'\nfprop = 'mxfp4'  # <b>\n")
    html = page_of(path)
    assert "<pre>\nname = &#39;mine&#39;\nfprop = &#39;mxfp4&#39;  # &lt;b&gt;\n</pre>" in html
    assert "set over it: wgrad.x = bf16" in html
    assert "recipe.toml" not in page_of(make_run("older")), "a run without the file"
    (path / "recipe.toml").write_text("# long\n" * 10_000)
    assert len(page_of(path)) < len(html) + 20_000, "the page stays small"


def test_a_run_without_a_step_gets_a_page_that_says_so(make_run):
    young = make_run("young", status="running")
    (young / "metrics.jsonl").unlink()
    html = page_of(young)
    assert "no step has been recorded yet (status: running)" in html
    assert "There are no curves yet" in html


def test_a_run_that_diverged_leads_with_its_reason(make_run):
    path = make_run("lost", steps=50)
    make_run.ends(path, "failed", "Diverged: the <loss> went up")
    make_run.append(
        path, '{"step": 51, "loss": NaN, "grad_norm": Infinity, "val_loss": null}\n{"step": 52, "lo'
    )
    html = page_of(path)
    assert "not finite" in html
    assert "1 torn line" in html
    assert data_of(html)["runs"][0]["curves"]["loss"]["mean"][-1] is None
    lead = html[html.index('<div class="lead">') : html.index("<h2>")]
    assert '<p class="failed">The run failed after step 51 of 50: the &lt;loss&gt; went up.</p>' in lead
    assert lead.index("failed after") < lead.index("the last finite train loss is")


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(("count", "steps"), [(1, 100_000), (40, 2000)])
def test_the_page_stays_under_five_megabytes(make_run, tmp_path, count, steps):
    paths = [make_run("run0", steps=steps)]
    for i in range(1, count):
        paths.append(shutil.copytree(paths[0], paths[0].with_name(f"run{i}")))
    assert write_report(paths, tmp_path / "big.html").stat().st_size < 5_000_000


def test_a_write_that_fails_leaves_the_old_page_and_no_litter(five, tmp_path, monkeypatch):
    out = write_report(five[:2], tmp_path / "report.html")
    old = out.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*report.html' \(No space left on device\); choose"):
        write_report(five[:1], out)
    assert out.read_bytes() == old
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "runs"]
    with pytest.raises(UserError, match=r"is a directory, but a report is a file: try .*report.html"):
        write_report(five, tmp_path)
