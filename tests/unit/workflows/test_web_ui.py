"""The details in the Web UI, and that untrusted text in them stays text."""

import pytest
from markdown_it import MarkdownIt

from perdure.errors import Boundary
from perdure.types import EpisodeRef, Failure, Outcome, RolloutStatus, RunStatus
from tests.hostile_text import CORPUS
from workflows import outcome_summary, web_ui_markdown
from workflows.web_ui import ChildrenPage, Links, RolloutPage, ShardsPage

HOSTILE = [
    "![x](http://evil.example/x.png)",
    "[click](javascript:alert(1))",
    "<img src=x onerror=alert(1)>",
    "</code><script>alert(1)</script>",
    "`<b>out</b>`",
    "``` \n<b>out</b>\n```",
    "``a`` ![x](http://evil.example/x.png)",
    "line\n\n# heading\n\n[x]: http://evil.example",
    "\u202egnp.x\u202c <http://evil.example>",
    "https://evil.example/auto www.evil.example",
    "| cell | [x](http://evil.example) |",
    "\\` [x](http://evil.example) `",
    "\x1b]8;;http://evil.example\x07text\x1b]8;;\x07",
    "&lt;img&gt; &#60;img src=x&#62;",
    "a" * 10_000 + "`![x](http://evil.example)",
]


def _links(text: str) -> list[str]:
    """Where an HTML-preserving renderer leads to: links, and "HTML" or "image" if there is one."""
    found = []
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    for token in (*tokens, *inline):
        if token.type == "link_open":
            found.append(str(token.attrGet("href")))
        elif token.type in ("html_inline", "html_block", "image"):
            found.append(token.type)
    return found


@pytest.mark.parametrize("text", [*HOSTILE, *CORPUS])
def test_text_of_strangers_is_shown_as_it_is(text: str) -> None:
    """It yields no link, image or HTML, alone, in a list or in a table, and its length is
    limited."""
    shown = web_ui_markdown.quoted(text)

    for around in ("{}", "- the agent's last line: {}", "| a |\n|---|\n| {} |"):
        assert _links(around.format(shown)) == []
    assert "\n" not in shown
    assert len(shown) <= web_ui_markdown.LONGEST + 2
    assert shown.isprintable()


def test_names_with_markup_in_them_are_shown_as_they_are() -> None:
    """`__init__` is not rendered in bold."""
    html = MarkdownIt().render(web_ui_markdown.escaped("pallets__flask-4992 __init__ *x*"))

    assert html == "<p>pallets__flask-4992 __init__ *x*</p>\n"


def _episode(number: int, outcome: Outcome | None = Outcome.RESOLVED) -> EpisodeRef:
    failed = Failure(boundary=Boundary.SANDBOX, type="SandboxLost", message="gone")
    return EpisodeRef(
        uri="",
        instance_id=f"django__django-{number}",
        sample_index=0,
        agent="nop",
        status=RolloutStatus.GRADED if outcome else RolloutStatus.FAILED,
        outcome=outcome,
        reward=None if outcome is None else float(outcome is Outcome.RESOLVED),
        turns=12,
        tokens=31_234,
        failure=None if outcome else failed,
    )


def _page(total: int, viewer: str = "") -> ChildrenPage:
    class Unshown(ChildrenPage):
        def show(self) -> None:
            """Outside of a workflow there are no current details."""

    return Unshown("r1", "**r1**", total, Links("default", viewer))


def test_a_verdict_is_one_line() -> None:
    """The line has outcome, reward, turns and tokens, or a failure instead of a reward."""
    assert outcome_summary.of_episode(_episode(1, Outcome.UNRESOLVED)) == (
        "unresolved · 0.0 · 12 turns · 31k tokens"
    )
    assert outcome_summary.of_episode(_episode(1, None)) == (
        "failed · sandbox: SandboxLost · 12 turns · 31k tokens"
    )


def test_a_run_of_5500_lists_the_worst_and_the_last() -> None:
    """It has total counts, and links to the ten worst and the ten last rollouts, in a few
    kilobytes."""
    page = _page(5_500)
    for number in range(5_500):
        outcome = None if number == 7 else Outcome.UNRESOLVED if number % 2 else Outcome.RESOLVED
        page.add(_episode(number, outcome))
    text = page.text()
    links = _links(text)

    assert "5500 of 5500 rollouts have ended: failed 1, resolved 2750, unresolved 2749" in text
    assert links[0] == "/namespaces/default/workflows/rollout%2Fr1%2Fdjango__django-7%2F0"
    assert links[10].endswith("django__django-5499%2F0")
    assert len(links) == 20
    assert len(text) < 6_000


def test_a_small_run_lists_each_rollout_once() -> None:
    """One table without a title lists the worst first, and there is none before a rollout has
    ended."""
    page = _page(3)
    assert "|" not in page.text()
    for number, outcome in enumerate((Outcome.RESOLVED, None, Outcome.UNRESOLVED)):
        page.add(_episode(number, outcome))
    text = page.text()

    assert [link[-5] for link in _links(text)] == ["1", "2", "0"]
    assert "The worst" not in text
    assert "The last" not in text


def test_a_failure_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed attempt gives the full reason, and the end of the rollout does not repeat it."""
    shown: list[str] = []
    monkeypatch.setattr("workflows.web_ui.workflow.set_current_details", shown.append)
    for name in ("upsert_search_attributes", "upsert_memo"):
        monkeypatch.setattr(f"workflows.web_ui.workflow.{name}", lambda _: None)
    page = RolloutPage()
    message = "no instance: " + "it has others, " * 20 + "`perdure instances build` adds it"
    failure = Failure(boundary=Boundary.INSTANCE, type="InstanceError", message=message)
    page.lost(1, failure)
    page.close(_episode(1, None).model_copy(update={"failure": failure}))

    assert shown[-1].count("'perdure instances build' adds it") == 1
    assert "- ended as **failed**, reward: none\n" in shown[-1]

    other = RolloutPage()
    other.close(_episode(1, None).model_copy(update={"failure": failure}))
    assert "reward: none, instance: `no instance" in shown[-1]


def test_a_child_links_to_the_viewer_where_one_is_known() -> None:
    """The link is next to the one to the child's own page."""
    page = _page(1, "http://127.0.0.1:8700")
    page.add(_episode(1))

    assert _links(page.text())[-1] == "http://127.0.0.1:8700/runs/r1/rollouts/django__django-1/0"


def test_a_run_in_shards_lists_the_last_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """16,500 rollouts in 132 shards give total counts and twenty lines."""
    shown: list[str] = []
    monkeypatch.setattr("workflows.web_ui.workflow.set_current_details", shown.append)
    report = RunStatus(run_id="r1", state="running", total=125, done=125)
    reports = {k: report.model_copy(update={"by_outcome": {"resolved": 125}}) for k in range(132)}
    page = ShardsPage("r1", "**r1**", 16_500, Links("default"))
    page.show({"resolved": 16_500}, reports)

    assert "16500 of 16500 rollouts have ended: resolved 16500" in shown[0]
    assert _links(shown[0])[-1] == "/namespaces/default/workflows/run%2Fr1%2Fshard%2F131"
    assert len(_links(shown[0])) == 20
