"""`import bridle` is cheap: it loads no heavy package."""

import subprocess
import sys

HEAVY = {
    *("torch", "ray", "transformers", "tokenizers", "renderers", "numpy", "pyarrow"),
    *("aiohttp", "httpx", "uvloop", "pydantic", "typer", "rich", "jinja2", "asyncio"),
    *("openai", "anthropic", "google"),
}


def fresh_interpreter(code):
    """The output of `code` in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=15
    )
    return done.stdout


def test_importing_bridle_loads_no_heavy_package():
    """Compared with a bare interpreter, whose site packages may load something at start-up."""
    code = "import sys; {}print(*{{name.partition('.')[0] for name in sys.modules}})"
    bare = fresh_interpreter(code.format(""))
    loaded = fresh_interpreter(code.format("import bridle; "))
    assert "bridle" in loaded.split()
    assert not (set(loaded.split()) - set(bare.split())) & HEAVY
