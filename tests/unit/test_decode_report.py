"""The report is one page: every plot with its points, every token with its p and q, and nothing from elsewhere."""

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from decode import cli, console, figures
from decode.config import ReportConfig
from decode.costs import Costs
from decode.figures import Evaluation, Sample
from decode.pair import Pair
from decode.params import SamplingParams
from decode.report import report
from decode.trace import Round, Seconds, Trace

PLOTS = ("betas", "lengths", "speedup", "categories", "costs", "time")
# what HTML, SVG and matplotlib's own notation might make something of
CATEGORIES = ("refund", '<b>"$x$" & co</b>')
PROMPT = "<|im_start|>user\nSay </div><script>alert('hi')</script>\n<|im_start|>assistant\n"
SAMPLE = Sample(
    prompt=PROMPT,
    category=CATEGORIES[1],
    pieces=["Dear", " Ms. <i>Lane", "</i>,", "\n\n", " all is well" * 20, ""],
    provenance=["accepted", "corrected", "accepted", "accepted", "bonus", "plain"],
    p=[0.612, 0.25, 1.0, 0.5, 0.125, 1.0],
    q=[0.034, 0.00002, 0.9, 0.75, 0.0, 1.0],
)


def evaluation(acceptance: float = 0.6, seed: int = 0, **changes: Any) -> Evaluation:
    """Of 16 prompts with 30 rounds each, of drafts whose tokens pass with such a probability."""
    generator = np.random.default_rng(seed)
    lengths = generator.geometric(1 - acceptance, size=(16, 30)).clip(max=5) - 1
    traces = [Trace([Round(4, int(length), int(length) + 1) for length in row]) for row in lengths]
    alphas = generator.normal(acceptance, 0.05, size=16)
    sums = figures.padded([[[16, 16 * alpha, 8, 1, 9]] for alpha in alphas], 8)
    passes = figures.padded([figures.passes_by_range(trace) for trace in traces], 8)
    categories = [CATEGORIES[place % 2] for place in range(16)]
    counted = figures.of_rounds(traces, 4)
    costs = Costs(seconds_per_token=0.02, draft_step=0.1, target_pass=[1.0, 1.05, 1.1, 1.2, 1.3, 1.6])
    found = Evaluation(
        **figures.means(sums, passes),
        **counted,
        prompts="service",
        sampling=SamplingParams(temperature=1.0, seed=0),
        by_category=figures.by_category(sums, categories, passes, traces, categories),
        by_position=figures.by_position(sums, passes),
        num_draft_tokens=4,
        costs=costs,
        predicted_speedup=[costs.predicted_speedup(counted["betas"], number) for number in range(1, 6)],
        predicted_speedup_intervals=figures.predicted_speedup_intervals(traces, costs),
        best_num_draft_tokens=costs.best_num_draft_tokens(counted["betas"]),
        measured_speedups=[1.1, 1.4, 1.2, 1.3, 0.9],
        measured_speedup=1.2,
        measured_seconds=Seconds(draft=1.0, verify=6.0, rest=1.0),
        samples=[SAMPLE],
    )
    return replace(found, **changes)


BENCH = {
    "timings": [
        {
            "sampling": {"temperature": 0.0},
            "trace": {"seconds": {"draft": 3.0, "verify": 6.0, "rest": 1.0}, "drafted": 50, "target_passes": 20},
            "median_tokens_per_second": {"plain": 50.0, "speculative": 77.5},
            "ratios": [1.5, 1.6, 1.55],
            "ratio": 1.55,
            "predicted_speedup": 1.6,
        }
    ]
}
PROVENANCE = {
    "started_at": "2026-01-01",
    "hardware": {"cpu": "<u>a CPU</u>", "cores": 2, "accelerators": []},
    "versions": {"torch": "2.13.0"},
}
MADE = {"dtype": "bfloat16", "device": "cpu", "num_threads": 2, "provenance": PROVENANCE}


