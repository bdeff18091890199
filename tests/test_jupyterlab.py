"""A notebook in JupyterLab itself: run all cells in a browser, see its pictures.

Needs the extra `browser` and Chromium. With DDTREE_SCREENSHOTS=folder the picture of
the screen is kept there.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from ddtree_numba.lab import notebooks

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
TOKEN = "course"
SETTINGS = {
    "apputils-extension/themes": {"theme": "JupyterLab Dark"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # All cells stay in the page, so that all of them can be looked at.
    "notebook-extension/tracker": {"windowingMode": "none"},
}

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the extra browser is not installed (playwright)"
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture
def server(tmp_path):
    """JupyterLab, headless, in a folder with notebook 02 without its outputs."""
    (path,) = notebooks.paths(["02"])
    notebook = notebooks.read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    folder = tmp_path / "course"
    folder.mkdir()
    (folder / path.name).write_text(notebooks.as_text(notebook), encoding="utf-8")
    settings = tmp_path / "settings"
    for name, values in SETTINGS.items():
        file = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root",
        "--ip=127.0.0.1", f"--port={port}", f"--IdentityProvider.token={TOKEN}",
        f"--ServerApp.root_dir={folder}",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "PYTHONPATH": os.pathsep.join(
            [str(notebooks.FOLDER.parent), os.environ.get("PYTHONPATH", "")]
        ),
    }
    log = (tmp_path / "server.log").open("w")
    with (
        log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            _wait_for(f"http://127.0.0.1:{port}/api/status?token={TOKEN}", process)
            yield f"http://127.0.0.1:{port}/lab/tree/{path.name}?token={TOKEN}"
        except TimeoutError:
            pytest.fail((tmp_path / "server.log").read_text()[-2000:])
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def _wait_for(url, process, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=2).close()
            return
        time.sleep(0.2)
    raise TimeoutError(url)


@pytest.fixture
def page(server):
    """A browser's page with the notebook, all of its cells run."""
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1300, "height": 1500})
        page.set_default_timeout(60_000)
        page.goto(server)
        page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        # The last cell prints nothing: its number says that it ran.
        numbers = page.locator(".jp-CodeCell .jp-InputPrompt")
        last = f"[{page.locator('.jp-CodeCell').count()}]:"
        playwright.expect(numbers.last).to_have_text(last, timeout=60_000)
        yield page
        browser.close()


def test_a_notebook_runs_in_jupyterlab_and_shows_its_pictures(page, tmp_path):
    outputs = page.locator(".jp-OutputArea-output")
    for kind in ("error", "stderr"):
        mime = f'[data-mime-type="application/vnd.jupyter.{kind}"]'
        assert page.locator(f".jp-OutputArea-output{mime}").count() == 0
    assert outputs.filter(has_text="0 of 6 cases pass. lab.hint(2)").count() == 1

    shown = page.locator(".jp-OutputArea-output img")
    sizes = shown.evaluate_all(
        "images => images.map(i => [i.naturalWidth, i.width, i.height])"
    )
    assert len(sizes) == 3
    for natural, width, height in sizes:
        assert natural > 400 and width > 400 and height > 200
    assert page.locator("body").get_attribute("data-jp-theme-light") == "false"

    # The film's controls work: a step changes the picture.
    film = page.locator(".animation img")
    assert "steps of best-first search" in film.get_attribute("alt")
    page.get_by_role("button", name="First frame").click()
    first = film.get_attribute("src")
    page.get_by_role("button", name="Next frame").click()
    assert film.get_attribute("src") != first

    film.scroll_into_view_if_needed()
    folder = Path(os.environ.get("DDTREE_SCREENSHOTS", tmp_path))
    page.screenshot(path=folder / "jupyterlab.png")
    assert (folder / "jupyterlab.png").stat().st_size > 20_000
