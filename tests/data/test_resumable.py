import errno
import json
import threading
import time
from pathlib import Path

import pytest

from data.resumable import LoggedRows, run_chunks, run_keyed
from models.errors import UserError
from models.files import atomic_folder, explain_disk_errors, write_text


def until(last: int):
    return lambda chunk, rows: chunk < last


def rows_of(chunk: int) -> list[dict[str, int]]:
    return [{"chunk": chunk, "row": i} for i in range(chunk + 1)]


def test_finished_chunks_are_never_done_again(tmp_path: Path) -> None:
    log, calls = tmp_path / "a" / "log.jsonl", []

    def work(chunk: int) -> list[dict[str, int]]:
        calls.append(chunk)
        if chunk == 2 and calls.count(2) == 1:
            raise KeyboardInterrupt
        return rows_of(chunk)

    with pytest.raises(KeyboardInterrupt):
        run_chunks(log, work, until(3))
    told = []

    def more(chunk: int, rows: list[dict[str, int]]) -> bool:
        told.append((chunk, len(rows)))
        return chunk < 3

    rows = run_chunks(log, work, more)
    assert calls == [0, 1, 2, 2, 3]
    assert rows == [row for chunk in range(4) for row in rows_of(chunk)]
    assert told == [(0, 1), (1, 2), (2, 3), (3, 4)]


def keyed(log: Path, keys: str, work, workers: int = 3) -> tuple[LoggedRows, list[int]]:
    counted: list[int] = []
    event = threading.Event()
    logged = run_keyed(log, list(keys), work, workers=workers, stopping=event, done=counted.append)
    assert event.is_set()
    return logged, counted


def test_named_pieces_may_finish_in_any_order_and_are_read_in_the_order_asked_for(tmp_path: Path) -> None:
    last_done = threading.Event()

    def work(key: str) -> list[dict[str, str]]:
        if key == "c":
            last_done.set()
        assert last_done.wait(10)  # a and b, begun before it, do not finish before it
        return [{"said": key}, {"said": key * 2}]

    logged, counted = keyed(tmp_path / "a" / "log.jsonl", "abcd", work)
    assert [[row["said"] for row in rows] for rows in logged.read(["d", "a"])] == [["d", "dd"], ["a", "aa"]]
    assert sorted(logged.keys) == list("abcd") and "e" not in logged
    assert counted[0] == 0 and sum(counted) == 4
    again, counted = keyed(tmp_path / "a" / "log.jsonl", "abcd", lambda key: pytest.fail(key))
    assert (again.keys, counted) == (logged.keys, [4])


def test_an_error_in_one_piece_ends_the_others_and_loses_none_that_was_finished(tmp_path: Path) -> None:
    log, calls = tmp_path / "log.jsonl", []

    def work(key: str) -> list[dict[str, str]]:
        calls.append(key)
        if key == "b" and calls.count("b") == 1:
            while log.read_bytes().count(b"\n") < 2:  # until a and c are written
                time.sleep(0.01)
            raise UserError("no more")
        return [{"said": key}]

    with pytest.raises(UserError, match="no more"):
        keyed(log, "abc", work, workers=2)
    assert sorted(LoggedRows(log).keys) == ["a", "c"]
    logged, counted = keyed(log, "abc", work, workers=2)
    assert sorted(logged.keys) == ["a", "b", "c"] and counted == [2, 1]
    assert sorted(calls) == ["a", "b", "b", "c"]


def test_an_interruption_loses_none_that_was_finished(tmp_path: Path) -> None:
    log, before = tmp_path / "log.jsonl", threading.active_count()

    def done(count: int) -> None:
        while count and threading.active_count() > before:  # until the others have handed theirs in
            time.sleep(0.01)
        if count:
            raise KeyboardInterrupt

    def work(key: str) -> list[dict[str, str]]:
        while key != "a" and not log.read_bytes():  # until a is written
            time.sleep(0.01)
        return [{"said": key}]

    with pytest.raises(KeyboardInterrupt):
        run_keyed(log, list("abc"), work, workers=3, stopping=threading.Event(), done=done)
    assert sorted(LoggedRows(log).keys) == list("abc")


def test_a_cut_line_of_named_pieces_is_done_again(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    keyed(log, "abc", lambda key: [{"said": key}], workers=1)
    whole = log.read_bytes()
    log.write_bytes(whole[:-4])
    calls: list[str] = []
    keyed(log, "abc", lambda key: calls.append(key) or [{"said": key}], workers=1)
    assert (calls, log.read_bytes()) == (["c"], whole)


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_cut_by_a_kill_is_done_again(tmp_path: Path, cut: int) -> None:
    log = tmp_path / "log.jsonl"
    expected = run_chunks(log, rows_of, until(2))
    whole = log.read_bytes()
    log.write_bytes(whole[:-cut])
    calls = []

    def work(chunk: int) -> list[dict[str, int]]:
        calls.append(chunk)
        return rows_of(chunk)

    assert run_chunks(log, work, until(2)) == expected
    assert calls == [2]
    assert log.read_bytes() == whole
    assert [json.loads(line)["chunk"] for line in whole.splitlines()] == [0, 1, 2]


def test_a_damaged_line_is_found_wherever_a_bit_was_flipped_and_the_others_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    expected = run_chunks(log, rows_of, until(2))
    whole = log.read_bytes()
    first, second, third = whole.splitlines(keepends=True)
    for place in range(len(first), len(first) + len(second)):
        for bit in (1, 4, 16):
            log.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            calls = []

            def work(chunk: int, calls: list[int] = calls) -> list[dict[str, int]]:
                calls.append(chunk)
                return rows_of(chunk)

            assert run_chunks(log, work, until(2)) == expected
            newline = place == len(first) + len(second) - 1  # then two lines have become one
            assert calls == ([1, 2] if newline else [1])
            again = [first, second, third] if newline else [first, third, second]
            assert log.read_bytes() == b"".join(again)
            assert f"of {2 if newline else 3} finished pieces 1 are damaged" in capsys.readouterr().out


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.jsonl"
    run_chunks(log, rows_of, until(1))
    before = log.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"log\.jsonl.*the disk is full"):
        run_chunks(log, rows_of, until(2))
    assert log.read_bytes() == before


def test_no_permission_is_one_sentence() -> None:
    with pytest.raises(UserError, match="no permission to write there"), explain_disk_errors(Path("somewhere")):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    with atomic_folder(folder) as temporary:
        (temporary / "a").write_text("1")
        assert not folder.exists()
    with pytest.raises(RuntimeError), atomic_folder(folder) as temporary:
        (temporary / "a").write_text("2")
        raise RuntimeError
    assert (folder / "a").read_text() == "1"
    with atomic_folder(folder) as temporary:
        (temporary / "b").write_text("3")
    assert [p.name for p in folder.iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_a_text_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x" / "report.json"
    write_text(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="disk is full"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["report.json"]
