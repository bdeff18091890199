"""Pictures in a notebook: one small PNG on white, and the same in words."""

from __future__ import annotations

import html
import io
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

COLOURS = 128
"""Colours of a stored picture: enough for text and flat areas, a third of the bytes."""


def png(figure: Figure, dpi: float = 100) -> bytes:
    """The figure as a PNG with a palette, without its date and program."""
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None}
    )
    return with_palette(buffer.getvalue())


def with_palette(picture: bytes) -> bytes:
    """A PNG with `COLOURS` colours."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    small = image.quantize(COLOURS, dither=Image.Dither.NONE)
    result = io.BytesIO()
    small.save(result, format="png", optimize=True)
    return result.getvalue()


def show(pair: tuple[Figure, str], *, dpi: float = 100) -> None:
    """Show what a ``*_figure`` function returned, in a notebook.

    Parameters
    ----------
    pair : figure, alt_text
    dpi : float
        Dots an inch; the picture's width on the page is 100 times its inches.

    Notes
    -----
    The alt text goes into the output's metadata, as IPython and nbconvert do it, and
    into folded text under the picture: JupyterLab gives its images none. The picture is
    opaque, so it reads on a dark theme too.
    """
    from IPython.display import display

    figure, alt_text = pair
    metadata: dict[str, Any] = {
        "alt": alt_text,
        "needs_background": "light",
        "width": round(100 * figure.get_figwidth()),
    }
    display(
        {"image/png": png(figure, dpi), "text/plain": alt_text},
        metadata={"image/png": metadata},
        raw=True,
    )
    display(in_words(alt_text), raw=True)


def in_words(alt_text: str) -> dict[str, str]:
    """A picture's alt text as folded output."""
    folded = "<details><summary>This picture in words</summary>{}</details>"
    return {"text/html": folded.format(html.escape(alt_text)), "text/plain": alt_text}
