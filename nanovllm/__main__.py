"""The command `nanovllm`, which `python -m nanovllm` is, too."""

import sys


def main() -> int:
    """Run the command line and return the exit status; Ctrl-C may come while it is imported."""
    try:
        from nanovllm.apps.cli.main import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
