"""The runs that faults are tried on, shared by all tests of a session."""

import pytest

from support.fault_runs import Runs


@pytest.fixture(scope="session")
def _runs(narrowgauge, line, look, tmp_path_factory):
    return Runs(narrowgauge, line, look, tmp_path_factory.mktemp("faults"))


@pytest.fixture
def runs(_runs):
    yield _runs
    _runs.end_all()


@pytest.fixture
def out(tmp_path):
    """A run directory to be."""
    return tmp_path / "run"
