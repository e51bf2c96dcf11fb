import pytest
import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.runs.monitor import hardware


def test_auto_takes_the_gpu_if_there_is_one():
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert hardware.choose_device("auto").type == kind
    assert hardware.choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("wish", "gpus", "words"),
    [
        *(
            (wish, 0, "unknown device .*auto, cpu, cuda")
            for wish in ("cudax", "cpu:x", "auto:1", "cuda:", "")
        ),
        *((wish, 0, f"device = '{wish}', .* sees no GPU; use --device cpu") for wish in ("cuda", "cuda:1")),
        ("cuda:2", 2, r"device = 'cuda:2', .* last GPU .* 'cuda:1'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(wish, gpus, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert not gpus or hardware.choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UserError, match=words):
        hardware.choose_device(wish)
