"""Tries all ways with a model, and compares each answer with that of the request alone."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from typing import Any

from nanovllm import __version__
from nanovllm.apps.prove import ProveOptions
from nanovllm.apps.prove.requests import PICTURE_SIDES, Bits, PictureSize, make_workload
from nanovllm.apps.prove.runner import WayAnswers, generate, run
from nanovllm.apps.prove.ways import ALONE, Setting, Shape, Way, drafts_of, settings, ways
from nanovllm.errors import CheckpointError, ConfigError, OutOfMemoryError
from nanovllm.llm import LLM
from nanovllm.options.lora_request import named_adapters

SAME, DIFFERS, NOT_SHOWN = "same", "differs", "not shown"
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
    """SAME or DIFFERS; NOT_SHOWN: nothing differs, but what the way is about has not happened."""
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
    """See `Arithmetic`."""
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    digests: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """By setting: the digest of each request's tokens and log-probabilities alone."""
    not_tried: list[str] = dataclasses.field(default_factory=list)
    difference: str | None = None
    """The first one, in words."""

    @property
    def num_same(self) -> int:
        """How many ways were shown to give the same bits."""
        return sum(verdict.status == SAME for verdict in self.verdicts)

    @property
    def holds(self) -> bool:
        """Whether no answer differed."""
        return all(verdict.status != DIFFERS for verdict in self.verdicts)

    def check_shown(self) -> None:
        """Raise ConfigError if no way was shown to give the same bits, though none differs."""
        if self.num_same:
            return
        if not self.verdicts:
            reason = f" ({self.not_tried[0]})" if self.not_tried else ""
            raise ConfigError(
                f"nothing is shown: none of these ways can be tried{reason}; choose other ways"
            )
        raise ConfigError(
            "nothing is shown: what these ways are about did not happen in any of them; leave "
            "ways out, or give a longer max_model_len"
        )


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
        self._given_drafts = self._options.pop("speculative_config", None)
        num_adapters = len(self._adapters)
        if self._adapters:
            self._options = {"enable_lora": True, "max_loras": num_adapters} | self._options
        llm = LLM(model, **self._options)
        try:
            info = llm.engine.worker_info
            self._options["max_model_len"] = info.max_model_len  # so no other engine cuts it
            if info.max_model_len < 2:
                raise ConfigError(
                    "max_model_len must be at least 2 for a prompt and an answer, got 1"
                )
            tokenizer = llm.engine.input_processor.tokenizer
            encode = None if tokenizer is None else tokenizer.encode
            sizes = info.vocab_size, info.block_size, info.max_model_len
            workload = make_workload(
                prove.num_requests,
                *sizes,
                encode,
                num_adapters=num_adapters,
                picture=None if info.encoder is None else _picture_size(llm),
            )
        finally:
            llm.shutdown()
        self.requests = workload.requests
        self._shape = Shape(workload, info, num_adapters, drafts)
        arithmetic = {} if info.arithmetic is None else info.arithmetic._asdict()
        self.proof = Proof(model, arithmetic=arithmetic)

    def prove(self) -> Proof:
        """Try all ways.

        Raises:
            NanoVLLMError: the model does not run, or none of its ways is to be tried.
        """
        found = settings(self._options, full=self._prove.full)
        self._prove.check_ways(_name(each, way) for each in found for way in self._ways(each))
        for setting in found:
            self._try_setting(setting)
        self.proof.not_tried += [*_ELSEWHERE]
        if not self._adapters:
            self.proof.not_tried.append("LoRA: no adapter is given")
        return self.proof

    def _ways(self, setting: Setting) -> Iterator[Way]:
        return ways(setting, self._shape, full=self._prove.full)

    def _try_setting(self, setting: Setting) -> None:
        chosen = [w for w in self._ways(setting) if self._prove.chooses(_name(setting, w))]
        if not chosen:
            return
        try:
            alone = self._alone(setting, chosen)
        except _REFUSALS as reason:
            if not setting.name:
                raise
            self.proof.not_tried.append(f"{setting.name}: {_short(reason)}")
            return
        self.proof.digests[setting.name] = [alone[index].digest for index in sorted(alone)]
        for way in chosen:
            start = time.monotonic()
            try:
                found = run(self._model, setting.options, way, self.requests, self._adapters)
            except _REFUSALS as reason:
                if (
                    self._given_drafts
                    and way.options.get("speculative_config") == self._given_drafts
                ):
                    raise
                self.proof.not_tried.append(f"{_name(setting, way)}: {_short(reason)}")
                continue
            seconds = time.monotonic() - start
            verdict = verdict_of(
                setting.name,
                way.name,
                found.answers,
                alone,
                happened=all(found.counts[name] for name in way.evidence),
                evidence=_evidence(way, found),
                seconds=seconds,
            )
            self.proof.verdicts.append(verdict)
            self._on_verdict(verdict)
            for index, bits in found.answers:
                if bits != alone[index] and self.proof.difference is None:
                    words = difference_of(alone[index], bits)
                    self.proof.difference = f"{_name(setting, way)}: request {index}: {words}"

    def _alone(self, setting: Setting, chosen: Seq[Way]) -> dict[int, Bits]:
        """Return the bits of each request of some ways, alone, by its index. An engine serves one
        adapter, so that it cannot mistake one for another.
        """
        found: dict[int, Bits] = {}
        indices = {i for way in chosen for calls in way.engines for call in calls for i in call}
        for adapter in dict.fromkeys(self.requests[index].adapter for index in sorted(indices)):
            llm = LLM(self._model, **{**setting.options, **ALONE})
            try:
                for index in sorted(indices):
                    if self.requests[index].adapter == adapter:
                        (found[index],) = generate(llm, self.requests, (index,), self._adapters)
            finally:
                llm.shutdown()
        return found


