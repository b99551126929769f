"""Google's generateContent: the gateway reads Gemini CLI's requests, and Google's clients can read its
answers."""

import base64
import functools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.dialects.base import MAIN, Answer, ContextExhausted, ModelRequest, Refused
from perdure.dialects.gemini import Gemini, ParsedRequest, dialect_of_url
from perdure.gateway.http.http_app import Patience, create_app
from perdure.testing import local_gateway
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import Faults, ScriptedEngine
from perdure.types import Purpose, Sampling

MODEL = "/v1beta/models/policy"
TOOL = {"name": "ls", "description": "List.", "parametersJsonSchema": {"type": "object"}}
TOOLS = [{"functionDeclarations": [TOOL]}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}}
SCRIPTS = {
    "scripts": [
        {
            "match": "list the files",
            "turns": [
                {
                    "content": "I look.",
                    "reasoning": "Where is it?",
                    "tool_calls": [
                        {"name": "ls", "arguments": {"path": "src"}},
                        {"name": "ls", "arguments": {"path": "tests"}},
                    ],
                },
                {"content": "There are two files."},
            ],
        },
        {"match": "say nothing", "turns": [{"content": "", "reasoning": "Hm."}]},
    ],
    "default": {"turns": [{"content": "Hello."}]},
}
RECORDING = Path(__file__).with_name("gemini_cli_session.json")
CLI = {"user-agent": "GeminiCLI-tui/0.61.0/policy (linux; x64; terminal)"}


def _parse(
    body: dict[str, Any], method: str = "generateContent", headers: dict[str, str] | None = None
) -> ModelRequest:
    return Gemini("m", method, True).parse(json.dumps(body).encode(), headers or {}).request


def _messages(*contents: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return _parse({"contents": list(contents), **fields}).messages


def _user(*parts: Any) -> dict[str, Any]:
    found = [{"text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "parts": found}


def _model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def _called(name: str, **fields: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {}, **fields}}


def _responded(name: str, response: Any = None, **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response or {"output": "x"}, **fields}}


def _answer(**message: Any) -> Answer:
    usage = {"prompt_tokens": 812, "completion_tokens": 64}
    return Answer(
        "chatcmpl-1", 0, "m", {"role": "assistant", "content": "", **message}, "stop", usage
    )


def _framed(answer: Answer, *, thoughts: bool = True) -> dict[str, Any]:
    request = _parse({"contents": [_user("x")]})
    framed: dict[str, Any] = json.loads(ParsedRequest(request, False, thoughts).whole(answer))
    return framed


def _parts(framed: dict[str, Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = framed["candidates"][0]["content"]["parts"]
    return parts


# --- requests --------------------------------------------------------------------------------


def test_the_system_instruction_comes_first() -> None:
    """Its parts become one system message; its role, which Google ignores, is ignored."""
    system = {"role": "user", "parts": [{"text": "You fix code."}, {"text": "Be brief."}]}

    found = _messages(_user("x"), systemInstruction=system)

    assert found[0] == {"role": "system", "content": "You fix code.\nBe brief."}


def test_both_spellings_of_a_field_are_read() -> None:
    """Google's documents write snake case, its clients camel case."""
    snake = {
        "contents": [{"role": "user", "parts": {"text": "x"}}],
        "system_instruction": {"parts": {"text": "You fix code."}},
        "generation_config": {"max_output_tokens": 7, "stop_sequences": ["END"]},
        "tools": [{"function_declarations": [TOOL]}],
    }
    camel = {
        "contents": [_user("x")],
        "systemInstruction": {"parts": [{"text": "You fix code."}]},
        "generationConfig": {"maxOutputTokens": 7, "stopSequences": ["END"]},
        "tools": TOOLS,
    }

    assert _parse(snake) == _parse(camel)


def test_responses_keep_their_order_and_text_follows() -> None:
    """A content with responses and text becomes tool messages and a user message."""
    content = _user(
        _responded("ls", {"output": "two\nlines"}, id="b"),
        _responded("ls", {"error": "no such folder"}, id="a"),
        "Go on.",
    )

    assert _messages(content) == [
        {"role": "tool", "tool_call_id": "b", "content": "two\nlines"},
        {"role": "tool", "tool_call_id": "a", "content": '{"error": "no such folder"}'},
        {"role": "user", "content": "Go on."},
    ]


def test_a_response_without_an_id_answers_the_next_call_of_its_name() -> None:
    """Clients may leave out ids: of results only, or of calls too."""
    calls = [_called("ls", id="c1"), _called("cat"), _called("ls", id="c2")]
    results = [_responded("ls"), _responded("ls"), _responded("cat")]

    found = _messages(_user("x"), _model(*calls), _user(*results))

    made = found[1]["tool_calls"][1]["id"]
    assert [message["tool_call_id"] for message in found[2:]] == ["c1", "c2", made]
    assert not any("name" in message for message in found)


@pytest.mark.parametrize(
    "part",
    [
        {"inlineData": {"mimeType": "image/png", "data": "aGk="}},
        {"fileData": {"mimeType": "image/png", "fileUri": "files/1"}},
    ],
)
def test_an_image_becomes_a_note(part: dict[str, Any]) -> None:
    """The note has the image's position, in a prompt and in a function's response."""
    note = "[image/png not shown: this model reads text]"
    shown = _responded("look", {"output": "1 item"}, id="a", parts=[part])

    found = _messages(_user("What is it?", part), _user(shown))

    assert [message["content"] for message in found] == [f"What is it?\n{note}", f"1 item\n{note}"]


def test_a_models_content_is_one_answer() -> None:
    """Thoughts, text and calls; text that a client split stays as it was sampled."""
    parts: list[dict[str, Any]] = [
        {"text": "Hm.", "thought": True},
        {"text": "I lo"},
        {"text": "ok."},
        _called("ls", id="t", args={"path": "src"}),
    ]

    assistant = _messages(_user("x"), _model(*parts))[1]

    assert assistant == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": "t",
                "type": "function",
                "function": {"name": "ls", "arguments": '{"path": "src"}'},
            }
        ],
    }


