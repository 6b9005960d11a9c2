"""What `LLM` and `AsyncLLM` have in common, and their methods for weights that change.

`nanovllm.features.training` does the work, and is imported when one of these methods is called.
"""

from collections.abc import Callable, Iterator, Sequence as Seq
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.options.sampling_params import SamplingParams, default_sampling_params

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanovllm.chat.templates import Message
    from nanovllm.features.observe.profile import Profile
    from nanovllm.features.training.control import WeightControl
    from nanovllm.features.training.rank_weights import NewTensor
    from nanovllm.features.training.updates import Weights

Result = TypeVar("Result")


class Commands(Protocol):
    """A call that takes several commands to the engine; others may run between them."""

    def commands(self) -> Iterator[Callable[[], Any]]:
        """Yield commands; each must have returned before the next is asked for."""
        ...

    def fail(self) -> None:
        """Take back what has been done, because a command has failed or the caller leaves."""
        ...


class ModelMethods:
    """Model queries shared by `LLM` and `AsyncLLM`; none runs a step."""

    engine: LLMEngine

    if not TYPE_CHECKING:  # with __getattr__, a type checker would not find misspelled names

        def __getattr__(self, name: str) -> NoReturn:
            """Say what to use instead of another engine's method."""
            from nanovllm.options.other_names import REMEDIES

            remedy = f": {REMEDIES[name]}" if name in REMEDIES else ""
            message = f"{type(self).__name__!r} object has no attribute {name!r}{remedy}"
            raise AttributeError(message, name=name, obj=self)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, at once: pickle would begin with all weights."""
        kind = type(self).__name__
        raise TypeError(f"{kind!r} objects cannot be pickled or copied; make one in each process")

    def render(self, messages: "Seq[Message]", **options: Any) -> list[int]:
        """Return the token ids of a conversation, rendered by the checkpoint's chat template.

        Args:
            options: add_generation_prompt, continue_final_message, tools, chat_template, and
                further variables of the template.

        Raises:
            InvalidRequestError: there is no chat template, or it cannot render the messages.
        """
        processor = self._processor
        return processor.token_ids(processor.render(messages, options))

    def get_tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """Return the checkpoint's transformers tokenizer, None if it has none.

        The engine uses a separate one and does not see changes to this one.
        """
        return self.engine.load_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters recommended in the checkpoint's generation_config.json."""
        return default_sampling_params(self.engine.generation_config)

    @property
    def _processor(self) -> InputProcessor:
        """What makes requests, and their prompts."""
        self.engine.owner.check()
        return self.engine.input_processor

    @property
    def _control(self) -> "WeightControl":
        from nanovllm.features.training.control import control_of

        self.engine.owner.check()
        return control_of(self.engine)

    @property
    def _profile(self) -> "Profile":
        from nanovllm.features.observe.profile import Profile

        return Profile(self.engine)


class WeightMethods(ModelMethods):
    """Base of `LLM`.

    While the engine sleeps, or an update runs, a request raises InvalidRequestError. Requests in
    flight end first, according to `mode`: "abort" ends them immediately, with finish_reason
    "abort"; "wait" lets them finish. The cached prefixes of the old weights are forgotten.
    """

    def _call(self, command: Callable[[], Result]) -> Result:
        raise NotImplementedError

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; return False, and forget none, while requests run.

        Args:
            reset_running_requests: forget them nevertheless: the requests compute their KV anew.
        """
        return self._call(lambda: self.engine.reset_prefix_cache(reset_running_requests))

    def start_profile(self) -> None:
        """Begin to write what the engine and the ranks do, in the directory `profile_dir`.

        Raises:
            InvalidRequestError: a profile runs already, or `profile_dir` is None.
            ConfigError: a file cannot be written.
            EngineDeadError: the engine is down.
        """
        self._call(lambda: self._profile.start())

    def stop_profile(self) -> list[str]:
        """End what `start_profile` began; return the paths of its files, for ui.perfetto.dev.

        Raises:
            InvalidRequestError: no profile runs.
            ConfigError: a file cannot be written.
            EngineDeadError: the engine is down.
        """
        return self._call(lambda: self._profile.stop())

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Release the memory of the weights and of the KV pool, on a CPU.

        Args:
            level: 1 keeps the weights in a temporary file; 2 forgets them, so after `wake_up` all
                must be passed to `update_weights`.
            mode: see the class.

        Raises:
            InvalidRequestError: level or mode is unknown.
            ConfigError: this is a GPU, or the file cannot be written.
            UnsupportedModelError: at level 2, `update_weights` cannot fill this model's weights.
        """
        self._run(self._control.sleep(level, mode))

    def wake_up(self, tags: Seq[str] | None = None) -> bool:
        """Restore what `sleep` released; return whether everything is awake.

        Args:
            tags: "weights", "kv_cache" or both; None means both.

        Raises:
            InvalidRequestError: a tag is unknown.
        """
        return self._call(lambda: self._control.wake_up(tags))

    def is_sleeping(self) -> bool:
        """Return whether weights or KV pool sleep."""
        return self._control.is_sleeping

    @property
    def weight_version(self) -> int | str:
        """The version of the weights: 0 as they were loaded, one more after each update, or what
        the last update was given.
        """
        return self.engine.output_processor.weight_version

    def update_weights(
        self,
        weights: "Weights",
        *,
        weight_version: int | str | None = None,
        mode: str = "abort",
    ) -> None:
        """Give the model new weights, rounded and packed as when it was loaded.

        Tensors that are not passed keep their values. Between `start_weight_update` and
        `finish_weight_update` this is part of that update, otherwise a separate one.

        Args:
            weights: pairs of a checkpoint's name and a torch tensor of any float dtype. A list or a
                mapping is checked as a whole before anything is written, an iterator tensor by
                tensor. If an iterator fails after a layer was written, all weights must be passed
                again before the next request. A str or a Path is a directory whose safetensors
                files hold the tensors; their names, shapes and dtypes are checked as a whole, and
                none may be missing, unless it is part of another update.
            weight_version: for `RequestOutput.weight_version`.
            mode: see the class.

        Raises:
            InvalidRequestError: a tensor's name, shape, dtype or number is wrong, or a part of a
                rounded layer is missing; or the weights sleep.
            UnsupportedModelError: the checkpoint stores its weights in a special form.
        """
        from nanovllm.features.training.updates import Update

        self._run(Update(self._control, weights, weight_version, mode))

    def start_weight_update(self, mode: str = "abort") -> None:
        """Begin an update of several `update_weights` calls; requests are refused until it ends.

        Raises:
            InvalidRequestError: an update has already begun, or the weights sleep.
        """
        self._run(self._control.start(mode))

    def finish_weight_update(self, weight_version: int | str | None = None) -> None:
        """End the update that `start_weight_update` began.

        Raises:
            InvalidRequestError: no update has begun, or a part of a rounded layer is missing.
        """
        self._call(lambda: self._control.finish(weight_version))

    def _run(self, call: Commands) -> None:
        try:
            for command in call.commands():
                self._call(command)
        except BaseException:
            try:
                self._call(call.fail)
            except BaseException:  # of a signal just now: an update would be open for ever
                self._call(call.fail)
            raise


