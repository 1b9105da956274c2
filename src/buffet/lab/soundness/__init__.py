"""The soundness campaign: random networks and regions, and points that try to break every method's bounds.

A method claims that no point of a region has a smaller margin than its bound. The campaign draws small
networks over all operations, some with extreme weights and some built to have an adversarial point at a known
distance; bounds them with every method; evaluates sampled, corner and attacked points, or all there are, in
float64; and counts the claims that fail.

dice       random choices
cases      random networks and regions
planted    networks whose radius is known
points     points that try to break a bound
claims     what a method claims, held against points
extremes   networks at the edges of floating point, some put together from gadgets
judge      their values in exact arithmetic (`spans`), at points that are known exactly (`exact_points`)
           and inside for certain (`exact_regions`)
strict     what a method claims, held against exact values
campaign   every method on many cases, ordinary and extreme
"""

from buffet.lab.soundness.campaign import (
    EXTREME,
    ORDINARY,
    CampaignState,
    Tally,
    campaign,
    case_of,
    check_bounds,
    known_methods,
)
from buffet.lab.soundness.claims import Violation
from buffet.lab.soundness.points import points_of

__all__ = [
    "EXTREME",
    "ORDINARY",
    "CampaignState",
    "Tally",
    "Violation",
    "campaign",
    "case_of",
    "check_bounds",
    "known_methods",
    "points_of",
]