def difference_of(alone: Bits, found: Bits) -> str:
    """Say where an answer begins to differ from that of the request alone."""
    for position, (own, other) in enumerate(zip(alone.token_ids, found.token_ids, strict=False)):
        if own != other:
            return f"token {position} is {other}, alone {own}"
    if len(alone.token_ids) != len(found.token_ids):
        return f"the answer has {len(found.token_ids)} tokens, alone {len(alone.token_ids)}"
    for name, what in (("logprobs", "token"), ("prompt_logprobs", "prompt token")):
        values = zip(getattr(alone, name), getattr(found, name), strict=False)
        for position, (theirs, others) in enumerate(values):
            if theirs != others:
                return f"{what} {position} has log-probabilities {others}, alone {theirs}"
    return "the numbers of log-probabilities differ"


def verdict_of(
    setting: str,
    way: str,
    answers: Seq[tuple[int, Bits]],
    alone: Mapping[int, Bits],
    *,
    happened: bool = True,
    evidence: str = "",
    seconds: float = 0.0,
) -> Verdict:
    """Compare the answers of a way with those alone.

    Args:
        answers: (index of the request, its answer).
        happened: whether anything happened of what the way is about.
        evidence: what happened, in words.
    """
    different = [(bits, alone[index]) for index, bits in answers if bits != alone[index]]
    tokens = sum(found.token_ids != own.token_ids for found, own in different)
    return Verdict(
        setting,
        way,
        DIFFERS if different else SAME if happened else NOT_SHOWN,
        len(answers),
        len(different),
        tokens,
        evidence,
        round(seconds, 2),
    )


def _picture_size(llm: LLM) -> PictureSize:
    height, width = PICTURE_SIDES
    return PictureSize(*llm.engine.input_processor.vision.size_of(width, height))


def _short(reason: Exception) -> str:
    text = str(reason)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _evidence(way: Way, found: WayAnswers) -> str:
    counts = {name: str(found.counts[name]) for name in way.evidence}
    if "accepted drafts" in counts:
        counts["accepted drafts"] += f" of {found.counts['drafts']}"
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def full_name(setting: str, way: str) -> str:
    """Return the name of a way with that of its setting, if that has one."""
    return f"{setting}, {way}".removeprefix(", ")


def _name(setting: Setting, way: Way) -> str:
    return full_name(setting.name, way.name)
