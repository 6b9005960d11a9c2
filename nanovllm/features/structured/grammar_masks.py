"""Masks of the tokens that grammars allow: for each table row a matcher, for each step its masks.

A mask is a function of the output tokens before its position, and so are the tokens that a grammar
forces. It is computed on the host in parallel with the forward pass.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from nanovllm.core.messages import Admission, FinishInfo, Row
from nanovllm.errors import InvalidRequestError
from nanovllm.features.structured.grammar import GrammarCompiler
from nanovllm.features.structured.grammar_errors import NO_TEXT, in_our_words
from nanovllm.options.structured_outputs import UNFINISHED
from nanovllm.platform import Event
from nanovllm.worker.device_tables import DeviceTables

if TYPE_CHECKING:
    from llguidance import LLMatcher

_ABSENT_STEPS = 64
"""After so many steps without it a row gives its matcher back: its sequence may have ended."""
_FORCING_WORK = 4096
"""Tokens that may be tokenized to find those that a grammar forces after one sampled token."""


class Masks:
    """Masks [n, mask_bytes] uint8 on the host: a bit for each token, the lowest bits first."""

    def __init__(self, masks: torch.Tensor) -> None:
        self._masks: npt.NDArray[np.uint8] = masks.numpy()
        self._address = masks.data_ptr()
        self._num_bytes = masks.shape[1]

    def compute(self, index: int, matcher: "LLMatcher") -> None:
        """Write as mask `index` the tokens that `matcher` allows."""
        matcher.unsafe_compute_mask_ptr(self._address + index * self._num_bytes, self._num_bytes)

    def clear(self, index: int) -> None:
        """Forbid every token in mask `index`."""
        self._masks[index] = 0

    def allow(self, index: int, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._masks[index, token // 8] |= 1 << token % 8


class GrammarRow:
    """The grammar of one table row, and the output tokens that it has seen.

    `forces` is whether `jump_forward` may return tokens.
    """

    def __init__(self, compiler: GrammarCompiler, admission: Admission, *, forces: bool) -> None:
        assert admission.params.structured_outputs is not None
        self.forces = forces
        self.num_prompt_tokens = admission.num_prompt_tokens
        self._compiler = compiler
        self._params: Any = admission.params.structured_outputs
        self._stop_token_ids = admission.stop_token_ids
        eos = compiler.eos_token_ids
        self._end_tokens = self._stop_token_ids.union(eos)
        # Behind a complete output there is one choice, so that it can be forced.
        ends = bool(eos) and eos[0] in self._stop_token_ids
        self._last_tokens = {eos[0]} if ends else self._end_tokens
        self._tokens = admission.token_ids[admission.num_prompt_tokens :]
        self._max_tokens = admission.params.max_tokens
        self.last_step = 0  # of `GrammarMasks`: the last one that had the row
        self._matcher: LLMatcher | None = None
        self._num_read = 0  # of `_tokens`, by the matcher
        self._num_consumed = 0  # the same without end tokens, which a matcher does not consume
        self._has_ended = False

    @property
    def num_known_tokens(self) -> int:
        """Tokens of the sequence whose values the row has: the prompt and its output."""
        return self.num_prompt_tokens + len(self._tokens)

    def write_masks(
        self, known: list[int], drafts: list[int], masks: Masks, first: int
    ) -> FinishInfo | None:
        """Write the mask of the next token, and of the one after each draft, from index `first` on.

        Behind a draft that the grammar does not allow, nothing is written. `known` are the output
        tokens since `num_known_tokens`.

        Returns:
            Why there is no mask of the next token: an error, or the output is complete and no token
            ends the sequence. None if there is one.
        """
        self._tokens += known
        try:
            matcher = self._read_tokens()
            self._write_mask(matcher, masks, first)
        except InvalidRequestError as error:
            return FinishInfo("error", str(error))
        if matcher.is_stopped() and not self._last_tokens:
            return FinishInfo("stop")
        if drafts:
            self._write_draft_masks(matcher, drafts, masks, first + 1)
        return None

    def jump_forward(self, tokens: list[int]) -> list[int]:
        """Return the tokens that must follow the output and its next `tokens`; read them all.

        They are those that the masks allow alone, so it changes no token how many are returned.
        """
        self._tokens += tokens
        found: list[int] = []
        if not self.forces:
            return found
        try:
            matcher = self._read_tokens()
        except InvalidRequestError:  # `write_masks` says so
            return found
        work = 0
        while work < _FORCING_WORK and not (self._has_ended or matcher.is_stopped()):
            following = matcher.compute_ff_tokens()
            if not following or not self._consume(matcher, following[0]):
                break
            found.append(following[0])
            work += len(following)
        if matcher.is_error():  # at a limit, which `write_masks` meets again and tells
            self.release()
        elif matcher.is_stopped() and not self._has_ended and len(self._last_tokens) == 1:
            self._has_ended = True
            found += self._last_tokens
        self._tokens += found
        self._num_read += len(found)
        has_ended = not self._stop_token_ids.isdisjoint([*tokens, *found])
        if has_ended or len(self._tokens) >= self._max_tokens:
            self.release()
        return found

    def release(self) -> None:
        """Give the matcher back; the row makes another one if it needs one."""
        self._matcher = None

    def _read_tokens(self) -> "LLMatcher":
        """Return the matcher advanced past all known tokens."""
        if self._matcher is None:
            self._matcher = self._compiler.matcher(self._params)
            self._num_read = self._num_consumed = 0
            self._has_ended = False
        for token in self._tokens[self._num_read :]:
            if not self._consume(self._matcher, token):
                raise self._failed(self._matcher)
            self._num_read += 1
        return self._matcher

    def _consume(self, matcher: "LLMatcher", token: int) -> bool:
        """Advance past `token`; return whether the grammar allows it."""
        if self._has_ended or token in self._end_tokens:
            self._has_ended = True
            return True
        # A stopped matcher that gets a token is broken from then on.
        if matcher.is_stopped() or matcher.try_consume_tokens([token]) != 1:
            return False
        self._num_consumed += 1
        return True

    def _write_mask(self, matcher: "LLMatcher", masks: Masks, index: int) -> None:
        if self._has_ended or matcher.is_stopped():
            masks.clear(index)
            masks.allow(index, self._last_tokens)
        else:
            masks.compute(index, matcher)
            if matcher.is_accepting():
                masks.allow(index, self._end_tokens)
        if matcher.is_error():
            raise self._failed(matcher)

    def _write_draft_masks(
        self, matcher: "LLMatcher", drafts: list[int], masks: Masks, first: int
    ) -> None:
        """Write the masks after each of `drafts`, then go back."""
        before = self._num_consumed
        had_ended = self._has_ended
        try:
            for index, draft in enumerate(drafts, first):
                if not self._consume(matcher, draft):
                    break
                self._write_mask(matcher, masks, index)
            matcher.rollback(self._num_consumed - before)
        except InvalidRequestError:
            pass  # after a wrong draft it does not count; after a right one it comes again
        self._num_consumed = before
        self._has_ended = had_ended
        if matcher.is_error():  # for ever: make another one
            self._matcher = None

    def _failed(self, matcher: "LLMatcher") -> InvalidRequestError:
        self._matcher = None
        error = matcher.get_error()
        after = f"after {self._num_consumed} tokens"
        if error:
            no_text = "nothing can follow, and it is not complete"
            reason = no_text if error.startswith(NO_TEXT) else in_our_words(error)
            return InvalidRequestError(f"{UNFINISHED}: {self._params.source}: {after} {reason}")
        return InvalidRequestError(
            f"the grammar of structured_outputs failed {after}: it does not allow what was "
            "generated"
        )


class GrammarStep:
    """The masks of a step's samples that have a grammar.

    `rows` has for these the grammar, the step's row, and the index of its first sample.
    """

    def __init__(
        self,
        tables: DeviceTables,
        rows: list[tuple[GrammarRow, Row, int]],
        mask_bytes: int,
        thread: ThreadPoolExecutor,
    ) -> None:
        self.finish_infos: dict[int, FinishInfo] = {}  # by sample: why it has no mask
        self.forcing = {row.seq_id: grammar for grammar, row, _ in rows if grammar.forces}
        """By sequence id: grammars that may force tokens after those that this step gives."""
        self._tables = tables
        self._rows = rows
        self.samples = [
            first + index for _, row, first in rows for index in range(1 + row.num_draft_tokens)
        ]
        """The step's samples that have a mask."""
        platform = self._platform = tables.platform
        self._masks = platform.staging((len(self.samples), mask_bytes), torch.uint8)
        self._masks.numpy().fill(255)  # torch would wake threads that spin next to the kernels
        self._unread, self._copied = self._unread_tokens()
        # Of a device that runs ahead the forward pass is only launched here, and it computes. The
        # other thread must not use torch: its number of threads there would be torch's default.
        self._written: Future[None] | None = None
        if not platform.runs_ahead:
            masks = Masks(self._masks)
            self._written = thread.submit(self._write, masks, self._read())

    def apply(self, logits: torch.Tensor) -> None:
        """Set the logits [S, vocab_size] float32 of the tokens that no grammar allows to -inf."""
        if self._written is not None:
            self._written.result()
        else:
            self._copied.synchronize()
            self._write(Masks(self._masks), self._read())
        samples = self._platform.upload(self.samples)
        self._tables.kernels.forbid(logits, samples, self._masks)

    def _read(self) -> list[int]:
        """Return the tokens that the grammars have not read, row by row."""
        return [] if self._unread is None else self._unread.tolist()

    def _unread_tokens(self) -> tuple[torch.Tensor | None, Event]:
        """Return the tokens and drafts that the grammars have not read, and when they are here.

        Often there are none: the rows whose grammar may force tokens read them with the result.
        """
        table_indices: list[int] = []
        positions: list[int] = []
        for grammar, row, _ in self._rows:
            unread = range(grammar.num_known_tokens, row.end)
            table_indices += [row.table_idx] * len(unread)
            positions += unread
        if not positions:
            return None, self._platform.record()
        cells = self._platform.upload(table_indices + positions).view(2, len(positions))
        found = self._tables.token_ids[cells[0], cells[1]]
        return self._platform.to_host(found), self._platform.record()

    def _write(self, masks: Masks, tokens: list[int]) -> None:
        """Write all masks. `tokens` are those that the grammars have not read, row by row."""
        unread = iter(tokens)
        index = 0
        for grammar, row, first in self._rows:
            num_known = row.sample_position - grammar.num_known_tokens
            known = islice(unread, num_known)
            drafts = islice(unread, row.num_draft_tokens)
            finish_info = grammar.write_masks(list(known), list(drafts), masks, index)
            if finish_info is not None:
                self.finish_infos[first] = finish_info
            index += 1 + row.num_draft_tokens


