"""A probe of a trained model, and a forecast.

What recipes would do to this model, without training; and what published runs say about larger ones.
"""

import narrowgauge as ng

run = ng.train(
    "bf16",
    "runs/probed",
    quiet=True,
    model={"dim": 64, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_dim": 128, "vocab_size": 320},
    data={"source": "text.txt", "tokenizer": "bytes", "sequence_length": 32},
    training={"steps": 4, "batch_size": 4, "micro_batch_size": 4, "threads": 1},
    validation={"batches": 1},
)
probes = ng.probe(
    run.path, recipes=["mxfp8", "nvfp4", {"name": "half", "fprop": "mxfp4"}], draws=2, batches=2
)
print(probes)
print(ng.sensitivity(run.path, to="mxfp4", batches=2).worst)
print(ng.predict(["mxfp8", "nvfp4"], params=8e9, tokens=1e12))
