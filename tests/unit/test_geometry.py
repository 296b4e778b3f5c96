"""Every size of a rank follows from the config; a config that the step cannot represent is refused by its fields."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from glm53_mono.checkpoint.config import model_config
from glm53_mono.geometry import LINEAR_STRUCTURE, STRUCTURE, TP_SIZES, Geometry, GeometryError


def text_config(**changes: Any) -> SimpleNamespace:
    """The published model's text fields, changed."""
    return SimpleNamespace(**{**copy.deepcopy(model_config()["text_config"]), **changes})


def with_linear(**changes: Any) -> SimpleNamespace:
    """The same with fields of `linear_attn_config` changed; None removes one."""
    text = text_config()
    text.linear_attn_config = {
        name: value for name, value in {**text.linear_attn_config, **changes}.items() if value is not None
    }
    return text


def refusal(text: Any, tp_size: int = 1) -> list[str]:
    """The fields that a config is refused for."""
    with pytest.raises(GeometryError) as caught:
        Geometry.from_config(text, tp_size)
    return str(caught.value).split("; ")


def test_the_published_model() -> None:
    g = Geometry.from_config(text_config(), 1)
    assert (g.layers, g.hidden, g.vocab, g.dense_layers) == (45, 4096, 154880, 3)
    assert (len(g.kda_layers), g.dsa_layers) == (34, (3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43))
    assert (g.kda_heads, g.mla_heads, g.q_rank, g.latent) == (64, 64, 1536, 512)
    assert (g.experts, g.experts_per_token, g.routed_scale) == (288, 8, 2.5)
    assert (g.expert_width, g.dense_width) == (2048, 12288)
    assert (g.index_heads, g.index_topk) == (32, 2048)


def test_derived_sizes_of_the_published_model() -> None:
    g = Geometry.from_config(text_config(), 1)
    assert (g.stream_width, g.mix) == (16384, 24)
    assert (g.kda_width, g.conv_channels, g.conv_history) == (8192, 24576, 3)
    assert (g.selected_pools, g.selection_width) == (512, 2051)
    assert (g.page_pools, g.index_page_bytes) == (64, 8448)
    assert g.vocab_shard == 154880


@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_heads_widths_and_vocabulary_are_shared_by_the_ranks(tp_size: int) -> None:
    whole, shard = Geometry.from_config(text_config(), 1), Geometry.from_config(text_config(), tp_size)
    for name in ("kda_heads", "mla_heads", "expert_width", "dense_width", "kda_width", "conv_channels", "vocab_shard"):
        assert getattr(shard, name) * tp_size == getattr(whole, name), name
    for name in ("hidden", "experts", "index_heads", "latent", "q_rank", "vocab", "mix"):
        assert getattr(shard, name) == getattr(whole, name), name


def test_a_vocabulary_is_padded_before_it_is_shared() -> None:
    # vocab_parallel_embedding.py pads to a multiple of 64.
    assert Geometry.from_config(text_config(vocab_size=1000), 8).vocab_shard == 128


def test_the_kinds_of_layers() -> None:
    g = Geometry.from_config(text_config(), 1)
    assert [g.is_kda(layer) for layer in range(5)] == [True, True, True, False, True]
    assert [g.is_dense(layer) for layer in range(5)] == [True, True, True, False, False]


def test_text_fields_are_read_below_a_multimodal_config() -> None:
    whole = SimpleNamespace(hidden_size="of something else", text_config=text_config())
    assert Geometry.from_config(whole, 1) == Geometry.from_config(text_config(), 1)


def test_cut_down_models_have_a_geometry() -> None:
    small = model_config(layers=8, experts=16, scale="small")["text_config"]
    assert Geometry.from_config(SimpleNamespace(**small), 1).layers == 8


def test_fields_that_the_step_does_not_know_are_ignored() -> None:
    assert Geometry.from_config(text_config(a_new_field=1), 1) == Geometry.from_config(text_config(), 1)


