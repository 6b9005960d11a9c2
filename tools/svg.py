"""SVG drawings that are readable in light and dark mode.

Every colour has a name and two values, one for each mode; the reader's browser chooses. A drawing
has its own background, so that the text is readable on a page of any colour.
"""

from collections.abc import Sequence
from xml.sax.saxutils import escape

PALETTE = {
    "paper": ("#ffffff", "#0d1117"),
    "panel": ("#eff2f5", "#1c232c"),
    "line": ("#c6ced6", "#434b55"),
    "muted": ("#59636e", "#9aa4af"),
    "ink": ("#1f2328", "#e6edf3"),
    "blue": ("#0072b2", "#56b4e9"),
    "blue-pale": ("#cfe5f3", "#123a56"),
    "orange": ("#c45500", "#f0a53a"),
    "orange-pale": ("#fbe0c8", "#5a3608"),
    "green": ("#00805c", "#3ecfa0"),
    "green-pale": ("#c8ebdf", "#0c4736"),
}
"""Colours by name: (light mode, dark mode). Blue, orange and green follow Okabe and Ito's palette,
which colour-blind readers can tell apart.
"""
SANS = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


class Drawing:
    """A picture under construction. Coordinates are pixels from the top left corner."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.width = width
        self.height = height
        self._head = f"<title>{escape(title)}</title>\n<desc>{escape(description)}</desc>"
        self._fills: set[str] = set()
        self._strokes: set[str] = set()
        self._body: list[str] = []
        self.rect(0.5, 0.5, width - 1, height - 1, fill="paper", stroke="line", radius=8)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str | None = None,
        stroke: str | None = None,
        *,
        radius: float = 0,
        stroke_width: float = 1,
        dashed: bool = False,
    ) -> None:
        """Draw a rectangle."""
        corner, size = map(_number, (x, y)), map(_number, (width, height))
        where = 'x="{}" y="{}" width="{}" height="{}"'.format(*corner, *size)
        rounded = f' rx="{_number(radius)}"' if radius else ""
        self._add(f"rect {where}{rounded}", fill, stroke, stroke_width, dashed)

    def circle(
        self, x: float, y: float, radius: float, fill: str | None = None, stroke: str | None = None
    ) -> None:
        """Draw a circle."""
        where = f'cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}"'
        self._add(f"circle {where}", fill, stroke, 1.5, False)

    def line(
        self,
        points: Sequence[tuple[float, float]],
        stroke: str = "ink",
        *,
        stroke_width: float = 1,
        dashed: bool = False,
    ) -> None:
        """Draw a line through points."""
        where = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._add(f'polyline points="{where}"', None, stroke, stroke_width, dashed)

    def area(self, points: Sequence[tuple[float, float]], fill: str) -> None:
        """Fill a polygon."""
        where = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._add(f'polygon points="{where}"', fill, None, 1, False)

    def link(self, start: tuple[float, float], end: tuple[float, float], stroke: str) -> None:
        """Draw a curved arrow that leaves `start` and reaches `end` vertically."""
        (x1, y1), (x2, y2) = start, end
        down = 1 if y2 > y1 else -1
        tip, middle = y2 - 6 * down, (y1 + y2) / 2
        numbers = (x1, y1, x1, middle, x2, middle, x2, tip)
        curve = "M{} {} C{} {},{} {},{} {}".format(*map(_number, numbers))
        self._add(f'path d="{curve}"', None, stroke, 1.5, False)
        self.area([(x2 - 4, tip), (x2 + 4, tip), (x2, y2)], stroke)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = "ink",
        *,
        size: float = 13,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Write a line of text. `y` is its baseline; `anchor` is start, middle or end."""
        self._fills.add(colour)
        classes = " ".join([f"f-{colour}", *["bold"] * bold, *["mono"] * mono])
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._body.append(
            f'<text class="{classes}" x="{_number(x)}" y="{_number(y)}" '
            f'font-size="{_number(size)}"{at}>{escape(text)}</text>'
        )

    def svg(self) -> str:
        """Return the file."""
        light, dark = (self._colours(mode) for mode in (0, 1))
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img">',
                self._head,
                "<style>",
                f"text{{font-family:{SANS}}}",
                f".mono{{font-family:{MONO}}}",
                ".bold{font-weight:600}",
                light,
                "@media (prefers-color-scheme:dark){",
                dark,
                "}",
                "</style>",
                *self._body,
                "</svg>\n",
            ]
        )

    def _add(
        self, start: str, fill: str | None, stroke: str | None, stroke_width: float, dashed: bool
    ) -> None:
        classes = []
        if fill is not None:
            self._fills.add(fill)
            classes.append(f"f-{fill}")
        if stroke is not None:
            self._strokes.add(stroke)
            classes.append(f"s-{stroke}")
        more = ' fill="none"' if fill is None else ""
        if stroke is not None and stroke_width != 1:
            more += f' stroke-width="{_number(stroke_width)}"'
        if dashed:
            more += ' stroke-dasharray="4 3"'
        self._body.append(f'<{start} class="{" ".join(classes)}"{more}/>')

    def _colours(self, mode: int) -> str:
        rules = [f".f-{name}{{fill:{PALETTE[name][mode]}}}" for name in sorted(self._fills)]
        rules += [f".s-{name}{{stroke:{PALETTE[name][mode]}}}" for name in sorted(self._strokes)]
        return "\n".join(rules)


def _number(value: float) -> str:
    """Return a number with at most one decimal."""
    return f"{round(value, 1):g}"
