"""Command line ``delta-tracker``.

Read ``commands.py`` first, which defines the command group. Each command is defined in the file of the same name.
``main.py`` converts errors to exit codes.
"""
