"""A custom optimizer.

Any optimizer of torch's interface works with a recipe whose weights and moments are wide.
"""

import torch

import narrowgauge as ng


class Lion(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            p.sub_(self.defaults["lr"] * (0.9 * m + 0.1 * p.grad).sign())
            m.mul_(0.99).add_(p.grad, alpha=0.01)


model = ng.convert(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)), "nvfp4-row")
optimizer, x = Lion(model.parameters(), {"lr": 1e-3}), torch.randn(64, 64)
for _ in range(20):
    optimizer.zero_grad()
    loss = (model(x) - x[:, :1]).square().mean()
    loss.backward()
    optimizer.step()
