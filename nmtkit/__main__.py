"""Makes `python -m nmtkit` run the `nmtkit` command, for torchrun."""

from nmtkit.cli import main

main()