class AsyncWeightMethods(ModelMethods):
    """Base of `AsyncLLM`: the methods of `WeightMethods`, which documents them."""

    async def _between_steps(self, command: Callable[[], Result]) -> Result:
        raise NotImplementedError

    async def _run(self, call: Commands) -> None:
        try:
            for command in call.commands():
                await self._between_steps(command)
        except BaseException:
            await self._between_steps(call.fail)
            raise

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See `WeightMethods.reset_prefix_cache`."""
        return await self._between_steps(
            lambda: self.engine.reset_prefix_cache(reset_running_requests)
        )

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Compute nothing until `resume_generation`; requests that come meanwhile wait for it.

        While the engine is paused, `sleep` and updates of the weights leave the requests as they
        are, whatever their mode. With the KV of the old weights gone, what a request generates
        after the pause is what the new weights make of its tokens so far.

        Args:
            mode: what happens to the requests in flight. "abort" ends them immediately, with
                finish_reason "abort"; "wait" lets them finish before the pause begins; "keep" keeps
                them for later. While a call with "wait" waits, everything else goes on; cancelling
                it cancels the pause.
            clear_cache: forget all cached prefixes, and have requests that are kept compute their
                KV anew. An update of the weights does so in any case.

        Raises:
            InvalidRequestError: mode is unknown; or it is "wait", and the engine is paused already
                and cannot run, or `resume_generation` is called before the pause has begun.
        """
        await self._run(self._control.pause(mode, clear_cache))

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`; without one nothing happens.

        Raises:
            InvalidRequestError: the engine sleeps, an update of the weights runs, or one has failed
                so that the weights are not whole. The engine stays paused.
        """
        await self._between_steps(lambda: self._control.resume())

    async def is_paused(self) -> bool:
        """Return whether the engine is paused."""
        return self.engine.is_paused

    async def start_profile(self) -> None:
        """See `WeightMethods.start_profile`."""
        await self._between_steps(lambda: self._profile.start())

    async def stop_profile(self) -> list[str]:
        """See `WeightMethods.stop_profile`."""
        return list(await self._between_steps(lambda: self._profile.stop()))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """See `WeightMethods.sleep`."""
        await self._run(self._control.sleep(level, mode))

    async def wake_up(self, tags: Seq[str] | None = None) -> bool:
        """See `WeightMethods.wake_up`."""
        return bool(await self._between_steps(lambda: self._control.wake_up(tags)))

    async def is_sleeping(self) -> bool:
        """See `WeightMethods.is_sleeping`."""
        return self._control.is_sleeping

    async def update_weights(
        self,
        weights: "Weights",
        *,
        weight_version: int | str | None = None,
        mode: str = "abort",
    ) -> None:
        """See `WeightMethods.update_weights`. The iterator runs in the event loop."""
        from nanovllm.features.training.updates import Update

        await self._run(Update(self._control, weights, weight_version, mode))

    async def start_weight_update(self, mode: str = "abort") -> None:
        """See `WeightMethods.start_weight_update`."""
        await self._run(self._control.start(mode))

    async def finish_weight_update(self, weight_version: int | str | None = None) -> None:
        """See `WeightMethods.finish_weight_update`."""
        await self._between_steps(lambda: self._control.finish(weight_version))

    async def check_weights(self, infos: "Seq[NewTensor]") -> None:
        """Check names, shapes and dtypes of tensors that `update_weights` will get.

        Raises:
            InvalidRequestError: one is wrong, or no update has begun.
        """
        await self._between_steps(lambda: self._control.check(infos, False, False))

    async def cancel_weight_update(self) -> bool:
        """Give up the update that `start_weight_update` began, if it runs.

        Returns:
            Whether the weights are whole, those of before; else all must come again.
        """
        return await self._between_steps(lambda: self._control.cancel())
