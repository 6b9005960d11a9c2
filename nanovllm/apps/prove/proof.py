"""Tries all ways with a model, and compares each answer with that of the request alone."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from nanovllm import __version__
from nanovllm.apps.prove import reproduction
from nanovllm.apps.prove.options import ProveOptions
from nanovllm.apps.prove.reproduction import Difference
from nanovllm.apps.prove.requests import Bits, Request, make_requests
from nanovllm.apps.prove.runner import Found, generate, run
from nanovllm.apps.prove.ways import ALONE, Setting, Shape, Way, drafts_of, settings, ways
from nanovllm.errors import CheckpointError, ConfigError, OutOfMemoryError
from nanovllm.llm import LLM
from nanovllm.options.lora_request import named_adapters
from nanovllm.options.validation import writing

SAME, DIFFERS = "same", "differs"
_LONGEST = 320
"""Tokens of a prompt and its answer, unless max_model_len says how many."""
_LONGEST_FULL = 1024
_ELSEWHERE = "a GPU", "several ranks", "another processor"
_REFUSALS = (CheckpointError, ConfigError, OutOfMemoryError)
"""What an engine raises that does not run with some options."""
_MOST_CHARACTERS = 160


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a way showed."""

    setting: str
    way: str
    status: str
    """SAME or DIFFERS."""
    num_answers: int = 0
    num_different: int = 0
    num_different_tokens: int = 0
    """Those of the different answers whose tokens differ; the others have the same tokens and other
    log-probabilities."""
    evidence: str = ""
    """What happened in the engines."""
    seconds: float = 0.0


@dataclasses.dataclass
class Proof:
    """What was tried with a model, and what it showed."""

    model: str
    engine: str = f"nanovllm {__version__}"
    arithmetic: dict[str, Any] = dataclasses.field(default_factory=dict)
    """nanovllm's, see `Arithmetic`."""
    peer_options: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """The options of a peer's engine, by the names of its ways."""
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    digests: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """By setting: the digest of each request's tokens and log-probabilities alone."""
    not_tried: list[str] = dataclasses.field(default_factory=list)
    reproduction: str | None = None
    """File of the script that shows the first difference."""
    is_shown: bool = False
    """Whether the script showed the difference when it was run."""
    difference: str | None = None

    @property
    def holds(self) -> bool:
        """Whether no answer differed."""
        return all(verdict.status != DIFFERS for verdict in self.verdicts)


