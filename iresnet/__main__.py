"""`python3 -m iresnet`: the command, from a bare checkout."""

from .cli import main

main()
