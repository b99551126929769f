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
    sql create || true # it exists after the first time
    sql setup-schema -v 0.0 || true
    sql update-schema -d "/etc/temporal/schema/postgresql/v12/$database/versioned"
done
