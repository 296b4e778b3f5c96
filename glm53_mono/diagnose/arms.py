"""The arms: each changes one variable of a server, or of how it is asked, and so puts one hypothesis to the test."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from glm53_mono.check.settings import CHECK, FAIL
from glm53_mono.diagnose.command import Command
from glm53_mono.probe.observer import PROBE
from glm53_mono.probe.report import ACTIVE, MARK

CHECK_VIOLATION = r"monokernel check: rank \d+, step "
"""What a line of a violation has in a server's log (check/watch.py); the counts are lines of the check's too."""

CHECK_ACTIVE = "monokernel check: takes "
"""What the line has that says that a server checks (check/step.py)."""

MONOKERNEL_OPTIONS = ("--enable-amd-monokernel", "--monokernel-backend")
DRAFT_OPTIONS = r"--speculative-.*"
TP_OPTIONS = ("--tp", "--tp-size", "--tensor-parallel-size")
BACKEND_OPTIONS = ("--dsa-prefill-backend", "--dsa-decode-backend")
KV_DTYPE = "--kv-cache-dtype"


class Changes(Enum):
    """What an arm changes: how the server is asked, how it is started, or only what it says about itself."""

    ASKING = "asking"
    SERVER = "server"
    WATCHING = "watching"


@dataclass(frozen=True)
class Others:
    """What the arms of several choices change to.

    Attributes:
        kv_dtype: the KV cache's, None for the other one of bf16 and fp8.
        backend: of the sparse attention, None for the other one of tilelang and fa3.
        tp: ranks, None for one, or for two where there is one.
    """

    kv_dtype: str | None = None
    backend: str | None = None
    tp: int | None = None


@dataclass(frozen=True)
class Arm:
    """One variable.

    Attributes:
        name: short, for `--only`.
        hypothesis: what would be wrong if the arm's output were right.
        changes: which kind of variable it is.
        apply: the changed command; None where there is nothing to change. Arms of `ASKING` leave the command alone.
        alone: whether requests are sent one at a time.
        cold: whether the prefix cache is emptied before each request.
        mark: regular expression of what a line of the server's log has that says the hypothesis is right; only of
            `WATCHING`.
        active: likewise, of the line that says that the server watches itself.
    """

    name: str
    hypothesis: str
    changes: Changes
    apply: Callable[[Command, Others], Command | None] = lambda command, others: command
    alone: bool = False
    cold: bool = False
    mark: str | None = None
    active: str | None = None


CONTROL = Arm("as it is", "the symptom is there at all", Changes.ASKING)


def _without_monokernel(command: Command, others: Others) -> Command | None:
    if not any(command.has(re.escape(option)) for option in MONOKERNEL_OPTIONS):
        return None
    return command.without_options(*map(re.escape, MONOKERNEL_OPTIONS))


def _with_monokernel(change: Callable[[Command], Command]) -> Callable[[Command, Others], Command | None]:
    """A change that means nothing without the monokernel."""
    return lambda command, others: None if _without_monokernel(command, others) is None else change(command)


def _unless_given(*words: str) -> Callable[[Command, Others], Command | None]:
    return lambda command, others: None if command.has(re.escape(words[0])) else command.with_options(*words)


def _without_chunks(command: Command, others: Others) -> Command | None:
    return (
        None
        if command.value("--chunked-prefill-size") == "-1"
        else command.with_options("--chunked-prefill-size", "-1")
    )


def _without_drafts(command: Command, others: Others) -> Command | None:
    return command.without_options(DRAFT_OPTIONS) if command.has(DRAFT_OPTIONS) else None


def _kv_dtype(command: Command, others: Others) -> Command:
    fp8 = (command.value(KV_DTYPE) or "auto").startswith("fp8")
    return command.with_options(KV_DTYPE, others.kv_dtype or ("bfloat16" if fp8 else "fp8_e4m3"))


def _backend(command: Command, others: Others) -> Command:
    present = command.value(BACKEND_OPTIONS[1])
    wanted = others.backend or ("fa3" if present == "tilelang" else "tilelang")
    return command.with_options(*(word for option in BACKEND_OPTIONS for word in (option, wanted)))


def _tp(command: Command, others: Others) -> Command:
    present = int(command.value(*TP_OPTIONS) or 1)
    return command.with_options(TP_OPTIONS[0], str(others.tp or (1 if present > 1 else 2)))


ARMS: Sequence[Arm] = (
    Arm("one at a time", "requests in one step disturb each other", Changes.ASKING, alone=True),
    Arm("cold cache", "what the prefix cache hands on is wrong", Changes.ASKING, alone=True, cold=True),
    Arm(
        "probe",
        "a step's inputs do not fit together",
        Changes.WATCHING,
        _with_monokernel(lambda command: command.with_variable(PROBE, "1")),
        mark=MARK,
        active=ACTIVE,
    ),
    Arm(
        "check",
        "a step of the monokernel is not SGLang's",
        Changes.WATCHING,
        _with_monokernel(lambda command: command.with_variable(CHECK, "1").with_variable(FAIL, "log")),
        mark=CHECK_VIOLATION,
        active=CHECK_ACTIVE,
    ),
    Arm("monokernel off", "the monokernel", Changes.SERVER, _without_monokernel),
    Arm("graphs off", "graph replay", Changes.SERVER, _unless_given("--disable-cuda-graph")),
    Arm("radix cache off", "the prefix cache", Changes.SERVER, _unless_given("--disable-radix-cache")),
    Arm("chunked prefill off", "prefill in chunks", Changes.SERVER, _without_chunks),
    Arm("overlap off", "overlapped scheduling", Changes.SERVER, _unless_given("--disable-overlap-schedule")),
    Arm("drafts off", "drafts and their verify steps", Changes.SERVER, _without_drafts),
    Arm("attention backend", "SGLang's sparse attention backend", Changes.SERVER, _backend),
    Arm("KV dtype", "the dtype of the KV cache", Changes.SERVER, _kv_dtype),
    Arm("TP", "how the model is shared out", Changes.SERVER, _tp),
)
"""Every arm, in the order in which they run: the cheap ones first."""


class ArmError(ValueError):
    """Arms that are not there; the message names those that are."""


def chosen(names: Sequence[str], *, starts_servers: bool) -> list[Arm]:
    """The arms to run.

    Args:
        names: of arms; empty for all.
        starts_servers: whether arms can change the server; else those that do are left out, unless they are named.

    Raises:
        ArmError: a name that no arm has, or an arm that needs a command where there is none.
    """
    known = {arm.name: arm for arm in ARMS}
    for name in names:
        if name not in known:
            raise ArmError(f"arm {name!r} is not one of {', '.join(known)}")
        if known[name].changes is not Changes.ASKING and not starts_servers:
            raise ArmError(f"arm {name!r} starts a server of its own: give its command behind -- in place of a URL")
    if names:
        return [known[name] for name in names]
    return [arm for arm in ARMS if starts_servers or arm.changes is Changes.ASKING]
