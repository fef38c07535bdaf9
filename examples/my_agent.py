"""The smallest agent: one question to its model.

A task for it: `bridle init my-tasks --agent examples/my_agent.py`.
It finds its model as every client of OpenAI's API does, by OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import json
import os
import sys
import urllib.request


def ask(words: str) -> str:
    """Return the model's answer."""
    body = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": words}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {
            "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "content-type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
    return text


if __name__ == "__main__":
    sys.stdout.write(ask(sys.argv[1]) + "\n")
