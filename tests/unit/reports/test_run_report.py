"""The figures, the comparison and the page of a report."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from perdure.episodes.episode import ModelUsage
from perdure.errors import Boundary, ConfigurationError
from perdure.reports import svg_plots
from perdure.reports.calibration_bounds import gives_bounds, of_runs
from perdure.reports.report_html import page
from perdure.reports.report_json import document
from perdure.reports.report_tables import sections
from perdure.reports.rollout_facts import RunFacts
from perdure.reports.run_comparison import compare
from perdure.reports.run_report import Report, build_report
from perdure.reports.svg_plots import plots
from perdure.reports.token_prices import read_prices
from perdure.types import Failure
from tests.unit.reports.made_runs import rollout, run_of

RUN = run_of(
    "r",
    {
        "a": ["resolved", "unresolved"],
        "b": ["resolved", "resolved"],
        "c": ["timeout", None],
    },
)


def figures(report: Report) -> dict[str, str]:
    """The first table of a report on one run."""
    return {row[0]: row[1] for row in sections([report], [])[0].rows}


def test_a_failed_rollout_is_no_zero() -> None:
    """Instance c has one unresolved graded sample; no share counts its failed one."""
    found = build_report(RUN, planned=[(f"toy/{name}", n) for name in "abcd" for n in range(2)])

    assert (found.rollouts, found.planned, found.graded, found.resolved) == (6, 8, 5, 3)
    assert found.resolved_share.mean == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert found.pass_at_k[2].mean == pytest.approx(1.0)  # a and b; c has one graded sample
    assert found.outcomes == {"resolved": 3, "unresolved": 1, "timeout": 1, "failed": 1}
    assert found.mixed == ("a 1/2",)


def test_named_rewards_have_a_mean_and_the_differences_in_groups() -> None:
    """Only rollouts that have a reward count for it. Equal samples give GRPO no advantage."""
    tidy = {("a", 0): 0.0, ("a", 1): 1.0, ("b", 0): 0.5, ("b", 1): 0.5, ("c", 0): 0.75}
    rollouts = [rollout(name, n, named_rewards={"tidy": v}) for (name, n), v in tidy.items()]
    report = build_report(RunFacts("r", (*rollouts, rollout("d"))))
    (table,) = (one for one in sections([report], []) if one.title == "Named rewards")

    assert table.rows == (("tidy", "5", "0.550", "0.000", "1.000", "1 of 2", "0.354"),)
    assert document([report], [])["runs"][0]["named_rewards"]["tidy"]["mean"] == 0.55


def test_what_was_not_checked_is_counted_with_its_reason() -> None:
    """Resolved grades without twins keep their reward; the report has their number and the reasons.
    A forgery that twins exposed is officially resolved."""
    why = "no test has a twin: calibrate the instance"
    rollouts = (
        rollout("a", unverified=why),
        rollout("b", unverified=why),
        rollout("c"),
        rollout("d", outcome="tampered", official="resolved"),
    )
    found = build_report(RunFacts("r", rollouts))
    shown = {section.title: section.rows for section in sections([found], [])}

    assert (found.resolved, found.officially_resolved, found.unverified) == (3, 4, {why: 2})
    assert ("resolved, not checked by strong twins", "2") in shown["Figures"]
    assert shown["Resolved, not checked"] == ((why, "2"),)


def test_exposures_and_signals_are_counted_and_named() -> None:
    """The report counts forgeries that twins exposed, and lists patches with signals, successes
    first. Four signals fill one cell of three."""
    many = tuple(f"a.py: word{n} (frames)" for n in range(4))
    rollouts = (
        rollout("a", outcome="tampered", official="resolved", exposed=True),
        rollout("b", outcome="unresolved", signals=("b.py: gc (objects)",)),
        rollout("c", signals=many, reward=None, withheld="unverified, and its patch has signals"),
        rollout("d"),
    )
    found = build_report(RunFacts("r", rollouts))
    shown = {section.title: section.rows for section in sections([found], [])}

    assert (found.exposed, found.withheld, found.resolved_with_signals) == (1, 1, 1)
    assert (found.graded, found.mean_reward) == (4, 1 / 3)
    assert {("exposed by twins", "1"), ("rewards withheld", "1")} <= {*shown["Figures"]}
    assert ("patches with signals, resolved ones", "2, 1") in shown["Figures"]
    assert shown["Signals in patches"] == (
        ("c/0", "a.py: word0 (frames), a.py: word1 (frames), a.py: word2 (frames) and 1 more"),
        ("b/0", "b.py: gc (objects)"),
    )
    assert json.loads(json.dumps(document([found], [])))["runs"][0]["signals"]["c/0"] == [*many]


def test_the_plot_of_rewards_has_those_below_zero() -> None:
    """A price of tampering is in the histogram, not cut off."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    rollouts = (rollout("a"), rollout("b", outcome="tampered", reward=-0.5), rollout("c"))
    run = RunFacts("r", rollouts)
    axes = Figure().subplots()
    svg_plots._rewards(axes, [(run, build_report(run))])

    assert sum(bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)) == 3


