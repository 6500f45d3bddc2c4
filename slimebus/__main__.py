"""`python -m slimebus` is the `slimebus` command."""

from slimebus.cli import main

main()
