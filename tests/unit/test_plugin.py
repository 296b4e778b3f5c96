"""SGLang finds the plugin by its entry point, and loading it costs nothing until a server asks for the monokernel."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from glm53_mono import plugin, spec
from glm53_mono.upstream import launch

ROOT = Path(__file__).parents[2]

GROUP = "sglang.srt.plugins"

HEAVY = ("torch", "sglang", "triton", "numpy", "glm53_mono.spec", "glm53_mono.upstream")
"""What the entry point's module must not bring with it."""


def test_pyproject_declares_the_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][GROUP] == {"glm53_mono": "glm53_mono.plugin:register"}


def test_the_installed_package_has_the_entry_point() -> None:
    found = [entry for entry in entry_points(group=GROUP) if entry.name == "glm53_mono"]
    assert found, "glm53-mono is not installed in this environment: run `pip install --no-deps -e .`"
    assert found[0].load() is plugin.register


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    code = f"import sys; import glm53_mono.plugin; print([name for name in {HEAVY} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_sglang_loads_the_plugin_and_finds_the_spec() -> None:
    launch.load_plugins()
    from sglang.kernels.plugin_kernels.amd.spec import find_spec

    for isa in ("gfx950", "sm_90"):
        assert find_spec(backend="amd", architectures=[plugin.ARCHITECTURE], isa=isa) == (spec.SPEC, "")


@pytest.mark.parametrize(
    ("architecture", "isa"), [("Glm5NextForConditionalGeneration", "gfx942"), ("DeepseekV3ForCausalLM", "gfx950")]
)
def test_other_devices_and_models_have_no_spec(architecture: str, isa: str) -> None:
    launch.load_plugins()
    from sglang.kernels.plugin_kernels.amd.spec import find_spec

    found, why = find_spec(backend="amd", architectures=[architecture], isa=isa)
    assert found is None
    assert isa in why


def test_a_second_registration_of_ours_is_accepted_and_another_s_is_not() -> None:
    plugin.register()
    from sglang.kernels.plugin_kernels.amd.spec import register

    with pytest.raises(ValueError, match="already has a spec"):
        register(backend="amd", architecture=plugin.ARCHITECTURE, path="elsewhere:SPEC")
