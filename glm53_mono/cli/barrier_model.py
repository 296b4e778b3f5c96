"""What a grid barrier costs by arithmetic: additions that one line takes one after another, and trips between dies.

Of `kernels.sync`, flat and over chiplets. A model, and never reported as a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

ADDITION_NS = 28.6
"""Between two additions to one line on an MI355X: a cooperative grid's barrier of 2,048 programs takes 58.5 us there
with its counter on a line of its own (ROCm/llvm-project, pull request 3464)."""

TRIP_NS = (626.0, 1152.0)
"""To another die and back, lowest and highest pair of an MI350X (ROCm/fleet-chiplet-megakernel, aid_remote_hbm). A trip
within a die is taken to be as long, since nobody has published one."""


@dataclass(frozen=True)
class Barrier:
    """A barrier at which every program arrives.

    Attributes:
        chiplets: on which programs meet first; 1 is a flat barrier.
        longest_line: most additions of programs that one line takes.
        queue: additions that stand one after another between the first arrival and the last release.
        shared_atomics: additions and stores to lines that programs of more than one chiplet use.
        shared_pollers: programs that poll such a line.
        own_pollers: programs that poll a line of their chiplet's own; most of any chiplet.
        trips: to a line and back, one after another, counted in halves.
    """

    chiplets: int
    longest_line: int
    queue: int
    shared_atomics: int
    shared_pollers: int
    own_pollers: int
    trips: float

    def microseconds(self) -> tuple[float, float]:
        """Lowest and highest, of programs that arrive at the same time."""
        low, high = (self.queue * ADDITION_NS + self.trips * trip for trip in TRIP_NS)
        return low / 1e3, high / 1e3


def barrier(programs: int, chiplets: int) -> Barrier:
    """The barrier of a grid whose programs are dealt to the chiplets in turn."""
    if chiplets == 1:
        return Barrier(
            chiplets=1,
            longest_line=programs,
            queue=programs,
            shared_atomics=programs,
            shared_pollers=programs,
            own_pollers=0,
            # the last addition on its way, and a poll that brings it
            trips=1.0,
        )
    most = -(-programs // chiplets)
    leaders = min(chiplets, programs)
    return Barrier(
        chiplets=chiplets,
        longest_line=max(most, leaders),
        queue=most + leaders,
        shared_atomics=leaders,
        shared_pollers=leaders,
        own_pollers=most - 1,
        # an addition that comes back; one on its way and a poll of it; a release on its way and a poll of it
        trips=3.0,
    )


def lines(programs: int, chiplets: int) -> list[str]:
    """What the model says of a grid's barrier, flat and over its chiplets, a line each."""
    return [_line(programs, barrier(programs, count)) for count in (1, chiplets)]


def _line(programs: int, found: Barrier) -> str:
    low, high = found.microseconds()
    kind = "flat" if found.chiplets == 1 else f"over {found.chiplets} chiplets"
    return (
        f"a barrier of {programs} programs, {kind}: {low:.1f} to {high:.1f} us; at most {found.longest_line} additions "
        f"to a line and {found.queue} one after another, {found.shared_atomics} to a line that chiplets share, "
        f"{found.shared_pollers} programs polling that and {found.own_pollers} a line of their chiplet's"
    )
