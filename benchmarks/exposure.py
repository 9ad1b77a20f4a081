"""Write data/exposure.csv: who is affected, over releases and launches, from verdicts and rules."""

from pathlib import Path

import click

from specmortem.affected.matrix import as_csv


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
def main(out: Path) -> None:
    """Write OUT.csv."""
    out.write_text(as_csv(), encoding="utf-8")


if __name__ == "__main__":
    main()
