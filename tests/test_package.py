"""The package as it is built: every file other than code goes into the wheel, and the version is one."""

import re
import tomllib
from pathlib import Path

import narrowgauge as ng
from narrowgauge.cluster.doctor.facts import LIMITS, release

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGE = Path(ng.__file__).parent


def test_every_data_file_is_in_the_wheel():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["narrowgauge"]
    shipped = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    data = {p for p in PACKAGE.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert data == shipped
    assert {path.suffix for path in data} == {
        ".c",
        ".h",
        ".csv",
        ".json",
        ".toml",
        ".html",
        ".css",
        ".js",
        ".typed",
    }


def test_the_version_stands_in_one_place():
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "narrowgauge.__version__"}
    released = re.findall(
        r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert ng.__version__ == released[0]


def test_the_doctor_wants_what_the_package_needs():
    needed = dict(line.split(">=") for line in PROJECT["project"]["dependencies"])
    assert LIMITS["version"]["torch"] == release(needed.pop("torch"))
    assert LIMITS["packages"] == {name: release(version) for name, version in needed.items()}
    assert release(PROJECT["project"]["requires-python"]) == LIMITS["version"]["python"]


def test_no_message_names_a_package_that_is_not_to_be_had():
    for path in PACKAGE.rglob("*.py"):
        assert "install 'narrowgauge" not in path.read_text(encoding="utf-8"), path
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        assert "install 'narrowgauge" not in page.read_text(encoding="utf-8"), page
