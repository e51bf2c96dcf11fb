"""What a live page shows of what lies on disk, and when it is made again."""

import json
import os
import re
import shutil

import pytest

from narrowgauge.report import write_report
from narrowgauge.report.live.pages import Watched
from narrowgauge.report.live.subject import subjects


def shown(watched, address=""):
    """The page without scripts and styles."""
    html = watched(address).html()
    return re.sub(r"<(script|style).*?</\1>", "", html, flags=re.S)


def rows(html):
    """The texts of the cells of where runs stand."""
    table = html[html.index('class="standing"') :].partition("</table>")[0]
    lines = re.findall(r"<tr>(.*?)</tr>", table, flags=re.S)[1:]
    return [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", li)] for li in lines]


@pytest.fixture
def watch():
    """Watches paths, and reports no more comparisons."""
    return lambda *paths, **how: Watched(paths, lambda subject, runs: ([], ""), **how)


def running(run, step_s=1.0):
    """The run is at work: this process holds it."""
    (run / "status.json").write_text('{"status": "running"}')
    (run / ".lock").write_text(f"process {os.getpid()} on host {os.uname().nodename}\n")


def killed(run):
    """The run is recorded as running, but its process has ended."""
    running(run)
    (run / ".lock").write_text(f"process {2**22 + 1} on host {os.uname().nodename}\n")


def test_a_run_at_work_has_its_step_speed_and_time_left(make_run, watch):
    run = make_run("mine", steps=100, status="running")
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("steps = 100", "steps = 400"))
    running(run)
    html = shown(watch(run))
    ((name, state, step, loss, val_loss, speed, memory, left, last),) = rows(html)
    assert (name, state, step) == ("mine", "running", "100 of 400")
    assert speed == "3.10 k" or float(speed.split()[0]) == pytest.approx(3.1, abs=0.1)
    assert memory == "2.8 GiB"
    seconds = 300 * 65_536 / 3100
    hours, minutes = re.fullmatch(r"(\d) h (\d+) min", left).groups()
    assert 60 * int(hours) + int(minutes) == pytest.approx(seconds / 60, rel=0.03)
    assert float(loss) < 5 > float(val_loss)
    assert last.endswith("UTC")
    assert "The run is running. About 1 h" in html
    assert 'id="live"' in html


def test_a_killed_run_is_told_from_one_at_work(make_run, watch):
    run = make_run("mine", steps=20, status="running")
    killed(run)
    html = shown(watch(run))
    assert rows(html)[0][1] == "killedthe same command line continues it"
    assert "It was killed after step 20 of 20: no process holds it" in html
    (run / "status.json").write_text('{"status": "preempted", "reason": "SIGTERM; the same line continues"}')
    assert rows(shown(watch(run)))[0][1] == "preemptedSIGTERM; the same line continues"
    killed(run)
    assert "killed" in write_report([run], run / "report.html").read_text()


def test_a_process_that_records_nothing_is_silent(make_run, watch):
    run = make_run("mine", steps=20, status="running")
    running(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    quick = [line | ({"step_ms": 100} if "loss" in line else {}) for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in quick))
    page = watch(run)
    assert rows(shown(page))[0][1] == "running"
    before = page("").tag
    old = os.stat(run / "metrics.jsonl").st_mtime - 600
    for name in os.listdir(run):
        os.utime(run / name, (old, old))
    assert page("").tag != before
    assert rows(shown(page))[0][1].startswith("silentits process lives")


def test_a_diverged_run_says_why(make_run, watch):
    run = make_run("mine", steps=20)
    reason = "Diverged: 10 skipped steps in a row, the last at step 21"
    (run / "status.json").write_text(json.dumps({"status": "failed", "reason": reason}))
    make_run.append(run, '{"event": "skip", "step": 21, "reason": "the loss is not finite"}\n')
    html = shown(watch(run))
    assert rows(html)[0][1].startswith("divergedDiverged: 10 skipped steps")
    assert "mine: skip at step 21, the loss is not finite" in html
    assert "The run failed after step 20 of 20: 10 skipped steps" in html


