"""`python -m workers.all`: every role in one process, as `perdure up` starts it."""

from workers.process import main

if __name__ == "__main__":
    main()
