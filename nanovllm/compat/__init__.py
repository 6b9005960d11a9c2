"""Names and methods of vLLM and nano-vllm. Without this folder nothing else changes."""

from nanovllm.compat import modules, other_names


def install() -> None:
    """Let users write them: as imports, and as options. A second call does nothing."""
    other_names.install()
    modules.install()