def test_times_tell_the_environment_from_the_model() -> None:
    """Engines worked for 10 of each agent's 40 s."""
    found = build_report(RUN)

    assert found.environment_to_model == 3.0
    assert found.stage_seconds["agent"].median == 40.0


def test_failures_that_say_the_same_are_one_group() -> None:
    """Numbers, digests and paths may differ; the first message is shown."""

    def lost(number: int) -> Failure:
        message = f"sandbox p-{number:08x} died:\n see /tmp/{number}/log"
        return Failure(boundary=Boundary.SANDBOX, type="SandboxLost", message=message)

    other = Failure(boundary=Boundary.AGENT, type="AgentError", message="no model call")
    failures = [*(lost(n) for n in range(5)), other]
    rollouts = tuple(
        rollout(f"i-{n}", outcome=None, failure=failure) for n, failure in enumerate(failures)
    )

    groups = build_report(RunFacts("r", rollouts)).failures

    assert [(one.boundary, one.count) for one in groups] == [("sandbox", 5), ("agent", 1)]
    assert groups[0].sentence == "sandbox p-00000000 died: see /tmp/0/log"
    assert groups[0].examples == ("i-0/0", "i-1/0", "i-2/0")


def test_equal_patches_with_other_verdicts_are_flaky() -> None:
    """Of two samples with one patch, one is resolved: the report names the instance."""
    rollouts = tuple(
        rollout("a", n, outcome, patch_sha256="same")
        for n, outcome in enumerate(["resolved", "unresolved"])
    )

    assert build_report(RunFacts("r", rollouts)).flaky == ("a",)


def test_runs_are_compared_by_instance() -> None:
    """Six instances won, none lost: p is 2 / 64; instances of one run only do not count."""
    before = run_of("before", {**{f"i{n}": ["unresolved"] for n in range(7)}, "old": ["resolved"]})
    after = run_of(
        "after", {**{f"i{n}": ["resolved"] for n in range(6)}, "i6": ["unresolved"], "new": [None]}
    )

    found = compare(before, after)

    assert (found.instances, found.won, found.lost, found.p) == (7, 6, 0, 0.03125)
    assert found.difference.mean == pytest.approx(6 / 7)
    assert (found.only_in_first, found.only_in_second) == (1, 0)


def test_runs_of_gold_and_of_no_patch_give_the_bounds() -> None:
    """The bounds cover the run's instances, not those of the other runs."""
    gold = run_of(
        "gold", {"a": ["resolved"], "b": ["unresolved"], "z": ["resolved"]}, agent="oracle"
    )
    none = run_of("none", {"a": ["unresolved"], "b": ["unresolved"]}, agent="nop")

    found = of_runs(RUN, [gold, none])

    assert (found.upper, found.floor, found.instances) == (0.5, 0.0, 2)
    assert found.source == "gold and none"
    assert gives_bounds(gold, RUN)
    assert not gives_bounds(gold, gold)


PRICES = """
["gpt-*"]
input = 2.0
output = 10.0
["m"]
input = 2.0
cached = 0.5
output = 10.0
"""


def test_cost_is_that_of_the_tokens(tmp_path: Path) -> None:
    """600 fresh prompt tokens at 2, 400 cached at 0.5, 100 sampled at 10 dollars per million."""
    (tmp_path / "prices.toml").write_text(PRICES)
    prices = read_prices(tmp_path / "prices.toml")

    found = build_report(RUN, prices=prices)

    assert found.cost is not None
    assert found.cost.mean == pytest.approx((600 * 2 + 400 * 0.5 + 100 * 10) / 1e6, abs=1e-4)


def test_a_model_without_a_price_is_named(tmp_path: Path) -> None:
    """The report shows no cost instead of one without that model."""
    (tmp_path / "prices.toml").write_text(PRICES)
    other = ModelUsage(model="other", prompt_tokens=5)
    run = RunFacts("r", (rollout("a"), rollout("b", models=("other",), usage=(other,))))
    report = build_report(run, prices=read_prices(tmp_path / "prices.toml"))
    shown = figures(report)

    assert shown["cost, total"] == "no price for other"
    assert "cost per rollout: mean, p90" not in shown


