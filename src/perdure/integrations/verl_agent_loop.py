"""An agent loop for verl. Only verl imports this module, by `_target_` in `agent_loop_config_path`.

- name: perdure
  _target_: perdure.integrations.verl_agent_loop.PerdureAgentLoop
  run_id: try-1
  agent: mini_swe_agent
"""

from collections.abc import Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase

from perdure.engines.clients.sglang import sampling_params
from perdure.engines.function_engine import Ask, Sampled
from perdure.errors import NoResult
from perdure.integrations import trainer_engine, trainer_hooks, verl
from perdure.integrations.trainer_engine import VLLM_SAMPLING
from perdure.types import FinishReason

OWN = (
    *("trainer_config", "server_manager", "tokenizer", "processor", "hf_model_type"),
    *("dataset_cls", "data_config", "tools", "name"),
)
"""The options that verl passes to every agent loop, including its name in the file. All others are
fields of a rollout."""
SGLANG = "sglang"
MASKED = {"mask": "it counts the reward of each row in the group's baseline"}
IN_STEP = {"drop": "only its asynchronous trainers drop a group with a failed member"}


class PerdureAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl has no types
    """Runs one rollout per sample, sampled by verl's `server_manager`, or by Perdure's engines with the
    option `engine: perdure`.

    The config file registers it. verl's `@register` would replace the file's entry at the first import,
    and all rollouts but the first would lose the file's options.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{name: v for name, v in options.items() if name in OWN})
        fields = {name: value for name, value in options.items() if name not in OWN}
        is_sglang = self.rollout_config.name == SGLANG
        accepts = VLLM_SAMPLING | {"structured_outputs"} if is_sglang else VLLM_SAMPLING
        root = str(self.config.actor_rollout_ref.model.path)
        refused = MASKED if _is_asynchronous(self.config) else MASKED | IN_STEP
        fields, self._without_verdict = trainer_hooks.split_without_verdict(
            fields, "verl", "short", refused
        )
        self._fields, self._engine = trainer_engine.engine_of_run(fields, accepts, root=root)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Any]:
        """One `AgentLoopOutput` per segment. A rollout without a verdict gives none, so verl leaves
        it out of its group; with `without_verdict: drop` it raises NoResult, so verl replaces the
        group. With `rollout.enable_rollout_routing_replay`, a segment without experts
        gives none either. The row names the `instance`, directly or in `extra_info`."""
        step = f"{row.get('global_steps', 0)}-{str(row.get('uid', ''))[:8] or 0}"
        request = trainer_hooks.request_of(
            self._fields,
            step=step,
            instance={**(row.get("extra_info") or {}), **row},
            sample_index=int(row.get("session_id", 0)),
            sampling=trainer_hooks.sampling_of(sampling_params),
        )
        if self._engine is not None:
            await self._engine.use(self._sample)
        found = await trainer_hooks.finished(
            request,
            routed_experts=_replays(self.config),
            replaces=self._without_verdict == "replace",
        )
        if self._without_verdict == "drop" and trainer_hooks.lacks_verdict(found):
            raise NoResult(f"{request.workflow_id} has no verdict, so its group is dropped")
        outputs = [] if found is None else verl.agent_loop_outputs(found)
        for output in outputs:
            if output.routed_experts is not None:
                output.routed_experts = self._shaped(output.routed_experts)
            for name in ("min_global_steps", "max_global_steps"):
                if output.extra_fields[name] is None:
                    output.extra_fields[name] = int(row.get("global_steps", 0))
        return outputs

    async def _sample(self, ask: Ask) -> Sampled:
        """verl routes all calls of a session to one of its servers, by the request id."""
        params = dict(ask.sampling)
        if self.rollout_config.name == SGLANG:
            params = sampling_params("of verl", params)
        output = await self.server_manager.generate(
            ask.session_id or ask.request_id,
            prompt_ids=ask.prompt_ids,
            sampling_params={**params, "logprobs": True},
        )
        about = output.extra_fields
        oldest = about.get("min_global_steps", about.get("global_steps"))
        return Sampled(
            output.token_ids,
            output.log_probs or (),
            self._reason(ask, output.token_ids, output.stop_reason),
            oldest,
            about.get("max_global_steps", oldest),
            output.routed_experts,
            preemptions=output.num_preempted,
        )

    def _reason(self, ask: Ask, ids: Sequence[int], told: str | None) -> FinishReason:
        """verl reports only aborts; it calls both other reasons `completed`."""
        if told in ("abort", "aborted"):
            return FinishReason.ABORT
        return trainer_engine.finish_reason_of(ask, ids, self.rollout_config.max_model_len)

    def _shaped(self, experts: Any) -> Any:
        """The experts in shape [tokens, layers, top_k]. SGLang returns layers and experts in one
        dimension; like verl (`sglang_rollout/async_sglang_server.py`), this takes both sizes from
        the model's configuration."""
        if experts.shape[1] > 1:
            return experts
        from transformers import AutoConfig

        path = self.config.actor_rollout_ref.model.path
        model = AutoConfig.from_pretrained(path)
        return experts.reshape(len(experts), model.num_hidden_layers, model.num_experts_per_tok)


def _is_asynchronous(config: Any) -> bool:
    v1 = getattr(getattr(config, "trainer", None), "v1", None)
    return str(getattr(v1, "trainer_mode", "sync")) != "sync"


def _replays(config: Any) -> bool:
    rollout = getattr(getattr(config, "actor_rollout_ref", None), "rollout", None)
    return bool(getattr(rollout, "enable_rollout_routing_replay", False))
