"""How many drafts were accepted, for one request or for all."""

from dataclasses import dataclass

_PRIOR_WEIGHT = 6.0
"""Number of proposals as which a new request counts the engine-wide experience."""


@dataclass(slots=True, eq=False)
class Acceptance:
    """How one request's drafts fared lately, as decayed counts.

    The first draft of a proposal is counted apart from the later ones: it often tells whether the
    whole proposal is right.
    """

    prior_weight: float = _PRIOR_WEIGHT
    num_asked: float = 0.0  # times that drafts were allowed
    num_proposals: float = 0.0  # times that any were proposed then
    first_accepted: float = 0.0
    first_tried: float = 0.0
    later_accepted: float = 0.0
    later_tried: float = 0.0
    is_probe: bool = False  # whether the last drafts allowed were a probe
    probe_interval: int = 1  # steps from the last probe to the next; 0: it succeeded
    next_probe: int = 0  # step from which a probe may happen

    def add(self, num_proposed: int, num_accepted: int, weight: float, decay: float) -> None:
        """Count one answer of the proposer, and how many of its first drafts were accepted."""
        self.num_asked = self.num_asked * decay + weight
        self.num_proposals *= decay
        if num_proposed == 0:
            return
        self.num_proposals += weight
        self.prior_weight *= decay
        self.first_tried = self.first_tried * decay + weight
        self.first_accepted *= decay
        self.later_tried *= decay
        self.later_accepted *= decay
        if num_accepted:
            self.first_accepted += weight
            # The first rejected draft was tried too; nothing is known about those after it.
            self.later_tried += weight * (min(num_accepted + 1, num_proposed) - 1)
            self.later_accepted += weight * (num_accepted - 1)

    def rates(self, prior: tuple[float, float, float]) -> tuple[float, float, float]:
        """Return the probabilities of a proposal, of its first draft, of each later draft."""
        n = self.prior_weight
        return (
            (self.num_proposals + n * prior[0]) / (self.num_asked + n),
            (self.first_accepted + n * prior[1]) / (self.first_tried + n),
            (self.later_accepted + n * prior[2]) / (self.later_tried + n),
        )
