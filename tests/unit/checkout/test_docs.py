"""What the documentation names exists: commands, options, files, fields of requests."""

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from perdure.cli.main import cli
from perdure.types import GroupRequest, Request, RolloutRequest, RunRequest
from tests.checkout_paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = sorted(
    page
    for room in ("src", "datasets", "infra", "workers", "tests", "benchmarks")
    for page in (ROOT / room).rglob("README.md")
)
REQUESTS: dict[str, type[Request]] = {
    "RolloutWorkflow": RolloutRequest,
    "RolloutGroupWorkflow": GroupRequest,
    "RunWorkflow": RunRequest,
}
MODELS = {model.__name__: model for model in REQUESTS.values()}
TAGS_OF_CODE = ("python", "toml", "json", "yaml")


class Named(NamedTuple):
    """A piece of a page; `whole`: a command that can be pasted, not a mention in prose."""

    page: Path
    text: str
    whole: bool = True

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text}"


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each fenced block, indented or not."""
    for tag, text in re.findall(r"^ *```([^\n]*)\n(.*?)^ *```$", page.read_text(), re.M | re.S):
        yield tag.split(" ")[0], text


def commands() -> Iterator[Named]:
    """Every `perdure ...` of the pages, without the shell syntax around it."""
    for page in (*PAGES, *ROOMS):
        for tag, text in blocks(page):
            picture = "\N{BOX DRAWINGS LIGHT HORIZONTAL}" in text
            code = picture or tag in TAGS_OF_CODE
            lines = () if code else text.replace("\\\n", " ").splitlines()
            yield from (Named(page, found) for line in lines for found in _in_shell(line))
        prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
        prose = re.sub(r"\\\n +", " ", prose)
        indented = re.findall(r"^ {4}(.+)$", prose, re.M)
        yield from (Named(page, found) for line in indented for found in _in_shell(line))
        for found in re.findall(r"`+ ?(perdure(?: [^`]*)?)`", prose):
            yield Named(page, found.strip(), whole=False)


def _in_shell(line: str) -> Iterator[str]:
    found = re.match(r"\s*(?:[A-Z_]+=\S+ +)*(?:\S*/)?(perdure(?: .*)?)$", line)
    if found:
        yield found[1].split(" | ")[0]


def check(command: Named) -> None:
    """Parse with the real commands. Raises: click.UsageError."""
    words = shlex.split(command.text.replace("\N{HORIZONTAL ELLIPSIS}", "X"), comments=True)[1:]
    found: click.Command = cli
    context = click.Context(cli, info_name="perdure")
    while isinstance(found, click.Group) and words and not words[0].startswith("-"):
        child = found.get_command(context, words[0])
        if child is None:
            raise click.UsageError(f"there is no command {words[0]!r}")
        found, words = child, words[1:]
    if found is cli or {"-h", "--help"} & set(words) or words == ["..."]:
        return
    if command.whole:
        found.make_context("perdure", words)
    else:
        found.make_parser(click.Context(found)).parse_args(words)


def test_every_command_of_the_pages_exists() -> None:
    """The command line accepts every command that a reader may paste: names, options, arguments."""
    wrong, seen = [], list(commands())
    for command in seen:
        try:
            check(command)
        except click.UsageError as error:
            wrong.append(f"{command}: {error.format_message()}")

    assert wrong == []
    assert len(seen) > 40


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("perdure rnu first-steps", True),
        ("perdure run first-steps --agnet oracle", False),
        ("perdure resize RUN many", True),
        ("perdure show", True),
        ("perdure instances biuld", False),
    ],
)
def test_a_wrong_command_is_noticed(text: str, whole: bool) -> None:
    """The check above does see a misspelt command, option and value, and a missing argument."""
    with pytest.raises(click.UsageError):
        check(Named(ROOT / "README.md", text, whole))


def test_every_relative_link_leads_somewhere() -> None:
    """No page links to a file that is not there."""
    links = [
        Named(page, target)
        for page in (*PAGES, *ROOMS)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        if "://" not in target
    ]

    assert [str(link) for link in links if not (link.page.parent / link.text).exists()] == []
    assert len(links) > 15


def test_every_link_to_a_heading_finds_it() -> None:
    """No page links to a heading that its target does not have."""
    wrong = []
    for page in (*PAGES, *ROOMS):
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
            if "://" not in target and anchor not in _anchors(page.parent / (target or page.name)):
                wrong.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")

    assert wrong == []


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_named_file_exists() -> None:
    """A file that a page names from the root, or from `src/perdure`, is there."""
    root = r"`((?:tests|src|workflows|activities|workers|infra|benchmarks|docs)/[\w./-]+)`"
    wrong = [
        str(Named(page, path))
        for page in PAGES
        for path in re.findall(root, page.read_text())
        if not (ROOT / path).exists()
    ]
    room = r"`((?:agents|gateway|engines|episodes|graders|instances|sandboxes|storage)/[\w./]+)`"
    wrong += [
        str(Named(page, path))
        for page in PAGES
        for path in re.findall(room, page.read_text())
        if not (ROOT / "src" / "perdure" / path).exists()
    ]

    assert wrong == []


def test_every_file_that_a_room_lists_is_in_it() -> None:
    """The README of a room names modules that are there, below it or in the library."""
    wrong = []
    for page in (room for room in ROOMS if room.is_relative_to(ROOT / "src")):
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text()):
            others = (ROOT / name, ROOT / "src" / "perdure" / name)
            if not any(page.parent.rglob(name)) and not any(path.exists() for path in others):
                wrong.append(str(Named(page, name)))

    assert wrong == []


def test_every_request_in_json_is_accepted() -> None:
    """Each hand-written `--input` of the pages is a valid request of its workflow type."""
    shell = r"--type (\w+)(?:[^\n]|\n +)*?--input '(\{.*?\})'"
    found = [
        (kind, json.loads(text))
        for page in PAGES
        for kind, text in re.findall(shell, page.read_text(), re.DOTALL)
    ]
    for kind, fields in found:
        request = REQUESTS[kind].model_validate(fields)
        if isinstance(request, RunRequest):
            request.rollout_request("any/instance")

    assert {kind for kind, _ in found} == set(REQUESTS)


def test_every_request_in_python_is_accepted() -> None:
    """Each request that the SDK's examples make can be made."""
    made = 0
    for page in PAGES:
        for tag, text in blocks(page):
            for call in _calls(text) if tag == "python" else ():
                eval(compile(ast.Expression(call), str(page), "eval"), dict(MODELS))
                made += 1

    assert made > 3


