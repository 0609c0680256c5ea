"""The command line, ``delta-tracker``.

Open ``commands.py`` first: it has the group of commands. Each command has a file of the same name; ``main.py`` turns
errors into exit codes.
"""
