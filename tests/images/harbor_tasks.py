"""Small tasks in Harbor's format, one for each key of `task.toml` and each rule about its folders.

Each is a few lines on one image. All have a reference solution that the tests can tell from no
change, unless the task is about something else.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

BASE = "perdure-test/harbor:1"
OTHER = "perdure-test/harbor-tests:1"
"""The image of a separate verifier. It has tests of its own."""
SOLVE = "#!/bin/bash\necho done > out\n"
TEST = "#!/bin/bash\ngrep -qx done out && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"
APP_TEST = TEST.replace("done out", "done /app/out")
DOCKERFILE = f"FROM {BASE}\nWORKDIR /app\n"
TESTS_DOCKERFILE = f"FROM {BASE}\nWORKDIR /app\nCOPY . /tests/\n"


def check(condition: str) -> str:
    """A test.sh that gives 1 if the condition holds."""
    return f"#!/bin/bash\nif {condition}; then r=1; else r=0; fi\necho $r > /logs/verifier/reward.txt\n"


def solve(*lines: str) -> str:
    return "\n".join(["#!/bin/bash", *lines, "echo done > out", ""])


@dataclass(frozen=True)
class Task:
    """`keys`: what of Harbor's schema it uses, with the table's name before the key's."""

    name: str
    toml: str = ""
    solve: str = SOLVE
    test: str = TEST
    keys: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """More files of the folder, by path. They replace the usual ones; an empty one removes its own."""
    differs: str = ""
    """How Perdure's result differs from Harbor's, and why."""

    @property
    def content(self) -> dict[str, str]:
        """Its files by path."""
        files = {
            "task.toml": f'schema_version = "1.4"\n{self.toml}',
            "instruction.md": "Write done into out.\n",
            "environment/Dockerfile": DOCKERFILE,
            "solution/solve.sh": self.solve,
            "tests/test.sh": self.test,
            **self.files,
        }
        return {name: text for name, text in files.items() if text}

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(sorted(self.content.items())).encode()).hexdigest()[:16]

    def write(self, folder: Path) -> Path:
        for name, text in self.content.items():
            path = folder / self.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder / self.name


NO_DOCKERFILE = {"environment/Dockerfile": ""}
SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'
OWN_TESTS = {"tests/Dockerfile": TESTS_DOCKERFILE}
KEPT = 'artifacts = ["/app/out"]\n'

SIDECAR = f"""\
services:
  main:
    volumes: [shared:/shared]
  db:
    image: {BASE}
    command: ["sh", "-c", "mkdir -p /srv; echo side > /srv/made; exec sleep infinity"]
    volumes: [shared:/shared]
volumes:
  shared:
"""
WITH_SIDECAR = {"environment/docker-compose.yaml": SIDECAR}

