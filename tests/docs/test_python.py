"""The Python programs of the README and of the Python guide run as they stand.

A small server in vLLM's shape stands for the reader's: its address and the model's folder are the
only words that are replaced.
"""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bridle.config import builtin_tokenizer_dir
from bridle.scripted.server import EngineServer
from bridle.testing import scripted_engine

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs/guides/python.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
async def test_the_python_program_of_a_docs_page_prints_rewards(page, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    async with EngineServer(scripted_engine([{"content": "4"}])) as server:
        program = "\n".join(blocks).replace("http://127.0.0.1:8000", server.url)
        program = program.replace("path/to/model", str(builtin_tokenizer_dir()))
        (tmp_path / "program.py").write_text(program)
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "program.py"], cwd=tmp_path, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]" in done.stdout
