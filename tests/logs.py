"""What threads of the package have logged."""

from __future__ import annotations

import time

import pytest


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    """The lines that hold a text, as soon as there is one; none after five seconds."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        lines = [record.getMessage() for record in caplog.records if text in record.getMessage()]
        if lines:
            return lines
        time.sleep(0.01)
    return []
