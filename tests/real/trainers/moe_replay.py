"""A tiny random mixture of experts samples behind the gateway, and a trainer's forward replays its experts.

Prints JSON: the largest difference of a logprob, for what the trainers' own code makes of the exports, and for
forwards that route otherwise.
"""

# mypy: ignore-errors

import asyncio
import contextlib
import json
import random
import sys
import tempfile
import typing
from pathlib import Path
from types import SimpleNamespace

import absent
import httpx
import torch
import typing_extensions

from perdure.engines.function_engine import Ask, Sampled, ServedFunction
from perdure.episodes import trainer_formats
from perdure.episodes.episode import EpisodeParts, EpisodeSegments, build_episode
from perdure.episodes.recorded_messages import conversations
from perdure.episodes.segment_experts import segment_experts
from perdure.episodes.trajectory_segments import cut
from perdure.episodes.turns_parquet import decode
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.testing.local_gateway import LocalGateway, turns_key_of
from perdure.types import FinishReason, Grade, Outcome, Rewards, RolloutRequest, RolloutStatus

LAYERS, TOP_K, EXPERTS, WIDTH = 3, 2, 8, 16
TURNS, TOKENS = 3, 12
WORDS = load_tokenizer("qwen3").encode_plain(" a b c d e f g h i j k l m n o p")
ACCEPTED = frozenset({"temperature", "top_p", "max_tokens", "stop_token_ids", "seed", "top_k"})


