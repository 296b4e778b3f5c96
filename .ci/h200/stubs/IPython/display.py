"""The two names that `sglang/utils.py` imports."""

from __future__ import annotations

from typing import Any, NoReturn


def HTML(*arguments: Any, **options: Any) -> NoReturn:
    """Refuse: there is no notebook."""
    raise RuntimeError("IPython is not installed: this is the stub of .ci/h200/stubs")


def display(*arguments: Any, **options: Any) -> NoReturn:
    """Refuse: there is no notebook."""
    raise RuntimeError("IPython is not installed: this is the stub of .ci/h200/stubs")