def test_functions_are_declared_in_either_schema() -> None:
    """Google's own schema becomes JSON Schema, which engines and templates read."""
    own = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "nullable": True},
            "n": {"anyOf": [{"type": "INTEGER"}, {"type": "ARRAY", "items": {"type": "NUMBER"}}]},
            "names": {"type": "ARRAY", "items": {"type": "STRING"}, "min_items": "1"},
        },
        "required": ["type"],
        "propertyOrdering": ["type", "n", "names"],
    }
    declared = [TOOL, {"name": "own", "parameters": own}, {"name": "bare"}]

    tools = _parse({"contents": [_user("x")], "tools": [{"functionDeclarations": declared}]}).tools

    assert [tool["function"]["parameters"] for tool in tools or ()] == [
        {"type": "object"},
        {
            "type": "object",
            "properties": {
                "type": {"type": ["string", "null"]},
                "n": {
                    "anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "number"}}]
                },
                "names": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            },
            "required": ["type"],
        },
        {"type": "object", "properties": {}},
    ]


def test_the_generation_config_is_read() -> None:
    """Sampling, the token limit, the form of the answer; a hosted engine gets the same."""
    config = {
        "temperature": 1,
        "topP": 0.95,
        "topK": 64.0,
        "seed": 3,
        "maxOutputTokens": 800,
        "stopSequences": ["END"],
        "responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT"},
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 8192},
    }
    sampling = {"temperature": 1, "top_p": 0.95, "top_k": 64, "seed": 3, "stop": ["END"]}

    request = _parse({"contents": [_user("x")], "generationConfig": config})

    assert (request.model, request.sampling, request.max_tokens) == ("m", sampling, 800)
    assert request.body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}},
    }


@pytest.mark.parametrize(
    ("config", "choice"),
    [
        ({"mode": "AUTO"}, None),
        ({"mode": "NONE"}, "none"),
        ({"mode": "ANY"}, "required"),
        (
            {"mode": "ANY", "allowedFunctionNames": ["ls"]},
            {"type": "function", "function": {"name": "ls"}},
        ),
    ],
)
def test_the_tool_choice_is_read(config: dict[str, Any], choice: Any) -> None:
    """Each mode becomes the tool choice of Chat Completions."""
    body = {"contents": [_user("x")], "tools": TOOLS}

    request = _parse({**body, "toolConfig": {"functionCallingConfig": config}})

    assert request.body.get("tool_choice") == choice


