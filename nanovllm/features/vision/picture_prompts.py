"""Pictures of a prompt: opened, resized, and put in the places of its markers."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from nanovllm.core.messages import InputSpan, LowDetail
from nanovllm.engine.input_checks import PromptLimit
from nanovllm.engine.prompt import Prompt, PromptTokens
from nanovllm.errors import InvalidRequestError, PromptTooLongError
from nanovllm.features.vision import pixels
from nanovllm.features.vision.family import Layout, View, VisionFamily
from nanovllm.features.vision.messages import NAME, Picture, PictureSpan, Pixels
from nanovllm.features.vision.picture_process import PictureProcess
from nanovllm.loading.text_tokenizer import TextTokenizer
from nanovllm.options.config import Config
from nanovllm.options.validation import shown

LOW_DETAIL = 512
"""Pixels of the longer side of a picture of which a request wants to see little."""
_RULES = "1"
"""Changes when the same file would become other pixels: it is a part of the digests."""


class OpenedPicture(NamedTuple):
    """A picture in the sizes that the tower reads."""

    layout: Layout
    picture: Picture


class VisionRequests:
    """Puts pictures into prompts. Many threads may call it at once.

    Args:
        max_tokens: soft tokens that the embeddings of a request may take room for.
    """

    def __init__(
        self,
        family: VisionFamily,
        config: Config,
        tokenizer: TextTokenizer | None,
        max_tokens: int,
    ) -> None:
        self._family = family
        self._options = config.mm_processor_kwargs or {}
        self._most = (config.limit_mm_per_prompt or {}).get("image")
        self._max_image_tokens = config.max_image_tokens
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._process = PictureProcess()
        family.layout(64, 64, self._options)  # refuse wrong options at the start

    @property
    def marks(self) -> tuple[str, str]:
        """What templates write for a picture: the marker, and all of it."""
        return self._family.marker, self._family.placeholder

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Return the token that stands for a picture in a list of token ids, and how many tokens
        one of these sides becomes.
        """
        layout = self._layout(width, height, self._options)
        return self._family.soft_token_id, len(self._ids_of(layout.pieces))

    def shutdown(self) -> None:
        """End the process that opens files, until it is needed again."""
        self._process.shutdown()

    def see(self, prompt: Prompt, limit: PromptLimit) -> PromptTokens:
        """Return the prompt with its pictures in it.

        Raises:
            InvalidRequestError: a picture cannot be read, or is too large; or there are not as many
                markers as pictures.
        """
        for index in range(len(prompt.pictures)):
            prompt = self.open(prompt, index, limit)
        read: Seq[OpenedPicture] = prompt.pictures
        layouts = [layout for layout, _ in read]
        if prompt.token_ids is None:
            assert prompt.text is not None
            token_ids, places = self._expand_text(prompt, layouts, limit)
        else:
            token_ids, places = self._expand_ids(list(prompt.token_ids), layouts)
        return self._placed(token_ids, places, read)

    def open(self, prompt: Prompt, index: int, limit: PromptLimit) -> Prompt:
        """Return a prompt of which one more picture is opened, so that `see` does not wait for it.

        Raises:
            InvalidRequestError: it cannot be read, or is too large, or those before it leave no
                room for it.
        """
        if self._most is not None and len(prompt.pictures) > self._most:
            raise InvalidRequestError(
                f"the prompt has {len(prompt.pictures)} pictures, limit_mm_per_prompt allows "
                f"{self._most}"
            )
        given = prompt.pictures[index]
        if isinstance(given, OpenedPicture):
            return prompt
        opened = self._open(index, given, prompt)
        before = [each for each in prompt.pictures if isinstance(each, OpenedPicture)]
        num_tokens = sum(each.layout.num_tokens for each in (*before, opened))
        if num_tokens > limit.most:  # or their pixels would take much memory
            raise PromptTooLongError(
                f"the prompt is too long: its pictures have {num_tokens} tokens and more; "
                f"max_model_len {limit.max_model_len}: send fewer or smaller ones, or raise it"
            )
        pictures = (*prompt.pictures[:index], opened, *prompt.pictures[index + 1 :])
        return dataclasses.replace(prompt, pictures=pictures)

    def _open(self, index: int, given: Any, prompt: Prompt) -> "OpenedPicture":
        """Return what a picture becomes in the prompt, and for the tower."""
        options = {**self._options, **prompt.picture_options}
        is_low = isinstance(given, LowDetail)

        def choose(width: int, height: int) -> Layout:
            if is_low and (most := max(width, height)) > LOW_DETAIL:
                width, height = (-(-LOW_DETAIL * side // most) for side in (width, height))
            return self._layout(width, height, options)

        try:
            found = _content(given.content if is_low else given)
            if isinstance(found, bytes):
                layout, views = self._process.resized(found, choose, self._wanted)
            else:
                layout = choose(found.width, found.height)
                views = pixels.resized(found, *self._wanted(layout))
        except (pixels.PictureError, InvalidRequestError) as error:
            raise InvalidRequestError(f"picture {index}: {error}") from error
        return OpenedPicture(layout, _picture(layout, views, self._family.patch))

    def _wanted(self, layout: Layout) -> tuple[Seq[View], str]:
        return layout.views, self._family.resample

    def _layout(self, width: int, height: int, options: Mapping[str, Any]) -> Layout:
        layout = self._family.layout(width, height, options)
        whole = self._family.tokens_that_see_each_other(self._options, has_window=True)
        if whole and layout.num_tokens > whole:
            raise InvalidRequestError(
                f"it would take {layout.num_tokens} tokens, which see each other, and by the "
                f"engine's mm_processor_kwargs at most {whole} do: raise that at start"
            )
        most = self._max_image_tokens
        if most is not None and layout.num_tokens > most:
            raise InvalidRequestError(
                f"its {width} x {height} pixels take {layout.num_tokens} tokens, max_image_tokens "
                f"allows {most}: make it smaller, or lower the pixels in mm_processor_kwargs"
            )
        return layout

    def _expand_text(
        self, prompt: Prompt, layouts: Seq[Layout], limit: PromptLimit
    ) -> tuple[list[int], list[list[int]]]:
        """Return token ids, and for each picture the position of each soft token."""
        assert prompt.text is not None
        if self._tokenizer is None:
            raise InvalidRequestError(
                "this engine has no tokenizer, so prompts must be lists of token ids, not text"
            )
        marker, soft = self._family.marker, self._family.soft_token
        soft_id = self._family.soft_token_id
        parts = _split(prompt.text, marker, prompt.marker_places)
        if len(parts) != len(layouts) + 1:
            raise InvalidRequestError(
                f"the prompt has {len(layouts)} pictures and {len(parts) - 1} markers "
                f"{shown(marker)}: it must have one for each"
            )
        text = parts[0]
        owners: list[int] = [-1] * parts[0].count(soft)  # of each soft token: a picture, or -1
        for number, (layout, after) in enumerate(zip(layouts, parts[1:], strict=True)):
            for piece in layout.pieces:
                text += piece if isinstance(piece, str) else soft * piece
            owners += [number] * layout.num_tokens + [-1] * after.count(soft)
            text += after
        token_ids = self._tokenizer.encode(text, add_special_tokens=not prompt.rendered)
        limit.check_made_tokens(token_ids)
        positions = [i for i, token in enumerate(token_ids) if token == soft_id]
        if len(positions) != len(owners):
            raise InvalidRequestError(
                f"the prompt's text makes {len(positions)} tokens {shown(soft)}, its pictures need "
                f"{len(owners)}: leave such text out"
            )
        places: list[list[int]] = [[] for _ in layouts]
        for position, owner in zip(positions, owners, strict=True):
            if owner >= 0:
                places[owner].append(position)
        return token_ids, places

    def _expand_ids(
        self, token_ids: list[int], layouts: Seq[Layout]
    ) -> tuple[list[int], list[list[int]]]:
        """Do what `_expand_text` does: a picture's tokens are there, or one for all of them."""
        soft = self._family.soft_token_id
        found: list[int] = []
        places: list[list[int]] = []
        at = 0
        for number, layout in enumerate(layouts):
            try:
                first = token_ids.index(soft, at)
            except ValueError:
                raise InvalidRequestError(
                    f"the prompt has {len(layouts)} pictures and {number} times the token {soft}: "
                    "it must have it once for each, or as often as the picture has tokens"
                ) from None
            found += token_ids[at:first]
            ids = self._ids_of(layout.from_soft_to_soft)
            is_whole = token_ids[first : first + len(ids)] == ids
            if len(ids) == 1:  # is it the picture, or does it stand for one?
                whole = self._ids_of(layout.pieces)
                start = first - whole.index(soft)
                is_whole = start >= at and token_ids[start : start + len(whole)] == whole
            at = first + (len(ids) if is_whole else 1)
            if not is_whole:
                ids = self._ids_of(layout.pieces)
            places.append([len(found) + i for i, token in enumerate(ids) if token == soft])
            found += ids
        return found + token_ids[at:], places

    def _ids_of(self, pieces: Seq[str | int]) -> list[int]:
        """Return the tokens of pieces of a picture."""
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids += [self._family.soft_token_id] * piece
            elif self._tokenizer is None:
                raise InvalidRequestError(
                    f"this engine has no tokenizer for {shown(piece)}, which is a part of each "
                    "picture: give all tokens of the pictures"
                )
            else:
                ids += self._tokenizer.encode(piece, add_special_tokens=False)
        return ids

    def _placed(
        self,
        token_ids: list[int],
        places: Seq[Seq[int]],
        read: Seq[OpenedPicture],
    ) -> PromptTokens:
        """Return the prompt with a span for each run of soft tokens."""
        sizes = {picture.digest: picture.num_tokens for _, picture in read}
        if sum(sizes.values()) > self._max_tokens:
            raise InvalidRequestError(
                f"the pictures of the prompt have {sum(sizes.values())} tokens, the embeddings of "
                f"{self._max_tokens} fit into encoder_cache_mib: raise it, or send fewer or "
                "smaller pictures"
            )
        spans: list[PictureSpan] = []
        inputs: list[InputSpan] = []
        for positions, (layout, picture) in zip(places, read, strict=True):
            offset = 0
            for start, length in _runs(positions):
                place = start if not spans else start - spans[-1].end + spans[-1].next_place
                digest = picture.digest
                spans.append(PictureSpan(start, length, digest, offset, place, layout.grid))
                inputs.append(InputSpan(start, length, digest, offset, picture))
                offset += length
        after = spans[-1].next_place - spans[-1].end if spans else 0
        return PromptTokens(token_ids, tuple(inputs), {NAME: tuple(spans)}, rope_offset=after)


def _split(text: str, marker: str, places: Seq[int] | None) -> list[str]:
    """Return what is between the markers of a text, which begin at `places`; None: all of them."""
    if places is None:
        return text.split(marker)
    starts = [0, *(place + len(marker) for place in places)]
    ends = [*places, len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


def _runs(positions: Seq[int]) -> list[tuple[int, int]]:
    """Return the first position and the length of each run of neighbours."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and sum(runs[-1]) == position:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((position, 1))
    return runs


def _content(given: Any) -> Image.Image | bytes:
    """Return a picture in RGB, or the bytes of a file, of any of the forms that callers give.

    Raises:
        PictureError: it is none of them.
    """
    if isinstance(given, Image.Image):
        pixels.check_size(given.width, given.height)
        try:
            return pixels.as_rgb(given)
        except (OSError, SyntaxError) as error:  # its file is read here
            raise pixels.PictureError(f"it is damaged: {error}") from error
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if hasattr(given, "__array_interface__"):
        return pixels.from_array(given)
    if not isinstance(given, str | Path):
        raise pixels.PictureError(
            "give a PIL image, the bytes of a file, its path, or a numpy array, got "
            f"{type(given).__name__}"
        )
    if str(given).lower().startswith(("http://", "https://")):
        raise pixels.PictureError(
            f"{shown(str(given))} is an address, and nothing is fetched: download it, and give the "
            "file or its bytes"
        )
    try:
        path = Path(given).expanduser()
        if path.is_file():
            with path.open("rb") as file:
                return file.read(pixels.MAX_BYTES + 1)
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error  # without the path, which may be long
        raise pixels.PictureError(f"cannot read {shown(str(given))}: {reason}") from error
    raise pixels.PictureError(f"there is no file {shown(str(given))}")


def _picture(layout: Layout, parts: Seq[bytes], patch: int) -> Picture:
    """Return a picture as the tower reads it, with its digest."""
    digest = hashlib.sha256(f"{_RULES} {layout}".encode())
    views = []
    for view, rgb in zip(layout.views, parts, strict=True):
        width, height = view.size
        digest.update(rgb)
        views.append(Pixels(height, width, rgb, height * width // patch**2))
    return Picture(digest.digest(), tuple(views), layout.num_tokens)
