"""Writes the files for FreiHAND's leaderboard."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.train.pose.inference import Poses
from peclr_dali.train.pose.labels import PoseLabels
from peclr_dali.writing import whole_file, write_text

SUBMISSION = ("pred.json", "pred.zip")
"""The files that `save_submission` writes."""


def save_submission(folder: Path, poses: Poses, labels: PoseLabels) -> list[Path]:
    """Write pred.json for FreiHAND's evaluation, with joints in metres, and pred.zip for the leaderboard.

    A missing hand, camera or scale is a `UserError`, since the leaderboard needs every image.
    """
    joints_m = poses.joints * labels.scale_m[:, None, None].astype(np.float64)
    is_its_own = poses.samples == np.arange(len(joints_m))  # not a substitute's
    missing = np.flatnonzero(~(np.isfinite(joints_m).all(axis=(1, 2)) & labels.has_camera & is_its_own))
    if len(missing):
        raise UserError(
            f"no hand for {len(missing)} of {len(joints_m)} images, the first is image {missing[0]}: its file, its "
            "camera matrix or its scale is missing. The leaderboard needs every image"
        )
    vertices = [[0.0, 0.0, 0.0]] * 778  # vertices of MANO; only the mesh's metrics use them
    content = [joints_m.tolist(), [vertices] * len(joints_m)]
    as_json, as_zip = (folder / name for name in SUBMISSION)
    write_text(as_json, json.dumps(content))
    with whole_file(as_zip) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(as_json, "pred.json")
    return [as_json, as_zip]
