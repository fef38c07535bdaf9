"""The dashboard opens only for those who may read."""

import pytest
from tests.dashboard.house import client

from bridle.dashboard.app import COOKIE, KEEP_S, MOST, Guard

TOKEN = "a-token-that-is-known"
HTML = {"accept": "text/html"}


@pytest.fixture
def known():
    return {TOKEN}


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture
def browser(run, known, clock):
    guard = Guard(lambda sent: sent in known, clock=lambda: clock[0])
    with client(run, guard) as made:
        yield made


def test_pages_and_logs_answer_401_without_a_token(browser):
    page = browser.get("/session/one.0", headers=HTML)
    plain = browser.get("/session/one.0/file/stdout", headers={"accept": "*/*"})

    assert page.status_code == plain.status_code == 401
    assert 'type="password"' in page.text
    assert "mini_swe_agent" not in page.text + plain.text
    assert browser.get("/static/style.css").status_code == 200


def test_login_with_a_token_sets_a_cookie_that_opens_all_pages(browser):
    wrong = browser.post("/login", data={"token": "x"}, headers=HTML)
    right = browser.post("/login", data={"token": TOKEN})

    cookie = right.headers["set-cookie"]
    assert wrong.status_code == 401
    assert "unknown" in wrong.text
    assert (right.status_code, right.headers["location"]) == (303, "/")
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert browser.get("/session/one.0").status_code == 200


def test_bearer_token_in_the_header_opens_pages(browser):
    answer = {"authorization": f"Bearer {TOKEN}"}

    assert browser.get("/", headers=answer).status_code == 200
    assert browser.get("/", headers={"authorization": "Bearer x"}).status_code == 401


def test_a_revoked_token_ends_its_login(browser, known):
    browser.post("/login", data={"token": TOKEN})
    known.clear()

    assert browser.get("/").status_code == 401


def test_a_forged_cookie_answers_401(browser):
    browser.cookies.set(COOKIE, TOKEN)

    assert browser.get("/").status_code == 401


def test_a_login_expires(browser, clock):
    browser.post("/login", data={"token": TOKEN})
    clock[0] += KEEP_S - 1
    assert browser.get("/").status_code == 200
    clock[0] += 1
    assert browser.get("/").status_code == 401


def test_number_of_logins_and_size_of_forms_are_limited(browser):
    browser.post("/login", data={"token": TOKEN})
    first = browser.cookies[COOKIE]
    for _ in range(MOST):
        browser.post("/login", data={"token": TOKEN})

    old = browser.get("/", headers={"cookie": f"{COOKIE}={first}"})
    assert browser.get("/").status_code == 200
    assert old.status_code == 401
    assert browser.post("/login", data={"token": "x" * 10_000}).status_code == 413
