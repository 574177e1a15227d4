"""All figures of some predictions at once, from the product's tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from train.pose.metrics import (
    THRESHOLDS_M,
    THRESHOLDS_PX,
    PoseErrors,
    area,
    mean_over_samples,
    metric_of,
    pck_curve,
    pixel_errors,
    pose_errors,
    score_tables,
)


def summarize(errors: PoseErrors) -> dict[str, Any]:
    tables = score_tables(errors)
    return {
        "hands": int((~np.isnan(errors.error_m)).any(axis=1).sum()),
        "pa_hands": int((~np.isnan(errors.pa_error_m)).any(axis=1).sum()),
        "collapsed": int(errors.collapsed.sum()),
        **{name: metric_of(table) for name, table in tables.items()},
        **{f"{name}_per_keypoint": mean_over_samples(table) for name, table in tables.items()},
        "thresholds_cm": 100 * THRESHOLDS_M,
        "pck": pck_curve(errors.error_m, THRESHOLDS_M),
        "pa_pck": pck_curve(errors.pa_error_m, THRESHOLDS_M),
    }


def pose_metrics(predicted_m: npt.ArrayLike, true_m: npt.ArrayLike, **options: Any) -> dict[str, Any]:
    return summarize(pose_errors(predicted_m, true_m, **options))


def pixel_metrics(predicted_px: npt.ArrayLike, true_px: npt.ArrayLike, **options: Any) -> dict[str, Any]:
    errors = pixel_errors(predicted_px, true_px, **options)
    return {
        "hands": int((~np.isnan(errors)).any(axis=1).sum()),
        "epe_px": metric_of(errors),
        "auc_px": metric_of(area(errors, THRESHOLDS_PX)),
        "pck_px": pck_curve(errors, THRESHOLDS_PX),
    }
