"""A real JupyterLab in a real browser: what a reader does there and what the page shows her, as methods of `Sheet`.

Whatever waits here waits for something that the page shows, and says what it waited for when that does not come.
Pictures and the server's log are kept under artefacts/ (or MOEKIT_ARTEFACTS).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import nbformat
import pytest

from moekit.launch.job import attach

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Request, WebSocket

HERE = Path(__file__).resolve().parent
NOTEBOOKS = HERE.parent.parent / "notebooks"
ARTEFACTS = Path(os.environ.get("MOEKIT_ARTEFACTS") or HERE / "artefacts")
INSTALL = "the browser tests drive Debian's Chromium: apt-get install chromium (or name one in MOEKIT_CHROMIUM)"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
WIDE, HIGH = 1280, 900
PATIENCE_S = 120.0

# name, x and y of every line in the plots below an element, as plotly itself has them
LINES = """cell => [...cell.querySelectorAll('.js-plotly-plot')].flatMap(plot => plot._fullData ?? [])
  .filter(line => line.x && line.y).map(line => [line.name, Array.from(line.x), Array.from(line.y)])"""
# how long the page was deaf: the largest gap between two beats of a clock that ticks every 50 ms
BEAT = """() => {
  let last = performance.now(); window.deaf = 0;
  clearInterval(window.beat);
  window.beat = setInterval(() => { const now = performance.now(); window.deaf = Math.max(window.deaf, now - last);
                                    last = now; }, 50);
}"""


def chromium() -> str:
    """The browser's path; its absence is a failure, so that a run without a browser is not taken for one with."""
    path = os.environ.get("MOEKIT_CHROMIUM") or shutil.which("chromium")
    assert path and Path(path).exists(), INSTALL
    return path


def until(
    condition: Callable[[], Any], what: str, patience: float = PATIENCE_S, sleep: Callable[[float], None] = time.sleep
) -> Any:
    """Waits until `condition` returns something true, and returns that."""
    end = time.monotonic() + patience
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {patience:.0f} s for {what}"
        sleep(0.1)
    return value


@dataclass(frozen=True)
class Lab:
    """A JupyterLab server of its own: its address, its token, the folder that it shows and where its log is."""

    url: str
    token: str
    root: Path
    log: Path

    def write(self, name: str, *cells: str) -> str:
        """Puts a notebook of code cells there; without `kernelspec`, JupyterLab would stop and ask for a kernel."""
        spec = {"display_name": "Python 3", "language": "python", "name": "python3"}
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
        made.metadata.kernelspec = spec
        nbformat.write(made, self.root / name)
        return name


@contextmanager
def server(home: Path, log: Path) -> Iterator[Lab]:
    """JupyterLab on a free port, with every folder that it reads or writes below `home`; its kernels end with it."""
    root = home / "root"
    named = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
             "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR")  # fmt: skip
    folders = {name: home / name.lower() for name in named}
    for folder in (root, *folders.values(), folders["JUPYTER_CONFIG_DIR"] / "labconfig"):
        folder.mkdir(parents=True)
    quiet = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}  # it asks the network
    (folders["JUPYTER_CONFIG_DIR"] / "labconfig" / "page_config.json").write_text(json.dumps(quiet))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lab = Lab(f"http://127.0.0.1:{port}", secrets.token_hex(16), root, log)
    settings = {"ip": "127.0.0.1", "port": port, "port_retries": 0, "root_dir": root, "open_browser": False,
                "allow_root": True}  # fmt: skip
    command = [sys.executable, "-m", "jupyterlab", *(f"--ServerApp.{k}={v}" for k, v in settings.items())]
    command += [f"--IdentityProvider.token={lab.token}", "--LabApp.extension_manager=readonly"]
    env = os.environ | {name: str(folder) for name, folder in folders.items()}
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, cwd=root, stdout=out, stderr=subprocess.STDOUT)
    try:
        until(lambda: _answers(lab, process), f"JupyterLab to answer; its log is {log}")
        yield lab
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _answers(lab: Lab, process: subprocess.Popen) -> bool:
    assert process.poll() is None, f"JupyterLab ended with {process.returncode}: {lab.log.read_text()[-2000:]}"
    with (
        suppress(urllib.error.URLError, OSError),
        urllib.request.urlopen(f"{lab.url}/api/status?token={lab.token}") as ok,
    ):
        return ok.status == 200
    return False


class Frame(NamedTuple):
    """What came to the page over the kernel's socket: when, how many bytes, the message's type."""

    at: float
    size: int
    kind: str


