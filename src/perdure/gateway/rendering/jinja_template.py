"""A Jinja environment as chat templates expect it (see "Chat templates" in transformers' docs)."""

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateError(ValueError):
    """The template refused the messages. The text is the template's own."""


class JinjaTemplate:
    """One compiled chat template.

    Example: JinjaTemplate("{{ bos_token }}...", {"bos_token": "<s>"}).render(messages=[...])
    """

    def __init__(self, text: str, variables: dict[str, Any] | None = None) -> None:
        """Raises: TemplateError if `text` is not valid Jinja."""
        self.text = text
        self._variables = variables or {}
        try:
            self._template = _environment().from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {error.message}") from error

    def render(self, **given: Any) -> str:
        """Raises: TemplateError, also if the template fails on values that it does not expect."""
        try:
            return self._template.render(**self._variables, **given)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateError(str(error)) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)
