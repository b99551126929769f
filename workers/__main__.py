"""`python -m workers ROLE ...`: one process that polls for these roles, or for all if none is
given."""

from workers.worker_process import main

if __name__ == "__main__":
    main()
