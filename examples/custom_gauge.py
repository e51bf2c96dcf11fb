"""A custom gauge.

Gauges read what casts do in any loop. A custom one is a function of a tensor as it came and as the GEMM
sees it.
"""

import torch

import narrowgauge as ng

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
ng.convert(model, "mxfp4")
optimizer = ng.AdamW(model.parameters(), recipe="mxfp4", lr=1e-3)
kurtosis = {"kurtosis": lambda x, seen: x.pow(4).mean() / x.square().mean() ** 2}
with ng.gauges(model, own=kurtosis) as gauges:
    for _ in range(3):
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(gauges.map())
print([(row.layer, round(row["kurtosis"], 2)) for row in gauges.map() if row.place == "fprop.x"])
gauges.report("gauges.html")