class Moe(torch.nn.Module):
    """Causal mean attention, then experts. It samples only `WORDS`, so that its answers are text."""

    def __init__(self) -> None:
        super().__init__()
        self.read = torch.nn.Embedding(151_936, WIDTH)
        self.routers = torch.nn.Parameter(torch.randn(LAYERS, WIDTH, EXPERTS))
        self.experts = torch.nn.Parameter(torch.randn(LAYERS, EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.head = torch.nn.Linear(WIDTH, len(WORDS))

    def forward(self, ids, replayed=None):
        """Logits [L, words] and the experts that were taken [L, layers, top_k]. `replayed`: take these."""
        state, taken = self.read(torch.tensor(ids)), []
        steps = torch.arange(1, len(ids) + 1)[:, None]
        for layer in range(LAYERS):
            state = state + state.cumsum(0) / steps
            state = state / state.norm(dim=-1, keepdim=True)
            scores = (state @ self.routers[layer]).softmax(-1)
            chosen = scores.topk(TOP_K).indices if replayed is None else replayed[:, layer]
            gates = scores.gather(-1, chosen)
            gates = gates / gates.sum(-1, keepdim=True)
            mixed = self.experts[layer][chosen]  # [L, top_k, width, width]
            state = state + torch.einsum("lk,lkij,lj->li", gates, mixed, state).tanh()
            taken.append(chosen)
        return self.head(state), torch.stack(taken, 1)

    def logprobs(self, ids, experts):
        """Of each token after the first, among `WORDS`. The last token's experts decide nothing."""
        rows = torch.as_tensor(experts).long()[: len(ids) - 1]
        return self(ids[:-1], rows)[0].log_softmax(-1)


@torch.no_grad()
def sampler(model):
    async def sample(ask: Ask) -> Sampled:
        ids, logprobs, rows = list(ask.prompt_ids), [], None
        dice = random.Random(str(ids))
        certain = ask.sampling.get("top_p", 1.0) < 1e-3  # a probe
        temperature = 1e-6 if certain else max(ask.sampling["temperature"], 1e-6)
        for _ in range(min(TOKENS, ask.sampling["max_tokens"])):
            logits, taken = model(ids)
            # A cache would hold the experts of the tokens before.
            rows = taken if rows is None else torch.cat([rows, taken[-1:]])
            found = (logits[-1] / temperature).log_softmax(-1)
            word = dice.choices(range(len(WORDS)), found.exp().tolist())[0]
            ids.append(WORDS[word])
            logprobs.append(float(found[word]))
        sampled = ids[len(ask.prompt_ids) :]
        taken = rows.numpy().astype("uint8")
        return Sampled(sampled, logprobs, FinishReason.LENGTH, 1, routed_experts=taken)

    return sample


async def conversation(folder: Path, model):
    """The turns of a session, as the gateway stores them."""
    async with (
        ServedFunction(sampler(model), accepts=ACCEPTED) as engine,
        LocalGateway(folder, engine={"url": engine.url, "kind": "vllm"}) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
    ):
        key = await gateway.open("s")
        messages = []
        for number in range(TURNS):
            messages.append({"role": "user", "content": f"Go on with {number}."})
            answer = await http.post(
                "/v1/chat/completions",
                json={"model": "policy", "messages": messages},
                headers={"authorization": f"Bearer {key}"},
            )
            messages.append(answer.raise_for_status().json()["choices"][0]["message"])
        await gateway.control.close("s")
        return decode((await gateway.store.get(turns_key_of("s"))).data)


def episode(turns) -> EpisodeSegments:
    segments = tuple(cut(turns))
    parts = EpisodeParts(
        request=RolloutRequest(run_id="r", instance="tests/moe"),
        status=RolloutStatus.GRADED,
        grade=Grade(outcome=Outcome.RESOLVED, rewards=Rewards(binary=1.0)),
        started_at=0.0,
        finished_at=1.0,
        turns=turns,
    )
    found = build_episode(parts, segments)
    return EpisodeSegments(found, segments, tuple(segment_experts(turns, segments)))


def by_verl(found: EpisodeSegments):
    """The rows of the whole sequence, as verl's own output aligns them."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    (row,) = trainer_formats.verl_outputs(found)
    return AgentLoopOutput(**row).as_dict()["routed_experts"]


def by_skyrl(found: EpisodeSegments):
    """The rows of the only sequence of SkyRL's batch, which needs no padding."""
    import transformers.modeling_utils  # noqa: F401  # it asks once for FlashAttention

    typing.TypedDict = typing_extensions.TypedDict  # pydantic wants this one below Python 3.12
    absent.stand_in(absent.SKYRL)
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    from perdure.integrations import skyrl

    out = skyrl.generator_output([found])
    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs")
    given = [out[name] for name in names]
    pad_token_id = 0
    made = convert_prompts_responses_to_batch_tensors(
        pad_token_id, *given, out["rollout_expert_indices"]
    )
    *_, experts, _support = made
    return experts[0]


def by_verifiers(found: EpisodeSegments, turns):
    """The rows of a branch of verifiers' own nodes."""
    from verifiers.v1.trace import Branch

    from perdure.integrations import verifiers

    (segment,) = found.segments
    trace = SimpleNamespace(nodes=[], calls=[])
    verifiers._add_branch(trace, turns, conversations(turns), found.experts_of(segment))
    return Branch.routed_experts.fget(SimpleNamespace(nodes=trace.nodes))


@torch.no_grad()
def main(*trainers: str) -> dict:
    torch.manual_seed(0)
    model = Moe()
    with tempfile.TemporaryDirectory() as folder:
        turns = asyncio.run(conversation(Path(folder), model))
    found = episode(turns)
    (segment,) = found.segments
    ids = [*segment.prompt_ids, *segment.response_ids]
    words = {token: word for word, token in enumerate(WORDS)}
    first = len(segment.prompt_ids)

    def differs(experts) -> float:
        """From the engine's logprobs, over the trained tokens."""
        ours = model.logprobs(ids, experts)
        pairs = zip(segment.response_ids, segment.logprobs, segment.loss_mask, strict=True)
        return max(
            abs(float(ours[first + n - 1, words[token]]) - logprob)
            for n, (token, logprob, trained) in enumerate(pairs)
            if trained
        )

    experts = torch.as_tensor(found.experts_of(segment).astype("int64"))
    (sample,) = trainer_formats.slime_samples(found, index=0, group_index=0)
    told = {
        "turns": len(segment.turns),
        "starts": [turn.routed_experts.start for turn in turns],
        "rows": [list(experts.shape), [len(ids) - 1, LAYERS, TOP_K]],
        "slime": differs(sample["rollout_routed_experts"]),
        "a token late": differs(experts.roll(1, 0)),
        "a layer late": differs(experts.roll(1, 1)),
        "other experts": differs((experts + 1) % EXPERTS),
    }
    makers = {
        "verl": by_verl,
        "skyrl": by_skyrl,
        "verifiers": lambda found: by_verifiers(found, turns),
    }
    return told | {name: differs(makers[name](found)) for name in trainers}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        said = main(*sys.argv[1:])
    print(json.dumps(said))