def other_than(value: Any) -> Any:
    """A value of the same kind that the step is not built for."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return "other"


@pytest.mark.parametrize("name", STRUCTURE)
def test_a_structural_field_has_one_value(name: str) -> None:
    wrong = other_than(STRUCTURE[name])
    assert refusal(text_config(**{name: wrong})) == [f"{name} {wrong!r} is not {STRUCTURE[name]!r}"]


@pytest.mark.parametrize("name", [name for name, value in STRUCTURE.items() if value is not None])
def test_a_missing_structural_field_is_refused(name: str) -> None:
    text = text_config()
    delattr(text, name)
    assert f"{name} None is not {STRUCTURE[name]!r}" in refusal(text)


@pytest.mark.parametrize("name", LINEAR_STRUCTURE)
def test_a_structural_field_of_the_kda_layers_has_one_value(name: str) -> None:
    wrong = LINEAR_STRUCTURE[name] + 1
    expected = f"linear_attn_config.{name} {wrong!r} is not {LINEAR_STRUCTURE[name]!r}"
    assert refusal(with_linear(**{name: wrong})) == [expected]
    assert refusal(with_linear(**{name: None})) == [f"linear_attn_config.{name} None is not {LINEAR_STRUCTURE[name]!r}"]


def test_one_is_not_true() -> None:
    assert refusal(text_config(mhc=1)) == ["mhc 1 is not True"]
    assert refusal(text_config(n_group=True)) == ["n_group True is not 1"]


@pytest.mark.parametrize(
    "name",
    [
        "num_hidden_layers",
        "hidden_size",
        "vocab_size",
        "first_k_dense_replace",
        "num_attention_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "index_n_heads",
        "index_topk",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "intermediate_size",
    ],
)
@pytest.mark.parametrize("value", [None, -1, 1.5, True, "64"])
def test_a_size_is_a_whole_number(name: str, value: Any) -> None:
    reasons = refusal(text_config(**{name: value}))
    assert any(reason.startswith(f"{name} {value!r} is not a whole number") for reason in reasons)


@pytest.mark.parametrize(
    ("name", "value", "multiple"),
    [
        ("hidden_size", 4100, 128),
        ("q_lora_rank", 1540, 32),
        ("kv_lora_rank", 500, 128),
        ("index_topk", 2046, 4),
        ("moe_intermediate_size", 2040, 32),
        ("intermediate_size", 12280, 32),
    ],
)
def test_a_size_that_does_not_fit_the_tiles_is_refused(name: str, value: int, multiple: int) -> None:
    assert refusal(text_config(**{name: value})) == [f"{name} {value} is not a multiple of {multiple}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (text_config(num_attention_heads=60), "num_attention_heads 60 is not a multiple of 8 at tp_size 8"),
        (with_linear(num_heads=60), "linear_attn_config.num_heads 60 is not a multiple of 8 at tp_size 8"),
        (text_config(moe_intermediate_size=2016), "moe_intermediate_size 2016 is not a multiple of 256 at tp_size 8"),
        (text_config(intermediate_size=12256), "intermediate_size 12256 is not a multiple of 256 at tp_size 8"),
    ],
)
def test_a_size_that_the_ranks_cannot_share_is_refused(text: Any, expected: str) -> None:
    assert refusal(text, 8) == [expected]


@pytest.mark.parametrize("tp_size", [0, 3, 16, -1])
def test_other_numbers_of_ranks_are_refused(tp_size: int) -> None:
    assert refusal(text_config(), tp_size) == [f"tp_size {tp_size} is not one of 1, 2, 4, 8"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (text_config(linear_attn_config=None), "linear_attn_config None does not describe the KDA layers"),
        (with_linear(kda_layers=[0, 1, 2, 45], full_attn_layers=None), "names layers outside 0..44"),
        (text_config(linear_attn_config=[0]), "linear_attn_config [0] does not describe the KDA layers"),
        (with_linear(kda_layers=["0"]), "linear_attn_config.kda_layers ['0'] is not a list of layer numbers"),
        (with_linear(full_attn_layers=3), "linear_attn_config.full_attn_layers 3 is not a list of layer numbers"),
        (text_config(indexer_types=1), "indexer_types 1 is not a list"),
        (with_linear(full_attn_layers=[3]), "linear_attn_config.full_attn_layers [3] is not the rest of the layers"),
        (text_config(indexer_types=["full", "shared"]), "indexer_types has shared, where every DSA layer"),
        (
            text_config(first_k_dense_replace=2),
            "mlp_layer_types has 'dense' for layer 2, and first_k_dense_replace 2 makes it 'sparse'",
        ),
        (
            text_config(mlp_layer_types=["dense"] * 3 + ["sparse"] * 41 + ["dense"]),
            "mlp_layer_types has 'dense' for layer 44, and first_k_dense_replace 3 makes it 'sparse'",
        ),
        (text_config(mlp_layer_types=["dense"] * 3), "mlp_layer_types has 3 layers, num_hidden_layers is 45"),
        (text_config(mlp_layer_types="dense"), "mlp_layer_types 'dense' is not a list"),
        (text_config(rope_scaling={"mrope_section": [1, 2, 3]}), "rope_scaling.mrope_section [1, 2, 3] is not None"),
        (text_config(num_experts_per_tok=300), "num_experts_per_tok 300 is more than n_routed_experts 288"),
        (text_config(routed_scaling_factor=0.0), "routed_scaling_factor 0.0 is not a positive number"),
        (text_config(routed_scaling_factor=None), "routed_scaling_factor None is not a positive number"),
    ],
)
def test_what_does_not_hang_together_is_refused(text: Any, expected: str) -> None:
    assert any(expected in reason for reason in refusal(text))


@pytest.mark.parametrize("kinds", [None, ["dense"] * 3 + ["sparse"] * 43])
def test_ffn_kinds_may_be_missing_or_go_on_to_the_mtp_layer(kinds: list[str] | None) -> None:
    assert Geometry.from_config(text_config(mlp_layer_types=kinds), 1) == Geometry.from_config(text_config(), 1)


@pytest.mark.parametrize(("name", "value"), [("num_hidden_layers", 10**9), ("num_hidden_layers", None)])
def test_nothing_follows_from_a_wrong_number_of_layers(name: str, value: Any) -> None:
    (reason,) = refusal(text_config(**{name: value}))
    assert reason.startswith(f"{name} {value} is ")


@pytest.mark.parametrize("value", [10**9, -1])
def test_nothing_follows_from_a_wrong_number_of_experts(value: int) -> None:
    (reason,) = refusal(text_config(n_routed_experts=value))
    assert reason.startswith(f"n_routed_experts {value} is ")


def test_every_reason_is_given_at_once() -> None:
    reasons = refusal(text_config(hc_mult=2, hidden_act="gelu", hidden_size=100), 3)
    assert [reason.split()[0] for reason in reasons] == ["hc_mult", "hidden_act", "tp_size", "hidden_size"]
