"""Imports torch, Triton and the spec, and says what came of it: one line of JSON a stage.

`doctor` runs this in a process of its own, since a broken torch may hang, or take the process with it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def torch_facts() -> dict[str, Any]:
    """Version of torch, and ISA and compute units of every GPU that it sees."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        # SGLang's own names (srt/kernel_plugins/amd/binding.py: device_isa).
        isa = properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"
        gpus.append({"isa": isa, "name": properties.name, "compute_units": properties.multi_processor_count})
    return {"version": torch.__version__, "gpus": gpus}


def triton_facts() -> dict[str, Any]:
    """Version of Triton."""
    import triton

    return {"version": triton.__version__}


def spec_facts() -> dict[str, Any]:
    """Devices of the spec that SGLang would load, and the launch grid of each."""
    from glm53_mono.spec import SPEC

    return {"devices": {isa: limits.resident_blocks for isa, limits in SPEC.devices.items()}}


STAGES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "torch": torch_facts,
    "triton": triton_facts,
    "spec": spec_facts,
}
"""In this order: a later stage imports what an earlier one has tried."""


def main() -> None:
    """Run every stage; one that fails does not keep the next from trying."""
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for name, stage in STAGES.items():
            try:
                line = {"stage": name, "facts": stage()}
            except Exception as error:  # whatever it is, it is the answer
                text = " ".join(str(error).split())
                line = {"stage": name, "error": f"{type(error).__name__}: {text}"}
            print(json.dumps(line), file=answers, flush=True)


if __name__ == "__main__":
    # Last on the path, for a package that is run from its source folder.
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    main()
