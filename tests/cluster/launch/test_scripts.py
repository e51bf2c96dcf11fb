"""The written scripts, as bash and as what they do: start a run, hand signals on, wait for the save."""

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from narrowgauge.trainer.cli.main import main

ROOT = "runs/debug-stdlib-fp8"

LARGE = ("train", "--training.batch_size", "48")  # for 16 and 24 processes

# Instead of the program: prints how it was started, and ends by WANTED after a signal.
STANDS_IN = """\
import json, os, pathlib, signal, sys, time
if os.environ.get("WANTED"):
    asked = []
    for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(n, lambda n, frame: asked.append(signal.Signals(n).name))
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG", "OMP_NUM_THREADS")
place = {k: os.environ.get(k) for k in names}
place["words"], place["folder"] = sys.argv[1:], os.getcwd()
rank = place["RANK"] or "0"
here = pathlib.Path(os.environ["HERE"])
(here / f"{rank}.part").write_text(json.dumps(place))
(here / f"{rank}.part").rename(here / f"{rank}.json")
if os.environ.get("WANTED"):
    while not asked:
        time.sleep(0.01)
    time.sleep(0.3)  # the save
    (here / f"{rank}.asked").write_text(" ".join(asked))
    if rank == "0":
        run = pathlib.Path("RUN_DIR")
        run.mkdir(parents=True, exist_ok=True)
        (run / "status.json").write_text(json.dumps({"status": "preempted", "reason": "SIGNAL"}) + "\\n")
    sys.exit(int(os.environ["WANTED"]))
""".replace("RUN_DIR", ROOT)


@pytest.fixture
def write(tmp_path, monkeypatch, capsys):
    """Write a script in an empty folder; returns its path."""
    folder = tmp_path / "a folder; with 'quotes' and $HOME"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def do(*words: str, train: tuple[str, ...] = ("train", "--log.every", "3")):
        assert main(["launch", *words, "--out", "script.sh", "--", *train]) == 0, capsys.readouterr().err
        path = folder / "script.sh"
        subprocess.run(["bash", "-n", path], check=True)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", path], check=True)
        assert path.stat().st_mode & stat.S_IXUSR
        assert "set -euo pipefail" in path.read_text()
        return path

    return do


SRUN = """\
#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >> "$HERE/srun"; shift; done
SLURM_PROCID=0 SLURM_LOCALID=0 exec "$@"
"""
SCONTROL = '#!/bin/bash\necho "$*" >> "$HERE/scontrol"\n'


@pytest.fixture
def start(tmp_path):
    """Start a script with a package `narrowgauge` that stands in, and a stub of srun and scontrol."""
    path, started = tmp_path / "path", []
    (path / "narrowgauge").mkdir(parents=True)
    (path / "narrowgauge" / "__init__.py").touch()
    (path / "narrowgauge" / "__main__.py").write_text(STANDS_IN)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (path / name).write_text(text)
        (path / name).chmod(0o755)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "NCCL_"))}
    environ |= {"HERE": str(tmp_path), "PYTHONPATH": str(path), "PATH": f"{path}:{os.environ['PATH']}"}
    environ |= {"SLURM_JOB_ID": "42", "SLURMD_NODENAME": "node1"}

    def do(script, real: bool = False, **more: str):
        ours = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")} if real else {}
        how = {"stderr": subprocess.PIPE, "text": True, "cwd": tmp_path, "start_new_session": True}
        started.append(subprocess.Popen(["bash", script], env=environ | ours | more, **how))
        return started[-1]

    yield do
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def told(tmp_path, rank: int = 0) -> dict:
    """What a process printed when it started."""
    file = tmp_path / f"{rank}.json"
    end = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    return json.loads(file.read_text())


def test_torchrun_on_two_nodes_needs_to_be_told_where(write, start):
    script = write("--torchrun", "--nodes", "2", "--site", "azure-ndv5", train=LARGE)
    text = script.read_text()
    for word in ('--nnodes "$NNODES"', '--node-rank "$NODE_RANK"', "--nproc-per-node 8", "NNODES:-2"):
        assert word in text
    assert "MASTER_ADDR: set it to the host name of node 0" in start(script).communicate(timeout=20)[1]


