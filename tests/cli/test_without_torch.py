"""The command where torch does not import, in separate processes: what it answers, why, and the fix.

A folder in front of all packages holds a torch that fails as real ones do, or a rule that there is none.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import narrowgauge as ng
from narrowgauge.cli.parsing.verbs import VERBS

SOURCE = Path(ng.__file__).parents[1]
ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
GLIBC = (
    "/lib64/libm.so.6: version `GLIBC_2.27' not found (required by "
    "/opt/venv/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so)"
)
CUDART = "libcudart.so.12: cannot open shared object file: No such file or directory"
FOLDERS = {
    "absent": {"sitecustomize.py": ABSENT.format(name="torch")},
    "cudart": {"torch/__init__.py": f"raise OSError({CUDART!r})"},
    "glibc": {"torch/__init__.py": f"raise ImportError({GLIBC!r})"},
    "crash": {"torch/__init__.py": "import os, signal; os.kill(os.getpid(), signal.SIGILL)"},
    "old": {
        "torch/__init__.py": "__version__ = '2.6.0'",
        "torch/version.py": "__version__ = '2.6.0+cu118'\ncuda = '11.8'\nhip = None\n",
        "torch-2.6.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.6.0\n",
    },
    "no-pydantic": {"sitecustomize.py": ABSENT.format(name="pydantic")},
    "no-rich": {"sitecustomize.py": ABSENT.format(name="rich")},
}


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs the command with one of the folders in front: (exit code, output, errors)."""
    root = tmp_path_factory.mktemp("sites")
    for folder, files in FOLDERS.items():
        for name, text in files.items():
            (root / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (root / folder / name).write_text(text)

    def run(folder, *words, **environment):
        ended = subprocess.run(
            [sys.executable, "-m", "narrowgauge", *words],
            check=False,
            capture_output=True,
            text=True,
            cwd=root,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{root / folder}:{SOURCE}"}
            | environment,
        )
        return ended.returncode, ended.stdout, ended.stderr

    return run


@pytest.mark.tier("thorough")
def test_help_version_and_a_typo_need_no_torch(command):
    for words in ([], ["--help"]):
        code, out, err = command("absent", *words)
        assert (code, err) == (0, "")
        for verb, row in VERBS.items():
            assert f"    {verb} " in out
            assert row.line.split()[0] in out
    assert command("absent", "--version") == (0, f"narrowgauge {ng.__version__}\n", "")
    code, out, err = command("absent", "trian")
    assert (code, out) == (2, "")
    assert err.startswith(
        "narrowgauge: unknown verb 'trian'; the nearest is 'train' (known: train, compare, "
    )
    code, out, err = command("absent", "--verison")
    assert (code, err) == (2, "narrowgauge: unknown option '--verison'; the nearest is '--version'\n")


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(
    ("folder", "why", "fix"),
    [
        ("absent", "torch is not installed", "python -m pip install torch"),
        ("cudart", f"torch does not import: {CUDART}", "install torch with its dependencies"),
        (
            "glibc",
            f"torch does not import: {GLIBC}",
            "it was built for glibc 2.27 or later: use a newer Linux",
        ),
        ("old", "torch 2.6.0 is too old", "install torch 2.11 or later"),
        ("no-pydantic", "the package pydantic is missing", "python -m pip install pydantic"),
    ],
)
def test_a_verb_says_why_it_cannot_start_and_what_to_do(command, folder, why, fix):
    code, out, err = command(folder, "train", "--steps", "1")
    assert (code, out) == (1, "")
    assert err.startswith(f"narrowgauge: {why}; ")
    assert fix in err
    assert "'narrowgauge doctor' looks at the whole machine" in err
    assert err.count("\n") == 1


@pytest.mark.tier("thorough")
def test_the_help_of_a_verb_needs_no_torch(command):
    code, out, err = command("absent", "train", "--help")
    assert (code, err) == (0, "")
    assert "Train a model, or continue a run that stopped.\n" in out
    assert "--recipe" in out


def test_the_help_of_a_verb_is_its_line_and_the_reason(command):
    code, out, err = command("no-pydantic", "train", "--help")
    assert (code, err.split(";")[0]) == (1, "narrowgauge: the package pydantic is missing")
    line = "Train a model, or continue a run that stopped."
    assert out == f"usage: narrowgauge train ...\n\n{line}\n"


@pytest.mark.tier("thorough")
def test_what_exists_is_listed_without_torch(command):
    for words in (
        ["formats"],
        ["formats", "e4m3"],
        ["models"],
        ["models", "llama3-1b"],
        ["recipes", "mxfp4"],
        ["recipes", "mxfp4", "--diff", "nvfp4"],
        ["recipes", "mxfp4", "--device", "rtx4090"],
        ["recipes", "fp8", "--to", "te"],
        ["recipes", "--device", "gfx942"],
        ["runs", "."],
    ):
        code, out, err = command("absent", *words)
        assert (code, err) == (0, ""), words
        assert out
    code, _, err = command("absent", "recipes")  # the table lists what is native on this machine
    assert (code, err.split(";")[0]) == (1, "narrowgauge: torch is not installed")


@pytest.mark.tier("thorough")
def test_a_mistake_in_a_line_is_answered_without_torch(command):
    code, out, err = command("absent", "train", "--stpes", "5")
    assert (code, out) == (2, "")
    assert err.startswith("narrowgauge: unknown option '--stpes'; the nearest is '--steps'")
    for words in (["train"], ["compare"], ["eval", "run"], ["sensitivity", "run", "--to", "mxfp4"]):
        code, _, err = command("absent", *words, "--data", "/no/such")
        assert (code, err.split(":")[:2]) == (2, ["narrowgauge", " data source '/no/such' does not exist"])


@pytest.mark.tier("thorough")
def test_one_process_of_a_job_says_it(command):
    for rank in ("0", "1"):
        place = {"TORCHELASTIC_RUN_ID": "x", "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}
        assert bool(command("absent", "train", **place)[2]) == (rank == "0")


@pytest.mark.tier("thorough")
@pytest.mark.parametrize(
    ("folder", "why", "fix"),
    [
        ("absent", "not installed", "python -m pip install torch"),
        ("cudart", f"it does not import: {CUDART}", "install torch with its dependencies"),
        ("crash", "it does not import: its process was killed by SIGILL", "choose a machine with AVX2"),
        ("old", "2.6.0+cu118, built for CUDA 11.8", "install torch 2.11 or later"),
    ],
)
def test_the_doctor_looks_at_the_rest_all_the_same(command, folder, why, fix):
    code, out, err = command(folder, "doctor", "--json", "--data", "a.txt", CXX="true")
    assert (code, err) == (1, "")
    items = {item["item"]: item for item in json.loads(out)}
    assert items["torch"]["status"] == "MISS"
    assert items["torch"]["found"] == why
    assert fix in items["torch"]["fix"]
    assert items["data"]["fix"] == "fix torch and the packages first (see above)"
    assert {"system", "python", "packages", "driver", "gpus", "launcher", "disk", "network"} <= set(items)
    assert not {"recipes", "nccl"} & set(items)


def test_the_doctor_without_its_own_package(command):
    code, out, err = command("no-rich", "doctor")
    assert (code, out) == (1, "")
    assert err.startswith("narrowgauge: the package rich is missing; python -m pip install rich; ")
