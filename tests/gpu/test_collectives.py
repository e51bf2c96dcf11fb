"""Collectives of two processes: NCCL on two GPUs of a machine, gloo on a CPU."""

import pytest
import torch
from torch.multiprocessing import spawn

from gpu.exchange import PROCESSES, exchange

ADVICE = "train on one GPU; NCCL_DEBUG=INFO shows why"


@pytest.mark.tier("thorough")
def test_two_processes_exchange_what_they_should(tmp_path):
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and torch.cuda.device_count() < PROCESSES:
        pytest.skip("it takes a second GPU")
    spawn(exchange, (tmp_path / "store", kind), nprocs=PROCESSES)
