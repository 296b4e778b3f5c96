"""A verify step with the race of upstream's fused verify kernel: one tile rolls the committed windows on in place.

Tiles of the same wave read the windows as they were; those that run later read them rolled. The kernel under test lets
no program touch a committed window in verify.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from glm53_mono.kernels import kda, monokernel
from tests.kernels import delays
from tests.kernels.seeded_bugs import edited

WRITE = "        store_window(after, h1, h2, u, written, G)\n"

ROLL = """        if tl.min(column, 0) == 0:
            for other in range(0, rows // step.tokens):
                there = tl.load(step.state_slots + other).to(tl.int64)
                for first in range(0, G.conv_channels, 1024):
                    channel = first + tl.arange(0, 1024)
                    rolled = (channel < G.conv_channels) & (there > 0)
                    own = pool + there * G.conv_history * G.conv_channels + channel
                    second = tl.load(own + G.conv_channels, mask=rolled)
                    third = tl.load(own + 2 * G.conv_channels, mask=rolled)
                    tl.store(own, second, mask=rolled)
                    tl.store(own + G.conv_channels, third, mask=rolled)
"""


@contextmanager
def delays_of_rolling_kernel(folder: Path) -> Iterator[ModuleType]:
    """`delays`, around a kernel that rolls the windows; its edited sources lie in `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setitem(sys.modules, "edited_kda", edited(kda, WRITE, WRITE + ROLL, folder))
        imports = "from {}kda import kda_delta, kda_project\n"
        wrong = edited(monokernel, imports.format("glm53_mono.kernels."), imports.format("edited_"), folder)
        patch.setitem(sys.modules, "edited_monokernel", wrong)
        imports = "from {}monokernel import UNSPECIALIZED, monokernel\n"
        yield edited(delays, imports.format("glm53_mono.kernels."), imports.format("edited_"), folder)
