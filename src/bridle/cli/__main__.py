"""`python -m bridle.cli`, the same as `bridle`."""

from bridle.cli import main

main()