def _calls(text: str) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(_dedented(text))
    except SyntaxError:  # a bad / good pair of CONTRIBUTING.md need not be a whole program
        return
    for node in ast.walk(tree):
        name: Any = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name in MODELS:
            yield node


def _dedented(text: str) -> str:
    indent = re.match(r" *", text)
    assert indent is not None
    return re.sub(f"^{indent[0]}", "", text, flags=re.MULTILINE)


def test_the_picture_of_the_rings_has_their_lines() -> None:
    """The command that docs/architecture.md prints counts about what its picture says."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    command = re.search(r"^ {4}lines\(\) .*?# all$", page, re.M | re.S)
    assert command is not None
    ran = subprocess.run(
        ["bash", "-c", command[0]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    first, second, everything = map(int, ran.stdout.split())
    printed = re.findall(r"ring \d, the \w+: ([\d,]+) lines", page)
    edges, truth, line = (int(found.replace(",", "")) for found in printed)

    assert (line, truth, edges) == pytest.approx(
        (first, second, everything - first - second), rel=0.1
    )


def test_the_glossary_has_few_words_of_our_own() -> None:
    """At most 25 words are Perdure's own; everything else is the field's."""
    page = (ROOT / "docs" / "concepts.md").read_text()
    own = page.partition("**Our own words:**")[2].partition("\n## ")[0]
    words = [
        word for terms in re.findall(r"^- \*\*(.*?)\*\*:", own, re.M) for word in terms.split(", ")
    ]

    assert 15 < len(words) <= 25
