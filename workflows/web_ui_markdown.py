"""Markdown for the details in the Web UI, which contain untrusted text of agents, tests and
engines.

That text is shown as inline code, so that no renderer turns it into a link, an image or HTML.
"""

from urllib.parse import quote

LONGEST = 200
"""Maximum characters of one quoted text."""


def quoted(text: str, limit: int = LONGEST) -> str:
    """Any text as one line of inline code; empty if it has no printable character."""
    shown = "".join(one if one.isprintable() else " " for one in text[: 4 * limit])
    line = " ".join(shown.replace("`", "'").split())
    if len(line) > limit or len(text) > 4 * limit:
        line = f"{line[: limit - 1]}…"
    return f"`{line}`" if line else ""


def escaped(text: str) -> str:
    """A trusted name or number, with its Markdown characters escaped."""
    return "".join(f"\\{one}" if one in r"\`*_[]<>&!|~" else one for one in text)


def of_workflow(label: str, namespace: str, workflow_id: str) -> str:
    """A link to a workflow's page in this Web UI."""
    path = f"/namespaces/{quote(namespace, safe='')}/workflows/{quote(workflow_id, safe='')}"
    return of_page(label, path)


def of_list(label: str, namespace: str, query: str) -> str:
    """A link to a list of workflows in this Web UI. `query`: a list filter of safe names."""
    path = f"/namespaces/{quote(namespace, safe='')}/workflows?query={quote(query, safe='')}"
    return of_page(label, path)


def of_page(label: str, address: str) -> str:
    """A link. `address` consists of a setting and of safe names."""
    return f"[{escaped(label)}](<{address}>)"
