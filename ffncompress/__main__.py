"""`python -m ffncompress`, which torchrun needs."""

from ffncompress.cli import main

if __name__ == "__main__":
    main()
