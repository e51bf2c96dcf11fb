"""Tasks of the lm-evaluation-harness, on an exported model.

The harness loads models through transformers, so a run is first exported to a temporary folder. The
evaluation uses the plain weights, without the arithmetic of the recipe.
"""

import importlib
import tempfile
from pathlib import Path
from typing import Any

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop import huggingface
from narrowgauge.trainer.runs.use.export import export_run


def harness_scores(
    run: Path,
    tasks: list[str],
    device: str,
    limit: int | None = None,
    task_folder: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """The results of a run, or of any model that `open_run` opens, by task and metric.

    The harness has the tasks, or YAML files in `task_folder` describe them; `limit` is the number of examples
    of each, None for all.
    """
    harness, manager = _harness()
    known = manager(include_path=None if task_folder is None else str(task_folder))
    if unknown := [task for task in tasks if not known.match_tasks([task])]:
        raise UserError(
            f"the lm-evaluation-harness knows no task {unknown[0]!r}; 'lm-eval ls tasks' lists them, and "
            "--task-folder names a folder of others"
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = run
        if not huggingface.is_folder(run):
            folder = Path(temporary) / "model"
            export_run(run, "hf", folder)
        evaluation = harness.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "float32"},
            tasks=tasks,
            task_manager=known,
            device=device,
            limit=limit,
            batch_size=1,
            bootstrap_iters=0,
        )
    results: dict[str, dict[str, Any]] = evaluation["results"]
    return results


def _harness() -> tuple[Any, Any]:
    """The package and its task manager, imported on demand because the import takes a second."""
    try:
        importlib.import_module("lm_eval.models.huggingface")
        return importlib.import_module("lm_eval"), importlib.import_module("lm_eval.tasks").TaskManager
    except ImportError as error:
        raise UserError(
            f"the lm-evaluation-harness cannot be imported ({error}); "
            "python -m pip install lm-eval transformers accelerate"
        ) from None
