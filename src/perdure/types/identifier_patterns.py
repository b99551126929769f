"""The patterns of identifiers: names of runs and datasets, references to instances."""

import re
from typing import Annotated

from pydantic import StringConstraints

SLUG = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
Slug = Annotated[str, StringConstraints(pattern=SLUG)]
"""A name that is safe in keys, paths and workflow ids: letters, digits, dot, dash, underscore."""


INSTANCE_REF = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}/[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"
InstanceRef = Annotated[str, StringConstraints(pattern=INSTANCE_REF)]
"""Names an instance in the store: `<dataset>/<instance_id>`, e.g. `first-steps/click-8.1.3`."""


_SAFE = re.compile(r"[^A-Za-z0-9._-]+")


def slugify(text: str) -> str:
    """Turn any text into a Slug of at most 128 characters. Each unsafe sequence becomes one
    dash."""
    slug = _SAFE.sub("-", text).strip("-._")[:128]
    return slug or "x"
