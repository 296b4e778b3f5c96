"""The config.json of GLM-5.3-Flash, at its real sizes or at small ones of the same structure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from glm53_mono.checkpoint.formats import WeightFormat, quantization_config
from glm53_mono.checkpoint.tokenizer import EOS_TOKENS, PAD_TOKEN, special_token_id
from glm53_mono.geometry import ARCHITECTURE, LINEAR_STRUCTURE, MOST_EXPERTS, MOST_LAYERS, STRUCTURE, Geometry

DSA_PERIOD = 4
"""The last layer of every so many is a DSA layer, the others are KDA (SGLang configs/glm5_next.py:200-205)."""

DENSE_LAYERS = 3
"""Layers at the start whose FFN is dense (`first_k_dense_replace`)."""


@dataclass(frozen=True)
class Scale:
    """The sizes that the kernels read at run time; counted in elements."""

    hidden: int
    vocab: int
    heads: int
    q_rank: int
    latent: int
    index_heads: int
    index_topk: int
    experts_per_token: int
    expert_width: int
    dense_width: int


SCALES = {
    "full": Scale(
        hidden=4096,
        vocab=154880,
        heads=64,
        q_rank=1536,
        latent=512,
        index_heads=32,
        index_topk=2048,
        experts_per_token=8,
        expert_width=2048,
        dense_width=12288,
    ),
    "small": Scale(
        hidden=512,
        vocab=512,
        heads=2,
        q_rank=128,
        latent=128,
        index_heads=4,
        index_topk=64,
        experts_per_token=2,
        expert_width=128,
        dense_width=256,
    ),
}
"""`full` holds the published model's sizes; `small` is for a CPU. For others use `dataclasses.replace`."""


class ConfigError(ValueError):
    """A model that cannot be asked for; the message is one line for the user."""


def model_config(
    layers: int = 45,
    experts: int = 288,
    scale: str | Scale = "full",
    *,
    mtp: bool = True,
    weight_format: WeightFormat = WeightFormat.BF16,
) -> dict[str, Any]:
    """The contents of config.json.

    Args:
        layers: decoder layers, the MTP layer not counted.
        experts: routed experts of a sparse layer.
        scale: a key of `SCALES` or sizes of one's own.
        mtp: whether the checkpoint has the MTP layer (index `layers`).
        weight_format: of the matrices that the published checkpoint of that format quantises.

    The defaults are the published model's text part. The vision part is a stub of one block: SGLang's server builds
    the vision tower whatever the checkpoint says (configs/model_config.py:909 overwrites `language_only`), and
    `language_model_only` keeps it from ever running.

    Raises:
        ConfigError: a scale that does not exist, no layers or experts or far too many, or an MTP layer on top of a
            single layer.
        glm53_mono.geometry.GeometryError: sizes that the model cannot have, each named.
    """
    sizes = SCALES.get(scale) if isinstance(scale, str) else scale
    if sizes is None:
        raise ConfigError(f"scale {scale!r} is not one of {', '.join(SCALES)}")
    for name, count, most in (("layers", layers, MOST_LAYERS), ("experts", experts, MOST_EXPERTS)):
        if not 1 <= count <= most:
            raise ConfigError(f"{name} {count} is not from 1 to {most}")
    if mtp and layers == 1:
        # SGLang looks for the MTP layer of such a model at index 0 (models/glm5_next.py:1685).
        raise ConfigError("layers 1 cannot have an MTP layer on top: use at least 2")
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "glm5_next",
        "language_only": True,
        "language_model_only": True,
        "dtype": "bfloat16",
        "image_token_id": special_token_id("<|image|>", sizes.vocab),
        "video_token_id": special_token_id("<|video|>", sizes.vocab),
        "image_start_token_id": special_token_id("<|begin_of_image|>", sizes.vocab),
        "image_end_token_id": special_token_id("<|end_of_image|>", sizes.vocab),
        "video_start_token_id": special_token_id("<|begin_of_video|>", sizes.vocab),
        "video_end_token_id": special_token_id("<|end_of_video|>", sizes.vocab),
        "text_config": _text_config(layers, experts, sizes, mtp),
        "vision_config": _vision_stub(sizes),
    }
    kda_layers = [layer for layer in range(layers) if layer % DSA_PERIOD != DSA_PERIOD - 1]
    order_layers(config, kda_layers, min(layers, DENSE_LAYERS))
    checkpoint_geometry(config)
    quantisation = quantization_config(weight_format, config["text_config"])
    if quantisation is not None:
        # SGLang takes the text model's for the whole (configs/glm5_next.py:331); transformers reads the outer one
        config["text_config"]["quantization_config"] = config["quantization_config"] = quantisation
    return config


def checkpoint_geometry(config: dict[str, Any]) -> Geometry:
    """The unsharded sizes behind the contents of a config.json.

    Raises:
        glm53_mono.geometry.GeometryError: a field that the step cannot represent, named with both values.
    """
    return Geometry.from_config(SimpleNamespace(**config["text_config"]), tp_size=1)


def order_layers(config: dict[str, Any], kda_layers: Collection[int], dense_layers: int) -> None:
    """Give the contents of a config.json other kinds of layers, in every field that names them.

    Args:
        config: changed in place.
        kda_layers: layers whose attention is KDA; the others are DSA.
        dense_layers: layers at the start whose FFN is dense.
    """
    text = config["text_config"]
    layers = range(text["num_hidden_layers"])
    text["linear_attn_config"]["kda_layers"] = [layer for layer in layers if layer in kda_layers]
    text["linear_attn_config"]["full_attn_layers"] = [layer for layer in layers if layer not in kda_layers]
    text["first_k_dense_replace"] = dense_layers
    text["mlp_layer_types"] = ["dense" if layer < dense_layers else "sparse" for layer in layers]


def _text_config(layers: int, experts: int, sizes: Scale, mtp: bool) -> dict[str, Any]:
    return {
        **STRUCTURE,
        "model_type": "glm5_next_text",
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.dense_width,
        "moe_intermediate_size": sizes.expert_width,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": int(mtp),
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "max_position_embeddings": 1048576,
        "n_routed_experts": experts,
        "num_experts_per_tok": sizes.experts_per_token,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": sizes.q_rank,
        "kv_lora_rank": sizes.latent,
        "index_topk": sizes.index_topk,
        "index_n_heads": sizes.index_heads,
        "index_share_for_mtp_iteration": True,
        "indexer_rope_interleave": True,
        "indexer_types": ["full"] * layers,
        "linear_attn_config": {**LINEAR_STRUCTURE, "num_heads": sizes.heads},
        "pad_token_id": special_token_id(PAD_TOKEN, sizes.vocab),
        "eos_token_id": [special_token_id(token, sizes.vocab) for token in EOS_TOKENS],
    }


def _vision_stub(sizes: Scale) -> dict[str, Any]:
    return {
        "depth": 1,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 128,
        "projection_intermediate_size": 128,
        "out_hidden_size": sizes.hidden,
        "image_size": 28,
        "swiglu_limit": STRUCTURE["swiglu_limit"],
    }
