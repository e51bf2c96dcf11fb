"""The page as a file: self-contained, inert against what it shows, whole or not at all."""

import base64
import hashlib
import json
import re

import pytest

from narrowgauge.errors import UserError
from narrowgauge.report import read_run, render_report, write_report

HOSTILE = "</script><script>alert(1)</script><!--<script> & \"quotes' \u2028 \u00e9"


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


@pytest.fixture
def five(make_run):
    recipes = ("bf16", "fp8", "mxfp8", "nvfp4", "mxfp4")
    return [make_run(name, recipe=name, worse=0.03 * i, steps=300) for i, name in enumerate(recipes)]


def test_the_page_needs_nothing_but_itself(five, tmp_path):
    out = write_report(five, tmp_path / "deep" / "report.html")
    html = out.read_text("ascii")
    assert not re.search(r"""(?:src|href|action)\s*=|@import|url\((?!#)|\bfetch\(|XMLHttpRequest""", html)
    assert re.findall(r"https?://[^\"' ]*", html) == ["http://www.w3.org/2000/svg"], (
        "a name space, never fetched"
    )


def test_the_policy_names_the_script_by_its_hash(five):
    html = render_report([read_run(path) for path in five])
    script = re.search(r"<script>(.*?)</script>", html, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in html
    assert html.count("<script") == 2


def test_without_script_the_words_are_all_there(five):
    html = re.sub(r"<script.*?</script>", "", render_report([read_run(path) for path in five]), flags=re.S)
    for word in (
        "5 runs compared",
        "reference",
        "<td>emulated</td>",
        "Once upon a time",
        "recipe.name",
        "<noscript>",
    ):
        assert word in html
    for run in map(read_run, five):
        assert f"{run.final_val_loss:.4f}" in html
    assert html.count("<details>") == 5 + 2, "a configuration a run, the events, and how to reproduce"


def test_one_run_shows_its_whole_configuration_and_no_gap(make_run):
    html = render_report([read_run(make_run("solo", mfu=0.3, backend="native"))])
    assert "<h1>solo</h1>" in html
    assert "<dt>warmup_steps</dt><dd>20</dd>" in html
    assert "989 TFLOP/s" in html
    assert "reference" not in re.sub(r"<script.*?</script>", "", html, flags=re.S)


def test_what_comes_from_a_run_is_shown_and_never_obeyed(make_run):
    path = make_run("<img src=x onerror=alert(1)>", sample=HOSTILE)
    make_run.append(path, json.dumps({"event": HOSTILE, "step": 3, "reason": HOSTILE}) + "\n")
    (path / "config.toml").write_text('[model]\nname = "<b onclick=alert(1)>"\n"<i>" = 1\n')
    (path / "status.json").write_text(json.dumps({"status": "failed", "reason": HOSTILE}))
    html = render_report([read_run(path)])
    assert html.count("<script") == 2
    assert html.count("</script>") == 2
    assert not re.search(r"<img|<b |<i>|<!--", html)
    kinds = {event["kind"] for event in data_of(html)["runs"][0]["events"]}
    assert HOSTILE in kinds, "the data arrive unchanged"


def test_the_page_holds_the_recipe(make_run):
    path = make_run("own", recipe="experiments/mine.toml")
    config = (path / "config.toml").read_text()
    (path / "config.toml").write_text(config.replace("[validation]", '"wgrad.x" = "bf16"\n[validation]'))
    (path / "recipe.toml").write_text("name = 'mine'\nfprop = 'mxfp4'  # <b>\n")
    html = render_report([read_run(path)])
    assert "<pre>\nname = &#x27;mine&#x27;\nfprop = &#x27;mxfp4&#x27;  # &lt;b&gt;\n</pre>" in html
    assert "set over it: wgrad.x = bf16" in html
    assert "recipe.toml" not in render_report([read_run(make_run("older"))]), "a run without the file"
    (path / "recipe.toml").write_text("# long\n" * 10_000)
    assert len(render_report([read_run(path)])) < len(html) + 20_000, "the page stays small"


def test_differences_come_first(five):
    html = render_report([read_run(path) for path in five])
    table = html[html.index("Where they differ") : html.index("Each in full")]
    assert re.findall(r"<code>(.*?)</code>", table) == ["recipe.name"]


def test_twins_are_called_identical(make_run):
    html = render_report([read_run(make_run("a")), read_run(make_run("b"))])
    assert "The configurations are identical." in html


def test_a_run_without_a_step_gets_a_page_that_says_so(make_run, tmp_path):
    young = make_run("young", status="running")
    (young / "metrics.jsonl").unlink()
    html = write_report([young], tmp_path / "r.html").read_text()
    assert "no step has been recorded yet (status: running)" in html
    assert "There are no curves yet" in html


def test_a_run_that_diverged_gets_a_page(make_run):
    path = make_run("lost", steps=50)
    make_run.append(
        path, '{"step": 51, "loss": NaN, "grad_norm": Infinity, "val_loss": null}\n{"step": 52, "lo'
    )
    html = render_report([read_run(path)])
    assert "not finite" in html
    assert "1 torn line" in html
    assert data_of(html)["runs"][0]["curves"]["loss"]["mean"][-1] is None


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(("count", "steps"), [(1, 100_000), (40, 2000)])
def test_the_page_stays_under_five_megabytes(make_run, tmp_path, count, steps):
    paths = [make_run("run0", steps=steps)]
    for i in range(1, count):
        copy = paths[0].with_name(f"run{i}")
        copy.mkdir()
        for file in paths[0].iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        paths.append(copy)
    assert write_report(paths, tmp_path / "big.html").stat().st_size < 5_000_000


def test_a_write_that_fails_leaves_the_old_page_and_no_litter(five, tmp_path, monkeypatch):
    out = write_report(five, tmp_path / "report.html")
    old = out.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*report.html' \(No space left on device\); choose"):
        write_report(five[:1], out)
    assert out.read_bytes() == old
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "runs"]


