"""Reads the rows that a recipe names, and applies the recipe's rules to them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perdure.errors import ConfigurationError, InstanceError
from perdure.instances.recipes.dataset_recipe import FROM_ROW, UNVERIFIED, PublishedRows, Recipe
from perdure.instances.rows import image_rules
from perdure.instances.rows.row_fields import Row
from perdure.instances.rows.row_readers import Hub, NumberedRow, read_hub, read_rows
from perdure.types import Instance


@dataclass(frozen=True)
class PublicSet:
    """A recipe with [rows], and the place of its rows."""

    recipe: Recipe
    folder: Path
    """The recipe's folder."""
    elsewhere: str = ""
    """A file or folder with the rows; empty: the place that the recipe names."""

    @property
    def rows(self) -> PublishedRows:
        """Raises: ConfigurationError if the recipe has no [rows]."""
        if self.recipe.rows is None:
            raise ConfigurationError(
                f"{self.recipe.name} is built, not imported: `perdure instances build {self.recipe.name}`"
            )
        return self.recipe.rows

    def read(self) -> Iterator[NumberedRow]:
        """Each row with the format and the image that the recipe gives it.

        Raises: ConfigurationError, MissingDependency.
        """
        for row in self._stored():
            yield row if row.problem else row._replace(fields=self._completed(row))

    def finished(self, instance: Instance) -> Instance:
        """The instance with the dataset's defaults. Raises: InstanceError if its fields choose a
        grader that the recipe does not allow."""
        protocol = instance.grading.protocol
        if protocol not in self.rows.graders:
            raise InstanceError(
                f"{instance.ref}: its fields select the grader {protocol!r}, but {self.recipe.name} "
                f"allows only {', '.join(self.rows.graders)}: change the row or `rows.graders`"
            )
        return self.recipe.apply_defaults(instance)

    def _stored(self) -> Iterator[NumberedRow]:
        rows = self.rows
        if self.elsewhere:
            yield from read_rows(self.elsewhere)
        elif rows.hub is not None:
            revision = None if rows.revision == UNVERIFIED else rows.revision
            yield from read_hub(Hub(rows.hub, rows.split, revision, rows.config))
        for name in () if self.elsewhere else rows.files:
            yield from read_rows(self.folder / name)

    def _completed(self, row: NumberedRow) -> dict[str, object]:
        fields = {**self.rows.defaults, **row.fields}
        if not fields.get("data_source"):
            fields["data_source"] = self.rows.format
        if self.rows.image != FROM_ROW and not any(
            fields.get(name) for name in image_rules.IMAGE_FIELDS
        ):
            fields["image"] = image_rules.rule_named(self.rows.image)(Row(row.number, fields))
        return fields
