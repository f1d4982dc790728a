"""``python -m bellmask`` is the ``bellmask`` command."""

from bellmask.cli import main

if __name__ == "__main__":
    main()
