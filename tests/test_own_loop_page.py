"""The program of docs/how-to/your-own-loop.md runs as shown, and each row of its table has a test."""

import re

import pytest

from nn import test_own_loop, test_own_loop_state
from nn.own_loop import PAGE, ROWS
from support.markdown import blocks

OF_TWO_PROCESSES = {  # in distributed/test_data_parallel.py
    "`DistributedDataParallel`",
    "`ng.prepare_ddp`, then `DistributedDataParallel`",
    "`fully_shard` (FSDP2)",
    "`ng.fully_shard`",
    "`ng.fully_shard` on the meta device, then `to_empty`",
}
RESUME = "`ng.state_dict`, `ng.load_state_dict`: resume"  # optim/test_loop_state.py
#: In nn/test_stacked_experts.py.
MIXTURES = "mixtures of experts of transformers 5 (Mixtral, Qwen3-MoE, gpt-oss and others)"


@pytest.mark.tier("thorough")
def test_the_program_of_one_process_trains_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks(PAGE, "python")[:2]:
        exec(block, names)
    assert names["losses"][-1] < 0.9 * names["losses"][0]


def test_each_row_is_a_test():
    assert test_own_loop
    assert test_own_loop_state
    table = PAGE[PAGE.index("| | GEMMs") :].partition("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)[1:]
    assert sorted(rows) == sorted(ROWS | OF_TWO_PROCESSES | {RESUME, MIXTURES})
