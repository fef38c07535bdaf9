"""The demo model is made once, and found afterwards."""

from examples.demo.model import demo_model
from examples.demo.recipe import recipe_digest


def test_a_cached_demo_model_is_reused_unchanged(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path))
    folder = tmp_path / "demo-model" / recipe_digest()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")

    assert demo_model() == folder
    assert (folder / "config.json").read_text() == "{}"
