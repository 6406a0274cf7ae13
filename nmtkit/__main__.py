"""Makes `python -m nmtkit` run the `nmtkit` command, as torchrun does."""

from nmtkit.cli import main

main()
