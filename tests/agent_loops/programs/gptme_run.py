"""gptme's command line, which writes its tool calls as text."""

import os
import subprocess
import sys

from tasks import MODEL, OPENAI, QUESTIONS

environment = {
    **os.environ,
    "OPENAI_API_KEY": OPENAI["api_key"],
    "OPENAI_BASE_URL": OPENAI["base_url"],
}
command = [sys.executable, "-m", "gptme", "--non-interactive", "--no-confirm"]
command += ["--model", f"openai/{MODEL}", "--tools", "shell", "--no-stream", QUESTIONS[0]]
sys.exit(subprocess.run(command, env=environment, cwd=os.environ["HOME"], check=False).returncode)
