"""R2E-Gym's agent by its published tool format: the loop, the four tools, and what they answer.

Written from R2E-Gym's repository of April 2025, because no registry has the package. Names, parameters,
limits and observations are the published ones; descriptions and the prompt are Perdure's.

It runs on the standard library in the sandbox, where Perdure is not installed. It reads a JSON file of
settings, and the prompt from standard input. Its last line is a JSON object, `perdure_end`.
"""

import ast
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

Message = dict[str, Any]

COMMAND_TIMEOUT_S = 90
MODEL_TRIES = 3
CONTEXT_FULL = "context_length_exceeded"
OUTPUT_LINES = 40
"""Of a longer output, the first and last lines are shown."""
MOST_CHARACTERS = 10_000
WHOLE_FILE_LINES = 110
"""A view of a longer file elides the bodies of its functions."""
ELIDED_LINES = 4
SNIPPET_LINES = 4
MOST_FILES = 100
BLOCKED = ("cd", "ipython", "jupyter", "pip", "nohup")

SYSTEM = "You are a programming agent. You resolve the issue of a repository with your functions."
TEXT_FORMAT = """

You have these functions:
{functions}

To call a function, end your answer with the call, in this format:

<function=example_function_name>
<parameter=example_parameter>value</parameter>
</function>

Each answer has your reasoning and exactly one call."""
FORGOTTEN = """
You forgot to use a function call in your response.
YOU MUST USE A FUNCTION CALL IN EACH RESPONSE.

IMPORTANT: YOU SHOULD NEVER ASK FOR HUMAN HELP.
"""
LAST_STEP = "You have reached the maximum number of steps. Please submit your answer NOW."
CALL = re.compile(r"<function\s*=\s*([^>]+)>(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter\s*=\s*([^>]+)>(.*?)</parameter>", re.DOTALL)


class ToolError(Exception):
    """The call cannot be done; the model reads why."""


def function(name: str, does: str, required: list[str], **parameters: Any) -> Message:
    schema = {"type": "object", "properties": parameters, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": does, "parameters": schema},
    }


def text(does: str, **more: Any) -> Message:
    return {"type": "string", "description": does, **more}


EDITS = ["view", "create", "str_replace", "insert", "undo_edit"]
TOOLS = [
    function(
        "file_editor",
        "Views, creates and edits files. A folder is listed two levels deep. `create` needs a new "
        "path. `undo_edit` reverts the last edit of a file.",
        ["command", "path"],
        command=text("What to do.", enum=EDITS),
        path=text("Absolute path of the file or folder."),
        file_text=text("For `create`: the content."),
        old_str=text("For `str_replace`: text that occurs exactly once in the file."),
        new_str=text("For `str_replace` and `insert`: the new text."),
        insert_line={
            "type": "integer",
            "description": "For `insert`: the line after which it goes.",
        },
        view_range={
            "type": "array",
            "items": {"type": "integer"},
            "description": "For `view`: first and last line; -1 is the end.",
        },
        concise={
            "type": "boolean",
            "description": "For `view`: elide the bodies of functions.",
        },
    ),
    function("execute_bash", "Runs a bash command.", ["cmd"], cmd=text("The command.")),
    function(
        "search",
        "Finds a term in the Python files of a folder, or in one file.",
        ["search_term"],
        search_term=text("The term."),
        path=text("The file or folder; the current folder by default."),
    ),
    function(
        "finish",
        "Ends the task.",
        ["command"],
        command=text("What to do.", enum=["submit"]),
        result=text("The result."),
    ),
]


