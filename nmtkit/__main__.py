"""`python -m nmtkit` is the `nmtkit` command; torchrun starts it this way."""

from nmtkit.cli import main

main()
