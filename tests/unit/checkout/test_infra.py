"""The cluster's files agree with the code they start: commands, attributes, metrics, settings."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
import yaml
from temporalio.common import SearchAttributeKey

from perdure.client import search_attribute_keys, temporal_names
from perdure.engines.engine_roster import InMemoryRoster
from perdure.engines.pool.engine_pool import EnginePool
from perdure.engines.pool.pool_metrics import pool_metrics
from perdure.gateway.gateway_metrics import Metrics as GatewayMetrics
from perdure.settings import settings_loader
from perdure.storage import store_keys
from perdure.telemetry import METRICS
from tests import promql
from tests.checkout_paths import ROOT
from tests.s3_server import S3Server

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = {name: s for name, s in COMPOSE["services"].items() if s["image"] == "perdure"}


def test_namespace_script_registers_every_search_attribute() -> None:
    """A server set up by infra/temporal knows the same attributes as one from `perdure up`."""
    script = (ROOT / "infra/temporal/setup_namespace.sh").read_text()
    table = dict(re.findall(r"^(Perdure\w+) (\w+)$", script, re.MULTILINE))

    assert table == temporal_names.SEARCH_ATTRIBUTES


def test_every_search_attribute_is_registered() -> None:
    """A rollout that sets one that the server does not know could not start."""
    keys_used = [
        k for k in vars(search_attribute_keys).values() if isinstance(k, SearchAttributeKey)
    ]
    used = {key.name: key.indexed_value_type.name.title() for key in keys_used}

    assert used == temporal_names.SEARCH_ATTRIBUTES


@pytest.mark.parametrize("service", OURS)
def test_services_start_modules_that_exist(service: str) -> None:
    """Each `python -m` of the compose file names a module that can be run."""
    command = OURS[service]["command"]
    if command[:2] == ["python", "-m"]:
        found = importlib.util.find_spec(command[2])
        assert found is not None, command
    else:
        assert command[0] == "perdure" or (ROOT / command[1]).is_file()


def test_every_role_has_a_service() -> None:
    """No queue of ours is left without a worker."""
    from workers.worker_process import ROLES

    commands = [" ".join(service["command"]) for service in OURS.values()]

    assert [f"python -m workers {s}" in commands for s in ROLES] == [True] * len(ROLES)


def test_what_no_episode_removes_from_the_store_expires(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Journals of abandoned rollouts and parts of uploads; results and other rules stay."""
    monkeypatch.setenv("PERDURE_STORE", "s3://made/a/store")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("PERDURE_S3_ENDPOINT_URL", s3.url)
    client = boto3.client("s3", endpoint_url=s3.url)
    client.create_bucket(Bucket="made")
    client.put_bucket_lifecycle_configuration(
        Bucket="made",
        LifecycleConfiguration={
            "Rules": [{"Status": "Enabled", "Filter": {"Prefix": "x/"}, "Expiration": {"Days": 1}}]
        },
    )
    script = [sys.executable, str(ROOT / "infra/s3/make_bucket.py")]
    for days in ("7", "9"):
        subprocess.run([*script, "--days", days], check=True, capture_output=True)

    rules = client.get_bucket_lifecycle_configuration(Bucket="made")["Rules"]
    uploads = [rule for rule in rules if "AbortIncompleteMultipartUpload" in rule]
    assert [rule["Filter"]["Prefix"] for rule in uploads] == ["a/store/"]
    expiring = [rule for rule in rules if rule not in uploads]
    days_of = {rule["Filter"]["Prefix"]: rule["Expiration"]["Days"] for rule in expiring}
    assert days_of.pop("x/") == 1
    written = [store_keys.journal("s"), store_keys.run("r")]
    assert [_days(days_of, f"a/store/{key}") for key in written] == [9, None]


def _days(rules: dict[str, int], key: str) -> int | None:
    return next((days for prefix, days in rules.items() if key.startswith(prefix)), None)


@pytest.fixture
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


