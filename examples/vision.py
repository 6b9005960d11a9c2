"""Questions about a picture: `python examples/vision.py [MODEL]`. Needs the extra `vision`.

The picture is drawn here. The shipped model knows shapes, digits and six colours. A second question
about a picture encodes nothing, and the prefix cache keeps what the model has read of it.
"""

import sys

from PIL import Image, ImageDraw

from nanovllm import LLM, SamplingParams, demo_model

QUESTIONS = [
    "What do you see?",
    "Where is the blue square?",
    "What colour is the triangle?",
    "How many circles are there?",
]


def drawn() -> Image.Image:
    image = Image.new("RGB", (192, 192), "white")
    canvas = ImageDraw.Draw(image)
    canvas.ellipse((18, 18, 78, 78), fill="red")
    canvas.rectangle((116, 22, 172, 78), fill="blue")
    canvas.polygon(((48, 112), (14, 176), (82, 176)), fill="orange")
    return image


def main() -> None:
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else demo_model.VISION_MODEL)
    greedy = SamplingParams(temperature=0, max_tokens=60)
    image = {"type": "image", "image": drawn()}
    for question in QUESTIONS:
        content = [image, {"type": "text", "text": question}]
        (output,) = llm.chat([{"role": "user", "content": content}], greedy, use_tqdm=False)
        print(f"{question} {output.text}")
    llm.shutdown()


if __name__ == "__main__":
    main()
