"""``python -m secateur``: the command."""

from secateur.cli import main

if __name__ == "__main__":
    main()
