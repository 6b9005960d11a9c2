"""A trainer's end of a transfer of weights to `nanovllm serve --dev-mode` on this machine."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroupGloo

ADDRESS = "127.0.0.1"
"""Of this machine, as the server reaches it."""
BUCKET = 16
"""Tensors that one request announces."""


class WeightSender:
    """Its methods are those that TRL's AsyncGRPOTrainer asks of its `weight_transfer`."""

    def __init__(self, url: str, timeout: float = 300.0) -> None:
        self._url = url
        self._timeout = timeout
        self._requests = ThreadPoolExecutor(1)
        self._group: Any = None

    def init_weight_transfer(self) -> None:
        """Connect to the server, which gives up the update that another trainer has left."""
        self.destroy()
        timeout = timedelta(seconds=self._timeout)
        store = TCPStore(ADDRESS, 0, 2, is_master=True, timeout=timeout, wait_for_workers=False)
        info = {"master_address": ADDRESS, "master_port": store.port, "rank_offset": 1}
        info |= {"world_size": 2, "timeout": self._timeout}
        answer = self._submit("/init_weight_transfer_engine", {"init_info": info})
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=ADDRESS)]
        self._group = gloo(PrefixStore("nanovllm-weights", store), 0, 2, options)
        answer.result()

    def pause(self) -> None:
        """Have the server compute nothing, and keep its requests."""
        self._post("/pause?mode=keep")

    def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: str | None = None
    ) -> None:
        """Send one update: pairs of a checkpoint's name and a tensor."""
        self._post("/start_weight_update")
        bucket = []
        for name, tensor in weights:
            bucket.append((name, tensor.detach().to("cpu", copy=True).contiguous()))
            if len(bucket) == BUCKET:
                self._send(bucket)
                bucket = []
        self._send(bucket)
        self._post("/finish_weight_update", {"weight_version": version})

    def resume(self) -> None:
        """Have the server go on."""
        self._post("/resume")

    def destroy(self) -> None:
        """Disconnect from the server."""
        if self._group is not None:
            self._group.shutdown()
        self._group = None

    def _send(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        info: dict[str, list[Any]] = {"names": [], "dtype_names": [], "shapes": []}
        for name, tensor in tensors:
            info["names"].append(name)
            info["dtype_names"].append(str(tensor.dtype).removeprefix("torch."))
            info["shapes"].append(list(tensor.shape))
        answer = self._submit("/update_weights", {"update_info": info})
        try:
            for tensor in (each for _, each in tensors if each.numel()):
                self._group.broadcast(tensor.view(-1).view(torch.uint8), 0).wait()
        except RuntimeError:
            answer.result()  # the server knows the reason
            raise
        answer.result()

    def _submit(self, path: str, body: Any) -> Future[None]:
        return self._requests.submit(self._post, path, body)

    def _post(self, path: str, body: Any = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            urllib.request.urlopen(request, timeout=self._timeout).close()
        except urllib.error.HTTPError as error:
            message = error.read().decode(errors="replace")
            raise RuntimeError(f"{path} answered with status {error.code}: {message}") from None
