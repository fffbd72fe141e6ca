"""The page that `vllm reload-audit --html` writes, in a real Chromium: what a reader sees, clicks and types.

The pages hold made-up rows. Where the `playwright` package or a Chromium is missing, what needs one is skipped.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fork import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

TEMPLATE = ROOT / "vllm/model_executor/model_loader/reload/audit.html"
# Debian's packages chromium and chromium-headless-shell bring the first two.
CHROMIUMS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
MODES = ("same", "update", "back", "repeat", "poisoned")
SIGNS = {"equal": "✓", "unequal": "✗", "not-auditable": "∅", "error": "!"}

SINKS = [f"model.layers.{layer}.self_attn.sinks" for layer in range(24)]
CACHES = [f"rotary.{'abcdefghij'[one % 10] * (one + 1)}.cos_sin_cache" for one in range(300)]
HOSTILE = "<img src=http://127.0.0.1:9/ onerror='ran=1'>&amp;\"</script><script>ran=1</script>" + "VeryLong" * 40

Open = Callable[..., "Page"]


def row(architecture: str, mode: str = "update", verdict: str = "equal", **fields: Any) -> dict[str, Any]:
    """A row as `Row.json()` gives it, with its group."""
    blank = {"tp": 1, "reason": "", "tensors": 30, "logits": 0.0, "graph": None, "seconds": 0.25}
    paths = {key: [] for key in ("stale", "wrong", "moved", "lost", "new")}
    named = {"architecture": architecture, "mode": mode, "verdict": verdict, "group": "text-generation"}
    return blank | paths | named | fields


ROWS = [
    row("CLIPModel", group="pooling", reason="not on this device: RuntimeError: no kernel", logits=None),
    row("LlamaForCausalLM", "poisoned"),
    row("LlamaForCausalLM", "update"),
    row("GptOssForCausalLM", "same"),
    row("GptOssForCausalLM", "update", "unequal", reason="24 stale", stale=SINKS, logits=4.6875, seconds=1.5),
    row("GptOssForCausalLM", "poisoned", "unequal", wrong=["model.norm.weight"], moved=CACHES, logits=math.inf),
    row("JambaForCausalLM", verdict="error", reason="a fresh start raised ValueError: no tensor", tensors=0),
    row("Mllama", verdict="not-auditable", reason="needs remote code", group="multimodal", tensors=0, logits=None),
]


def written(rows: list[dict[str, Any]]) -> str:
    """The page as `page()` in audit_report.py makes it; importing that one would import all of vLLM."""
    data = json.dumps({"version": "0.32.0", "rows": rows}).replace("<", "\\u003c")
    return TEMPLATE.read_text().replace("{{data}}", data)


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs `pip install playwright`")
    chromium = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if chromium is None:
        pytest.skip(f"none of {', '.join(CHROMIUMS)} is on PATH; try `apt-get install chromium-headless-shell`")
    with sync_api.sync_playwright() as playwright:
        # As root Chromium starts without its sandbox only, which is playwright's default.
        running = playwright.chromium.launch(executable_path=chromium, args=["--disable-background-networking"])
        yield running
        running.close()


@pytest.fixture
def opened(browser: "Browser", tmp_path: Path) -> Iterator[Open]:
    """Write a page for some rows and open it; at the end nothing went wrong in it, and it asked for nothing."""
    wrong, requests, contexts = [], [], []

    def load(rows: list[dict[str, Any]] = ROWS, width: int = 1200, scheme: Any = "light") -> "Page":
        file = tmp_path / f"{len(contexts)}.html"
        file.write_text(written(rows))
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        assert not wrong
        return page

    yield load
    for context in contexts:
        context.close()
    assert not wrong
    assert requests == [(tmp_path / f"{one}.html").as_uri() for one in range(len(contexts))]


def cell(page: "Page", architecture: str, mode: str) -> "Locator":
    return page.locator(f'.cell[aria-label^="{architecture}, {mode}:"]')


def shown(page: "Page") -> list[str]:
    """The names of the rows that a reader sees, from top to bottom."""
    return page.locator("th[scope=row]:visible").all_inner_texts()


def test_one_placeholder_takes_the_data_and_any_encoding_can_read_the_template() -> None:
    text = TEMPLATE.read_bytes().decode("ascii")
    assert text.count("{{data}}") == 1


def test_the_template_names_no_address_and_writes_no_markup() -> None:
    assert not re.findall(
        r"//[\w.]+\.\w|\bsrc=|\bhref=|url\(|@import|innerHTML|insertAdjacentHTML", TEMPLATE.read_text()
    )


def test_a_row_for_each_architecture_and_a_cell_for_each_check(opened: Open) -> None:
    page = opened()
    heads = page.locator("thead th").all_inner_texts()
    assert [head.split()[0] for head in heads] == ["architecture", "same", "update", "poisoned"]
    groups = page.locator("th[scope=rowgroup]").all_inner_texts()
    assert groups == ["text-generation 3 architectures", "pooling 1 architecture", "multimodal 1 architecture"]
    assert shown(page) == ["GptOssForCausalLM", "JambaForCausalLM", "LlamaForCausalLM", "CLIPModel", "Mllama"]
    assert page.locator(".cell").count() == len(ROWS)
    assert page.locator("tr", has_text="LlamaForCausalLM").locator("td").all_inner_texts() == [
        "·",
        "✓ equal",
        "✓ equal",
    ]
    assert page.locator("#about").inner_text() == "8 checks of 5 architectures, vLLM 0.32.0"


def test_tensor_parallel_checks_have_a_row_of_their_own(opened: Open) -> None:
    page = opened([row("Llama"), row("Llama", tp=2, verdict="error")])
    assert shown(page) == ["Llama", "Llama (tp 2)"]


def test_verdicts_are_counted_and_told_apart_without_colour(opened: Open) -> None:
    page = opened()
    assert page.locator(".chip").all_inner_texts() == ["✓ 4 equal", "✗ 2 unequal", "∅ 1 not-auditable", "! 1 error"]
    for each in page.locator(".cell").all():
        verdict = str(each.get_attribute("class")).split()[1]
        assert each.inner_text().startswith(f"{SIGNS[verdict]} {verdict}")


def test_a_click_opens_what_a_check_found_and_a_second_one_closes_it(opened: Open) -> None:
    page = opened()
    button = cell(page, "GptOssForCausalLM", "update")
    assert button.inner_text() == "✗ unequal 24"
    button.click()
    assert button.get_attribute("aria-expanded") == "true"
    panel = page.locator("tr", has_text="GptOssForCausalLM").first.locator("+ #panel")
    text = panel.inner_text()
    for words in ("GptOssForCausalLM, update", "24 stale", "still the old bytes", "30", "4.6875", "1.5"):
        assert words in text
    button.click()
    assert page.locator("#panel").count() == 0
    assert button.get_attribute("aria-expanded") == "false"


def test_paths_that_differ_in_numbers_only_are_folded_into_one(opened: Open) -> None:
    experts = [f"model.layers.{layer}.experts[{expert}].w13" for layer in (9, 10) for expert in (0, 1)]
    page = opened([row("Llama", verdict="unequal", stale=["lm_head.w2", *SINKS, *experts, "lm_head.w1"])])
    page.locator(".cell").click()
    assert page.locator(".paths > li").all_inner_texts() == [
        "lm_head.w2",
        "model.layers.0\u201323.self_attn.sinks \u00d7 24",
        "model.layers.9\u201310.experts[0\u20131].w13 \u00d7 4",
        "lm_head.w1",
    ]
    page.locator("summary").first.click()
    assert page.locator(".paths li li:visible").all_inner_texts() == SINKS


def test_hundreds_of_paths_scroll_in_a_box_of_their_own(opened: Open) -> None:
    page = opened()
    cell(page, "GptOssForCausalLM", "poisoned").click()
    assert page.locator("h3").all_inner_texts() == [
        "1 wrong neither the old bytes nor the new",
        "300 moved lies elsewhere than before the update",
    ]
    box = page.get_by_label("moved", exact=True)
    assert box.locator("li").all_inner_texts() == CACHES
    size = box.evaluate("box => [box.clientHeight, box.scrollHeight, box.clientWidth, box.scrollWidth]")
    assert size[0] < 500 < size[1] and size[2] == size[3], size


@pytest.mark.parametrize(
    ("architecture", "mode", "words"),
    [
        ("CLIPModel", "update", "the model was not run"),
        ("GptOssForCausalLM", "poisoned", "Infinity"),
        ("JambaForCausalLM", "update", "a fresh start raised ValueError: no tensor"),
        ("Mllama", "update", "needs remote code"),
    ],
)
def test_every_check_says_why(opened: Open, architecture: str, mode: str, words: str) -> None:
    page = opened()
    cell(page, architecture, mode).click()
    assert words in page.locator("#panel").inner_text()


@pytest.mark.parametrize(
    ("typed", "left"),
    [
        ("forcausal", ["GptOssForCausalLM", "JambaForCausalLM", "LlamaForCausalLM"]),
        ("layers.7.self_attn", ["GptOssForCausalLM"]),
        ("remote code", ["Mllama"]),
        ("  valueerror jamba ", ["JambaForCausalLM"]),
        ("jamba llama", []),
    ],
)
def test_text_filters_by_architecture_reason_and_tensor(opened: Open, typed: str, left: list[str]) -> None:
    page = opened()
    page.get_by_label("Filter by text").fill(typed)
    assert shown(page) == left
    said = f"{len(left)} of 5 architectures shown." if left else "No architecture fits the filter."
    assert page.get_by_role("status").inner_text() == said


def test_verdicts_and_groups_filter_together(opened: Open) -> None:
    page = opened()
    unequal, error = page.locator(".chip.unequal"), page.locator(".chip.error")
    unequal.click()
    assert shown(page) == ["GptOssForCausalLM"]
    assert page.locator(".cell.dim:visible").all_inner_texts() == ["✓ equal"]
    error.click()
    assert shown(page) == ["GptOssForCausalLM", "JambaForCausalLM"]
    page.get_by_label("Group").select_option("pooling")
    assert shown(page) == [] and page.locator("th[scope=rowgroup]:visible").count() == 0
    unequal.click()
    error.click()
    assert shown(page) == ["CLIPModel"]


def test_a_filter_closes_the_details_of_a_row_that_it_hides_and_no_others(opened: Open) -> None:
    page = opened()
    cell(page, "Mllama", "update").click()
    page.get_by_label("Filter by text").fill("ml")
    assert page.locator("#panel").is_visible()
    page.get_by_label("Filter by text").fill("gpt")
    assert page.locator("#panel").count() == 0


def test_hostile_text_is_shown_and_runs_nothing(opened: Open) -> None:
    fields = {key: [HOSTILE] for key in ("stale", "lost")}
    page = opened([row(HOSTILE, HOSTILE, "unequal", reason=HOSTILE, group=HOSTILE, graph=HOSTILE, **fields)])
    page.locator(".cell").click()
    assert shown(page) == [HOSTILE]
    assert page.locator(".reason").inner_text() == HOSTILE
    assert page.locator(".paths li").all_inner_texts() == [HOSTILE, HOSTILE]
    assert page.locator("img").count() == 0 and page.locator("script").count() == 2
    assert page.evaluate("typeof ran") == "undefined"
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_the_keyboard_does_it_all(opened: Open) -> None:
    page = opened()
    focused = page.locator(":focus")
    page.get_by_label("Group").focus()
    page.keyboard.press("Tab")
    assert focused.get_attribute("aria-label") == "GptOssForCausalLM, same: equal"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")  # Jamba
    page.keyboard.press("ArrowDown")  # Llama
    page.keyboard.press("ArrowUp")
    assert focused.get_attribute("aria-label") == "JambaForCausalLM, update: error"
    page.keyboard.press("Enter")
    assert page.locator("#panel").is_visible()
    page.keyboard.press("Tab")
    assert focused.get_attribute("aria-label") == "Close"
    page.keyboard.press("Escape")
    assert page.locator("#panel").count() == 0
    assert focused.get_attribute("aria-label") == "JambaForCausalLM, update: error"


def test_all_architectures_fit_on_one_page(opened: Open) -> None:
    names = [f"Model{number:03}ForCausalLM" for number in range(350)]
    page = opened([row(name, mode, "unequal", stale=CACHES[:200]) for name in names for mode in MODES])
    assert page.locator(".cell").count() == 1750
    page.locator(".cell").last.click()
    assert page.locator(".paths li").count() == 200
    assert page.locator("thead th").first.bounding_box()["y"] == 0  # it stays in sight
    page.get_by_label("Filter by text").fill("model349")
    assert shown(page) == names[-1:]


def test_nothing_audited_is_said(opened: Open) -> None:
    assert opened([]).get_by_role("status").inner_text() == "Nothing was audited."


def test_a_phone_shows_all_columns_by_their_signs(opened: Open) -> None:
    page = opened([row("Gemma3nForConditionalGeneration", mode, "unequal", stale=SINKS) for mode in MODES], width=360)
    page.locator(".cell").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert [text.strip() for text in page.locator(".cell").all_inner_texts()] == ["✗"] * 5
    assert page.locator("thead th:visible").all_inner_texts() == list(MODES)
    heads, cells = page.locator("thead th:visible").all(), page.locator(".cell").all()
    for head, below in zip(heads, cells, strict=True):
        left, right = head.bounding_box(), below.bounding_box()
        assert abs(left["x"] + left["width"] / 2 - right["x"] - right["width"] / 2) < 2
    assert page.locator("th[scope=row]").is_visible() and page.locator(".paths").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_verdict_can_be_read_in_light_and_dark(opened: Open, scheme: str) -> None:
    page = opened(scheme=scheme)
    assert (_luminance(page.locator("body"), "backgroundColor") < 0.5) == (scheme == "dark")
    assert _contrast(page.locator("body")) > 7
    for verdict in SIGNS:
        assert _contrast(page.locator(f".cell.{verdict}").first) >= 4.5, verdict


def _contrast(element: "Locator") -> float:
    """How far an element's text stands out from its ground, from 1 to 21, as WCAG 2 has it."""
    one, other = sorted(_luminance(element, name) for name in ("color", "backgroundColor"))
    return (other + 0.05) / (one + 0.05)


def _luminance(element: "Locator", name: str) -> float:
    """The relative luminance of a colour, as WCAG 2 has it."""
    colour = element.evaluate("(element, name) => getComputedStyle(element)[name]", name)
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
