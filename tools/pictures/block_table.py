"""block_table.svg: two sequences that share a prefix, from a real BlockManager.

The example is that of docs/paged_attention.md.
"""

from nanovllm.core.sequence import Sequence
from nanovllm.kv.block_manager import BlockManager
from nanovllm.options.sampling_params import SamplingParams
from tools.svg import Drawing

NUM_BLOCKS, BLOCK_SIZE = 8, 4
LEFT, PITCH, CELL = 126, 92, 20
"""Pixels: the left edge of block 0, from one block to the next, and the width of a token."""
POOL_TOP, POOL_HEIGHT = 166, 108
OWNERS = {"A": "blue", "B": "orange", "AB": "green"}
"""Colour by the sequences that use a block."""
LEGEND = {"AB": "common prefix, used by A and B", "A": "used by A alone", "B": "used by B alone"}


def run() -> tuple[BlockManager, dict[str, Sequence]]:
    """Return a block manager after two sequences have taken their blocks."""
    pool = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    a = Sequence(0, [10, 11, 12, 13, 14, 15, 16, 17, 18, 19], SamplingParams())
    b = Sequence(1, [10, 11, 12, 13, 14, 15, 16, 17, 50], SamplingParams())
    pool.allocate_blocks(a, a.num_tokens)
    pool.publish(a, a.num_tokens)  # the step that computes A's prompt is done
    pool.allocate_blocks(b, b.num_tokens, pool.match_prefix(b))
    return pool, {"A": a, "B": b}


def draw() -> str:
    """Return the picture."""
    pool, sequences = run()
    drawing = Drawing(
        880,
        448,
        "Block tables of two sequences that share a prefix",
        "Sequence A uses blocks 0, 1 and 2, sequence B uses blocks 0, 1 and 3. Blocks 0 and 1 hold "
        "the common prefix: they are stored once and have two references.",
    )
    drawing.text(18, 32, "Two sequences, one copy of their common prefix", size=17, bold=True)
    owners = {
        block_id: "".join(name for name, seq in sequences.items() if block_id in seq.kv.block_table)
        for block_id in range(NUM_BLOCKS)
    }
    tokens = {
        block_id: seq.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        for seq in sequences.values()
        for index, block_id in enumerate(seq.kv.block_table)
    }
    _draw_sequence(drawing, "A", sequences["A"], owners, above=True)
    _draw_sequence(drawing, "B", sequences["B"], owners, above=False)
    drawing.text(18, POOL_TOP + 18, "KV cache", bold=True)
    drawing.text(18, POOL_TOP + 35, f"{NUM_BLOCKS} blocks of", "muted", size=12)
    drawing.text(18, POOL_TOP + 50, f"{BLOCK_SIZE} tokens", "muted", size=12)
    for block_id, block in enumerate(pool.blocks):
        cached = block.entry is not None
        found = tokens.get(block_id, [])
        _draw_block(drawing, block_id, owners[block_id], found, block.ref_count, cached)
    _draw_slot(drawing, sequences["B"])
    for number, (owner, words) in enumerate(LEGEND.items()):
        drawing.rect(_left(5), 62 + 22 * number, 14, 14, f"{OWNERS[owner]}-pale", OWNERS[owner])
        drawing.text(_left(5) + 22, 74 + 22 * number, words, size=12)
    return drawing.svg()


def _draw_sequence(
    drawing: Drawing, name: str, seq: Sequence, owners: dict[int, str], *, above: bool
) -> None:
    """Draw tokens, block table and the links to the blocks, on one side of the KV cache."""
    tokens_y = 58 if above else 368
    table_y = 92 if above else 330
    drawing.text(18, tokens_y + 17, f"Sequence {name}", OWNERS[name], bold=True)
    drawing.text(18, table_y + 17, "its block table", "muted", size=12)
    for index, block_id in enumerate(seq.kv.block_table):
        x = _left(index)
        colour = OWNERS[owners[block_id]]
        _draw_cells(drawing, x, tokens_y, seq.token_ids[index * BLOCK_SIZE :][:BLOCK_SIZE], colour)
        drawing.rect(x, table_y, 4 * CELL, 24, f"{colour}-pale", colour, radius=3)
        drawing.text(x + 2 * CELL, table_y + 17, f"{block_id}", anchor="middle", bold=True)
        start = (x + 2 * CELL, table_y + 24 if above else table_y)
        end = (_left(block_id) + 2 * CELL, POOL_TOP if above else POOL_TOP + POOL_HEIGHT)
        drawing.link(start, end, colour)


def _draw_block(
    drawing: Drawing, block_id: int, owner: str, tokens: list[int], references: int, cached: bool
) -> None:
    x = _left(block_id)
    middle = x + 2 * CELL
    drawing.rect(
        x - 3,
        POOL_TOP,
        4 * CELL + 6,
        POOL_HEIGHT,
        "panel" if owner else None,
        OWNERS[owner] if owner else "line",
        radius=5,
        dashed=not owner,
    )
    drawing.text(middle, POOL_TOP + 17, f"block {block_id}", anchor="middle", size=12, bold=True)
    if not owner:
        drawing.text(middle, POOL_TOP + 60, "free", "muted", anchor="middle", size=12)
        return
    _draw_cells(drawing, x, POOL_TOP + 25, tokens, OWNERS[owner])
    slot = block_id * BLOCK_SIZE
    slots = f"slots {slot} to {slot + BLOCK_SIZE - 1}"
    drawing.text(middle, POOL_TOP + 64, slots, "muted", anchor="middle", size=11)
    plural = "reference" if references == 1 else "references"
    drawing.text(middle, POOL_TOP + 82, f"{references} {plural}", anchor="middle", size=12)
    if cached:
        drawing.text(middle, POOL_TOP + 98, "cached", anchor="middle", size=12)


def _draw_cells(drawing: Drawing, x: float, y: float, tokens: list[int], colour: str) -> None:
    """Draw the tokens of a block; a cell that holds none is empty."""
    for offset in range(BLOCK_SIZE):
        used = offset < len(tokens)
        left = x + offset * CELL
        drawing.rect(left, y, CELL, 24, f"{colour}-pale" if used else "paper", colour)
        if used:
            middle = left + CELL / 2
            drawing.text(middle, y + 16, f"{tokens[offset]}", size=11, anchor="middle", mono=True)


def _draw_slot(drawing: Drawing, seq: Sequence) -> None:
    """Write how the KV slot of the last token of `seq` is found."""
    position = len(seq.token_ids) - 1
    block_id = seq.kv.block_table[position // BLOCK_SIZE]
    slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
    rule = f"slot = block_table[position // {BLOCK_SIZE}] × {BLOCK_SIZE} + position % {BLOCK_SIZE}"
    example = (
        f"B's position {position}: {block_id} × {BLOCK_SIZE} + {position % BLOCK_SIZE} = {slot}"
    )
    drawing.text(18, 428, "KV slot", "muted", size=12)
    drawing.text(LEFT, 428, rule, size=12, mono=True)
    drawing.text(LEFT + 430, 428, example, size=12, mono=True)


def _left(index: int) -> float:
    return LEFT + index * PITCH
