"""The launch script for torchrun: the same on each node, distinguished by MASTER_ADDR, NNODES and NODE_RANK.

On a single node torchrun finds a free port itself. It returns 1 after any signal, whatever its processes
returned, and kills them after 30 seconds: the script gives them longer, and reads from the run's
`status.json` whether they saved.

Source: torch/distributed/run.py and torch/distributed/launcher/api.py of PyTorch 2.13.
"""

from narrowgauge.cluster.launch.job_script import (
    GRACE_SECONDS,
    Job,
    command,
    script,
    setup,
    status_file,
    supervised,
    title,
)
from narrowgauge.cluster.launch.site import Site


def torchrun_script(job: Job, site: Site) -> str:
    """The script to run on each node, without a scheduler."""
    if job.nodes == 1:
        how = "on one node: bash this-script"
        meet = ["where=(--standalone) # a free port of this machine"]
    else:
        how = "on every node: MASTER_ADDR=HOST-OF-NODE-0 NODE_RANK=0 (1, 2, ...) bash this-script"
        meet = [
            "# Where the nodes meet: node 0. NODE_RANK is 0 on it, 1 on the next, and so on.",
            ': "${MASTER_ADDR:?set it to the host name of node 0}"',
            ': "${NODE_RANK:?set it to the number of this node, from 0}"',
            f'NNODES="${{NNODES:-{job.nodes}}}"',
            'MASTER_PORT="${MASTER_PORT:-29500}"',
            'where=(--nnodes "$NNODES" --node-rank "$NODE_RANK"',
            '  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")',
        ]
    start = [
        "trap 'woken=1 asked=INT' INT",
        f'"$PYTHON" -m torch.distributed.run --nproc-per-node {job.per_node} "${{where[@]}}" \\',
        f"  -m -- {command(job)} &",
    ]
    several = [
        "# torchrun would set this to 1 with a warning: the processes share the cores.",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"',
    ]
    return script(
        [
            "#!/usr/bin/env bash",
            *title(site, f"{job.nodes} node(s), {job.per_node} processes each; {how}"),
        ],
        setup(job, site),
        [
            *(several if job.per_node > 1 else ()),  # a single process on its node takes all cores
            "# How long signalled processes may take to save; torchrun's default is 30 s.",
            f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={GRACE_SECONDS}",
        ],
        meet,
        [
            "# USR1 would kill torchrun, so the script forwards TERM. A Ctrl-C reaches torchrun by itself.",
            *supervised(start, "TERM"),
        ],
        [
            "# torchrun returns 1 after a signal; the run's status records whether it saved.",
            f'if [[ $asked && $status != 0 ]] && grep -qs \'"status": "preempted"\' {status_file(job)}; then',
            "  status=75",
            "fi",
            'exit "$status"',
        ],
    )
