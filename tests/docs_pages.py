"""Code that the pages of docs/ print, so that tests run what a reader copies."""

import re

from tests.checkout_paths import ROOT


def block(page: str, kind: str) -> str:
    """The one fenced block of this kind on a page of docs/."""
    text = (ROOT / "docs" / page).read_text()
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    code: str = found
    return code


def agent_rows() -> dict[str, str]:
    """The rows of the table of docs/agents.md, by agent."""
    text = (ROOT / "docs" / "agents.md").read_text()
    return {row[1]: row[0] for row in re.finditer(r"^\|`(\w+)`\|.*\|$", text, re.MULTILINE)}