class Sheet:
    """A notebook that is open in the page."""

    def __init__(self, page: Page, lab: Lab, name: str, label: str):
        self.page, self.lab, self.name, self.label = page, lab, name, label
        self.foreign: list[str] = []  # what the page asked of other hosts
        self.complaints: list[str] = []  # errors of scripts, and of widgets that could not follow their kernel
        self.frames: list[Frame] = []
        self._shots = 0
        page.set_default_timeout(1000 * PATIENCE_S)
        page.on("request", self._asked)
        page.on("websocket", self._connected)
        page.on("pageerror", lambda error: self._complained(str(error)))
        page.on("console", lambda told: "Error setting state" in told.text and self._complained(told.text))
        page.goto(f"{lab.url}/lab/workspaces/{label}/tree/{name}?token={lab.token}")
        self.panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        self.panel.locator(".jp-Cell").first.wait_for()
        self.wait_idle()

    def _complained(self, text: str) -> None:
        if "Failed to initialize model" not in text:  # of widgets whose kernel was just restarted
            self.complaints.append(text)

    def _asked(self, request: Request) -> None:
        if not request.url.startswith((self.lab.url, "data:", "blob:")):
            self.foreign.append(request.url)

    def _connected(self, socket: WebSocket) -> None:
        if "/channels" in socket.url:
            socket.on("framereceived", self._received)

    def _received(self, payload: str | bytes) -> None:
        data = payload.encode() if isinstance(payload, str) else payload
        kind = re.search(rb'"msg_type": ?"(\w+)"', data[:4000])
        self.frames.append(Frame(time.monotonic(), len(data), kind[1].decode() if kind else ""))

    # what the reader does

    def cell(self, number: int) -> Locator:
        """Code cell `number`, from 0."""
        return self.panel.locator(".jp-CodeCell").nth(number)

    def run(self, number: int, wait: bool = True) -> None:
        """Runs a code cell by Shift+Enter."""
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")
        if wait:
            self.wait_cell(number)

    def menu(self, bar: str, command: str) -> None:
        """Chooses an entry of the menu bar."""
        self.page.locator(".lm-MenuBar-item", has_text=bar).first.click()
        self.page.locator(f".lm-Menu-item[data-command='{command}']").click()

    def run_all(self) -> None:
        """Run > Run All Cells."""
        self.menu("Run", "runmenu:run-all")

    def restart(self) -> None:
        """Kernel > Restart Kernel, and yes."""
        self.menu("Kernel", "kernelmenu:restart")
        self.page.locator(".jp-Dialog button.jp-mod-warn").click()
        self.page.locator(".jp-Dialog").wait_for(state="detached")
        self.sleep(0.5)  # before the new kernel says that it is there, the old one's word stands
        self.wait_idle()

    def sleep(self, seconds: float) -> None:
        """Lets the page go on; what it sends arrives meanwhile."""
        self.page.wait_for_timeout(1000 * seconds)

    # what the reader sees

    def until(self, condition: Callable[[], Any], what: str, patience: float = PATIENCE_S) -> Any:
        """Waits until `condition` returns something true, and returns that."""
        return until(condition, f"{what} ({self.name})", patience, self.sleep)

    def look_at(self, number: int) -> None:
        """Brings a code cell into the middle of the window; cells above it that are drawn only then move it again."""
        self.cell(number).evaluate("cell => cell.scrollIntoView({block: 'center'})")

    def wait_idle(self) -> None:
        """Until the notebook is drawn and its kernel waits."""
        self.panel.locator(".jp-Spinner").wait_for(state="hidden")
        self.panel.locator(".jp-Toolbar-kernelName", has_text="Python 3").wait_for()
        self.panel.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").wait_for()

    def has_run(self, number: int) -> bool:
        """Whether a cell's prompt is [3]: and neither [*]: nor [ ]:."""
        prompt = self.cell(number).locator(".jp-InputPrompt").text_content()  # the text, also out of sight
        return re.search(r"\[\d+\]", prompt or "") is not None

    def wait_cell(self, number: int, patience: float = PATIENCE_S) -> None:
        """Until a cell has run, and without an error."""
        self.until(lambda: self.has_run(number), f"cell {number}", patience)
        assert not self.error(number), self.error(number)

    def output(self, number: int) -> str:
        """The text of a code cell's output."""
        return "\n".join(self.cell(number).locator(".jp-OutputArea-output").all_text_contents())

    def error(self, number: int | None = None) -> str:
        """The first traceback, of a code cell or of the notebook; empty if there is none."""
        where = self.panel if number is None else self.cell(number)
        found = where.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']")
        return next((text for text in found.all_text_contents() if "Traceback" in text), "")

    def lines(self, number: int) -> dict[str, tuple[list[float], list[float]]]:
        """x and y of the lines by name in the plots of a code cell's output, as plotly in the page has them."""
        return {name: (x, y) for name, x, y in self.cell(number).evaluate(LINES)}

    def listen(self) -> None:
        """Starts to measure how long the page is deaf at most."""
        self.page.evaluate(BEAT)

    def deaf(self) -> float:
        """Seconds that the page did not react for, at most, since `listen`."""
        return self.page.evaluate("() => window.deaf") / 1000

    def shot(self, what: str) -> None:
        """Keeps a picture of the page."""
        self._shots += 1
        self.page.screenshot(path=ARTEFACTS / f"{self.label}-{self._shots}-{what}.png")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab, at a copy of the notebooks."""
    chromium()
    shutil.rmtree(ARTEFACTS, ignore_errors=True)
    ARTEFACTS.mkdir(parents=True)
    with server(tmp_path_factory.mktemp("lab"), ARTEFACTS / "jupyterlab.log") as made:
        for path in NOTEBOOKS.glob("*.ipynb"):
            shutil.copy(path, made.root)
        shutil.copytree(NOTEBOOKS / "pictures", made.root / "pictures")
        yield made
    for path in (made.root / "runs").glob("*/state.json"):
        attach(path.parent).stop()  # of a test that failed: a detached job would go on for ever


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        yield made
        made.close()


@pytest.fixture
def opened(lab: Lab, browser: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Sheet]]:
    """Opens a notebook of the server's folder; how the page looks at the end of the test is kept, whatever happened."""
    context = browser.new_context(viewport={"width": WIDE, "height": HIGH})
    sheets: list[Sheet] = []

    def open_sheet(name: str) -> Sheet:
        sheets.append(Sheet(context.new_page(), lab, name, request.node.name.removeprefix("test_")))
        return sheets[-1]

    yield open_sheet
    for sheet in sheets:
        sheet.shot("end")
    context.close()
    assert not [url for sheet in sheets for url in sheet.foreign], "the page asked other hosts"
    assert not [text for sheet in sheets for text in sheet.complaints], "the page's console has errors"
