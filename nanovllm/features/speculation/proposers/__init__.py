"""Maps methods of speculation to proposers: ours, and classes of the user's."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from nanovllm.features.speculation.proposers.proposer import Proposer
from nanovllm.options.plugins import at_start, guarded, in_worker, is_plugin, load_class
from nanovllm.options.speculative_config import SpeculativeConfig
from nanovllm.worker.model_loader import NetworkSpec
from nanovllm.worker.network import Network

if TYPE_CHECKING:
    from nanovllm.features.graphs.step_runners import StepRunners


def make_proposer(
    spec: SpeculativeConfig,
    draft: NetworkSpec | None,
    make_steps: "Callable[[Network, int], StepRunners] | None",
    target: Network,
    max_num_batched_tokens: int,
) -> Proposer:
    """Return the proposer of `spec.method`. A network loads its weights here.

    Args:
        draft: the draft network, for the methods that have one.
        make_steps: makes its faster steps, see `ModelRunner`; None: it has none.
    """
    method = spec.method
    if method is not None and is_plugin(method):
        name = f'speculative_config: method="{method}"'
        found = at_start(name, "__init__()", proposer_class(method), target)
        return guarded(found, Proposer, name, in_worker)
    if draft is None:
        from nanovllm.features.speculation.proposers.ngram import Ngram

        return Ngram(spec.prompt_lookup_min, spec.prompt_lookup_max)
    if method in ("eagle3", "mtp"):
        from nanovllm.features.speculation.proposers.draft_head import DraftHead

        return DraftHead(target, draft, max_num_batched_tokens, make_steps)
    from nanovllm.features.speculation.proposers.draft_network import DraftNetwork

    return DraftNetwork(target, draft, max_num_batched_tokens, make_steps)


def proposer_class(method: str) -> type[Proposer]:
    """Return the class that a method "module:Class" names.

    Raises:
        ConfigError: there is no such class.
    """
    name = "speculative_config: method"
    return load_class(name, method, Proposer, ("network",))  # type: ignore[type-abstract]
