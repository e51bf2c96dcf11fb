"""The text of a trained run, opened again."""

from pathlib import Path

from narrowgauge.data import AUTO, Dataset, open_data
from narrowgauge.data.cache import Progress
from narrowgauge.runs.use.trained_model import TrainedRun


def run_data(trained: TrainedRun, source: str | None, progress: Progress | None = None) -> Dataset:
    """The run's own text, or another source encoded with the run's tokenizer."""
    data = trained.config.data
    is_made = data.tokenizer in (AUTO, "bytes") or data.tokenizer.startswith(("bpe-", "ids-"))
    use_run_tokenizer = source is not None or not (is_made or Path(data.tokenizer).exists())
    if use_run_tokenizer and trained.tokenizer_file is None:
        assert trained.tokenizer  # raises
    name = str(trained.tokenizer_file) if use_run_tokenizer else data.tokenizer
    return open_data(source or data.source, name, data.weights if source is None else (), progress)