def test_compose_sets_only_settings_that_exist() -> None:
    """If no process read a variable of the compose file, the mistake would be silent."""
    names = {settings_loader.variable(path) for path in settings_loader.fields()}
    given = {v for s in OURS.values() for v in s["environment"] if v.startswith("PERDURE_")}

    assert given - names == set()


def test_every_setting_of_the_env_file_reaches_our_services() -> None:
    """Also keys of sandbox providers, package indexes and proxies; the store and Temporal, which are on
    our own networks, are reached without the proxy."""
    for name, service in OURS.items():
        assert service["env_file"] == [{"path": ".env", "required": False}], name
        for variable in ("NO_PROXY", "no_proxy"):
            direct = service["environment"][variable].split(",")
            assert {"gateway", "s3", "temporal", "localhost"} <= set(direct)


def test_our_services_see_the_files_that_settings_name_and_cannot_change_them() -> None:
    """For example a kubeconfig, or the keys that encrypt payloads. Git ignores them."""
    assert [n for n, s in OURS.items() if "./infra/keys:/keys:ro" not in s["volumes"]] == []
    ignored = subprocess.run(
        ["git", "check-ignore", "--quiet", "infra/keys/config"], cwd=ROOT, check=False
    )
    assert ignored.returncode == 0


def test_the_command_line_writes_to_a_volume() -> None:
    """`cli` runs in a folder that its user may write to, and that outlives its container."""
    cli = OURS["cli"]

    assert any(mount.endswith(f":{cli['working_dir']}") for mount in cli["volumes"])


def test_mounted_files_exist() -> None:
    """Every host path the compose file mounts is in the repository."""
    mounts = [m for s in COMPOSE["services"].values() for m in s.get("volumes", ())]
    paths = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]

    assert [p for p in paths if not (ROOT / p).exists()] == []


def test_the_image_is_built_from_what_is_here() -> None:
    """Every path the Dockerfile copies and every extra it installs exists."""
    dockerfile = (ROOT / "infra/images/Dockerfile").read_text()
    copied = [p for line in re.findall(r"^COPY (.+)$", dockerfile, re.M) for p in line.split()[:-1]]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]

    assert [path for path in copied if not (ROOT / path).exists()] == []
    installed = set(re.findall(r"--extra (\w+)", dockerfile))
    assert installed - set(extras) == set()
    assert "report" in installed  # `perdure report --html` draws plots


IMAGES = [ROOT / "infra/images/Dockerfile", ROOT / "infra/ray/Dockerfile"]


@pytest.mark.parametrize("dockerfile", IMAGES, ids=lambda path: str(path.parent.name))
def test_what_an_image_copies_is_not_ignored(dockerfile: Path) -> None:
    """A path that .dockerignore leaves out ends the build."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", dockerfile.read_text(), re.M)
    copied = [path for line in lines for path in line.split()[:-1]]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}

    assert [
        path for path in copied if not sent & {path, *(str(above) for above in Path(path).parents)}
    ] == []


@pytest.mark.parametrize("dockerfile", IMAGES, ids=lambda path: str(path.parent.name))
def test_images_run_as_a_user_and_their_bases_can_be_pinned(dockerfile: Path) -> None:
    """The last USER is not root, and each base is a build argument that takes a digest."""
    text = dockerfile.read_text()
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)

    assert users[-1:] == ["perdure"]
    assert [base for base in bases if not re.fullmatch(r"\$\{\w+_IMAGE\}", base)] == []
    assert "@sha256:" in text


def test_uv_is_the_locked_one_with_its_hashes() -> None:
    """Set-up script and image install the wheels of uv that uv.lock names, and no other."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    (uv,) = [package for package in lock["package"] if package["name"] == "uv"]
    wanted = (ROOT / "infra/setup/uv.txt").read_text()
    scripts = [(ROOT / name).read_text() for name in ("infra/setup/uv", "infra/images/Dockerfile")]

    assert re.findall(r"^uv==(\S+)", wanted, re.MULTILINE) == [uv["version"]]
    assert set(re.findall(r"--hash=(\S+)", wanted)) == {wheel["hash"] for wheel in uv["wheels"]}
    assert all("--require-hashes" in script and "uv.txt" in script for script in scripts)


