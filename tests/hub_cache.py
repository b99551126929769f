"""The datasets library's cache after it has loaded a set from the hub, so that tests need no network."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def cached(home: Path, owner: str, name: str, rows_of: Sequence[Mapping[str, Any]]) -> None:
    """The dataset as the library left it in its cache when it was loaded from the hub."""
    datasets: Any = importlib.import_module("datasets")
    arrow: Any = importlib.import_module("datasets.arrow_writer")
    folder = home / "datasets" / f"{owner}___{name.lower()}" / "default" / "0.0.0" / ("0" * 40)
    folder.mkdir(parents=True)
    rows = datasets.Dataset.from_list([dict(one) for one in rows_of])
    file = str(folder / f"{name.lower()}-test.arrow")
    writer = arrow.ArrowWriter(path=file, features=rows.features)
    for row in rows:
        writer.write(row)
    writer.finalize()
    split = {"name": "test", "num_bytes": 1, "num_examples": len(rows_of), "dataset_name": name}
    info = datasets.DatasetInfo(
        features=rows.features,
        builder_name="parquet",
        dataset_name=name.lower(),
        config_name="default",
        version="0.0.0",
        splits={"test": split},
    )
    info.write_to_directory(str(folder))
