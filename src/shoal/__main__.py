"""Entry point of `python -m shoal`: runs the `shoal` command."""

from shoal.cli.main import main

raise SystemExit(main())
