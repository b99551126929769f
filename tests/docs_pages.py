"""Code that the pages of docs/ print, so that tests run what a reader copies."""

import re

from tests.checkout_paths import ROOT


def block(page: str, kind: str) -> str:
    """The one fenced block of this kind on a page of docs/."""
    text = (ROOT / "docs" / page).read_text()
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    code: str = found
    return code
