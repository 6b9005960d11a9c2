"""Keeps responses for `previous_response_id` and GET /v1/responses/{id}: in memory, bounded, by
owner. It knows texts of JSON, not what is in them.
"""

from collections import Counter, OrderedDict
from typing import NamedTuple

from nanovllm.apps.server.error_bodies import APIError
from nanovllm.options.validation import shown


class StoredResponse(NamedTuple):
    """A response and what it answers."""

    response_id: str
    previous_id: str | None
    """The response that its conversation went on from."""
    input_items: bytes
    """A JSON list: what its own request added to the conversation."""
    response: bytes
    """The response as JSON."""
    output: bytes = b""
    """What the response adds to it: a JSON object whose only field is `output`."""
    item_ids: tuple[str, ...] = ()
    """Those of its output."""

    @property
    def num_bytes(self) -> int:
        return self.num_turn_bytes + len(self.response)

    @property
    def num_turn_bytes(self) -> int:
        """Size of what its turn adds to the conversation."""
        return len(self.input_items) + len(self.output)


class ResponseStore:
    """Responses by owner and id. Beyond a limit, whoever has most loses those not used for longest.

    So an owner who has no more than a fair share loses nothing to the others. Using a response uses
    all before it, so a conversation loses its end before its beginning.

    Args:
        max_responses: 0 keeps none.
        max_bytes: of the JSON of all.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes: Counter[str] = Counter()  # of each owner
        self._num_responses: Counter[str] = Counter()
        self._kept: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()  # oldest use first
        self._by_item: dict[tuple[str, str], str] = {}  # by owner and id of an item: its response

    @property
    def is_on(self) -> bool:
        return self._max_responses > 0

    def add(self, owner: str, stored: StoredResponse) -> None:
        """Keep a response, in place of one with its id; not one that is larger than the store."""
        self._drop((owner, stored.response_id))
        if stored.num_bytes > self._max_bytes:
            return
        self._kept[owner, stored.response_id] = stored
        self._by_item |= {(owner, item_id): stored.response_id for item_id in stored.item_ids}
        self._num_bytes[owner] += stored.num_bytes
        self._num_responses[owner] += 1
        while self._num_bytes.total() > self._max_bytes:
            self._drop(self._oldest_of(self._num_bytes))
        while len(self._kept) > self._max_responses:
            self._drop(self._oldest_of(self._num_responses))

    def get(self, owner: str, response_id: str) -> list[StoredResponse]:
        """Return a response, last in a list with all before it that are there.

        Raises:
            APIError: status 404, it is not there.
        """
        chain: dict[str, StoredResponse] = {}
        next_id: str | None = response_id
        # A client may name its responses, and so make a ring of them.
        while next_id is not None and next_id not in chain:
            if (found := self._kept.get((owner, next_id))) is None:
                break
            self._kept.move_to_end((owner, next_id))
            chain[next_id] = found
            next_id = found.previous_id
        if not chain:
            raise APIError(
                404,
                f"there is no response {shown(response_id)}: it {self._why_not()}",
                type="invalid_request_error",
            )
        return list(chain.values())[::-1]

    def with_item(self, owner: str, item_id: str) -> StoredResponse:
        """Return the response that has an item in its output.

        Raises:
            APIError: status 400, it is not there.
        """
        response_id = self._by_item.get((owner, item_id))
        if response_id is None:
            raise APIError(
                400,
                f"there is no item {shown(item_id)}: its response {self._why_not()}; send the "
                "item itself",
                param="input",
            )
        return self.get(owner, response_id)[-1]

    def conversation(self, owner: str, response_id: str) -> list[StoredResponse]:
        """Return a response and all before it, the first of the conversation first.

        Raises:
            APIError: status 400, one of them is not there.
        """
        lost: str | None = response_id
        if (owner, response_id) in self._kept:
            chain = self.get(owner, response_id)
            if (lost := chain[0].previous_id) is None:
                return chain
        raise APIError(
            400,
            f"the conversation cannot go on from {shown(response_id)}, for there is no response "
            f"{shown(lost)}: it {self._why_not()}; send the whole conversation in input",
            param="previous_response_id",
            code="previous_response_not_found",
        )

    def delete(self, owner: str, response_id: str) -> None:
        """Drop a response; conversations that went on from it cannot go on.

        Raises:
            APIError: status 404, it is not there.
        """
        self.get(owner, response_id)
        self._drop((owner, response_id))

    def _why_not(self) -> str:
        if not self.is_on:
            return "was not stored, as this server's max_stored_responses is 0"
        return "was not stored, was deleted, or made room for others"

    def _oldest_of(self, held: Counter[str]) -> tuple[str, str]:
        """Return the response not used for longest of the owner who holds most."""
        ((owner, _),) = held.most_common(1)
        return next(key for key in self._kept if key[0] == owner)

    def _drop(self, key: tuple[str, str]) -> None:
        if (found := self._kept.pop(key, None)) is not None:
            self._num_bytes[key[0]] -= found.num_bytes
            self._num_responses[key[0]] -= 1
            for item_id in found.item_ids:
                self._by_item.pop((key[0], item_id), None)
