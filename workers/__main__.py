"""`python -m workers ROLE ...`: one process that polls for these roles; without any, for every role."""

from workers.process import main

if __name__ == "__main__":
    main()
