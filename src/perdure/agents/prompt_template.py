"""Renders an agent's prompt from the instance and a template, which the user may replace."""

from perdure.agents.base import AgentTask
from perdure.types import Instance, SourceKind

STATEMENT = "{problem_statement}"
COMMANDS = ("/", "!")
"""Agents take a prompt that begins so for a command of their own, and some then call no model."""
ISSUE_TEMPLATE = """\
<issue>
{problem_statement}
</issue>

The repository is in {workdir}, your current directory. Change its source code so that the issue is
resolved. Tests that you cannot see decide; do not change existing tests or their configuration.
"""


def default_template(instance: Instance) -> str:
    """The instance's own template. Without one: an issue, or the statement alone if there is no
    repository."""
    is_issue = instance.source.kind is not SourceKind.EMPTY
    return instance.prompt_template or (ISSUE_TEMPLATE if is_issue else STATEMENT)


def render(template: str | None, task: AgentTask) -> str:
    """Fill `{problem_statement}`, `{workdir}`, `{repo}` and `{instance_id}`. Other braces, in the
    issue text or the template, do not change. `template`: None means `default_template`.
    """
    is_default = template is None
    template = default_template(task.instance) if template is None else template
    values = {
        "{workdir}": task.workdir,
        "{repo}": task.instance.repo,
        "{instance_id}": task.instance.instance_id,
    }
    before, *after = (_replace(part, values) for part in template.split(STATEMENT))
    prompt = task.instance.problem_statement.join([before, *after])
    is_command = is_default and prompt.lstrip().startswith(COMMANDS)
    return f"Task:\n{prompt}" if is_command else prompt


def _replace(text: str, values: dict[str, str]) -> str:
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text