@pytest.mark.parametrize(
    ("method", "headers", "asked", "purpose"),
    [
        ("streamGenerateContent", CLI, "x", Purpose.STEP),
        ("generateContent", CLI, "Rate it.", Purpose.SIDE),
        ("generateContent", CLI, "Generate a new <state_snapshot>.", Purpose.COMPACTION),
        ("generateContent", {}, "Generate a new <state_snapshot>.", Purpose.STEP),
    ],
)
def test_the_purpose_follows_from_unambiguous_marks(
    method: str, headers: dict[str, str], asked: str, purpose: Purpose
) -> None:
    """Gemini CLI streams all its steps; other clients may not stream."""
    assert _parse({"contents": [_user(asked)]}, method, headers).purpose is purpose


def test_a_sub_agent_is_a_chain_of_its_own() -> None:
    """Gemini CLI gives it no name, but a tool to end with, and its task."""
    tools = [{"functionDeclarations": [TOOL, {"name": "complete_task"}]}]
    asked = [_user("Find add()."), _model({"text": "Here."}), _user("Go on.")]

    def chain(*contents: dict[str, Any], **fields: Any) -> tuple[str, str]:
        body = {"contents": list(contents), "tools": tools, **fields}
        request = _parse(body, "streamGenerateContent", CLI)
        return request.chain, request.parent_chain

    assert chain(*asked) == chain(asked[0]) != chain(_user("Find sub()."))
    assert chain(*asked)[1] == MAIN != chain(*asked)[0]
    assert chain(*asked, tools=TOOLS) == (MAIN, "")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"contents": "x"}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": [5]}, "contents[0]"),
        ({"contents": [{"role": "system", "parts": [{"text": "x"}]}]}, "contents[0].role"),
        ({"contents": [{"role": "user", "parts": "x"}]}, "contents[0].parts"),
        ({"contents": [_user({"text": 1})]}, "contents[0].parts[0].text"),
        ({"contents": [_user({})]}, "contents[0].parts[0]"),
        ({"contents": [_model({"executableCode": {}})]}, "contents[0].parts[0]"),
        ({"contents": [_model(_called(""))]}, "contents[0].parts[0].functionCall.name"),
        (
            {"contents": [_user({"functionResponse": {"name": "ls", "response": "x"}})]},
            "contents[0].parts[0].functionResponse.response",
        ),
        ({"systemInstruction": "x"}, "systemInstruction"),
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"tools": [{"googleSearch": {}}]}, "tools[0].googleSearch"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        (
            {"tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": 1}}]}]},
            "tools[0].functionDeclarations[0].parameters.type",
        ),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "VALIDATED"}}},
            "toolConfig.functionCallingConfig.mode",
        ),
        (
            {
                "tools": TOOLS,
                "toolConfig": {
                    "functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["a", "b"]}
                },
            },
            "toolConfig.functionCallingConfig.allowedFunctionNames",
        ),
        ({"generationConfig": {"temperature": "hot"}}, "generationConfig.temperature"),
        ({"generationConfig": {"topK": 1.5}}, "generationConfig.topK"),
        ({"generationConfig": {"candidateCount": 2}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"responseLogprobs": True}}, "generationConfig.responseLogprobs"),
        ({"generationConfig": {"speechConfig": {}}}, "generationConfig.speechConfig"),
        (
            {"generationConfig": {"responseModalities": ["TEXT", "IMAGE"]}},
            "generationConfig.responseModalities",
        ),
        (
            {"generationConfig": {"responseMimeType": "text/x.enum"}},
            "generationConfig.responseMimeType",
        ),
        (
            {"generationConfig": {"responseJsonSchema": {"type": "object"}}},
            "generationConfig.responseMimeType",
        ),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], field: str) -> None:
    """Every refusal names the field that is wrong, or that cannot be done."""
    with pytest.raises(Refused) as refused:
        _parse({"contents": [_user("x")], **body})

    error = json.loads(Gemini().error(refused.value))["error"]
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert error["details"][0]["fieldViolations"][0]["field"] == field
    assert field in error["message"]


