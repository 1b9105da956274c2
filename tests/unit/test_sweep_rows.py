"""The file of rows: whatever interrupts the writer, whole rows stay and nothing else does."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from buffet.errors import BuffetError
from buffet.experiments import read_rows
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
    whole, torn = row("a").line().encode(), row("b").line().encode()
    for length in (0, 1, 7, 8, 9, *range(20, len(torn), 97), *range(len(torn) - 20, len(torn) - 1)):
        for zeros in (0, 3, 4096):  # some file systems leave these behind after a power cut
            path.write_bytes(whole + torn[:length] + b"\0" * zeros)
            assert [r.key for r in read_rows(path)] == ["a"]
            with open_rows(path) as file:
                assert path.read_bytes() == whole
                file.append([row("b")])
            assert path.read_bytes() == whole + torn


def test_a_first_line_that_is_torn_is_cut_off_if_it_can_be_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "rows.ndjson"
    torn = row("a").line().encode()
    for length in (45, 100, len(torn) - 2):
        path.write_bytes(torn[:length])
        assert read_rows(path) == []
        with open_rows(path) as file:
            assert file.rows == ()
        assert path.read_bytes() == b""
    for length in (1, 8, 20):
        refused(path, torn[:length], "line 1 is not a row")


def test_a_row_that_lacks_only_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.ndjson"
    lines = [row(key).line() for key in "abc"]
    for zeros in (0, 7):
        path.write_text("".join(lines[:2]).removesuffix("\n") + "\0" * zeros)
        assert [r.key for r in read_rows(path)] == ["a", "b"]
        with open_rows(path) as file:
            file.append([row("c")])
        assert path.read_text() == "".join(lines)


def refused(path: Path, content: bytes | str, *messages: str) -> None:
    """Reader and writer say the same in one line, and leave the file as it was."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    before = path.read_bytes()
    with pytest.raises(BuffetError) as read:
        read_rows(path)
    with pytest.raises(BuffetError) as written, open_rows(path):
        pass
    assert str(read.value) == str(written.value)
    assert len(str(read.value).splitlines()) == 1
    for message in (f"{path}: line ", *messages):
        assert message in str(read.value)
    assert path.read_bytes() == before


def test_a_file_that_is_none_is_refused_and_untouched(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = ('models = ["tiny"]', "sentence\tlabel\n", '{"a": 1}\n', '{"key":"a"}\n', '{"key":"a"}', "\n")
    for content in (*contents, '{"key":"', '{"key":"abc', '{"key":"a","status":"ok","reason":null}', "x"):
        refused(path, content, "line 1 is not a row", "give another file")
    refused(path, b"\0" * 8, "line 1 is not a row", r"begins with '\x00\x00")
    for content in (b"\0" * 4096, b"\0" * 8 + b"data", b'{"key":"\0\0', b"\xff\xfe", b"\x80\0\n"):
        refused(path, content, "line 1 is not a row", "give another file")


def test_a_file_that_was_edited_is_refused_and_untouched(tmp_path: Path) -> None:
    """Every line changed, as by ``sed 's/$/,/'``, or one: nothing that follows it is given up."""
    path = tmp_path / "rows.ndjson"
    lines = [row(f"k{n}").line() for n in range(48)]
    refused(path, "".join(lines).replace("\n", ",\n"), "line 1 is not a row", '"},')
    refused(path, "".join(lines).replace("\n", "\r\n"), "line 1 is not a row", "\\r")
    for place in (0, 20, 47):
        for damaged in (
            "x" + lines[place],
            "\n",
            "\0" * 80 + "\n",
            lines[place][:99] + "\n",
            '{"key":"x"}\n',
        ):
            changed = [*lines[:place], damaged, *lines[place + 1 :]]
            refused(path, "".join(changed), f"line {place + 1} is not a row", "correct the line or remove it")
    whole = "".join(lines)
    for glued in (",", "x", " ", "\0x"):
        refused(path, whole[:-1] + glued, "line 48 is not a row")
    for more in ('{"key":"mine"}', lines[0][:-1] + ",", '{"key":\0"', "\0x", "x"):
        refused(path, whole + more, "line 49 is not a row")


def test_a_changed_number_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "rows.ndjson"
    lines = [row("a").line(), row("b", certified=0.125).line(), row("c").line()]
    assert lines[1].count('"certified":0.125,') == 1
    larger = lines[1].replace('"certified":0.125,', '"certified":0.925,')
    for changed in (larger, lines[1].replace('"key":"b"', '"key":"d"'), lines[1].replace(":", ": ", 1)):
        refused(path, lines[0] + changed + lines[2], "line 2 is not what was written there")
        refused(path, lines[0] + changed[:-1], "line 2 is not what was written there")  # at the end too
    for check in ("", "0", "0" * 16):
        damaged = re.sub('"check":"[0-9a-f]*"', f'"check":"{check}"', lines[1])
        refused(path, lines[0] + damaged + lines[2], "line 2 is not")


def test_rows_of_earlier_versions_are_told_from_damage(tmp_path: Path) -> None:
    old = re.sub(',"check":"[0-9a-f]*"', "", row("a").line())
    refused(tmp_path / "rows.ndjson", old * 2, "line 1 has no check, as in files of earlier versions")


def test_blocks_that_never_reached_the_disk_amid_others_are_refused(tmp_path: Path) -> None:
    """Only an end is torn: what comes after a hole was written, and somebody should look at it."""
    whole, torn = row("a").line().encode(), row("b").line().encode()
    hole = torn[:15] + b"\0" * 50 + torn[65:]
    refused(tmp_path / "rows.ndjson", whole + hole, "line 2 is not")
    refused(tmp_path / "rows.ndjson", whole + hole[:-1], "line 2 is not")
    refused(tmp_path / "rows.ndjson", whole + hole[:70], "line 2 is not")


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
        assert "File too large; fix that and run the same command again" in str(caught.value)
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


def test_places_that_cannot_be_files_of_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BuffetError, match="no directory"), open_rows(tmp_path / "none" / "rows"):
        pass
    with pytest.raises(BuffetError, match="cannot be written"), open_rows(tmp_path):
        pass
    with pytest.raises(BuffetError, match="not a regular file"), open_rows(Path("/dev/null")):
        pass
    with pytest.raises(BuffetError, match="cannot be read"):
        read_rows(tmp_path / "none")


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.ndjson"
    with open_rows(path), pytest.raises(BuffetError, match="another sweep is writing"), open_rows(path):
        pass
    with open_rows(path):
        pass


def test_lines_are_strict_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="finite number"):
        row("a", margin=float("nan"))
    assert json.loads(row("a").line())["attacked"] is None
