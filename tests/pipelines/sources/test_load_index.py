"""The box that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from pipelines.sources import DataConfig, load_index


def test_the_margin_widens_a_box_about_its_centre_and_leaves_the_whole_image_alone(tmp_path: Path) -> None:
    for name in ("boxed", "whole"):
        cv2.imwrite(str(tmp_path / f"{name}.jpg"), np.zeros((60, 80, 3), np.uint8))
    boxes = tmp_path / "boxes.csv"
    boxes.write_text("file,x0,y0,x1,y1\nboxed.jpg,10,20,30,50\n")
    index = load_index(DataConfig(source="folder", root=str(tmp_path), box=str(boxes), box_margin=1.5))
    np.testing.assert_allclose(index.box_px, [[20, 35, 45], [0, 0, 0]])
