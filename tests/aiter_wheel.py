"""Functions of AITER out of its published wheel, which is not installed: importing it wants ROCm.

`make venv` fetches the wheel (requirements/aiter.txt) into the environment's own folder.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(sys.prefix) / "wheels"


def function_of(file: str, name: str) -> Callable[..., Any]:
    """A function of AITER's that needs torch alone.

    Args:
        file: path within the wheel.
        name: of the function.
    """
    wheels = sorted(FOLDER.glob("amd_aiter-*.whl"))
    assert wheels, f"{FOLDER} holds no amd_aiter wheel: `make venv` fetches the one of requirements/aiter.txt"
    with zipfile.ZipFile(wheels[-1]) as wheel:
        source = wheel.read(file).decode()
    found = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([found], []), f"{wheels[-1].name}/{file}", "exec"), scope)
    return scope[name]
