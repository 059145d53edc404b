"""The command `fednh`, and `python -m fednh`: `cli.main` in a process of its own, which ends at once."""

from fednh.process import exit_at_once, fewer_collections


def main() -> None:
    fewer_collections()
    with exit_at_once():
        from fednh.cli import main as command

        command()


if __name__ == "__main__":
    main()
