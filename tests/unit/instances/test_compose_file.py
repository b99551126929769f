"""A Harbor task's docker-compose.yaml becomes sidecars, or is refused with every reason."""

from pathlib import Path

import pytest

from perdure.errors import ConfigurationError, InstanceError
from perdure.instances import build_contexts
from perdure.instances.environment_builder import check_image
from perdure.instances.rows.row_conversion import to_instance
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from perdure.types import Healthcheck, Instance, Sidecar
from tests.unit.instances.made_rows import write_compose, write_harbor

WHOLE = """
services:
  main:
    build: {context: "${CONTEXT_DIR}"}
    command: ["sh", "-c", "sleep infinity"]
    environment: {DATABASE: "redis://db", RETRIES: 3}
    depends_on: {db: {condition: service_healthy}, migrate: {condition: service_completed_successfully}}
  db:
    image: redis:7
    command: redis-server --port "${PORT:-6379}" --requirepass ${SECRET}
    environment: ["A=$$b", "ON=true"]
    container_name: database
    expose: [6379]
    restart: unless-stopped
    deploy: {resources: {limits: {memory: 256M, cpus: "0.5"}}}
    healthcheck: {test: redis-cli ping, interval: 1m30s, timeout: 500ms, retries: 5, start_period: 10s}
  migrate:
    build: ./migrate
    depends_on: [db]
"""


def task(folder: Path, compose: str, *, more: str = "") -> Path:
    made = write_harbor(folder, "", more=more)
    (made / "environment/Dockerfile").write_text("FROM scratch\nWORKDIR /app\n")
    (made / "environment/migrate").mkdir()
    (made / "environment/migrate/Dockerfile").write_text("FROM scratch\n")
    write_compose(made, compose)
    return made


def read(folder: Path) -> Instance:
    return to_instance({"data_source": "harbor", "task_folder": str(folder)}, "h", 1)


def test_services_become_sidecars(tmp_path: Path) -> None:
    """Images, commands, variables, limits, health checks and the order of the starts are kept."""
    instance = read(task(tmp_path / "add", WHOLE, more='[environment.env]\nSECRET = "s"\n'))
    sidecars = instance.environment.sidecars
    db, migrate = sidecars["db"], sidecars["migrate"]

    assert db == Sidecar(
        image="redis:7",
        command=("redis-server", "--port", "6379", "--requirepass", "s"),
        env={"A": "$b", "ON": "true"},
        aliases=("database",),
        healthcheck=Healthcheck(
            command=("/bin/sh", "-c", "redis-cli ping"),
            interval_s=90, timeout_s=0.5, retries=5, start_period_s=10,
        ),
        restart="unless-stopped",
        memory_mb=256,
        cpus=0.5,
    )  # fmt: skip
    assert (migrate.completes, migrate.depends_on) == (True, {"db": "started"})
    assert instance.environment.env == {"DATABASE": "redis://db", "RETRIES": "3", "SECRET": "s"}
    assert instance.grading.in_place


async def test_builds_of_services_reach_other_hosts(tmp_path: Path) -> None:
    """The import keeps each build context in the store, and names the image by it."""
    store = LocalStore(str(tmp_path / "store"))
    folder = task(tmp_path / "add", WHOLE.replace("${SECRET}", "s"))
    stored = await build_contexts.store_contexts(store, read(folder))
    migrate = stored.environment.sidecars["migrate"]

    assert migrate.build is not None
    assert migrate.build.key is not None
    assert await store.exists(migrate.build.key)
    assert migrate.image in {one.image for one in stored.environments}


BAD = """
services:
  db: {image: "db:1", ports: ["80:5432"], volumes: ["./a:/a"], env_file: x, healthcheck: {test: a, interval: soon}}
  web: {image: "web:1", expose: [5432], depends_on: {cache: {condition: service_healthy}}}
  cache: {build: {context: migrate, target: slim}, networks: [back], environment: [HOST_ONLY]}
  main: {command: serve, image: "other:1"}
secrets: {a: {}}
"""


def test_everything_unsupported_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(InstanceError) as caught:
        read(task(tmp_path / "add", BAD))

    for said in (
        "services.db.volumes", "COPY them", "services.db.env_file", "healthcheck.interval",
        "db and web both listen on port 5432", "services.cache.build", "different networks",
        "environment.HOST_ONLY", "services.main.command", "services.main.image", "`secrets`",
    ):  # fmt: skip
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("compose", "said"),
    [
        ("services: {a: {image: i, depends_on: [b]}, b: {image: i, depends_on: [a]}}", "depend on each other"),
        ("services: {a: {image: i, depends_on: [c]}}", "not a sidecar"),
        ("services: {a: {command: x}}", "neither `image` nor `build`"),
        ("services: [1", "no table `services`"),
    ],
)  # fmt: skip
def test_services_that_cannot_start_are_refused(tmp_path: Path, compose: str, said: str) -> None:
    with pytest.raises(InstanceError, match=said):
        read(task(tmp_path / "add", compose))


def test_a_separate_verifier_gets_services_of_its_own(tmp_path: Path) -> None:
    """As in Harbor, it uses the environment's unless tests/ has its own."""
    folder = task(tmp_path / "add", "services: {db: {image: 'db:1'}}")
    text = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(
        text.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"')
    )

    instance = read(folder)

    assert instance.grading.verifier is not None
    assert instance.grading.verifier.environment.sidecars == instance.environment.sidecars
    assert not instance.grading.in_place


def test_a_provider_without_sidecars_refuses_before_the_run(tmp_path: Path) -> None:
    instance = read(task(tmp_path / "add", "services: {db: {image: 'db:1'}}"))
    provider = BubblewrapProvider(Settings(home=tmp_path / "home"))

    with pytest.raises(ConfigurationError, match=r"sidecars db.*podman or docker"):
        check_image(instance, provider)
