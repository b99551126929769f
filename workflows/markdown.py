"""Markdown for the details of the Web UI, in which agents, tests and engines have a say.

Their text is shown as inline code, of which no renderer makes a link, an image or HTML.
"""

from urllib.parse import quote

LONGEST = 200
"""Characters of one quoted text."""


def quoted(text: str, limit: int = LONGEST) -> str:
    """Any text as one line of inline code; empty if nothing of it can be shown."""
    shown = "".join(one if one.isprintable() else " " for one in text[: 4 * limit])
    line = " ".join(shown.replace("`", "'").split())
    if len(line) > limit or len(text) > 4 * limit:
        line = f"{line[: limit - 1]}…"
    return f"`{line}`" if line else ""


def escaped(text: str) -> str:
    """A name or number of ours, of which no character is markup."""
    return "".join(f"\\{one}" if one in r"\`*_[]<>&!|~" else one for one in text)


def of_workflow(label: str, namespace: str, workflow_id: str) -> str:
    """A link to the page of a workflow in this Web UI."""
    path = f"/namespaces/{quote(namespace, safe='')}/workflows/{quote(workflow_id, safe='')}"
    return of_page(label, path)


def of_page(label: str, address: str) -> str:
    """A link. `address` is made of a setting and of safe names."""
    return f"[{escaped(label)}](<{address}>)"