def test_a_stream_of_another_form_is_refused() -> None:
    """Without `alt=sse` Google's clients expect one list, so they could not read the events."""
    dialect = dialect_of_url(f"{MODEL}:streamGenerateContent", "key=1")
    assert dialect is not None

    with pytest.raises(Refused, match="alt=sse"):
        dialect.parse(json.dumps({"contents": [_user("x")]}).encode(), {})


def test_a_url_names_the_model() -> None:
    """Names may hold slashes and colons, as those of fine-tuned models do."""
    path = "/v1/models/org/policy:7:streamGenerateContent"

    assert dialect_of_url(path, "alt=sse") == Gemini("org/policy:7", "streamGenerateContent", True)
    assert dialect_of_url("/v1/models") is None


# --- answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "reason", "finish_reason"),
    [
        ({"content": "x"}, "stop", "STOP"),
        ({"content": "x"}, "length", "MAX_TOKENS"),
        ({"tool_calls": [CALL]}, "tool_calls", "STOP"),
        ({"tool_calls": [CALL]}, "length", "STOP"),
        ({"content": "x"}, "content_filter", "SAFETY"),
    ],
)
def test_an_answer_has_googles_finish_reason(
    message: dict[str, Any], reason: str, finish_reason: str
) -> None:
    """Clients take other reasons for errors."""
    answer = _answer(**message)

    framed = _framed(Answer(**{**vars(answer), "finish_reason": reason}))

    assert framed["candidates"][0]["finishReason"] == finish_reason
    assert framed["usageMetadata"] == {
        "promptTokenCount": 812,
        "candidatesTokenCount": 64,
        "totalTokenCount": 876,
    }


@pytest.mark.parametrize("thoughts", [True, False])
@pytest.mark.parametrize(
    "message", [{"content": "Text.", "tool_calls": [CALL]}, {"content": "Text."}]
)
def test_reasoning_comes_back_in_the_signature(message: dict[str, Any], thoughts: bool) -> None:
    """Clients drop thoughts, but send signatures back, in either alphabet of base64."""
    answer = _answer(**message, reasoning_content="Hm? 3 > 2 ~ ÿ.")
    parts = [p for p in _parts(_framed(answer, thoughts=thoughts)) if not p.get("thought")]
    (signed,) = [part for part in parts if "thoughtSignature" in part]
    other = base64.urlsafe_b64encode(base64.b64decode(signed["thoughtSignature"])).decode()

    for signature in (signed["thoughtSignature"], other):
        signed["thoughtSignature"] = signature
        assert _messages(_user("x"), _model(*parts))[1] == answer.message


@pytest.mark.parametrize("signature", ["skip_thought_signature_validator", "ÿ", "aGk=", "x"])
def test_a_foreign_signature_is_ignored(signature: str) -> None:
    """Gemini CLI adds a placeholder, and a history may come from another model."""
    call = {**_called("ls", id="t"), "thoughtSignature": signature}

    assert "reasoning_content" not in _messages(_user("x"), _model(call))[1]


def test_thoughts_are_shown_only_if_asked_for() -> None:
    """As Google does: a client that did not ask might take them for the answer."""
    answer = _answer(content="Text.", reasoning_content="Hm.")

    assert [part["text"] for part in _parts(_framed(answer))] == ["Hm.", "Text."]
    assert [part["text"] for part in _parts(_framed(answer, thoughts=False))] == ["Text."]


def test_sampled_arguments_that_are_not_an_object_are_passed_as_text() -> None:
    """`args` is always an object of standard JSON."""
    call = {**CALL, "function": {"name": "ls", "arguments": '{"a": NaN}'}}

    framed = _framed(_answer(tool_calls=[call]))

    assert _parts(framed)[0]["functionCall"]["args"] == {"arguments": '{"a": NaN}'}


