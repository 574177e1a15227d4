"""The sections of docs/results.md: from rows that are made up, beside the published figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peclr_dali.bench.pages.documentation import fill_tables, write_docs
from peclr_dali.bench.studies.curves import label_curves
from peclr_dali.bench.studies.pictures import draw_claims, draw_label_curves
from peclr_dali.bench.studies.rows import FILES, SCALES, claims_of_paper, study_names, study_rows
from peclr_dali.errors import UserError
from peclr_dali.train.config.load import read_toml

MACHINE = {"cpu": "CPU", "gpu": "none", "cores": 2, "date": "2030-01-01", "commit": "abc"}
ROOT = Path(__file__).parents[2]


def section(results: Path, name: str) -> str:
    return fill_tables(f"<!-- rows: {name} -->\n<!-- end rows -->\n", results)


def write_rows(results: Path, *rows: dict[str, Any], scale: str = "small") -> None:
    of = {"study": "compositions", "scale": scale, "machine": MACHINE}
    (results / "experiments.jsonl").write_text("".join(json.dumps(of | row) + "\n" for row in rows))


def arm(name: str, seed: int, **figures: float) -> dict[str, Any]:
    return {"kind": "arm", "arm": name, "seed": seed, **figures}


def compared(better: str, than: str, metric: str, differences: list[float], low: float, high: float) -> dict[str, Any]:
    mean = float(np.mean(differences))
    return {"kind": "comparison", "better": better, "than": than, "metric": metric, "differences": differences,
            "mean": mean, "low": low, "high": high, "holds": high < 0, "seeds": [0, 1]}  # fmt: skip


def test_a_study_without_rows_says_so_and_has_the_published_figures(tmp_path: Path) -> None:
    made = section(tmp_path, "study compositions")
    assert "Scale small: **not run yet**." in made
    assert "Scale paper: **not run yet**." in made
    assert "| simclr | 16.62 | 0.72 | 12.05 |" in made
    page = section(tmp_path, "studies")
    assert "have the paper's sign" not in page


def test_our_figures_stand_beside_the_published_ones(tmp_path: Path) -> None:
    rows = [
        arm("simclr", 0, epe_px=99.0), arm("simclr", 0, epe_px=30.0), arm("simclr", 1, epe_px=34.0),  # the last counts
        arm("peclr", 0, epe_px=29.0), arm("peclr", 1, epe_px=31.0),
        compared("peclr", "simclr", "epe_px", [-1, -3], -4.0, 0.5),
        compared("peclr_cells", "simclr_cells", "epe_cm", [1, 2], -4.0, -2.5),
        {**compared("peclr", "simclr", "epe_cm", [1, 2], 0.5, 2.5), "scale": "paper"},
        *({**arm("peclr", seed, epe_px=7.0, epe_cm=51.5), "scale": "paper"} for seed in (0, 1)),
        {**arm("rotation_peclr", 0, epe_px=8.0), "study": "geometric"},
        {**arm("renamed", 0, epe_px=8.0), "study": "single_augmentations"},
    ]  # fmt: skip
    rows += [arm(f"{name}_cells", seed, epe_px=25, epe_cm=99.0) for name in ("peclr", "simclr") for seed in (0, 1)]
    rows += [{**arm("simclr", seed, epe_cm=50.0), "scale": "paper"} for seed in (0, 1)]
    constants = {"mean_pose_pa_epe_cm": 4, "rigid_hand_pa_epe_cm": 2, "mean_keypoints_epe_px": 36}
    write_rows(tmp_path, *rows, {"study": "compositions", "kind": "constant", **constants})
    made = section(tmp_path, "study compositions")
    assert "2D EPE of the mean keypoints in the box: 36.000 px." in made
    assert "Scale small: 2 seeds" in made
    assert "| simclr | 50.000 (50.000 to 50.000) | 16.62 |" in made
    assert "| 30.000 (29.000 to 31.000) | 7.000 (7.000 to 7.000) | 10.51 |" in made
    assert "EPE, cm, small" not in made.replace("2D EPE", "")  # of read-outs, with a root's depth that they guessed
    write_rows(tmp_path, *rows, arm("peclr_cells", 0, epe_px=25, epe_cm=98.0, true_root=True))
    assert "| peclr_cells | 98.000 * | -" in section(tmp_path, "study compositions")
    write_rows(tmp_path, *rows, {"study": "compositions", "kind": "constant", **constants})
    # 2 of 32 px; in EPE the sign is the other, and the interval is clear of zero
    assert "| -2.000 | -4.000 to +0.500 | +6.2 % | 12.8 % | yes | yes | no |" in made
    assert "| +1.500 | +0.500 to +2.500 | -3.0 % | 3.4 % | **no** | yes |" in made
    page = section(tmp_path, "studies")
    assert (
        "1 of the 2 measured claims counts: its networks are better than a constant. 0 have the paper's sign and an "
        "interval that does not contain zero. 1 more has the paper's sign." in page
    )
    assert "| Table 1 | seeds 0, 1 | seeds 0, 1 |" in page
    assert "| Table 1 | small | peclr minus simclr | 2D EPE, px |" in page


def test_an_auc_is_better_if_it_is_larger(tmp_path: Path) -> None:
    rows = [arm(name, seed, auc=auc) for name, auc in (("peclr", 0.5), ("simclr", 0.4)) for seed in (0, 1)]
    write_rows(tmp_path, *rows, compared("peclr", "simclr", "auc", [0.1, 0.1], 0.05, 0.15), scale="paper")
    assert "| better by | the paper's sign | interval without zero |" in section(tmp_path, "study compositions")
    assert "| +20.0 % | yes | yes |" in section(tmp_path, "study compositions")


def test_switches_have_no_sign_of_the_paper(tmp_path: Path) -> None:
    rows = [arm(name, seed, epe_px=px) for name, px in (("peclr", 20.0), ("lars_off", 25.0)) for seed in (0, 1)]
    rows = [{"study": "fidelity", **row} for row in [*rows, compared("peclr", "lars_off", "epe_px", [-5, -5], -6, -4)]]
    write_rows(tmp_path, *rows)
    assert "| better by | interval without zero |" in section(tmp_path, "study fidelity")
    assert "| +20.0 % | yes |" in section(tmp_path, "study fidelity")
    assert "have the paper's sign" not in section(tmp_path, "studies")


@pytest.mark.parametrize("constant", [{}, {"constant_rotation_error_px": [1.5, 0.0, 1.5]}])
def test_the_maps_are_drawn_and_said_beside_a_constant(constant: dict[str, Any], tmp_path: Path) -> None:
    def maps(name: str, factor: float) -> dict[str, Any]:
        errors = {"rotation_error_px": [4 * factor, 0.0, 2.0], **constant, "shift_error_px": [[factor, 1], [1, 0]]}
        places = {"rotation_deg": [-80, 0, 80], "shift_px": [-25, 25]}
        return {"study": "equivariance", "kind": "map", "arm": name, "seed": 0, **places, **errors}

    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    docs.mkdir()
    write_rows(results, maps("peclr", 0.5), maps("simclr", 1.0))
    made = section(results, "study equivariance")
    rotations = "rotations | +25.0 %, from +0.0 to +50.0 % over the places | {} | **no**, at 1 of 2 places |"
    shifts = "shifts | +16.7 %, from +0.0 to +50.0 % over the places | yes | **no**, at 1 of 3 places |"
    assert rotations.format("**no**" if constant else "-") in made
    assert shifts in made
    assert f"| rotation by 80 degrees | 2.0 | 3.0 | {'1.5' if constant else 'not measured'} |" in made
    assert "| shift by 35.4 px | 0.6 | 0.8 | 35.4 |" in made
    assert "1 of the 2 measured claims count" in section(results, "studies")
    write_docs(results, docs)
    assert (docs / "images" / "equivariance_small.png").stat().st_size > 5000


def test_the_claims_are_drawn_with_the_published_figures(tmp_path: Path) -> None:
    rows = [arm(name, seed, epe_px=px, epe_cm=5.0) for name, px in (("peclr", 9), ("simclr", 10)) for seed in (0, 1)]
    claims = [
        compared("peclr", "simclr", "epe_px", [-1, -1], -1.5, -0.5),
        compared("peclr", "simclr", "epe_cm", [1, 1], 0, 2),
    ]
    write_rows(tmp_path, *rows, *claims, scale="paper")
    assert "](images/claims_paper.png)" in section(tmp_path, "studies")
    assert "claims_small" not in section(tmp_path, "studies")
    (axes,) = draw_claims(claims_of_paper(tmp_path, "paper")).axes
    bars = [np.asarray(line.get_xdata()).tolist() for line in axes.lines[1:]]
    assert bars == [
        pytest.approx([-40.0, 0.0]),
        pytest.approx([-20.0]),
        [3.4],
        pytest.approx([5.0, 15.0]),
        pytest.approx([10.0]),
        [12.8],
    ]
    assert [mark.get_text() for mark in axes.get_yticklabels()] == [
        f"Table 1: PeCLR over SimCLR, best compositions, {metric}" for metric in ("EPE", "2D EPE")
    ]  # fmt: skip
    assert claims_of_paper(tmp_path, "small") == []


def test_what_a_study_only_compares_does_not_count(tmp_path: Path) -> None:
    rows = [
        *(
            arm(name, seed, epe_px=px)
            for name, px in (("translation_peclr", 9.0), ("translation_simclr", 10.0), ("random", 12.0))
            for seed in (0, 1)
        ),
        compared("translation_peclr", "translation_simclr", "epe_px", [-1, -1], -1.5, -0.5),
        compared("translation_peclr", "random", "epe_px", [-3, -3], -3.5, -2.5),
        {"kind": "constant", "mean_keypoints_epe_px": 36.0},
    ]
    write_rows(tmp_path, *({"study": "geometric", **row} for row in rows))
    assert (
        "1 of the 1 measured claims counts: its networks are better than a constant. 1 has the paper's sign"
        in section(tmp_path, "studies")
    )
    (axes,) = draw_claims(claims_of_paper(tmp_path, "small")).axes
    assert [mark.get_text() for mark in axes.get_yticklabels()] == ["Figure 6b: PeCLR over SimCLR, shifts, 2D EPE"]


@pytest.mark.parametrize(("constant", "cell"), [(11.0, "yes"), (9.5, "**no**"), (None, "-")])
@pytest.mark.parametrize(("metric", "name"), [("epe_px", "mean_keypoints_epe_px"), ("epe_cm", "mean_joints_epe_cm")])
def test_a_claim_counts_if_both_networks_are_better_than_a_constant(
    metric: str, name: str, constant: float | None, cell: str, tmp_path: Path
) -> None:
    rows = [arm(who, seed, **{metric: error}) for who, error in (("peclr", 9.0), ("simclr", 10.0)) for seed in (0, 1)]
    constants = [] if constant is None else [{"kind": "constant", name: constant}]
    write_rows(tmp_path, *rows, *constants, compared("peclr", "simclr", metric, [-1, -1], -1.5, -0.5))
    published = {"epe_px": "12.8 %", "epe_cm": "3.4 %"}[metric]
    counts = "" if constant is None else f" {cell} |"  # a column without a cell is left out
    assert f"| +10.0 % | {published} |{counts} yes | yes |" in section(tmp_path, "study compositions")
    assert f"{int(cell == 'yes')} of the 1 measured claims count" in section(tmp_path, "studies")


@pytest.mark.parametrize(("constant", "cell"), [(0.3, "yes"), (0.45, "**no**")])
def test_a_constant_of_auc_is_better_if_it_is_larger(constant: float, cell: str, tmp_path: Path) -> None:
    rows = [arm(name, seed, auc=auc) for name, auc in (("peclr", 0.5), ("simclr", 0.4)) for seed in (0, 1)]
    constants = {"kind": "constant", "mean_joints_epe_cm": 9.0, "mean_joints_auc": constant}
    write_rows(tmp_path, *rows, constants, compared("peclr", "simclr", "auc", [0.1, 0.1], 0.05, 0.15))
    assert f"| +20.0 % | {cell} | yes | yes |" in section(tmp_path, "study compositions")


def test_errors_are_drawn_over_the_share_of_the_labels(tmp_path: Path) -> None:
    rows = [
        arm(f"{start}_{name}", seed, epe_px=px + seed)
        for start, of_share in (
            ("scratch", {"005": 30, "030": 28}),
            ("peclr", {"030": 24, "all": 20}),
            ("frozen", {"030": 40}),
            ("simclr", {"best": 50}),
        )
        for name, px in of_share.items()
        for seed in (0, 2)
    ]
    constant = {"kind": "constant", "mean_keypoints_epe_px": 36.0}
    write_rows(tmp_path, *({"study": "few_labels", **row} for row in [*rows, constant]))
    study, found = read_toml(FILES / "few_labels.toml"), study_rows(tmp_path, "few_labels", "small")
    curves = label_curves(study, found, "epe_px")
    assert curves == {
        "scratch": {0.005: [30, 32], 0.03: [28, 30]}, "peclr": {0.03: [24, 26], 1.0: [20, 22]},
    }  # fmt: skip
    (axes,) = draw_label_curves(curves, found).axes
    drawn = {str(line.get_label()): np.asarray(line.get_xydata()).tolist() for line in axes.lines[:2]}
    assert drawn == {"scratch": [[0.005, 31], [0.03, 29]], "peclr": [[0.03, 25], [1.0, 21]]}
    assert [np.ptp(np.asarray(band.get_paths()[0].vertices)[:, 1]) for band in axes.collections] == [4, 6]
    text = section(tmp_path, "study few_labels")
    assert "](images/few_labels_small.png)" in text
    assert "| scratch | 31.0 (30.0 to 32.0) | 29.0 (28.0 to 30.0) | - |" in text
    assert "| peclr | - | 25.0 (24.0 to 26.0) | 21.0 (20.0 to 22.0) |" in text
    assert "| frozen_030 | 41.000 (40.000 to 42.000) |" in text
    assert "| simclr_best | 51.000 (50.000 to 52.000) |" in text  # is no share of simclr's
    assert "scratch_030" not in text


def test_labels_may_be_counted(tmp_path: Path) -> None:
    """Of landmarks.toml, whose arms name files of 20 to 1,000 landmarked images."""
    rows = [arm(f"both_{count}", seed, epe_px=30 - count / 100) for count in (20, 1000) for seed in (0, 1)]
    write_rows(tmp_path, *({"study": "landmarks", **row} for row in rows))
    study, found = read_toml(FILES / "landmarks.toml"), study_rows(tmp_path, "landmarks", "small")
    curves = label_curves(study, found, "epe_px")
    assert curves == {"both": {20: [29.8, 29.8], 1000: [20, 20]}}
    (axes,) = draw_label_curves(curves, found).axes
    assert [axes.xaxis.get_major_formatter()(place) for place in axes.get_xticks()] == ["20", "1,000"]
    text = section(tmp_path, "study landmarks")
    assert "| 2D EPE, px, by the labels | 20 | 1,000 |" in text
    assert "| both | 29.8 (29.8 to 29.8) | 20.0 (20.0 to 20.0) |" in text


def test_each_metric_has_its_label_curves(tmp_path: Path) -> None:
    rows = [arm(f"scratch_{name}", seed, epe_px=30.0, epe_cm=9.0) for name in ("010", "020") for seed in (0, 1)]
    write_rows(tmp_path, *({"study": "label_fractions", "scale": "paper", **row} for row in rows))
    made = section(tmp_path, "study label_fractions")
    assert "| EPE, cm, by the labels | 10 % | 20 % |" in made
    assert "| scratch | 9.00 (9.00 to 9.00) | 9.00 (9.00 to 9.00) |" in made
    assert "| scratch | 30.0 (30.0 to 30.0) | 30.0 (30.0 to 30.0) |" in made


def test_curves_are_compared_by_the_labels_and_other_arms_one_by_one(tmp_path: Path) -> None:
    errors = {"scratch_005": 30, "scratch_030": 28, "peclr_005": 24, "peclr_030": 21, "version_60_030": 14}
    rows = [
        arm(name, seed, epe_px=px, pa_epe_cm=2 + ("scratch" in name)) for name, px in errors.items() for seed in (0, 1)
    ]
    rows += [
        compared("peclr_005", "scratch_005", "epe_px", [-6, -6], -9.0, -3.0),
        compared("peclr_030", "scratch_030", "epe_px", [-7, -7], -15.4, 1.4),
        compared("version_60_030", "scratch_030", "epe_px", [-14, -14], -14.0, -14.0),
        {"kind": "constant", "mean_keypoints_epe_px": 28.0},
    ]
    write_rows(tmp_path, *({"study": "few_labels", **row} for row in rows))
    made = section(tmp_path, "study few_labels")
    assert "| 2D EPE better by, %, by the labels | 0.5 % | 3 % |" in made
    assert "| peclr over scratch | **+20.0** (+10.0 to +30.0) † | +25.0 (-5.0 to +55.0) † |" in made
    assert "†: not better than a constant." in made
    assert "peclr_030 minus scratch_030" not in made
    assert "| scratch | 30.0 (30.0 to 30.0) | 28.0 (28.0 to 28.0) |" in made
    assert "| the best constant | 28.0 | 28.0 |" in made
    assert (
        "| version_60_030 minus scratch_030 | 2D EPE, px | 14.00 and 28.00 | 2.00 and 3.00 | -14.000, -14.000 |" in made
    )
    assert "mean and range over seeds" not in made  # what it would list is in the tables above
    assert "| peclr_030 minus scratch_030 | 2D EPE, px | -15.400 to +1.400 |" in section(tmp_path, "studies")


def test_the_probe_is_drawn_over_the_steps_of_pre_training(tmp_path: Path) -> None:
    rows = [arm(f"peclr_{name}", 0, epe_px=px) for name, px in (("005", 30), ("030", 28))]
    for seed, errors_px in ((0, [50, 46]), (1, [52, 42])):
        probe = {"probe_step": [1, 200], "probe_epe_px": errors_px, "probe_constant_epe_px": 56.0}
        rows.append({"kind": "pretrain", "arm": "peclr", "seed": seed, **probe})
    write_rows(tmp_path, *({"study": "few_labels", **row} for row in rows))
    study, found = read_toml(FILES / "few_labels.toml"), study_rows(tmp_path, "few_labels", "small")
    left, right = draw_label_curves(label_curves(study, found, "epe_px"), found).axes
    line, constant = right.lines
    assert np.asarray(line.get_xydata()).tolist() == [[1, 51], [200, 44]]
    assert np.asarray(constant.get_ydata()).tolist() == [56, 56]
    assert line.get_color() == left.lines[0].get_color()


def test_the_page_has_a_section_of_every_measured_study() -> None:
    page, results = (ROOT / "docs" / "results.md").read_text(), ROOT / "bench" / "results"
    measured = [name for name in study_names() if any(study_rows(results, name, scale).arms for scale in SCALES)]
    assert sorted(re.findall(r"<!-- rows: study (\w+) -->", page)) == sorted(measured)
    assert len(measured) > 4
    assert all(f"`{name}.toml`" in page for name in {*study_names()} - {*measured})
    headings = {line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")}
    linked = {line.split("](")[0].removeprefix("| [") for line in page.splitlines() if line.startswith("| [")}
    assert linked <= headings
    with pytest.raises(UserError, match="study nothing -->: expected the name of a file"):
        section(ROOT / "bench" / "results", "study nothing")
