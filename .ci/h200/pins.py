"""What `pins.toml` says, with the versions that requirements/ has already."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
REQUIREMENTS = (CHECKOUT / "requirements" / "sglang.txt", CHECKOUT / "requirements" / "constraints.txt")


class PinError(ValueError):
    """Pins that say nothing exact, or say it twice; the message names the package."""


@dataclass(frozen=True)
class Pins:
    """What is carried, and what may be taken for granted.

    Attributes:
        python: version of the target, two numbers.
        platforms: pip's names of the platforms whose wheels run there.
        carried: exact versions by canonical name.
        roots: canonical names of carried packages that no other carried one has to ask for.
        left_out: patterns of paths, from the unpacked folder, that are not carried.
        operations: a requirement whose wheel supplies sglang-kernel's compiled operations.
        operation_files: pattern of their paths in it.
        machine: versions of what the machine has, by canonical name; empty where unknown.
        unmet: by canonical name, why servers run although a requirement is not met.
    """

    python: str
    platforms: tuple[str, ...]
    carried: dict[str, str]
    roots: frozenset[str]
    left_out: tuple[str, ...]
    operations: str
    operation_files: str
    machine: dict[str, str]
    unmet: dict[str, str]


def exact_versions(text: str) -> dict[str, str]:
    """Versions by canonical name of a requirements file's lines that pin one."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return dict(exact(line) for line in lines if line)


def exact(line: str) -> tuple[str, str]:
    """Canonical name and version of `name==version`.

    Raises:
        PinError: the line pins no exact version.
    """
    requirement = Requirement(line)
    specifiers = list(requirement.specifier)
    if len(specifiers) != 1 or specifiers[0].operator != "==":
        raise PinError(f"{line!r} pins no exact version: write {requirement.name}==VERSION")
    return canonicalize_name(requirement.name), specifiers[0].version


def carried_versions(packages: list[str], known: dict[str, str]) -> dict[str, str]:
    """An exact version for each package: its own, or the one that requirements/ has.

    Args:
        packages: `name`, or `name==version`.
        known: versions that requirements/ has, by canonical name.

    Raises:
        PinError: a package has no version, or two.
    """
    found: dict[str, str] = {}
    for line in packages:
        name = canonicalize_name(Requirement(line).name)
        if name in found:
            raise PinError(f"{name} is carried twice: keep one of the lines")
        if not Requirement(line).specifier:
            if name not in known:
                raise PinError(f"{name} has no version in pins.toml or requirements/: write {name}==VERSION")
            found[name] = known[name]
        elif name in known:
            raise PinError(f"{name} has the version {known[name]} in requirements/ already: write {name!r} alone")
        else:
            found[name] = exact(line)[1]
    return found


def read_pins() -> Pins:
    """The pins of this checkout.

    Raises:
        PinError: see `carried_versions`.
    """
    return parse((HERE / "pins.toml").read_text(), "\n".join(path.read_text() for path in REQUIREMENTS))


def parse(text: str, requirements: str) -> Pins:
    """The pins of a text like pins.toml, with the versions of a text like requirements/constraints.txt."""
    document: dict[str, Any] = tomllib.loads(text)
    carried = document["carried"]
    return Pins(
        python=document["target"]["python"],
        platforms=tuple(document["target"]["platforms"]),
        carried=carried_versions(carried["packages"], exact_versions(requirements)),
        roots=frozenset(map(canonicalize_name, carried["roots"])),
        left_out=tuple(carried["left_out"]),
        operations=document["operations"]["wheel"],
        operation_files=document["operations"]["files"],
        machine={canonicalize_name(name): version for name, version in document["machine"].items()},
        unmet={canonicalize_name(name): why for name, why in document["unmet"].items()},
    )
