"""`python -m workers.boot`: polls for the boot role only."""

from workers.process import main

if __name__ == "__main__":
    main("boot")
