"""`python -m nanovllm.apps.lm_eval`: the command lm_eval, which also knows `--model nanovllm`.

For releases of lm_eval that do not look for models in other packages.
"""

import importlib.util
import sys


def main() -> int:
    """Run lm_eval's command line with the arguments of this process."""
    if importlib.util.find_spec("lm_eval") is None:
        sys.stderr.write(
            "nanovllm: lm_eval is not installed: pip install -e '.[lm-eval]' -c constraints.txt\n"
        )
        return 2
    from lm_eval.__main__ import cli_evaluate

    import nanovllm.apps.lm_eval.model  # noqa: F401  registers it

    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
