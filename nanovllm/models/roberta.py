"""The RoBERTa family: BERT whose positions begin at the third row of their table, and without types
of tokens.
"""

from typing import Any, ClassVar

from nanovllm.models.bert import BertForSequenceClassification, BertModel


class RobertaModel(BertModel):
    """RoBERTa, Granite Embedding: BERT without types of tokens; makes vectors."""

    prefix = "roberta."
    skipped_positions = 2
    no_position = 1
    only: ClassVar[dict[str, tuple[Any, ...]]] = {**BertModel.only, "pad_token_id": (1,)}


class RobertaForMaskedLM(RobertaModel):
    """DistilRoBERTa"""


class XLMRobertaModel(RobertaModel):
    """Multilingual E5, BGE M3: BERT without types of tokens; makes vectors."""


class RobertaForSequenceClassification(BertForSequenceClassification):
    """RoBERTa cross-encoders: RoBERTa with a head that scores a pair of texts."""

    names = BertModel.names
    left_out = (".pooler.dense.weight", ".pooler.dense.bias", ".position_ids")
    prefix = RobertaModel.prefix
    skipped_positions = RobertaModel.skipped_positions
    no_position = RobertaModel.no_position
    only = RobertaModel.only
    takes_pairs = False


class XLMRobertaForSequenceClassification(RobertaForSequenceClassification):
    """BGE rerankers: RoBERTa with a head that scores a pair of texts."""
