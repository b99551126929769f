"""A small template for each family, and a tokenizer, trained here, that has the family's control tokens.

The calls are written as the family does; the prose around it is ours. `tests/real/test_families.py` uses templates and
tokenizers as published.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Fast
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

ARGUMENTS = "{{ c.function.arguments | tojson }}"
XML = "{{ v if v is string else v | tojson }}"
PLAIN = "{{ m.content }}"


@dataclass(frozen=True)
class Family:
    """Parts of a template, as Jinja. `m`: a message, `c`: a call, `k` and `v`: an argument."""

    parser: str
    control: str
    """The control tokens, separated by spaces. The first one ends an answer."""
    user: str
    answer: str
    """Opens an answer in the history."""
    call: str
    close: str
    result: str
    calls: tuple[str, str, str] = ("", "", "")
    """Written before, between and after the calls of an answer."""
    results: tuple[str, str] = ("", "")
    """Written before and after consecutive results."""
    tools: str = "{{ tools | tojson }}"
    generate: str = ""
    """Opens the next answer; the same as `answer` if empty."""
    stop: str = ""
    """The end that a model samples, if the template does not write it."""
    one_call: bool = False
    text_beside_calls: bool = True

    @property
    def arguments_as_text(self) -> bool:
        return "arguments + ''" in self.call

    @property
    def template(self) -> str:
        before, between, after = self.calls
        opening, closing = self.results
        text = (
            "{% if tools %}" + self.tools + "{% endif %}"
            "{% for m in messages %}"
            "{% if m.role == 'assistant' %}" + self.answer + "{% if m.tool_calls %}"
            + before + "{% for c in m.tool_calls %}" + self.call
            + "{% if not loop.last %}" + between + "{% endif %}{% endfor %}" + after
            + "{% endif %}" + self.close
            + "{% elif m.role == 'tool' %}"
            "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}" + opening
            + "{% endif %}" + self.result
            + "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}" + closing
            + "{% endif %}{% else %}" + self.user + "{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}" + (self.generate or self.answer.replace(PLAIN, ""))
            + "{% endif %}"
        )  # fmt: skip
        return text.replace("\n", "{{ '\\n' }}")

    def folder(self, parent: Path, name: str = "my-fine-tune") -> Path:
        """A model's folder with a name that does not identify the model."""
        folder = parent / name
        folder.mkdir()
        fast = Fast(BPE())
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
        fast.train_from_iterator([self.template], trainer)
        tokens = self.control.split()
        fast.add_special_tokens([AddedToken(token, special=True) for token in tokens])
        fast.save(str(folder / "tokenizer.json"))
        config = {"eos_token": tokens[0], "chat_template": self.template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder


CHATML = {
    "user": "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n",
    "answer": "<|im_start|>assistant\n{{ m.content }}",
    "close": "<|im_end|>\n",
    "result": "\n<tool_response>\n{{ m.content }}\n</tool_response>",
    "results": ("<|im_start|>user", "<|im_end|>\n"),
}
DEEPSEEK = {
    "user": "<｜User｜>{{ m.content }}",
    "answer": "<｜Assistant｜>{{ m.content }}",
    "calls": ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    "close": "<｜end▁of▁sentence｜>",
    "result": "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
}
DEEPSEEK_CONTROL = (
    "<｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜>"
    " <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <think> </think>"
)
INVOKE = '{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">' + XML
LLAMA = {
    "user": "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>",
    "answer": "<|start_header_id|>assistant<|end_header_id|>\n\n{{ m.content }}",
    "close": "<|eot_id|>",
    "result": "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>",
    "text_beside_calls": False,
}
LLAMA_CONTROL = "<|eot_id|> <|eom_id|> <|start_header_id|> <|end_header_id|> <|python_tag|>"

FAMILIES: dict[str, Family] = {
    "Qwen3": Family(
        "hermes",
        "<|im_end|> <|im_start|> <|endoftext|> <tool_call> </tool_call> <think> </think>",
        call='<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
        + ARGUMENTS
        + "}\n</tool_call>",
        calls=("\n", "\n", ""),
        **CHATML,  # type: ignore[arg-type]  # the parts are typed by their names
    ),
    "Qwen3-Coder, Qwen3.5, Nemotron 3": Family(
        "qwen3_coder",
        "<|im_end|> <|im_start|> <|endoftext|> <tool_call> </tool_call> <think> </think>",
        call="<tool_call>\n<function={{ c.function.name }}>\n"
        "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
        + XML
        + "\n</parameter>\n{% endfor %}</function>\n</tool_call>",
        calls=("\n", "\n", ""),
        **CHATML,  # type: ignore[arg-type]
    ),
    "GLM": Family(
        "glm45",
        "<|endoftext|> <|user|> <|assistant|> <|observation|> <|system|> <tool_call> </tool_call>"
        " <arg_key> </arg_key> <arg_value> </arg_value> <think> </think>",
        user="<|{{ m.role }}|>\n{{ m.content }}",
        answer="<|assistant|>\n{{ m.content }}",
        call="<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>" + XML + "</arg_value>\n{% endfor %}</tool_call>",
        calls=("\n", "\n", ""),
        close="",
        result="\n<tool_response>\n{{ m.content }}\n</tool_response>",
        results=("<|observation|>", ""),
        stop="<|observation|>",
    ),
    "Kimi K2": Family(
        "kimi_k2",
        "<|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|>"
        " <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>",
        user="<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>",
        answer="<|im_assistant|>assistant<|im_middle|>{{ m.content }}",
        call="<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
        + ARGUMENTS
        + "<|tool_call_end|>",
        calls=("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
        close="<|im_end|>",
        result="<|im_system|>{{ m.name or m.role }}<|im_middle|>## Return of {{ m.tool_call_id }}\n"
        "{{ m.content }}<|im_end|>",
    ),
    "DeepSeek V3, R1": Family(
        "deepseek_v3",
        DEEPSEEK_CONTROL,
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n"
        "{{ c.function.arguments + '' }}\n```<｜tool▁call▁end｜>",
        **DEEPSEEK,  # type: ignore[arg-type]
    ),
    "DeepSeek V3.1": Family(
        "deepseek_v31",
        DEEPSEEK_CONTROL,
        call="<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments + '' }}"
        "<｜tool▁call▁end｜>",
        **DEEPSEEK,  # type: ignore[arg-type]
    ),
    "DeepSeek V3.2": Family(
        "deepseek_v32",
        "<｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> ｜DSML｜ <think> </think>",
        call='<｜DSML｜invoke name="{{ c.function.name }}">\n'
        '{% for k, v in c.function.arguments.items() %}<｜DSML｜parameter name="{{ k }}" string="'
        "{{ 'true' if v is string else 'false' }}\">" + XML + "</｜DSML｜parameter>\n{% endfor %}"
        "</｜DSML｜invoke>\n",
        user="<｜User｜>{{ m.content }}",
        answer="<｜Assistant｜>{{ m.content }}",
        calls=("\n\n<｜DSML｜function_calls>\n", "", "</｜DSML｜function_calls>"),
        close="<｜end▁of▁sentence｜>",
        result="\n<result>{{ m.content }}</result>",
        results=("\n\n<function_results>", "\n</function_results>\n\n"),
    ),
    "MiniMax M2": Family(
        "minimax_m2",
        "[e~[ ]~b] ]~!b[ <minimax:tool_call> </minimax:tool_call> <think> </think>",
        user="]~b]{{ m.role }}\n{{ m.content }}[e~[\n",
        answer="]~b]ai\n{{ m.content }}",
        call='<invoke name="{{ c.function.name }}">\n'
        + INVOKE
        + "</parameter>\n{% endfor %}</invoke>\n",
        calls=("\n<minimax:tool_call>\n", "", "</minimax:tool_call>"),
        close="[e~[\n",
        result="\n<response>{{ m.content }}</response>",
        results=("]~b]tool", "[e~[\n"),
    ),
    "gpt-oss": Family(
        "openai",
        "<|return|> <|call|> <|end|> <|start|> <|message|> <|channel|> <|constrain|>",
        user="<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>",
        answer="<|start|>assistant{% if not m.tool_calls %}<|channel|>final<|message|>{{ m.content }}"
        "{% endif %}",
        call=" to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>" + ARGUMENTS,
        close="{% if m.tool_calls %}<|call|>{% else %}<|end|>{% endif %}",
        result="<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>"
        "{{ m.content | tojson }}<|end|>",
        generate="<|start|>assistant",
        one_call=True,
        text_beside_calls=False,
    ),
    "Llama 3": Family(
        "llama3_json",
        LLAMA_CONTROL,
        call='{"name": "{{ c.function.name }}", "parameters": ' + ARGUMENTS + "}",
        calls=("", "; ", ""),
        **LLAMA,  # type: ignore[arg-type]
    ),
    "Llama 4": Family(
        "llama4_pythonic",
        LLAMA_CONTROL,
        call="{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
        "{% if not loop.last %}, {% endif %}{% endfor %})",
        calls=("[", ", ", "]"),
        **LLAMA,  # type: ignore[arg-type]
    ),
    "Mistral": Family(
        "mistral",
        "</s> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        user="[INST]{{ m.content }}[/INST]",
        answer="{{ m.content }}",
        call='{"name": "{{ c.function.name }}", "arguments": '
        + ARGUMENTS
        + ', "id": "{% if c.id | length != 9 %}{{ raise_exception(\'ids have nine letters\') }}{% endif %}{{ c.id }}"}',
        calls=("[TOOL_CALLS] [", ", ", "]"),
        close="</s>",
        result='[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}'
        "[/TOOL_RESULTS]",
    ),
    "Devstral": Family(
        "mistral",
        "</s> [INST] [/INST] [TOOL_CALLS] [ARGS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        user="[INST]{{ m.content }}[/INST]",
        answer="{{ m.content }}",
        call="[TOOL_CALLS]{{ c.function.name }}[ARGS]" + ARGUMENTS,
        close="</s>",
        result="[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
    ),
    "Nemotron Nano v2": Family(
        "nemotron_json",
        "<SPECIAL_12> <SPECIAL_11> <SPECIAL_10> <TOOLCALL> </TOOLCALL>",
        user="<SPECIAL_11>{{ m.role }}\n{{ m.content }}\n",
        answer="<SPECIAL_11>Assistant\n{{ m.content }}",
        call='{"name": "{{ c.function.name }}", "arguments": ' + ARGUMENTS + "}",
        calls=("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
        close="\n<SPECIAL_12>\n",
        result="{{ m.content }}, ",
        results=("<SPECIAL_11>User\n<TOOL_RESPONSE>[", "]</TOOL_RESPONSE>\n\n"),
    ),
}
