"""Maps methods of speculation to proposers. A new method is one file here and one line below."""

from nanovllm.speculative_config import SpeculativeConfig
from nanovllm.worker.proposers.proposer import Proposer


def make_proposer(spec: SpeculativeConfig) -> Proposer:
    """Return the proposer of `spec.method`."""
    from nanovllm.worker.proposers.ngram import Ngram

    return Ngram(spec.prompt_lookup_min, spec.prompt_lookup_max)
