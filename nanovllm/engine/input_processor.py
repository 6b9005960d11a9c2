"""Prompts to requests: text and conversations become token ids, and everything is checked.

Owns the tokenizer.
"""

import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from nanovllm.core.messages import AdapterSlot
from nanovllm.core.sequence import Sequence
from nanovllm.engine.input_checks import (
    ParamsCheck,
    PromptLimit,
    check_names,
    check_priority,
    check_unicode,
    no_adapters,
)
from nanovllm.engine.prompt import (
    Prompt,
    PromptInput,
    PromptTokens,
    as_list,
    make_prompt,
    one_for_each,
)
from nanovllm.engine.request import Request
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading.text_tokenizer import TextTokenizer
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.pooling_params import PoolingParams
from nanovllm.options.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from nanovllm.chat.pictures import Locate
    from nanovllm.chat.templates import ChatTemplates
    from nanovllm.features.pooling.requests import PoolingRequests
    from nanovllm.features.structured.grammar import GrammarCompiler
    from nanovllm.features.vision.picture_prompts import VisionRequests

NO_OUTPUT = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)  # if it is pooled


class InputProcessor:
    """Makes requests out of prompts and sampling parameters. Many threads may call it at once.

    Args:
        tokenizer: None if the checkpoint has none; prompts are then lists of token ids.
        seed: seeds the requests without a seed.
        generates: whether the model does; if not, all requests have PoolingParams.
        make_grammars: makes what compiles structured_outputs, when a request first has one. It
            is not called without a tokenizer.
        make_pooling: makes what knows of vectors, when a request first has PoolingParams.
        make_vision: makes what knows of pictures, when a prompt first has one; None: the model
            reads none.
        find_adapter: returns the adapter that a request names, None for none.
        checks: further options of `ParamsCheck`.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        seed: int,
        generates: bool = True,
        make_grammars: "Callable[[], GrammarCompiler] | None" = None,
        make_pooling: "Callable[[PromptLimit], PoolingRequests] | None" = None,
        make_vision: "Callable[[], VisionRequests] | None" = None,
        find_adapter: Callable[[LoRARequest | None], AdapterSlot | None] = no_adapters,
        **checks: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self._make_grammars = make_grammars
        self.find_adapter = find_adapter
        self._grammars: GrammarCompiler | None = None
        self._chat: ChatTemplates | None = None
        self._make_pooling = make_pooling
        self._make_vision = make_vision
        self._vision: VisionRequests | None = None
        self._pooling: PoolingRequests | None = None
        # Guards these, which are made when first needed; pooling may need chat.
        self._lock = threading.RLock()
        self._seeds = random.Random(seed)
        self._seq_ids = count()
        self.limit = PromptLimit(tokenizer, max_model_len, vocab_size - 1, generates)
        self.params_check = ParamsCheck(tokenizer is not None, vocab_size, **checks)

    def make_request(
        self,
        prompt: PromptInput,
        params: SamplingParams | PoolingParams | None = None,
        *,
        priority: int | None = 0,
        stream: bool = False,
        request_id: str | None = None,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Request:
        """Return a checked request with its sequences; nothing is queued yet.

        Args:
            params: PoolingParams ask for a vector in place of tokens.
            priority: lower values go first; see `FairPolicy`.
            request_id: the caller's own id; None lets the engine count.
            user: whose request it is; None counts as a user, too.
            lora_request: the adapter to use; None is the model alone.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid or unsupported.
        """
        params, prompt, pooling = self._with_pooling(params, prompt)
        params = self.params_check.check(params)
        stream = stream and params.output_kind is not RequestOutputKind.FINAL_ONLY
        priority = check_priority(priority)
        check_names(request_id, user)
        adapter = self.find_adapter(lora_request)
        prompt = make_prompt(prompt)
        self._compile_grammar(params)
        read = self._read(prompt, params)
        bad_words = self._encode_bad_words(params.bad_words) if params.bad_words else ()
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        # Prompt log-probabilities limit prefix hits, so only the first sequence computes them.
        many = params.n > 1 and params.prompt_logprobs is not None
        others = params.clone(prompt_logprobs=None, prompt_logprob_start=0) if many else params
        extras = read.extras if pooling is None else {**read.extras, "pooling": pooling}
        sequences = [
            Sequence(
                next(self._seq_ids),
                read.token_ids,
                others if index else params,
                seed=(seed + index + 2**63) % 2**64 - 2**63,  # of 64 bits, with a sign
                priority=priority,
                bad_words=bad_words,
                user=user or "",
                cache_salt=prompt.salt,
                adapter=adapter,
                generates=pooling is None,
                skips_prefix_cache=pooling is not None and pooling.reads_all,
                extras=extras or None,
                inputs=read.inputs,
                rope_offset=read.rope_offset,
            )
            for index in range(params.n)
        ]
        return Request(prompt.text, params, sequences, request_id, lora_request, stream=stream)

    def make_requests(
        self, prompts: Any, params: Any, priority: Any, lora_request: Any
    ) -> list[Request]:
        """Return a request for each prompt of `LLM.generate`, of values for all or for each.

        Raises:
            InvalidRequestError: as `make_request`, with the prompt's index.
        """
        found: list[PromptInput] = as_list(prompts)
        all_params = one_for_each("sampling_params", params, len(found))
        priorities = one_for_each("priority", priority, len(found))
        adapters = one_for_each("lora_request", lora_request, len(found))
        requests = []
        for index, prompt in enumerate(found):
            try:
                request = self.make_request(
                    prompt,
                    all_params[index],
                    priority=priorities[index],
                    lora_request=adapters[index],
                )
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {index}: {error}") from None
            requests.append(request)
        return requests

    @property
    def grammars(self) -> "GrammarCompiler | None":
        """Compiles structured_outputs; None if there is no tokenizer."""
        with self._lock:
            if self._grammars is None and self.tokenizer is not None and self._make_grammars:
                self._grammars = self._make_grammars()
            return self._grammars

    @property
    def pooling(self) -> "PoolingRequests":
        """What knows of vectors and scores.

        Raises:
            CheckpointError: the checkpoint's files about them are invalid or unsupported, and the
                model does nothing else.
            InvalidRequestError: the same of a model that generates.
        """
        with self._lock:
            if self._pooling is None:
                assert self._make_pooling is not None
                try:
                    self._pooling = self._make_pooling(self.limit)
                except CheckpointError as error:
                    if not self.limit.generates:
                        raise
                    what = f"this model makes no vectors or scores here: {error}"
                    raise InvalidRequestError(what) from error
            return self._pooling

    @property
    def vision(self) -> "VisionRequests":
        """What knows of pictures.

        Raises:
            InvalidRequestError: the model reads none.
        """
        if self._make_vision is None:
            raise InvalidRequestError(
                "the prompt has pictures, and this model reads text only, or was loaded without "
                'what reads them (limit_mm_per_prompt={"image": 0}): leave them out'
            )
        with self._lock:
            if self._vision is None:
                self._vision = self._make_vision()
            return self._vision

    @property
    def chat(self) -> "ChatTemplates":
        """What renders conversations.

        Raises:
            InvalidRequestError: the model generates nothing.
        """
        self._require_generation()
        return self.templates

    @property
    def templates(self) -> "ChatTemplates":
        """What renders messages, also of a model that generates nothing."""
        with self._lock:
            if self._chat is None:
                from nanovllm.chat.templates import ChatTemplates

                marks = () if self._make_vision is None else self.vision.marks
                self._chat = ChatTemplates(self.tokenizer, *marks)
            return self._chat

    def render(
        self, messages: Seq[Any], options: Mapping[str, Any], locate: "Locate | None" = None
    ) -> Prompt:
        """Return the prompt of a conversation. See `ChatTemplates.render`."""
        more = {} if locate is None else {"locate": locate}
        text, pictures, places = self.chat.render(messages, options, **more)
        return Prompt(text, rendered=True, pictures=pictures, marker_places=places)

    def open_picture(self, prompt: Prompt, index: int) -> Prompt:
        """Return a prompt of which one more picture is opened, which may take seconds, so that a
        request with it is made at once.

        Raises:
            InvalidRequestError: the picture cannot be read, or the model reads none.
        """
        return self.vision.open(prompt, index, self.limit)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt of text.

        Raises:
            InvalidRequestError: as for `encode`, or a picture cannot be read.
        """
        if prompt.pictures:
            return self.vision.see(prompt, self.limit).token_ids
        assert prompt.text is not None
        return self.encode(prompt.text, rendered=prompt.rendered)

    def shutdown(self) -> None:
        """End the processes that render conversations and open pictures, until they are needed."""
        if self._chat is not None:
            self._chat.shutdown()
        if self._vision is not None:
            self._vision.shutdown()

    def encode(self, text: str, *, rendered: bool = False) -> list[int]:
        """Return the token ids of a text. `rendered` is that of a `Prompt`.

        Raises:
            InvalidRequestError: the checkpoint has no tokenizer, or the text is not valid Unicode.
        """
        check_unicode("the conversation" if rendered else "the prompt", text)
        without = "prompts must be lists of token ids, not text"
        return self._encode(without, text, add_special_tokens=not rendered)

    def _encode(self, without: str, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the text's token ids. `without` is said of an engine without a tokenizer."""
        if self.tokenizer is None:
            raise InvalidRequestError(f"this engine has no tokenizer, so {without}")
        token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        self.limit.check_made_tokens(token_ids)
        return token_ids

    def _with_pooling(
        self, params: SamplingParams | PoolingParams | None, prompt: PromptInput
    ) -> tuple[SamplingParams, PromptInput, PoolingParams | None]:
        """Return a request's sampling parameters, its prompt, and how it is pooled, if it is."""
        if isinstance(params, PoolingParams):
            prompt, pooling = self.pooling.complete(params, make_prompt(prompt))
            return NO_OUTPUT, prompt, pooling
        self._require_generation()
        return SamplingParams() if params is None else params, prompt, None

    def _require_generation(self) -> None:
        if not self.limit.generates:
            raise InvalidRequestError(
                "this model makes vectors and scores of texts, and generates nothing: use embed() "
                "or score(), or over HTTP /v1/embeddings or /rerank"
            )

    def _compile_grammar(self, params: SamplingParams) -> None:
        if (form := params.structured_outputs) is not None:
            assert self.grammars is not None  # params_check saw to it
            assert not isinstance(form, dict)
            self.grammars.compile(form)

    def _read(self, prompt: Prompt, params: SamplingParams) -> PromptTokens:
        """Return what the model reads of a prompt."""
        kept = params.truncate_prompt_tokens
        if prompt.pictures:
            read = self.vision.see(prompt, self.limit)
            if kept is not None and len(read.token_ids) > (self.limit.most if kept == -1 else kept):
                raise InvalidRequestError(
                    "truncate_prompt_tokens would cut pictures: leave it out, or shorten the text"
                )
        elif prompt.token_ids is not None:
            read = PromptTokens(list(prompt.token_ids))
        else:
            assert prompt.text is not None
            encode = partial(self.encode, rendered=prompt.rendered)
            if kept is None:
                self.limit.check_length(prompt.text, encode)
            read = PromptTokens(encode(prompt.text))
        token_ids = self.limit.checked_tokens(read.token_ids, kept)
        if params.prompt_logprob_start >= len(token_ids):
            raise InvalidRequestError(
                f"prompt_logprob_start {params.prompt_logprob_start} is after the prompt, which "
                f"has {len(token_ids)} tokens: it must be below that"
            )
        return read._replace(token_ids=token_ids)

    def _encode_bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences to forbid for `words`, each as it stands and after a space:
        the tokens differ, also in number.
        """
        found = []
        for word in words:
            check_unicode("a word of bad_words", word)
            self.limit.check_text("a word of bad_words", word)
            bare = word.lstrip() or word  # a word of white space only stays as it is
            for text in (bare, " " + bare):
                tokens = self._encode("bad_words cannot be used", text, add_special_tokens=False)
                found.append(tuple(tokens))
        return tuple(dict.fromkeys(filter(None, found)))
