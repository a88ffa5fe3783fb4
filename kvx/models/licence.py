"""Licences of model weights: name, address and full text."""

from __future__ import annotations

import dataclasses
import html.parser
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class Licence:
    """What a model's weights may be used for.

    Attributes:
        model: title of the model; name: of the licence; url: its address; text: in full.
    """

    model: str
    name: str
    url: str
    text: str

    def __str__(self) -> str:
        return f"{self.model}: {self.name} ({self.url})"


def article_text(page: str) -> str:
    """Plain text of an HTML page's article, from its title on.

    Args:
        page: HTML.

    Returns:
        The text, blocks on lines of their own.

    Example:
        >>> from kvx.models.licence import article_text
        >>> article_text("<p>menu</p><article><h1>Terms</h1><p>Be   kind.</p></article><p>footer</p>")
        'Terms\\n\\nBe kind.\\n'
    """
    parser = _Article()
    parser.feed(page)
    lines = (" ".join(line.split()) for line in "".join(parser.parts).splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


class _Article(html.parser.HTMLParser):
    """Text of a page's ``<article>`` from its title on, block elements on their own lines."""

    BLOCKS = frozenset(("p", "div", "li", "ul", "ol", "h1", "h2", "h3", "h4", "tr", "br", "section"))
    SILENT = frozenset(("script", "style", "devsite-toc", "devsite-feedback", "devsite-actions", "button"))

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.article, self.inside, self.muted = False, False, 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.article |= tag == "article"
        self.inside |= self.article and tag == "h1"
        self.muted += tag in self.SILENT
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self.article = self.inside = False
        self.muted -= tag in self.SILENT
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self.inside and not self.muted:
            self.parts.append(data)
