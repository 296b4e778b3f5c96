"""Loads quantised checkpoints with SGLang's own loader on the CPU; run as a process of its own.

    python load_quantised_with_sglang.py CHECKPOINT...

The last line printed is JSON: for each checkpoint, as target and as draft model, the parameters that the load did not
fill, and the dtype of every other matrix. What SGLang does to the weights after loading needs the device and is left
out, and so is its question whether the device can run Quark's MXFP4.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from load_with_sglang import enter_sglang, read_config
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.layers.quantization.quark.quark import QuarkConfig
from sglang.srt.model_loader.loader import DefaultModelLoader

UNFILLED_BYTE = 255


def loaded(checkpoint: str, *, is_draft: bool) -> dict[str, Any]:
    """What SGLang's loader makes of a checkpoint."""
    config = read_config(checkpoint, is_draft=is_draft)
    loader = DefaultModelLoader(LoadConfig())
    model = loader.initialize_model_for_startup(model_config=config, device_config=DeviceConfig("cpu"))
    for parameter in model.parameters():
        parameter.data.fill_(UNFILLED_BYTE if parameter.dtype == torch.uint8 else float("nan"))
    model.load_weights(loader._get_all_weights(config, model))
    # scales of a KV cache: no such checkpoint has them
    named = {name: value for name, value in model.named_parameters() if not name.endswith((".k_scale", ".v_scale"))}
    return {
        "unfilled": [name for name, value in named.items() if _has_unfilled(value)],
        "dtypes": {name: str(value.dtype) for name, value in named.items() if value.dim() > 1},
    }


def _has_unfilled(value: torch.Tensor) -> bool:
    if value.dtype == torch.uint8:
        return bool((value == UNFILLED_BYTE).all())
    return bool(value.float().isnan().any())


if __name__ == "__main__":
    QuarkConfig._check_scheme_supported = lambda self, min_capability, error=True: True
    enter_sglang()
    print(json.dumps([[loaded(path, is_draft=draft) for draft in (False, True)] for path in sys.argv[1:]]))
