"""What a live page shows of what lies on disk, and when it is made again."""

import os
import re
import shutil

import pytest

from narrowgauge.report import write_report
from narrowgauge.report.live.pages import Watched
from narrowgauge.report.live.subject import subjects


def shown(watched, address=""):
    """The page without scripts and styles."""
    return re.sub(r"<(script|style).*?</\1>", "", watched(address).html(), flags=re.S)


def rows(html):
    """The texts of the cells of where runs stand."""
    table = html[html.index('class="standing"') :].partition("</table>")[0]
    lines = re.findall(r"<tr>(.*?)</tr>", table, flags=re.S)[1:]
    return [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", li)] for li in lines]


def states(page):
    return [row[1] for row in rows(shown(page))]


@pytest.fixture
def watch():
    """Watches paths, and reports no more comparisons."""
    return lambda *paths, **how: Watched(paths, lambda subject, runs: ([], ""), **how)


def test_a_run_at_work_has_its_step_speed_and_time_left(make_run, watch):
    run = make_run("mine", steps=100)
    make_run.set(run, "steps = 100", "steps = 400")
    make_run.works(run)
    html = shown(watch(run))
    ((name, state, step, loss, val_loss, speed, memory, left, last),) = rows(html)
    assert (name, state, step, memory) == ("mine", "running", "100 of 400", "2.8 GiB")
    assert float(speed.split()[0]) == pytest.approx(3.1, abs=0.1)
    hours, minutes = re.fullmatch(r"(\d) h (\d+) min", left).groups()
    assert 60 * int(hours) + int(minutes) == pytest.approx(300 * 65_536 / 3100 / 60, rel=0.03)
    assert float(loss) < 5 > float(val_loss)
    assert last.endswith("UTC")
    assert "The run is running. About 1 h" in html
    assert 'id="live"' in html


def killed(make_run, run):
    make_run.works(run, is_alive=False)


def preempted(make_run, run):
    make_run.ends(run, "preempted", "SIGTERM; the same line continues")


def diverged(make_run, run):
    make_run.ends(run, "failed", "Diverged: 10 skipped steps in a row, the last at step 21")
    make_run.append(run, '{"event": "skip", "step": 21, "reason": "the loss is not finite"}\n')


def silent(make_run, run):
    make_run.works(run)
    make_run.edit(run, lambda line: {"step_ms": 100} if "loss" in line else {})
    old = os.stat(run / "metrics.jsonl").st_mtime - 600
    for name in os.listdir(run):
        os.utime(run / name, (old, old))


@pytest.mark.parametrize(
    ("how", "state", "words"),
    [
        (killed, "killedthe same command line continues it", ("after step 20 of 20: no process holds it",)),
        (preempted, "preemptedSIGTERM; the same line continues", ()),
        (silent, "silentits process lives", ()),
        (
            diverged,
            "divergedDiverged: 10 skipped steps",
            (
                "skip at step 21, the loss is not finite",
                "The run failed after step 20 of 20: 10 skipped steps",
            ),
        ),
    ],
)
def test_a_run_that_no_longer_works_is_told_from_one_at_work(make_run, watch, how, state, words):
    run = make_run("mine", steps=20)
    make_run.works(run)
    page = watch(run)
    assert states(page) == ["running"]
    before = page("").tag
    how(make_run, run)
    assert page("").tag != before
    html = shown(page)
    assert rows(html)[0][1].startswith(state)
    assert all(word in html for word in words)
    if how is killed:
        assert "killed" in write_report([run], run / "report.html").read_text()


def test_a_run_with_a_broken_file_says_so(make_run, watch):
    run = make_run("mine", steps=5)
    (run / "config.toml").write_text("steps = = 3")
    page = watch(run)
    assert "is not valid TOML" in shown(page)
    assert states(page)[0].startswith("broken")


def test_a_run_that_appears_later_is_shown_then(make_run, watch, tmp_path):
    page = watch(tmp_path / "runs" / "later")
    assert "waits for the first run" in shown(page)
    before = page("").tag
    assert page("").tag == before
    make_run("later", steps=5)
    assert page("").tag != before
    assert "5 of 5" in shown(page)


def test_only_a_change_makes_the_page_again(make_run, watch):
    run = make_run("mine", steps=20)
    page = watch(run, clock=lambda: 0.0)
    first = page("")
    html = first.html()
    assert page("").tag == first.tag
    make_run.append(run, '{"step": 21, "loss": 3.0}\n')
    assert page("").tag != first.tag
    assert page("").html() != html


def test_a_page_that_took_long_rests_unless_the_run_ends(make_run, watch):
    now, step = [0.0], [10.0]  # making a page takes ten seconds

    def clock():
        now[0] += step[0]
        return now[0]

    run = make_run("mine", steps=20)
    make_run.works(run)
    page = watch(run, clock=clock)
    first = page("")
    first.html()
    step[0] = 0
    make_run.append(run, '{"step": 21, "loss": 3.0}\n')
    assert page("").tag == first.tag, "it rests for ninety seconds"
    now[0] += 91
    assert page("").tag != first.tag
    now[0] -= 91
    killed(make_run, run)
    assert page("").tag != first.tag, "an end is shown at once"


def test_a_comparison_shows_the_runs_to_come_and_calls_its_verdicts_interim(make_run, watch, tmp_path):
    folder = tmp_path / "runs" / "compared"
    make_run.plan(folder, "bf16", "mxfp8", "mxfp4", steps=200)
    page = watch(folder)
    waiting = [[name, "waiting", "0 of 200"] for name in ("bf16", "mxfp8", "mxfp4")]
    assert [row[:3] for row in rows(shown(page))] == waiting
    make_run("compared/mxfp8", recipe="mxfp8", worse=0.1)
    assert "No run can be drawn yet" in shown(page), "the reference has not begun"
    assert states(page) == ["waiting", "done", "waiting"], "in the order of the plan"
    make_run("compared/bf16", recipe="bf16")
    make_run.works(folder / "mxfp8")
    html = shown(page)
    assert states(page) == ["done", "running", "waiting"]
    for words in (
        "3 runs: 1 done, 1 running, 1 waiting.",
        "Verdicts are interim until every run is done",
        "2 runs compared",
        "reference",
    ):
        assert words in html
    make_run("compared/mxfp4", recipe="mxfp4", worse=0.5)
    make_run.ends(folder / "mxfp8", "done")
    html = shown(page)
    assert "interim" not in html
    assert "3 runs compared" in html


def test_runs_of_another_machine_are_known_by_their_rows(make_run, watch, tmp_path):
    folder = tmp_path / "runs" / "ladder"
    make_run.plan(folder, "bf16", "mxfp8", "mxfp4", rows=str(tmp_path / "runs.csv"))
    page = watch(folder)
    assert states(page) == ["waiting"] * 3
    head = "arm,seed,rung,tokens,own_loss,bf16_loss,status\n"
    (tmp_path / "runs.csv").write_text(head + "bf16,1,1,9,3.5,3.5,done\nmxfp8,1,1,9,,,diverged\n")
    assert [row[1:5] for row in rows(shown(page))] == [
        ["done", "200 of 200", "-", "3.5000"],
        ["diverged", "200 of 200", "-", "-"],
        ["waiting", "0 of 200", "-", "-"],
    ]


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
    found = [row[0] for row in rows(html)]
    assert found == ["alone", "compared: 1 of 2 runs ended", "older: 2 of 2 runs ended"]
    keys = re.findall(r'<a href="(\w{12})/">', html)
    assert len(set(keys)) == 3
    alone, compared, older = (shown(page, f"{key}/") for key in keys)
    assert "<h1>alone</h1>" in alone
    assert '<a href="../">all runs</a>' in alone
    assert [row[1] for row in rows(compared)] == ["done", "waiting"]
    assert "2 runs compared" in older
    assert "mxfp8" not in older
    saved = page(f"{keys[0]}/save")
    assert ('id="live"' in saved.html(), saved.name) == (False, "alone.html")
    addresses = ("../", "alone/", "x", "save/", "etc/passwd", "000000000000/")
    assert [page(address) for address in addresses] == [None] * 6, "other addresses have no page"
    shutil.rmtree(root / "alone")
    assert page(f"{keys[0]}/") is None


def test_several_runs_are_compared_with_the_first(make_run, watch):
    worse, better = make_run("a/run", recipe="mxfp4", worse=0.5), make_run("b/run", recipe="bf16")
    html = shown(watch(better, worse))
    assert "2 runs compared" in html
    assert "b/run" in html
    assert [run.name for run in subjects([better, worse])[0][0].paths] == ["run", "run"]


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
