"""The launchers of the four documents: each of their variables is in the one table of settings.md."""

import re
from fnmatch import fnmatchcase

import pytest

from perdure.settings import process_environment, settings_page
from tests.checkout_paths import ROOT

SHARED = ROOT.parent / "shared"
DOCUMENTS = [*sorted(SHARED.glob("spec/*.txt")), SHARED / "REQUIREMENTS.md"]
NOT_VARIABLES = {
    *("ENGINE_ADDRESS", "TEST_CMD"),  # Python constants of document 001
    "FETCH_HEAD",
    *("ROLLOUT_ARGS", "RUN_ROOT", "SGLANG_ARGS"),  # document 002's script fills them itself
    *("AUTO_DELETE_MIN", "BIND_HOST"),  # the ends of TT_DAYTONA_... and ADAPTER_...
}
NAME = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b|\bCONFIG(?==)")


@pytest.fixture(scope="module")
def variables() -> set[str]:
    if not all(document.exists() for document in DOCUMENTS):
        pytest.skip("the four documents are not beside this checkout")
    found = {name for document in DOCUMENTS for name in NAME.findall(document.read_text())}
    return found - NOT_VARIABLES


def test_each_variable_of_the_documents_is_explained(variables: set[str]) -> None:
    """In the table, with what it sets or why it sets nothing, or used under its own name."""
    rows = [line for line in settings_page.page().splitlines() if line.startswith("| `")]
    table = {name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    own = [name for tool in process_environment.FOREIGN for name in tool.names]
    unexplained = {one for one in variables - table if not any(fnmatchcase(one, n) for n in own)}

    assert {"CONFIG", "HF_CHECKPOINT", "SWE_CLAUDE_CDN", "HOSTED_VLLM_API_BASE"} <= variables
    assert unexplained == set()
