"""Draws the pictures of Temporal's Web UI in these pages: a stack, two toy runs, and Chromium.

PYTHONPATH=.:src python docs/pictures/browser.py

It starts what it needs and leaves nothing behind. Chromium's window is drawn as it is.
"""

import asyncio
import json
import tempfile
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from perdure.types import RunRequest
from tests import held_ports, loop_agent
from tests.headless_browser import Browser, browsing
from tests.stack.made_instances import IDLE_INSTANCE, INSTANCE, UNSOLVED_INSTANCE
from tests.stack.running_stack import Stack, running

PICTURES = Path(__file__).parent
RUN = "try-2"
COLUMNS = ("Status", "Workflow ID", "PerdureOutcome", "PerdureReward", "PerdureFailure")
VIEWS = {
    "needs a person": "ExecutionStatus = 'Failed'",
    "one run, not resolved": f"PerdureRun = '{RUN}' AND PerdureOutcome != 'resolved'",
    "lost sandboxes": "PerdureFailure STARTS_WITH 'sandbox'",
}
LINK = "[...document.querySelectorAll('a')].find((one) => one.innerText.includes('User Metadata'))"
WIDTH, COLOURS = 1360, 64


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder, held_ports.held(1) as (viewer,):
        async with running(Path(folder) / "stack", workers=0) as stack:
            url = f"http://127.0.0.1:{viewer}"
            await stack.start_worker(PERDURE_TEMPORAL__VIEWER_URL=url)
            await play(stack)
            root = f"{stack.plan.addresses.ui_url}/namespaces/default/workflows"
            await asyncio.to_thread(draw, root, Path(folder) / "chromium")


async def play(stack: Stack) -> None:
    """A run with each kind of end: resolved, unresolved, empty, and an instance that does not exist."""
    agent = {"agent": loop_agent.NAME, "agent_options": {"mark": stack.mark}}
    run = RunRequest(
        run_id=RUN,
        instances=(INSTANCE, UNSOLVED_INSTANCE, IDLE_INSTANCE, "tests/no-such"),
        concurrency=4,
        rollout={**agent, "heartbeat_timeout_s": stack.beat_s},
    )
    stack.requests += [run.rollout_request(ref) for ref in run.instances]
    async with asyncio.timeout(900):
        await (await stack.perdure.start_run(run)).result()


def draw(root: str, profile: Path) -> None:
    saved = [{"id": n, "name": n, "query": q, "type": "user"} for n, q in VIEWS.items()]
    kept = {
        "namespace-workflow-table-columns": {"default": [{"label": name} for name in COLUMNS]},
        "saved-workflow-queries": {"default": saved},
    }
    with browsing(profile) as browser:
        origin = root.split("/namespaces", maxsplit=1)[0]
        browser.open(f"{origin}/favicon.ico")
        for name, value in kept.items():
            browser.ask(
                f"localStorage.setItem({json.dumps(name)}, {json.dumps(json.dumps(value))})"
            )

        shown(browser, f"{root}?query={quote(VIEWS['one run, not resolved'])}", "leave-it")
        taken(browser, "web-ui-list.png", 560)

        shown(browser, f"{root}/{quote(f'run/{RUN}', safe='')}", "User Metadata")
        browser.ask(f"{LINK}.click()")
        browser.until("document.querySelectorAll('iframe').length >= 2")
        browser.settle()
        taken(browser, "web-ui-run.png", 900)

        one = quote(f"rollout/{RUN}/add-wrongly/0", safe="")
        shown(browser, f"{root}/{one}", "boot_sandbox")
        taken(browser, "web-ui-rollout.png", 980)


def taken(browser: Browser, name: str, height: int) -> None:
    """The window as a small picture."""
    path = PICTURES / name
    browser.picture(path, WIDTH, height)
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def shown(browser: Browser, address: str, text: str) -> None:
    """Load a page until it has the text."""
    browser.open(address)
    browser.until(f"document.body.textContent.includes({json.dumps(text)})")
    browser.settle()


asyncio.run(main())
