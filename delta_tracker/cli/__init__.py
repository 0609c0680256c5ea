"""The command line, ``delta-tracker``.

Open ``main.py`` first: it has the group of commands. Each command has a file of its name.
"""
