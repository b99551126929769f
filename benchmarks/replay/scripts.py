"""The model's script: it inspects the toy bug for many turns, with each agent's own tools."""

from typing import Any, NamedTuple

from benchmarks import toy

LOOKS = (
    "ls",
    "cat README.md",
    "cat calc.py",
    "grep -rn return calc.py",
    f"{toy.PYTHON} -B -c 'from calc import add; print(add(2, 3))'",
    "git status --short",
    "wc -l calc.py README.md",
)
"""Commands that print the same in every sandbox."""
CLOCK = "date +%s.%N"
"""A command that prints something different in every sandbox, as test runners and `ls -l` do."""
FIX = "sed -i 's/return a - b/return a + b/' calc.py"
CHECK = f"{toy.PYTHON} -B -c 'from calc import add; assert add(2, 3) == 5'"
THOUGHT = "Before I change the sign I want to be sure that nothing else depends on it. Step {}."


Turn = dict[str, Any]


def call(tool: str, say: str, **arguments: Any) -> Turn:
    return {"content": say, "tool_calls": [{"name": tool, "arguments": arguments}]}


class Harness(NamedTuple):
    """An agent: its shell tool, that tool's argument, how it fixes the file, and how it ends."""

    agent: str
    shell: str
    argument: str
    read: Turn | None
    fix: Turn | None
    end: Turn

    def script(self, turns: int, clock_at: int | None) -> dict[str, Any]:
        """`turns` turns; the one at `clock_at` prints the time (None: no turn does)."""
        commands = [LOOKS[n % len(LOOKS)] for n in range(turns - 4)]
        if clock_at is not None:
            commands[clock_at - 1] = CLOCK
        steps = [self._run(THOUGHT.format(n), command) for n, command in enumerate(commands)]
        first = self.read or self._run("The file.", "cat calc.py")
        fix = self.fix or self._run("The sign.", FIX)
        check = self._run("Is it right?", CHECK)
        return {"default": {"turns": [first, *steps, fix, check, self.end]}}

    def _run(self, say: str, command: str) -> Turn:
        return call(self.shell, say, **{self.argument: command})


FILE = "/testbed/calc.py"
CLAUDE_CODE = Harness(
    agent="claude_code",
    shell="Bash",
    argument="command",
    read=call("Read", "The file.", file_path=FILE),
    fix=call("Edit", "The sign.", file_path=FILE, old_string="a - b", new_string="a + b"),
    end={"content": "add() adds its arguments now."},
)
CODEX = Harness(
    agent="codex",
    shell="exec_command",
    argument="cmd",
    read=None,
    fix=None,
    end={"content": "add() adds its arguments now."},
)
MINI_SWE_AGENT = Harness(
    agent="mini_swe_agent",
    shell="bash",
    argument="command",
    read=None,
    fix=None,
    end=call("bash", "Done.", command=f"echo {toy.DONE}"),
)
HARNESSES = {harness.agent: harness for harness in (CLAUDE_CODE, CODEX, MINI_SWE_AGENT)}
