"""What evaluate and bench find of a pair becomes a page that a browser shows without complaint."""

import json
import os
import select
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from decode.bench import bench
from decode.config import BenchConfig, EvaluateConfig, ReportConfig
from decode.evaluate import evaluate
from decode.pair import Pair
from decode.params import SamplingParams
from decode.report import report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason="no browser: chromium, chromium-browser, google-chrome or chrome on PATH"),
]
NUM_PLOTS = 6


@pytest.fixture(scope="module")
def results(tiny_model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with acceptance.json, of two settings, and speed.json, of one."""
    folder = tmp_path_factory.mktemp("results")
    pair, target = folder / "pair", tiny_model_folder(seed=0)
    shutil.copytree(tiny_model_folder(seed=1, num_layers=1), pair / "draft")
    Pair(target={"id": str(target)}, num_draft_tokens=2).save(pair)
    rows = [{"prompt": f"<script>alert({n})</script>", "category": "ab"[n % 2]} for n in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate(
        EvaluateConfig(
            pair=str(pair),
            prompts=str(folder / "prompts.jsonl"),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=90, min_p=0.1, seed=0),
            more_sampling=[{"temperature": 0}],
            output=str(folder / "acceptance.json"),
        )
    )
    bench(
        BenchConfig(
            pair=str(pair),
            prompts=str(folder / "prompts.jsonl"),
            num_prompts=5,
            temperatures=[1.0],
            max_new_tokens=12,
            output=str(folder / "speed.json"),
        )
    )
    return folder


@pytest.fixture(scope="module")
def page(results: Path) -> Path:
    """Of those, beside what the pair itself keeps."""
    found, speed, output = (str(results / name) for name in ("acceptance.json", "speed.json", "page.html"))
    report(ReportConfig(result=found, compare=[str(results / "pair")], bench=speed, output=output))
    return Path(output)


class Browser:
    """Headless Chromium, spoken to in the DevTools protocol: JSON, each message ended by a zero, through two pipes.

    Attributes:
        complaints: errors and warnings of the page's console, and what it asked the network for.
    """

    def __init__(self, profile: Path) -> None:
        assert BROWSER
        theirs, self.writing = os.pipe()
        self.reading, others = os.pipe()
        quiet = "--no-first-run --disable-background-networking --disable-component-update --disable-sync"
        options = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe {quiet} --user-data-dir={profile}"
        # the browser reads from 3 and writes to 4
        command = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{others}', "bash", BROWSER, *options.split(), "about:blank"]
        self.process = subprocess.Popen(command, pass_fds=(theirs, others), stderr=subprocess.DEVNULL)
        os.close(theirs)
        os.close(others)
        self.received, self.number, self.session = b"", 0, None
        self.complaints: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.reading)
        os.close(self.writing)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.writing, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.number:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path) -> None:
        self.complaints, self.loaded = [], False
        self.call("Page.navigate", url=path.as_uri())
        while not self.loaded:
            self._next()

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def settle(self) -> None:
        """Wait until what happened is on the screen, where the mouse and fingers meet it."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def show(self, width: int, scheme: str) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=width < 500)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.received:
            assert select.select([self.reading], [], [], 120)[0], "the browser says nothing"
            arrived = os.read(self.reading, 1 << 20)
            assert arrived, "the browser is gone"
            self.received += arrived
        line, _, self.received = self.received.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        method, told = message.get("method"), message.get("params", {})
        self.loaded |= method == "Page.loadEventFired"
        if method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.complaints.append(json.dumps(told))
        if method == "Network.requestWillBeSent" and not told["request"]["url"].startswith(("file:", "data:")):
            self.complaints.append(told["request"]["url"])
        return message


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def test_a_browser_has_no_complaint(page: Path, browser: Browser, tmp_path: Path) -> None:
    browser.open(page)
    assert "acceptance, T=1, min-p 0.1; acceptance, greedy; " in browser.evaluate("document.title")
    assert browser.complaints == []
    spoilt = tmp_path / "spoilt.html"  # the control
    spoilt.write_text(page.read_text().replace("<h1>", '<script>alert()</script><img src="http://127.0.0.1:9/x"><h1>'))
    browser.open(spoilt)
    assert len(browser.complaints) >= 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 380])
