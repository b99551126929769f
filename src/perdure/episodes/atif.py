"""Converts a rollout to Harbor's Agent Trajectory Interchange Format, from the gateway's record.

All agents give the same form, because this reads no files that an agent wrote. Answers that the
agent did not use and side calls, such as for titles, are left out. `turns.parquet` has the prompts'
token ids.
"""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from perdure.episodes.episode import Episode
from perdure.types import Turn

VERSION = "ATIF-v1.7"
MAIN = "main"
Fields = dict[str, Any]


def trajectory(episode: Episode, turns: Sequence[Turn]) -> Fields:
    """The main chain, which contains each sub-agent's chain. `turns`: at least one that is kept."""
    kept = [turn for turn in turns if turn.purpose.is_of_trajectory and not turn.unused]
    chains = {
        turn.chain: [one for one in kept if one.chain == turn.chain] for turn in kept or turns
    }
    first = MAIN if MAIN in chains else next(iter(chains))
    root = _chain(episode, first, chains.pop(first) or list(turns))
    inside = [_chain(episode, name, found) for name, found in chains.items() if found]
    root["final_metrics"] = {
        "total_prompt_tokens": episode.prompt_tokens,
        "total_completion_tokens": episode.sampled_tokens,
        "total_cached_tokens": episode.cached_tokens,
        "total_steps": len(root["steps"]),
    }
    root["extra"] = {
        "instance": episode.instance,
        "sample_index": episode.sample_index,
        "status": episode.status.value,
        "outcome": episode.outcome.value if episode.outcome else None,
        "reward": episode.reward,
        **episode.audit(),
    }
    return {**root, "subagent_trajectories": inside} if inside else root


def _chain(episode: Episode, name: str, turns: Sequence[Turn]) -> Fields:
    offered = next((turn.tools for turn in reversed(turns) if turn.tools), "[]")
    agent = {
        "name": episode.agent,
        "version": episode.provenance.agent_version or "unknown",
        "model_name": ", ".join(episode.models),
    }
    if tools := json.loads(offered):
        agent["tool_definitions"] = tools
    steps = _steps(turns)
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, start=1)]
    return {
        "schema_version": VERSION,
        "session_id": episode.rollout_id,
        "trajectory_id": f"{episode.rollout_id}#{name}",
        "agent": agent,
        "steps": numbered,
    }


def _steps(turns: Sequence[Turn]) -> list[Fields]:
    """The messages in order. A prompt without a parent turn gives copied context."""
    steps: list[Fields] = []
    calls: dict[str, Fields] = {}
    for place, turn in enumerate(turns):
        copied = bool(place) and turn.parent is None
        for step in _asked(turn, calls):
            steps.append({**step, "is_copied_context": True} if copied else step)
        answer = _answered(turn)
        steps.append(answer)
        calls |= {call["tool_call_id"]: answer for call in answer.get("tool_calls", ())}
    return steps


def _asked(turn: Turn, calls: dict[str, Fields]) -> Iterator[Fields]:
    """The steps for the messages that a turn adds. A tool's result becomes an observation of the
    step that made the call, or a user step if no step made it."""
    for message in json.loads(turn.new_messages or "[]"):
        text = _text(message)
        made_by = calls.get(str(message.get("tool_call_id", "")))
        if message["role"] == "assistant":
            yield {**_said(message), "is_copied_context": True}
        elif message["role"] == "tool" and made_by is not None:
            result = {"source_call_id": message["tool_call_id"], "content": text}
            seen = made_by.setdefault("observation", {"results": []})["results"]
            if result not in seen:
                seen.append(result)
        else:
            yield {"source": "system" if message["role"] == "system" else "user", "message": text}


def _answered(turn: Turn) -> Fields:
    metrics: Fields = {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.sampled_tokens,
    }
    if turn.usage:
        metrics["cached_tokens"] = turn.usage.cached_tokens
    if turn.completion_ids:
        metrics["completion_token_ids"] = list(turn.completion_ids)
        metrics["logprobs"] = list(turn.logprobs)
    step = {**_said(json.loads(turn.answer or "{}")), "metrics": metrics, "llm_call_count": 1}
    if turn.model:
        step["model_name"] = turn.model
    if turn.started_at:
        step["timestamp"] = datetime.fromtimestamp(turn.started_at, UTC).isoformat()
    step["extra"] = {"turn": turn.index, "finish_reason": turn.finish_reason.value}
    if turn.sampling is not None:
        step["extra"]["sampling"] = turn.sampling.model_dump(mode="json")
    return step


def _said(message: Fields) -> Fields:
    """The step for an assistant's message."""
    step: Fields = {
        "source": "agent",
        "message": "" if message.get("placeholder") else _text(message),
    }
    if message.get("reasoning_content"):
        step["reasoning_content"] = message["reasoning_content"]
    if calls := message.get("tool_calls"):
        step["tool_calls"] = [_call(one) for one in calls]
    return step


def _call(call: Fields) -> Fields:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        read = None
    if not isinstance(read, dict):  # the model wrote no JSON object
        read = {"text": arguments}
    return {"tool_call_id": call["id"], "function_name": function["name"], "arguments": read}


def _text(message: Fields) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else json.dumps(content)
