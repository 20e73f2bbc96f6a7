"""The page in a real browser at 1280 pixels: nothing sticks out, nothing overlaps, and it can be read, dark too."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from PIL import Image

from cluster.offline.bench.record import RunLine, write
from cluster.offline.report.page import render
from cluster.offline.report.reading import read
from tests.report.recorded_runs import POLICIES, lines

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
pytestmark = pytest.mark.skipif(not BROWSER, reason="no browser is installed (Debian: apt-get install chromium)")

WIDTH, HEIGHT = 1280, 3600
SMALLEST_PX = 10.0
CONTRAST = 4.5
"""Of words to what is behind them, as the Web Content Accessibility Guidelines ask (AA)."""

MEASURE = """
<script>
addEventListener("load", () => {
  const box = e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const texts = [...document.querySelectorAll("svg")].map(svg => ({
    svg: box(svg), texts: [...svg.querySelectorAll("text")].map(t => ({kind: t.getAttribute("class"), at: box(t),
      text: t.textContent, px: parseFloat(getComputedStyle(t).fontSize)}))}));
  const seen = {wide: document.documentElement.scrollWidth, plots: texts, ink: getComputedStyle(document.body).color,
    soft: getComputedStyle(document.querySelector("p")).color, page: getComputedStyle(document.body).backgroundColor};
  const told = document.createElement("pre"); told.id = "measured"; told.textContent = JSON.stringify(seen);
  document.body.append(told);
});
</script>
"""


def browse(tmp_path: Path, page: Path, *arguments: str) -> str:
    """What the browser prints."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={tmp_path / 'browser'}", f"--window-size={WIDTH},{HEIGHT}", *arguments, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def measured(tmp_path: Path, record: Path, *arguments: str) -> dict[str, Any]:
    """Of a copy of the page that may run the script above."""
    page = re.sub(r"<meta http-equiv=.*?>", "", render(read([record]))).replace("</body>", MEASURE + "</body>")
    path = tmp_path / "measured.html"
    path.write_text(page)
    told = re.search(r'<pre id="measured">(.*?)</pre>', browse(tmp_path, path, "--dump-dom", *arguments), re.DOTALL)
    assert told is not None
    found: dict[str, Any] = json.loads(unescape(told[1]))
    return found


def contrast(one: str, other: str) -> float:
    """Of two CSS colours (`rgb(1, 2, 3)`), 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("loads", "window_s"), [(1, (0.0, 60.0)), (2, (0.0, 60.0)), (1, (3.0, 8.0))])
def test_all_words_of_the_plots_can_be_read(tmp_path: Path, loads: int, window_s: tuple[float, float]) -> None:
    """However many policies, and however close the bounds of what was measured."""
    record = tmp_path / "run.jsonl"
    kept = (line for line in lines() if line.run < loads * len(POLICIES))
    write((replace(line, window_s=window_s) if isinstance(line, RunLine) else line for line in kept), record)
    seen = measured(tmp_path, record)
    assert seen["wide"] <= WIDTH
    assert len(seen["plots"]) == 9
    for plot in seen["plots"]:
        left, top, right, bottom = plot["svg"]
        assert plot["texts"]
        for text in plot["texts"]:
            assert text["px"] >= SMALLEST_PX, text
            at = text["at"]
            assert left - 1 <= at[0] and at[2] <= right + 1 and top - 1 <= at[1] and at[3] <= bottom + 1, text
        ticks = [text for text in plot["texts"] if text["kind"] in ("tick", "label", "row", "note", "value")]
        for number, one in enumerate(ticks):
            for other in ticks[number + 1 :]:
                a, b = one["at"], other["at"]
                # Lines of text may touch, words may not: 3 of their 14 pixels are above and below the letters.
                apart = a[2] <= b[0] or b[2] <= a[0] or a[3] - 3 <= b[1] or b[3] - 3 <= a[1]
                assert apart, (one, other)


@pytest.mark.parametrize("arguments", [(), ("--force-dark-mode",)], ids=["light", "dark"])
def test_words_stand_out_from_the_page(tmp_path: Path, record: Path, arguments: tuple[str, ...]) -> None:
    seen = measured(tmp_path, record, *arguments)
    dark = contrast(seen["page"], "rgb(0, 0, 0)") < contrast(seen["page"], "rgb(255, 255, 255)")
    assert dark == bool(arguments)
    assert contrast(seen["ink"], seen["page"]) >= 7
    assert contrast(seen["soft"], seen["page"]) >= CONTRAST


def test_a_screenshot_shows_every_policy_and_kind(tmp_path: Path, record: Path) -> None:
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(render(read([record])))
    browse(tmp_path, page, f"--screenshot={picture}")
    with Image.open(picture) as image:
        assert image.size == (WIDTH, HEIGHT)
        counted = {colour: count for count, colour in image.convert("RGB").getcolors(1 << 24) or ()}
        margin = image.convert("RGB").crop((WIDTH - 30, 0, WIDTH, HEIGHT)).getcolors()
    colours = dict(re.findall(r"--([\w]+): #(\w{6})", page.read_text().split("@media")[0]))
    for name in ("s0", "s1", "running", "held", "cached", "empty", "waiting", "released", "good", "bad"):
        wanted = tuple(bytes.fromhex(colours[name]))
        assert counted.get(wanted, 0) > 20, name
    assert margin is not None and len(margin) == 1
