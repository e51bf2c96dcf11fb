"""The process whose arithmetic is pinned, for all tests of golden digits."""

from collections.abc import Iterator

import pytest

from golden.runs import Worker, worker


@pytest.fixture(scope="session")
def pinned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with worker(tmp_path_factory.mktemp("golden")) as process:
        yield process
