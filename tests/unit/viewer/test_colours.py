"""Colors of diffs and tokens, windows of logs, and cleaning of texts."""

import pytest

from perdure.episodes.trajectory_segments import cut
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.viewer import diff_colors, hidden_test_logs, token_view
from perdure.viewer.safe_text import folded, marked, readable
from tests.store_with_runs import LOG, PATCH, TEST, turns


def test_lines_of_a_diff() -> None:
    """Position decides the kind of a line: `--- x` within a hunk is a deletion of `-- x`."""
    text = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n--- x\n+++ y\n z\nafter"

    kinds = [line.kind for line in diff_colors.color_diff(text).lines]

    assert kinds == ["file", "file", "file", "hunk", "del", "add", "same", "same"]


@pytest.mark.parametrize(
    ("text", "found"), [(PATCH, True), ("a\n+b\n-c", False), ("@@ -1 +1 @@", True), ("", False)]
)
def test_what_is_a_diff(text: str, found: bool) -> None:
    """The header of a hunk makes a text a diff."""
    assert diff_colors.is_diff(text) == found


def test_an_edit_is_a_diff() -> None:
    """Arguments with an old and a new text are shown as a diff."""
    found = diff_colors.diff_of_edit({"path": "x.py", "old_str": "a\nb", "new_str": "a\nc"})

    assert found is not None
    assert [(line.kind, line.text) for line in found.lines if line.kind != "hunk"] == [
        ("file", "x.py"), ("same", " a"), ("del", "-b"), ("add", "+c"),
    ]  # fmt: skip
    assert diff_colors.diff_of_edit({"old_str": 1, "new_str": "x"}) is None


def test_tokens_are_what_the_trainer_reads() -> None:
    """Mask, logprob and version are the segment's; the tokens together give its text."""
    segment = cut(turns())[-1]
    text = load_tokenizer("qwen3").decode

    found = token_view.page(segment, 0, text)
    response = found[-len(segment.response_ids) :]

    ids = segment.prompt_ids + segment.response_ids
    assert "".join(one.text for one in found) == text(ids)
    assert sum(len(one.ids) for one in found if one.trained) == sum(segment.loss_mask)
    assert {one.shade for one in response if one.trained} == {0, 1, 2, 4}
    assert all(one.shade is None and one.version is None for one in found if not one.trained)


def test_a_character_of_several_tokens_is_whole() -> None:
    """The bytes of one character are shown together, not as broken characters."""
    tokenizer = load_tokenizer("qwen3")
    ids = tuple(tokenizer.encode_plain("𓀀 ok"))
    segment = cut(turns())[0].model_copy(
        update={
            "prompt_ids": ids,
            "response_ids": (),
            "loss_mask": (),
            "logprobs": (),
            "versions": (),
        }
    )

    found = token_view.page(segment, 0, tokenizer.decode)

    assert "".join(one.text for one in found) == "𓀀 ok"
    assert len(ids) > len(found)


@pytest.mark.parametrize(("logprob", "found"), [(0.0, 0), (-0.05, 1), (-0.7, 3), (-9.0, 6)])
def test_shades(logprob: float, found: int) -> None:
    """The less likely a token, the stronger its shade."""
    assert token_view.shade(logprob) == found


def test_a_log_opens_at_the_report_of_the_failure() -> None:
    """Not at the first line that names the test, such as in the list of collected tests."""
    log = f"{TEST} PASSED maybe\n" * 3 + LOG

    found = hidden_test_logs.window(log, TEST)

    assert found.found is not None
    assert "___ test_content_length ___" in log.split("\n")[found.found - 1]
    assert found.start == found.found - hidden_test_logs.BEFORE


def test_a_log_that_does_not_name_the_test_is_shown_at_its_end() -> None:
    """`test_a` does not match `test_ab`."""
    found = hidden_test_logs.window("test_ab failed\n" + "x\n" * 500 + "the end", "test_a")

    assert found.found is None
    assert found.lines[-1].text == "the end"


def test_text_that_deceives_is_made_plain() -> None:
    """Terminal colors are removed; characters that hide or reverse text are replaced."""
    assert readable("\x1b[31mred\x1b[0m\r\n") == "red\n"
    assert readable("a\u202eb\u200bc\x00d\ud800") == "a�b�c�d�"
    assert readable("ünï 漢字 𓀀\t") == "ünï 漢字 𓀀\t"


def test_long_texts_are_folded_whole() -> None:
    """No character is lost between the shown part and the folded one."""
    text = "line\n" * 3000

    found = folded(text)

    assert found.head + found.rest == text
    assert len(found.head) <= 3000


def test_what_a_search_found_is_marked() -> None:
    """Marks inside a text do not unbalance the pieces."""
    assert marked("a \x02b\x03 c", "\x02", "\x03") == [(False, "a "), (True, "b"), (False, " c")]
    assert marked("\x03x\x02y", "\x02", "\x03") == [(False, "\x03x"), (False, "y")]
