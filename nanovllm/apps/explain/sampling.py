"""`SamplingRecorder`: what each rule and filter did to the likeliest tokens of a sample.

It is told of the logits between the rules. The filters are one threshold in the engine: their
stages are computed here, by the sampler's own functions, from the logits after the rules.
"""

import dataclasses
import time
from collections.abc import Iterator

import torch

from nanovllm.apps.explain.story import Sample, Stage
from nanovllm.layers.sampler import Sampling, thresholds_of, uniform, weights_of
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.worker.step_sampler import StepSampler


class SamplingRecorder:
    """A `SamplingWatch` that makes a `Sample` of each sample.

    Args:
        num_top: how many of the likeliest tokens it names at the first and at the last stage.
    """

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._stages: dict[
            int, list[tuple[str, torch.Tensor]]
        ] = {}  # by sample: logits, rule by rule
        self._samples: dict[int, list[Sample]] = {}  # by sequence id
        self._seconds = 0.0

    def take(self) -> tuple[dict[int, list[Sample]], float]:
        """Return the samples since the last call, by sequence id, and the seconds that this object
        took.
        """
        found = self._samples, self._seconds
        self._samples = {}
        self._seconds = 0.0
        return found

    def begin(self, logits: torch.Tensor) -> None:
        start = time.perf_counter()
        self._stages = {
            sample: [("model", row.float().clone())] for sample, row in enumerate(logits)
        }
        self._seconds += time.perf_counter() - start

    def ruled(self, sample: int, rule: str, logits: torch.Tensor) -> None:
        start = time.perf_counter()
        self._stages[sample].append((rule, logits.clone()))
        self._seconds += time.perf_counter() - start

    def sampled(self, sampling: StepSampler, tokens: torch.Tensor) -> None:
        start = time.perf_counter()
        parameters = sampling.parameters()
        drafts = None if sampling.draft_ids is None else sampling.draft_ids.tolist()
        for index, token in enumerate(tokens.tolist()):
            row = sampling.rows[index]
            found = self._samples.setdefault(row.seq_id, [])
            is_draft = drafts is not None and len(found) < row.num_draft_tokens
            own = parameters.take(torch.tensor([index], device=tokens.device))
            params = sampling.params[index]
            stages = [  # all 0 if the logits are no distribution
                (name, torch.softmax(logits.double(), -1).nan_to_num(0.0))
                for name, logits in self._stages[index]
            ]
            stages += _filtered(sampling.ruled[index].float(), own, params)
            found.append(
                _sample(
                    stages,
                    self._num_top,
                    row.sample_position + len(found),
                    token,
                    drafts[index] if drafts is not None and is_draft else None,
                    None if params.is_greedy else uniform(own.seeds, own.positions).item(),
                )
            )
        self._stages = {}
        self._seconds += time.perf_counter() - start


def _filtered(
    logits: torch.Tensor, sampling: Sampling, params: SamplingParams
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of each filter that a sample has, and the probabilities after it.

    Args:
        logits: [vocab_size] float32, after the rules.
        sampling: of this sample alone.
    """
    if params.is_greedy or not logits.amax().isfinite():
        return
    line = logits[None]
    largest = line.amax(-1)
    values = line.sort(-1, descending=True).values
    plain = dataclasses.replace(sampling, any_min_p=False, top_ps=torch.ones_like(sampling.top_ps))
    with_min_p = dataclasses.replace(plain, any_min_p=True)
    weights = weights_of(line, largest, plain)
    if params.temperature != 1.0:
        yield "temperature", _normalised(weights)
    if params.min_p:
        yield "min_p", _normalised(weights_of(line, largest, with_min_p))
    if 0 < params.top_k < len(logits):
        thresholds, _ = thresholds_of(values, largest, None, with_min_p)
        yield "top_k", _normalised(weights_of(line, largest, with_min_p, thresholds))
    if params.top_p < 1.0:
        last = dataclasses.replace(sampling, any_min_p=True)
        thresholds, _ = thresholds_of(values, largest, None, last)
        yield "top_p", _normalised(weights_of(line, largest, last, thresholds))


def _normalised(weights: torch.Tensor) -> torch.Tensor:
    """Return [vocab_size] float64 for weights [1, vocab_size]."""
    return weights[0].double() / weights[0].double().sum()


def _sample(
    stages: list[tuple[str, torch.Tensor]],
    num_top: int,
    position: int,
    token_id: int,
    draft_id: int | None,
    uniform: float | None,
) -> Sample:
    """Return a sample with the probabilities of some tokens at each stage, [vocab_size] each."""
    named = [token for token in (token_id, draft_id) if token is not None and token >= 0]
    for _, probabilities in (stages[-1], stages[0]):
        top = probabilities.topk(min(num_top, len(probabilities)))
        named += [token for p, token in zip(*map(torch.Tensor.tolist, top), strict=True) if p > 0]
    last, first = stages[-1][1].tolist(), stages[0][1].tolist()
    candidates = sorted(dict.fromkeys(named), key=lambda token: (-last[token], -first[token]))
    chosen = torch.tensor(candidates, device=stages[0][1].device)
    return Sample(
        position,
        token_id,
        candidates,
        [
            Stage(name, int((probabilities > 0).sum()), probabilities[chosen].tolist())
            for name, probabilities in stages
        ],
        uniform,
        draft_id,
    )
