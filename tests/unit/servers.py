"""Servers to judge: the seed's arguments, config files, and a way through SGLang's own resolution without a GPU."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from glm53_mono.checkpoint.config import model_config
from glm53_mono.checkpoint.formats import WeightFormat, quantization_config
from glm53_mono.refusals import REFUSALS
from glm53_mono.upstream import launch

ISA = "gfx950"


def words(arguments: str) -> tuple[str, ...]:
    """Launch arguments as a shell would split them, without quotes."""
    return tuple(arguments.split())


MONOKERNEL = words("--enable-amd-monokernel")

PLAIN = words("--tp 4 --kv-cache-dtype bfloat16 --dsa-prefill-backend tilelang --dsa-decode-backend tilelang")
"""The seed server's arguments without its drafts."""

CHAIN = words("--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4")
"""Three drafts in a chain."""

EAGLE = (*words("--speculative-algorithm EAGLE"), *CHAIN)
"""The seed server's drafts: MTP3."""

SEED = (*PLAIN, *EAGLE)
"""The server that must be accepted: TP4, bf16 KV, tilelang DSA, EAGLE 3/1/4."""

FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.visual"],
}

ConfigChange = Callable[[dict[str, Any]], None]


def write_config(folder: Path, *changes: ConfigChange, layers: int = 45) -> Path:
    """Write the published model's config.json, changed, into a new folder; returns the folder."""
    config = model_config(layers=layers)
    for change in changes:
        change(config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def text_field(name: str, value: Any) -> ConfigChange:
    """A change of one text field."""
    return lambda config: config["text_config"].__setitem__(name, value)


def linear_field(name: str, value: Any) -> ConfigChange:
    """A change of one field of `linear_attn_config`."""
    return lambda config: config["text_config"]["linear_attn_config"].__setitem__(name, value)


def quantized(config: dict[str, Any]) -> None:
    """The published FP8 checkpoint's quantization_config, in brief."""
    config["quantization_config"] = FP8_CONFIG
    config["text_config"]["quantization_config"] = FP8_CONFIG


def quark(config: dict[str, Any], **changes: Any) -> None:
    """The published Quark checkpoint's quantization_config, changed."""
    found = quantization_config(WeightFormat.MXFP4, config["text_config"])
    assert found is not None
    config["quantization_config"] = config["text_config"]["quantization_config"] = found | changes


@dataclass(frozen=True)
class Judged:
    """SGLang's answer about a server, and how it had resolved the arguments.

    Attributes:
        spec: the spec it found, or None.
        reasons: everything against the server.
        reasons_without: the same if one of our refusals did not exist.
        launch: the resolved arguments.
    """

    spec: Any
    reasons: list[str]
    reasons_without: list[str]
    launch: launch.Launch = field(repr=False)


@contextlib.contextmanager
def machine() -> Iterator[None]:
    """A machine with a gfx950, for SGLang; what it writes into the environment is undone."""
    with launch.environment_kept(), launch.platform_of(ISA):
        yield


def judge(
    arguments: Sequence[str], model: Path, *, declared: dict[str, Any] | None = None, without: str | None = None
) -> Judged:
    """Take a server through SGLang's ServerArgs, plugins and binding.

    Args:
        arguments: launch arguments beside the model's path.
        model: folder with a config.json.
        declared: resolved values to put over SGLang's own, for servers that it refuses before it asks us.
        without: name of a refusal to leave out for `reasons_without`.

    Raises:
        launch.LaunchError: SGLang refuses the arguments itself.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, record_of

    with machine():
        launch.load_plugins()
        resolved = launch.resolve(["--model-path", str(model), *MONOKERNEL, *arguments])
        if declared:
            declare_resolution(record_of(resolved.cfg), "tests", **declared)
        spec, reasons = launch.disable_reasons(resolved, ISA)
        fewer = tuple(refusal for refusal in REFUSALS if refusal.name != without)
        with mock.patch("glm53_mono.spec.REFUSALS", fewer):
            _, reasons_without = launch.disable_reasons(resolved, ISA)
    return Judged(spec, reasons, reasons_without, resolved)
