"""`python -m workers.boot`: polls the boot stage only."""

from workers.process import main

if __name__ == "__main__":
    main("boot")
