"""Every server argument of SGLang has been looked at: would a launch silently skip what it asks for?

`server_arguments.txt` lists the arguments that were. A new SGLang brings new ones; each is either refused (a row of
REFUSALS and of `upstream.server.Arguments`) or found harmless, and then joins the list.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from glm53_mono.upstream.server import Arguments

LIST = Path(__file__).with_name("server_arguments.txt")


def considered() -> set[str]:
    """Names of the arguments that have been looked at."""
    return set(LIST.read_text().split())


def not_considered(known: set[str]) -> list[str]:
    """Arguments of the installed SGLang that are not among `known`."""
    import msgspec
    from sglang.srt.server_args import ServerArgs

    return sorted({field.name for field in msgspec.structs.fields(ServerArgs)} - known)


def test_no_server_argument_is_new() -> None:
    new = not_considered(considered())
    assert not new, f"decide for each whether a launch would skip it, then list it in {LIST.name}: {', '.join(new)}"


def test_a_new_argument_would_be_seen() -> None:
    assert not_considered(considered() - {"enable_pdmux"}) == ["enable_pdmux"]


def test_the_arguments_that_we_judge_by_are_sglang_s() -> None:
    assert {field.name for field in fields(Arguments)} <= considered()