def test_an_exhausted_context_has_googles_text() -> None:
    """Clients recognize a full context by this text."""
    error = json.loads(Gemini().error(ContextExhausted(210_000, 200_000)))["error"]

    assert error["message"] == (
        "The input token count (210000) exceeds the maximum number of tokens allowed (200000)."
    )


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "INVALID_ARGUMENT"),
        (401, "UNAUTHENTICATED"),
        (403, "PERMISSION_DENIED"),
        (404, "NOT_FOUND"),
        (408, "DEADLINE_EXCEEDED"),
        (413, "INVALID_ARGUMENT"),
        (415, "INVALID_ARGUMENT"),
        (429, "RESOURCE_EXHAUSTED"),
        (431, "INVALID_ARGUMENT"),
        (500, "INTERNAL"),
        (503, "UNAVAILABLE"),
    ],
)
def test_every_status_has_googles_name(status: int, name: str) -> None:
    """The HTTP status is in the body too, from which clients read it in a stream."""
    refused = Refused(status, "x", "Why.")

    assert Gemini().status(refused) == status
    assert json.loads(Gemini().error(refused)) == {
        "error": {"code": status, "message": "Why.", "status": name}
    }


# --- through the gateway ---------------------------------------------------------------------


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(SCRIPTS) as engine:
        yield engine


@pytest.fixture
async def gateway(tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[LocalGateway]:
    async with LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: LocalGateway) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"x-goog-api-key": await gateway.open("s")}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=60) as client:
        yield client


def _ask(*contents: dict[str, Any], **fields: Any) -> dict[str, Any]:
    config = {"thinkingConfig": {"includeThoughts": True}}
    return {
        "contents": [_user("list the files"), *contents],
        "tools": TOOLS,
        "generationConfig": config,
        **fields,
    }


async def _whole(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(f"{MODEL}:generateContent", json=body)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


async def test_a_stream_adds_up_to_the_whole_answer(client: httpx.AsyncClient) -> None:
    """Its events have the parts of the whole answer, and only the last one has a finish reason."""
    whole = await _whole(client, _ask())
    answer = await client.post(f"{MODEL}:streamGenerateContent?alt=sse", json=_ask())
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-1]]

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [part for event in events for part in _parts(event)] == _parts(whole)
    ends = [event["candidates"][0].get("finishReason") for event in events]
    assert ends == [*[None] * (len(events) - 1), "STOP"]
    assert len(events) == 4


async def test_an_echoed_turn_is_bridged(gateway: LocalGateway, client: httpx.AsyncClient) -> None:
    """A client that drops thoughts, as Gemini CLI does, extends the recorded tokens."""
    parts = _parts(await _whole(client, _ask()))
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    results = [_responded(call["name"], id=call["id"]) for call in reversed(calls)]
    echo = _model(*(part for part in parts if not part.get("thought")))

    await _whole(client, _ask(echo, _user(*results)))

    assert (await gateway.control.get("s")).bridge_misses == {"first": 1}


async def test_counted_tokens_equal_the_turns_prompt(client: httpx.AsyncClient) -> None:
    """Both forms of the call are counted as the turn will be."""
    forms = [_ask(), {"generateContentRequest": {"model": "models/policy", **_ask()}}]
    counts = [await client.post(f"{MODEL}:countTokens", json=form) for form in forms]
    turn = await _whole(client, _ask())

    expected = {"totalTokens": turn["usageMetadata"]["promptTokenCount"]}
    assert [count.json() for count in counts] == [expected, expected]


@pytest.mark.parametrize(
    ("path", "key", "status", "name"),
    [
        (f"{MODEL}:generateContent", "s.0", 401, "UNAUTHENTICATED"),
        (f"{MODEL}:countTokens", "s.0", 401, "UNAUTHENTICATED"),
        (f"{MODEL}:embedContent", "", 404, "NOT_FOUND"),
        ("/v1/files", "s.0", 404, "NOT_FOUND"),
    ],
)
async def test_errors_have_googles_form(
    client: httpx.AsyncClient, path: str, key: str, status: int, name: str
) -> None:
    """A wrong key and an unknown method are errors that Google's clients can read."""
    headers = {"x-goog-api-key": key} if key else {}
    answer = await client.post(path, json=_ask(), headers=headers)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["status"]) == (status, status, name)


