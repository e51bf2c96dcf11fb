"""A user without a home directory, and names that only look like one's."""

import os
import pwd

import pytest

from narrowgauge.system.errors import UserError
from narrowgauge.system.files import cache_directory, user_path
from narrowgauge.trainer.cli.main import main
from narrowgauge.trainer.data import split_sources
from narrowgauge.trainer.data.loading.dataset import why_absent
from narrowgauge.trainer.data.tokenization.tokenizer import tokenizer_identity


@pytest.fixture
def homeless(monkeypatch):
    """Neither HOME nor an entry among the users, as in a container that runs with any number."""

    def none(_):
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "NARROWGAUGE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", none)
    monkeypatch.setattr(pwd, "getpwnam", none)


def test_the_cache_is_where_the_environment_says(homeless, tmp_path, monkeypatch):
    """Without a home, a temporary folder of the user."""
    assert cache_directory().is_absolute()
    assert cache_directory().name == f"narrowgauge-{os.geteuid()}"
    for variable, folder in {
        "HOME": tmp_path / ".cache" / "narrowgauge",
        "XDG_CACHE_HOME": tmp_path / "narrowgauge",
        "NARROWGAUGE_CACHE": tmp_path,
    }.items():
        monkeypatch.setenv(variable, str(tmp_path))
        assert cache_directory() == folder


def test_a_name_without_a_home_stands_for_itself(homeless, tmp_path, monkeypatch):
    for name in ("~", "~/x", "~nobody-here/x", "~data", "~data/*.txt"):
        assert str(user_path(name)) == name
        assert split_sources(name) == [name]
        assert name in why_absent(name)
        with pytest.raises(UserError, match="tokenizer"):
            tokenizer_identity(name)
    monkeypatch.chdir(tmp_path)  # a folder may have a tilde
    (tmp_path / "~data").mkdir()
    (tmp_path / "~data" / "a.txt").write_text("text\n" * 99)
    assert why_absent("~data") == why_absent("~data/*.txt") == ""


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("words", [["plan", "--model", "debug", "--device", "cpu"], ["doctor", "--json"]])
def test_a_verb_works_without_a_home(homeless, capsys, words):
    assert main(words) in (0, 1), capsys.readouterr().err
    assert "Traceback" not in capsys.readouterr().err
