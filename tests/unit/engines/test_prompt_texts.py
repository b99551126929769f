"""Prompts as JSON: whatever is kept of earlier ones, the text says exactly these ids."""

import json
import random
from array import array

from perdure.engines.clients.prompt_texts import MOST_PARTS, SHORT, PromptTexts


def _said(texts: PromptTexts, session: str, ids: "array[int]") -> list[int]:
    found: list[int] = json.loads(b"".join(texts.of(session, ids)))
    return found


def test_a_prompt_is_written_as_it_is_whatever_came_before() -> None:
    """Longer, cut, changed at any place, equal, and of two sessions in turn."""
    dice = random.Random(0)
    texts = PromptTexts()
    prompts = {"a": array("i", range(SHORT)), "b": array("i", range(SHORT, 3 * SHORT))}
    for _ in range(200):
        session = dice.choice("ab")
        prompt = prompts[session][:]
        match dice.randrange(4):
            case 0:
                prompt[dice.randrange(len(prompt))] += 1
            case 1:
                del prompt[dice.randrange(len(prompt)) :]
            case 2:
                prompt.extend(dice.choices(range(151_936), k=dice.choice((1, 500, SHORT))))
            case _:
                pass
        prompts[session] = prompt

        assert _said(texts, session, prompt) == prompt.tolist()


def test_a_prompt_that_its_owner_changes_afterwards_is_not_taken_for_the_old_one() -> None:
    """The kept ids are a copy, so the proof compares with what was written."""
    texts, prompt = PromptTexts(), array("i", range(SHORT))
    texts.of("s", prompt)
    prompt[5] = 77
    prompt.append(1)

    assert _said(texts, "s", prompt) == prompt.tolist()


def test_only_the_end_of_a_longer_prompt_is_written() -> None:
    """The parts before it are the same objects; they are joined before they become many."""
    texts, prompt = PromptTexts(), array("i", range(SHORT))
    first = texts.of("s", prompt)
    prompt = prompt + array("i", [7, 8])
    second = texts.of("s", prompt)

    assert any(one is first[2] for one in second)
    for token in range(2 * MOST_PARTS):
        prompt = prompt + array("i", [token])
        assert len(texts.of("s", prompt)) <= MOST_PARTS + 2
    assert _said(texts, "s", prompt) == prompt.tolist()


def test_what_is_kept_is_bounded() -> None:
    """The session that asked longest ago is written whole again."""
    prompt = array("i", range(SHORT))
    texts = PromptTexts(kept_bytes=3 * SHORT * 9)
    first = texts.of("0", prompt)
    for number in range(1, 9):
        texts.of(str(number), prompt)

    assert texts._weight <= 3 * SHORT * 9
    assert texts._weight == sum(one.weight for one in texts._known.values())
    again = texts.of("0", prompt)
    assert again == first
    assert again[2] is not first[2]


def test_ids_of_any_sequence_are_the_same_text() -> None:
    """Lists, and arrays of wider numbers; also none at all."""
    for ids in ([], [5, 6], list(range(SHORT + 3))):
        texts = PromptTexts()
        said = [b"".join(texts.of("s", one)) for one in (ids, array("i", ids), array("q", ids))]

        assert said == [json.dumps(ids, separators=(",", ":")).encode()] * 3