def test_a_run_that_appears_later_is_shown_then(make_run, watch, tmp_path):
    page = watch(tmp_path / "runs" / "later")
    assert "waits for the first run" in shown(page)
    before = page("").tag
    assert page("").tag == before
    make_run("later", steps=5)
    assert page("").tag != before
    assert "5 of 5" in shown(page)


def test_only_a_change_makes_the_page_again(make_run, watch):
    now = [0.0]
    run = make_run("mine", steps=20)
    page = watch(run, clock=lambda: now[0])
    first = page("")
    html = first.html()
    assert page("").tag == first.tag
    make_run.append(run, '{"step": 21, "loss": 3.0}\n')
    second = page("")
    assert second.tag != first.tag
    assert second.html() != html


def test_a_page_that_took_long_rests_unless_the_run_ends(make_run, watch):
    ticks = iter([0, *(10.0 * i for i in range(1, 1000))])  # making a page takes ten seconds
    now = [0.0]

    def clock():
        now[0] = next(ticks) if tick[0] else now[0]
        return now[0]

    tick = [True]
    run = make_run("mine", steps=20, status="running")
    running(run)
    page = watch(run, clock=clock)
    first = page("")
    first.html()
    tick[0] = False
    make_run.append(run, '{"step": 21, "loss": 3.0}\n')
    assert page("").tag == first.tag, "it rests for ninety seconds"
    now[0] += 91
    assert page("").tag != first.tag
    now[0] -= 91
    killed(run)
    assert page("").tag != first.tag, "an end is shown at once"


def test_a_comparison_shows_the_runs_to_come_and_calls_its_verdicts_interim(make_run, watch, tmp_path):
    folder = tmp_path / "runs" / "compared"
    make_run.plan(folder, "bf16", "mxfp8", "mxfp4", steps=200)
    page = watch(folder)
    assert [row[:3] for row in rows(shown(page))] == [
        [n, "waiting", "0 of 200"] for n in ("bf16", "mxfp8", "mxfp4")
    ]
    for name in ("mxfp8", "bf16"):  # found in the order of the plan, not of their names or times
        make_run(f"compared/{name}", recipe=name, worse=0.1 * (name == "mxfp8"))
    running(folder / "mxfp8")
    html = shown(page)
    assert [row[1] for row in rows(html)] == ["done", "running", "waiting"]
    assert "3 runs: 1 done, 1 running, 1 waiting." in html
    assert "Verdicts are interim until every run is done" in html
    assert "2 runs compared" in html
    assert "reference" in html
    make_run("compared/mxfp4", recipe="mxfp4", worse=0.5)
    running(folder / "mxfp8")
    (folder / "mxfp8" / "status.json").write_text('{"status": "done"}')
    html = shown(page)
    assert "interim" not in html
    assert "3 runs compared" in html


def test_runs_of_another_machine_are_known_by_their_rows(make_run, watch, tmp_path):
    folder = tmp_path / "runs" / "ladder"
    make_run.plan(folder, "bf16", "mxfp8", "mxfp4")
    planned = json.loads((folder / "comparison.json").read_text())
    (folder / "comparison.json").write_text(json.dumps(planned | {"rows": str(tmp_path / "runs.csv")}))
    page = watch(folder)
    assert [row[1] for row in rows(shown(page))] == ["waiting"] * 3
    head = "arm,seed,rung,tokens,own_loss,bf16_loss,status\n"
    (tmp_path / "runs.csv").write_text(head + "bf16,1,1,9,3.5,3.5,done\nmxfp8,1,1,9,,,diverged\n")
    assert [row[1:5] for row in rows(shown(page))] == [
        ["done", "200 of 200", "-", "3.5000"],
        ["diverged", "200 of 200", "-", "-"],
        ["waiting", "0 of 200", "-", "-"],
    ]