def test_all_is_drawn_and_readable(page: Path, browser: Browser, width: int, scheme: str) -> None:
    browser.open(page)
    browser.show(width, scheme)
    browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    sizes = browser.evaluate(
        "[...document.querySelectorAll('figure svg')].map(each => each.getBoundingClientRect())"
        ".map(each => [each.width, each.height])"
    )
    assert len(sizes) == NUM_PLOTS
    assert all(300 < wide < 600 and tall > 80 for wide, tall in sizes)
    # letters in plots, as large as on the screen
    assert (
        browser.evaluate(
            "Math.min(...[...document.querySelectorAll('svg text')].map(each => each.getBoundingClientRect().height))"
        )
        > 8
    )
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    contrasts = browser.evaluate(CONTRASTS)
    assert len(contrasts) > 200
    assert [each for each in contrasts if each[0] < 4.5] == []
    # the controls: grey ink, and tables that do not keep to their boxes
    browser.evaluate("document.documentElement.style.setProperty('--ink', '#808080')")
    assert min(browser.evaluate(CONTRASTS))[0] < 4.5
    browser.evaluate("document.querySelectorAll('.scroll').forEach(each => each.style.overflow = 'visible')")
    assert (browser.evaluate("document.documentElement.scrollWidth") > width) == (width < 500)


# of all that has text of its own: its contrast with what is behind it by WCAG, and the text
CONTRASTS = """(() => {
  const numbers = colour => {
    const found = colour.match(/[\\d.e-]+/g).map(Number)
    const unit = colour.startsWith('color(') ? 1 : 255
    return [...found.slice(0, 3).map(each => each / unit), found[3] ?? 1]
  }
  const over = (top, below) => [0, 1, 2].map(n => top[n] * top[3] + below[n] * (1 - top[3])).concat(1)
  const behind = element =>
    element ? over(numbers(getComputedStyle(element).backgroundColor), behind(element.parentElement)) : [1, 1, 1, 1]
  const luminance = colour => {
    const [r, g, b] = colour.map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b)
    return (high + 0.05) / (low + 0.05)
  }
  const bars = [...document.querySelectorAll('[id^=time-time-bar] path, [id^=time-bar] path')]
  return [...document.querySelectorAll('body *')]
    .filter(each => [...each.childNodes].some(node => node.nodeType == 3 && node.data.trim()))
    .flatMap(each => {
      const style = getComputedStyle(each)
      const isInBar = each.tagName == 'text' && style.fill == getComputedStyle(document.body).backgroundColor
      const grounds = isInBar ? bars.map(bar => numbers(getComputedStyle(bar).fill)) : [behind(each)]
      const ink = numbers(each.tagName == 'text' ? style.fill : style.color)
      return grounds.map(ground => [contrast(over(ink, ground), ground), each.textContent.trim().slice(0, 30)])
    })
})()"""


@pytest.mark.parametrize("width", [1280, 380])
def test_a_token_tells_p_and_q_when_pointed_at_or_gone_to(
    page: Path, results: Path, browser: Browser, width: int
) -> None:
    sample = json.loads((results / "acceptance.json").read_text())["samples"][0]
    told = [f"p {p:.3f}, q {q:.3f}" for p, q in zip(sample["p"], sample["q"], strict=True)]
    assert told[0] != told[1]
    browser.open(page)
    browser.show(width, "light")

    def tip(number: int) -> str:
        text = f"getComputedStyle(document.querySelectorAll('[role=note]')[{number}], '::after').content"
        return str(browser.evaluate(text)).strip('"')

    token = "document.querySelector('[role=note]')"
    browser.evaluate(f"{token}.scrollIntoView({{block: 'center'}})")
    browser.settle()
    left, top = browser.evaluate(f"(r => [r.left + 2, r.top + 8])({token}.getBoundingClientRect())")
    for x, y, expected in ((1, 1, "none"), (left, top, told[0]), (1, 1, "none")):
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        browser.settle()
        assert tip(0).endswith(expected)
    if width < 500:
        browser.evaluate("window.tapped = new Promise(done => addEventListener('focusin', () => done(true))); 0")
        for kind, fingers in (("touchStart", [{"x": left, "y": top}]), ("touchEnd", [])):
            browser.call("Input.dispatchTouchEvent", type=kind, touchPoints=fingers)
        assert browser.evaluate("tapped")
    else:
        browser.evaluate(f"{token}.focus()")
    assert tip(0).endswith(told[0])
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    browser.settle()
    assert tip(0) == "none"
    assert tip(1).endswith(told[1])
    # what is told of any token, also at the end of a line, stays on the screen
    widest = browser.evaluate(
        "Math.max(...[...document.querySelectorAll('[role=note]')]"
        ".map(each => { each.focus(); return document.documentElement.scrollWidth }))"
    )
    assert widest <= width
