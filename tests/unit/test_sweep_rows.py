"""The file of rows: whatever interrupts the writer, whole rows stay and nothing else does."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from buffet.errors import BuffetError
from buffet.experiments import Row, load_rows, read_rows
from buffet.experiments.rows import open_rows
from reports import row


def test_what_is_appended_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.ndjson"
    rows = [row("a", sentence="é “x” \u2028"), row("b", certified=0.1 + 0.2), row("c", status="failed")]
    with open_rows(path) as file:
        assert file.rows == ()
        file.append(rows[:2])
        file.append(rows[2:])
    assert read_rows(path) == rows
    assert all(line.isascii() and line.startswith('{"key":"') for line in path.read_text().splitlines())
    with open_rows(path) as file:
        assert list(file.rows) == rows


def test_a_torn_end_is_cut_off_wherever_it_tears(tmp_path: Path) -> None:
    path = tmp_path / "rows.ndjson"
    whole = row("a").line().encode()
    torn = row("b").line().encode()
    for length in (0, 1, 7, 8, 9, *range(20, len(torn), 97), len(torn) - 1):
        path.write_bytes(whole + torn[:length])
        assert [r.key for r in read_rows(path)] == ["a"]
        with open_rows(path) as file:
            assert path.read_bytes() == whole
            file.append([row("b")])
        assert path.read_bytes() == whole + torn
        path.write_bytes(torn[:length])  # also the first line
        with open_rows(path) as file:
            assert file.rows == ()
        assert path.read_bytes() == b""


def test_blocks_that_never_reached_the_disk_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.ndjson"
    whole = row("a").line().encode()
    for garbage in (b"\0" * 100, b'{"key":"b","sta' + b"\0" * 50 + b"\n" + b"\0" * 9):
        path.write_bytes(whole + garbage)
        with open_rows(path) as file:
            assert [r.key for r in file.rows] == ["a"]
        assert path.read_bytes() == whole


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Files of this process may not grow further, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.ndjson"
    line = len(row("a").line())
    with open_rows(path) as file:
        file.append([row("a")])
        with largest_file(2 * line + line // 2), pytest.raises(BuffetError) as caught:
            file.append([row("b"), row("c")])
        assert "File too large; mend that and run the same command again" in str(caught.value)
        assert path.stat().st_size == line
        file.append([row("b")])
    assert [r.key for r in read_rows(path)] == ["a", "b"]


def test_of_several_rows_of_a_task_the_first_success_counts(tmp_path: Path) -> None:
    path = tmp_path / "rows.ndjson"
    rows = [row("a", status="timeout"), row("b"), row("a", certified=2), row("a", certified=3)]
    rows += [row("b", status="failed"), row("c", status="failed", reason="x"), row("c", status="timeout")]
    path.write_text("".join(r.line() for r in rows))
    found = {r.key: r for r in read_rows(path)}
    assert found == {"a": rows[2], "b": rows[1], "c": rows[5]}


def test_other_files_are_refused_and_untouched(tmp_path: Path) -> None:
    for content in ('models = ["tiny"]', "sentence\tlabel\n", '{"a": 1}\n', '{"key":"a"}\n'):
        path = tmp_path / "file"
        path.write_text(content)
        with pytest.raises(BuffetError, match="line 1 is not a row"), open_rows(path):
            pass
        with pytest.raises(BuffetError, match="line 1 is not a row"):
            read_rows(path)
        assert path.read_text() == content
    damaged = row("a").line() + "x" + row("b").line() + row("c").line()
    path.write_text(damaged)
    with pytest.raises(BuffetError, match="line 2"), open_rows(path):
        pass
    assert path.read_text() == damaged
    with pytest.raises(BuffetError, match="no directory"), open_rows(tmp_path / "none" / "rows"):
        pass
    with pytest.raises(BuffetError, match="cannot be written"), open_rows(tmp_path):
        pass
    with pytest.raises(BuffetError, match="cannot be read"):
        read_rows(tmp_path / "none")


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.ndjson"
    with open_rows(path), pytest.raises(BuffetError, match="another sweep is writing"), open_rows(path):
        pass
    with open_rows(path):
        pass


def test_rows_as_a_table(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    path = tmp_path / "rows.ndjson"
    path.write_text(
        "".join(r.line() for r in (row("a"), row("b", attacked=2.0, gold=1, certified=1), row("a")))
    )
    table = load_rows(path)
    assert table["key"].to_list() == ["a", "b"]
    assert table["attacked"].to_list() == [None, 2.0]
    assert table["certified"].dtype == polars.Float64
    assert table["words"].to_list() == [[1], [1]]
    assert set(table.columns) == set(Row.model_fields)
    path.write_text("")
    with pytest.raises(BuffetError, match="no rows yet"):
        load_rows(path)


def test_lines_are_strict_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="finite number"):
        row("a", margin=float("nan"))
    assert json.loads(row("a").line())["attacked"] is None