def test_discarded_attempts_cost_too(tmp_path: Path) -> None:
    """The tokens of a lost or repeated attempt were paid for, so the report counts them."""
    (tmp_path / "prices.toml").write_text(PRICES)
    lost = ModelUsage(model="m", prompt_tokens=500_000, sampled_tokens=50_000)
    run = RunFacts("r", (rollout("a", turns=0, usage=(), discarded=(lost,)),))
    report = build_report(run, prices=read_prices(tmp_path / "prices.toml"))
    shown = figures(report)

    assert shown["cost, total"] == "$1.50"
    assert shown["prompt tokens of discarded attempts"] == "500.0 k"
    assert shown["sampled tokens of discarded attempts"] == "50.0 k"


def test_a_judges_tokens_are_apart_and_cost_too(tmp_path: Path) -> None:
    """They are not the agent's, but they were paid for. A judge without a price is named."""
    (tmp_path / "prices.toml").write_text(PRICES)
    prices = read_prices(tmp_path / "prices.toml")
    judged = ModelUsage(model="m", prompt_tokens=500_000, sampled_tokens=50_000)
    run = RunFacts("r", (rollout("a", turns=0, usage=(), judged=(judged,)),))
    shown = figures(build_report(run, prices=prices))
    other = rollout("a", judged=(ModelUsage(model="judge", sampled_tokens=5),))
    unpriced = figures(build_report(RunFacts("r", (other,)), prices=prices))

    assert shown["cost, total"] == "$1.50"
    assert shown["prompt tokens of judges"] == "500.0 k"
    assert shown["sampled tokens of judges"] == "50.0 k"
    assert unpriced["cost, total"] == "no price for judge"


@pytest.mark.parametrize("usage", [(), (ModelUsage(model="m"),)], ids=["none", "not counted"])
def test_a_cost_that_was_not_recorded_is_unknown(
    tmp_path: Path, usage: tuple[ModelUsage, ...]
) -> None:
    """It adds no dollars, and the mean omits its rollout."""
    (tmp_path / "prices.toml").write_text(PRICES)
    prices = read_prices(tmp_path / "prices.toml")
    old = rollout("a", usage=usage)
    cheap = build_report(RunFacts("r", (rollout("b"),)), prices=prices)
    both = build_report(RunFacts("r", (old, rollout("b"))), prices=prices)
    alone = build_report(RunFacts("r", (old,)), prices=prices)

    assert cheap.cost is not None
    assert (both.cost, both.cost_unknown) == (cheap.cost, 1)
    assert figures(both)["cost, total"] == "$0.00; unknown for 1 of 2 rollouts"
    assert figures(alone)["cost, total"] == "unknown for 1 of 1 rollouts"


def test_verdicts_that_were_played_again_show_the_first_figure() -> None:
    """A retry raises pass@1, so the report counts retries and shows both figures."""
    again = rollout("a", outcome="resolved", earlier_outcomes=("empty_patch", "unresolved"))
    report = build_report(RunFacts("r", (again, rollout("b"))))
    shown = figures(report)

    assert report.resolved_share.mean == 1.0
    assert shown["retried after a verdict"].startswith("1; pass@1 by first verdicts 50.0 %")


def test_a_run_that_was_stopped_says_so_and_how_many_instances_count() -> None:
    """By its budget: two of four instances have a verdict, one of them two."""
    run = run_of("r", {"a": ["resolved", "resolved"], "b": ["resolved"]})
    told = "it has used 8,028 of 5,000 tokens"
    planned = [(f"toy/{name}", n) for name in "abcd" for n in range(2)]
    report = build_report(run, planned=planned, stopped=told)
    shown = figures(report)

    assert shown["stopped"] == told
    assert shown["pass@1"].endswith(", 2 of 4 instances")
    assert shown["pass@2"].endswith(", 1 of 4 instances")


