"""Whatever lies on the disk: no crash, no hang, no garbled pixel, no good sample lost."""

from tests.pipelines.loader_fuzz import FAULTS, RUNS, run_part


def test_hundreds_of_mutated_files() -> None:
    counts = run_part(seed=1, first=0, stop=150)
    assert {fault: counts[fault] for fault in FAULTS} == dict.fromkeys(FAULTS, 0)
    for renderer, decode in RUNS:
        assert counts[f"used_{renderer}_{decode}"] > 40
        assert counts[f"refused_by_check_{renderer}_{decode}"] > 20
        assert counts[f"refused_by_decoder_{renderer}_{decode}"] > 10
    assert counts["same"] > 1000
