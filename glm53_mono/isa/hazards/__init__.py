"""What must not stand in the assembly of a kernel whose programs wait for one another.

`protocol_hazards` can lose or reorder what programs tell one another, or give wrong values: a kernel that has one must
not run. `width_hazards` cost time alone.
"""

from __future__ import annotations

from glm53_mono.isa.hazards.clock import clock_hazards
from glm53_mono.isa.hazards.loads import Lines, cached_load_hazards, width_hazards
from glm53_mono.isa.hazards.matrix import matrix_hazards
from glm53_mono.isa.hazards.polling import polling_hazards
from glm53_mono.isa.hazards.release import release_hazards
from glm53_mono.isa.listing import Listing

__all__ = ["protocol_hazards", "width_hazards"]

CHECKS = (release_hazards, polling_hazards, clock_hazards, matrix_hazards)


def protocol_hazards(listing: Listing, streamed: Lines) -> list[str]:
    """One line for each hazard that can make results wrong.

    Args:
        streamed: where weights are loaded, which nobody writes (`loads.streamed_lines`).
    """
    return [*(hazard for check in CHECKS for hazard in check(listing)), *cached_load_hazards(listing, streamed)]
