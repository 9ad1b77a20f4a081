"""Examples below the help of a command."""


def examples(*commands: str) -> str:
    """An epilog that click prints as it stands."""
    return "\b\nExamples:\n" + "\n".join(f"  {command}" for command in commands)
