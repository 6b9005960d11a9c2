"""Chooses the replica for a request: its conversation's, unless that one is overloaded.

The conversation's key is read from the HTTP body. The key of its first turn is the key of all its
turns, because only the beginning counts: what a later turn has in common with the first one is what
a prefix cache can have. A handle's call passes the key on as its session id.
"""

import hashlib
import json
import random
from collections.abc import Iterable
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from nanovllm.utils.affinity import order

SESSION_HEADER = b"x-session-id"
"""A client's own name for a conversation; Ray Serve's header for the same."""
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_NUM_CHARS = 256
_NUM_TOKENS = 64
"""So much of a plain prompt counts: a conversation that is sent as a plain prompt grows at its
end."""


def conversation_key(path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> str:
    """Return a name for the request's conversation, "" if it has none.

    The first of these that is given counts: the header X-Session-Id; the field `prompt_cache_key`;
    the messages up to the first of the user; the first 256 characters or 64 tokens of a plain
    prompt. A `cache_salt` and the `model` count with the last two, because prompts with different
    salts, or of different adapters, share nothing.

    Args:
        path: of the URL; other paths than those that generate have no conversation.
        headers: names in lower case, and values.
        body: JSON. What is not JSON, or has other types than the API, has no conversation: the
            server refuses it.
    """
    if path not in _PATHS:
        return ""
    for name, value in headers:
        if name == SESSION_HEADER and value:
            return _digest("session", value.decode("latin-1"))
    try:
        return _key_of_body(json.loads(body))
    except (ValueError, RecursionError):
        return ""


def _key_of_body(fields: Any) -> str:
    if not isinstance(fields, dict):
        return ""
    if isinstance(named := fields.get("prompt_cache_key"), str) and named:
        return _digest("named", named)
    beginning = _beginning(fields)
    if beginning is None:
        return ""
    return _digest("beginning", beginning, fields.get("cache_salt"), fields.get("model"))


def _beginning(fields: dict[str, Any]) -> Any:
    """Return what all turns of the conversation begin with, None if there is nothing."""
    if "prompt" in fields:
        return _beginning_of_prompt(fields["prompt"])
    messages = fields.get("messages", fields.get("input"))
    if not isinstance(messages, str | list) or not messages:
        return None
    if isinstance(messages, list):
        roles = [each.get("role") if isinstance(each, dict) else None for each in messages]
        messages = messages[: 1 + (roles.index("user") if "user" in roles else 0)]
    return fields.get("instructions"), messages  # instructions stand before the input


def _beginning_of_prompt(prompt: Any) -> Any:
    """Return the beginning of a text or of token ids; of several prompts, that of the first."""
    if isinstance(prompt, str):
        return prompt[:_NUM_CHARS] or None
    if isinstance(prompt, list) and prompt:
        first = prompt[0]
        return prompt[:_NUM_TOKENS] if isinstance(first, int) else _beginning_of_prompt(first)
    return None


def _digest(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class AffinityRouter(RequestRouter):  # type: ignore[misc]
    """Sends the requests with one session id to one replica; others to the idlest replica."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas, to be tried in this order; of a group the idlest is tried."""
        if pending_request is None or not pending_request.metadata.session_id:
            return [random.sample(candidate_replicas, len(candidate_replicas))]
        pending_request.routing_context.should_backoff = True  # when all of them are full
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self._load(replica) for name, replica in by_name.items()}
        names = order(pending_request.metadata.session_id, loads)
        return [[by_name[name]] for name in names]

    def _load(self, replica: RunningReplica) -> int:
        """Return how many requests a replica has, as far as is known."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0
