"""A process that writes and reads entries: python -m tests.tiers.churn PATH LIMIT SEED SECONDS
WRITES, which is the share of writes.

Prints "begun" after its first entry, and how many entries it found at its end. Fails if it reads an
entry that is wrong, or if a warning is logged.
"""

import logging
import os
import random
import sys
import time

from nanovllm.features.tiers.directory import DirectoryStore
from tests.tiers.helpers import NAMESPACE, holds, write

NUMBERS, SIZES = 40, (250_000, 750_000)


class _Refused(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        sys.exit(f"logged: {record.getMessage()}")


def main(path: str, limit: str, seed: str, seconds: str, writes: str) -> None:
    """Run for `seconds`."""
    logging.getLogger("nanovllm").addHandler(_Refused(logging.WARNING))
    store, rng = DirectoryStore(path, int(limit), NAMESPACE), random.Random(seed)
    end, begun, found = time.monotonic() + float(seconds), False, 0
    while time.monotonic() < end:
        number = rng.randrange(NUMBERS)
        if rng.random() < float(writes):
            write(store, number, SIZES)
        else:
            found += holds(store, number, SIZES)
        if not begun:
            os.write(1, b"begun\n")
            begun = True
    store.close()
    os.write(1, str(found).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
