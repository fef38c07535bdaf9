"""One piece of work of ten turns, said in each program's own tools.

What it touches is what breaks captures: white space around text, arguments whose JSON is spaced and
escaped as no library writes it, text beyond ASCII, calls side by side, commands that fail, outputs
that the program cuts, turns without text, turns without reasoning.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Turn = dict[str, Any]


@dataclass(frozen=True)
class Tools:
    """The tools of one program: each gives a tool call."""

    run: Callable[[str], Turn]
    write: Callable[[str, str], Turn] | None = None
    read: Callable[[str], Turn] | None = None
    edit: Callable[[str, str, str], Turn] | None = None


def tool(name: str, /, *, wide: bool = False, **arguments: Any) -> Turn:
    """A call. `wide`: its JSON has spaces and line ends, and escapes all that is not ASCII."""
    if not wide:
        return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    text = json.dumps(arguments, indent=3, separators=(" ,", " : "), ensure_ascii=True)
    return {"name": name, "arguments": text}


def _claude(shell: str, write: str, read: str, edit: str) -> Tools:
    return Tools(
        run=lambda command: tool(shell, command=command),
        write=lambda path, text: tool(write, wide=True, file_path=path, content=text),
        read=lambda path: tool(read, file_path=path),
        edit=lambda path, old, new: tool(
            edit,
            wide=True,
            file_path=path,
            old_string=old,
            new_string=new,
            **({"instruction": "Change the word."} if edit == "replace" else {}),
        ),
    )


TOOLS: dict[str, Tools] = {
    "claude_agent_sdk": _claude("Bash", "Write", "Read", "Edit"),
    "claude_code": _claude("Bash", "Write", "Read", "Edit"),
    "cline": Tools(
        run=lambda command: tool("run_commands", commands=[command]),
        write=lambda path, text: tool("editor", wide=True, path=path, new_text=text),
        read=lambda path: tool("read_files", files=[{"path": path}]),
        edit=lambda path, old, new: tool(
            "editor", wide=True, path=path, old_text=old, new_text=new
        ),
    ),
    "codex": Tools(run=lambda command: tool("exec_command", cmd=command)),
    "copilot": Tools(
        run=lambda command: tool("bash", command=command, description="Run it"),
        write=lambda path, text: tool("create", wide=True, path=path, file_text=text),
        read=lambda path: tool("view", path=path),
        edit=lambda path, old, new: tool("edit", wide=True, path=path, old_str=old, new_str=new),
    ),
    "gemini_cli": _claude("run_shell_command", "write_file", "read_file", "replace"),
    "google_adk": Tools(run=lambda command: tool("bash", command=command)),
    "hermes": Tools(
        run=lambda command: tool("terminal", command=command),
        write=lambda path, text: tool("write_file", wide=True, path=path, content=text),
        read=lambda path: tool("read_file", path=path),
        edit=lambda path, old, new: tool(
            "patch", wide=True, mode="replace", path=path, old_string=old, new_string=new
        ),
    ),
    "mini_swe_agent": Tools(run=lambda command: tool("bash", command=command)),
    "openai_agents": Tools(run=lambda command: tool("bash", command=command)),
    "openclaw": Tools(
        run=lambda command: tool("exec", command=command),
        write=lambda path, text: tool("write", wide=True, path=path, content=text),
        read=lambda path: tool("read", path=path),
        edit=lambda path, old, new: tool(
            "edit", wide=True, path=path, edits=[{"oldText": old, "newText": new}]
        ),
    ),
    "opencode": Tools(
        run=lambda command: tool("bash", command=command),
        write=lambda path, text: tool("write", wide=True, filePath=path, content=text),
        read=lambda path: tool("read", filePath=path),
        edit=lambda path, old, new: tool(
            "edit", wide=True, filePath=path, oldString=old, newString=new
        ),
    ),
    "openhands": Tools(
        run=lambda command: tool("terminal", command=command),
        write=lambda path, text: tool(
            "file_editor", wide=True, command="create", path=path, file_text=text
        ),
        read=lambda path: tool("file_editor", command="view", path=path),
        edit=lambda path, old, new: tool(
            "file_editor", wide=True, command="str_replace", path=path, old_str=old, new_str=new
        ),
    ),
    "pi": Tools(
        run=lambda command: tool("bash", command=command),
        write=lambda path, text: tool("write", wide=True, path=path, content=text),
        read=lambda path: tool("read", path=path),
        edit=lambda path, old, new: tool(
            "edit", wide=True, path=path, edits=[{"oldText": old, "newText": new}]
        ),
    ),
    "qwen_code": _claude("run_shell_command", "write_file", "read_file", "edit"),
}

NOTES = 'tab\there, "quotes", back\\slash, {{braces}}, ünï 漢字 🙂\n\n  indented & <b>'
CHANGED = NOTES.replace("ünï 漢字", "ß → \u00a0end")
TEN = 10
MINI_ENDS = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def tools_of(harness: str, dialect: str = "") -> Tools:
    """The program's tools; with Responses, Cline has another for files."""
    found = TOOLS[harness]
    if (harness, dialect) == ("cline", "openai_responses"):
        return replace(found, write=_patch_new, edit=_patch)
    return found


