"""`python -m anabranch`."""

from anabranch.cli import main

main()