class GrammarMasks:
    """The grammars of a rank's table rows. A rank that does not sample has none."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._rows: dict[int, GrammarRow] = {}  # by table index
        self._num_steps = 0
        self._thread = ThreadPoolExecutor(1, "nanovllm-grammar")

    def admit(self, admissions: list[Admission]) -> None:
        """Forget the rows that are given to others, and begin those with a grammar."""
        for new in admissions:
            self._rows.pop(new.table_idx, None)
            if new.params.structured_outputs is not None:
                forces = new.params.can_jump_forward
                self._rows[new.table_idx] = GrammarRow(self._compiler, new, forces=forces)

    def begin(self, tables: DeviceTables, rows: list[Row]) -> GrammarStep | None:
        """Begin to compute the masks of a step; None if no row that samples has a grammar.

        The tables hold the step's drafts already.
        """
        if not self._rows:
            return None
        self._num_steps += 1
        if self._num_steps % _ABSENT_STEPS == 0:
            for absent in self._rows.values():
                if self._num_steps - absent.last_step > _ABSENT_STEPS:
                    absent.release()
        found: list[tuple[GrammarRow, Row, int]] = []
        first = 0
        for row in rows:
            if row.samples:
                grammar = self._rows.get(row.table_idx)
                if grammar is not None:
                    found.append((grammar, row, first))
                    grammar.last_step = self._num_steps
                first += 1 + row.num_draft_tokens
        if not found:
            return None
        return GrammarStep(tables, found, self._compiler.mask_bytes, self._thread)
