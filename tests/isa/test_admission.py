"""A kernel that could hang or go wrong is refused when a server builds it, in one sentence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from glm53_mono import admission
from glm53_mono.admission import AdmissionError, admit, check_residency, log_placement, misplaced, present_units
from glm53_mono.isa.occupancy import Usage
from glm53_mono.program.launch import BACKENDS
from tests.isa.listings import changed

USAGE = Usage(registers=439, shared=73_728, warps=4)


def test_all_programs_fit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    check_residency("gfx950", USAGE, programs=256, units=256)
    assert "256 programs of 256 that this GPU holds at once (256 compute units x 1; 4 warps x 439" in caplog.text


@pytest.mark.parametrize(
    ("usage", "units", "holds"),
    [
        # A partition of a GPU shows fewer units; a kernel that has grown fits on none.
        (USAGE, 32, "holds 32 of them at once (32 compute units x 1; 4 warps x 439 registers"),
        (Usage(registers=439, shared=73_728, warps=8), 256, "holds 0 of them at once (256 compute units x 0"),
    ],
)
def test_too_few_resident_programs_are_refused(usage: Usage, units: int, holds: str) -> None:
    with pytest.raises(AdmissionError, match=r"the kernel's 256 programs wait for one another") as refused:
        check_residency("gfx950", usage, programs=256, units=units)
    assert holds in str(refused.value) and "\n" not in str(refused.value)


def launch(backend: str, device: str = "meta", deadline_s: float = 30.0) -> SimpleNamespace:
    return SimpleNamespace(
        variant=SimpleNamespace(backend=backend),
        tiling=SimpleNamespace(programs=256, warps=4),
        buffer=torch.empty(0, device=device),
        deadline_s=deadline_s,
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU with as many compute units as `units` says, all but `hidden` of which take programs; `kernel` is loaded."""
    found = SimpleNamespace(
        units=256,
        hidden=0,
        kernel=SimpleNamespace(metadata=SimpleNamespace(shared=73_728), asm={"amdgcn": ""}, n_regs=255),
    )
    monkeypatch.setattr(admission, "present_units", lambda _launch, _isa, units: units - found.hidden)
    utils = SimpleNamespace(get_device_properties=lambda device: {"multiprocessor_count": found.units})
    monkeypatch.setattr(admission, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    monkeypatch.setattr(admission.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(admission, "loaded_kernel", lambda _: found.kernel)
    return found


def test_a_kernel_without_hazards_is_admitted_on_a_whole_gpu(gpu: SimpleNamespace) -> None:
    gpu.kernel.asm["amdgcn"] = changed().text
    admit(launch("hip"), "gfx950")
    gpu.units = 127
    # 255 registers let a compute unit hold two programs
    with pytest.raises(AdmissionError, match="holds 254 of them"):
        admit(launch("hip"), "gfx950")


def test_a_kernel_with_a_hazard_is_refused(gpu: SimpleNamespace) -> None:
    gpu.kernel.asm["amdgcn"] = changed(("\tglobal_load_dword v6, v141, s[12:13] sc1\n", "")).text
    with pytest.raises(AdmissionError, match=r"assembly \(1\), the first of them: spin without a load"):
        admit(launch("hip"), "gfx950")


def test_registers_of_a_cuda_kernel_come_from_its_loader(gpu: SimpleNamespace) -> None:
    admit(launch("cuda"), "sm_90")
    gpu.units = 127
    with pytest.raises(AdmissionError, match=r"4 warps x 255 registers .* unpartitioned sm_90"):
        admit(launch("cuda"), "sm_90")


@pytest.mark.parametrize("isa", ["gfx950", "sm_90"])
def test_units_that_take_no_programs_are_refused(
    isa: str, gpu: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """A mask or another process: the driver shows all 256. Two of these programs fit on one, so half may be gone."""
    gpu.kernel.asm["amdgcn"] = changed().text
    admit(launch(BACKENDS[isa]), isa)
    assert "take programs" not in caplog.text
    gpu.hidden = 128
    admit(launch(BACKENDS[isa]), isa)
    assert "128 of the 256 compute units that the driver shows take programs; the grid fits" in caplog.text
    gpu.hidden = 129
    with pytest.raises(
        AdmissionError, match="only 127 of the 256 compute units that the driver shows take programs, 2"
    ):
        admit(launch(BACKENDS[isa]), isa)


@pytest.mark.parametrize(("isa", "warps"), [("gfx950", 16), ("sm_90", 32)])
def test_present_units_are_counted_by_programs_that_fill_a_gpu(
    isa: str, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two programs of 1024 threads fill a unit of either device."""
    seen: list[int] = []

    class RollCall:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def run(count: torch.Tensor, into: torch.Tensor, patience: int, **options: object) -> None:
                assert (grid, patience) == ((2 * 256,), 30_000_000_000)
                assert options == {"BACKEND": BACKENDS[isa], "num_warps": warps}
                into.copy_(torch.tensor(seen))

            return run

    monkeypatch.setattr(admission, "roll_call", RollCall())
    on_cpu = launch(BACKENDS[isa], device="cpu")
    for room, units in ((512, 256), (511, 255), (510, 255), (400, 200)):
        seen[:] = [room] * 300 + [512] * 212
        assert present_units(on_cpu, isa, 256) == units


def test_programs_of_the_interpreter_are_never_there_together() -> None:
    assert present_units(launch("interp", device="cpu", deadline_s=0.0), "sm_90", 2) == 0


def test_the_interpreter_has_nothing_to_check(gpu: SimpleNamespace) -> None:
    gpu.units = 0
    admit(launch("interp"), "interp")


DEALT = [program % 8 for program in range(256)]
"""The dies that an MI355X deals a grid to."""


def test_programs_on_the_dies_of_the_table(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    # A dispatcher that starts at another die deals in turn all the same.
    for dies in (DEALT, [(die + 3) % 8 for die in DEALT]):
        assert misplaced(dies, "gfx950") == []
        monkeypatch.setattr(admission, "dies_of_programs", lambda _, dies=dies: dies)
        log_placement(launch("hip"), "gfx950")
        assert caplog.messages[-1] == "glm53_mono: programs run on 8 dies as the barrier groups them"


@pytest.mark.parametrize(
    ("dies", "strangers"),
    [
        ([program // 32 for program in range(256)], 252),
        ([0] * 256, 224),
        ([*DEALT[:-1], 0], 1),
        ([die % 4 for die in DEALT], 128),
    ],
    ids=["in blocks", "one die", "one astray", "half the dies"],
)
def test_programs_on_other_dies_are_a_warning(
    dies: list[int], strangers: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admission, "dies_of_programs", lambda _: dies)
    log_placement(launch("hip"), "gfx950")
    assert f"{strangers} of 256 programs" in caplog.text and "right and slower" in caplog.text


def test_one_die_needs_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "dies_of_programs", None)
    log_placement(launch("cuda"), "sm_90")
    log_placement(launch("interp"), "interp")
