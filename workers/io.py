"""`python -m workers.io`: polls for the io role only."""

from workers.process import main

if __name__ == "__main__":
    main("io")
