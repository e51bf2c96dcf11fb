"""A gate in CI.

The script ends with an error if a change of a recipe costs more than the limit.
"""

import sys

import narrowgauge as ng

result = ng.compare(
    recipes=["bf16", "mxfp8"],
    seeds=2,
    gate="5%",
    out="runs/gate",
    quiet=True,
    model={"dim": 64, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_dim": 128, "vocab_size": 320},
    data={"source": "text.txt", "tokenizer": "bytes", "sequence_length": 32},
    training={"steps": 4, "batch_size": 4, "micro_batch_size": 4, "threads": 1},
    validation={"batches": 1},
)
for gate in result.gates:
    print(gate.name, gate.word, gate.reason)
if not result.passes:
    sys.exit(1)
