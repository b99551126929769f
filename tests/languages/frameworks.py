"""The frameworks of the suite: what their rows add to a listing, how their tests run, what they need."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from perdure.sandboxes.base import Mount
from perdure.testing.grader_contract import Edits, diff_of
from perdure.types import Grading, Instance, Source, SourceKind
from tests.languages.forgers import FORGERS, Forge
from tests.languages.javascript_tests import Runner, rendered
from tests.languages.row_listing import Listing, listings

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
JARS = "/usr/share/java/junit4.jar:/usr/share/java/hamcrest-all.jar"


@dataclass(frozen=True)
class Framework:
    """How the tests of one framework run. `{tests}` in `command` stands for the hidden test files."""

    name: str
    language: str
    """The file of its rows."""
    command: str
    log_parser: str
    """Empty: its tests are graded by their exit code."""
    passed: str
    """What it prints for a test that passed; `{}` is the test's id."""
    tree: Edits
    """The files that a tree needs besides those of its row."""
    programs: tuple[str, ...]
    install: str
    env: Mapping[str, str] = field(default_factory=dict)
    test_id: Callable[[str], str] = str
    """The name of a test in a listing -> its id in the log."""
    node_modules: bool = False

    def missing(self) -> str:
        """Why it cannot run here; empty if it can."""
        absent = [program for program in self.programs if not _is_seen(program)]
        return f"sandboxes see no {', '.join(absent)}: {self.install}" if absent else ""

    def mounts(self, node_modules: Path) -> tuple[Mount, ...]:
        return (Mount(node_modules, "/node_modules"),) if self.node_modules else ()

    @property
    def forgers(self) -> Mapping[str, Forge]:
        return FORGERS[self.name]


@dataclass(frozen=True)
class Row:
    """A row of a framework. The patches are diffs against its base."""

    instance: Instance
    base: Edits
    honest: bytes
    forged: Mapping[str, bytes]


def rows(framework: Framework) -> Iterator[Row]:
    for listing in listings(framework.language):
        yield _row(framework, _rendered(listing, framework.name))


def _row(framework: Framework, listing: Listing) -> Row:
    base = {**framework.tree, **listing.base}
    fails, passes = (
        tuple(map(framework.test_id, names)) for names in (listing.fails, listing.passes)
    )
    lines = "\n" + "".join(f"{framework.passed.format(test)}\n" for test in (*fails, *passes))
    source = listing.base[listing.source]
    assert isinstance(source, str)
    forged = {
        name: diff_of({listing.source: forge(source, lines)}, base)
        for name, forge in framework.forgers.items()
    }
    instance = Instance(
        instance_id=f"{framework.name}-{listing.name}",
        dataset="languages",
        problem_statement=listing.problem,
        source=Source(kind=SourceKind.DIRECTORY),
        grading=_grading(framework, listing, base, fails, passes),
        gold_patch=diff_of(listing.gold, base),
    )
    return Row(instance, base, diff_of(listing.honest, base), MappingProxyType(forged))


def _grading(
    framework: Framework,
    listing: Listing,
    base: Edits,
    fails: tuple[str, ...],
    passes: tuple[str, ...],
) -> Grading:
    command = framework.command.replace("{tests}", " ".join(listing.tests))
    test_patch = diff_of(listing.tests, base)
    if not framework.log_parser:
        return Grading(protocol="eval_cmd", test_patch=test_patch, eval_cmd=command)
    return Grading(
        test_patch=test_patch,
        test_cmd=command,
        log_parser=framework.log_parser,
        fail_to_pass=fails,
        pass_to_pass=passes,
    )


def _rendered(listing: Listing, framework: str) -> Listing:
    """The listing with tests in the style of a framework; itself if it is not JavaScript."""
    for runner in get_args(Runner):
        if runner == framework:
            base = {path: rendered(str(text), runner) for path, text in listing.base.items()}
            tests = {path: rendered(str(text), runner) for path, text in listing.tests.items()}
            return replace(listing, base=base, tests=tests)
    return listing


def _is_seen(program: str) -> bool:
    """Sandboxes see the host's /usr, and no home."""
    if program.startswith("/"):
        return Path(program).exists()
    return shutil.which(program, path=PATH) is not None


