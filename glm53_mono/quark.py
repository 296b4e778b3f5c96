"""Quark's quantisation schemes, as config.json states them: which of them a step reads.

Its `quantization_config` has one scheme for all layers (`global_quant_config`) and others for names and classes of
layers (`layer_quant_config`, `layer_type_quant_config`); SGLang chooses a layer's code by them (quark.py:
get_quant_method).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from glm53_mono.geometry import FP8_BLOCK, MXFP4_BLOCK

READ = (
    f"MXFP4 (fp4 for each {MXFP4_BLOCK} of a row, e8m0 scales, activations alike) and FP8 blocks of "
    f"{FP8_BLOCK} x {FP8_BLOCK}"
)
"""In words, for messages."""

_MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": MXFP4_BLOCK, "scale_format": "e8m0"}
_E4M3 = ("fp8_e4m3", "fp8_e4m3fn")


def foreign_scheme(config: Mapping[str, Any]) -> str | None:
    """The first scheme of a `quantization_config` that a step does not read, in words; None where it reads all."""
    for where, scheme in _schemes(config):
        if not (_is_mxfp4(scheme) or _is_fp8_blocks(scheme)):
            weight, activations = (_described(_part(scheme, name)) for name in ("weight", "input_tensors"))
            return f"{weight} with activations of {activations} for {where}"
    return None


def _schemes(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "all layers", config.get("global_quant_config")
    for table in ("layer_quant_config", "layer_type_quant_config"):
        yield from (config.get(table) or {}).items()


def _part(scheme: Any, name: str) -> Any:
    return scheme.get(name) if isinstance(scheme, Mapping) else None


def _is_mxfp4(scheme: Any) -> bool:
    """As SGLang tells it (quark.py: _is_mx_fp4)."""
    weight, activations = _part(scheme, "weight"), _part(scheme, "input_tensors")
    if not isinstance(weight, Mapping) or not isinstance(activations, Mapping):
        return False
    alike = all(part.get(name) == value for part in (weight, activations) for name, value in _MXFP4.items())
    return alike and weight.get("is_dynamic") is not True and activations.get("is_dynamic") is not False


def _is_fp8_blocks(scheme: Any) -> bool:
    """As SGLang tells it (quark.py: _get_block_fp8_config), of our block alone."""
    weight, activations = _part(scheme, "weight"), _part(scheme, "input_tensors")
    if not isinstance(weight, Mapping) or not isinstance(activations, Mapping):
        return False
    return (
        weight.get("dtype") in _E4M3
        and weight.get("qscheme") == "per_block"
        and weight.get("block_size") == [FP8_BLOCK, FP8_BLOCK]
        and weight.get("is_dynamic") is False
        and activations.get("dtype") in _E4M3
        and activations.get("is_dynamic") is True
        and not scheme.get("output_tensors")
        and not scheme.get("bias")
    )


def _described(part: Any) -> str:
    if not isinstance(part, Mapping):
        return "no format" if part is None else repr(part)
    size = part.get("group_size") or part.get("block_size")
    words = [part.get("dtype"), part.get("qscheme"), f"of {size}" if size else None, part.get("scale_format")]
    if part.get("is_dynamic") is False:
        words.append("static")
    return " ".join(str(word) for word in words if word)
