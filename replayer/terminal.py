"""The terminal of `analyze` and `replay`, on which text of others is text only.

Logs, traces and answers have names and messages that clients and servers chose. Control sequences
in them would set the terminal's title, hide lines or colour them.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment


def printable(text: str) -> str:
    """Return the text with what is not printable escaped, all but line ends."""
    if text.isprintable():
        return text
    shown = (one if one == "\n" or one.isprintable() else _escaped(one) for one in text)
    return "".join(shown)


def _escaped(one: str) -> str:
    return one.encode("unicode_escape", "surrogatepass").decode()


class Terminal(Console):
    """A console that escapes what is not printable, wherever in a table or a line it stands.

    No text is markup, which could name a style, or one that does not exist.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as a console does; its own control sequences are not text."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
