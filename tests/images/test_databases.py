"""A Harbor task as people write it for a database: Debian's PostgreSQL with an init script, a named
volume, a health check and a second service that shares a folder, in podman and docker end to end.
"""

import textwrap
from pathlib import Path

import pytest

from perdure.instances.rows.row_import import import_rows
from perdure.rollouts.stage_services import Services
from perdure.settings.settings_tree import Settings
from tests.checkout_paths import ROOT
from tests.images import debian
from tests.images.test_sidecars import Engine, attempt_of, engine, played

__all__ = ["engine"]

IMAGE = "localhost/perdure-test/postgres:1"
PACKAGES = ("git", "patch", "postgresql", "python3")
DATA = "/var/lib/postgresql/data"
ENTRYPOINT = f"""\
#!/bin/bash
# As the official image: the server's user owns the data; scripts run at the first start.
set -e
bin=$(echo /usr/lib/postgresql/*/bin)
as() {{ setpriv --reuid=postgres --regid=postgres --clear-groups "$@"; }}
mkdir -p {DATA} /var/run/postgresql
chown -R postgres {DATA} /var/run/postgresql
if [ ! -s {DATA}/PG_VERSION ]; then
    as $bin/initdb -D {DATA} --auth=trust --no-sync >/dev/null
    as $bin/pg_ctl -D {DATA} -w -o "-c listen_addresses=''" start >/dev/null
    for script in /docker-entrypoint-initdb.d/*.sql; do as psql -v ON_ERROR_STOP=1 -f $script; done
    as $bin/pg_ctl -D {DATA} -w stop >/dev/null
fi
echo "host all all 127.0.0.1/32 trust" >>{DATA}/pg_hba.conf
exec setpriv --reuid=postgres --regid=postgres --clear-groups $bin/postgres -D {DATA}
"""
COMPOSE = f"""\
services:
  main:
    depends_on: {{db: {{condition: service_healthy}}, notes: {{condition: service_started}}}}
    environment: {{PGUSER: postgres, PGHOST: db}}
    volumes: ["notes:/notes:ro"]
  db:
    build: ./db
    volumes:
      - ./sql/init.sql:/docker-entrypoint-initdb.d/init.sql:ro
      - {{type: volume, source: pgdata, target: {DATA}}}
    ports: ["5432:5432"]
    healthcheck: {{test: [CMD, pg_isready, -h, db], interval: 1s, timeout: 60s, retries: 30}}
  notes:
    image: {IMAGE}
    command: [sh, -c, "cat /pages/*.txt >/out/all.txt; sleep infinity"]
    volumes: ["./pages:/pages", "notes:/out"]
volumes:
  pgdata:
  notes: {{}}
"""
QUERY = "psql -h db -tAc 'select sum(price) from goods'"
TESTS = {
    "shared": f'[ "$({QUERY})" = 42 ] && [ "$(cat /notes/all.txt)" = page ] && good=1 || good=0\n',
    "separate": textwrap.dedent(f"""\
        [ "$({QUERY})" = 40 ] || exit 1  # the services of the tests are new
        psql -h db -c "$(cat /logs/artifacts/change.sql)"
        [ "$({QUERY})" = 42 ] && good=1 || good=0
        """),
}
TASK = """\
version = "1.0"
artifacts = ["/logs/artifacts"]

[verifier]
environment_mode = "{mode}"
timeout_sec = 300.0
"""


@pytest.fixture(scope="module")
def archive() -> Path:
    if missing := debian.why_not():
        pytest.skip(missing)
    return debian.archive(ROOT / ".perdure/test-images", PACKAGES)


@pytest.mark.parametrize("mode", ["shared", "separate"])
async def test_a_task_with_postgresql(
    engine: Engine, archive: Path, tmp_path: Path, mode: str
) -> None:
    """The script of the task's folder fills the database, whose data is on a named volume. Tests query
    it by name, after the agent's change or in a new one, and read what another service wrote."""
    if IMAGE not in engine("images", "--format", "{{.Repository}}:{{.Tag}}"):
        engine("import", str(archive), IMAGE)
    change = "update goods set price = price + 2"
    files = {
        "task.toml": TASK.format(mode=mode),
        "instruction.md": "Raise the price.\n",
        "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /opt\n",
        "environment/docker-compose.yaml": COMPOSE,
        "environment/db/Dockerfile": f'FROM {IMAGE}\nCOPY entrypoint.sh /\nENTRYPOINT ["/entrypoint.sh"]\n',
        "environment/db/entrypoint.sh": ENTRYPOINT,
        "environment/sql/init.sql": "create table goods (price int);\ninsert into goods values (40);\n",
        "environment/pages/page.txt": "page\n",
        "solution/solve.sh": "#!/bin/bash\nset -e\nmkdir -p /logs/artifacts\n"
        f"echo '{change}' >/logs/artifacts/change.sql\npsql -h db -c '{change}'\n",
        "tests/test.sh": f"#!/bin/bash\n{TESTS[mode]}echo $good >/logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        path = tmp_path / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "task/environment/db/entrypoint.sh").chmod(0o755)
    services = Services(Settings(home=tmp_path / "home", store=str(tmp_path / "store")))
    (ref,) = (await import_rows(services.store, tmp_path / "task")).refs
    gold, nothing = [
        await played(services, attempt_of(engine, ref, agent)) for agent in ("oracle", "nop")
    ]

    assert (gold.outcome, gold.reward, gold.reason) == ("resolved", 1.0, "")
    assert (nothing.outcome, nothing.reward) == ("unresolved", 0.0)
    assert engine.containers() == []
    if engine.provider.name == "docker":
        assert engine("volume", "ls", "--quiet") == ""
