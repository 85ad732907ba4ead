"""The page as a reader sees it: on a phone and on a desk, by day and by night."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmark.page_cases import CASES, failed, shown

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install 'lightning-perf[dev]'"
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)

WIDTHS = (360, 1280)
SCHEMES = ("light", "dark")

# Text must have this contrast to its ground (WCAG 2, level AA).
LOOK = """
() => {
  const problems = [];
  for (const details of document.querySelectorAll("details")) details.open = true;
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) problems.push(`the page is ${wide} pixels wide`);
  for (const element of document.body.querySelectorAll("*:not(svg *)")) {
    const box = element.getBoundingClientRect();
    const name = element.tagName + " " + (element.textContent || "").trim().slice(0, 30);
    if (box.right > innerWidth + 1 || box.left < -1) problems.push(`outside: ${name}`);
  }
  for (const picture of document.querySelectorAll("figure svg")) {
    const box = picture.getBoundingClientRect();
    if (box.width < 250 || box.height < 100) problems.push("a picture is too small to see");
  }
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = channels(color).map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (channels(color)[3] !== 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let texts = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || ["STYLE", "style"].includes(element.tagName)) continue;
    texts += 1;
    const style = getComputedStyle(element);
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || style.visibility !== "visible")
      problems.push(`invisible: ${text}`);
    const drawn = element.closest("svg");
    const color = drawn ? style.fill : style.color;
    const [high, low] = [light(color), light(ground(drawn || element))].sort((x, y) => y - x);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5) problems.push(`contrast ${contrast.toFixed(1)}: ${text.slice(0, 30)}`);
    if (parseFloat(style.fontSize) * (drawn ? scale(drawn) : 1) < 9)
      problems.push(`letters too small: ${text.slice(0, 30)}`);
  }
  function scale(svg) { return svg.getBoundingClientRect().width / svg.viewBox.baseVal.width; }
  if (texts < 10) problems.push("hardly any text");
  return problems;
}
"""


@pytest.fixture
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def problems(browser: Any, page: Path) -> list[str]:
    """Return what readers would complain about."""
    found: list[str] = []
    window = browser.new_page()
    window.on("console", lambda message: found.append(f"console: {message.text}"))
    window.on("pageerror", lambda error: found.append(f"error: {error}"))
    window.on("request", lambda request: found.append(f"request: {request.url}"))
    window.goto(page.as_uri())
    assert found.pop(0) == f"request: {page.as_uri()}"
    for width in WIDTHS:
        window.set_viewport_size({"width": width, "height": 800})
        for scheme in SCHEMES:
            window.emulate_media(color_scheme=scheme)
            ground = window.evaluate("getComputedStyle(document.body).backgroundColor")
            dark = ground != "rgb(255, 255, 255)"
            seen = [] if dark == (scheme == "dark") else ["it does not follow the theme"]
            seen += window.evaluate(LOOK)
            found += [f"{width} {scheme}: {problem}" for problem in seen]
    window.close()
    return found


@pytest.mark.slow
def test_every_page_is_readable_everywhere(browser: Any, tmp_path: Path) -> None:
    complaints = {}
    page = tmp_path / "report.html"
    for case in (*CASES, "failed"):
        page.write_text(failed() if case == "failed" else shown(CASES[case]), encoding="utf-8")
        if found := problems(browser, page):
            complaints[case] = found
    assert not complaints


BAD = """<!DOCTYPE html><html><head><title>x</title></head>
<body style="color: #aaa; background: white; margin: 0">
<div style="width: 500px">wide</div><figure><svg width="10" height="10"></svg></figure>
<img src="https://example.invalid/x.png"><script>missing()</script></body></html>"""


@pytest.mark.slow
def test_the_look_sees_what_is_wrong(browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(BAD, encoding="utf-8")
    found = " ".join(problems(browser, page))
    for expected in (
        "request: https://example.invalid",
        "error: missing is not defined",
        "console: ",
        "dark: it does not follow the theme",
        "360 light: the page is 500 pixels wide",
        "outside: DIV wide",
        "a picture is too small",
        "contrast 2.3: wide",
        "hardly any text",
    ):
        assert expected in found
