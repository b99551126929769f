"""How many agents an engine may have.

As many as have contexts that fit into its KV cache, but at least 64 to begin with: an engine with time
to spare reads some prompts again. Once requests wait for KV cache, or are preempted, most of the time, each prompt evicts
what another agent needs next, and the engine does little else. Then one agent fewer may stay at each
health check, until their contexts fit.
"""

import sys
from dataclasses import dataclass

from perdure.engines.clients.vllm_control import Vitals

LEAST_AGENTS, MOST_AGENTS = 64, 128
"""Agents of one engine, the range Anyscale reports; a lack of KV cache may lower it further. The setting
`engine.agents` changes the upper one."""
KV_SHARE = 0.9
"""Share of the KV cache that agents' contexts may fill on average."""
SATURATED = 0.6
"""Share of health checks with such requests, above which an engine has no spare time."""
MEMORY = 0.95
"""Weight of earlier health checks: about twenty are judged together."""


@dataclass
class Capacity:
    """How many agents an engine may have.

    Example:
        capacity = Capacity()
        capacity.observe(Vitals(kv_tokens=4_800_000), agents=40, mean_context=32_000)
        assert capacity.agents == 128
    """

    most: int = MOST_AGENTS
    agents: int = LEAST_AGENTS
    lowered: bool = False
    """The limit was lowered once; agents above it wait at their next turn."""
    _short: float = 0.0
    _preemptions: float | None = None

    def __post_init__(self) -> None:
        self.agents = min(self.agents, self.most)

    @classmethod
    def unlimited(cls) -> "Capacity":
        """For an engine of a trainer, which may have any number of servers and its own scheduler
        behind it."""
        return cls(sys.maxsize, sys.maxsize)

    def observe(self, vitals: Vitals, *, agents: int, mean_context: float) -> None:
        """Adjust to one health check of the engine. `mean_context`: tokens per agent."""
        before, self._preemptions = self._preemptions, vitals.preemptions
        preempted = before is not None and vitals.preemptions > before
        self._short = self._short * MEMORY + (preempted or vitals.starved > 0) * (1 - MEMORY)
        fits = self._fitting(vitals, mean_context)
        if self._short > SATURATED and self.agents > max(fits, 1):
            self.agents, self.lowered = self.agents - 1, True
        elif fits > self.agents:
            self.agents = self.agents + 1 if self.lowered else fits
        elif agents >= self.agents and not (vitals.running or vitals.waiting):
            self.agents = min(self.agents + 1, self.most)

    def _fitting(self, vitals: Vitals, mean_context: float) -> int:
        """Agents whose contexts fit into the KV cache; 0 if unknown."""
        if not (vitals.kv_tokens and mean_context):
            return 0
        return min(int(KV_SHARE * vitals.kv_tokens / mean_context), self.most)
