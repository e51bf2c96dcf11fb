"""Collectives of two processes: NCCL on two GPUs of a machine, gloo on a CPU."""

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException, spawn

from gpu.exchange import PROCESSES, exchange

ADVICE = "train on one GPU; NCCL_DEBUG=INFO shows why"


@pytest.mark.tier("thorough")
def test_two_processes_exchange_what_they_should(tmp_path, record_property):
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and torch.cuda.device_count() < PROCESSES:
        pytest.skip("it takes a second GPU")
    spawn(exchange, (tmp_path / "store", kind), nprocs=PROCESSES)
    if kind == "cuda":
        record_property("found", f"a sum of 256 MiB takes {(tmp_path / 'store.ms').read_text()} ms")


@pytest.mark.tier("thorough")
def test_a_wrong_sum_is_seen(tmp_path):
    with pytest.raises(ProcessRaisedException, match="a sum in torch"):
        spawn(exchange, (tmp_path / "store", "cpu", True), nprocs=PROCESSES)
