"""The public row formats: one file each, with `to_instance(row, dataset)`."""
