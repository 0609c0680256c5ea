"""Command line ``delta-tracker``.

Read ``commands.py`` first, which defines the command group. Each command is defined in a file with the command's name.
``main.py`` converts errors to exit codes.
"""
