"""A run's records, one JSON object a line, each written as it is made: a run that ended early goes on where it was."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class JournalError(ValueError):
    """A file that does not belong to this run; the message is one line."""


class Journal:
    """A JSONL file whose first line says what the run is.

    Args:
        file: read if it is there, and appended to.
        header: plain values; a file that begins with others belongs to another run.

    Raises:
        JournalError: it does, or is no such file.
    """

    def __init__(self, file: Path, header: Mapping[str, Any]) -> None:
        self._file = file
        self._lock = threading.Lock()
        self.records: list[dict[str, Any]] = []
        wanted = json.loads(json.dumps(header))
        lines = _whole_lines(file)
        if not lines:
            file.write_text("")
            self._write(header)
            return
        found, *self.records = lines
        differing = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
        if differing:
            key = differing[0]
            raise JournalError(
                f"{file} was begun with {key} {found.get(key)!r}, this run has {wanted.get(key)!r}: name another "
                "file, or remove it"
            )

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a record; threads may call it."""
        with self._lock:
            self.records.append(dict(record))
            self._write(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_header(file: Path) -> dict[str, Any]:
    """What a journal says its run was.

    Raises:
        JournalError: the file is missing, empty or no JSONL.
    """
    return _read(file)[0]


def read_records(file: Path) -> list[dict[str, Any]]:
    """The records of a journal, its header left out.

    Raises:
        JournalError: the file is missing, empty or no JSONL.
    """
    return _read(file)[1:]


def _read(file: Path) -> list[dict[str, Any]]:
    lines = _whole_lines(file) if file.is_file() else []
    if not lines:
        raise JournalError(f"{file} is missing or empty")
    return lines


def _whole_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a file; a last line that was cut off is removed from it."""
    if not file.exists():
        return []
    text = file.read_text()
    whole, _, rest = text.rpartition("\n")
    if rest:
        file.write_text(whole + "\n" if whole else "")
    found = []
    for number, line in enumerate(whole.split("\n") if whole else (), start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise JournalError(f"{file}, line {number} is no JSON: {error}") from error
        if not isinstance(record, dict):
            raise JournalError(f"{file}, line {number} is {type(record).__name__}, not an object")
        found.append(record)
    return found