class FileEditor:
    """The tool `file_editor`. It remembers each file's earlier contents, for `undo_edit`."""

    def __init__(self) -> None:
        self._before: dict[Path, list[str]] = {}

    def run(self, command: str = "", path: str = "", **given: Any) -> str:
        file = Path(path)
        if command not in EDITS:
            raise ToolError(f"Unrecognized command '{command}'. Allowed: {', '.join(EDITS)}.")
        if command == "create" and file.exists():
            raise ToolError(f"File already exists at: {file}. Cannot overwrite with 'create'.")
        if command != "create" and not file.exists():
            raise ToolError(f"The path '{file}' does not exist.")
        if command != "view" and file.is_dir():
            raise ToolError(f"The path '{file}' is a directory. Only 'view' can be used on it.")
        done: str = getattr(self, f"_{command}")(file, given)
        return done

    def _view(self, file: Path, given: Message) -> str:
        if file.is_dir():
            return clipped(f"Here's the files and directories in {file}:\n{listing(file)}")
        if file.suffix != ".py":
            raise ToolError(f"Viewing non-Python files is disallowed: '{file.name}'.")
        content, span = read(file), decoded(given.get("view_range"))
        lines = list(enumerate(content.splitlines(), 1))
        if span:
            lines = lines[slice(*within(span, len(lines)))]
        elif decoded(given.get("concise")) or len(lines) > WHOLE_FILE_LINES:
            lines = elided(content, lines)
        shown = "\n".join(f"{number:6d} {line}" for number, line in lines)
        return clipped(f"Here's the result of running `cat -n` on the file: {file}:\n{shown}")

    def _create(self, file: Path, given: Message) -> str:
        content = needed(given, "file_text")
        write(file, content)
        return f"File created at {file}. {numbered(content, str(file))}"

    def _str_replace(self, file: Path, given: Message) -> str:
        old, new, content = needed(given, "old_str"), given.get("new_str") or "", read(file)
        if (found := content.count(old)) != 1:
            how = "No" if not found else "Multiple"
            raise ToolError(f"{how} occurrences of '{old}' found in {file}: it must be unique.")
        first = content[: content.index(old)].count("\n")
        return self._edited(file, content, content.replace(old, new), first, new)

    def _insert(self, file: Path, given: Message) -> str:
        new, content = needed(given, "new_str"), read(file)
        lines, after = content.split("\n"), int(needed(given, "insert_line"))
        if not 0 <= after <= len(lines):
            raise ToolError(f"Invalid insert_line {after}. Must be in [0, {len(lines)}].")
        edited = "\n".join([*lines[:after], new, *lines[after:]])
        return self._edited(file, content, edited, after, new)

    def _undo_edit(self, file: Path, given: Message) -> str:
        if not self._before.get(file):
            raise ToolError(f"No previous edits found for {file} to undo.")
        before = self._before[file].pop()
        write(file, before)
        return f"Last edit to {file} undone successfully. {numbered(before, str(file))}"

    def _edited(self, file: Path, before: str, after: str, first: int, new: str) -> str:
        self._before.setdefault(file, []).append(before)
        write(file, after)
        start = max(0, first - SNIPPET_LINES)
        end = first + SNIPPET_LINES + new.count("\n") + 1
        snippet = "\n".join(after.split("\n")[start:end])
        return f"The file {file} has been edited. " + numbered(
            snippet, f"a snippet of {file}", start + 1
        )


