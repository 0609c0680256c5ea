"""Sets of local row ids on a device, implemented by several engines.

Open ``row_set.py`` first: it has the base class of all engines. ``engines.py`` lists the engines and chooses one.
"""
