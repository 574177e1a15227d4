"""Run `.venv/bin/python -m examples.vicreg`: VICReg with the exact gradient of a large batch, in micro-batches.

VICReg computes variances over the whole batch. First the program computes the gradient in one pass over the whole
batch. It prints the errors of two other gradients: that of `ExactStep`, and that of the mean loss of small batches,
which is often used. Then it trains.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from examples.loop import draw_shapes, options, small_network
from peclr_dali import Batch, ColourConfig, ExactStep, GeometryConfig, VICReg, make_loader


def main() -> None:
    """Compare the gradients, then train."""
    args = options(__doc__, images=512, batch=128, micro_batch=16, epochs=8)
    # With batch norm, which sees a micro-batch at a time, one pass would be another function.
    network, loss = small_network(dim=64, norm=lambda width: nn.GroupNorm(8, width)), VICReg()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)

    def embed(batch: Batch, rows: slice) -> Tensor:
        """Both views of some rows of a batch, in one call: (2, n, D)."""
        images = torch.cat([view.image[rows] for view in batch.views]) / 255
        embeddings: Tensor = network(images)
        return embeddings.unflatten(0, (2, -1))

    def exact(micro_batch: int) -> ExactStep[Batch]:
        return ExactStep(network, embed, loss, batch=args.batch, micro_batch=micro_batch)

    def gradient() -> Tensor:
        return torch.cat([weight.grad.flatten() for weight in network.parameters() if weight.grad is not None])

    geometry = GeometryConfig(side_px=48, rotation_deg=(-20, 20), scale=(0.8, 1.25))
    colour = ColourConfig(hue=(0.9, 1), saturation=(0.7, 1))
    with tempfile.TemporaryDirectory() as folder:
        draw_shapes(Path(folder), args.images)
        with make_loader(folder, batch=args.batch, geometry=geometry, colour=colour, device="cpu") as loader:
            batch = next(iter(loader))
            exact(args.batch)(batch)
            one_pass = gradient()
            exact(args.micro_batch)(batch)
            print(f"gradient in micro-batches: relative error {(gradient() - one_pass).norm() / one_pass.norm():.1e}")
            network.zero_grad()
            for start in range(0, args.batch, args.micro_batch):
                (loss(embed(batch, slice(start, start + args.micro_batch))) * args.micro_batch / args.batch).backward()
            print(f"gradient of small batches: relative error {(gradient() - one_pass).norm() / one_pass.norm():.1e}")
            step = exact(args.micro_batch)
            for epoch in range(args.epochs):
                losses = []
                for batch in loader:
                    losses.append(step(batch).loss)
                    optimizer.step()
                print(f"epoch {epoch}: loss {torch.stack(losses).mean():.2f}")


if __name__ == "__main__":
    main()
