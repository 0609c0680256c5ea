"""Command line ``delta-tracker``.

Read ``commands.py`` first: it defines the group of commands. Each command has a file of the same name. ``main.py``
converts errors to exit codes.
"""
