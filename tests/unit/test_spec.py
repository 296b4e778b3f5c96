"""The MonoSpec is one that SGLang accepts, and promises what the design says."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from sglang.kernels.plugin_kernels.amd.spec import MONOKERNEL_API_VERSION, Feature, MonoSpec, NumericsKind

from glm53_mono import numerics, spec
from glm53_mono.spec import SPEC
from glm53_mono.upstream import loaded
from glm53_mono.upstream.tensors import UpstreamError


def test_it_is_a_spec_of_the_contract_that_this_sglang_has() -> None:
    assert isinstance(SPEC, MonoSpec)
    assert SPEC.api_version == MONOKERNEL_API_VERSION == 1


def test_devices_widths_and_ranks() -> None:
    assert {isa: limits.resident_blocks for isa, limits in SPEC.devices.items()} == {"gfx950": 256, "sm_90": 132}
    for isa, limits in SPEC.devices.items():
        assert SPEC.widths(isa) == (1, 2, 3, 4, 5, 6, 7, 8)
        assert limits.tp_sizes == (1, 2, 4, 8)


def test_it_takes_speculative_decoding_and_no_other_feature() -> None:
    assert SPEC.features == {Feature.SPECULATIVE_DECODING}


def test_weights_are_read_where_sglang_puts_them() -> None:
    # With a load hook SGLang would refuse every server whose loader does not feed it.
    assert SPEC.load_tensor is None
    assert SPEC.tokens_per_request is None


def test_every_part_is_bounded_by_both_metrics() -> None:
    assert SPEC.numerics.kind is NumericsKind.TOLERANCE
    outputs = {name.rpartition(".")[0] for name in SPEC.numerics.bounds}
    assert outputs == {f"{launch}.{output}" for launch, output in numerics.BOUNDS}
    for output in outputs:
        assert SPEC.numerics.bound(f"{output}.rel") < SPEC.numerics.bound(f"{output}.max_abs")


def test_build_is_the_runtime_s(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ModuleType("glm53_mono.runtime")
    runtime.build = lambda *arguments: arguments
    monkeypatch.setitem(sys.modules, "glm53_mono.runtime", runtime)
    monkeypatch.setattr("glm53_mono.runtime", runtime, raising=False)
    assert SPEC.build("model", "config", "context") == ("model", "config", "context")


def test_another_model_class_is_refused_by_its_name() -> None:
    class Glm5NextForConditionalGeneration:
        model = None

    (reason,) = SPEC.model_disable_reasons(Glm5NextForConditionalGeneration(), SimpleNamespace(), {})
    assert f"{__name__}." in reason
    assert "sglang.srt.models.glm5_next.Glm5NextForConditionalGeneration" in reason


def test_a_model_without_its_language_part_is_refused() -> None:
    from sglang.srt.models.glm5_next import Glm5NextForConditionalGeneration

    vision_only = Glm5NextForConditionalGeneration.__new__(Glm5NextForConditionalGeneration)
    vision_only.__dict__["model"] = None
    assert SPEC.model_disable_reasons(vision_only, SimpleNamespace(), {}) == [
        "the model was loaded without its language part"
    ]


def test_weights_that_cannot_be_read_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(sentence: str) -> None:
        raise UpstreamError(sentence)

    monkeypatch.setattr(spec, "foreign_model_reason", lambda model: None)
    monkeypatch.setattr(spec, "tensor_parallel_rank", lambda: (0, 1))
    monkeypatch.setattr(spec.Geometry, "from_config", lambda config, ranks: "geometry")
    monkeypatch.setattr(spec, "embedding_shard", lambda model, geometry: unreadable("the embedding is fp8"))
    monkeypatch.setattr(spec, "model_layers", lambda model, geometry, copies: unreadable("layer 3 is fp8"))
    monkeypatch.setattr(spec, "final_norm", lambda model, geometry: None)
    assert SPEC.model_disable_reasons("model", "config", {}) == ["the embedding is fp8", "layer 3 is fp8"]


def test_the_class_check_knows_the_real_class() -> None:
    from sglang.srt.models.glm5_next import Glm5NextForConditionalGeneration

    real = Glm5NextForConditionalGeneration.__new__(Glm5NextForConditionalGeneration)
    real.__dict__["model"] = "language part"
    assert loaded.foreign_model_reason(real) is None
