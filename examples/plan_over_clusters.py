"""A plan over clusters.

What a model takes on each machine, before one is rented.
"""

import narrowgauge as ng

for cluster in ("rtx4090", "h100", "b200"):
    plan = ng.plan(model="gpt2-debug", recipe="mxfp8", cluster=cluster, tokens=10**9)
    print(f"{cluster:8} {plan.memory_gib:.1f} GiB, {plan.days:.3g} days, {plan.cost} {plan.fits}")
plan.save("plan.json")
