#!/usr/bin/env python3
"""Look at the built site in Chromium, at the width of a desktop and of a telephone: scripts/docs look SITE [OUT].

A page fails if it scrolls sideways, if one of its requests or scripts fails, or if a picture is missing, empty, or not
the same as the picture alone. The home page fails if a browser fetches more than 300 KB for it, compressed. ``OUT``
gets the screenshots. It needs Chromium (``apt-get install chromium``) and the extra ``look``.
"""

from __future__ import annotations

import functools
import gzip
import io
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from PIL import Image, ImageChops, ImageStat
from playwright.sync_api import Browser, Page, Response, sync_playwright

_WIDTHS = {"desktop": 1280, "telephone": 390}
_HOME_BYTES = 300_000
_OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because faults are printed anyway."""


def main(site: Path, out: Path | None) -> int:
    """Print the faults of all pages. Return 1 if there are any, otherwise 0."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pages = sorted(page.parent.relative_to(site) for page in site.rglob("index.html"))
    if not pages:
        print(f"{site} has no page: scripts/docs builds it")
        return 1
    url = f"http://127.0.0.1:{server.server_port}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=_OPTIONS)
        faults = [
            f"{page} ({name}): {fault}"
            for name, width in _WIDTHS.items()
            for page in pages
            for fault in _faults(browser, f"{url}/{page}/", width, out and out / f"{'-'.join(page.parts)}-{name}.png")
        ]
        browser.close()
    server.shutdown()
    print("\n".join(faults) or f"{len(pages)} pages, {len(_WIDTHS)} widths: no fault")
    return 1 if faults else 0


def _faults(browser: Browser, url: str, width: int, shot: Path | None) -> Iterator[str]:
    """Yield the faults of one page."""
    page = browser.new_page(viewport={"width": width, "height": 800})
    answers: list[Response] = []
    errors: list[str] = []
    page.on("response", lambda answer: answers.append(answer))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda request: errors.append(f"{request.url} was not answered"))
    page.goto(url, wait_until="networkidle" if url.endswith("/./") else "load")
    yield from (f"{answer.url} was answered by {answer.status}" for answer in answers if answer.status >= 400)
    if (wide := page.evaluate("document.documentElement.scrollWidth")) > width:
        yield f"it is {wide} units wide, and scrolls sideways"
    if url.endswith("/./"):
        fetched = sum(len(gzip.compress(answer.body())) for answer in answers if answer.ok)
        if fetched > _HOME_BYTES:
            yield f"a browser fetches {fetched} bytes for it"
    if shot is not None:
        shot.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=shot, full_page=True)
    yield from _faults_of_pictures(browser, page)
    yield from errors
    page.close()


def _faults_of_pictures(browser: Browser, page: Page) -> Iterator[str]:
    for picture in page.locator("article img").all():
        source = picture.evaluate("each => each.src")
        picture.scroll_into_view_if_needed()
        box = picture.bounding_box()
        if box is None or box["width"] < 200 or box["height"] < 50:
            yield f"{source} is shown as {box}"
            continue
        shown = Image.open(io.BytesIO(picture.screenshot())).convert("RGB")
        if len(shown.getcolors(maxcolors=1 << 24) or ()) < 8:
            yield f"{source} is empty"
        if not source.endswith(".svg"):
            continue  # a figure of the benchmarks
        alone = browser.new_page(viewport={"width": shown.width + 20, "height": shown.height + 20})
        alone.set_content(f'<img src="{source}" style="width: {box["width"]}px; height: {box["height"]}px">')
        one = alone.locator("img")
        one.evaluate("each => each.decode()")
        expected = Image.open(io.BytesIO(one.screenshot())).convert("RGB")
        alone.close()
        size = shown.width // 4, shown.height // 4  # so that half a pixel of another place makes no difference
        one_small, other_small = (each.resize(size, Image.Resampling.BOX) for each in (shown, expected))
        difference = sum(ImageStat.Stat(ImageChops.difference(one_small, other_small)).mean) / 3
        if difference > 6:  # of 255
            yield f"{source} differs from the picture alone by {difference:.1f}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
