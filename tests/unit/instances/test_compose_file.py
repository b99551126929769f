"""A Harbor task's docker-compose.yaml becomes sidecars, or is refused with every reason."""

import json
import os
from pathlib import Path

import pytest

from perdure import variant_registry
from perdure.errors import ConfigurationError, InstanceError
from perdure.instances import base_trees, build_contexts
from perdure.instances.environment_builder import check_image
from perdure.instances.rows.row_conversion import to_instance
from perdure.sandboxes.providers.kubernetes.provider import KubernetesProvider
from perdure.sandboxes.providers.podman import PodmanProvider
from perdure.settings.settings_tree import Settings
from perdure.stack import home_providers
from perdure.storage.local_store import LocalStore
from perdure.types import Healthcheck, Instance, SharedFolder, Sidecar
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


VOLUMES = """
services:
  main: {volumes: ["shared-data:/in:ro", "${HOST_VERIFIER_LOGS_PATH}:/logs/verifier"]}
  db:
    image: postgres:16
    volumes:
      - ./init.sql:/docker-entrypoint-initdb.d/init.sql:ro
      - ${CONTEXT_DIR}/migrate:/migrate/
      - ./absent:/absent
      - pgdata:/var/lib/postgresql/data
      - /cache
      - {type: volume, source: shared-data, target: /out}
volumes: {pgdata: , shared-data: {driver: local}}
"""


async def test_volumes_become_files_and_shared_folders(tmp_path: Path) -> None:
    """Only what several containers mount is shared. Files of the task's folder become part of the
    service's image, which any host can build."""
    folder = task(tmp_path / "add", VOLUMES)
    (folder / "environment/init.sql").write_text("select 1;")
    read_ = read(folder)
    store = LocalStore(str(tmp_path / "store"))
    stored = await build_contexts.store_contexts(store, read_)
    db, own = stored.environment.sidecars["db"], stored.environment.folders
    assert db.build is not None
    assert db.build.key is not None
    base_trees.unpack((await store.get(db.build.key)).data, tmp_path / "context")
    dockerfile = (tmp_path / "context/Dockerfile").read_text()

    assert db.folders == (SharedFolder(name="shared-data-0", target="/out"),)
    assert own == (SharedFolder(name="shared-data-0", target="/in", read_only=True),)
    assert db.files == {}
    assert db.image in {one.image for one in stored.environments}
    assert dockerfile.startswith("FROM postgres:16\n")
    for line in (
        'COPY [".perdure-files/0", "/docker-entrypoint-initdb.d/init.sql"]',
        "RUN rm -rf -- /migrate || true",
        'COPY [".perdure-files/1/", "/migrate/"]',
    ):
        assert line in dockerfile.splitlines()
    assert (tmp_path / "context/.perdure-files/0").read_text() == "select 1;"
    assert (tmp_path / "context/.perdure-files/1/Dockerfile").exists()


async def test_a_pod_gets_images_that_were_built_elsewhere(tmp_path: Path) -> None:
    """The refusal names the service and its image, and a map of pushed images ends it."""
    folder = task(tmp_path / "add", "services: {db: {image: 'db:1', volumes: ['./migrate:/m']}}")
    store = LocalStore(str(tmp_path / "store"))
    stored = await build_contexts.store_contexts(store, read(folder))
    image = str(stored.environment.sidecars["db"].image)
    names = {image: "registry/db:1", str(stored.environment.image): "registry/main:1"}
    settings = Settings(home=tmp_path / "home")

    def on_cluster(images: dict[str, str]) -> KubernetesProvider:
        (tmp_path / "map.json").write_text(json.dumps(images))
        mapped = settings.sandbox.model_copy(update={"image_map": tmp_path / "map.json"})
        return KubernetesProvider(settings.model_copy(update={"sandbox": mapped}))

    with pytest.raises(ConfigurationError, match=f"the sidecar db of .* map '{image}'"):
        check_image(stored, on_cluster({**names, image: image}))

    check_image(stored, on_cluster(names))


BAD = """
services:
  db: {image: "db:1", ports: ["80:5432"], volumes: ["/var/run/docker.sock:/a", "../tests:/b", "./migrate:/c", "a:relative"], env_file: x, healthcheck: {test: a, interval: soon}}
  web: {image: "web:1", volumes: ["./migrate:/d:ro"], expose: [5432], depends_on: {cache: {condition: service_healthy}}}
  cache: {build: {context: migrate, target: slim}, networks: [back], environment: [HOST_ONLY]}
  main: {command: serve, image: "other:1", volumes: ["./migrate:/e:ro"]}
secrets: {a: {}}
volumes: {a: {external: true}}
"""


def test_everything_unsupported_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(InstanceError) as caught:
        read(task(tmp_path / "add", BAD))

    for said in (
        "'/var/run/docker.sock' is not in the task's folder", "'../tests' is not", "db and web and main share 'migrate'",
        "'a:relative' has no absolute path", "volumes.a: Perdure has no equivalent of external",
        "services.main.volumes`: COPY", "services.db.env_file", "healthcheck.interval",
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


def test_a_task_with_services_needs_no_dockerfile(tmp_path: Path) -> None:
    """As in Harbor, which copies the folder into the image's workdir only if it has no compose file."""
    folder = write_harbor(tmp_path / "add", "main:1")
    (folder / "environment/Dockerfile").unlink()
    write_compose(folder, "services: {db: {image: 'db:1'}}")

    assert [*read(folder).environment.sidecars] == ["db"]


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


@pytest.mark.parametrize("more", ["", '[verifier.environment]\ndocker_image = "t:1"\n'])
def test_a_provider_that_tells_no_workdir_refuses_before_the_run(tmp_path: Path, more: str) -> None:
    """Of the agent's image or of the verifier's, if the task names none."""
    folder = write_harbor(tmp_path / "add", "img:1", "/app" if more else "", more=more)
    settings = Settings(home=tmp_path / "home")

    with pytest.raises(ConfigurationError, match="WORKDIR of its image, which --sandbox apptainer"):
        check_image(read(folder), home_providers.provider(settings, "apptainer"))
    check_image(read(folder), home_providers.provider(settings, "podman"))


@pytest.mark.parametrize(
    "name", ["apptainer", "bubblewrap", "daytona", "docker gvisor", "e2b", "local", "modal"]
)
def test_a_provider_without_sidecars_refuses_before_the_run(tmp_path: Path, name: str) -> None:
    instance = read(task(tmp_path / "add", "services: {db: {image: 'db:1'}}"))
    sandbox, _, runtime = name.partition(" ")
    settings = Settings(home=tmp_path / "home")
    docker = settings.docker.model_copy(update={"runtime": runtime})
    provider = variant_registry.load("sandbox", variant_registry.SANDBOXES, sandbox)(
        settings.model_copy(update={"docker": docker})
    )

    with pytest.raises(ConfigurationError, match=f"sidecars db, which {sandbox} cannot run"):
        check_image(instance, provider)


def test_podman_of_an_ordinary_user_refuses_before_the_run(tmp_path: Path) -> None:
    instance = read(task(tmp_path / "add", "services: {db: {image: 'db:1'}}"))
    provider, user = PodmanProvider(Settings(home=tmp_path / "home")), os.geteuid()
    os.seteuid(user or 65534)
    try:
        with pytest.raises(ConfigurationError, match=r"podman cannot run.*workers as root"):
            check_image(instance, provider)
    finally:
        os.seteuid(user)
