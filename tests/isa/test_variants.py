"""Which kernels a server can launch: what the plugin refuses is not compiled, and nothing else is left out."""

from __future__ import annotations

import pytest

from glm53_mono import capabilities
from glm53_mono.geometry import TP_SIZES
from glm53_mono.isa.variants import FORMATS, variants
from glm53_mono.isas import ISAS
from glm53_mono.program.tiling import TILINGS
from glm53_mono.refusals import READABLE_FORMATS, Refusal


def test_every_isa_of_the_spec_has_variants() -> None:
    from glm53_mono.spec import SPEC

    assert SPEC.devices.keys() == ISAS.keys()
    for isa in ISAS:
        names = [variant.name for variant in variants(isa)]
        assert len(set(names)) == len(names) >= 2
        assert {variant.shared_fused for variant in variants(isa)} == {False, True}


def test_the_grid_is_no_more_than_the_units() -> None:
    from glm53_mono.spec import SPEC

    for name, isa in ISAS.items():
        assert TILINGS[name].programs == isa.compute_units == SPEC.devices[name].resident_blocks


def test_formats_are_those_that_servers_may_have() -> None:
    # SGLang's "unquant" is a checkpoint without quantization.
    assert set(FORMATS["gfx950"].values()) == set(READABLE_FORMATS) - {"unquant"}
    assert FORMATS["sm_90"].items() < FORMATS["gfx950"].items()


def test_once_everything_is_built_everything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "NOT_YET_BUILT", ())
    assert len(variants("gfx950")) == len(TP_SIZES) * len(FORMATS["gfx950"]) * 2 * 2


REFUSED = {
    "verify": (lambda s: s.arguments.speculative_algorithm is not None, lambda variant: variant.verify),
    "ranks": (lambda s: s.arguments.tp_size > 1, lambda variant: variant.tp_size > 1),
    "FP8": (lambda s: s.quantization == "fp8", lambda variant: variant.weights == "fp8"),
    "MXFP4": (lambda s: s.quantization == "quark", lambda variant: variant.weights == "mxfp4"),
}
"""Refusals as `capabilities` has them, and the variants that go with each."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_not_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, gone = REFUSED[name]
    monkeypatch.setattr(capabilities, "NOT_YET_BUILT", ())
    everything = variants("gfx950")
    monkeypatch.setattr(capabilities, "NOT_YET_BUILT", (Refusal(name, found, "not built"),))
    left = variants("gfx950")
    assert left == [variant for variant in everything if not gone(variant)]
    assert len(left) < len(everything)
