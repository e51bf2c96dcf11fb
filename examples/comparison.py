"""A comparison in a notebook.

The last line of a cell shows the picture and the table.
"""

import narrowgauge as ng

result = ng.compare(
    recipes=["bf16", "mxfp8", {"name": "half", "fprop": "mxfp4"}],
    out="runs/notebook",
    quiet=True,
    model={"dim": 64, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_dim": 128, "vocab_size": 320},
    data={"source": "text.txt", "tokenizer": "bytes", "sequence_length": 32},
    training={"steps": 4, "batch_size": 4, "micro_batch_size": 4, "threads": 1},
    validation={"batches": 1},
)
print([(row["variant"], row["gap_percent"]) for row in result.rows()])
result.save("losses.svg")
result
