"""The module from which SGLang imports FlashMLA's types."""

from __future__ import annotations

from flash_mla import Absent, __getattr__

__all__ = ["Absent", "__getattr__"]
