"""The work behind the commands: ``bench.py`` behind ``collegium bench``, and so on; ``cli.py`` parses and prints."""
