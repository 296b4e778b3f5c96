"""What is known of one variant once it is compiled."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from glm53_mono.isa.budget import over_budget
from glm53_mono.isa.occupancy import LIMITS, programs_per_unit
from glm53_mono.isa.resources import Resources
from glm53_mono.isa.variants import KernelVariant


@dataclass(frozen=True)
class Report:
    """One compiled variant.

    Attributes:
        warps: of a program.
        seconds: that compiling took, next to none from Triton's cache.
        from_cache: whether it came from there.
        triton: the compiler's version.
        hazards: lines on what is wrong in the assembly, which is PTX on sm_90.
    """

    variant: KernelVariant
    resources: Resources
    warps: int
    seconds: float
    from_cache: bool
    triton: str
    hazards: tuple[str, ...]

    @property
    def programs_per_unit(self) -> int:
        """Programs that a compute unit holds at once."""
        return programs_per_unit(LIMITS[self.variant.isa], self.resources.usage(self.warps))

    @property
    def wrong(self) -> list[str]:
        """Hazards, and budgets that the variant exceeds."""
        return [*self.hazards, *over_budget(self.variant.isa, self.resources, self.warps)]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        more = {"name": self.variant.name, "programs_per_unit": self.programs_per_unit, "wrong": self.wrong}
        return asdict(self) | more

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Report:
        """The inverse of `as_dict`."""
        own = {name: values[name] for name in ("warps", "seconds", "from_cache", "triton")}
        return cls(
            variant=KernelVariant(**values["variant"]),
            resources=Resources(**values["resources"]),
            hazards=tuple(values["hazards"]),
            **own,
        )
