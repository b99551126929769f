#!/bin/sh
# Creates the namespace and registers our search attributes. Repeating it is safe.
# Needs the `temporal` CLI, TEMPORAL_ADDRESS and TEMPORAL_NAMESPACE.
set -eu
namespace=${TEMPORAL_NAMESPACE:-default}
retention=${RETENTION:-7d} # a closed rollout can be joined by its id for this long

if temporal operator namespace describe -n "$namespace" >/dev/null 2>&1; then
    temporal operator namespace update -n "$namespace" --retention "$retention" >/dev/null
else
    temporal operator namespace create -n "$namespace" --retention "$retention"
fi

tries=60 # it takes some seconds until all of the server knows a new namespace
until known=$(temporal operator search-attribute list -n "$namespace" 2>/dev/null); do
    tries=$((tries - 1))
    [ "$tries" -gt 0 ] || { echo "namespace $namespace does not answer" >&2; exit 1; }
    sleep 1
done

# The same table as in src/perdure/client/search_attribute_keys.py; a test compares them.
while read -r name type; do
    echo "$known" | grep -qw "$name" && continue
    temporal operator search-attribute create -n "$namespace" --name "$name" --type "$type"
done <<TABLE
PerdureRun Keyword
PerdureGroup Keyword
PerdureInstance Keyword
PerdureDataSource Keyword
PerdureAgent Keyword
PerdureStage Keyword
PerdureOutcome Keyword
PerdureFailure Keyword
PerdureSample Int
PerdureAttempt Int
PerdurePolicyVersion Int
PerdureReward Double
TABLE
echo "namespace $namespace is ready"
