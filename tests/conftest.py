"""Settings for every test, made before transformers is imported: no network, one thread, empty caches."""

import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

_CACHE = tempfile.TemporaryDirectory(prefix="cache-")  # one for each test process; removed at exit

# Worker processes find the shared helpers where pytest does (`pythonpath` in setup.cfg).
FOLDERS = ("", "adapters", "oracles", "generation", "training", "../examples/wedlm-nano")
PYTHONPATH = [str(Path(__file__).parent / name) for name in FOLDERS] + [os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, PYTHONPATH))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_MODULES_CACHE"] = os.environ["XDG_CACHE_HOME"] = _CACHE.name  # the user's own stays as it is
os.environ.setdefault("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))  # a list of fonts takes seconds
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` leaves the slow tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, as the longest, then those with many tests: where processes share the files,
    none is left with a long one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -counts[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported stays: while it comes, the search for garbage among it would take a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Every run of a trainer collects garbage: not among all that was imported, which takes longer than the run."""
    gc.freeze()
    torch = sys.modules.get("torch")
    if torch and not torch.accelerator.is_available():  # else each seed is kept, with the stack as text, for later
        for kind in (torch.cuda, torch.xpu, torch.mtia):
            kind.manual_seed_all = lambda seed: None


settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = [f"--disable-{name}" for name in ("gpu", "quic", "background-networking", "component-update", "sync")]


@pytest.fixture(scope="session")
def browser():
    """Chromium or Chrome, run by playwright. Without them, tests that need one are skipped, unless WEDLM_BROWSER_TESTS
    is `required`, as CI sets it."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing = "the Python package playwright: pip install playwright"
    else:
        missing = None if BROWSER else "a browser: apt-get install chromium, or install Google Chrome"
    if missing:
        message = f"Shown pages are tested in a browser, which needs {missing}."
        if os.environ.get("WEDLM_BROWSER_TESTS") == "required":
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-first-run", *QUIET])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Opens an address in the browser; at the end, nothing has been complained of, and nothing was asked of another
    place."""
    complaints, elsewhere, contexts = [], [], []

    def open_page(address, **options):
        context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        # A refused request is no complaint: the page says what was wrong with it.
        refused = "Failed to load resource"
        page.on("console", lambda told: complaints.append(told.text) if refused not in told.text else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: elsewhere.append(asked.url) if not asked.url.startswith(places) else None)
        places = (address, "data:")
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert (complaints, elsewhere) == ([], [])


@pytest.fixture(scope="session")
def nano():
    """wedlm-nano and its tokenizer."""
    from wedlm_hf.checkpoints import NANO
    from wedlm_hf.checkpoints.loading import load_model, load_tokenizer

    return load_model(NANO), load_tokenizer(NANO)


@pytest.fixture(scope="module")
def model():
    """A tiny random model."""
    from tiny import tiny_model

    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer():
    """Its tokenizer."""
    from tiny import tiny_tokenizer

    return tiny_tokenizer()
