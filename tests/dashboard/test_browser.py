"""Pages in a real Chromium: they draw, refresh and open without an error, and ask nobody else."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from tests.dashboard.house import HOSTILE, captured, certified, shown, steps

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

PICTURES = Path(__file__).resolve().parents[2] / ".cache" / "dashboard"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--window-size=1360,940", "--hide-scrollbars"),
)


@contextmanager
def serving(folder, **environment):
    """Return where a dashboard of the folder listens."""
    command = [sys.executable, "-m", "bridle.cli", "dashboard", folder.name]
    process: Any = subprocess.Popen(
        [*command, "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", **environment},
        cwd=folder.parent,
        text=True,
    )
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A dashboard of a run and of a training."""
    import asyncio

    folder = tmp_path_factory.mktemp("shown") / "runs"
    asyncio.run(shown(folder))
    with serving(folder) as where:
        yield where


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """One Chromium for all tests, with a fresh profile."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService("/usr/bin/chromedriver")
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium):
    """The Chromium; afterwards nothing was an error and nobody else was asked."""
    for kind in ("browser", "performance"):
        chromium.get_log(kind)
    yield chromium
    said = [line["message"] for line in chromium.get_log("browser")]
    asked = {urlsplit(url).hostname for url in requests(chromium)}
    assert said == []
    assert asked == {"127.0.0.1"}


def requests(chromium):
    """Addresses that pages asked for since the last look; the browser's own pages don't count."""
    for line in chromium.get_log("performance"):
        event = json.loads(line["message"])["message"]
        if event["method"] == "Network.requestWillBeSent":
            address = event["params"]["request"]["url"]
            if not address.startswith(("data:", "chrome:")):
                yield address


def every(browser, selector):
    return browser.find_elements("css selector", selector)


def one(browser, selector):
    return until(lambda: every(browser, selector), selector)[0]


def until(condition, what, seconds=60.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.05)
    return found


def press(browser, *keys):
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def picture(browser, name):
    PICTURES.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(PICTURES / f"{name}.png"))


def test_overview_draws_training_charts_and_keeps_them_on_refresh(browser, url):
    browser.get(url)
    until(lambda: len(every(browser, ".charts canvas")) == 5, "charts")
    browser.execute_script("document.querySelector('.charts canvas').dataset.kept = 'yes'")
    browser.execute_script("document.querySelector('#steps-1').open = true")
    before = one(browser, "#live")

    until(lambda: one(browser, "#live") != before, "a refresh")

    assert every(browser, ".charts canvas[data-kept]"), "the drawing stays, with its zoom"
    assert len(every(browser, ".charts canvas")) == 5
    assert every(browser, "#steps-1[open]"), "what was opened stays open"
    picture(browser, "overview")


def test_a_click_in_the_tree_opens_the_exchange_without_a_page_load_and_sets_the_url(browser, url):
    browser.get(f"{url}/sessions")
    one(browser, "a[data-row]").click()
    tree = one(browser, ".tree")
    turn = every(browser, "a.turn")[1]
    turn.click()
    until(lambda: every(browser, "#exchange .message.sampled"), "the exchange")

    assert tree == one(browser, ".tree"), "the page was not loaded anew"
    assert browser.current_url == turn.get_attribute("href")
    assert turn.get_attribute("aria-current") == "true"
    picture(browser, "session")
    browser.back()
    until(lambda: "/exchange/" not in browser.current_url, "the way back")
    browser.forward()
    until(lambda: every(browser, "#exchange .message.sampled"), "the exchange again")


def test_pages_are_navigated_by_keyboard_alone(browser, url):
    from selenium.webdriver.common.keys import Keys

    browser.get(f"{url}/tasks")
    press(browser, "j", Keys.ENTER)
    until(lambda: "/task?" in browser.current_url, "the task")
    press(browser, "j", "j", "k", Keys.ENTER)
    until(lambda: "/session/" in browser.current_url, "the session")
    press(browser, "j", Keys.ENTER)
    until(lambda: every(browser, "#exchange .message.sampled"), "the exchange")
    press(browser, "/")

    assert browser.switch_to.active_element.get_attribute("name") == "text"
    press(browser, "hello", Keys.ENTER)
    until(lambda: "text=hello" in browser.current_url, "what was looked for")


def test_first_tab_stop_is_the_skip_link_with_visible_focus(browser, url):
    from selenium.webdriver.common.keys import Keys

    browser.get(url)
    press(browser, Keys.TAB)
    first = browser.switch_to.active_element

    assert first.text == "Skip to the content"
    assert first.value_of_css_property("outline-style") == "solid"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tokens_are_coloured_in_light_and_dark_scheme(browser, url, scheme):
    answer = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", answer)
    browser.get(f"{url}/sessions?run=run")
    one(browser, "a[data-row]").click()
    browser.get(one(browser, "a[href*='/trace/']:not([href*='/messages'])").get_attribute("href"))

    shades = {
        token.value_of_css_property("background-color") for token in every(browser, ".tokens .on")
    }
    back = one(browser, "body").value_of_css_property("background-color")
    ink = one(browser, "html").value_of_css_property("background-color")
    assert len(shades) > 1
    assert "logprob" in one(browser, ".tokens .on").get_attribute("title")
    assert back == "rgba(0, 0, 0, 0)"
    assert (ink == "rgba(20, 23, 26, 1)") is (scheme == "dark")
    picture(browser, f"tokens-{scheme}")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_overview_links_to_the_certificate(browser, url):
    browser.get(url)
    one(browser, "a[href*='/certificate?']").click()
    until(lambda: every(browser, "tr.differs"), "the certificate")

    assert "trainer and rollout disagree" in one(browser, "main .law").text
    picture(browser, "certificate")


def test_fork_command_on_an_exchange_of_the_attempts_page_can_be_copied(browser, tmp_path_factory):
    """By the command that stands at a reply, as a person copies it."""
    import asyncio
    import shlex

    from tests.dashboard.test_attempts import attempts

    folder = tmp_path_factory.mktemp("attempts") / "runs"
    asyncio.run(attempts(folder))
    with serving(folder) as where:
        browser.get(f"{where}/sessions?run=again")
        one(browser, "a[data-row]").click()
        one(browser, "a[href*='/attempts']").click()
        until(lambda: len(every(browser, ".attempts a.turn")) == 5, "all five attempts")
        assert one(browser, ".attempts a[aria-current]").text.count("one.0.d") == 1
        assert len(every(browser, ".reply code.command")) == 3, "one at each of its own replies"
        picture(browser, "attempts")
        every(browser, ".attempts a.turn")[0].click()
        one(browser, "a.turn").click()
        command = one(browser, "#exchange .command")
        browser.execute_script("getSelection().selectAllChildren(arguments[0])", command)
        copied = browser.execute_script("return getSelection().toString()")
    words = ["bridle", "fork", "one.0", "--run", "runs/its run", "--at", "1"]
    assert shlex.split(copied) == words


def test_pages_work_without_javascript(browser, url):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(f"{url}/sessions?run=run")
        one(browser, "a[data-row]").click()
        until(lambda: every(browser, "a.turn"), "the tree")[0].click()
        until(lambda: every(browser, "#exchange .message.sampled"), "the exchange")
        browser.get(url)
        assert one(browser, "#steps-1")
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_clicks_sort_the_session_list_and_open_the_comparison_of_two_samples(browser, url):
    browser.get(f"{url}/sessions")
    browser.find_element("link text", "reward").click()
    until(lambda: every(browser, "th[aria-sort=descending]"), "the sorted list")
    browser.get(f"{url}/tasks")
    one(browser, "a[data-row]").click()
    one(browser, "a[href*='/compare?']").click()
    until(lambda: every(browser, "tr.differs"), "the comparison")

    assert len(every(browser, ".compare th[scope=col]")) == 2
    assert len(every(browser, ".pair mark")) in (0, 2)
    picture(browser, "compare")


def test_clicks_open_the_comparison_of_two_training_steps(browser, tmp_path_factory):
    from selenium.webdriver.support.select import Select

    folder = tmp_path_factory.mktemp("steps") / "runs"
    steps(folder / "rollouts" / "000")
    steps(folder / "rollouts" / "001")
    with serving(folder) as where:
        browser.get(where)
        one(browser, "a[href*='/compare-runs?']").click()
        Select(one(browser, "select[name=vb]")).select_by_visible_text("v4")
        one(browser, ".filters button").click()
        until(lambda: "vb=4" in browser.current_url, "the comparison")
        assert len(every(browser, ".compare th[scope=col]")) == 2
        assert len(every(browser, "tr.differs")) > 3
        assert len(every(browser, ".pair mark")) == 2
        picture(browser, "compare-runs")
        with telephone(browser):
            browser.refresh()
            wide = browser.execute_script("return document.documentElement.scrollWidth")
            assert wide <= 390


PAGES = (
    *("", "a[href*='/certificate?']"),
    *("sessions", "tasks", "a[data-row][href*='/task?']", "a[href*='/compare?']"),
    *("a[data-row][href*='/session/']", "a[href*='/attempts']", ".reply a[href*='/exchange/']"),
    "a[href*='/trace/']:not([href*='/messages'])",
)
"""Pages of a tour: a path, or the link to click on the page before."""


@contextmanager
def telephone(browser):
    """The screen of a telephone."""
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_no_page_is_wider_than_a_phone_screen(browser, url):
    with telephone(browser):
        for page in PAGES:
            if "[" in page or "." in page:
                browser.get(one(browser, page).get_attribute("href"))
            else:
                browser.get(f"{url}/{page}")
            until(lambda: every(browser, "main"), page)
            wide = browser.execute_script("return document.documentElement.scrollWidth")
            assert wide <= 390, browser.current_url
        browser.get(f"{url}/tasks")
        for page in PAGES[4:6]:
            browser.get(one(browser, page).get_attribute("href"))
        picture(browser, "compare-390")


SHOWN = ("exchange", "trace", "file", "attempts")


def test_hostile_text_runs_no_script_and_loads_no_image(browser, tmp_path_factory):
    import asyncio

    folder = tmp_path_factory.mktemp("hostile")
    asyncio.run(captured(folder))
    with serving(folder) as where:
        browser.get(f"{where}/session/one.2")
        links = {
            link.get_attribute("href")
            for link in every(browser, "main a")
            if any(f"/{part}" in link.get_attribute("href") for part in SHOWN)
        }
        assert len(links) > 5
        assert sum("/file/" in link for link in links) == 3
        hostile = quote('"><script>document.title = "ran"</script>', safe="")
        (folder / "certificate.json").write_text(json.dumps(certified(HOSTILE)))
        asked = {f"/session/{hostile}", f"/task?id={hostile}", f"/sessions?text={hostile}"}
        asked |= {"/certificate", f"/certificate?run={hostile}"}
        for address in sorted(links | {f"{where}{path}" for path in asked}):
            browser.get(address)
            assert browser.title != "ran"
            assert every(browser, "img[src*='evil']") == []
            assert every(browser, "main script") == []
    answer = [line["message"] for line in browser.get_log("browser")]
    assert [message for message in answer if "404" not in message] == []


def test_a_token_is_entered_once_for_all_pages(browser, tmp_path_factory):
    import asyncio

    folder = tmp_path_factory.mktemp("guarded")
    asyncio.run(captured(folder, rewards=(1.0,)))
    with serving(folder, BRIDLE_DASHBOARD_TOKEN="a-token-to-type") as where:
        browser.get(where)
        one(browser, "input[name=token]").send_keys("a-token-to-type\n")
        until(lambda: every(browser, "#live"), "the first page")
        browser.get(f"{where}/session/one.0")
        assert every(browser, "a.turn")
        assert browser.execute_script("return document.cookie") == ""
    answer = [line["message"] for line in browser.get_log("browser")]
    assert [message for message in answer if "401" not in message] == []


def test_overview_shows_a_warning_after_the_dashboard_has_stopped(browser, tmp_path_factory):
    import asyncio

    folder = tmp_path_factory.mktemp("going")
    asyncio.run(captured(folder, rewards=(1.0,)))
    with serving(folder) as where:
        browser.get(where)
        one(browser, "#live")
    until(lambda: one(browser, ".stale").is_displayed(), "not refreshed")
    browser.get("data:text/html,")
    answer = [line["message"] for line in browser.get_log("browser")]
    assert all("net::ERR_" in message or "htmx" in message for message in answer)
