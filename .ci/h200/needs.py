"""Whether everything that the carried packages ask for is carried, on the machine, or known to be missing."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pins import Pins


def asked_for(folder: Path) -> dict[str, list[str]]:
    """Requirements by canonical name of each distribution in a folder of installed packages."""
    return {canonicalize_name(d.name): d.requires or [] for d in distributions(path=[str(folder)])}


def complaints(asked: dict[str, list[str]], pins: Pins) -> list[str]:
    """What is wrong with a bundle, one sentence each.

    Args:
        asked: requirements by canonical name of each carried distribution, as its METADATA lists them.
    """
    environment = target_environment(pins.python)
    wrong = [f"{name} is in pins.toml and not in the bundle" for name in sorted(pins.carried.keys() - asked)]
    wrong += [f"{name} is in the bundle and not in pins.toml" for name in sorted(asked.keys() - pins.carried)]
    needed, missed = set(pins.roots), set()
    for carrier, lines in sorted(asked.items()):
        for requirement in applying(lines, environment):
            name = canonicalize_name(requirement.name)
            needed.add(name)
            problem = unmet(requirement, pins)
            if problem:
                missed.add(name)
                if name not in pins.unmet:
                    wrong.append(f"{carrier} asks for {requirement}: {problem}")
    wrong += [f"{name} is carried and nothing asks for it" for name in sorted(pins.carried.keys() - needed)]
    wrong += [f"{name} is listed in [machine] and nothing asks for it" for name in sorted(pins.machine.keys() - needed)]
    wrong += [f"{name} is listed as unmet and is met" for name in sorted(pins.unmet.keys() - missed)]
    return wrong


def target_environment(python: str) -> dict[str, str]:
    """What markers of requirements are evaluated with: Linux on x86-64, no extras."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }


def applying(lines: Iterable[str], environment: dict[str, str]) -> list[Requirement]:
    """The requirements whose markers hold."""
    requirements = map(Requirement, lines)
    return [r for r in requirements if r.marker is None or r.marker.evaluate(environment)]


def unmet(requirement: Requirement, pins: Pins) -> str | None:
    """Why a requirement is not met; None if it is, or if the machine has it in a version that nobody has read."""
    name = canonicalize_name(requirement.name)
    version = pins.carried.get(name) or pins.machine.get(name)
    if version is None:
        return "neither carried nor on the machine"
    if version and not requirement.specifier.contains(version, prereleases=True):
        return f"{'carried' if name in pins.carried else 'on the machine'} is {version}"
    return None
