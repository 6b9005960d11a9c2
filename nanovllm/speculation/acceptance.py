"""How the drafts of a request, or of all requests, fared. Knows no costs and no steps."""

_PRIOR_WEIGHT = 6.0
"""Number of proposals as which a new request counts the engine-wide experience."""


class Acceptance:
    """How one request's drafts fared lately, as decayed counts.

    The first draft of a proposal is counted apart from the later ones: it often tells whether the
    whole proposal is right.
    """

    __slots__ = (
        "first_accepted",
        "first_tried",
        "is_probe",
        "later_accepted",
        "later_tried",
        "next_probe",
        "num_asked",
        "num_proposals",
        "prior_weight",
        "probe_interval",
    )

    def __init__(self) -> None:
        self.prior_weight = _PRIOR_WEIGHT
        self.num_asked = 0.0  # times that drafts were allowed
        self.num_proposals = 0.0  # times that any were proposed then
        self.first_accepted = self.first_tried = 0.0
        self.later_accepted = self.later_tried = 0.0
        self.is_probe = False  # whether the last drafts allowed were a probe
        self.probe_interval = 1  # steps from the last probe to the next; 0: it succeeded
        self.next_probe = 0  # step from which a probe may happen

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
            # The first rejected draft was tried too; nothing is known of those behind it.
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
