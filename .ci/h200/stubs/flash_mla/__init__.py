"""Stands in for FlashMLA, which SGLang imports and servers with TileLang's backends never call."""

from __future__ import annotations

from typing import Any


class Absent:
    """Whatever is asked for; it cannot be called."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise RuntimeError("flash_mla is not installed: this is the stub of .ci/h200/stubs")


def __getattr__(name: str) -> type[Absent]:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent
