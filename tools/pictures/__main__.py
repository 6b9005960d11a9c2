"""Redraw the pictures in docs/pictures.

With --check: write nothing, and exit with 1 if a picture is out of date.
"""

import argparse
import sys

from tools.pictures.gallery import DIRECTORY, outdated


def main() -> int:
    """Write or report the pictures that are out of date, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    pictures = outdated()
    for name, svg in pictures.items():
        if not args.check:
            (DIRECTORY / name).write_text(svg, encoding="utf-8")
        sys.stdout.write(f"{name}: {'out of date' if args.check else 'drawn'}\n")
    return int(args.check and bool(pictures))


if __name__ == "__main__":
    sys.exit(main())