TASKS = (
    Task("plain"),
    Task("version", keys=("schema_version",), files={"task.toml": 'version = "1.0"\n'}),
    Task("empty-file", files={"task.toml": "\n"}),
    Task(
        "package",
        '[task]\nname = "demo/one"\nversion = "1.0.0"\ndescription = "One."\nkeywords = ["a"]\n'
        '[[task.authors]]\nname = "A"\nemail = "a@example.org"\n[metadata]\nlevel = 3\ntags = ["x"]\n',
        keys=("task.name", "task.version", "task.description", "task.keywords",
              "task.authors.name", "task.authors.email", "metadata"),
    ),
    Task("source", 'source = "made"\n', keys=("source",)),
    Task("strategy", 'multi_step_reward_strategy = "final"\n', keys=("multi_step_reward_strategy",)),
    Task(
        "empty-values",
        "artifacts = []\n[verifier]\ncollect = []\n[verifier.env]\n[environment]\nmcp_servers = []\n"
        "[environment.env]\n[solution.env]\n",
    ),
    # The verifier
    Task("verifier-timeout", "[verifier]\ntimeout_sec = 30.0\n", keys=("verifier.timeout_sec",)),
    Task(
        "verifier-env", '[verifier.env]\nWORD = "it\'s  $HOME"\n',
        test=check('[ "$WORD" = "it\'s  \\$HOME" ] && grep -qx done out'), keys=("verifier.env",),
    ),
    Task("verifier-user", '[verifier]\nuser = "root"\n', keys=("verifier.user",)),
    Task("shared", '[verifier]\nenvironment_mode = "shared"\n', keys=("verifier.environment_mode",)),
    Task("separate-copy", KEPT + SEPARATE, test=APP_TEST, keys=("artifacts",)),
    Task("separate-own", KEPT + SEPARATE, test=APP_TEST, files=OWN_TESTS),
    Task("separate-sees-no-diff", SEPARATE, test=check("[ -e /app/out ]"), files=OWN_TESTS),
    Task(
        "verifier-environment", KEPT + '[verifier.environment]\nos = "linux"\nbuild_timeout_sec = 300.0\n',
        test=APP_TEST, files=OWN_TESTS,
        keys=("verifier.environment.os", "verifier.environment.build_timeout_sec"),
    ),
    Task(
        "verifier-image", KEPT + f'[verifier.environment]\ndocker_image = "{OTHER}"\n',
        keys=("verifier.environment.docker_image",),
    ),
    Task(
        "verifier-workdir", KEPT + '[verifier.environment]\nworkdir = "/opt"\n',
        test=check('[ "$PWD" = /opt ] && [ -e /app/out ]'), files=OWN_TESTS,
        keys=("verifier.environment.workdir",),
    ),
    Task(
        "verifier-environment-env", KEPT + '[verifier.environment.env]\nWORD = "a b"\n',
        test=check('[ "$WORD" = "a b" ] && [ -e /app/out ]'), files=OWN_TESTS,
        keys=("verifier.environment.env",),
    ),
    Task(
        "verifier-limits",
        KEPT + "[verifier.environment]\ncpus = 1\nmemory_mb = 512\nstorage_mb = 1024\ngpus = 0\n"
        'gpu_types = ["T4"]\n',
        test=APP_TEST, files=OWN_TESTS,
        keys=tuple(
            f"verifier.environment.{key}" for key in ("cpus", "memory_mb", "storage_mb", "gpus", "gpu_types")
        ),
    ),
    # The agent
    Task("agent-timeout", "[agent]\ntimeout_sec = 60.0\n", keys=("agent.timeout_sec",)),
    Task("agent-user", '[agent]\nuser = "root"\n', keys=("agent.user",)),
    # Networks
    Task("public", '[environment]\nnetwork_mode = "public"\n', keys=("environment.network_mode",)),
    Task("no-network", '[environment]\nnetwork_mode = "no-network"\n'),
    Task("allow-internet", "[environment]\nallow_internet = false\n", keys=("environment.allow_internet",)),
    Task("agent-network", '[agent]\nnetwork_mode = "no-network"\n', keys=("agent.network_mode",)),
    Task("verifier-network", '[verifier]\nnetwork_mode = "no-network"\n', keys=("verifier.network_mode",)),
    Task(
        "verifier-environment-network", KEPT + '[verifier.environment]\nnetwork_mode = "no-network"\n',
        test=APP_TEST, files=OWN_TESTS, keys=("verifier.environment.network_mode",),
    ),
    Task(
        "verifier-environment-offline",
        KEPT + "[verifier.environment]\nallow_internet = false\n",
        test=APP_TEST,
        files=OWN_TESTS,
        keys=("verifier.environment.allow_internet",),
    ),
    Task(
        "allowlist",
        '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.example", "*.b.example"]\n',
        keys=("environment.allowed_hosts",),
    ),
    Task(
        "phase-allowlists",
        "".join(
            f'[{phase}]\nnetwork_mode = "allowlist"\nallowed_hosts = ["{host}"]\n'
            for phase, host in (("agent", "192.0.2.0/24"), ("verifier", "2001:db8::1"))
        ),
        keys=("agent.allowed_hosts", "verifier.allowed_hosts"),
    ),
    Task(
        "verifier-environment-allowlist",
        KEPT + '[verifier.environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.example"]\n',
        test=APP_TEST,
        files=OWN_TESTS,
        keys=("verifier.environment.allowed_hosts",),
    ),
    # The environment
    Task("build-timeout", "[environment]\nbuild_timeout_sec = 300.0\n", keys=("environment.build_timeout_sec",)),
    Task(
        "image", f'[environment]\ndocker_image = "{BASE}"\nworkdir = "/app"\n', files=NO_DOCKERFILE,
        keys=("environment.docker_image",),
    ),
    Task(
        "image-with-files", f'[environment]\ndocker_image = "{BASE}"\nworkdir = "/app"\n',
        solve="#!/bin/bash\ncp given.txt out\n", files=NO_DOCKERFILE | {"environment/given.txt": "done\n"}),
    Task(
        "image-workdir", f'[environment]\ndocker_image = "{BASE}"\n', files=NO_DOCKERFILE,
        test=check('[ "$PWD" = /app ] && grep -qx done /app/out'),
    ),
    Task(
        "image-workdir-with-files", f'[environment]\ndocker_image = "{BASE}"\n',
        solve="#!/bin/bash\ncp given.txt out\n", test=APP_TEST,
        files=NO_DOCKERFILE | {"environment/given.txt": "done\n", "environment/more/a": "a\n"},
    ),
    Task(
        "health-check",
        '[environment.healthcheck]\ncommand = "echo x >> tried; [ $(wc -l < tried) = 3 ]"\n'
        "interval_sec = 0.2\ntimeout_sec = 20.0\nstart_period_sec = 30.0\nstart_interval_sec = 0.2\n"
        "retries = 1\n",
        test=check("[ $(wc -l < tried) = 3 ] && grep -qx done out"), keys=("environment.healthcheck",),
    ),
    Task(
        "image-over-dockerfile", f'[environment]\ndocker_image = "{BASE}"\nworkdir = "/app"\n',
        test=check("[ ! -e /built ] && grep -qx done out"),
        files={"environment/Dockerfile": DOCKERFILE + "COPY Dockerfile /built\n"},
    ),
    Task(
        "workdir", '[environment]\nworkdir = "/opt/work"\n', test=check('[ "$PWD" = /opt/work ] && [ -e out ]'),
        files={"environment/Dockerfile": DOCKERFILE + "COPY Dockerfile /opt/work/\n"}, keys=("environment.workdir",),
    ),
    Task(
        "dockerfile-workdir", test=check('[ "$PWD" = /app/sub ] && [ -e out ]'),
        files={"environment/Dockerfile": DOCKERFILE + "WORKDIR sub\n"},
    ),
    Task(
        "environment-env", '[environment.env]\nWORD = "a b"\n',
        solve='#!/bin/bash\necho "$WORD" > out\n', test=check('[ "$WORD" = "a b" ] && grep -qx "a b" out'),
        keys=("environment.env",),
    ),
    Task(
        "env-over-dockerfile", '[environment.env]\nWORD = "toml"\n', test=check('[ "$WORD" = toml ] && [ -e out ]'),
        files={"environment/Dockerfile": DOCKERFILE + "ENV WORD=file OTHER=x\n"},
    ),
    Task(
        "dockerfile-env", solve='#!/bin/bash\necho "$WORD" > out\n', test=check("grep -qx file out"),
        files={"environment/Dockerfile": DOCKERFILE + "ENV WORD=file\n"},
    ),
    Task(
        "copied-files", solve="#!/bin/bash\nsed -i s/bad/good/ data/list.txt\n",
        test=check("[ $(cat data/list.txt) = good ]"),
        files={"environment/Dockerfile": DOCKERFILE + "COPY data data\n", "environment/data/list.txt": "bad\n"},
    ),
    Task("cpus", "[environment]\ncpus = 0.5\n", keys=("environment.cpus",)),
    Task(
        "memory", "[environment]\nmemory_mb = 512\nstorage_mb = 2048\n",
        keys=("environment.memory_mb", "environment.storage_mb"),
    ),
    Task("old-memory", '[environment]\nmemory = "1G"\nstorage = "2G"\n'),
    Task("gpus", '[environment]\ngpus = 0\ngpu_types = ["H100"]\n', keys=("environment.gpus", "environment.gpu_types")),
    Task("os", '[environment]\nos = "Linux"\n', keys=("environment.os",)),
    Task("skills", '[environment]\nskills_dir = "/skills"\n', keys=("environment.skills_dir",)),
    Task(
        "mcp-servers",
        '[[environment.mcp_servers]]\nname = "notes"\ntransport = "stdio"\ncommand = "true"\nargs = ["-x"]\n',
        keys=tuple(f"environment.mcp_servers.{key}" for key in ("name", "transport", "command", "args")),
    ),
    Task(
        "mcp-url",
        '[[environment.mcp_servers]]\nname = "docs"\ntransport = "http"\nurl = "http://localhost:8000/mcp"\n'
        'headers = {Authorization = "Bearer ${DOCS}"}\n',
        keys=("environment.mcp_servers.url", "environment.mcp_servers.headers"),
    ),
    # The solution
    Task(
        "solution-env", '[solution.env]\nWORD = "it is"\n', solve='#!/bin/bash\necho "$WORD" > out\n',
        test=check('grep -qx "it is" out'), keys=("solution.env",),
    ),
    Task(
        "solution-files", solve="#!/bin/bash\ncp /solution/given/text out\n",
        files={"solution/given/text": "done\n"},
    ),
    Task(
        "solution-python", solve='#!/usr/bin/python3\nprint("done", file=open("out", "w"))\n',
    ),
    # Artifacts
    Task("artifact-file", KEPT),
    Task(
        "artifact-folder", 'artifacts = ["/app/made"]\n',
        solve=solve("mkdir -p made/sub made/empty", "echo a > made/a", "echo b > made/sub/b"),
    ),
    Task("artifact-elsewhere", 'artifacts = ["/srv/made"]\n', solve="#!/bin/bash\nmkdir -p /srv\necho done > /srv/made\n",
         test=check("grep -qx done /srv/made")),
    Task(
        "artifact-exclude", 'artifacts = [{source = "/app/made", exclude = ["*.log", "sub/deep"]}]\n',
        solve=solve("mkdir -p made/sub/deep", "touch made/a made/a.log made/sub/b.log made/sub/deep/c made/sub/d"),
        keys=("artifacts.source", "artifacts.exclude"),
    ),
    Task(
        "artifact-exclude-anchored", 'artifacts = [{source = "/app/made", exclude = ["./a"]}]\n',
        solve=solve("mkdir -p made/sub", "touch made/a made/sub/a"),
    ),
    Task(
        "artifact-exclude-of-file", 'artifacts = [{source = "/app/out", exclude = ["out"]}]\n',
    ),
    Task(
        "artifact-destination", 'artifacts = [{source = "/app/out", destination = "kept/it.txt"}]\n',
        keys=("artifacts.destination",),
    ),
    Task("artifact-service", 'artifacts = [{source = "/app/out", service = "main"}]\n', keys=("artifacts.service",)),
    Task(
        "collect", 'artifacts = ["/app/dump"]\n[[verifier.collect]]\ncommand = "cat out out > dump"\ntimeout_sec = 20.0\n'
        '[[verifier.collect]]\ncommand = "exit 3"\nservice = "main"\nuser = "root"\n',
        test=check("[ $(wc -l < dump) = 2 ]"), keys=("verifier.collect",),
    ),
    Task(
        "collect-separate", f'artifacts = ["/app/dump"]\n{SEPARATE}[[verifier.collect]]\ncommand = "cp out dump"\n',
        test=check("grep -qx done /app/dump"), files=OWN_TESTS,
    ),
    Task(
        "artifact-sidecar", 'artifacts = [{source = "/srv/made", service = "db"}]\n' + SEPARATE,
        test=check("grep -qx side /srv/made && [ -e /logs/artifacts/it ]"),
        solve="#!/bin/bash\necho it > /logs/artifacts/it\n", files=OWN_TESTS | WITH_SIDECAR,
    ),
    Task(
        "collect-sidecar",
        f'artifacts = [{{source = "/srv/dump", service = "db"}}]\n{SEPARATE}[[verifier.collect]]\n'
        'command = "cat /srv/made /shared/out > /srv/dump"\nservice = "db"\nuser = "root"\n',
        test=check("grep -qx side /srv/dump && grep -qx done /srv/dump"), files=OWN_TESTS | WITH_SIDECAR,
        solve="#!/bin/bash\necho done > /shared/out\n",
    ),
    Task("artifact-absent", 'artifacts = ["/app/out", "/app/absent"]\n'),
    Task(
        "artifact-links", 'artifacts = ["/app/made"]\n',
        solve=solve("mkdir made", "echo a > made/a", "ln -s a made/link"),
    ),
    Task(
        "artifact-overlap", 'artifacts = ["/app/made", "/app/made/sub"]\n',
        solve=solve("mkdir -p made/sub", "touch made/a made/sub/b"),
    ),
    Task("artifact-workdir", 'artifacts = ["/app"]\n' + SEPARATE, test=APP_TEST, files=OWN_TESTS),
    Task("published", solve=solve("echo it > /logs/artifacts/it")),
    Task(
        "published-separate", SEPARATE, solve="#!/bin/bash\necho it > /logs/artifacts/it\n",
        test=check("grep -qx it /logs/artifacts/it"), files=OWN_TESTS,
    ),
    # Rewards
    Task("reward-json", test="#!/bin/bash\ngrep -q done out && r=1 || r=0\necho '{\"reward\": '$r'}' > /logs/verifier/reward.json\n"),
    Task(
        "reward-names",
        test="#!/bin/bash\ngrep -q done out && r=1 || r=0\n"
        "echo '{\"exists\": '$r', \"style\": 0.25}' > /logs/verifier/reward.json\n",
    ),
    Task(
        "reward-both",
        test="#!/bin/bash\necho 0.75 > /logs/verifier/reward.txt\necho '{\"reward\": 0.5}' > /logs/verifier/reward.json\n",
    ),
    Task("reward-half", test="#!/bin/bash\n[ -e out ] && r=.5 || r=0\necho $r > /logs/verifier/reward.txt\n"),
    Task("reward-absent", test="#!/bin/bash\ntrue\n"),
    Task("reward-empty", test="#!/bin/bash\n: > /logs/verifier/reward.txt\n"),
    Task("reward-no-number", test="#!/bin/bash\necho yes > /logs/verifier/reward.txt\n"),
    Task("reward-nan", test="#!/bin/bash\necho nan > /logs/verifier/reward.txt\n"),
    Task("reward-without-change", test=check("[ ! -e out ]")),
    Task(
        "reward-forged", solve="#!/bin/bash\nmkdir -p /logs/verifier\necho 1 > /logs/verifier/reward.txt\n",
        test="#!/bin/bash\ntrue\n",
    ),
    # Tests
    Task("test-fails", test=TEST + "exit 3\n"),
    Task("test-files", test='#!/bin/bash\npython3 "$(dirname "$0")"/more/check.py\n',
         files={"tests/more/check.py": 'import os\nprint(int(os.path.exists("out")), file=open("/logs/verifier/reward.txt", "w"))\n'}),
    Task("test-python", test='#!/usr/bin/python3\nimport os\nprint(int(os.path.exists("out")), file=open("/logs/verifier/reward.txt", "w"))\n'),
    Task("test-too-slow", "[verifier]\ntimeout_sec = 3.0\n", test="#!/bin/bash\nsleep 60\necho 1 > /logs/verifier/reward.txt\n"),
    # What the agent leaves
    Task("left-executable", solve=solve("printf '#!/bin/sh\\necho hi\\n' > run", "chmod +x run"), test=check('[ "$(./run)" = hi ]')),
    Task("left-binary", solve=solve("printf '\\0\\1\\377' > out.bin"), test=check("[ $(stat -c %s out.bin) = 3 ]")),
    Task("left-link", solve=solve("ln -s out link"), test=check("[ $(readlink link) = out ]")),
    Task(
        "left-deleted", solve="#!/bin/bash\nrm old\n", test=check("[ ! -e old ]"),
        files={"environment/Dockerfile": DOCKERFILE + "COPY Dockerfile old\n"},
    ),
    Task(
        "left-ignored", solve=solve("mkdir build", "touch build/it"), test=check("[ -e build/it ]"),
        files={"environment/Dockerfile": DOCKERFILE + "COPY rules .gitignore\n", "environment/rules": "build\n"},),
    Task("left-empty-folder", solve=solve("mkdir empty"), test=check("[ -d empty ]")),
    Task("left-elsewhere", solve=solve("mkdir -p /srv", "echo it > /srv/it"), test=check("[ -e /srv/it ]")),
    Task(
        "left-running", solve=solve("(while :; do echo up > /tmp/beat; sleep 0.2; done) </dev/null >/dev/null 2>&1 &"),
        test=check("rm -f /tmp/beat; sleep 5; [ -e /tmp/beat ] && grep -qx done out"),
    ),
    Task("image-user", solve=solve("id -un > who"), test=check("grep -qx agent who"),
         files={"environment/Dockerfile": f"FROM {BASE}\nCOPY --chown=agent . /work\nWORKDIR /work\nUSER agent\n"}, differs="refused: sandboxes run images as root"),
    Task("agent-too-slow", "[agent]\ntimeout_sec = 10.0\n", solve="#!/bin/bash\necho early > early\nsleep 600\necho done > out\n",
         test=check("[ -e early ] && [ ! -e out ]")),
)  # fmt: skip
