"""Diffs as git writes them, made without git where that is easy: hundreds are needed."""

from perdure.testing.grader_contract import Edits, diff_of

_CONTEXT = 3


def appended(path: str, before: str, added: str) -> bytes:
    """The diff that adds lines to the end of a text file."""
    old, new = before.splitlines(), added.splitlines()
    context = old[-_CONTEXT:]
    start = len(old) - len(context) + 1
    head = f"@@ -{start},{len(context)} +{start},{len(context) + len(new)} @@\n"
    if not old:
        head = f"@@ -0,0 +1,{len(new)} @@\n"
    lines = [*(f" {line}" for line in context), *(f"+{line}" for line in new)]
    return f"diff --git a/{path} b/{path}\nindex 1234567..89abcde 100644\n--- a/{path}\n+++ b/{path}\n{head}{_ended(lines)}".encode()


def added(path: str, content: str, mode: str = "100644") -> bytes:
    """The diff that makes a text file; without a newline at its end if it has none."""
    head = f"diff --git a/{path} b/{path}\nnew file mode {mode}\nindex 0000000..1234567\n"
    if not content:
        return head.encode()
    lines = [f"+{line}" for line in content.splitlines()]
    text = _ended(lines) + ("" if content.endswith("\n") else "\\ No newline at end of file\n")
    return f"{head}--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n{text}".encode()


def edited(edits: Edits, base: Edits) -> bytes:
    """The diff of these edits; files of the base that they do not name are not looked at."""
    made = [_simple(path, content, base) for path, content in edits.items()]
    if all(part is not None for part in made):
        return b"".join(part for part in made if part is not None)
    return diff_of(edits, {"kept": "", **{path: base[path] for path in edits if path in base}})


def _simple(path: str, content: str | bytes | None, base: Edits) -> bytes | None:
    """None: only git can write it well."""
    plain = isinstance(content, str) and path.isascii() and not path.isspace()
    if not plain or not isinstance(content, str) or path in base or "\r" in content:
        return None
    if content.startswith("-> "):
        return added(path, content.removeprefix("-> "), "120000")
    return added(path, content)


def _ended(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
