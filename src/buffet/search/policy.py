"""The constants that steer a search, each with its reason. None of them can make a proof wrong."""

from __future__ import annotations

from dataclasses import dataclass

from buffet.attack import AttackSettings

SHORT_ATTACK = AttackSettings(steps=10, restarts=1)
QUICK_ATTACK = AttackSettings(steps=3, restarts=1)


@dataclass(frozen=True)
class Policy:
    """How hard and in which order to try."""

    # --- accuracy of a radius, relative --------------------------------------------------------------------
    tolerance: float = 1e-3
    """Of a search, unless the user asks for another."""
    tolerance_learned: float = 2e-2
    """Where a method learns its boxes: that alone moves its margins by about as much."""
    tolerance_learned_shallow: float = 5e-3
    """The same on networks of one layer, where one more evaluation costs little."""
    tolerance_rough: float = 0.05
    """Of a quick method's radius that only tells where to start."""
    tolerance_plain: float = 0.01
    """Of the radius without learning, where that tells where to start: the one with learning is close."""
    smallest: float = 1e-9
    """A task that is not proven at this ε has radius 0."""

    # --- where a search starts -----------------------------------------------------------------------------
    attack_share: float = 0.25
    """Of a budget, the most that attacks may take before the search begins."""
    guess_attack: AttackSettings = SHORT_ATTACK
    """Certified radii are some fraction of attacked ones; a short attack is enough for a first guess."""
    least_share: float = 0.9
    share_lost_per_layer: float = 0.8
    """Radii are expected between ``least_share · exp(−share_lost_per_layer · layers)`` of the attacked one
    and the attacked one itself: every layer loosens bounds by about the same factor."""
    place_first: float = 0.33
    """How far into that range (in logarithms) the first task starts."""
    place_beyond_quick: float = 0.45
    """How far between the radius of a quick method and the attacked one a method that learns starts."""
    gain_of_final: float = 1.06
    """How much more a method proves when it learns how to bound the margin over the same boxes."""

    # --- which tasks are asked together --------------------------------------------------------------------
    leaders: int = 2
    """How many tasks of a method that learns its boxes go ahead of the others."""
    caution: float = 0.95
    """The others start this far below what the leaders suggest: a margin that is proven tells more than a
    failure."""
    caution_ruled: float = 0.85
    """The same where a rule chooses α: what it chooses further below the radius proves more."""

    # --- root finding --------------------------------------------------------------------------------------
    near_root: float = 0.25
    """Deficits within this of 1, in logarithms, tell how the margin function bends at its root; further below
    0 many functions level off."""
    restarts: int = 3
    """How often a search may begin anew because the method has learned in between."""
    shape_care: float = 1.25
    """Distances to the root taken from another task's margin function may be this much longer."""
    steepness: float = 4.0
    """The deficit grows about like this power of ε, where nothing better is known."""

    # --- the portfolio -------------------------------------------------------------------------------------
    close: float = 1.0
    """Margins further below 0 than this share of the clean margin are far from a proof. A rival that is this
    far on the first task is not asked about the others; a task on which a method is this far is not asked of
    rivals that learn, as they are never ahead by that much."""
    promising: float = 0.85
    """A rival that learns is searched with if learning leads to this share of what is proven already: its
    search costs much more than that first look, and where it starts matters."""
    proof_share: float = 0.3
    """Of the remaining time, what learning at the edge leaves for proving what it has learned."""

    # --- branching -----------------------------------------------------------------------------------------
    leaves: int = 512
    """Leaves that a task is cut into at most where no budget is given: about as long as learning took."""
    near: float = 0.15
    """Without a budget, tasks are cut whose margins are no further below 0 than this share of the clean one:
    what a few hundred leaves may make up for."""
    cut_rows: int = 2
    """With a budget, regions in which no more rows than this move are cut themselves: of more rows, no few
    directions tell what is loose."""
    cells_in_time: int = 100_000
    """Cells of a region where time is the limit."""
    attempt_share: float = 0.5
    """Of the time that is left of a task, what cells may take to prove a larger ε than is proven."""

    # --- cells ---------------------------------------------------------------------------------------------
    cells_gain: float = 1.2
    """Cells are expected to prove this much more than the whole ball."""
    cells_rise: float = 1.08
    cells_rises: int = 8
    """Where they do, this much more is tried again, this often at most."""
    cells_patience: int = 3
    """A method learns this many times longer for a ball when all its cells profit from it."""
    cells_further: float = 1.1
    """If the cells of a ball do not prove it, those of a ball this much larger are tried: they are finer."""

    # --- finite sets of sentences --------------------------------------------------------------------------
    words_at_once: int = 25_000_000_000
    """Numbers that are multiplied to run all sentences of a set, or of a part of one, where that is done at
    once: a second or two, not much more than a quick bound takes."""
    words_least: int = 600_000
    """What a sentence counts for at least: in a small network, handling it takes longer than the products."""
    words_each: int = 8
    """The same for sets of no more than this many sentences per candidate, whatever it takes."""
    words_in_all: int = 200_000
    """Sentences of a set that are run in the end, if nothing else proves it: a minute or so."""
    words_parts: int = 64
    """Parts of a larger set that are bounded; most that need more would need far more."""
    words_quick: int = 600
    words_thorough: int = 6_000
    """Sentences that an attack runs: a small part of what a quick bound costs, and about as much as one."""
    words_beam: int = 6
    words_tried: int = 512
    """Sentences that are kept from one step of an attack to the next, and that are run in a step."""
    words_first: int = 96
    """The same in the first step, where all sentences are run next if that does not find one."""

    # --- verdicts ------------------------------------------------------------------------------------------
    quick_attack: AttackSettings = QUICK_ATTACK
    """What `verify` tries on its own when quick methods fail: about the cost of one quick bound."""
    grace: float = 0.5
    grace_share: float = 0.25
    """Seconds, and the share of a budget, that an attack may take after the budget is spent: whatever is
    plainly wrong should be found."""


POLICY = Policy()
