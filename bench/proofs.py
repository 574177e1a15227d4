"""The table of docs/performance.md about the rows that tests record: a sentence for each proof."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from bench.tables import NoRowError, Row, markdown, rows_of

_SENTENCES: Final = {
    "dots": "{small_dots} dots of at most {small_radius_px} px radius, and {large_dots} larger ones, in views: their "
    "centres are at most {small_largest_px} and {large_largest_px} px from where the matrices put them",
    "killed ranks and a cut link": "{steps} steps on two hosts: killed ranks are restarted; a cut link is reported "
    "after {cut_reported_s} s with `run.rank_timeout_s` = {limit_s:g}",
    "a host that dies leaves a smaller run": "one of two hosts dies after step {killed_after} of {steps}; the other "
    "one goes on alone",
    "the host of the rendezvous is lost": "the other host says so in one line; with the next job the run of {steps} "
    "steps ends",
    "kills": "{kills} kills at random moments, {kills_while_a_checkpoint_was_written} of them while a checkpoint was "
    "written, on changing numbers of ranks: the final loss differs by {difference_from_undisturbed:.0e} from that of "
    "an undisturbed run ({precision})",
    "loss_memory": "the loss of {embeddings} embeddings on one of many ranks holds at most {peak_bytes:,} bytes; its "
    "rows of the similarity matrix would be {rows_of_the_matrix_bytes:,}",
    "mutated_files": "{files} files, of which {mutated_in_metadata} with mutated metadata, decoded in four ways: "
    "{views_same} views are the same in all, {crash} crashes, {hang} hangs, {good_lost} good files lost, {garbled} "
    "garbled views, {wrong_matrix} wrong matrices",
    "probe": "the probe of `probe.every_epochs` took {share:.1%} of the processor time of a run of {steps} steps",
    "remote_shards": "{ranks} ranks over an S3 server on the same machine, {requests} requests, of which {faults_500} "
    "failed and {faults_cut} was cut, {restarts} restart of the server: {differing_images} differing images; the cache "
    "held {largest_bytes:,} of at most {bound_bytes:,} bytes",
    "shards": "an index of {samples:,} samples is opened in {open_s} s; a sample is found and read in "
    "{read_us_per_sample} us, with {memory_bytes_per_sample_after_first_batch:g} bytes of memory a sample",
    "shards of another program are indexed": "{samples:,} samples in {shards} shards of another program are indexed in "
    "{index_s} s, and once more in {index_again_s} s",
    "world_sizes": "{steps} steps on 1 to 4 ranks see the same samples; the weights differ by at most a relative "
    "{largest_relative_difference_4:.0e} ({precision})",
}
"""By the row's "proof", or the name of its file. A figure in a table of the row is named TABLE_KEY."""


def proofs(results: Path, shown_elsewhere: set[str]) -> str:
    """A table of rows that tests record: the newest row of each proof.

    Args:
        results: the folder of the rows.
        shown_elsewhere: names of files whose rows are in other tables.

    Raises:
        NoRowError: there is none.
    """
    lines = []
    for file in sorted(results.glob("*.jsonl")):
        if file.stem not in shown_elsewhere:
            newest = {row.get("proof", file.stem): row for row in rows_of(file)}
            lines += [(f"{row['place']}, {row['machine']['date']}", _said(proof, row)) for proof, row in newest.items()]
    if not lines:
        raise NoRowError
    return markdown(("row", "what was seen"), lines)


def _said(proof: str, row: Row) -> str:
    if proof in _SENTENCES:
        tables = [(name, table) for name, table in row.items() if isinstance(table, dict)]
        flat = {f"{name}_{key}": value for name, table in tables for key, value in table.items()}
        return _SENTENCES[proof].format(**row, **flat)
    figures = {name: value for name, value in row.items() if name not in {"bench", "machine", "place", "proof"}}
    return ", ".join(f"{name.replace('_', ' ')} {_figure(value)}" for name, value in figures.items())


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
