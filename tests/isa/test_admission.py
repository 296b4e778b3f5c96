"""A kernel that could hang or go wrong is refused when a server builds it, in one sentence."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from glm53_mono import admission
from glm53_mono.admission import AdmissionError, admit, check_residency
from glm53_mono.isa.occupancy import Usage
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


def launch(backend: str) -> SimpleNamespace:
    return SimpleNamespace(
        variant=SimpleNamespace(backend=backend),
        tiling=SimpleNamespace(programs=256, warps=4),
        buffer=torch.empty(0, device="meta"),
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU with as many compute units as `units` says, on which `kernel` is loaded."""
    found = SimpleNamespace(
        units=256, kernel=SimpleNamespace(metadata=SimpleNamespace(shared=73_728), asm={"amdgcn": ""}, n_regs=255)
    )
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


def test_the_interpreter_has_nothing_to_check(gpu: SimpleNamespace) -> None:
    gpu.units = 0
    admit(launch("interp"), "sm_90")
