"""`Terminal`: shows a story in the terminal, by rich."""

import io
import sys
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from nanovllm.apps.explain.story import Note, RowStory, Sample, Step, Story
from nanovllm.loading.text_tokenizer import TextTokenizer
from nanovllm.utils.terminal import write

_MOST_BLOCKS = 12
"""Blocks of a block table that are shown; the others are counted."""
_PIPE_WIDTH = 120
"""Columns where nobody watches a terminal."""


class Terminal:
    """Writes to standard output, with colours if it is a terminal."""

    def __init__(self) -> None:
        is_terminal = sys.stdout.isatty()
        self._buffer = io.StringIO()
        self._console = Console(
            file=self._buffer,
            force_terminal=is_terminal,
            width=Console().width if is_terminal else _PIPE_WIDTH,
            highlight=False,
        )

    def show_facts(self, story: Story) -> None:
        """Show how the engine was set up."""
        table = Table.grid(padding=(0, 2))
        for name, value in story.facts.items():
            table.add_row(Text(name, "dim"), Text(value))
        self._show(table)

    def show_step(self, story: Story, step: Step) -> None:
        """Show a step: its rows, how each token was chosen, and who has no row."""
        milliseconds = 1000 * sum(step.seconds.values())
        num_tokens = sum(row.num_tokens for row in step.rows)
        title = (
            f"step {step.number}: {_count(len(step.rows), 'row')}, {num_tokens} of "
            f"{step.budget} tokens, {step.num_used_blocks} of {story.num_blocks} blocks, "
            f"{milliseconds:.2f} ms"
        )
        parts: list[RenderableType] = [Rule(title, style="blue")]
        if step.rows:
            parts.append(_rows(story, step))
        for row in step.rows:
            parts += [Padding(_sample(story, row, each), (0, 0, 0, 2)) for each in row.samples]
        parts += _notes("is preempted", step.preempted, "red")
        parts += _notes("has no row", step.waiting, "yellow")
        parts += _notes("ends", step.ended, "green")
        self._show(Group(*parts))

    def show_sequences(self, story: Story, tokenizer: TextTokenizer | None) -> None:
        """Show the text of each sequence."""
        table = Table("", "prompt", "continuation", "end", box=None, header_style="dim")
        for seq in story.sequences:
            prompt = seq.token_ids[: seq.num_prompt_tokens]
            output = seq.token_ids[seq.num_prompt_tokens :]
            shown = [
                Text(f"{ids}" if tokenizer is None else repr(tokenizer.decode(ids)))
                for ids in (prompt, output)
            ]
            table.add_row(f"#{seq.number}", *shown, f"{seq.finish_reason}")
        self._show(Group(Rule("text", style="blue"), table))

    def _show(self, found: RenderableType) -> None:
        self._buffer.seek(0)
        self._buffer.truncate()
        self._console.print(found)
        lines = self._buffer.getvalue().splitlines()  # rich fills lines with spaces
        write("".join(f"{line.rstrip()}\n" for line in lines), is_styled=True)


def _rows(story: Story, step: Step) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("row", "does", "why", "tokens", "blocks", "slots"):
        table.add_column(name, overflow="fold")
    for row in step.rows:
        tokens = "".join(story.texts[token] for token in row.token_ids)
        table.add_row(
            f"#{row.sequence} in table row {row.table_idx}",
            f"{row.kind} {row.num_tokens} at {row.start}",
            row.why,
            Text(repr(tokens if len(tokens) <= 60 else f"{tokens[:40]}...{tokens[-17:]}")),
            _blocks(story, row),
            spans(row.slots),
        )
    return table


def _blocks(story: Story, row: RowStory) -> Text:
    """Return a block table, with its hits and what is new in it."""
    num_hits = (row.num_cached_tokens or 0) // story.block_size
    num_new = len(row.new_blocks)
    text = Text()
    left_out = max(0, len(row.block_table) - _MOST_BLOCKS)
    if left_out:
        text.append(f"({left_out} blocks) ")
    for index, block in enumerate(row.block_table[left_out:], left_out):
        is_new = index >= len(row.block_table) - num_new
        style = "green" if index < num_hits else "bold" if is_new else ""
        mark = "=" if index < num_hits else "+" if is_new else ""
        text.append(f"{mark}{block} ", style)
    if num_hits:
        text.append(f"({row.num_cached_tokens} tokens cached)", "green")
    return text


def _sample(story: Story, row: RowStory, sample: Sample) -> Group:
    how = "the likeliest" if sample.uniform is None else f"drawn with {sample.uniform:.4f}"
    end = ""
    if not sample.counts:
        end = ", does not count: the draft before it was wrong"
    elif sample.draft_id is not None:
        right = "accepted" if sample.draft_id == sample.token_id else "rejected"
        end = f", draft {story.texts[sample.draft_id]!r} {right}"
    chosen = story.texts.get(sample.token_id)
    title = f"#{row.sequence} at {sample.position}: {chosen!r}, {how}{end}"
    table = Table(box=None, header_style="dim")
    table.add_column("token")
    for stage in sample.stages:
        table.add_column(f"{stage.name}\n{stage.num_left} left", justify="right", overflow="fold")
    for index, token in enumerate(sample.candidates):
        shares = (stage.probabilities[index] for stage in sample.stages)
        cells = [f"{100 * share:.3f}%" if share else "" for share in shares]
        style = "bold green" if token == sample.token_id else ""
        table.add_row(Text(repr(story.texts[token])), *cells, style=style)
    return Group(Text(title), table)


def _notes(what: str, notes: Iterable[Note], style: str) -> list[RenderableType]:
    return [Text(f"#{note.sequence} {what}: {note.text}", style) for note in notes]


def spans(numbers: list[int]) -> str:
    """Return numbers in words, those that follow each other as one span: "3-9, 12"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] + 1 == number:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
