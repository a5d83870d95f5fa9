"""Entry point of `python -m shoal`, which runs the `shoal` command."""

from shoal.cli.main import main

raise SystemExit(main())