def test_nothing_is_compared_before_the_reference_has_begun(make_run, watch, tmp_path):
    make_run.plan(tmp_path / "runs" / "compared", "bf16", "mxfp8")
    make_run("compared/mxfp8", recipe="mxfp8")
    html = shown(watch(tmp_path / "runs" / "compared"))
    assert "No run can be drawn yet" in html
    assert [row[1] for row in rows(html)] == ["waiting", "done"]


@pytest.mark.parametrize("name", ["../secret", "/etc", "..", ""])
def test_a_plan_cannot_name_a_run_elsewhere(make_run, watch, tmp_path, name):
    make_run("secret")
    make_run.plan(tmp_path / "runs" / "compared", "bf16", name)
    make_run("compared/bf16", recipe="bf16")
    assert "secret" not in shown(watch(tmp_path / "runs" / "compared"))


def test_a_folder_lists_runs_and_comparisons_with_a_page_for_each(make_run, watch, tmp_path):
    root = tmp_path / "runs"
    make_run("alone", steps=20)
    make_run.plan(root / "compared", "bf16", "mxfp8", steps=20)
    make_run("compared/bf16", recipe="bf16", steps=20)
    make_run("older/bf16", recipe="bf16", steps=20)
    make_run("older/fp8", steps=20)
    (root / "older" / "report.html").write_text("")
    page = watch(root)
    html = shown(page)
    assert [row[0] for row in rows(html)] == [
        "alone",
        "compared: 1 of 2 runs ended",
        "older: 2 of 2 runs ended",
    ]
    keys = re.findall(r'<a href="(\w{12})/">', html)
    assert len(set(keys)) == 3
    alone, compared, older = (shown(page, f"{key}/") for key in keys)
    assert "<h1>alone</h1>" in alone
    assert '<a href="../">all runs</a>' in alone
    assert [row[1] for row in rows(compared)] == ["done", "waiting"]
    assert "2 runs compared" in older
    assert "mxfp8" not in older
    assert 'id="live"' not in page(f"{keys[0]}/save").html()
    assert page(f"{keys[0]}/save").name == "alone.html"
    shutil.rmtree(root / "alone")
    assert page(f"{keys[0]}/") is None


@pytest.mark.parametrize("address", ["../", "alone/", "x", "save/", "etc/passwd", "000000000000/"])
def test_other_addresses_have_no_page(make_run, watch, tmp_path, address):
    make_run("alone", steps=5)
    assert watch(tmp_path / "runs")(address) is None


def test_several_runs_are_compared_with_the_first(make_run, watch):
    worse, better = make_run("a/run", recipe="mxfp4", worse=0.5), make_run("b/run", recipe="bf16")
    html = shown(watch(better, worse))
    assert "2 runs compared" in html
    assert [run.name for run in subjects([better, worse])[0][0].paths] == ["run", "run"]
    assert "b/run" in html


def test_a_run_with_a_broken_file_says_so(make_run, watch):
    run = make_run("mine", steps=5)
    (run / "config.toml").write_text("steps = = 3")
    html = shown(watch(run))
    assert "is not valid TOML" in html
    assert rows(html)[0][1].startswith("broken")


def test_a_live_page_asks_its_own_server_and_nothing_else(make_run, watch):
    html = watch(make_run("mine", steps=5))("").html()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "//" not in re.sub(r"http://www\.w3\.org/2000/svg|^\s*//.*$| // .*$", "", html, flags=re.M)


def test_names_from_a_disk_are_text_and_never_markup(make_run, watch, tmp_path):
    make_run('<img src=x onerror="alert(1)">', steps=3)
    page = watch(tmp_path / "runs")
    assert "<img" not in shown(page)
    key = re.findall(r'<a href="(\w{12})/">', shown(page))[0]
    assert "<img" not in shown(page, f"{key}/")
