from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peclr_dali.errors import UserError
from peclr_dali.pipelines.sources.annotations import json_stream
from peclr_dali.pipelines.sources.annotations.json_stream import elements

TEXT = st.text(st.sampled_from('{}[]",:\\ \ud800aé'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.dictionaries(TEXT, VALUES | st.lists(st.dictionaries(TEXT, VALUES, max_size=3), max_size=3), max_size=4),
    indent=st.sampled_from([None, 1]),
    window=st.sampled_from([1, 2, 3, 7, 64, 1 << 22]),
)
def test_every_element_equals_that_of_the_json_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any], indent: int | None, window: int
) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(content, indent=indent), encoding="utf-8")
    monkeypatch.setattr(json_stream, "_PIECE_CHARS", window)
    expected = [(key, element) for key, value in content.items() if isinstance(value, list) for element in value]
    assert repr(list(elements(file))) == repr(expected)  # 1, 1.0 and True are equal


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(min_value=0, max_value=57), window=st.sampled_from([1, 5, 1 << 22]))
def test_a_cut_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int, window: int) -> None:
    text = json.dumps({"images": [{"id": 12}, {"id": 13}], "annotations": [1.5, 2]})
    assert len(text) > 57
    file = tmp_path / "a.json"
    file.write_text(text[:cut])
    monkeypatch.setattr(json_stream, "_PIECE_CHARS", window)
    with pytest.raises(UserError, match=r"a\.json: cannot be read"):
        list(elements(file))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.json: No such file"):
        list(elements(tmp_path / "a.json"))


def test_a_long_file_shows_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"images": list(range(100))}))
    monkeypatch.setattr(json_stream, "_LONG_BYTES", 10)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert [element for _, element in elements(file)] == list(range(100))
    assert "reading a.json, once" in capsys.readouterr().err