def ten_turns(harness: str, folder: str, dialect: str = "", *, lines: int = 9000) -> list[Turn]:
    """The turns; files lie in `folder`, an absolute path. One prints so many lines."""
    tools = tools_of(harness, dialect)
    notes, wide = f"{folder}/notes.txt", f"{folder}/a dir/ünï.txt"
    write = tools.write or _by_shell_write(tools)
    read = tools.read or (lambda path: tools.run(f"cat '{path}'"))
    edit = tools.edit or _by_shell_edit(tools)
    return [
        {
            "reasoning": "\n A folder first;\n\tits name has a space. ",
            "content": "  I make a folder.\n\n ",
            "tool_calls": [
                tools.run(f"mkdir -p '{folder}/a dir' && printf 'é\\t🙂\\n' > '{wide}'")
            ],
        },
        {"content": "The notes:\n", "tool_calls": [write(notes, NOTES)]},
        {"reasoning": "Are they right?", "tool_calls": [read(notes)]},
        {"content": "One change.", "tool_calls": [edit(notes, "ünï 漢字", "ß → \u00a0end")]},
        {
            "reasoning": "Two things at once.",
            "content": "Both…",
            "tool_calls": [read(notes), tools.run(f"wc -c < '{wide}' | tr -d ' '")],
        },
        {"tool_calls": [tools.run("ls /no/such/folder; echo 'on stderr' >&2; (exit 3)")]},
        {"content": "Long:", "tool_calls": [tools.run(f"seq 1 {lines} | sed 's/$/ — ü/'")]},
        {"reasoning": "Nothing to say.", "tool_calls": [tools.run("true")]},
        {
            "content": '```json\n{"not": "a call", "name": "x"}\n```',
            "tool_calls": [tools.run(f"cp '{notes}' '{folder}/a dir/copy.txt'")],
        },
        _last(harness),
    ]


def the_files_are_right() -> str:
    """A shell command that exits 0 if the work was done."""
    return (
        f"printf %s {_quoted(CHANGED)} | cmp - notes.txt && cmp notes.txt 'a dir/copy.txt' && "
        f"printf 'é\\t🙂\\n' | cmp - 'a dir/ünï.txt'"
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _last(harness: str) -> Turn:
    if harness == "mini_swe_agent":
        return {"content": "Done.", "tool_calls": [TOOLS[harness].run(MINI_ENDS)]}
    if harness == "openhands":
        return {"tool_calls": [tool("finish", message="It is done.")]}
    return {"reasoning": "All is there.", "content": "It is done.\n"}


def _patch_new(path: str, text: str) -> Turn:
    added = "".join(f"+{line}\n" for line in text.splitlines())
    patch = f"*** Begin Patch\n*** Add File: {path}\n{added}*** End Patch"
    return tool("apply_patch", wide=True, input=patch)


def _patch(path: str, old: str, new: str) -> Turn:
    line = next(line for line in NOTES.splitlines() if old in line)
    lines = f"@@\n-{line}\n+{line.replace(old, new)}\n"
    patch = f"*** Begin Patch\n*** Update File: {path}\n{lines}*** End Patch"
    return tool("apply_patch", wide=True, input=patch)


def _by_shell_write(tools: Tools) -> Callable[[str, str], Turn]:
    return lambda path, text: tools.run(f"printf %s {_quoted(text)} > '{path}'")


def _by_shell_edit(tools: Tools) -> Callable[[str, str, str], Turn]:
    return lambda path, old, new: tools.run(f"sed -i 's/{old}/{new}/' '{path}'")