def write(path: Path, content: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return str(path)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a pair at two settings, the same before distillation, and a bench."""
    folder = tmp_path_factory.mktemp("report")
    after = [evaluation(), evaluation(seed=1, sampling=SamplingParams(), by_category={})]
    found = [each.as_json() for each in after]
    result = write(folder / "after.json", found[0] | MADE | {"settings": found})
    before = write(folder / "before.json", evaluation(0.2, seed=2, measured_speedups=[], samples=[]).as_json() | MADE)
    bench = write(folder / "bench.json", BENCH | MADE)
    output = folder / "pages" / "page.html"
    report(ReportConfig(result=result, compare=[before], bench=bench, output=str(output)))
    return output


class Page(HTMLParser):
    """Tags with their attributes, in order, and all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def plots_in(html: str) -> dict[str, ElementTree.Element]:
    return dict(zip(PLOTS, map(ElementTree.fromstring, re.findall(r"<svg.*?</svg>", html, re.DOTALL)), strict=True))


def group(plot: ElementTree.Element, identity: str) -> ElementTree.Element:
    (found,) = (each for each in plot.iter() if each.get("id") == identity)
    return found


def points(plot: ElementTree.Element, identity: str) -> np.ndarray:
    """Where markers stand, [points, 2]."""
    uses = group(plot, identity).iter("{http://www.w3.org/2000/svg}use")
    return np.array([[float(use.get("x", "")), float(use.get("y", ""))] for use in uses])


def in_proportion(drawn: np.ndarray, values: list[float]) -> bool:
    """Whether one is the other on some linear scale."""
    return len(drawn) == len(values) and abs(np.corrcoef(drawn, values)[0, 1]) > 1 - 1e-6


def test_every_plot_has_its_points_and_bars(page: Path) -> None:
    after, greedy, before = evaluation(), evaluation(seed=1), evaluation(0.2, seed=2)
    plots = plots_in(page.read_text())
    for number, found in enumerate((after, greedy, before)):
        assert in_proportion(points(plots["betas"], f"betas-series-{number}")[:, 1], found.betas)
        assert in_proportion(points(plots["speedup"], f"speedup-series-{number}")[:, 1], found.predicted_speedup)
        assert in_proportion(points(plots["costs"], f"costs-series-{number}")[:, 1], found.costs.target_pass)
        group(plots["costs"], f"costs-drafting-{number}")
        bars = [group(plots["lengths"], f"lengths-bar-{number}-{place}") for place in range(5)]
        assert in_proportion(np.array([height(bar) for bar in bars]), found.accepted_length_shares)
    for number, found in ((0, after), (2, before)):
        alphas = [found.alpha, *(part.alpha for part in found.by_category.values())]
        assert in_proportion(points(plots["categories"], f"categories-series-{number}")[:, 0], alphas)
    assert len(points(plots["categories"], "categories-series-1")) == 1  # without categories, all prompts
    # measured at the best number of draft tokens, on the same scale as the curve; the bench at 50 / 20 of them
    curve = points(plots["speedup"], "speedup-series-0")
    timed = np.concatenate([points(plots["speedup"], f"speedup-timed-{number}") for number in range(3)])
    for axis, measured in (
        (0, [after.best_num_draft_tokens, greedy.best_num_draft_tokens, 2.5]),
        (1, [1.2, 1.2, 1.55]),
    ):
        scale = np.polyfit([range(1, 6), after.predicted_speedup][axis], curve[:, axis], 1)
        assert timed[:, axis] == pytest.approx(np.polyval(scale, measured), abs=0.01)
    widths = [[width(group(plots["time"], f"time-bar-{row}-{part}")) for part in range(3)] for row in range(3)]
    for drawn, shares in zip(widths, ([1, 6, 1], [1, 6, 1], [3, 6, 1]), strict=True):
        assert np.array(drawn) / sum(drawn) == pytest.approx(np.array(shares) / sum(shares), abs=1e-3)


def corners(bar: ElementTree.Element) -> np.ndarray:
    (path,) = bar.iter("{http://www.w3.org/2000/svg}path")
    return np.array(re.findall(r"[-\d.]+", path.get("d", "")), dtype=float).reshape(-1, 2)


def height(bar: ElementTree.Element) -> float:
    return float(np.ptp(corners(bar)[:, 1]))


def width(bar: ElementTree.Element) -> float:
    return float(np.ptp(corners(bar)[:, 0]))


def test_plots_are_told_in_words(page: Path) -> None:
    labels = [each["aria-label"] or "" for _, each in Page(page.read_text()).tags if each.get("role") == "img"]
    assert len(labels) == len(PLOTS)
    listed = " ".join(f"{beta:.2f}" for beta in evaluation().betas)
    assert f"after, T=1: {listed}; after, greedy: " in labels[0]
    assert "; before: " in labels[0]
    assert "after, T=1: measured 1.20; after, greedy: measured 1.20; bench, greedy: measured 1.55" in labels[2]
    assert labels[5].endswith("bench, greedy: 0.30 0.60 0.10")


def test_tokens_tell_p_and_q_to_mouse_keyboard_and_reader(page: Path) -> None:
    tags = Page(page.read_text()).tags
    told = [each for tag, each in tags if tag == "span" and each.get("role") == "note"]
    assert [each["tabindex"] for each in told] == ["0"] * 12
    assert [(each["class"], each["aria-label"]) for each in told[:6]] == [
        ("accepted", "“Dear”: drafted and accepted, p 0.612, q 0.034"),
        ("corrected", "“ Ms. <i>Lane”: the target's correction, p 0.250, q 2e-05"),
        ("accepted", "“</i>,”: drafted and accepted, p 1.000, q 0.900"),
        ("accepted", "line break: drafted and accepted, p 0.500, q 0.750"),
        ("bonus", f"“{SAMPLE.pieces[4]}”: bonus, after all drafted were accepted, p 0.125, q 0.000"),
        ("plain", "no text of its own: the target's, nothing drafted, p 1.000, q 1.000"),
    ]


def test_what_others_wrote_is_text(page: Path) -> None:
    parsed = Page(page.read_text())
    tags = Counter(tag for tag, _ in parsed.tags)
    assert (tags["script"], tags["u"], tags["b"]) == (0, 0, len(PLOTS))
    assert tags["i"] == 4  # marks of what has no text, twice in two samples
    assert PROMPT in parsed.text
    assert "<u>a CPU</u>" in parsed.text
    assert parsed.text.count(CATEGORIES[1]) >= 3  # in the plot as well, where "$" begins no formula


def test_the_page_is_alone(page: Path) -> None:
    html = page.read_text()
    tags = Page(html).tags
    outside = [
        (tag, name, value)
        for tag, attributes in tags
        for name, value in attributes.items()
        if not name.startswith("xmlns") and re.search(r"//|https?:", value or "")
    ]
    assert outside == []
    assert re.search(r"@import|url\((?!#)", html) is None
    assert [each["href"] for tag, each in tags if tag == "link"] == ["data:,"]
    identities = [each["id"] for _, each in tags if "id" in each]
    assert len(identities) == len(set(identities))
    known = set(identities)
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', html)) <= known
    assert set(re.findall(r"#[0-9a-f]{6}\b", html.partition("</style>")[2])) == set()  # colours are the page's


def test_the_same_results_are_the_same_page(tmp_path: Path) -> None:
    result = write(tmp_path / "a.json", evaluation().as_json())
    pages = []
    for name in ("one", "two"):
        report(ReportConfig(result=result, output=str(tmp_path / name)))
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results lie, and the working folder; log lines stay with pytest."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "_configure_logging", lambda: None)
    return tmp_path


def text_of(*options: str) -> str:
    """Of the page that these make."""
    assert cli.main(["report", *options, "--output", "page.html"]) == 0
    return Page(Path("page.html").read_text()).text


def test_results_are_called_by_what_tells_them_apart(folder: Path) -> None:
    found = evaluation().as_json()
    both = found | {"settings": [found, evaluation(sampling=SamplingParams(temperature=0.5, min_p=0.1)).as_json()]}
    for name, content in (("a/found", found), ("b/found", found), ("c/both", both), ("d" * 60, found)):
        write(folder / f"{name}.json", content)
    for options, title in (
        (["--result", "a/found.json"], "T=1"),
        (["--compare", "c/both.json"], "T=1; T=0.5, min-p 0.1"),
        (["--result", "a/found.json", "--compare", "c/both.json"], "found; both, T=1; both, T=0.5, min-p 0.1"),
        (["--compare", "a/found.json", "b/found.json"], "a/found.json; b/found.json"),
        (["--compare", "a/found.json", f"{'d' * 60}.json"], f"found; …{'d' * 39}"),
    ):
        assert f"Acceptance: {title}\n" in text_of(*options)


def test_a_pair_shows_what_was_measured_of_it_but_texts(folder: Path) -> None:
    Pair(target={"id": "t"}, measured=evaluation(samples=[]).as_json() | MADE).save(folder / "pair")
    write(folder / "other.json", evaluation(measured_speedups=[]).as_json())
    text = text_of("--result", "pair")
    assert f"{evaluation().alpha:.3f}" in text
    assert "Decoded speculatively on held-out prompts" not in text
    assert "Nothing was timed" not in text
    text = text_of("--compare", "other.json")
    assert "Decoded speculatively on held-out prompts" in text
    assert "Nothing was timed: evaluate with num_timed_prompts, or give --bench." in text
    assert "Acceptance: pair; other\n" in text_of("--compare", "pair", "other.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "result: none given; use --result FILE, or --compare FILE FILE"),
        (["--result", "nowhere.json"], "nowhere.json: No such file or directory"),
        (["--result", "torn.json"], "result torn.json: is no JSON: "),
        (
            ["--result", "old.json"],
            "result old.json: is not what this release's `spec-decode evaluate` writes ('betas')",
        ),
        (["--result", "list.json"], "result list.json: is not what this release's `spec-decode evaluate` writes"),
        (["--result", "bench.json"], "result bench.json: is not what this release's `spec-decode evaluate` writes"),
        (["--result", "pair"], "result pair: was never measured; run `spec-decode evaluate --pair pair`"),
        (["--result", "folder"], "pair folder: holds no pair.json"),
        (["--result", "good.json", "--bench", "good.json"], "bench good.json: is not what `spec-decode bench` writes"),
        (["--compare", *(f"{number}.json" for number in range(9))], "compare: with all their settings, these are 9"),
        (["--result", "good.json", "--output", "folder"], "output folder: is a folder"),
        (["--result", "good.json", "--compare"], "argument --compare/--compare+: expected one argument"),
    ],
)
def test_what_cannot_be_shown_is_a_line(
    options: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = evaluation().as_json()
    for name, content in (("good", good), ("list", [good]), ("bench", BENCH), *((str(n), good) for n in range(9))):
        write(folder / f"{name}.json", content)
    write(folder / "old.json", {name: value for name, value in good.items() if name != "betas"})
    (folder / "torn.json").write_text('{"alpha": ')
    (folder / "folder").mkdir()
    Pair(target={"id": "t"}).save(folder / "pair")
    assert cli.main(["report", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"spec-decode: error: {message}")
    assert not (folder / "report.html").exists()
