"""Files that must not be torn: content on the disk, then the name, then the directory that holds the name."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import buffet
from buffet.errors import BuffetError
from buffet.loading.checkpoint import write_checkpoint
from buffet.system.files import check_writable, read_bytes, read_text, write_atomically
from buffet.training.state import Position, Snapshot, Store


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is synced and renamed, in order: (sync or rename, path)."""
    found: list[tuple[str, str]] = []
    sync, replace = os.fsync, os.replace

    def name_of(descriptor: int) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def synced(descriptor: int) -> None:
        sync(descriptor)
        found.append(("sync", name_of(descriptor)))

    def replaced(source: Path, target: Path) -> None:
        replace(source, target)
        found.append(("rename", f"{source} {target}"))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    return found


def assert_safe(calls: list[tuple[str, str]], target: Path) -> None:
    """Whatever gets the name of `target` was on the disk before, and its directory is afterwards."""
    at = [kind == "rename" and text.endswith(f" {target}") for kind, text in calls].index(True)
    source = calls[at][1].split(" ")[0]
    before = {text for kind, text in calls[:at] if kind == "sync"}
    inside = [target / entry.name for entry in target.iterdir()] if target.is_dir() else []
    assert {source, *(f"{source}/{entry.name}" for entry in inside)} <= before
    assert ("sync", str(target.parent)) in calls[at + 1 :]


def _snapshot(path: Path) -> None:
    Store(path, {"run": 1}).save(Snapshot(Position(), {"x": torch.zeros(3)}))


def _checkpoint(path: Path) -> None:
    texts = {"config.json": json.dumps({}), "README.md": "é"}
    write_checkpoint(path, texts, {"x": torch.zeros(3)}, overwrite=True)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("write", [lambda path: write_atomically(path, "é"), _snapshot, _checkpoint])
def test_content_is_on_the_disk_before_its_name(
    write: Callable[[Path], None], calls: list[tuple[str, str]], tmp_path: Path
) -> None:
    for _ in range(2):  # new, and in place of the last
        calls.clear()
        write(tmp_path / "out")
        assert_safe(calls, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_only_this_module_renames() -> None:
    """One mechanism for every file and directory that gets its name at the end."""
    package = Path(buffet.__file__).parent
    renaming = {
        path.name
        for path in package.rglob("*.py")
        for call in ("os.replace(", "os.rename(", ".rename(", "shutil.move(")
        if call in path.read_text()
    }
    assert renaming == {"files.py", "checkpoint.py"}  # a checkpoint moves the old one out of the way


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_cannot_be_written_leaves_the_old_file(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    write_atomically(path, b"old")

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(BuffetError, match="out: cannot be written: No space left on device"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    if call == "fsync":
        with pytest.raises(OSError, match="snapshot"):
            _snapshot(tmp_path / "snapshot")
        with pytest.raises(OSError, match="model"):
            _checkpoint(tmp_path / "checkpoint")
        assert not (tmp_path / "snapshot").exists()
        assert not (tmp_path / "checkpoint").exists()


def test_a_directory_that_cannot_be_synced_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    write_atomically(tmp_path / "out", "text")
    assert (tmp_path / "out").read_text() == "text"


def test_what_a_killed_run_left_is_no_obstacle(tmp_path: Path) -> None:
    """In a container the next process may well have the same number, and so the same temporary name."""
    path = tmp_path / "out"
    left = tmp_path / f".out.{os.getpid()}.part"
    left.write_bytes(b"half of")
    check_writable(path)
    left.write_bytes(b"half of")
    write_atomically(path, b"all")
    assert path.read_bytes() == b"all"
    assert not left.exists()


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    check_writable(target)
    assert list(tmp_path.iterdir()) == []
    write_atomically(target, "one")
    write_atomically(target, "two ∞")
    assert target.read_text(encoding="utf-8") == "two ∞"
    with pytest.raises(UnicodeEncodeError):
        write_atomically(target, "broken \ud800")
    assert target.read_text(encoding="utf-8") == "two ∞"
    link = tmp_path / "link.html"
    link.symlink_to(target)
    write_atomically(link, "three")
    assert link.is_symlink()
    assert target.read_text() == "three"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.html", "page.html"]


def test_devices_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "endless").symlink_to("/dev/zero")
    for read in (read_bytes, read_text):
        with pytest.raises(BuffetError, match="is a device"):
            read(tmp_path / "endless")


def test_paths_that_cannot_be_written_are_refused_early(tmp_path: Path) -> None:
    with pytest.raises(BuffetError, match="not a file"):
        check_writable(tmp_path)
    with pytest.raises(BuffetError, match="no directory"):
        check_writable(tmp_path / "missing" / "page.html")
    with pytest.raises(BuffetError, match="not a file"):
        check_writable(Path(os.devnull))
