"""A kernel that an sm_90 server launches, compiled here: its PTX is held against the hazards of gfx950's assembly."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm53_mono.cli.isa import examine
from glm53_mono.isa.hazards.loads import streamed_lines
from glm53_mono.isa.hazards.ptx import ptx_hazards, ptx_width_hazards
from glm53_mono.isa.ptx import parse_ptx
from glm53_mono.isa.report import Report
from glm53_mono.isa.variants import variants
from glm53_mono.kernels.sync import barrier_words

VARIANT = variants("sm_90")[-1]
"""One of them, with all that is built; the command compiles the others."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("listings")


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    """Half a minute where Triton's cache does not have it yet."""
    return examine(VARIANT, folder)


@pytest.fixture(scope="module")
def text(report: Report, folder: Path) -> str:
    return (folder / f"{VARIANT.name}.ptx").read_text()


@pytest.mark.slow
def test_nothing_is_wrong_with_the_compiled_kernel(report: Report) -> None:
    assert report.wrong == []
    assert report.variant == VARIANT
    assert report.programs_per_unit >= 1


@pytest.mark.slow
def test_a_hazard_in_the_compiled_kernel_would_be_seen(text: str) -> None:
    """Every poll of the real listing goes by a cache, every release is relaxed, and the weights lose their width."""
    cached = parse_ptx(text.replace("ld.global.gpu.acquire", "ld.global"))
    assert any(each.startswith("poll served from a cache") for each in ptx_hazards(cached, streamed_lines()))
    relaxed = parse_ptx(text.replace(".gpu.release.", ".gpu.relaxed."))
    assert any(each.startswith("relaxed atomic") for each in ptx_hazards(relaxed, streamed_lines()))
    apart = parse_ptx(text.replace("bar.sync \t0", "bar.sync \t1, 32"))
    assert any(each.startswith("store after the last workgroup") for each in ptx_hazards(apart, streamed_lines()))
    narrow = parse_ptx(text.replace("ld.global.v4.b32", "ld.global.b16").replace("0x10", "0x4"))
    assert len(ptx_width_hazards(narrow, streamed_lines())) > 20


@pytest.mark.slow
def test_a_device_of_one_die_has_a_flat_barrier(text: str) -> None:
    """No exchange but the faults', of which every wait has one, and those between ranks: nobody releases a chiplet."""
    exchanges = [line for line in text.splitlines() if "atom" in line and ".exch." in line]
    # the claim of a fault, int64, is the one exchange within a GPU
    assert exchanges and all(".sys." in line or ".gpu.acq_rel.exch.b64" in line for line in exchanges)
    assert barrier_words(1) < barrier_words(2)
