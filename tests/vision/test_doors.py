"""The ways by which pictures come into prompts, and what is refused by name."""

import base64
import io
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from PIL import Image

from nanovllm import LLM, vllm
from nanovllm.errors import InvalidRequestError
from tests.vision.pictures import PARAMS, noise, told
from tests.vision.qwen import PAD, PICTURE


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


PICTURE_GIVEN = noise(24, 40, 5)
FILE = png(PICTURE_GIVEN)
BASE64 = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{BASE64}"


def chat(llm: LLM, *parts: Any, **options: Any) -> tuple[list[int], float]:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]
    (output,) = llm.chat(messages, PARAMS, use_tqdm=False, **options)
    return told(output)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> tuple[list[int], float]:
    text = f"<|im_start|>user\n{PICTURE}What is it?<|im_end|>\n<|im_start|>assistant\n"
    given = {"prompt": text, "multi_modal_data": {"image": PICTURE_GIVEN}}
    return told(llm.generate(given, PARAMS, use_tqdm=False)[0])


def test_all_parts_of_conversations_are_one_picture(
    llm: LLM, expected: tuple[list[int], float], tmp_path: Path
) -> None:
    path = tmp_path / "a b.png"
    path.write_bytes(FILE)
    for part in (
        {"type": "image", "image": PICTURE_GIVEN},
        {"type": "image", "image": FILE},
        {"type": "image", "image": np.asarray(PICTURE_GIVEN)},
        {"type": "image", "image": path},
        {"type": "image", "path": str(path)},
        {"type": "image_pil", "image_pil": PICTURE_GIVEN},
        {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}},
        {"type": "image_url", "image_url": URL},
        {"type": "image_url", "image_url": {"url": f"file://{quote(str(path))}"}},
        {"type": "image_url", "image_url": {"url": "data:image/png," + quote(FILE)}},
        *(
            {"type": "image_url", "image_url": {"url": url}}
            for url in (
                f" DATA:IMAGE/PNG;BASE64,{BASE64}\n",
                f"data:;base64,{BASE64[:9]}\r\n {BASE64[9:]}",
                f"data:text/html;charset=utf-8;base64,{quote(BASE64, safe='')}",
                f"data:image/png;base64,{base64.urlsafe_b64encode(FILE).decode().rstrip('=')}",
                f"file://localhost{quote(str(path))}",
            )
        ),
        {"type": "input_image", "image_url": URL, "detail": "high"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
    ):
        assert chat(llm, part) == expected, part


def test_conversations_in_tables(llm: LLM, expected: tuple[list[int], float]) -> None:
    """pandas and Ray Data make arrays of the lists in a file, and all parts have all fields."""
    pyarrow = pytest.importorskip("pyarrow")
    parts = [
        {"type": "image_url", "image_url": {"url": URL, "detail": None}, "text": None},
        {"type": "text", "image_url": None, "text": "What is it?"},
    ]
    table = pyarrow.Table.from_pylist([{"messages": [{"role": "user", "content": parts}]}] * 2)
    column = table.column("messages").to_numpy()
    assert [told(found) for found in llm.chat(column, PARAMS, use_tqdm=False)] == [expected] * 2
    (alone,) = llm.chat(column[0], PARAMS, use_tqdm=False)
    assert told(alone) == expected


