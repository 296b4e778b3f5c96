"""Loads checkpoints with SGLang's own loader on the CPU; run as a process of its own, since SGLang's state is global.

    python load_with_sglang.py CHECKPOINT...

The last line printed is JSON: for each checkpoint the parameters that the load did not fill, as target and as draft
model, and the geometry of the config as SGLang read it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.server_args import ServerArgs

from glm53_mono.geometry import Geometry


def enter_sglang() -> None:
    """Make process groups of one rank and publish server arguments, in the order that SGLang wants."""
    rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=rendezvous.as_uri()
    )
    # SGLang resolves no model-specific defaults for this path: for a real one they ask for a GPU.
    publish(ServerArgs(model_path="dummy", device="cpu"), role="test", ranks=SpawnRanks(world_rank=0))
    get_parallel().override_permanently(world_group=parallel_state._WORLD)
    parallel_state.initialize_model_parallel(backend="gloo")


def read_config(checkpoint: str, *, is_draft: bool) -> ModelConfig:
    """The checkpoint's config as SGLang's server reads it, without the vision tower, which needs a GPU."""
    return ModelConfig(checkpoint, is_draft_model=is_draft, language_only=True)


def unfilled_parameters(model_config: ModelConfig) -> list[str]:
    """Names of the parameters that were NaN before the load and still are."""
    loader = DefaultModelLoader(LoadConfig())
    model = loader.initialize_model_for_startup(model_config=model_config, device_config=DeviceConfig("cpu"))
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    loader.load_weights_and_postprocess(model, loader._get_all_weights(model_config, model), torch.device("cpu"))
    return [name for name, parameter in model.named_parameters() if parameter.isnan().any()]


def report(checkpoint: str) -> dict[str, Any]:
    """What SGLang made of one checkpoint."""
    target, draft = (read_config(checkpoint, is_draft=is_draft) for is_draft in (False, True))
    return {
        "geometry": asdict(Geometry.from_config(target.hf_config, tp_size=1)),
        "target": unfilled_parameters(target),
        "draft": unfilled_parameters(draft),
    }


if __name__ == "__main__":
    enter_sglang()
    print(json.dumps([report(path) for path in sys.argv[1:]]))
