"""A small corpus, a tiny configuration, and the command in separate processes."""

import os

# One thread a process, in this one and all that it starts, before anything imports torch: the tests are many
# processes on few cores. What is about threads sets its own.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
import support.shape_names  # noqa: F401  before anything imports narrowgauge

# isort: split
import gc
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from narrowgauge.quantization.passes.in_c import c_library
from narrowgauge.trainer.experiment.design import with_keys
from narrowgauge.trainer.runs.choices import ATTENTION, PRODUCTS
from support.interpreted import import_kernels
from support.processes import Narrowgauge, warm
from support.runs import Look, Values, write_text

pytest_plugins = ["support.cost", "support.fault_report", "support.made_runs", "support.tiers"]

# Nothing is asserted of the time that an example takes: another program may have the core.
settings.register_profile("narrowgauge", deadline=None)
settings.load_profile("narrowgauge")

import_kernels()

# A shell that starts the tests in the background lets them ignore Ctrl-C; what they start would inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that takes minutes begins first, in parallel with the others and not after them."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")


def pytest_collection() -> None:
    """Without garbage collections, which look through all modules and tests over and over."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What is there now stays to the end: no later collection looks through it."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Free it at the end: Triton's bindings report what is left as leaks."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Prepared corpora go here, and never to the user's cache."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NARROWGAUGE_CACHE", str(cache))
        patch.setenv(PRODUCTS, "onednn")  # not what a moment of this machine measures
        patch.setenv(ATTENTION, "torch")
        c_library()  # compiled now, and not in the middle of whichever test quantizes first
        yield cache


@pytest.fixture(scope="session")
def cache(_kept: Path) -> Path:
    """Where prepared corpora go."""
    return _kept


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def tiny(text: str) -> Callable[..., Values]:
    """Values of a run that takes a blink, with `{"section.key": value}` over them."""

    def make(changes: Mapping[str, Any] | None = None) -> Values:
        base = {
            "model": {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 64, "vocab_size": 257},
            "data": {"source": text, "tokenizer": "bytes", "sequence_length": 32},
            "training": {"steps": 6, "batch_size": 2, "micro_batch_size": 1, "device": "cpu"},
            "schedule": {"warmup_steps": 2},
            "recipe": {"name": "fp8"},
            "validation": {"every": 4, "batches": 2},
            "checkpoint": {"every": 2},
        }
        return with_keys(base, changes or {})

    return make


@pytest.fixture(scope="session")
def line(tiny: Callable[..., Values]) -> Callable[..., list[str]]:
    """The same run as the arguments of a command line, without --out."""

    def make(changes: Mapping[str, Any] | None = None) -> list[str]:
        pairs = [(f"--{s}.{k}", str(v)) for s, table in tiny(changes).items() for k, v in table.items()]
        return ["train", *(word for pair in pairs for word in pair)]

    return make


@pytest.fixture(scope="session")
def look() -> type[Look]:
    return Look


@pytest.fixture(scope="session")
def narrowgauge(_kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Narrowgauge]:
    """The command: call it to run it to its end, or `start` it."""
    with warm() as ask:
        yield Narrowgauge(ask, tmp_path_factory.mktemp("processes"))
