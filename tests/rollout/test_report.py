"""`moe-rollout report`: the page parsed, and opened in a headless Chromium that may reach no network."""

from __future__ import annotations

import base64
import io
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rollout.__main__ import main
from storage import TraceDataset
from storage.summary import summarise
from tests.rollout.test_plot import WIDE, wide_traces, write
from tests.storage.test_drift import turned
from tests.storage.toy import TOY, long_trace, short_trace

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
NO_NETWORK = ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking", "--no-first-run"]
MEASURE = """<script>onload = () => document.querySelectorAll("img").forEach(image => {
  const box = image.getBoundingClientRect();
  image.dataset.natural = [image.naturalWidth, image.naturalHeight];
  image.dataset.box = [box.x, box.y, box.width, box.height];
})</script>"""


@dataclass
class Page(HTMLParser):
    """What a report holds."""

    html: str
    images: list[dict[str, str | None]] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [found["id"]] if found.get("id") else []
        self.links += [found["href"]] if found.get("href") else []
        if tag == "img":
            self.images.append(found)
        elif tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        tag = self.open[-1] if self.open else ""
        if tag in ("td", "th"):
            self.cells.append(data)
        elif tag in ("h1", "h2"):
            self.headings.append(data)


def pixels(image: dict[str, str | None]) -> np.ndarray:
    """`[height, width, 3]` of an image that lies in the page."""
    kind, data = str(image["src"]).split(",", 1)
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Path of a dataset and text of the report about it and another one."""
    folder = tmp_path_factory.mktemp("report")
    a = write(folder / "a <b>&", TOY, [long_trace()], [short_trace()])
    b = write(folder / "b", TOY, [turned()])
    assert main(["report", a, "--against", b, "--out", str(folder / "report.html")]) == 0
    return a, (folder / "report.html").read_text()


def test_the_page_has_pictures_tables_and_the_figures_of_inspect(report: tuple[str, str]) -> None:
    root, html = report
    page = Page(html)
    assert page.open == []
    assert page.headings[:6] == [
        *("Routing report", "Expert load", "Load entropy over steps", "Reuse between neighbouring tokens"),
        *("Agreement of two datasets", "Experts that gained or lost"),
    ]
    assert [image["alt"] for image in page.images] == page.headings[1:6]
    assert all((pixels(image) < 200).any() for image in page.images)
    figures = summarise(TraceDataset(root))
    cards = re.findall(r'<div class="card"><b>(.*?)</b><span>(.*?)</span>', html)
    assert ("2", "samples") in cards
    assert (str(figures["rows"]["recorded"]), "rows recorded") in cards
    assert ("2 of 4", "experts chosen") in cards
    assert f"{figures['sites'][1]['load_entropy']:.3f}" in page.cells
    assert "66.67%" in page.cells  # the overlap of the second site, as compare prints it


def test_the_page_needs_nothing_else(report: tuple[str, str]) -> None:
    root, html = report
    page = Page(html)
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert not re.search(r"https?:|//cdn|@import|url\(|<script|<link|<iframe", html)
    assert "default-src 'none'; img-src data:" in html
    assert root not in html  # the name of the folder is escaped
    assert root.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in html


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome on PATH (Debian: apt-get install chromium)")
def test_chromium_shows_every_picture_of_a_model_with_200_experts(tmp_path: Path) -> None:
    root = write(tmp_path / "wide", WIDE, *(wide_traces(step, version=step) for step in range(3)))
    assert main(["report", root, "--out", str(tmp_path / "report.html")]) == 0
    shot = screenshot(tmp_path / "report.html", tmp_path)
    html = (tmp_path / "report.html").read_text()
    measured = tmp_path / "measured.html"  # the same page with a script that notes what the browser made of each image
    measured.write_text(re.sub(r"<meta http-equiv=.*?>", "", html).replace("</body>", f"{MEASURE}</body>"))
    images = Page(chromium(tmp_path, "--dump-dom", str(measured))).images
    assert [image["alt"] for image in images] == [
        *("Expert load", "Load entropy over steps", "Reuse between neighbouring tokens"),
        "Load moved between weight versions",
    ]
    for image in images:
        sent = pixels(image)
        height, width, _ = sent.shape
        assert image["data-natural"] == f"{width},{height}"
        x, y, shown_width, shown_height = (round(float(n)) for n in str(image["data-box"]).split(","))
        assert 1100 < shown_width < 1240
        shown = shot[y : y + shown_height, x : x + shown_width].astype(float)
        small = np.asarray(Image.fromarray(sent).resize((shown_width, shown_height))).astype(float)
        assert shown.std() > 20
        assert np.corrcoef(shown.ravel(), small.ravel())[0, 1] > 0.9  # the browser scales in its own way


def chromium(home: Path, *arguments: str) -> str:
    base = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *NO_NETWORK]
    profile = f"--user-data-dir={home / 'profile'}"
    done = subprocess.run([*base, profile, "--window-size=1280,5000", *arguments], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def screenshot(page: Path, folder: Path) -> np.ndarray:
    chromium(folder, f"--screenshot={folder / 'shot.png'}", str(page))
    return np.asarray(Image.open(folder / "shot.png").convert("RGB"))
