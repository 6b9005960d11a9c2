"""From token ids to what a user reads. The only part of the engine that knows text."""

import logging
from typing import TYPE_CHECKING, Any

from nanovllm.engine.sequence import Sequence
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.utils.hub import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class OutputProcessor:
    """Encodes prompts and makes outputs. Without a tokenizer it serves token ids and empty
    texts.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self.tokenizer = tokenizer

    def encode(self, prompt: str) -> list[int]:
        """Return the prompt's token ids.

        Raises:
            InvalidRequestError: the checkpoint has no tokenizer, or the text is not valid Unicode.
        """
        if self.tokenizer is None:
            raise InvalidRequestError(
                "this checkpoint has no tokenizer, so prompts must be lists of token ids, not text"
            )
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the prompt is not valid Unicode text: {error}") from error
        token_ids: list[int] = self.tokenizer.encode(prompt)
        return token_ids

    def make_output(self, seq: Sequence) -> RequestOutput:
        """Return the output of a sequence as far as it has come."""
        token_ids = seq.output_token_ids
        text: Any = ""
        if self.tokenizer is not None:
            text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return RequestOutput(
            request_id=seq.seq_id,
            prompt=seq.prompt,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            outputs=[CompletionOutput(0, text, token_ids, seq.finish_reason)],
            finished=seq.is_finished,
            num_cached_tokens=seq.num_cached_tokens or 0,
        )


def load_tokenizer(checkpoint: Checkpoint) -> "PreTrainedTokenizerBase | None":
    """Return the checkpoint's tokenizer, None if it has none; no code of the checkpoint is run.

    Raises:
        CheckpointError: its files cannot be read.
    """
    if not checkpoint.has_tokenizer:
        logger.warning("%s has no tokenizer: prompts must be token ids", checkpoint.path)
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            checkpoint.path, trust_remote_code=False
        )
    except Exception as error:  # transformers and tokenizers raise many kinds for a broken file
        raise CheckpointError(f"cannot load the tokenizer in {checkpoint.path}: {error}") from error
    return tokenizer
