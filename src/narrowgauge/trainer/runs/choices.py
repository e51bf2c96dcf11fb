"""The choices and defaults of a run's command-line options, and names that readers share; imports nothing."""

#: The number of steps that `train --profile` records.
PROFILED = 3
#: The formats of `export --to`.
EXPORT_FORMATS = ("hf", "llmc", "compressed-tensors", "modelopt", "gguf")
#: The value of `export --calibrate` for scales that the recipe remembers.
RECORDED = "recorded"
#: The servers of `served --with`, and the formats of `export` that each reads; the first is the default.
SERVERS = {
    "llama.cpp": ("gguf",),
    "transformers": ("hf", "compressed-tensors"),
    "compressed-tensors": ("compressed-tensors",),
    "vllm": ("compressed-tensors", "modelopt", "hf"),
}
#: Programs, and the formats of `export` that each reads: the answer to `export --to PROGRAM`.
READERS = SERVERS | {
    "sglang": SERVERS["vllm"],
    **dict.fromkeys(("tensorrt-llm", "trtllm"), ("modelopt", "hf")),
    **dict.fromkeys(("huggingface", "safetensors", "lm-eval"), ("hf",)),
    **dict.fromkeys(("llama-cpp", "ollama"), SERVERS["llama.cpp"]),
    **dict.fromkeys(("llm.c", "nanogpt"), ("llmc",)),
}
#: The tasks of `eval --task`.
TASKS = ("val", "hellaswag:FILE", "lm-eval:TASK,...")
#: The environment variables of the arithmetic of a CPU (`monitor.arithmetic`).
PRODUCTS, ATTENTION = "NARROWGAUGE_PRODUCTS", "NARROWGAUGE_ATTENTION"
#: The line of `recipe.toml` below which the guard's changes stand.
RAISED = "\n# Raised by the guard; a resume takes it from the checkpoint\n"