def test_the_model_is_the_one_that_answered() -> None:
    """A differing requested name is shown once; `nop` called none."""
    dated = rollout("a", models=("gpt-x-2026-01-01",), asked_models=("gpt-x",))
    called = figures(build_report(RunFacts("r", (dated,))))
    none = figures(build_report(RunFacts("n", (rollout("a", models=()),))))

    assert called["model"] == "gpt-x-2026-01-01"
    assert called["model, as requested"] == "gpt-x"
    assert none["model"] == "none was called"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[m]\ninput = 1", r"`m.output`: Field required"),
        ("[m]\ninput = -1\noutput = 2", r"`m.input`: Input should be greater than or equal to 0"),
        ("[m]\ninput = 1\noutput = 2\ncache = 1", r"`m.cache`: Extra inputs"),
        ("[m\n", r"cannot be read"),
    ],
)
def test_a_bad_price_is_named(tmp_path: Path, text: str, message: str) -> None:
    """The error names the file, the model and the field."""
    (tmp_path / "p.toml").write_text(text)

    with pytest.raises(ConfigurationError, match=message):
        read_prices(tmp_path / "p.toml")


def test_the_document_is_json() -> None:
    """Also for a run without a verdict: missing values are null."""
    empty = RunFacts("e", (rollout("a", outcome=None),))
    reports = [build_report(RUN), build_report(empty)]

    text = json.dumps(document(reports, [compare(RUN, empty)]), allow_nan=False)

    runs = json.loads(text)["runs"]
    assert runs[0]["pass_at_k"]["1"]["instances"] == 3
    assert runs[1]["resolved_share"]["mean"] is None


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</table></body><iframe src=//evil.example>",
    "<svg/onload=alert(1)>",
    "javascript:alert(1)",
    "<a href='http://evil.example'>x</a>",
    "<meta http-equiv=refresh content=0;url=//evil.example>",
    "<style>@import '//evil.example'</style>",
    "&lt;script&gt;",
    "\x1b]8;;http://evil.example\x07x",
    "$\\mathtt{x}$ ${7*7} {{7*7}}",
)
ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "div", "p"),
    *("figure", "figcaption", "table", "thead", "tbody", "tr", "th", "td"),
    *("svg", "defs", "g", "path", "text", "use", "clippath", "rect", "tspan"),
}


class Read(HTMLParser):
    """Collects every element, and every attribute that runs or loads something."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.risky: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        for name, value in attrs:
            points_inside = name.endswith("href") and (value or "").startswith("#")
            if (
                name.startswith("on")
                or name == "src"
                or (name.endswith("href") and not points_inside)
            ):
                self.risky.append((name, value))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_hostile_text_stays_text() -> None:
    """In a failure's message and a model's name: it becomes no element, script or URL."""
    failures = [Failure(boundary=Boundary.AGENT, type="AgentError", message=one) for one in HOSTILE]
    hostile = [
        rollout(f"a{number}", outcome=None, failure=failure, models=(failure.message,))
        for number, failure in enumerate(failures)
    ]
    run = RunFacts("r", (*hostile, rollout("b")))
    report = build_report(run)

    found = Read()
    made = page("r", sections([report], []), plots([(run, report)]), "now")
    found.feed(made)

    assert [one for one in HOSTILE if one.replace("\x1b", "") not in found.text] == []
    assert found.elements <= ALLOWED
    assert found.risky == []
    assert "default-src &#x27;none&#x27;" in made


def test_the_plots_are_those_that_have_data() -> None:
    """An evaluation has no policy versions. The same run gives the same drawing."""
    report = build_report(RUN)

    titles = [plot.title for plot in plots([(RUN, report)])]

    assert "Policy versions" not in titles
    assert {"Resolved with k samples", "Tokens by turn", "Rollouts in flight"} <= set(titles)
    assert plots([(RUN, report)]) == plots([(RUN, report)])


def test_versions_are_drawn_for_a_training_run() -> None:
    """If rollouts have them."""
    run = run_of("t", {"a": ["resolved", "unresolved"]}, version_min=3, version_max=4)

    assert "Policy versions" in [plot.title for plot in plots([(run, build_report(run))])]


def test_rollouts_without_a_verdict_give_bounds() -> None:
    """Of a's two samples one is resolved, of b's one failed, c was never started: pass@1 over all is
    from (1/2 + 0 + 0) / 3 to (1/2 + 1/2 + 1) / 3, and no bounds are shown if each has a verdict."""
    run = run_of("r", {"a": ["resolved", "unresolved"], "b": ["unresolved", None]})
    planned = [(f"toy/{name}", n) for name in "abc" for n in range(2)]
    found = build_report(run, planned=planned)
    shown = figures(found)

    assert found.verdict_bounds == pytest.approx((1 / 6, 2 / 3))
    assert shown["with a verdict"] == "3 of 6"
    assert shown["pass@1, without a verdict as 0, as 1"] == "16.7 %, 66.7 % (3 without)"
    assert build_report(run_of("r", {"a": ["resolved"]})).verdict_bounds is None