_TAP_RUNNER = """
import org.junit.runner.Description;
import org.junit.runner.JUnitCore;
import org.junit.runner.notification.Failure;
import org.junit.runner.notification.RunListener;

public class TapRunner extends RunListener {
    private int count;
    private boolean failed;

    public static void main(String[] files) throws Exception {
        JUnitCore core = new JUnitCore();
        core.addListener(new TapRunner());
        boolean passed = true;
        for (String file : files) {
            String name = file.replaceAll("^test/|[.]java$", "").replace('/', '.');
            passed &= core.run(Class.forName(name)).wasSuccessful();
        }
        System.exit(passed ? 0 : 1);
    }

    @Override public void testStarted(Description test) {
        failed = false;
    }

    @Override public void testFailure(Failure failure) {
        failed = true;
        System.out.println("# " + failure.getTrace().replace("\\n", "\\n# "));
    }

    @Override public void testFinished(Description test) {
        String name = test.getTestClass().getSimpleName() + "." + test.getMethodName();
        System.out.println((failed ? "not ok " : "ok ") + ++count + " " + name);
    }
}
"""

_JS_TREE: Edits = {"package.json": '{ "name": "calc", "version": "1.0.0", "private": true }\n'}
_JS_PROGRAMS = ("node", "npm", "npx")
_JS_INSTALL = "install Node.js 20 and npm, for example by apt-get install nodejs npm"


def _last(name: str) -> str:
    return name.rpartition(" > ")[2]


FRAMEWORKS: Mapping[str, Framework] = MappingProxyType(
    {
        framework.name: framework
        for framework in (
            Framework(
                name="node",
                language="js",
                command="node --test --test-reporter tap {tests}",
                log_parser="parse_log_tap",
                passed="ok 1 {}",
                tree=_JS_TREE,
                programs=("node",),
                install=_JS_INSTALL,
                test_id=lambda name: f"- {_last(name)}",
            ),
            Framework(
                name="jest",
                language="js",
                command="npx jest --verbose",
                log_parser="parse_log_jest",
                passed="  ✓ {} (1 ms)",
                tree=_JS_TREE,
                programs=_JS_PROGRAMS,
                install=_JS_INSTALL,
                test_id=_last,
                node_modules=True,
            ),
            Framework(
                name="mocha",
                language="js",
                command="mocha --reporter tap",
                log_parser="parse_log_tap",
                passed="ok 1 {}",
                tree=_JS_TREE,
                programs=_JS_PROGRAMS,
                install=_JS_INSTALL,
                env={"PATH": f"/node_modules/.bin:{PATH}"},
                test_id=lambda name: name.replace(" > ", " "),
                node_modules=True,
            ),
            Framework(
                name="go",
                language="go",
                command="go test -v ./...",
                log_parser="parse_log_gotest",
                passed="--- PASS: {} (0.00s)",
                tree={"go.mod": "module calc\n\ngo 1.18\n"},
                programs=("go",),
                install="apt-get install golang-go",
                env={"GOCACHE": "/tmp/go-build", "GOFLAGS": "-mod=mod", "GOPROXY": "off"},
            ),
            Framework(
                name="rust",
                language="rust",
                command="cargo test --no-fail-fast --offline",
                log_parser="parse_log_cargo",
                passed="test {} ... ok",
                tree={
                    "Cargo.toml": '[package]\nname = "calc"\nversion = "0.1.0"\nedition = "2021"\n',
                    "src/lib.rs": "mod numbers;\npub use numbers::*;\n",
                },
                programs=("cargo", "rustc"),
                install="apt-get install cargo (a toolchain in a home is out of their sight)",
                env={"CARGO_HOME": "/tmp/cargo", "CARGO_TARGET_DIR": "/tmp/target"},
            ),
            Framework(
                name="java",
                language="java",
                command=(
                    f"javac -cp {JARS} -d /tmp/classes $(find src test -name '*.java') && "
                    f"java -cp /tmp/classes:{JARS} TapRunner {{tests}}"
                ),
                log_parser="parse_log_tap",
                passed="ok 1 {}",
                tree={"test/TapRunner.java": _TAP_RUNNER},
                programs=("javac", *JARS.split(":")),
                install="apt-get install default-jdk-headless junit4",
            ),
            Framework(
                name="c",
                language="c",
                command="gcc -o /tmp/tests src/*.c test/*.c && /tmp/tests",
                log_parser="",
                passed="{}",
                tree={"README.md": "calc\n"},
                programs=("gcc",),
                install="apt-get install gcc libc6-dev",
            ),
        )
    }
)
