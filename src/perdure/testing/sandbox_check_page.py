"""The Markdown page of a sandbox check, and its redacted JSON."""

import json
from collections.abc import Sequence

from perdure.reports.redaction import HIDDEN, redacted
from perdure.settings import process_environment
from perdure.testing.sandbox_burst import BurstResult
from perdure.testing.sandbox_check import HOUR_S, SandboxCheck

NONE = "—"
SHORTEST_KEY = 8
"""Values of variables named like secrets are hidden if they have at least this many characters."""


def public(check: SandboxCheck) -> SandboxCheck:
    """A copy without keys, hosts, URLs and paths: errors of a provider may contain them."""
    text = check.model_dump_json()
    for name, value in process_environment.variables().items():
        if len(value) >= SHORTEST_KEY and redacted(value, name) == HIDDEN:
            text = text.replace(json.dumps(value)[1:-1], HIDDEN)
    return SandboxCheck.model_validate(redacted(json.loads(text)))


def page(check: SandboxCheck) -> str:
    """Markdown: the verdict, the contract by part, the burst, broken promises."""
    sdk = f", SDK {check.sdk}" if check.sdk else ""
    blocks = [
        f"# Sandboxes of {check.provider}: {'passed' if check.passed else 'failed'}",
        f"{check.started_at} UTC, {check.seconds:.0f} s, Perdure {check.perdure}{sdk}, called from a "
        f"host with {check.host_cpus} CPUs.",
        *([f"**Stopped:** {check.stopped}."] if check.stopped else []),
        _table(
            ("contract", "kept", "failed", "not run"),
            [(one.part, str(one.kept), str(one.failed), str(one.not_run)) for one in check.parts],
        ),
        _table(("burst", ""), _burst_rows(check.burst)) if check.burst else "No burst.",
        _table(("account", ""), _account_rows(check)),
        *_list("Broken promises", [f"`{b.test}`: {b.promise} {b.problem}" for b in check.broken]),
        *_list("Not run", [f"`{name}`: {why}" for name, why in check.not_promised.items()]),
        *_list(
            "Failed in the burst",
            [
                f"{count} x {why}"
                for why, count in (check.burst.failures if check.burst else {}).items()
            ],
        ),
    ]
    return "\n\n".join(blocks) + "\n"


def _burst_rows(burst: BurstResult) -> list[tuple[str, str]]:
    return [
        ("created", f"{burst.created} of {burst.wanted}"),
        ("refused, then repeated", str(burst.refused)),
        ("waited", f"{burst.waited}, up to {burst.longest_wait_s:.1f} s"),
        ("boot p50", _seconds(burst.boot_p50_s)),
        ("boot p95", _seconds(burst.boot_p95_s)),
        (
            "boots a minute",
            NONE if burst.boots_per_minute is None else f"{burst.boots_per_minute:.0f}",
        ),
        ("most at once", str(burst.most_at_once)),
    ]


def _account_rows(check: SandboxCheck) -> list[tuple[str, str]]:
    rows = [
        ("left behind", str(check.left_behind)),
        ("left by an earlier check, removed", str(check.left_by_earlier)),
        ("sandboxes", str(check.sandboxes)),
        ("sandbox hours", f"{check.sandbox_seconds / HOUR_S:.3f}"),
        ("estimated cost of the burst", _dollars(check.burst_cost)),
        ("estimated cost of the check", _dollars(check.estimated_cost)),
        ("cost if no kill had worked", _dollars(check.most_cost)),
        ("known caps", check.caps.model_dump_json(exclude_none=True)),
    ]
    if check.burst and check.burst.live_cap is not None:
        caps = check.caps.model_copy(update={"live": check.burst.live_cap})
        known = json.dumps({check.provider: caps.model_dump(exclude_none=True)})
        rows.append(("for PERDURE_SANDBOX__CAPS", f"`{known}`"))
    return rows


def _seconds(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f} s"


def _dollars(value: float | None) -> str:
    return f"{NONE} (give --price)" if value is None else f"{value:.4f} dollars"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def _list(title: str, items: list[str]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {item}" for item in items)] if items else []