TORCHRUN, SLURM = "--torchrun --gpus-per-node 2", "--slurm --gpus-per-node 2 --time 01:00:00"
#: How it is started, the signal, how the run ends, the signal that the run gets, and the job's last command.
SIGNALS = [
    (TORCHRUN, signal.SIGTERM, 75, "SIGTERM", ""),
    (SLURM, signal.SIGUSR1, 75, "SIGUSR1", "requeue 42\n"),  # the time is up and the run has saved
    (SLURM, signal.SIGUSR1, 1, "SIGUSR1", ""),  # the save failed
    (SLURM, signal.SIGUSR1, 0, "SIGUSR1", ""),  # the last step was the last
    (SLURM, signal.SIGTERM, 75, "SIGUSR1", ""),  # the job was cancelled
    (TORCHRUN, signal.SIGINT, 75, "SIGINT", ""),
]


@pytest.mark.tier("thorough", nightly=5)
@pytest.mark.parametrize(("how", "number", "code", "asked", "command"), SIGNALS)
def test_the_script_hands_the_signal_on_waits_and_ends_as_the_run(
    write, start, tmp_path, how, number, code, asked, command
):
    """Ctrl-C is sent by the terminal to all that are in the foreground."""
    process, ranks = start(write(*how.split()), WANTED=str(code)), (0, 1) if how == TORCHRUN else (0,)
    for rank in ranks:
        told(tmp_path, rank)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert {(tmp_path / f"{rank}.asked").read_text() for rank in ranks} == {asked}
    scontrol = tmp_path / "scontrol"
    assert (scontrol.read_text() if scontrol.exists() else "") == command


@pytest.mark.tier("thorough")  # torchrun around a real run
def test_a_real_run_saves_at_the_time_limit_and_the_same_script_ends_it(write, start, line, look, tmp_path):
    out = tmp_path / "run"
    words = line({"training.steps": 60, "checkpoint.every": 1000})
    script = write("--slurm", train=(*words, "--out", str(out)))
    process = start(script, real=True)
    end = time.monotonic() + 60
    while not look(out).has_step(3)():
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "stopped by SIGUSR1" in err
    assert (tmp_path / "scontrol").read_text() == "requeue 42\n"
    again = start(script, real=True)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert json.loads((out / "status.json").read_text())["status"] == "done"


def test_slurm_without_a_signal_gives_the_code_of_the_run(write, start, tmp_path):
    script = write("--slurm", "--site", "azure-ndv5", "--nodes", "3", train=LARGE)
    process = start(script, RANK="0", WORLD_SIZE="1")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    place = told(tmp_path)
    assert place["words"] == list(LARGE)
    assert place["folder"] == str(script.parent)
    assert (place["RANK"], place["LOCAL_RANK"], place["WORLD_SIZE"]) == ("0", "0", "24")
    assert (place["MASTER_ADDR"], place["MASTER_PORT"], place["NCCL_DEBUG"]) == ("node1", "15042", "WARN")
    options = (tmp_path / "srun").read_text().splitlines()
    assert {"--nodes=3", "--ntasks=24", "--ntasks-per-node=8", "--kill-on-bad-exit=0"} <= set(options)
    script.write_text(script.read_text().replace("\nsrun ", "\nsrun-not-there "))
    process = start(script)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, "srun-not-there" in err) == (127, True)


