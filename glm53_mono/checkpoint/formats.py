"""How the published quantised checkpoints store their matrices: which are in what format, and what config.json says.

`zai-org/GLM-5.3-Flash` has FP8 blocks, `amd/GLM-5.3-Flash-Quark-MXFP4` MXFP4 experts beside FP8 blocks.
"""

from __future__ import annotations

from enum import StrEnum
from fnmatch import fnmatch
from typing import Any

from glm53_mono.geometry import FP8_BLOCK, MXFP4_BLOCK

PREFIX = "model.language_model."
"""What the names of the text model's tensors begin with."""


class WeightFormat(StrEnum):
    """Formats of a checkpoint; the quantised ones keep some matrices in bf16."""

    BF16 = "bf16"
    FP8 = "fp8"
    MXFP4 = "mxfp4"


MLA_BLOCKS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
"""MLA projections stored in FP8 blocks; kv_b_proj, which SGLang splits and absorbs, is bf16."""

INDEXER_BLOCKS = ("wq_b", "wk")
"""Indexer projections in FP8 blocks in the Quark checkpoint, bf16 in the FP8 one."""

QUARK = "quark"


def quantization_config(weight_format: WeightFormat, text: dict[str, Any]) -> dict[str, Any] | None:
    """The `quantization_config` of config.json; None for bf16.

    Args:
        text: the `text_config` of config.json.
    """
    if weight_format == WeightFormat.BF16:
        return None
    if weight_format == WeightFormat.FP8:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": _unconverted(text, ("weights_proj", *INDEXER_BLOCKS)),
        }
    fp8 = {
        "weight": {
            "dtype": "fp8_e4m3",
            "qscheme": "per_block",
            "block_size": [FP8_BLOCK, FP8_BLOCK],
            "is_dynamic": False,
        },
        "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": FP8_BLOCK, "is_dynamic": True},
        "output_tensors": None,
        "bias": None,
    }
    group = {"dtype": "fp4", "qscheme": "per_group", "group_size": MXFP4_BLOCK, "scale_format": "e8m0"}
    mxfp4 = {
        "weight": {**group, "is_dynamic": False},
        "input_tensors": {**group, "is_dynamic": True},
        "output_tensors": None,
        "bias": None,
    }
    return {
        "quant_method": QUARK,
        "global_quant_config": mxfp4,
        "layer_quant_config": dict.fromkeys(_block_patterns(text), fp8),
        "layer_type_quant_config": {},
        "exclude": _unconverted(text, ("weights_proj",)),
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    }


def format_of_config(text: dict[str, Any]) -> WeightFormat:
    """The format of a checkpoint with this `text_config`, as `quantization_config` makes one."""
    config = text.get("quantization_config")
    if config is None:
        return WeightFormat.BF16
    return WeightFormat.MXFP4 if config["quant_method"] == QUARK else WeightFormat.FP8


def format_of(name: str, text: dict[str, Any]) -> WeightFormat:
    """The format in which a checkpoint with this `text_config` stores a tensor."""
    config = text.get("quantization_config")
    module = name.removesuffix(".weight")
    if config is None or module == name:
        return WeightFormat.BF16
    if config["quant_method"] == QUARK and any(fnmatch(module, pattern) for pattern in config["layer_quant_config"]):
        return WeightFormat.FP8
    if any(fnmatch(module, f"*{part}") for part in (".experts.*_proj", ".shared_experts.*_proj")):
        return WeightFormat.MXFP4 if config["quant_method"] == QUARK else WeightFormat.FP8
    if config["quant_method"] == QUARK:
        return WeightFormat.BF16
    return WeightFormat.FP8 if any(fnmatch(module, pattern) for pattern in _fp8_patterns(text)) else WeightFormat.BF16


def scales_name(name: str, text: dict[str, Any]) -> str:
    """The name of the scales of a quantised matrix: Quark leaves out the `_inv` of block FP8 (glm5_next.py:1742)."""
    return f"{name}_scale" if text["quantization_config"]["quant_method"] == QUARK else f"{name}_scale_inv"


def _sparse_attention_layers(text: dict[str, Any]) -> list[int]:
    mtp = [text["num_hidden_layers"]] if text["num_nextn_predict_layers"] else []
    return [*text["linear_attn_config"]["full_attn_layers"], *mtp]


def _fp8_patterns(text: dict[str, Any]) -> list[str]:
    attention = [f"{PREFIX}layers.{i}.self_attn.{part}" for i in _sparse_attention_layers(text) for part in MLA_BLOCKS]
    return attention + [f"{PREFIX}layers.{layer}.mlp.*_proj" for layer in range(text["first_k_dense_replace"])]


def _block_patterns(text: dict[str, Any]) -> list[str]:
    """Modules of the Quark checkpoint in FP8 blocks: the dense layers, MLA with its indexer, all of the MTP layer."""
    layers = _sparse_attention_layers(text)
    indexer = [f"{PREFIX}layers.{layer}.self_attn.indexer.{part}" for layer in layers for part in INDEXER_BLOCKS]
    mtp = text["num_hidden_layers"]
    experts = [f"{PREFIX}layers.{mtp}.mlp.*experts*"] if text["num_nextn_predict_layers"] else []
    return [*_fp8_patterns(text), *indexer, *experts]


def _unconverted(text: dict[str, Any], indexer: tuple[str, ...]) -> list[str]:
    """Modules that stay bf16, by the names of the checkpoint."""
    names = ["lm_head", f"{PREFIX}embed_tokens", "model.visual"]
    for layer in text["linear_attn_config"]["kda_layers"]:
        parts = ("q_proj", "k_proj", "v_proj", "o_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj")
        names += [f"{PREFIX}layers.{layer}.self_attn.{part}" for part in parts]
    for layer in _sparse_attention_layers(text):
        names.append(f"{PREFIX}layers.{layer}.self_attn.kv_b_proj")
        names += [f"{PREFIX}layers.{layer}.self_attn.indexer.{part}" for part in indexer]
    layers = text["num_hidden_layers"] + text["num_nextn_predict_layers"]
    names += [f"{PREFIX}layers.{layer}.mlp.gate" for layer in range(text["first_k_dense_replace"], layers)]
    if text["num_nextn_predict_layers"]:
        names.append(f"{PREFIX}layers.{text['num_hidden_layers']}.eh_proj")
    return names
