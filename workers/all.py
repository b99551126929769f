"""`python -m workers.all`: every stage in one process (the laptop's shape)."""

from workers.process import main

if __name__ == "__main__":
    main()