def execute_bash(cmd: str = "") -> str:
    if not (words := cmd.split()):
        raise ToolError("Missing required parameter 'cmd'.")
    if words[0] in BLOCKED:
        return f"Exit code: 1\nBash command '{words[0]}' is not allowed. Please use another one."
    try:
        done = subprocess.run(
            ["bash", "-c", cmd],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"Exit code: -1\nThe command took too long to execute (>{COMMAND_TIMEOUT_S}s)"
    out, err = (part.decode("utf-8", "replace").strip() for part in (done.stdout, done.stderr))
    lines = f"[STDOUT]\n\n{out}\n\n[STDERR]\n\n{err}".splitlines()
    if len(lines) > 2 * OUTPUT_LINES:
        cut = "<Observation truncated in middle for saving context>"
        lines = [*lines[:OUTPUT_LINES], cut, *lines[-OUTPUT_LINES:]]
    shown = "\n".join(lines)
    return f"Exit code: {done.returncode}\nExecution output of [execute_bash]:\n{shown}"


def search(search_term: str = "", path: str = ".") -> str:
    place = Path(path).resolve()
    if not search_term or not place.exists():
        raise ToolError(f"Nothing to search for '{search_term}' in '{place}'.")
    if place.is_file():
        lines = enumerate(read(place).splitlines(), 1)
        found = [f"{number}:{line}" for number, line in lines if search_term in line]
        heading = f'Matches for "{search_term}" in {place}:'
    else:
        counts = {file: read(file).count(search_term) for file in python_files(place)}
        found = [f"{file} ({count} matches)" for file, count in counts.items() if count]
        heading = f'Found matches for "{search_term}" in {place}:'
    if len(found) > MOST_FILES and place.is_dir():
        return (
            f'More than {MOST_FILES} files matched for "{search_term}". Please narrow your search.'
        )
    listed = "\n".join([heading, *found])
    return clipped(listed) if found else f'No matches found for "{search_term}" in {place}'


def python_files(folder: Path) -> list[Path]:
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(root, name) for name in sorted(files) if name.endswith(".py")]
    return [file for file in found if file.is_file() and os.access(file, os.R_OK)]


