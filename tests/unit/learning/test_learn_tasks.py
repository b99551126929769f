"""The problems of `make learn`: solvable as the teacher does, and only by reading the file."""

import random
import subprocess
from pathlib import Path

import pytest

from benchmarks.learn import toy_tasks, toy_vocabulary
from perdure.gateway.rendering.message_format import Format, load_format

MADE = toy_tasks.make_tasks(60, 30, 30)
EVERY = (*MADE.lessons, *MADE.training, *MADE.held_out)
ONE_OF_EACH = [
    *(next(task for task in EVERY if task.old == old) for old in toy_tasks.OPERATORS.values()),
    *(next(task for task in EVERY if task.family == family) for family in toy_tasks.FAMILIES),
]


def _typed(folder: Path, task: toy_tasks.Task, commands: tuple[str, ...]) -> bool:
    """Whether the hidden check passes after these commands."""
    for name, content in task.files:
        (folder / name).write_text(content)
    for command in (*commands, toy_tasks.check(task)):
        last = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, check=False)
    return last.returncode == 0


@pytest.mark.parametrize("task", ONE_OF_EACH, ids=lambda task: f"{task.family}-{task.old}")
def test_the_careful_teacher_repairs_and_the_sloppy_one_does_not(
    task: toy_tasks.Task, tmp_path: Path
) -> None:
    """Also for operators that a pattern could read as something else."""
    assert not _typed(tmp_path, task, ())
    assert _typed(tmp_path, task, toy_tasks.careful(task))
    for seed in range(6):
        assert not _typed(tmp_path, task, toy_tasks.sloppy(task, random.Random(seed)))


def test_no_prompt_of_one_set_is_in_another() -> None:
    """The scripted teacher finds its lesson by the prompt, and held-out prompts were never trained."""
    prompts = [task.prompt for task in EVERY]

    assert len(set(prompts)) == len(prompts) == 120


def test_too_many_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="different prompts"):
        toy_tasks.make_tasks(5000, 10, 10)


@pytest.fixture(scope="module")
def model_format(tmp_path_factory: pytest.TempPathFactory) -> Format:
    folder = tmp_path_factory.mktemp("base")
    toy_vocabulary.write(folder)
    return load_format(str(folder), toy_vocabulary.TOOL_CALL_PARSER)


def test_every_value_is_one_token(model_format: Format) -> None:
    """The model copies a name as one token, in a sentence, a command or a file."""
    encode = model_format.tokenizer.encode_plain
    for family in toy_tasks.FAMILIES:
        for value in toy_tasks.VALUES[family]:
            told = toy_tasks.written(family, value)
            (token,) = encode(told)
            for text in (f"want {told}", f"s/{told}/", toy_tasks.content(family, told)):
                assert encode(text).count(token) == 1


def test_any_text_is_encoded_without_loss(model_format: Format) -> None:
    """Tools print what the vocabulary has no word for."""
    text = "cat: zu: No such file or directory\n\tü → 12345 'x' <tool_call>\x00"
    tokenizer = model_format.tokenizer

    assert tokenizer.decode(tokenizer.encode_plain(text)) == text


def test_a_sampled_call_is_read_and_continued(model_format: Format) -> None:
    """The gateway reads the command, and bridges the next turn from the recorded ids."""
    tokenizer, renderer = model_format.tokenizer, model_format.renderer
    prompt = renderer.render_ids([{"role": "user", "content": "FAILED bu want 12"}])
    marks = ("<tool_call>", "</tool_call>", toy_vocabulary.END)
    first, last, end = (tokenizer.convert_tokens_to_ids(mark) for mark in marks)
    command = "sed -i 's/37/12/' bu"
    said = tokenizer.encode_plain(f"{toy_vocabulary.CALL}{command}{toy_vocabulary.CALLED}")
    answer = [first, *said, last, end]
    result = {"role": "tool", "content": '{"returncode": 0, "output": ""}', "tool_call_id": "1"}

    parsed = renderer.parse_response(answer)
    bridged = renderer.bridge_to_next_turn(prompt, answer, [result])

    assert [call.arguments for call in parsed.tool_calls] == [{"command": command}]
    assert bridged is not None
    assert bridged[: len(prompt) + len(answer)] == [*prompt, *answer]
