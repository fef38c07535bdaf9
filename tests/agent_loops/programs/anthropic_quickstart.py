"""The loop of Anthropic's quickstarts; argument: `coding` (bash, editor) or `computer`.

Its requests have the shape of those of the quickstarts' sampling loop: a beta header, a system
prompt in blocks, the content of a reply sent back block by block, results as lists of blocks, and
only the newest screenshots.
"""

import base64
import struct
import subprocess
import sys
import zlib
from pathlib import Path

from anthropic import Anthropic
from tasks import ANTHROPIC, MODEL

EDITOR = "str_replace_based_edit_tool"
CODING = [
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": EDITOR},
]
DISPLAY = {"display_width_px": 1024, "display_height_px": 768, "display_number": 1}
COMPUTER = [{"type": "computer_20250124", "name": "computer", **DISPLAY}, *CODING]
KEPT, AT_LEAST = 2, 2
"""So many screenshots are sent, and so many are removed at a time."""


def main(kind):
    tools = {"coding": CODING, "computer": COMPUTER}[kind]
    client = Anthropic(**ANTHROPIC)
    messages = [{"role": "user", "content": [{"type": "text", "text": f"Do the {kind}."}]}]
    while True:
        drop_old_screenshots(messages)
        mark_for_the_cache(messages)
        answer = client.beta.messages.with_raw_response.create(
            model=MODEL,
            max_tokens=2000,
            system=[{"type": "text", "text": "You use a computer.", **CACHED}],
            tools=tools,
            messages=messages,
            betas=["computer-use-2025-01-24"],
            extra_body={"thinking": {"type": "enabled", "budget_tokens": 1024}},
        )
        content = [sent_back(block) for block in answer.parse().content]
        messages.append({"role": "assistant", "content": content})
        calls = [block for block in content if block["type"] == "tool_use"]
        if not calls:
            print(content[-1]["text"])
            return
        messages.append({"role": "user", "content": [result_of(call) for call in calls]})


CACHED = {"cache_control": {"type": "ephemeral"}}


def mark_for_the_cache(messages):
    """Mark the last three user messages, and no others."""
    marks = 3
    for message in reversed([one for one in messages if one["role"] == "user"]):
        message["content"][-1].pop("cache_control", None)
        if marks:
            message["content"][-1].update(CACHED)
            marks -= 1


def drop_old_screenshots(messages):
    results = [
        block
        for message in messages
        for block in message["content"]
        if block["type"] == "tool_result" and isinstance(block["content"], list)
    ]
    images = sum(part["type"] == "image" for result in results for part in result["content"])
    surplus = max(0, images - KEPT)
    surplus -= surplus % AT_LEAST
    for result in results:
        kept = []
        for part in result["content"]:
            if part["type"] == "image" and surplus:
                surplus -= 1
            else:
                kept.append(part)
        result["content"] = kept


def sent_back(block):
    match block.type:
        case "text":
            return {"type": "text", "text": block.text}
        case "thinking":
            return {"type": "thinking", "thinking": block.thinking, "signature": block.signature}
        case _:
            return block.model_dump()


def result_of(call):
    """The result of a call; a failed one is an error with its text as plain content."""
    answer = {"type": "tool_result", "tool_use_id": call["id"], "is_error": False}
    if call["name"] == "computer":
        said = [{"type": "text", "text": call["input"]["action"]}, screenshot(call["id"])]
    elif call["name"] == "bash":
        command = ["bash", "-c", call["input"]["command"]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {**answer, "is_error": True, "content": done.stderr}
        said = [{"type": "text", "text": done.stdout}]
    else:
        said = [{"type": "text", "text": edited(**call["input"])}]
    return {**answer, "content": said}


def edited(command, path, file_text="", old_str="", new_str=""):
    file = Path(path)
    if command == "create":
        file.write_text(file_text)
    elif command == "str_replace":
        file.write_text(file.read_text().replace(old_str, new_str))
    return file.read_text()


def screenshot(seed):
    """A picture of one pixel, whose colour is that of the call."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    pixel = zlib.compress(b"\0" + zlib.crc32(seed.encode()).to_bytes(4)[:3])
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", pixel) + chunk(b"IEND", b"")
    source = {"type": "base64", "media_type": "image/png"}
    return {"type": "image", "source": {**source, "data": base64.b64encode(data).decode()}}


main(sys.argv[1])
