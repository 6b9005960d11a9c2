"""The progress bar of `LLM.generate`: how many outputs have come, and the tokens per second."""

import time
from collections.abc import Iterable, Iterator

from tqdm.auto import tqdm

from nanovllm.outputs import DraftCounts, RequestOutput
from nanovllm.scheduler.stats import SchedulerStats


def with_progress(
    outputs: Iterable[RequestOutput], total: int, stats: SchedulerStats
) -> Iterator[RequestOutput]:
    """Pass on outputs; show how many there are, and the rates since the last of them.

    With speculation it shows the mean acceptance length of all outputs so far, too.
    """
    drafts = DraftCounts()
    start = time.perf_counter()
    prefill, decode = stats.num_prefill_tokens, stats.num_decode_tokens
    with tqdm(total=total, desc="Generating") as bar:
        for output in outputs:
            drafts += output.metrics.drafts
            seconds = time.perf_counter() - start
            rates = {
                "Prefill": (stats.num_prefill_tokens - prefill) / seconds,
                "Decode": (stats.num_decode_tokens - decode) / seconds,
            }
            shown = {name: f"{rate:.0f}tok/s" for name, rate in rates.items() if rate}
            if shown and drafts.num_drafts:
                shown["Acceptance length"] = f"{drafts.mean_acceptance_length:.2f}"
            if shown:  # nothing is new if this output is of the same step as the last one
                bar.set_postfix(shown, refresh=False)
                start += seconds
                prefill, decode = stats.num_prefill_tokens, stats.num_decode_tokens
            bar.update()
            yield output
