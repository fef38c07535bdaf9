"""The site has every page and every extra; `make docs` builds it strictly."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_docs_page_is_in_the_navigation_of_the_site():
    listed = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    own = {"README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"}

    assert listed == pages | own


def test_the_install_page_lists_every_optional_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "install.md").read_text()

    assert [extra for extra in project["optional-dependencies"] if f"`{extra}`" not in page] == []


def test_the_readme_is_shorter_than_120_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def test_every_picture_in_the_docs_is_made_by_the_browser_suite():
    header = (ROOT / "scripts" / "test-browser").read_text()
    suite = (ROOT / "tests" / "dashboard" / "test_browser.py").read_text()
    made = dict(re.findall(r"([\w-]+\.png) (?:is )?its ([\w-]+)\.png", header))

    assert sorted(made) == sorted(path.name for path in (ROOT / "docs").rglob("*.png"))
    assert [name for name in made.values() if f'"{name}")' not in suite] == []
