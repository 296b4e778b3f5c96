"""What a compiler says of the kernel without a GPU: its variants, their resources, and hazards in their assembly."""

from __future__ import annotations

from pathlib import Path


def worker_file() -> Path:
    """The file that compiles one variant when Python runs it; importing it would take torch and Triton along."""
    return Path(__file__).parent / "worker.py"
