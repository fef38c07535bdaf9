"""`import bridle` is cheap: it loads no heavy package and costs next to nothing."""

import subprocess
import sys
import time

HEAVY = {
    *("torch", "ray", "transformers", "tokenizers", "renderers", "numpy", "pyarrow"),
    *("aiohttp", "httpx", "uvloop", "pydantic", "typer", "rich", "jinja2", "asyncio"),
    *("openai", "anthropic", "google"),
}


def fresh_interpreter(code):
    """The output and wall seconds of `code` in a new interpreter."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=15
    )
    return done.stdout, time.perf_counter() - started


def test_importing_bridle_loads_no_heavy_package():
    """Compared with a bare interpreter, whose site packages may load something at start-up."""
    code = "import sys; {}print(*{{name.partition('.')[0] for name in sys.modules}})"
    bare, _ = fresh_interpreter(code.format(""))
    loaded, _ = fresh_interpreter(code.format("import bridle; "))
    assert "bridle" in loaded.split()
    assert not (set(loaded.split()) - set(bare.split())) & HEAVY


def test_importing_bridle_takes_under_150_ms(record_property):
    """The best of five, since a busy machine only ever adds time; reported in the test report."""
    code = "import time; t = time.perf_counter(); import bridle; print(time.perf_counter() - t)"
    import_s = min(float(fresh_interpreter(code)[0]) for _ in range(5))
    record_property("import_bridle_ms", round(import_s * 1000, 2))
    assert import_s < 0.150
