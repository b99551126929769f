#!/bin/sh
# Creates or upgrades both databases of a Temporal server on PostgreSQL. Repeating it is safe.
# Runs in temporalio/admin-tools; needs POSTGRES_SEEDS, DB_PORT, POSTGRES_USER, SQL_PASSWORD.
set -eu

for database in temporal visibility; do
    name=temporal
    [ "$database" = visibility ] && name=temporal_visibility
    sql() {
        temporal-sql-tool --plugin postgres12 --ep "$POSTGRES_SEEDS" -p "$DB_PORT" \
            -u "$POSTGRES_USER" --db "$name" "$@"
    }
    versions="/etc/temporal/schema/postgresql/v12/$database/versioned"
    sql create || true # it exists after the first time
    # setup-schema would reset an existing database to version 0.0, so run it only on a new one.
    sql update-schema -d "$versions" || {
        sql setup-schema -v 0.0
        sql update-schema -d "$versions"
    }
done
