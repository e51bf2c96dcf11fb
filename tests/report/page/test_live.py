"""What a live page shows of what lies on disk, and when it ends."""

import os
import re

import pytest

from narrowgauge.trainer.laboratory.watch import LIVE, follow, write_pages
from narrowgauge.trainer.report import write_report


@pytest.fixture
def shown(tmp_path):
    """The page of paths without scripts and styles."""

    def shown(*paths):
        write_pages(paths, tmp_path / "page.html", is_live=True)
        html = (tmp_path / "page.html").read_text()
        return re.sub(r"<(script|style).*?</\1>", "", html, flags=re.S)

    return shown


def rows(html):
    """The texts of the cells of where runs stand."""
    table = html[html.index('class="standing"') :].partition("</table>")[0]
    lines = re.findall(r"<tr>(.*?)</tr>", table, flags=re.S)[1:]
    return [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", li)] for li in lines]


def states(html):
    return [row[1] for row in rows(html)]


def test_a_run_at_work_has_its_step_speed_and_time_left(make_run, shown):
    run = make_run("mine", steps=100)
    make_run.set(run, "steps = 100", "steps = 400")
    make_run.works(run)
    html = shown(run)
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
    make_run.ends(run, "preempted", "SIGTERM; rerun the same command to resume")


def diverged(make_run, run):
    make_run.ends(run, "failed", "Diverged: 10 skipped steps in a row, the last at step 21")
    make_run.append(run, '{"event": "skip", "step": 21, "reason": "the loss is not finite"}\n')


def silent(make_run, run):
    make_run.works(run)
    make_run.edit(run, lambda line: {"step_ms": 100} if "loss" in line else {})
    old = os.stat(run / "metrics.jsonl").st_mtime - 600
    for name in os.listdir(run):
        os.utime(run / name, (old, old))


def broken(make_run, run):
    (run / "config.toml").write_text("steps = = 3")


#: What became of a run, its state, and what the page says besides.
ENDS = [
    (killed, "killedthe same command line continues it", "after step 20 of 20: no process holds it"),
    (preempted, "preemptedSIGTERM; rerun the same command to resume", ""),
    (silent, "silentits process lives", ""),
    (diverged, "divergedDiverged: 10 skipped steps", "skip at step 21, the loss is not finite"),
    (diverged, "diverged", "The run failed after step 20 of 20: 10 skipped steps"),
    (broken, "broken", "is not valid TOML"),
]


@pytest.mark.parametrize(("how", "state", "words"), ENDS)
def test_a_run_that_no_longer_works_is_told_from_one_at_work(make_run, shown, how, state, words):
    run = make_run("mine", steps=20)
    make_run.works(run)
    assert states(shown(run)) == ["running"]
    how(make_run, run)
    html = shown(run)
    assert states(html)[0].startswith(state)
    assert words in html
    if how is killed:
        assert "killed" in write_report([run], run / "report.html").read_text()


def test_a_run_that_appears_later_is_followed_to_its_end(make_run, tmp_path):
    path, page = tmp_path / "runs" / "later", tmp_path / "runs" / "later" / LIVE
    assert write_pages([path], page)
    assert not path.exists(), "nothing is made where the run will be"
    make_run("later", steps=5)
    make_run.works(path)
    follow([path], page, lambda seconds: True)
    assert 'id="live"' not in page.read_text(), "the page that is left does not load itself again"
    assert write_pages([path], page, is_live=True)
    assert 'id="live"' in page.read_text()
    make_run.ends(path, "done")
    follow([path], page)
    assert "5 of 5" in page.read_text()
    assert 'id="live"' not in page.read_text()


def test_a_comparison_shows_the_runs_to_come_and_calls_its_verdicts_interim(make_run, shown, tmp_path):
    folder = tmp_path / "runs" / "compared"
    make_run.plan(folder, "bf16", "mxfp8", "mxfp4", steps=200)
    waiting = [[name, "waiting", "0 of 200"] for name in ("bf16", "mxfp8", "mxfp4")]
    assert [row[:3] for row in rows(shown(folder))] == waiting
    make_run("compared/mxfp8", recipe="mxfp8", worse=0.1)
    html = shown(folder)
    assert "<h1>" not in html, "the reference has not begun"
    assert states(html) == ["waiting", "done", "waiting"], "in the order of the plan"
    make_run("compared/bf16", recipe="bf16")
    make_run.works(folder / "mxfp8")
    html = shown(folder)
    assert states(html) == ["done", "running", "waiting"]
    for words in (
        "3 runs: 1 done, 1 running, 1 waiting.",
        "interim until every run is done",
        "2 runs compared",
    ):
        assert words in html
    make_run("compared/mxfp4", recipe="mxfp4", worse=0.5)
    make_run.ends(folder / "mxfp8", "done")
    html = shown(folder)
    assert "interim" not in html
    assert "3 runs compared" in html


def test_runs_of_another_machine_are_known_by_their_rows(make_run, shown, tmp_path):
    folder = tmp_path / "runs" / "ladder"
    make_run.plan(folder, "bf16", "mxfp8", "mxfp4", rows=str(tmp_path / "runs.csv"))
    assert states(shown(folder)) == ["waiting"] * 3
    head = "arm,seed,rung,tokens,own_loss,bf16_loss,status\n"
    (tmp_path / "runs.csv").write_text(head + "bf16,1,1,9,3.5,3.5,done\nmxfp8,1,1,9,,,diverged\n")
    assert [row[1:5] for row in rows(shown(folder))] == [
        ["done", "200 of 200", "-", "3.5000"],
        ["diverged", "200 of 200", "-", "-"],
        ["waiting", "0 of 200", "-", "-"],
    ]


@pytest.mark.parametrize("name", ["../secret", "/etc", "..", ""])
def test_a_plan_cannot_name_a_run_elsewhere(make_run, shown, tmp_path, name):
    make_run("secret")
    make_run.plan(tmp_path / "runs" / "compared", "bf16", name)
    make_run("compared/bf16", recipe="bf16")
    assert "secret" not in shown(tmp_path / "runs" / "compared")


def test_a_folder_lists_runs_and_comparisons_with_the_page_of_each(make_run, tmp_path):
    root = tmp_path / "runs"
    make_run("alone", steps=20)
    (root / "alone" / "report.html").write_text("")
    make_run.plan(root / "compared", "bf16", "mxfp8", steps=20)
    make_run("compared/bf16", recipe="bf16", steps=20)
    make_run.works(make_run("deep/fp8", steps=20))
    make_run.works(root / "compared" / "bf16")
    assert write_pages([root], root / LIVE, is_live=True)
    html = (root / LIVE).read_text()
    found = [row[0] for row in rows(html)]
    assert found == ["alone", "compared: 0 of 2 runs ended", "deep/fp8"]
    assert re.findall(r'<a href="([^"]*)">', html) == [
        "alone/report.html",
        "compared/live.html",
        "deep/fp8/live.html",
    ]
    assert states((root / "compared" / LIVE).read_text()) == ["running", "waiting"]
    assert not (root / "alone" / LIVE).exists(), "its run has ended"
    make_run.ends(root / "deep" / "fp8", "done")
    assert write_pages([root], root / LIVE, is_live=True), "another run may begin"
    assert 'id="live"' not in (root / "deep" / "fp8" / LIVE).read_text()


def test_names_from_a_disk_are_text_and_never_markup(make_run, tmp_path):
    make_run.works(make_run('<img src=x onerror="alert(1)">', steps=3))
    write_pages([tmp_path / "runs"], tmp_path / LIVE, is_live=True)
    pages = [tmp_path / LIVE, *(tmp_path / "runs").glob(f"*/{LIVE}")]
    assert len(pages) == 2
    assert not any("<img" in page.read_text() for page in pages)
