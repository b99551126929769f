"""The search attributes of rollouts as SDK keys. `temporal_names.SEARCH_ATTRIBUTES` has their types."""

from typing import Any

from temporalio.common import (
    SearchAttributeKey,
    SearchAttributePair,
    SearchAttributeUpdate,
    TypedSearchAttributes,
)

from perdure.types import RolloutRequest

RUN = SearchAttributeKey.for_keyword("PerdureRun")
GROUP = SearchAttributeKey.for_keyword("PerdureGroup")
INSTANCE = SearchAttributeKey.for_keyword("PerdureInstance")
DATA_SOURCE = SearchAttributeKey.for_keyword("PerdureDataSource")
AGENT = SearchAttributeKey.for_keyword("PerdureAgent")
STAGE = SearchAttributeKey.for_keyword("PerdureStage")
OUTCOME = SearchAttributeKey.for_keyword("PerdureOutcome")
"""The grade's outcome, or the status of a rollout without one (failed, truncated, ...)."""
FAILURE = SearchAttributeKey.for_keyword("PerdureFailure")
SAMPLE = SearchAttributeKey.for_int("PerdureSample")
ATTEMPT = SearchAttributeKey.for_int("PerdureAttempt")
POLICY_VERSION = SearchAttributeKey.for_int("PerdurePolicyVersion")
"""The version that the request names, or else the newest version that sampled the rollout."""
REWARD = SearchAttributeKey.for_float("PerdureReward")


def of_rollout(request: RolloutRequest) -> TypedSearchAttributes:
    """The attributes that are known before a rollout starts."""
    pairs: list[SearchAttributePair[Any]] = [
        SearchAttributePair(RUN, request.run_id),
        SearchAttributePair(INSTANCE, request.instance),
        SearchAttributePair(AGENT, request.agent),
        SearchAttributePair(SAMPLE, request.sample_index),
        SearchAttributePair(STAGE, "waiting"),
    ]
    if request.group_id is not None:
        pairs.append(SearchAttributePair(GROUP, request.group_id))
    if request.policy_version is not None:
        pairs.append(SearchAttributePair(POLICY_VERSION, request.policy_version))
    return TypedSearchAttributes(pairs)


def updates_of(request: RolloutRequest) -> list[SearchAttributeUpdate[Any]]:
    """The same attributes, for a workflow that was started by hand and sets them itself."""
    return [pair.key.value_set(pair.value) for pair in of_rollout(request).search_attributes]


def are_set(found: TypedSearchAttributes) -> bool:
    """Whether the client that started the workflow set Perdure's attributes."""
    return any(pair.key == RUN for pair in found.search_attributes)
