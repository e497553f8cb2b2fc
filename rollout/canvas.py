"""One look for all pictures: figures without pyplot or global state, saved as PNG. matplotlib is imported lazily."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rollout.look import site_labels
from storage.trace import Site

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = {
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#8a8f98",
    "axes.labelcolor": "#30343b",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "xtick.color": "#30343b",
    "ytick.color": "#30343b",
    "legend.frameon": False,
    "text.parse_math": False,  # a "$" in a path or a router's name is no formula
}
LAYER = "MoE layer"
BLUE, ORANGE, GREEN, GREY = "#2166ac", "#e08214", "#1b7837", "#8a8f98"
DPI = 144
WIDTH = 12


class Picture(NamedTuple):
    """A picture and how to read it.

    Attributes:
        name: the file's name without its ending.
        title: what it shows. caption: how to read it, in whole sentences.
        draw: makes the figure; called inside `style()`.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[], Figure]


def need_matplotlib() -> Any:
    """The module, or an error that says how to get it."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'moe-rollout[plot]'") from error
    return matplotlib


@contextmanager
def style() -> Iterator[None]:
    """The fonts and colours of all pictures, for the duration of the block."""
    with need_matplotlib().rc_context(STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches that lays itself out."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def new_axes(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """A figure with one set of axes and a light grid."""
    figure = new_figure(WIDTH, 4)
    axes = figure.add_subplot()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(True)
    return figure, axes


def png(picture: Picture, titled: bool) -> bytes:
    """The picture as PNG, with its title in it or without."""
    with style():
        figure = picture.draw()
        if titled:
            figure.suptitle(picture.title, x=0.01, ha="left", weight="bold", size=13)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=DPI, facecolor="white")
    return out.getvalue()


def label_every(count: int, room: int) -> list[int]:
    """Which of `count` positions get a label when `room` labels fit: every 1st, 2nd, 4th, 5th, 10th, ...

    >>> label_every(200, 20)
    [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140, 150, 160, 170, 180, 190]
    """
    steps = (base * 10**power for power in range(6) for base in (1, 2, 4, 5, 8))
    return list(range(0, count, next(step for step in steps if count <= step * room)))


def label_sites(axis: Any, sites: Sequence[Site], room: int) -> None:
    """Name the sites along `axis` (an axes' xaxis or yaxis), as many as there is room for."""
    labels = site_labels(sites)
    turned = axis.axis_name == "x" and max(map(len, labels)) > 3
    shown = label_every(len(sites), 2 * room if turned else room)
    axis.set_ticks(shown, [labels[i] for i in shown], rotation=90 if turned else 0)


def legend_above(axes: Axes, reverse: bool = False, **entries: Any) -> None:
    """The legend over the right end of the axes, where it hides no data."""
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderaxespad=0.2, reverse=reverse, **entries)


def heat_map(values: np.ndarray, sites: Sequence[Site], **scale: Any) -> tuple[Figure, Axes, Any]:
    """`[sites, experts]` as an image whose cells stay visible up to hundreds of experts; figure, axes and image."""
    rows, experts = values.shape
    width = float(np.clip(0.05 * experts + 3, WIDTH, 18))
    height = float(np.clip(max(0.17 * rows, min(0.35 * rows, 4)) + 1.3, 3, 14))
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    image = axes.imshow(values, aspect="auto", interpolation="nearest", **scale)
    axes.set(xlabel="expert id", ylabel=LAYER)
    axes.set_xticks(label_every(experts, 32))
    label_sites(axes.yaxis, sites, 32)
    axes.spines[:].set_visible(False)
    return figure, axes, image


def diverging() -> Any:
    """Blue below, white, red above; light grey where there is nothing, black for values under the scale."""
    from matplotlib.colors import ListedColormap

    colours = need_matplotlib().colormaps["RdBu_r"](np.linspace(0.06, 0.94, 255))  # no end that could pass for black
    return ListedColormap(colours).with_extremes(under="black", bad="#e3e6ea")


def percent(axis: Any) -> None:
    """Label shares from 0 to 1 along `axis` as percentages."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.6g} %"))


def whole_numbers(axis: Any) -> None:
    """No ticks between the integers along `axis`."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def colours_of(count: int) -> np.ndarray:
    """`[count, 4]` colours from dark to light that say which line is how deep or how late."""
    return need_matplotlib().colormaps["viridis"](np.linspace(0, 0.9, max(count, 1)))


def colour_scale(figure: Figure, axes: Any, labels: list[str], title: str) -> None:
    """The key to `colours_of`: which colour is which label."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    edges = np.arange(len(labels) + 1) - 0.5
    scale = ScalarMappable(BoundaryNorm(edges, len(labels)), ListedColormap(colours_of(len(labels))))
    shown = label_every(len(labels), 12)
    bar = figure.colorbar(scale, ax=axes, label=title, ticks=shown, pad=0.02, aspect=30)
    bar.ax.set_yticklabels([labels[i] for i in shown])
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