def test_what_sbatch_reads(write, capsys):
    frontier = ("--slurm", "--site", "frontier", "--nodes", "64", "--time", "1-00:00:00", "--account", "abc1")
    text = write(*frontier, train=("train", "--training.batch_size", "512")).read_text()
    head = text.split("\nset -euo")[0].splitlines()
    assert head[0] == "#!/bin/bash"
    assert all(line.startswith("#") or not line for line in head)
    options = {line.removeprefix("#SBATCH ") for line in head if line.startswith("#SBATCH ")}
    assert {
        *("--nodes=64", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=7"),
        *("--time=1-00:00:00", "--account=abc1", "--partition=extended"),
        *("--requeue", "--open-mode=append", "--signal=B:USR1@300"),
    } <= options
    assert "export NCCL_SOCKET_IFNAME=hsn0" in text
    assert "export SLURM_GPUS_PER_TASK=1" in text
    assert "recipe fp8 is emulated" in capsys.readouterr().out, "the site's GPUs have no FP8"
    # Compiled kernels lie on the node's own disk: not in a home on a file server, for 512 processes at once.
    assert 'export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$local_cache/triton}"' in text
    assert text.index("local_cache=/tmp/") < text.index("TORCHINDUCTOR_CACHE_DIR") < text.index("PYTHON=")
    assert sys.executable in text, "the Python is the one that wrote it"
    array = write("--slurm", "--array", "3", train=("compare", "--recipes", "bf16,fp8"))
    assert "#SBATCH --array=0-2\n" in array.read_text()


def test_a_short_limit_has_a_short_warning_and_a_cpu_run_asks_for_no_gpus(write, capsys):
    short = ("--slurm", "--time", "00:10:00", "--gpus-per-node", "4", "--nodes", "1")
    text = write(*short, train=("train", "--device", "cpu", "--recipe", "bf16")).read_text()
    assert "--signal=B:USR1@150" in text
    assert "--ntasks-per-node=4" in text
    assert "gpu" not in text.replace(sys.executable, "").lower()
    assert "is emulated" not in capsys.readouterr().out


#: Frontier's bins of July 2026: a small job has two hours in `batch`, and 24 in `extended`.
BINS = {
    "--nodes 64": ("extended", "24:00:00"),
    "--nodes 128": ("batch", "06:00:00"),
    "--nodes 2 --time 02:00:01": ("extended", "02:00:01"),
    "--nodes 64 --partition reserved --time 2-00:00:00": ("reserved", "2-00:00:00"),
}


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("words", BINS)
def test_a_job_gets_a_partition_that_takes_it(words, write, capsys):
    (partition, time), train = BINS[words], ("train", "--training.batch_size", "1024", "--recipe", "bf16")
    text = write("--slurm", "--site", "frontier", *words.split(), train=train).read_text()
    assert {f"#SBATCH --partition={partition}", f"#SBATCH --time={time}"} <= set(text.splitlines())
    assert f"jobs of at most {time} in partition {partition}, charged" in capsys.readouterr().out


LONG = "--slurm --site frontier --nodes 128 --time 12:00:00 --out s.sh -- train --batch-size 1024"
MISTAKES = [
    ("--slurm --out s.sh -- train --log.evry 3", "'--log.every'"),
    ("--slurm --out s.sh -- train --recipe mxpf4", "'mxfp4'"),
    ("--out s.sh -- train", "add --slurm or --torchrun"),
    ("--slurm -- train", "--out SCRIPT"),
    ("--slurm --time 5 --out s.sh -- train", "write HH:MM:SS"),
    ("--slurm --account a;b --out s.sh -- train", "--account is 'a;b'"),
    (LONG, "each partition takes 128 nodes for at most 6 hours"),
    ("--torchrun --time 01:00:00 --out s.sh -- train", "--time is Slurm's"),
    ("--slurm --out mine.txt -- train", "is not from launch"),
    ("--torchrun --nodes 3 --gpus-per-node 3 --out s.sh -- train", "set --training.batch_size 9"),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES)
def test_a_mistake_is_one_sentence_and_nothing_is_written(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["launch", *words.split(" ")]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("stdlib", None),
        ("txt.txt", "WARNING on this machine, data source 'txt.txt' does not exist; the nearest path is"),
        ("text.txt,corpora/mine", "'corpora/mine' does not exist: there is no 'corpora'"),
    ],
)
def test_data_that_are_not_here_are_told_before_the_queue(source, said, write, capsys):
    Path("text.txt").write_text("text")
    write("--slurm", train=("train", "--data", source))
    warnings = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert len(warnings) == (said is not None)
    assert all(said in line for line in warnings)
