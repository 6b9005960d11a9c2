"""`WeightSender`: a trainer's end of a transfer of weights to a server."""

import contextlib
import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from nanovllm.errors import TransferError
from nanovllm.features.training.packets import NamedTensor, by_size, checked
from nanovllm.features.training.transfer import TransferGroup


class WeightSender:
    """Gives the weights of a trainer to a server that has dev_mode.

    The methods are those that TRL's AsyncGRPOTrainer asks of its `weight_transfer`.

    Args:
        url: of the server.
        api_key: one of the server's; None sends none.
        address: of this machine, as the server reaches it. None is the one by which this machine
            reaches the server.
        timeout: seconds for a request to the server, and for a tensor.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        address: str | None = None,
        timeout: float = 300.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._address = address
        self._timeout = timeout
        self._group: TransferGroup | None = None
        self._requests = ThreadPoolExecutor(1, "nanovllm-sender")

    def init_weight_transfer(self) -> None:
        """Connect to the server. An update that another trainer has left is given up.

        Raises:
            TransferError: the server cannot be reached, or refuses.
        """
        self.destroy()
        address = self._address or self._own_address()
        group = TransferGroup(address, 0, 0, 2, self._timeout)
        info = {
            "master_address": address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": 2,
            "timeout": self._timeout,
        }
        answer = self._submit("/init_weight_transfer_engine", {"init_info": info})
        group.join(lambda: answer.done() and answer.result())
        answer.result()
        self._group = group

    def pause(self, mode: str = "keep") -> None:
        """Have the server compute nothing; see `AsyncLLM.pause_generation`."""
        self._post(f"/pause?mode={mode}")

    def send_weights(
        self, weights: Iterable[NamedTensor], weight_version: str | None = None
    ) -> None:
        """Send one update: pairs of a checkpoint's name and a tensor, of any device.

        Args:
            weight_version: for `RequestOutput.weight_version`; None is one more than before.

        Raises:
            TransferError: the server refuses a tensor, or one of both ends has failed: begin again
                with `init_weight_transfer`. The message says what weights the server has.
        """
        group = self._group
        if group is None:
            raise TransferError("no server is connected: init_weight_transfer() first")
        self._post("/start_weight_update")
        try:
            for tensors in _in_requests(weights):
                self._send(group, tensors)
            self._post("/finish_weight_update", {"weight_version": weight_version})
        except BaseException:
            self.destroy()
            raise

    def resume(self) -> None:
        """Have the server go on."""
        self._post("/resume")

    def destroy(self) -> None:
        """Disconnect from the server."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _send(self, group: TransferGroup, tensors: list[NamedTensor]) -> None:
        names, dtypes, shapes = [], [], []
        for name, tensor in tensors:
            names.append(name)
            dtypes.append(str(tensor.dtype).removeprefix("torch."))
            shapes.append(list(tensor.shape))
        info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        answer = self._submit("/update_weights", {"update_info": info})
        try:
            for _, tensor in tensors:
                group.broadcast(tensor)
        except TransferError:
            answer.result()  # the server knows the reason
            raise
        answer.result()

    def _submit(self, path: str, body: Any = None) -> Future[None]:
        return self._requests.submit(self._post, path, body)

    def _post(self, path: str, body: Any = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise TransferError(
                f"{self._url}{path} answered with status {error.code}: {text}"
            ) from None
        except OSError as error:
            raise TransferError(f"{self._url}{path} cannot be reached: {error}") from error

    def _own_address(self) -> str:
        """Return the address of this machine in the network of the server."""
        parts = urllib.parse.urlsplit(self._url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            with socket.create_connection((parts.hostname or "", port), self._timeout) as connected:
                return str(connected.getsockname()[0])
        except OSError as error:
            raise TransferError(f"{self._url} cannot be reached: {error}") from error


def _in_requests(weights: Iterable[NamedTensor]) -> Iterator[list[NamedTensor]]:
    """Yield tensors of the CPU in lists of about 64 MiB.

    A tensor is read before the next is asked for: its owner may change or free it then.
    """
    return by_size(map(_copied, map(checked, weights)), lambda named: named[1].nbytes)


def _copied(named: NamedTensor) -> NamedTensor:
    """Return a tensor's own copy on the CPU."""
    name, tensor = named
    own = tensor.detach().to("cpu").contiguous()
    return name, own.clone() if own.data_ptr() == tensor.data_ptr() else own
