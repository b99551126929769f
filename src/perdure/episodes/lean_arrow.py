"""pyarrow for a child process of a gateway or a worker, which needs little of it.

What is set here holds for a whole process. In any other, numpy, pandas and pyarrow's memory may be
somebody else's, so there nothing is set.
"""

import os

from perdure import lean_imports
from perdure.apart.child import is_child


def set_up() -> None:
    """Import pyarrow so that it takes little memory; repeating is harmless.

    Its own allocator keeps memory for each thread. It imports numpy (8 MB), and before its first value
    pandas, wherever these are installed and can be found just then. Without numpy its conversions from
    and to numpy and pandas do not work for the rest of the process.
    """
    if not is_child():
        return
    os.putenv("ARROW_DEFAULT_MEMORY_POOL", "system")  # read when pyarrow first needs memory
    with lean_imports.without("numpy", "pandas"):
        import pyarrow

        pyarrow.array([0])