def test_a_directory_is_no_report(five, tmp_path):
    with pytest.raises(UserError, match=r"is a directory, but a report is a file: try .*report.html"):
        write_report(five, tmp_path)


def test_the_page_answers_in_order(five):
    """The verdict, where it comes from, curves, gauges, and one table of the runs."""
    html = render_report([read_run(path) for path in five], "narrowgauge compare --recipes bf16,fp8")
    marks = (
        *("Open: one seed proves no difference.", "narrowgauge compare --recipes", "<h2>Loss and gap</h2>"),
        *("<h2>Gauges</h2>", "<h2>All figures</h2>", "<h2>Configuration</h2>"),
    )
    places = [html.index(mark) for mark in marks]
    assert places == sorted(places)
    assert html.count('<table class="runs">') == 1


def test_a_failed_run_leads_with_its_reason(make_run):
    path = make_run("lost", status="failed")
    (path / "status.json").write_text('{"status": "failed", "reason": "Diverged: the <loss> went up"}')
    html = render_report([read_run(path)])
    lead = html[html.index('<div class="lead">') : html.index("<h2>")]
    assert '<p class="failed">The run failed after step 200 of 200: the &lt;loss&gt; went up.</p>' in lead
    assert lead.index("failed after") < lead.index("the last finite train loss is")


def test_the_page_says_when_where_and_by_what_a_run_was_made(make_run):
    path = make_run("solo", steps=20)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines[0] |= {
        "time": "2026-11-22T07:30:00+00:00",
        "host": "vale",
        "version": "0.1.0",
        "command": "narrowgauge <b>",
    }
    lines[-1]["time"] = "2026-11-23T08:00:00+02:00"
    events = ("start", "done")
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines if line.get("event", "start") in events)
    )
    html = render_report([read_run(path)])
    for words in (
        "2026-11-22 07:30 to 2026-11-23 06:00 UTC",
        "22 h 30 min, of which ",
        "vale, cpu",
        "narrowgauge 0.1.0, torch 2.13.0",
        "<code>narrowgauge &lt;b&gt;</code>",
    ):
        assert words in html


def test_runs_that_recorded_no_origin_get_a_page(make_run):
    lead = render_report([read_run(make_run())]).partition("<h2>")[0]
    assert "in training steps" in lead
    assert "UTC" not in lead
