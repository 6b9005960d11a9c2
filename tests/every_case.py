"""How much of the suite runs: EVERY_CASE=1 asks for all, see CONTRIBUTING.md. Imports no torch."""

import os

EVERY_CASE = "EVERY_CASE" in os.environ


def examples(number: int) -> int:
    """Return how many random runs a test makes: `number` of all, else a quarter of them."""
    return number if EVERY_CASE else number // 4
