"""A figure that changes, as HTML with controls that need no network."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable

import matplotlib as mpl
from matplotlib.animation import FuncAnimation
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ddtree_numba.viz.show import with_palette

# matplotlib's buttons are icons of a font that it fetches from a server; these signs
# are in every font.
_ICONS = {
    "fa-minus": "−",
    "fa-fast-backward": "|◂",
    "fa-step-backward": "◂",
    "fa-play fa-flip-horizontal": "◀",
    "fa-pause": "||",
    "fa-play": "▶",
    "fa-step-forward": "▸",
    "fa-fast-forward": "▸|",
    "fa-plus": "+",
}


def film(
    figure: Figure, draw: Callable[[int], None], n_frames: int, alt_text: str
) -> str:
    """Film a figure: `draw(n)` draws frame n into it.

    Returns
    -------
    str
        HTML for `show_film`. Where scripts are not run (a repository page) it shows
        the last frame.
    """
    FigureCanvasAgg(figure)
    animation = FuncAnimation(
        figure, draw, frames=n_frames, init_func=lambda: None, interval=1200
    )
    with mpl.rc_context({"savefig.dpi": 80, "animation.embed_limit": 1}):
        text = animation.to_jshtml(default_mode="once")
    return _settled(text, alt_text)


def _settled(text: str, alt_text: str) -> str:
    """The film without random names and fonts from elsewhere, and with alt text."""
    (name,) = set(re.findall(r'id="_anim_img([0-9a-f]{32})"', text))
    text = text.replace(name, "film")
    text = re.sub(r"<link[^>]*>", "", text)
    for icon, sign in _ICONS.items():
        text = text.replace(f'<i class="fa {icon}"></i>', sign)
    text = re.sub(r'"data:image/png;base64,([^"]*)"', _smaller, text)
    last = re.findall(r'frames\[\d+\] = ("[^"]*")', text)[-1]
    picture = f'<img alt="{html.escape(alt_text)}" src={last} '
    return text.replace("<img ", picture, 1)


def _smaller(frame: re.Match[str]) -> str:
    picture = base64.b64encode(with_palette(base64.b64decode(frame[1])))
    return f'"data:image/png;base64,{picture.decode()}"'


def show_film(text: str) -> None:
    """Show a film in a notebook, on white."""
    from IPython.display import HTML, display

    display(HTML(f'<div style="background: white; color: black">{text}</div>'))