def listing(folder: Path) -> str:
    """Folders and Python files up to two levels deep, without hidden ones."""
    paths = sorted((*folder.glob("*"), *folder.glob("*/*")))
    shown = [path for path in paths if path.is_dir() or path.suffix == ".py"]
    return "\n".join(
        str(path)
        for path in shown
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def elided(content: str, lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The lines without the bodies of longer functions."""
    try:
        tree = ast.parse(content)
    except SyntaxError as error:
        raise ToolError(f"Syntax error: {error}; view it with a view_range.") from None
    hidden, notes = set[int](), dict[int, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, last = node.body[0].lineno, node.body[-1].end_lineno or 0
            if last - first + 1 >= ELIDED_LINES and first not in hidden:
                hidden.update(range(first, last + 1))
                notes[first] = f"... eliding lines {first}-{last} ..."
    return [(n, notes.get(n, line)) for n, line in lines if n not in hidden or n in notes]


def within(span: Any, total: int) -> tuple[int, int]:
    """A view_range as a slice."""
    first, last = (int(number) for number in span)
    last = total if last == -1 else last
    if not 1 <= first <= last <= total:
        raise ToolError(f"Invalid view_range {span}: the file has lines 1 to {total}.")
    return first - 1, last


def numbered(content: str, what: str, first: int = 1) -> str:
    lines = enumerate(clipped(content).expandtabs().split("\n"), first)
    shown = "\n".join(f"{number:6}\t{line}" for number, line in lines)
    return f"Here's the result of running `cat -n` on {what}:\n{shown}\n"


def clipped(shown: str) -> str:
    return (
        shown if len(shown) <= MOST_CHARACTERS else shown[:MOST_CHARACTERS] + "<response clipped>"
    )


def needed(given: Message, name: str) -> Any:
    if given.get(name) is None:
        raise ToolError(f"Missing required parameter '{name}'.")
    return given[name]


def decoded(value: Any) -> Any:
    """A list or boolean, which the text format gives as a string."""
    return json.loads(value.lower()) if isinstance(value, str) else value


def read(file: Path) -> str:
    return file.read_bytes().decode("utf-8", "surrogateescape")


def write(file: Path, content: str) -> None:
    file.write_bytes(content.encode("utf-8", "surrogateescape"))


def run_tool(tools: dict[str, Callable[..., str]], name: str, arguments: Message) -> str:
    """What the model reads of a call."""
    if name not in tools:
        return f"Execution output of [{name}]:\nERROR: there is no such function"
    try:
        said = tools[name](**arguments)
    except (ToolError, OSError, TypeError, ValueError) as error:
        said = f"ERROR: {error}"
    return said if said.startswith("Exit code: ") else f"Execution output of [{name}]:\n{said}"


def requested(answer: Message, in_text: bool) -> tuple[str, Message]:
    """The first call of an answer; an empty name if it has none that can be read."""
    if in_text:
        found = CALL.search(answer.get("content") or "")
        if not found:
            return "", {}
        return found[1].strip(), {k.strip(): v.strip() for k, v in PARAMETER.findall(found[2])}
    try:
        called = answer["tool_calls"][0]["function"]
        arguments = json.loads(called["arguments"])
    except (KeyError, IndexError, TypeError, ValueError):
        return "", {}
    return (called["name"], arguments) if isinstance(arguments, dict) else ("", {})


class Model:
    def __init__(self, url: str, headers: dict[str, str], timeout_s: float, body: Message) -> None:
        self._url, self._headers, self._timeout_s, self._body = url, headers, timeout_s, body

    def answer(self, messages: list[Message]) -> tuple[Message, int]:
        """The next message, and the tokens of the conversation with it. Raises: HTTPError, OSError."""
        body = json.dumps({**self._body, "messages": messages}).encode()
        for left in reversed(range(MODEL_TRIES)):
            call = urllib.request.Request(self._url, body, self._headers)
            try:
                with urllib.request.urlopen(call, timeout=self._timeout_s) as response:
                    told = json.load(response)
                return told["choices"][0]["message"], told["usage"]["total_tokens"]
            except urllib.error.HTTPError as error:
                if error.code < 500 or not left:
                    raise
            except OSError:
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")


def work(model: Model, prompt: str, settings: Message) -> str:
    """Run the loop until it ends. Returns R2E-Gym's name of the reason."""
    in_text = not settings["use_fn_calling"]
    system = SYSTEM
    if in_text:
        functions = "\n".join(json.dumps(tool["function"]) for tool in TOOLS)
        system += TEXT_FORMAT.format(functions=functions)
    messages: list[Message] = [
        {"role": "system", "content": system},
        {"role": "user", "content": prompt},
    ]
    tools: dict[str, Callable[..., str]] = {
        "file_editor": FileEditor().run,
        "execute_bash": execute_bash,
        "search": search,
    }
    for step in range(settings["max_steps_absolute"]):
        left = settings["max_steps"] - step
        messages[-1]["content"] += f"\n{f'Steps Remaining: {left}' if left > 0 else LAST_STEP}"
        answer, tokens = model.answer(messages)
        if calls := answer.get("tool_calls"):
            answer = {**answer, "tool_calls": calls[:1]}
        messages.append(answer)
        name, arguments = requested(answer, in_text)
        if name == "finish":
            return "agent"
        if tokens >= settings["max_token_limit"]:
            return "token_limit"
        said = run_tool(tools, name, arguments) if name else FORGOTTEN
        if calls and not in_text:
            made = {"name": calls[0]["function"]["name"], "tool_call_id": calls[0]["id"]}
            messages.append({"role": "tool", "content": said, **made})
        else:
            messages.append({"role": "user", "content": said})
    return "abs_step_limit"


def main(settings: Message, prompt: str) -> None:
    key = os.environ.pop("PERDURE_SESSION_KEY")
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    body = {**settings["body"], **({"tools": TOOLS} if settings["use_fn_calling"] else {})}
    model = Model(settings["url"], {**headers, **settings["headers"]}, settings["timeout_s"], body)
    status = error = ""
    try:
        status = work(model, prompt, settings)
    except urllib.error.HTTPError as refused:  # `perdure_end` reports it
        error = f"HTTP {refused.code}: {refused.read().decode('utf-8', 'replace')[:1000]}"
        status = "token_limit" if CONTEXT_FULL in error else ""
    except OSError as raised:
        error = f"{type(raised).__name__}: {raised}"
    sys.stdout.write(json.dumps({"kind": "perdure_end", "status": status, "error": error}) + "\n")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.stdin.read())