def test_token_ids_have_one_soft_token_or_all(llm: LLM, expected: Any) -> None:
    text = f"<|im_start|>user\n{PICTURE}What is it?<|im_end|>\n<|im_start|>assistant\n"
    ids = llm.engine.input_processor.encode(text, rendered=True)
    data = {"image": [PICTURE_GIVEN]}
    for _ in range(2):
        given = {"prompt_token_ids": ids, "multi_modal_data": data}
        (output,) = llm.generate(given, PARAMS, use_tqdm=False)
        assert told(output) == expected
        ids = output.prompt_token_ids
    given = {"prompt_token_ids": ids[:-8], "multi_modal_data": {"image": [PICTURE_GIVEN] * 2}}
    with pytest.raises(InvalidRequestError, match="has 2 pictures and 1 times the token"):
        llm.generate(given, PARAMS)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}, "nothing is fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,$$"}}, "not valid base"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}, "none of PNG"),
        ({"type": "image_url", "image_url": {"url": "data:;base64"}}, "base64,..., got"),
        ({"type": "image_url"}, "a picture without content"),
        ({"type": "image_url", "image_url": "S3://a/b.png"}, "nothing is fetched"),
        ({"type": "image_url", "image_url": "file://host/a.png"}, "file:///path of this machine"),
        ({"type": "image_url", "image_url": "file://["}, "file:///path of this machine"),
        ({"type": "image_url", "image_url": "a\0b"}, "there is no file"),
        ({"type": "image_url", "image_url": "a" * 5000}, "cannot read"),
        ({"type": "image_url", "image_url": "~nobody-here/a.png"}, "is no path"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "all"}}, '"low", "high" or'),
        ({"type": "input_image", "image_url": URL, "detail": 1}, '"low", "high" or "auto", got 1'),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "the source of a picture"),
        ({"type": "image", "image": "no/such.png"}, "there is no file"),
        ({"type": "image", "image": 5}, "got int"),
        ({"type": "image", "image": np.zeros((2, 2, 3))}, "must be uint8"),
        ({"type": "image", "image": torch.zeros(3, 9, 9)}, "numpy array, got Tensor"),
        (
            {"type": "image", "image": Image.open(io.BytesIO(FILE[:-900]))},
            "it is damaged: image file",
        ),
        ({"type": "image", "image": noise(2, 401)}, "one side may be at most 200"),
        ({"type": "audio", "audio": "a"}, "type 'audio', but the model reads text and pictures"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(llm: LLM, part: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        chat(llm, part)


def test_markers_must_be_as_many_as_pictures(llm: LLM) -> None:
    given = {"prompt": f"{PICTURE} and {PICTURE}", "multi_modal_data": {"image": [PICTURE_GIVEN]}}
    with pytest.raises(InvalidRequestError, match="has 1 pictures and 2 markers"):
        llm.generate(given, PARAMS)
    for data in ({"video": [1]}, [PICTURE_GIVEN], {"image": PICTURE_GIVEN, "audio": 1}):
        with pytest.raises(InvalidRequestError, match="multi_modal_data must be"):
            llm.generate({"prompt": PICTURE, "multi_modal_data": data}, PARAMS)
    with pytest.raises(InvalidRequestError, match="max_pixel'.* min_pixels, max_pixels"):
        llm.generate({**given, "prompt": PICTURE, "mm_processor_kwargs": {"max_pixel": 1}}, PARAMS)
    with pytest.raises(InvalidRequestError, match="would cut pictures"):
        llm.generate({**given, "prompt": PICTURE}, PARAMS.clone(truncate_prompt_tokens=16))
    for kept in (17, -1):
        params = PARAMS.clone(truncate_prompt_tokens=kept)
        (output,) = llm.generate({**given, "prompt": PICTURE}, params, use_tqdm=False)
        assert len(output.prompt_token_ids) == 17


def test_the_result_of_a_tool_may_be_a_picture(llm: LLM) -> None:
    """Also where the template knows parts only in messages of the user."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [
                {"type": "text", "text": "Here:"},
                {"type": "image_url", "image_url": {"url": URL}},
            ],
        },
    ]
    (pad,) = llm.engine.input_processor.encode(PAD, rendered=True)
    assert llm.render(messages).count(pad) == 15
    strict = (
        "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}"
        "{% elif m.role == 'user' %}{% for p in m.content %}{% if p.type == 'image' %}"
        "<|image_pad|>{% endif %}{% endfor %}{% endif %};{% endfor %}"
    )
    deaf = "{% for m in messages %}{{ m.role }};{% endfor %}"
    assert llm.render(messages, chat_template=strict).count(pad) == 15
    with pytest.raises(InvalidRequestError, match="does not show them all"):
        llm.render(messages, chat_template=deaf)
    system = [{"role": "system", "content": [{"type": "image", "image": FILE}]}, *messages]
    with pytest.raises(InvalidRequestError, match="pictures belong to messages of the user"):
        llm.render(system)


def test_scripts_of_vllm(qwen: Any) -> None:
    """What those with pictures set and give besides, and what they lack then."""
    args = vllm.EngineArgs(
        str(qwen("qwen3_vl")),
        max_model_len=128,
        num_kvcache_blocks=8,
        kvcache_block_size=32,
        mm_processor_kwargs={"min_pixels": 784, "max_pixels": 4000, "fps": 1},
        limit_mm_per_prompt={"image": 1},
    )
    none = {"image": 0, "video": 0, "audio": 0, "vision_chunk": 0}
    args.limit_mm_per_prompt = none | dict(args.limit_mm_per_prompt or {})
    args.mm_processor_cache_gb = 4
    llm = vllm.LLM.from_engine_args(args)
    params = vllm.SamplingParams(temperature=0.2, max_tokens=4)
    uuids = {"image": "uuid_0"}
    given = {"prompt": PICTURE, "multi_modal_data": {"image": FILE}, "multi_modal_uuids": uuids}
    (output,) = llm.generate(given, sampling_params=params, lora_request=None)
    assert len(output.prompt_token_ids) == 2 + 15
    with pytest.raises(InvalidRequestError, match="give them each time"):
        llm.generate({**given, "multi_modal_data": {"image": None}}, params)
    llm.shutdown()


def test_low_detail(llm: LLM) -> None:
    """A picture fits into 512 x 512 pixels then; one that does so anyway stays the same."""
    (pad,) = llm.engine.input_processor.encode(PAD, rendered=True)
    for picture, high, low in (
        (noise(8, 704), 88, 64),
        (noise(704, 8), 88, 64),
        (noise(8, 512), 64, 64),
    ):
        url = f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "input_image", "image_url": url},
            {"type": "image", "image": picture},
        ):
            found = []
            for detail in ("auto", "high", "low"):
                more = {"image_url": {"url": url, "detail": detail}}
                if part["type"] != "image_url":
                    more = {"detail": detail}
                message = {"role": "user", "content": [{**part, **more}]}
                found.append(llm.render([message]).count(pad))
            assert found == [high, high, low]


def test_limits(make_llm: Any, qwen: Any, llm: LLM) -> None:
    few = make_llm(
        qwen("qwen3_vl"),
        limit_mm_per_prompt={"image": 1},
        max_image_tokens=20,
        mm_processor_kwargs={"max_pixels": 4000},
    )
    picture = {"type": "image", "image": noise(40, 30)}
    chat(few, {"type": "image", "image": noise(30, 30)})
    with pytest.raises(InvalidRequestError, match="has 2 pictures, limit_mm_per_prompt allows 1"):
        chat(few, picture, picture)
    with pytest.raises(
        InvalidRequestError, match="30 x 40 pixels take 20 tokens, max_image_tokens"
    ):
        chat(make_llm(qwen("qwen3_vl"), max_image_tokens=19), picture)
    many = {"image": [noise(64, 88, seed) for seed in range(64)]}
    given = {"prompt": PICTURE * 64, "multi_modal_data": many}
    with pytest.raises(InvalidRequestError, match="its pictures have 440 tokens and more"):
        llm.generate(given, PARAMS)
    text = json.loads((qwen("qwen3_vl") / "config.json").read_text())["text_config"]
    longer = {"text_config": {**text, "max_position_embeddings": 6000}}
    large = make_llm(
        qwen("qwen3_vl"),
        encoder_cache_mib=1,
        max_model_len=6000,
        num_kvcache_blocks=188,
        hf_overrides=longer,
    )
    with pytest.raises(InvalidRequestError, match="have 5632 tokens.* fit into encoder_cache_mib"):
        large.generate(given, PARAMS)
    blind = make_llm(qwen("qwen3_vl"), limit_mm_per_prompt={"image": 0})
    with pytest.raises(InvalidRequestError, match="was loaded without"):
        blind.generate({"prompt": PICTURE, "multi_modal_data": {"image": FILE}}, PARAMS)
    with pytest.raises(InvalidRequestError, match="reads text only"):
        chat(blind, picture)
