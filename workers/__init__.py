"""What polls which task queue with how many slots."""

from perdure import lean_imports

lean_imports.for_no_terminal("structlog")  # here, as every program of workers comes through here
