"""transformers 5.24.0: Trainer resumes a Mixtral with untrained experts.

The checkpoint has the experts under the names of older releases (`block_sparse_moe.experts.0.w1`), and
`Trainer` loads it into the new ones without renaming: a warning names missing and unexpected keys, and
training continues from fresh experts and a fresh router. `from_pretrained` renames them. Due: every line
True.
"""

import tempfile, torch, transformers as t

names = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_local_experts"]
sizes = dict(zip(names, (32, 32, 1, 2, 2)), num_key_value_heads=2, vocab_size=64)
folder, data = tempfile.mkdtemp(), [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
facts = t.TrainingArguments(folder, max_steps=1, save_steps=1, report_to=[], use_cpu=True)
make = lambda: t.Trainer(t.MixtralForCausalLM(t.MixtralConfig(**sizes)), facts, train_dataset=data)
(one := make()).train(), (two := make()).train(resume_from_checkpoint=folder + "/checkpoint-1")
for (name, a), b in zip(one.model.named_parameters(), two.model.parameters()):
    print(torch.equal(a, b), name) if "mlp" in name or "lm_head" in name else None
# prints:
#   False model.layers.0.mlp.gate.weight
#   False model.layers.0.mlp.experts.gate_up_proj
#   False model.layers.0.mlp.experts.down_proj
#   True lm_head.weight
