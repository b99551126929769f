"""`python -m workers.io`: polls the io stage only."""

from workers.process import main

if __name__ == "__main__":
    main("io")
