"""What the environment asks of the check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CHECK = "SGLANG_AMD_MONO_CHECK"
FAIL = "SGLANG_AMD_MONO_CHECK_FAIL"


@dataclass(frozen=True)
class Settings:
    """How steps are checked.

    Attributes:
        every: compare each `every`-th step.
        keeps_sglang: the server goes on with what SGLang's forward computes, not with the launch's results.
        raises: the first violation ends the process.
    """

    every: int = 1
    keeps_sglang: bool = False
    raises: bool = False

    @classmethod
    def asked(cls, environ: Mapping[str, str]) -> Settings | None:
        """The settings, None where nothing is asked.

        Raises:
            ValueError: a value that means nothing.
        """
        value = environ.get(CHECK, "").strip()
        fail = environ.get(FAIL, "log").strip()
        if fail not in ("log", "raise"):
            raise ValueError(f"{FAIL} is {fail!r}, not 'log' or 'raise'")
        if not value or (value.isdecimal() and not int(value)):
            return None
        if value == "sglang":
            return cls(keeps_sglang=True, raises=fail == "raise")
        if not value.isdecimal():
            raise ValueError(f"{CHECK} is {value!r}, not 0, 'sglang', or N to compare every Nth step")
        return cls(every=int(value), raises=fail == "raise")