def test_only_who_needs_temporal_is_on_its_network() -> None:
    """The gateway, which talks to agents, cannot reach Temporal; no sandbox has a network at all."""
    networks = {n: s.get("networks", ["default"]) for n, s in COMPOSE["services"].items()}
    workers = {name for name in OURS if name.startswith("worker-")}

    assert {name for name, on in networks.items() if "temporal" in on and name in OURS} == (
        workers | {"cli"}
    )
    assert {networks[name][0] for name in ("temporal", "postgres")} == {"temporal"}
    assert all("networks" not in s or "host" not in s["networks"] for s in OURS.values())
    assert all("network_mode" not in s for s in COMPOSE["services"].values())


def test_no_service_of_ours_is_root_or_has_a_capability() -> None:
    """They run as the image's user; workers that make sandboxes too."""
    assert {
        name for name, service in OURS.items() if "user" in service or "cap_add" in service
    } == set()
    assert {tuple(service["cap_drop"]) for service in OURS.values()} == {("ALL",)}
    assert [n for n, s in OURS.items() if "no-new-privileges:true" not in s["security_opt"]] == []


SQL_TOOL = """#!/bin/sh
# As temporal-sql-tool behaves on PostgreSQL: a version reset to 0.0 makes the next update collide.
while [ "$1" != --db ]; do shift; done
state="$STATE/$2" action=$3
case $action in
    create) [ ! -e "$state.db" ] && touch "$state.db" ;;
    setup-schema) echo 0.0 >"$state.version" ;;
    update-schema)
        [ -e "$state.version" ] || exit 1
        [ "$(cat "$state.version")" = 0.0 ] && [ -e "$state.tables" ] && exit 1
        touch "$state.tables" && echo 1.19 >"$state.version" ;;
esac
"""


def test_schema_script_can_be_repeated(tmp_path: Path) -> None:
    """A second `docker compose up` meets databases that exist, and leaves their version alone."""
    tool = tmp_path / "temporal-sql-tool"
    tool.write_text(SQL_TOOL)
    tool.chmod(0o755)
    names = ("POSTGRES_SEEDS", "DB_PORT", "POSTGRES_USER")
    env = dict.fromkeys(names, "x") | {"STATE": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}

    for _ in range(2):
        subprocess.run([ROOT / "infra/temporal/setup_schema.sh"], env=env, check=True)

    versions = {file.stem: file.read_text().strip() for file in tmp_path.glob("*.version")}
    assert versions == {"temporal": "1.19", "temporal_visibility": "1.19"}


async def test_panels_and_alerts_read_metrics_that_exist() -> None:
    """Each expression asks for metrics that some process serves; `tests/integration/test_dashboards.py`
    asks a live stack for their labels."""
    gateway = GatewayMetrics().text().decode()
    async with httpx.AsyncClient() as client:
        pool = pool_metrics(EnginePool(InMemoryRoster(), client)).decode()
    workers = {name + suffix for name in METRICS for suffix in ("", "_total", "_bucket", "_count")}
    served = promql.served(gateway, pool) | dict.fromkeys(workers)
    ours = {
        metric: one
        for one in promql.expressions()
        for metric in one.metrics
        if metric.startswith("perdure_")
    }

    assert {metric: one.where for metric, one in ours.items() if metric not in served} == {}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("arguments", [("rules", "alerts.yml"), ("config", "prometheus.yml")])
def test_prometheus_accepts_its_files(arguments: tuple[str, str]) -> None:
    """Its own checker reads the rules and the configuration that names them."""
    what, name = arguments
    checked = subprocess.run(
        ["promtool", "check", what, str(ROOT / "infra/prometheus" / name)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert checked.returncode == 0, checked.stderr
