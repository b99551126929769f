"""Renders an agent's prompt from the instance and a template, which the user may replace."""

from perdure.agents.base import AgentTask

DEFAULT_TEMPLATE = """\
<issue>
{problem_statement}
</issue>

The repository is in {workdir}, your current directory. Change its source code so that the issue is
resolved. Tests that you cannot see decide; do not change existing tests or their configuration.
"""


def render(template: str, task: AgentTask) -> str:
    """Fill `{problem_statement}`, `{workdir}`, `{repo}` and `{instance_id}`. Other braces, in the
    issue text or the template, do not change.
    """
    values = {
        "{workdir}": task.workdir,
        "{repo}": task.instance.repo,
        "{instance_id}": task.instance.instance_id,
    }
    before, *after = (_replace(part, values) for part in template.split("{problem_statement}"))
    return task.instance.problem_statement.join([before, *after])


def _replace(text: str, values: dict[str, str]) -> str:
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text
