"""A listing in which nothing is wrong, and changes of it."""

from __future__ import annotations

from pathlib import Path

from glm53_mono.isa.listing import Listing, parse

GOOD = (Path(__file__).parent / "good.amdgcn").read_text()
STREAMED = {("gemv.py", 55)}
"""Where the good listing loads weights that are promised 16 bytes wide."""


def changed(*changes: tuple[str, str]) -> Listing:
    """The good listing with texts replaced, each of which must be in it once."""
    text = GOOD
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the listing"
        text = text.replace(old, new)
    return parse(text)
