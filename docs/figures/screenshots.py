"""Makes the screenshots of docs/: the replay, the page of the server, and the race at the top of the README.

python docs/figures/screenshots.py [NAME ...]     # names of FIGURES; by default all

Needs Chromium or Chrome, and `pip install ".[serve]" playwright pillow`.
"""

import io
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from wedlm_hf.checkpoints import NANO
from wedlm_hf.cli.options import LoadingOptions
from wedlm_hf.eval.request import AnswerRequest
from wedlm_hf.eval.trace.page import page as trace_page
from wedlm_hf.eval.trace.record import record
from wedlm_hf.serving.server import build_app

FOLDER = Path(__file__).parent
# τ is far below the checkpoint's own, so that there is more to see than forwards that fill their whole window.
REPLAYS: dict[str, tuple[str, dict[str, Any], int]] = {
    "trace": (
        "Maria has 7 boxes with 47 stamps in each box. How many stamps does Maria have now?",
        {"window_size": 16, "entropy_threshold": 0.1, "distance_penalty": 0.02},
        13,
    ),
}


RACE = "Anna has 347 apples. Ben brings 85 more. Anna sells 218. How many apples does Anna have now?"
FRAMES = 60


def open_page(browser: Browser, address: str, width: int, height: int, scheme: Any) -> Page:
    """A page without motion, at one and a half times the pixels."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        device_scale_factor=1.5,
        color_scheme=scheme,
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(address)
    return page


def replay(browser: Browser, name: str, scheme: str) -> None:
    """A page of `wedlm generate --trace`, after some forwards."""
    prompt, options, forward = REPLAYS[name]
    model, tokenizer = LoadingOptions(threads=1).load(None)
    trace = record(model, tokenizer, AnswerRequest([prompt], {"strategy": "wedlm", **options}), model_name=NANO.name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.html")
        path.write_text(trace_page(trace), encoding="utf-8")
        page = open_page(browser, f"{path.as_uri()}#forward={forward}", 1280, 900, scheme)
        page.screenshot(path=FOLDER / f"{name}.png")


def race(browser: Browser, name: str) -> None:
    """Both decoders on one clock, as a moving picture."""
    model, tokenizer = LoadingOptions(threads=1).load(None)
    trace = record(model, tokenizer, AnswerRequest([RACE], {"strategy": "wedlm"}), model_name=NANO.name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.html")
        path.write_text(trace_page(trace), encoding="utf-8")
        page = open_page(browser, path.as_uri(), 1000, 620, "light")
        page.evaluate("document.querySelector('.controls').style.display = 'none'")
        shots = []
        for frame in range(FRAMES):
            page.evaluate(f"seek(duration() * {frame / (FRAMES - 1)})")
            shots.append(Image.open(io.BytesIO(page.locator("#panes").screenshot())))
        first, *rest = [shot.convert("RGB").resize((800, round(800 * shot.height / shot.width))) for shot in shots]
        palette = [first, *rest][FRAMES // 5].quantize(128)
        frames = [shot.quantize(palette=palette, dither=Image.Dither.NONE) for shot in (first, *rest)]
        pauses = [80] * (FRAMES - 1) + [2500]
        frames[0].save(
            FOLDER / f"{name}.gif", save_all=True, append_images=frames[1:], duration=pauses, loop=0, optimize=True
        )


def page(browser: Browser, name: str) -> None:
    """The page of `wedlm serve`, in the middle of a race."""
    model, tokenizer = LoadingOptions(threads=1).load(None)
    application = build_app(NANO.name, model, tokenizer, {"strategy": "wedlm"})
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        page = open_page(browser, f"http://127.0.0.1:{port}", 1280, 1160, "light")
        page.locator("#examples button", has_text="Anna has 347").click()
        page.locator(".acts button", has_text="Race").click()
        page.locator("#runs tr").first.wait_for()
        page.evaluate("pause(), seek(0), scrollTo(0, 0)")
        for _ in range(6):
            page.locator("#step").click()
        page.screenshot(path=FOLDER / f"{name}.png")
    finally:
        server.should_exit = True
        thread.join()


FIGURES: dict[str, Callable[[Browser], None]] = {
    "trace": lambda browser: replay(browser, "trace", "light"),
    "race": lambda browser: race(browser, "race"),
    "page": lambda browser: page(browser, "page"),
}


def main() -> None:
    """The command. Raises `SystemExit` for a name that is none."""
    names = sys.argv[1:] or list(FIGURES)
    if unknown := set(names) - FIGURES.keys():
        raise SystemExit(f"There is no figure {min(unknown)!r}: choose among {', '.join(FIGURES)}.")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--disable-gpu", "--no-sandbox"])
        for name in names:
            FIGURES[name](browser)
            print(name)
        browser.close()


if __name__ == "__main__":
    main()