class Prover:
    """Tries the ways with one model.

    Args:
        options: fields of `Config` other than the model.
        on_verdict: called with each verdict as soon as it is known.

    Raises:
        NanoVLLMError: the model does not run with these options.
    """

    def __init__(
        self,
        model: str,
        options: dict[str, Any],
        prove: ProveOptions,
        on_verdict: Callable[[Verdict], object] = lambda verdict: None,
    ) -> None:
        self._model = model
        self._prove = prove
        self._on_verdict = on_verdict
        self._adapters = list(named_adapters(prove.lora_modules, ()).values())
        longest = _LONGEST_FULL if prove.full else _LONGEST
        drafts = drafts_of(model, options)
        self._options = {"max_model_len": longest, **options}
        self._options.pop("speculative_config", None)
        llm = LLM(model, **self._options)
        try:
            info = llm.engine.worker_info
            tokenizer = llm.engine.input_processor.tokenizer
            self.requests = make_requests(
                prove.num_requests,
                info.vocab_size,
                info.block_size,
                info.max_model_len,
                None if tokenizer is None else tokenizer.encode,
                long_answers=bool(info.state_pages or info.windows),
            )
        finally:
            llm.shutdown()
        halves = tuple(range(prove.num_requests, len(self.requests)))
        lengths = [request.params["max_tokens"] for request in self.requests]
        longest_first = sorted(range(prove.num_requests), key=lambda index: -lengths[index])
        self._shape = Shape(prove.num_requests, halves, tuple(longest_first), info, drafts)
        arithmetic = {} if info.arithmetic is None else info.arithmetic._asdict()
        self.proof = Proof(model, arithmetic=arithmetic)

    def prove(self) -> Proof:
        """Try all ways; write the script for the first difference.

        Raises:
            NanoVLLMError: the model does not run, or the script cannot be written.
        """
        found = settings(self._options, has_adapters=bool(self._adapters), full=self._prove.full)
        self._prove.check_ways(_name(each, way) for each in found for way in self._ways(each))
        first: Difference | None = None
        for setting in found:
            for difference in self._try_setting(setting):
                first = first or difference
        self.proof.not_tried += [*_ELSEWHERE]
        if not self._adapters:
            self.proof.not_tried.append("LoRA: no adapter is given")
        if first is not None:
            self._reproduce(first)
        return self.proof

    def _ways(self, setting: Setting) -> Iterator[Way]:
        return ways(setting, self._shape, full=self._prove.full)

    def _try_setting(self, setting: Setting) -> Iterator[Difference]:
        """Yield the first difference of each way that has any."""
        chosen = [w for w in self._ways(setting) if self._prove.chooses(_name(setting, w))]
        if not chosen:
            return
        requests = self._requests_of(setting)
        try:
            alone = self._alone(setting, requests)
        except _REFUSALS as reason:
            if not setting.name:
                raise
            self.proof.not_tried.append(f"{setting.name}: {_short(reason)}")
            return
        self.proof.digests[setting.name] = [alone[index].digest for index in sorted(alone)]
        for way in chosen:
            start = time.monotonic()
            try:
                found = run(self._model, setting.options, way, requests, self._adapters)
            except _REFUSALS as reason:
                self.proof.not_tried.append(f"{_name(setting, way)}: {_short(reason)}")
                continue
            seconds = time.monotonic() - start
            if not found.counts[way.evidence]:
                self.proof.not_tried.append(f"{_name(setting, way)}: no {way.evidence}")
            verdict = verdict_of(
                setting.name,
                way.name,
                found.answers,
                alone,
                evidence=_evidence(way, found),
                seconds=seconds,
            )
            self.proof.verdicts.append(verdict)
            self._on_verdict(verdict)
            for index, bits in found.answers:
                if bits != alone[index]:
                    yield Difference(setting, way, index, alone[index], bits)
                    break

    def _requests_of(self, setting: Setting) -> list[Request]:
        if not setting.has_adapters:
            return self.requests
        turns = len(self._adapters) + 1
        return [
            request._replace(adapter=None if index % turns == 0 else index % turns - 1)
            for index, request in enumerate(self.requests)
        ]

    def _alone(self, setting: Setting, requests: Seq[Request]) -> dict[int, Bits]:
        """Return the bits of each request alone, by its index. An engine serves one adapter, so
        that it cannot mistake one for another.
        """
        found: dict[int, Bits] = {}
        for adapter in dict.fromkeys(request.adapter for request in requests):
            llm = LLM(self._model, **{**setting.options, **ALONE})
            try:
                for index, request in enumerate(requests):
                    if request.adapter == adapter:
                        (found[index],) = generate(llm, requests, (index,), self._adapters)
            finally:
                llm.shutdown()
        return found

    def _reproduce(self, difference: Difference) -> None:
        """Write the script of a difference, and run it."""
        setting, index = difference.setting, difference.request
        requests = self._requests_of(setting)

        def differs(way: Way) -> bool:
            found = run(self._model, setting.options, way, requests, self._adapters)
            return any(i == index and bits != difference.alone for i, bits in found.answers)

        way = reproduction.shrunk(difference, differs)
        text = reproduction.script(self._model, difference, way, requests, self._adapters)
        path = Path(self._prove.reproduction)
        with writing("reproduction", path):
            path.write_text(text, encoding="utf-8")
        self.proof.reproduction = str(path)
        self.proof.difference = f"{_name(setting, way)}: request {index}: {difference.words()}"
        self.proof.is_shown = reproduction.shows(path)


def verdict_of(
    setting: str,
    way: str,
    answers: Seq[tuple[int, Bits]],
    alone: Mapping[int, Bits],
    *,
    evidence: str = "",
    seconds: float = 0.0,
) -> Verdict:
    """Compare the answers of a way with those alone.

    Args:
        answers: (index of the request, its answer).
    """
    different = [(bits, alone[index]) for index, bits in answers if bits != alone[index]]
    tokens = sum(found.token_ids != own.token_ids for found, own in different)
    return Verdict(
        setting,
        way,
        DIFFERS if different else SAME,
        len(answers),
        len(different),
        tokens,
        evidence,
        round(seconds, 2),
    )


def _short(reason: Exception) -> str:
    text = str(reason)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _evidence(way: Way, found: Found) -> str:
    happened = found.counts[way.evidence]
    if way.evidence == "accepted drafts":
        return f"{happened} of {found.counts['drafts']} drafts accepted"
    return f"{happened} {way.evidence}"


def full_name(setting: str, way: str) -> str:
    """Return the name of a way with that of its setting, if that has one."""
    return f"{setting}, {way}".removeprefix(", ")


def _name(setting: Setting, way: Way) -> str:
    return full_name(setting.name, way.name)
