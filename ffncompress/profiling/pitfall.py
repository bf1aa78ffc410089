"""The pitfall, shown: the same linear layer trained by SGD and by Adam, beside its closed form.

Activations are ill-conditioned. Gradient descent shrinks the error along an eigenvector of the inputs' covariance by
1 - rate * value a step, and the rate is bounded by the largest value: along the small ones it hardly moves. A "linear
baseline" that was trained therefore understates how linear a block is, and by how much depends on the optimiser.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ffncompress.profiling.records import Trained
from ffncompress.runtime.workers import Workers

STEPS, BATCH, POINTS = 2000, 256, 24
ADAM_RATES = (1e-3, 1e-2)
SGD_SHARES = (0.1, 0.5)  # of 1 / (largest eigenvalue): above twice that it diverges


def train_layers(
    x: Tensor, y: Tensor, held_x: Tensor, held_y: Tensor, seed: int, workers: Workers | None = None
) -> list[Trained]:
    """A linear layer trained each way: its held-out R2 over steps; of each optimiser the better rate is kept."""
    centred = (x - x.mean(0)).double()
    largest = torch.linalg.eigvalsh(centred.T @ centred / len(x))[-1].item() + x.mean(0).square().sum().item()
    ways = [("SGD", share / largest) for share in SGD_SHARES] + [("Adam", rate) for rate in ADAM_RATES]

    def train(way: tuple[str, float]) -> Trained:
        return _train(*way, x, y, held_x, held_y, seed)

    tried = list(map(train, ways) if workers is None else workers.deal(ways, train))
    names = dict.fromkeys(name for name, _ in ways)
    return [max((each for each in tried if each.optimiser == name), key=lambda each: each.r2[-1]) for name in names]


def _train(name: str, rate: float, x: Tensor, y: Tensor, held_x: Tensor, held_y: Tensor, seed: int) -> Trained:
    torch.manual_seed(seed)
    layer = nn.Linear(x.shape[1], y.shape[1])
    nn.init.zeros_(layer.weight)  # R2 starts near zero, not far below it
    nn.init.zeros_(layer.bias)
    kind = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}[name]
    optimiser = kind(layer.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(seed)
    total = (held_y - held_y.mean(0)).double().square().sum()
    shown = sorted({round(STEPS ** (i / (POINTS - 1))) for i in range(POINTS)})
    r2: list[float] = []
    for step in range(1, STEPS + 1):
        at = torch.randint(len(x), (BATCH,), generator=generator)
        # the sum over features: the rate then means the same for every width
        loss = F.mse_loss(layer(x[at]), y[at], reduction="sum") / (2 * BATCH)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if step in shown:
            with torch.no_grad():
                error = (layer(held_x) - held_y).double().square().sum()
            r2.append(1 - (error / total).item())
    return Trained(optimiser=name, rate=rate, steps=shown, r2=r2)
