"""`python -m locater`."""

from locater.cli import main

if __name__ == "__main__":
    main()
