import pytest

from bridle.scripted.engine import find_shell, shell_arguments

TEXT = {"type": "string"}


def tool(name, properties, required=(), **more):
    schema = {"type": "object", "properties": properties, "required": list(required), **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def arguments(one, command="ls -l"):
    found = find_shell([one])
    assert found is not None
    return shell_arguments(found, command)


FLAG = {"type": "boolean"}
RISK = {"type": "string", "enum": ["LOW", "HIGH"]}
TEXTS = {"type": "array", "items": TEXT}
NUMBER = {"type": "integer"}
ONE = {"type": "object", "properties": {"command": TEXT, "n": NUMBER}, "required": ["command", "n"]}
ODD = {
    "command": TEXT,
    "timeout_ms": NUMBER,
    "wait": {"type": "number", "minimum": 3},
    "timeout": {"type": "integer", "description": "in seconds"},
    "env": {"type": "array"},
    "mode": {"const": "sync"},
    "level": {"default": 7},
    "box": {"type": "object", "properties": {"on": FLAG}, "required": ["on"]},
}
READ = tool("read_file", {"path": TEXT}, ["path"])


@pytest.mark.parametrize(
    ("shell", "expected"),
    [
        # mini-swe-agent, pi: one string.
        (tool("bash", {"command": TEXT, "timeout": NUMBER}, ["command"]), {"command": "ls -l"}),
        # Claude Code: a description beside it.
        (tool("Bash", {"command": TEXT, "description": TEXT}, ["command", "description"]),
         {"command": "ls -l", "description": "Run a command"}),
        # Qwen Code: a required flag.
        (tool("run_shell_command", {"command": TEXT, "is_background": FLAG},
              ["command", "is_background"]),
         {"command": "ls -l", "is_background": False}),
        # Codex, present and older.
        (tool("exec_command", {"cmd": TEXT, "workdir": TEXT}, ["cmd", "workdir"]),
         {"cmd": "ls -l", "workdir": "."}),
        (tool("shell", {"command": TEXTS}, ["command"]), {"command": ["bash", "-lc", "ls -l"]}),
        # Cline: a list of whole commands.
        (tool("run_commands", {"commands": TEXTS}, ["commands"]), {"commands": ["ls -l"]}),
        # OpenHands: a risk to choose.
        (tool("terminal", {"command": TEXT, "security_risk": RISK}, ["command", "security_risk"]),
         {"command": "ls -l", "security_risk": "LOW"}),
        (tool("shell", {"command": {"anyOf": [{"type": "null"}, TEXT]}}, ["command"]),
         {"command": "ls -l"}),
        (tool("shell", {"command": {"type": ["null", "string"]}}, ["command"]),
         {"command": "ls -l"}),
        (tool("sh", {"commands": {"type": "array", "items": {"$ref": "#/$defs/One"}}}, ["commands"],
              **{"$defs": {"One": ONE}}),
         {"commands": [{"command": "ls -l", "n": 0}]}),
        (tool("bash", ODD, list(ODD)),
         {"command": "ls -l", "timeout_ms": 120_000, "wait": 3, "timeout": 120, "env": [],
          "mode": "sync", "level": 7, "box": {"on": False}}),
    ],
)  # fmt: skip
def test_a_harnesss_own_shell_tool_gets_arguments_of_its_schema(shell, expected):
    assert find_shell([READ, shell]) == shell["function"]
    assert arguments(shell) == expected


def test_an_exact_name_wins_over_a_telling_one_and_that_over_a_schema():
    by_schema = tool("do_it", {"command": TEXT}, ["command"])
    telling = tool("my_shell_thing", {"command": TEXT})
    exact = tool("Bash", {"command": TEXT})
    assert find_shell([by_schema, telling, exact]) == exact["function"]
    assert find_shell([by_schema, telling]) == telling["function"]
    assert find_shell([by_schema]) == by_schema["function"]


def test_a_tool_without_a_command_is_no_shell():
    output = tool("BashOutput", {"bash_id": TEXT}, ["bash_id"])
    kill = tool("shell", {"command": {"type": "integer"}})
    optional = tool("deploy", {"command": TEXT})
    assert find_shell([READ, output, kill, optional]) is None
    assert find_shell([]) is None
    assert find_shell([{"type": "web_search"}, {"function": {"name": 3}}]) is None
    assert find_shell([{"name": "bash", "parameters": "none"}]) is None


def test_tools_may_come_without_their_wrapper():
    flat = {"name": "bash", "input_schema": {"properties": {"command": TEXT}}}
    assert arguments(flat) == {"command": "ls -l"}


def test_a_reference_to_nothing_is_a_text():
    assert arguments(tool("bash", {"command": {"$ref": "#/$defs/Gone"}}, ["command"])) == {
        "command": "ls -l"
    }
