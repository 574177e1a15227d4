"""Run `.venv/bin/python -m examples.masks`: warps segmentation masks by the matrices of the views.

It draws pictures of shapes with their masks. One loader makes views of the pictures, whose `source_to_view_px` warps
the masks with OpenCV. A second loader with the same seed makes views of the mask files. The two are compared.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import torch

from peclr_dali import ColourConfig, GeometryConfig, make_loader

Pixels = npt.NDArray[np.uint8]


def draw_pictures(images: Path, masks: Path, count: int, side_px: int = 160) -> None:
    """Pictures of noise with a few shapes. The mask is white on the shapes."""
    rng = np.random.default_rng(0)
    images.mkdir()
    masks.mkdir()
    for number in range(count):
        image = rng.integers(0, 256, (side_px, side_px, 3), dtype=np.uint8)
        mask = np.zeros_like(image)
        for _ in range(4):
            centre, axes = rng.integers(0, side_px, 2).tolist(), rng.integers(10, side_px // 3, 2).tolist()
            angle_deg, colour = float(rng.uniform(0, 180)), rng.integers(0, 256, 3).tolist()
            cv2.ellipse(image, centre, axes, angle_deg, 0, 360, colour, -1)
            cv2.ellipse(mask, centre, axes, angle_deg, 0, 360, (255, 255, 255), -1)
        cv2.imwrite(str(images / f"{number:04}.png"), image)
        cv2.imwrite(str(masks / f"{number:04}.png"), mask)


def carry(mask: Pixels, source_to_view_px: torch.Tensor, side_px: int) -> Pixels:
    """Warp a mask (H, W) by the (2, 3) matrix of a view: (side_px, side_px)."""
    matrix = source_to_view_px.double().cpu().numpy()
    # The loader counts from the corner of the first pixel, OpenCV from its centre.
    matrix[:, 2] += matrix[:, :2] @ (0.5, 0.5) - 0.5
    return np.asarray(cv2.warpAffine(mask, matrix, (side_px, side_px), flags=cv2.INTER_LINEAR), np.uint8)


def options(description: str | None, **defaults: int | Path) -> argparse.Namespace:
    """The options of an example: numbers and paths, with their defaults."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()


def main() -> None:
    """Draw, compare, write a picture."""
    args = options(__doc__, images=256, out=Path("runs/masks.png"))
    geometry, as_they_are = GeometryConfig(side_px=128, antialias=False), ColourConfig(jitter="none")
    agree, outlined = list[float](), list[Pixels]()
    with tempfile.TemporaryDirectory() as name:
        images, masks = Path(name, "images"), Path(name, "masks")
        draw_pictures(images, masks, args.images)
        of_images = make_loader(images, batch=16, geometry=geometry, device="cpu")
        of_masks = make_loader(masks, batch=16, geometry=geometry, colour=as_they_are, device="cpu")
        with of_images, of_masks:
            for batch, expected in zip(of_images, of_masks, strict=True):
                for view, mask_view in zip(batch.views, expected.views, strict=True):
                    for row, sample in enumerate(batch.samples[:, 0].tolist()):
                        mask = cv2.imread(str(masks / of_images.index.paths[sample]), cv2.IMREAD_GRAYSCALE)
                        carried = carry(np.asarray(mask, np.uint8), view.source_to_view_px[row], geometry.side_px)
                        agree.append(float(((carried > 127) == (mask_view.image[row, 0].numpy() > 127)).mean()))
                        picture = np.ascontiguousarray(view.image[row].permute(1, 2, 0).numpy()[..., ::-1])
                        edges, _ = cv2.findContours(carried, cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
                        outlined.append(np.asarray(cv2.drawContours(picture, edges, -1, (0, 255, 0), 1), np.uint8))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(args.out), np.vstack([np.hstack(outlined[start : start + 8]) for start in (0, 16)]))
    print(f"{len(agree)} masks warped: {np.mean(agree):.2%} of their pixels agree, {min(agree):.2%} in the worst view")
    print(f"{args.out} shows both views of eight pictures, with the warped masks outlined")


if __name__ == "__main__":
    main()
