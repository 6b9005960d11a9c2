"""A server's end of transfers of weights: it joins a trainer, and gives the engine what comes."""

import asyncio
from typing import Any

from nanovllm.async_llm import AsyncLLM
from nanovllm.errors import InvalidRequestError, NanoVLLMError, TransferError
from nanovllm.features.training.transfer import TransferGroup, in_chunks, tensor_infos


class WeightTransfer:
    """The connection to a trainer, if there is one. One call at a time; others wait for it."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._group: TransferGroup | None = None
        self._lock = asyncio.Lock()

    async def join(
        self, address: str, port: int, rank: int, world_size: int, timeout: float
    ) -> None:
        """Leave the trainer of before, and give up its update; join another one.

        Arguments are those of `TransferGroup`.

        Raises:
            TransferError: the trainer cannot be reached.
        """
        async with self._lock:
            self._leave()
            await self._llm.cancel_weight_update()
            self._group = await asyncio.to_thread(
                TransferGroup, address, port, rank, world_size, timeout
            )

    async def receive(
        self, names: list[str], dtype_names: list[str], shapes: list[list[int]]
    ) -> None:
        """Receive tensors of the update that has begun, and give them to the engine.

        After an error the update is given up, and the trainer, who may be sending, is left.

        Raises:
            InvalidRequestError: a tensor is wrong, no trainer has been joined, or no update begun.
            TransferError: the trainer has gone.
        """
        async with self._lock:
            if (group := self._group) is None:
                raise InvalidRequestError(
                    "no trainer is connected: POST /init_weight_transfer_engine first"
                )
            try:
                infos = tensor_infos(names, dtype_names, shapes)
                await self._llm.check_weights(infos)
                for chunk in in_chunks(infos):
                    tensors: list[Any] = await asyncio.to_thread(group.receive, chunk)
                    await self._llm.update_weights(tensors)
            except BaseException as error:
                self._leave()
                is_whole = await self._llm.cancel_weight_update()
                state = "the engine has its weights of before"
                if not is_whole:
                    state = "some weights have changed: send all of them again"
                if isinstance(error, InvalidRequestError | TransferError):
                    kind: type[NanoVLLMError] = type(error)
                    raise kind(f"{error}; {state}, after /init_weight_transfer_engine") from error
                raise

    async def leave(self) -> None:
        async with self._lock:
            self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