async def test_a_closed_session_is_forbidden(
    gateway: LocalGateway, client: httpx.AsyncClient
) -> None:
    """Gemini CLI ends at once on 403, and repeats other refusals for minutes."""
    await gateway.control.close("s")
    answer = await client.post(f"{MODEL}:generateContent", json=_ask())

    assert (answer.status_code, answer.json()["error"]["status"]) == (403, "PERMISSION_DENIED")


async def test_a_full_context_is_refused_before_sampling(
    engine: ScriptedEngine, gateway: LocalGateway
) -> None:
    """The error has both numbers, and no token is sampled."""
    key = await gateway.open("tiny", sampling=Sampling(max_context_tokens=20))
    async with httpx.AsyncClient(base_url=gateway.url, headers={"x-goog-api-key": key}) as client:
        answer = await client.post(f"{MODEL}:generateContent", json=_ask())

    assert answer.status_code == 400
    assert "exceeds the maximum number of tokens allowed (20)" in answer.json()["error"]["message"]
    assert not engine.calls


async def test_models_are_listed_in_googles_form(client: httpx.AsyncClient) -> None:
    """The path or the key's header decides the list's form."""
    lists = [(await client.get(path)).json() for path in ("/v1beta/models", "/v1/models")]

    assert [model["name"] for model in lists[0]["models"]] == ["models/policy"]
    assert lists[0] == lists[1]


@pytest.fixture
async def impatient(
    tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[LocalGateway]:
    """A gateway that sends headers at once, and pings until the answer is ready."""
    app = functools.partial(create_app, patience=Patience(headers_after_s=0, ping_every_s=0.01))
    monkeypatch.setattr(local_gateway, "create_app", app)
    async with LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as gateway:
        yield gateway


async def test_pings_are_white_space_and_a_late_error_is_plain_json(
    impatient: LocalGateway, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google's client reads nothing but `data:` lines, and an error that is not in one."""
    monkeypatch.setattr("perdure.engines.pool.engine_pool.MOST_MOVES", 0)
    url, key = f"{impatient.url}{MODEL}:streamGenerateContent?alt=sse", await impatient.open("s")
    async with httpx.AsyncClient(headers={"x-goog-api-key": key}, timeout=60) as client:
        answer = (await client.post(url, json=_ask())).text
        engine.faults = Faults(kind="status", status=400)
        failure = (await client.post(url, json={"contents": [_user("Again")]})).text

    assert answer.startswith("\n")
    assert all(event.startswith("data: {") for event in answer.strip().split("\n\n"))
    assert failure.startswith("\n")
    assert "the engine" in json.loads(failure)["error"]["message"]


# --- a recorded session ----------------------------------------------------------------------


def test_gemini_cli_sends_answers_back_as_it_got_them() -> None:
    """In what the real client sent, each prompt of an agent is its prompt before, the answer, and the
    results: two parallel calls, one of them for an image, a sub-agent, an edit and a command."""
    requests = json.loads(RECORDING.read_bytes())["requests"]
    histories: dict[str, list[dict[str, Any]]] = {}
    for recorded in requests:
        method = recorded["path"].rpartition(":")[2]
        request = _parse(recorded["body"], method, recorded["headers"])
        if method == "countTokens":
            continue
        before = histories.get(request.chain, [])
        shown = [part for event in recorded["answer"] for part in _parts(event)]
        kept = [part for part in shown if not part.get("thought")]
        answer = _messages(_user("x"), _model(*kept))[1]

        assert request.messages[: len(before)] == before
        assert request.purpose is Purpose.STEP
        histories[request.chain] = [*request.messages, answer]

    main, sub = histories.values()
    told = [message["content"] for message in main if message["role"] == "tool"]
    assert [len(main), len(sub)] == [13, 5]
    assert any("image/png not shown" in message["content"] for message in main)
    assert any("Line 2 subtracts." in text for text in told)
    assert main[2]["reasoning_content"] == "Where is add()?"
